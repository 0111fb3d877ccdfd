"""A network on paper: seeded links on an explicit clock, for tests and for the simulator.

Nothing here waits or sleeps. `send` decides at once when a packet will arrive, or that it never
will; `deliver(now)` hands out what has arrived by `now`, in order of arrival. The same seed and the
same calls give the same history. Each directed link draws from its own stream of random numbers, so
traffic on one link never changes the fortune of another.

A link is a queue in front of a wire: packets leave one after another at `bytes_per_s`, then travel
`delay_s` and up to `jitter_s` more, and never overtake each other. Loss, cuts and partitions drop
packets silently, as an IP network does; a cut also takes what is in flight.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How one direction between two nodes behaves."""

    delay_s: float = 0.0
    """Seconds one way, for every packet."""
    jitter_s: float = 0.0
    """Seconds added to the delay, uniform in [0, jitter_s]; order is kept all the same."""
    loss: float = 0.0
    """Probability that a packet is dropped, 0..1."""
    bytes_per_s: float = math.inf
    """Rate at which packets leave the sender, bytes per second."""

    def __post_init__(self) -> None:
        if min(self.delay_s, self.jitter_s) < 0 or not math.isfinite(self.delay_s + self.jitter_s):
            raise ValueError(f"delay_s and jitter_s must be finite and >= 0, got {self}")
        if not 0.0 <= self.loss <= 1.0:
            raise ValueError(f"loss is a probability, 0..1, got {self.loss}")
        if not self.bytes_per_s > 0:
            raise ValueError(
                f"bytes_per_s must be > 0, got {self.bytes_per_s}; to stop a link, cut it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet(Generic[T]):
    """One packet on its way from `source` to `destination`."""

    source: str
    destination: str
    payload: T
    num_bytes: int
    arrives_at: float


@dataclass(slots=True)
class _Wire:
    """The state of one direction between two nodes."""

    random: random.Random
    idle_at: float = -math.inf
    """When the sender will have put its last packet on the wire."""
    last_arrival_at: float = -math.inf


@dataclass(frozen=True, slots=True, order=True)
class _InFlight(Generic[T]):
    arrives_at: float
    serial: int
    packet: Packet[T] = field(compare=False)


class Network(Generic[T]):
    """Nodes by name, and directed links between any two of them.

    Args:
        seed: fixes every loss and every jitter.
        default: the behaviour of links that `set_link` was not called for.
    """

    def __init__(self, *, seed: int = 0, default: Link | None = None) -> None:
        self._seed = seed
        self._default = default or Link()
        self._links: dict[tuple[str, str], Link] = {}
        self._wires: dict[tuple[str, str], _Wire] = {}
        self._cuts: set[frozenset[str]] = set()
        self._group_of: dict[str, int] = {}
        self._in_flight: list[_InFlight[T]] = []
        self._serial = itertools.count()

    def set_link(self, source: str, destination: str, link: Link) -> None:
        """Give one direction a behaviour of its own, for packets sent from now on."""
        self._links[source, destination] = link

    def send(
        self, source: str, destination: str, payload: T, *, num_bytes: int, now: float
    ) -> float | None:
        """Put a packet on its way.

        Args:
            source: name of the sending node.
            destination: name of the receiving node.
            payload: whatever `deliver` shall hand out.
            num_bytes: what it takes on a link with a rate, bytes.
            now: the present instant, seconds; must not run backwards.

        Returns:
            The instant of arrival in seconds, or None if the packet is lost.
        """
        link = self._links.get((source, destination), self._default)
        wire = self._wire(source, destination)
        # Drawn for every packet, so that a cut does not shift the fortune of later ones.
        is_dropped = wire.random.random() < link.loss
        jitter_s = wire.random.uniform(0.0, link.jitter_s)
        wire.idle_at = max(now, wire.idle_at) + num_bytes / link.bytes_per_s
        if is_dropped or self.is_cut(source, destination):
            return None
        wire.last_arrival_at = max(wire.last_arrival_at, wire.idle_at + link.delay_s + jitter_s)
        packet = Packet(
            source=source,
            destination=destination,
            payload=payload,
            num_bytes=num_bytes,
            arrives_at=wire.last_arrival_at,
        )
        heapq.heappush(self._in_flight, _InFlight(packet.arrives_at, next(self._serial), packet))
        return packet.arrives_at

    @property
    def next_at(self) -> float | None:
        """When the next packet arrives, seconds; None if nothing is in flight."""
        return self._in_flight[0].arrives_at if self._in_flight else None

    def deliver(self, now: float) -> list[Packet[T]]:
        """Take out every packet that has arrived by `now`, earliest first."""
        arrived = []
        while self._in_flight and self._in_flight[0].arrives_at <= now:
            arrived.append(heapq.heappop(self._in_flight).packet)
        return arrived

    def is_cut(self, a: str, b: str) -> bool:
        """Return whether nothing passes between two nodes at present."""
        if a == b:
            return False
        return frozenset((a, b)) in self._cuts or self._group_of.get(a) != self._group_of.get(b)

    def cut(self, a: str, b: str) -> list[Packet[T]]:
        """Stop both directions between two nodes; return what was in flight and is lost."""
        self._cuts.add(frozenset((a, b)))
        return self._drop_cut_packets()

    def mend(self, a: str, b: str) -> None:
        """Undo `cut` for two nodes."""
        self._cuts.discard(frozenset((a, b)))

    def partition(self, *groups: Collection[str]) -> list[Packet[T]]:
        """Let nodes talk only within their group; return what was in flight and is lost.

        Nodes named in no group form one more group. Replaces an earlier partition.
        """
        self._group_of = {node: index for index, group in enumerate(groups) for node in group}
        if len(self._group_of) != sum(len(group) for group in groups):
            raise ValueError(f"a node is in more than one group of {groups}")
        return self._drop_cut_packets()

    def heal(self) -> None:
        """Undo every cut and the partition."""
        self._cuts.clear()
        self._group_of.clear()

    def _wire(self, source: str, destination: str) -> _Wire:
        wire = self._wires.get((source, destination))
        if wire is None:
            wire = _Wire(random.Random(f"{self._seed}/{source}/{destination}"))
            self._wires[source, destination] = wire
        return wire

    def _drop_cut_packets(self) -> list[Packet[T]]:
        kept: list[_InFlight[T]] = []
        lost: list[_InFlight[T]] = []
        for flight in self._in_flight:
            is_lost = self.is_cut(flight.packet.source, flight.packet.destination)
            (lost if is_lost else kept).append(flight)
        heapq.heapify(kept)
        self._in_flight = kept
        return [flight.packet for flight in sorted(lost)]
