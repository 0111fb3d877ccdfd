"""Rates of links: estimates from transfers, and the probe of an uplink.

A rate is a number of bytes per second of *busy* time. A link is busy while requested bytes are
under way: from the first to the last chunk of a burst. A link is not busy while the other side
cannot send (`pause`). So the first chunk after a pause starts a measurement and is not counted. A
burst of one chunk yields no measurement.

* A receiver measures the link to its parent, and sizes the credit window by the rate. The receiver
  adds each chunk on arrival, and pauses when all requested chunks have arrived or the parent sends
  Waiting.
* A sender measures its **uplink**, the rate to all children together. The sender adds acknowledged
  bytes, and pauses when no child fetches. The uplink is not the limit while all held chunks have
  been sent, and while there is only one child. If the uplink was not the limit during most of a
  sample, the sample shows only a lower bound of the uplink's rate. Other samples may also be low,
  because TCP lost time. So the estimate falls only after LOWER_SAMPLES low samples in a row, and
  then to the highest of these samples. Otherwise the plan would oscillate.
* A receiver's **downlink** is usually faster than the measured rate, because the parents are
  slower. `topology/sites.py` decides when the downlink is the limit.

**Probe.** Before a node serves a child, a few messages of growing size measure the node's uplink.
"""

from __future__ import annotations

import math

from echo.wire.actions import Action, Send
from echo.wire.codec import encode
from echo.wire.messages import Probe, ProbeAck

SAMPLE_S = 0.1
"""Shortest time, in seconds, that a link must be busy for one sample."""

SAMPLE_CHUNKS = 4
"""Smallest number of chunks in a sample. With fewer chunks, rounding would dominate the rate."""

UPLINK_SAMPLE_S = (2.0, 5.0)
"""Shortest time, in seconds, that an uplink must be busy for one sample of its rate.

The first value applies to samples with at least UPLINK_SAMPLE_ACKS acknowledgements. The second
value applies to all other samples.
"""

UPLINK_SAMPLE_ACKS = 128
"""Number of acknowledgements that a short sample of an uplink must have.

Children acknowledge several chunks at once. So in a short sample with few acknowledgements, chance
dominates the rate.
"""

IDLE_SHARE = 0.25
"""Largest mean share of children that the uplink does not limit. If a sample exceeds this share,
its rate is only a lower bound of the uplink's rate.

The sender passes each new share to `UplinkEstimate.wait`. The mean is taken over the time of the
sample.
"""

LOWER_SAMPLES = 4
"""The estimate falls after this number of samples in a row that are below the estimate."""

RISE_S = 4.0
"""Time constant of a rising estimate: busy time, in seconds, in which the weight of the former
estimate falls to 1/e.
"""

RATE_WINDOW_S = 1.0
"""Busy time, in seconds, in which the weight of an old sample falls to 1/e."""

MOST_BYTES_PER_S = 1e12
"""Largest estimate, in bytes per second. Clocks are too coarse to measure higher rates."""


