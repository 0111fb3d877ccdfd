"""A probe of a node's uplink before it has served anybody: one message, and how soon it came.

    node  -> parent    Probe, with bytes that mean nothing
    parent -> node     ProbeAck

Transfers show the rate of whoever serves others, and only as much of it as its children could take.
A fleet that has just joined is planned as if all were equal, so the slow hold up the fast, which
then never show what they have: on paper (bench/bench_uplink_errors.py) three such fleets ended at
0.67, 0.55 and 0.89 of the rate that their uplinks allow, and at 0.84, 0.86 and 0.89 with probes.

So a node that can serve, and has not been the limit of a transfer yet, sends a message up its
control link when it holds a version. If that has come within QUICK_S, one four times as long
follows, up to MAX_PROBE_BYTES: on a slow link the first says enough, and what the node has to say
besides waits for a second at most. The time counts whole, with the round trip and the start of a
connection, so a probe never shows too much; of a fast link it shows less than all, and transfers
raise it. It is repeated after the next versions, MAX_PROBES times in all: what others sent at the
same time makes the first one tell less than the truth.
"""

from __future__ import annotations

from echo.protocol.rates import UplinkEstimate
from echo.wire.actions import Action, Send
from echo.wire.codec import encode
from echo.wire.messages import Probe, ProbeAck

FIRST_BYTES, MAX_PROBE_BYTES = 256 << 10, 4 << 20
GROWTH = 4
QUICK_S = 0.25
PAYLOAD_SHARE = 1 / 8
"""What a message may have at most, in relation to the version that it is to speed up."""
MAX_PROBES = 3


class Probing:
    """A node's own probes."""

    def __init__(self, uplink: UplinkEstimate, *, node_id: str) -> None:
        """Show what probes tell to `uplink`."""
        self._uplink = uplink
        self._node_id = node_id
        self._num_probes = 0
        self._awaited: tuple[str, int, float] | None = None
        """(who is to acknowledge, bytes, when they were sent)."""
        self._most_bytes = 0

    def begin(self, peer: str, *, payload_bytes: int, now: float) -> list[Action]:
        """Send a probe to `peer`, if one is needed.

        Args:
            peer: who acknowledges it.
            payload_bytes: of a version; where those are small, a wrong place costs less than this.
            now: the present.
        """
        self._most_bytes = min(MAX_PROBE_BYTES, int(PAYLOAD_SHARE * payload_bytes))
        is_under_way = self._awaited is not None and self._awaited[0] == peer
        is_known = self._uplink.is_measured or self._num_probes >= MAX_PROBES
        if is_under_way or is_known or self._most_bytes < FIRST_BYTES:
            return []
        self._num_probes += 1
        return self._send(peer, FIRST_BYTES, now)

    def _send(self, peer: str, num_bytes: int, now: float) -> list[Action]:
        self._awaited = peer, num_bytes, now
        return [Send(peer, encode(Probe(), [bytes(num_bytes)], source=self._node_id))]

    def acknowledged(self, peer: str, *, now: float) -> list[Action]:
        """Learn from a probe that has come; an answer that is not awaited is ignored."""
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
    """Answer another node's probe."""
    return [Send(peer, encode(ProbeAck(), source=source))]
