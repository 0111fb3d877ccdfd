"""A bounded probe of a node's uplink, for the plan, before it has served anybody.

    node  -> parent    Probe(index, of), with a chunk of nothing
    parent -> node     ProbeAck(index)

A node that can serve others and has not yet shown what it can send would be placed by guess. When
it knows how large versions are it sends up to `rates.probe_bytes` up its control link, for at most
PROBE_S, and the acknowledgements tell the rate. Where nothing is to be gained there is no probe.
Whoever is at the other end acknowledges and forgets. After the next versions it is repeated, up to
MAX_PROBES in all, while no transfer has shown more: what others sent at the same time, and a new
connection that was only speeding up, make the first one tell less than the truth.

It begins with a few chunks, and each that is acknowledged lets two more go, as TCP itself begins;
one that took twice as long as the first lets none go: the link is full, and what waits in its queue
delays all else that this node has to say. The best of the samples counts.
"""

from __future__ import annotations

from echo.protocol.actions import Action, Send
from echo.protocol.broadcast import Broadcast
from echo.protocol.codec import encode
from echo.protocol.messages import Probe, ProbeAck
from echo.protocol.rates import PROBE_S, BestRate, probe_bytes
from echo.rollout import PolicyVersion

PROBE_CHUNK_BYTES = 64 << 10
FIRST_CHUNKS = 4
MAX_PROBES = 3
LATE_S = 0.05
"""How much later than twice the first acknowledgement one must be to count as late."""


class Probing:
    """A node's own probe, and its answers to those of others."""

    def __init__(self, broadcast: Broadcast, *, can_serve: bool) -> None:
        """Start without one."""
        self._broadcast = broadcast
        self._can_serve = can_serve
        self._began_at: float | None = None
        self._num_probes = 0
        self._num_chunks = 0
        self._sent_at: list[float] = []
        self._first_s: float | None = None
        """What the first acknowledgement took."""
        self._rate = BestRate()

    def begin(self, peer: str, version: PolicyVersion, *, now: float) -> list[Action]:
        """Send a probe to `peer`, if one is needed.

        Args:
            peer: who acknowledges it.
            version: one that is held whole: tells how large they are.
            now: the present.
        """
        is_over = self._began_at is None or now > self._began_at + PROBE_S
        has_shown = self._num_probes >= MAX_PROBES or self._broadcast.is_uplink_measured
        if not (peer and self._can_serve and is_over) or has_shown:
            return []
        self._began_at, self._first_s = now, None
        self._rate.pause()
        self._num_probes += 1
        self._sent_at.clear()
        num_bytes = probe_bytes(
            payload_bytes=self._broadcast.store[version].num_bytes, chunk_bytes=PROBE_CHUNK_BYTES
        )
        self._num_chunks = num_bytes // PROBE_CHUNK_BYTES
        return self._send(peer, FIRST_CHUNKS, now)

    def _send(self, peer: str, num_chunks: int, now: float) -> list[Action]:
        first = len(self._sent_at)
        stop = min(first + num_chunks, self._num_chunks)
        self._sent_at += [now] * (stop - first)
        nothing, source = bytes(PROBE_CHUNK_BYTES), self._broadcast.node_id
        return [
            Send(peer, encode(Probe(index=index), [nothing], source=source))
            for index in range(first, stop)
        ]

    def receive(
        self, peer: str, message: Probe | ProbeAck, *, is_parent: bool, now: float
    ) -> list[Action]:
        """Answer a probe, or note that a chunk of this node's own has arrived."""
        if isinstance(message, Probe):
            return acknowledge(peer, message, source=self._broadcast.node_id)
        is_known = 0 <= message.index < len(self._sent_at)
        if not (is_parent and is_known and self._began_at is not None):
            return []
        if now > self._began_at + PROBE_S:
            return []
        self._rate.add(PROBE_CHUNK_BYTES, now=now)
        if self._rate.bytes_per_s is not None:
            self._broadcast.show_uplink(self._rate.bytes_per_s)
        took_s = now - self._sent_at[message.index]
        self._first_s = took_s if self._first_s is None else self._first_s
        is_late = took_s > 2 * self._first_s + LATE_S
        return self._send(peer, 0 if is_late else 2, now)


def acknowledge(peer: str, probe: Probe, *, source: str) -> list[Action]:
    """Answer another node's probe."""
    return [Send(peer, encode(ProbeAck(index=probe.index), source=source))]