class RateEstimate:
    """An estimate of a link's rate, in bytes per second of busy time.

    Older samples have less weight.
    """

    def __init__(self) -> None:
        """Start with no samples and no estimate."""
        self._rate: float | None = None
        self._last_at: float | None = None
        self._began_at = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0.0
        self._num_chunks = 0

    @property
    def bytes_per_s(self) -> float | None:
        """The estimated rate in bytes per second; None before the first sample is complete."""
        return self._rate

    @property
    def is_paused(self) -> bool:
        """Whether the link has paused.

        If it has, the next chunk starts a new measurement, and the bytes of that chunk are not
        counted.
        """
        return self._last_at is None

    def add(self, num_bytes: float, *, now: float, since: float = math.inf) -> None:
        """Add arrived bytes. Bytes that end a pause start a measurement and are not counted.

        Args:
            num_bytes: number of bytes that have arrived.
            now: time at which the last byte arrived.
            since: time at which the first byte arrived, if the bytes arrived over a period.
        """
        if self._last_at is None:
            self._last_at = self._began_at = now
            return
        if since < self._began_at <= now:
            # Count only the share of these bytes that was sent after the sample began.
            num_bytes *= (now - self._began_at) / (now - since)
        self._busy_s += max(0.0, now - self._last_at)
        self._last_at = now
        self._num_bytes += num_bytes
        self._num_chunks += 1
        if self._num_chunks >= SAMPLE_CHUNKS and self._busy_s >= self._least_s(self._num_chunks):
            sample = min(self._num_bytes / self._busy_s, MOST_BYTES_PER_S)
            self._rate = self._learn(self._rate, sample, self._busy_s)
            self._busy_s, self._num_bytes, self._num_chunks = 0.0, 0.0, 0

    def pause(self) -> None:
        """Record that no bytes are under way until the next chunk.

        The time until the next chunk is not busy time.
        """
        self._last_at = None

    def _least_s(self, num_chunks: int) -> float:
        return SAMPLE_S

    def _learn(self, rate: float | None, sample: float, busy_s: float) -> float:
        return sample if rate is None else _towards(sample, rate, busy_s / RATE_WINDOW_S)


class UplinkEstimate(RateEstimate):
    """An estimate of the rate at which a node can send to all its children together.

    The children's acknowledgements measure the rate.
    """

    def __init__(self) -> None:
        """Start with no samples and no estimate."""
        super().__init__()
        self._share = self._shared_at = self._waited_s = 0.0
        self._lower: list[float] = []
        self.is_measured = False
        """Whether the uplink was the limit in at least one sample; if not, the estimate is a lower
        bound."""

    def wait(self, share: float, *, now: float) -> None:
        """From now on, assume that the uplink does not limit this share of the children, 0 to 1."""
        if not self.is_paused:
            since = max(self._shared_at, self._began_at)
            self._waited_s += self._share * max(0.0, now - since)
        self._share, self._shared_at = share, now

    def show(self, bytes_per_s: float) -> None:
        """Raise the estimate to a rate that was measured, for example by a probe."""
        self._rate = bytes_per_s if self._rate is None else max(self._rate, bytes_per_s)

    def _least_s(self, num_chunks: int) -> float:
        return UPLINK_SAMPLE_S[num_chunks < UPLINK_SAMPLE_ACKS]

    def _learn(self, rate: float | None, sample: float, busy_s: float) -> float:
        idle_share, self._waited_s = self._waited_s / busy_s, 0.0
        was_limit = idle_share <= IDLE_SHARE
        self.is_measured |= was_limit
        if rate is None:
            return sample
        if sample >= rate:
            self._lower.clear()
            return _towards(sample, rate, busy_s / RISE_S)
        if was_limit:
            self._lower.append(sample)
        if len(self._lower) < LOWER_SAMPLES:
            return rate
        rate = max(self._lower)
        self._lower.clear()
        return rate


def _towards(sample: float, rate: float, age: float) -> float:
    """Return the average of a sample and an older rate; the older rate has the weight exp(-age)."""
    return rate + (1 - math.exp(-age)) * (sample - rate)


# --- uplink probe: one message, and the time in which it arrives ----------------------------------
#
#     node  -> parent    Probe, with meaningless bytes
#     parent -> node     ProbeAck
#
# Transfers measure the uplinks of nodes that serve children, up to the rate at which the children
# receive. A fleet that has just joined is planned as if all uplinks were equal. Then slow nodes
# delay fast ones, whose uplinks are never measured in full. bench/bench_swarm.py sends versions to
# three such fleets over real TCP: log-normal, 80/20 and half NAT. Without probes, first versions
# got 0.36, 0.25 and 0.73 of the rate that the uplinks allow. With probes they got 0.58, 0.71 and
# 0.72: one run each, in bench/results/swarm_no_probes_2cpu_20261130.json and swarm_probes_*.
#
# So a node that can serve, and whose uplink has not been the limit of a transfer, sends a probe up
# its control link when the learner welcomes it, and when it holds a version. The learner sends its
# own probe a heartbeat after a node has reported a result, so the two probes are never under way
# together. After a probe that is acknowledged within QUICK_S, a probe four times as large follows,
# up to MAX_PROBE_BYTES. On a slow link the first probe is enough, and other messages of the node
# wait for one second at most. The measured time includes the round trip and the start of a
# connection, so a probe never overestimates. It underestimates a fast link, and transfers raise the
# estimate. Other traffic lowers the result of a probe, so it is repeated after the next versions,
# MAX_PROBES times in all.

