"""What is learned of a link: its rate, and the credit window that follows.

A rate is bytes over *busy* time: time in which more was wanted than had come. Between the arrivals
of two chunks of one burst a link is busy; before the first of them, and while the other side has
nothing to give (`pause`), it is not. So the first chunk after a pause only starts the clock, and a
burst of one chunk says nothing.

Who measures what:

* A receiver measures each lane and sizes its window by it: chunks as they arrive, `pause` when all
  that was asked for has come or the parent says Waiting.
* A sender measures its **uplink**, all children together: bytes as they are acknowledged, `pause`
  when no child fetches anything. Children that have been sent all that is here, or one alone, may
  be the limit themselves: a sample in which most of the time passed like that only shows that the
  uplink is *at least* that good. One in which the uplink was the limit may still be low, as where
  TCP lost time: only so many of them in a row lower the estimate, to the best of them. A plan that
  forgets what an uplink has shown wanders for ever.
* A receiver's **downlink** cannot be read from what it receives: as a rule its parents are slower.
  `downlinks.py` tells when it is a limit.
"""

from __future__ import annotations

import math

SAMPLE_S = 0.1
"""Busy time that makes one sample, at least."""

SAMPLE_CHUNKS = 4
"""Chunks that make one sample, at least: coarser than that, a rate is a matter of rounding."""

UPLINK_SAMPLE_S = (2.0, 5.0)
"""Busy time that makes one sample of an uplink with many acknowledgements, and with few."""

UPLINK_SAMPLE_ACKS = 128
"""So many are many. Each child acknowledges several chunks at once, at a time of its own: over
fewer a rate is a matter of chance, and the highest of them far too high."""

IDLE_SHARE = 0.25
"""Share of its time that children may wait in a sample whose limit was the uplink."""

LOWER_SAMPLES = 4
"""So many samples in a row, each lower though the uplink was the limit, show that it is lower."""

RISE_S = 4.0
"""Busy time after which a lower estimate of an uplink weighs 1/e of what it did."""

LOOP_S = 0.001
"""What a busy node takes to answer, beside the round trip of the network."""

MEMORY_S = 1.0
"""Busy time after which an old sample weighs 1/e of what it did."""

MOST_BYTES_PER_S = 1e12
"""Bound of an estimate: no clock is fine enough to prove more."""


class RateEstimate:
    """Bytes per second over busy time, averaged with exponential weights; of constant size."""

    def __init__(self) -> None:
        """Know nothing."""
        self._rate: float | None = None
        self._last_at: float | None = None
        self._began_at = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0.0
        self._num_chunks = 0

    @property
    def bytes_per_s(self) -> float | None:
        """The estimate; None before the first sample is complete."""
        return self._rate

    @property
    def is_paused(self) -> bool:
        """Whether the next chunk only starts the clock."""
        return self._last_at is None

    def add(self, num_bytes: float, *, now: float, since: float = math.inf) -> None:
        """Count bytes that have come through; the first after a pause only start the clock.

        Args:
            num_bytes: how many.
            now: when the last of them came.
            since: when the first of them came, if not all at once.
        """
        if self._last_at is None:
            self._last_at = self._began_at = now
            return
        if since < self._began_at < now:
            # Of many children's lumps all but one would count whole, as if sent since then.
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
        """Note that nothing is under way: the time until the next chunk does not count."""
        self._last_at = None

    def _least_s(self, num_chunks: int) -> float:
        """Return the busy time that makes a sample of so many chunks."""
        return SAMPLE_S

    def _learn(self, rate: float | None, sample: float, busy_s: float) -> float:
        """Return the estimate after a sample."""
        return sample if rate is None else _towards(sample, rate, busy_s / MEMORY_S)


class UplinkEstimate(RateEstimate):
    """What a node can send to all its children together, as they acknowledge it."""

    def __init__(self) -> None:
        """Know nothing."""
        super().__init__()
        self._share = self._shared_at = self._waited_s = 0.0
        self._lower: list[float] = []
        self.is_measured = False
        """Whether it has been the limit, so that the estimate is more than a lower bound."""

    def wait(self, share: float, *, now: float) -> None:
        """Note which share of the children, 0 to 1, waits from now on for other than the uplink."""
        if not self.is_paused:
            since = max(self._shared_at, self._began_at)
            self._waited_s += self._share * max(0.0, now - since)
        self._share, self._shared_at = share, now

    def show(self, bytes_per_s: float) -> None:
        """Note that so much has been sent, by whatever way."""
        self._rate = bytes_per_s if self._rate is None else max(self._rate, bytes_per_s)

    def _least_s(self, num_chunks: int) -> float:
        """Return the busy time that makes a sample of so many acknowledgements."""
        return UPLINK_SAMPLE_S[num_chunks < UPLINK_SAMPLE_ACKS]

    def _learn(self, rate: float | None, sample: float, busy_s: float) -> float:
        """Return the estimate after a sample."""
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
    """Return a rate that forgets: its past weighs 1/e of what it did after an age of 1."""
    return rate + (1 - math.exp(-age)) * (sample - rate)


def window_bytes(
    rate: float | None, rtt_s: float | None, chunk_bytes: int, *, first: int, most: int
) -> int:
    """Return how many bytes a receiver should have asked for at a time.

    One bandwidth-delay product keeps the link full; half of one more lets the estimate grow where
    the window itself was the limit; two chunks are under way at the ends. More would lie in the
    queue of a slow uplink, before all that comes later.

    Args:
        rate: bytes per second of this link; None if not known yet.
        rtt_s: its round trip; None if not known yet.
        chunk_bytes: unit of transfer.
        first: what to ask for while nothing is known.
        most: upper bound, what a parent may have to hold for this child.
    """
    if rate is None or rtt_s is None:
        return min(max(first, 2 * chunk_bytes), most)
    return int(min(1.5 * rate * (rtt_s + LOOP_S) + 2 * chunk_bytes, most))