FIRST_BYTES, MAX_PROBE_BYTES = 256 << 10, 4 << 20
"""Size of the first and of the largest probe, in bytes. At 10 Mbit/s the first probe takes 0.2 s.
At 1 Gbit/s the largest takes 34 ms, so the round trip hides the rate of faster links.
"""
GROWTH = 4
"""Factor from one probe to the next. With this factor two further probes reach MAX_PROBE_BYTES."""
QUICK_S = 0.25
"""If a probe is acknowledged within this number of seconds, a larger probe follows. The larger
probe takes at most GROWTH times as long, so it delays other messages by at most one second.
"""
PAYLOAD_SHARE = 1 / 8
"""Largest size of a probe, as a share of the size of a version."""
MAX_PROBES = 3
"""Largest number of begun measurements. A single result may be low because of other traffic. Each
further measurement delays the node's other messages again.
"""
UNANSWERED_S = 3.0
"""Seconds to wait for the answer to a probe. After this time, a different peer may be probed."""


class UplinkProbe:
    """Measures the uplink of this node by sending probes."""

    def __init__(self, uplink: UplinkEstimate, *, node_id: str) -> None:
        """Start with no probe sent; the results of probes raise the estimate `uplink`."""
        self._uplink = uplink
        self._node_id = node_id
        self.num_probes = 0
        """Number of begun measurements. A measurement starts with a small probe, and larger probes
        follow while acknowledgements come fast.
        """
        self._awaited: tuple[str, int, float] | None = None
        """(peer that must acknowledge the probe, bytes of the probe, time of sending); None if no
        probe is under way."""
        self._most_bytes = 0

    def begin(self, peer: str, *, payload_bytes: int, now: float) -> list[Action]:
        """Send a probe to `peer` if the uplink is unknown and no probe is under way.

        Args:
            peer: the link to the node that acknowledges the probe.
            payload_bytes: size of a version. For a small version no probe is sent, because a probe
                would cost more than a bad plan.
            now: the present time.
        """
        self._most_bytes = min(MAX_PROBE_BYTES, int(PAYLOAD_SHARE * payload_bytes))
        is_under_way = self._awaited is not None and (
            self._awaited[0] == peer or now < self._awaited[2] + UNANSWERED_S
        )
        is_known = self._uplink.is_measured or self.num_probes >= MAX_PROBES
        if is_under_way or is_known or self._most_bytes < FIRST_BYTES:
            return []
        self.num_probes += 1
        return self._send(peer, FIRST_BYTES, now)

    def _send(self, peer: str, num_bytes: int, now: float) -> list[Action]:
        self._awaited = peer, num_bytes, now
        return [Send(peer, encode(Probe(), [bytes(num_bytes)], source=self._node_id))]

    def acknowledged(self, peer: str, *, now: float) -> list[Action]:
        """Raise the estimate when `peer` acknowledges a probe.

        After a fast acknowledgement, send a larger probe. An acknowledgement that is not awaited is
        ignored.
        """
        if self._awaited is None or self._awaited[0] != peer:
            return []
        _, num_bytes, sent_at = self._awaited
        self._awaited = None
        took_s = now - sent_at
        self._uplink.show(num_bytes / max(took_s, 1e-3))
        if took_s > QUICK_S or num_bytes >= self._most_bytes:
            return []
        return self._send(peer, min(GROWTH * num_bytes, self._most_bytes), now)


def acknowledge(peer: str, *, source: str) -> list[Action]:
    """Return the action that acknowledges a probe that `peer` has sent."""
    return [Send(peer, encode(ProbeAck(), source=source))]
