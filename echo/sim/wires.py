"""Connections between simulated nodes: rates, latency, jitter, loss, cuts, on virtual time.

    sender's uplink  ->  path between two regions  ->  receiver's downlink
    (shared by all)      (one stream's rate, delay)     (shared by all)

* **Bulk** (chunks, groups) queues at the uplink, in the order in which it was sent, passes the path
  at the rate of one stream, and queues again at the downlink; each stage begins with the first
  byte, so that an idle stage adds nothing. **Small** messages slip in between, as packets of other
  connections do, and take the latency only. Within one connection nothing is overtaken.
* A connection is a stream, as over TCP: a lost packet is sent again and costs time, not messages.
  Small messages are then held up for a retransmission; bulk takes the path's rate less what is lost
  (a path's rate is what one stream was measured to reach, so whatever TCP makes of the loss is in
  it).
* Where a cut begins, what is in flight is lost and the connection stalls; both ends are told
  `dead_after_s` later, as unanswered heartbeats would tell them. A node that vanishes is noticed
  in the same way, a process that dies at once.
* Whoever listens can be dialled by its address; all others, behind a NAT, can only dial.

One byte of a simulated image stands for `weight_scale` bytes: a version has few and small chunks in
memory, and its true size on every link.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from echo.sim.clock import Clock
from echo.wire.codec import Frame

BULK_BYTES = 1 << 14
"""Messages from this size on queue at the links."""
FRAMING_BYTES = 60
"""What TCP, ZMTP and IP add to a message, roughly."""
LEAST_RTO_S = 0.2
"""Until TCP sends a lost packet again, at least."""
REDIAL_S = 0.5
"""Between attempts to connect to somebody who does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What lies between two regions."""

    bytes_per_s: float = math.inf
    """Rate of one stream."""
    latency_s: float = 0.0005
    """One way."""
    jitter_s: float = 0.0
    """Added to the latency, evenly distributed in [0, jitter_s]."""
    loss: float = 0.0
    """Probability that a packet is lost."""

    @property
    def stream_bytes_per_s(self) -> float:
        """Rate at which one stream brings something new."""
        return self.bytes_per_s * (1 - self.loss)

    def joined(self, other: Path) -> Path:
        """Return the way over this path and then another."""
        return Path(
            bytes_per_s=min(self.bytes_per_s, other.bytes_per_s),
            latency_s=self.latency_s + other.latency_s,
            jitter_s=self.jitter_s + other.jitter_s,
            loss=1 - (1 - self.loss) * (1 - other.loss),
        )


@dataclass(slots=True, eq=False)
class Port:
    """A node's access to the network."""

    name: str
    region: str
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    address: str | None = None
    """Where it can be dialled; None behind a NAT."""
    up_idle_at: float = 0.0
    down_idle_at: float = 0.0
    bytes_sent: float = 0.0
    bytes_received: float = 0.0


class Client(Protocol):
    """What a connection needs of the process at its end."""

    port: Port
    is_alive: bool

    def on_connected(self, peer: str) -> None:
        """Handle that a dialled link stands."""

    def on_disconnected(self, peer: str, reason: str) -> None:
        """Handle that a link is gone."""

    def on_message(self, peer: str, frames: list[Frame]) -> None:
        """Handle a message."""


@dataclass(slots=True, eq=False)
class _Way:
    """One direction of a connection."""

    receiver: Client
    peer: str
    """What the receiver calls the sender."""
    path: Path
    stream_bytes_per_s: float
    chance: random.Random | None
    idle_at: float = 0.0
    """When the path will have taken the last bulk."""
    arrived_at: float = 0.0
    """When the last message will have reached the receiver's downlink."""
    done_at: float = 0.0
    """When the downlink will have let through what has reached it so far."""


@dataclass(slots=True, eq=False)
class Wire:
    """One dialled connection."""

    dialler: Client
    listener: Client | None
    address: str
    peer_of_listener: str
    """What the dialler calls the listener."""
    peer_of_dialler: str
    is_up: bool = False
    is_stalled: bool = False
    is_hung_up: bool = False
    ways: dict[int, _Way] = field(default_factory=dict)
    """Directions, by the identity of the sender."""


class Wires:
    """All connections, and what they have carried."""

    def __init__(
        self,
        clock: Clock,
        *,
        seed: int,
        weight_scale: float,
        group_bytes: Callable[[Frame], float],
        dead_after_s: float,
        is_encrypted: bool = True,
    ) -> None:
        """Start without nodes.

        Args:
            clock: the time.
            seed: of jitter and loss.
            weight_scale: bytes that one byte of an image stands for.
            group_bytes: true size of a group, by its header frame.
            dead_after_s: until a stalled connection is given up.
            is_encrypted: whether a connection needs a handshake of its own.
        """
        self.clock = clock
        self._seed = seed
        self.weight_scale = weight_scale
        self._group_bytes = group_bytes
        self._dead_after_s = dead_after_s
        self._num_trips = 4 if is_encrypted else 2
        self._regions: dict[str, Path] = {}
        self._within, self._middle = Path(), Path(latency_s=0.0)
        self._paths: dict[tuple[str, str], Path] = {}
        self._listeners: dict[str, Client] = {}
        self._wires: dict[str, Wire] = {}
        """By what either end calls the other."""
        self._of: dict[int, dict[Wire, None]] = {}
        """By the identity of either end."""
        self._num_wires = 0
        self._cuts: dict[str, int] = {}
        """Nodes and regions that are cut off, and by how many cuts."""
        self.traffic: dict[tuple[str, str, str], float] = {}
        """(from region, to region, what) -> bytes."""

    # --- the map ---------------------------------------------------------------------------------

    def add_region(self, name: str, path: Path) -> None:
        """Note the way from the middle of the world, where the learner stands, to a region."""
        self._regions[name] = path
        self._paths.clear()

    def path(self, first: str, second: str) -> Path:
        """Return the way between two regions."""
        found = self._paths.get((first, second))
        if found is None:
            there = self._regions.get(second, self._middle)
            here = self._regions.get(first, self._middle)
            found = self._within if first == second else here.joined(there)
            self._paths[first, second] = found
        return found

    def listen(self, client: Client) -> None:
        """Let a node be dialled at its address."""
        if client.port.address is not None:
            self._listeners[client.port.address] = client

    # --- connections -----------------------------------------------------------------------------

    def dial(self, dialler: Client, address: str) -> str:
        """Begin to connect; return what the dialler calls the other side."""
        self._num_wires += 1
        wire = Wire(dialler, None, address, f"o{self._num_wires}", f"i{self._num_wires}")
        self._wires[wire.peer_of_listener] = wire
        self._of.setdefault(id(dialler), {})[wire] = None
        listener = self._listeners.get(address)
        region = dialler.port.region if listener is None else listener.port.region
        latency_s = self.path(dialler.port.region, region).latency_s
        self.clock.after(self._num_trips * latency_s, self._connect, wire)
        return wire.peer_of_listener

    def _connect(self, wire: Wire) -> None:
        """Complete a dial, or try again, as a transport does until it is told to hang up."""
        dialler = wire.dialler
        if wire.is_hung_up or not dialler.is_alive:
            return
        listener = self._listeners.get(wire.address)
        if listener is None or not listener.is_alive or self._is_cut(dialler, listener):
            self.clock.after(REDIAL_S, self._connect, wire)
            return
        wire.listener, wire.is_up, wire.is_stalled = listener, True, False
        self._wires[wire.peer_of_dialler] = wire
        self._of.setdefault(id(listener), {})[wire] = None
        path = self.path(dialler.port.region, listener.port.region)
        is_random = path.jitter_s > 0 or path.loss > 0
        chance = random.Random(f"{self._seed}/{wire.peer_of_listener}") if is_random else None
        wire.ways = {
            id(dialler): self._way(dialler, listener, wire.peer_of_dialler, chance),
            id(listener): self._way(listener, dialler, wire.peer_of_listener, chance),
        }
        dialler.on_connected(wire.peer_of_listener)

    def _way(
        self, sender: Client, receiver: Client, peer: str, chance: random.Random | None
    ) -> _Way:
        path = self.path(sender.port.region, receiver.port.region)
        rate = min(path.stream_bytes_per_s, sender.port.up_bytes_per_s)
        return _Way(receiver, peer, path, rate, chance)

    def hang_up(self, client: Client, peer: str) -> None:
        """Close a connection; the other side is told when the news arrives."""
        wire = self._wires.pop(peer, None)
        if wire is None:
            return
        wire.is_hung_up = True
        self._of.get(id(client), {}).pop(wire, None)
        way = wire.ways.get(id(client))
        if way is None or not wire.is_up:
            return
        # What was sent before it arrives before it.
        at = max(self.clock.now + way.path.latency_s, way.arrived_at)
        self.clock.at(at, self._end, wire, client, "the peer hung up")

    def vanish(self, client: Client, *, is_silent: bool, is_orderly: bool = False) -> None:
        """End all connections of a process that is gone, with its machine if nobody is told of it.

        What was sent arrives before the news of an orderly end.
        """
        port = client.port
        if port.address is not None and self._listeners.get(port.address) is client:
            del self._listeners[port.address]
        for wire in self._of.pop(id(client), {}):
            if is_silent:
                self._stall(wire)
            elif wire.is_up:
                way = wire.ways[id(client)]
                soonest = way.arrived_at if is_orderly else 0.0
                at = max(self.clock.now + way.path.latency_s, soonest)
                self.clock.at(at, self._end, wire, client, "the peer's connection closed")

    def _end(self, wire: Wire, source: Client | None, reason: str) -> None:
        """Tell the ends of a connection, but not `source`, that it is over."""
        if not wire.is_up:
            return
        wire.is_up = False
        self._wires.pop(wire.peer_of_listener, None)
        self._wires.pop(wire.peer_of_dialler, None)
        for client, peer in (
            (wire.dialler, wire.peer_of_listener),
            (wire.listener, wire.peer_of_dialler),
        ):
            if client is None:
                continue
            self._of.get(id(client), {}).pop(wire, None)
            is_told = client is not source and not (client is wire.dialler and wire.is_hung_up)
            if is_told and client.is_alive:
                client.on_disconnected(peer, reason)

    # --- messages --------------------------------------------------------------------------------

    def send(self, sender: Client, peer: str, frames: Sequence[Frame]) -> bool:
        """Put a message on its way; return False if there is no connection."""
        wire = self._wires.get(peer)
        if wire is None or not wire.is_up:
            return False
        way = wire.ways[id(sender)]
        kind, num_bytes = self._weigh(frames)
        here, there = sender.port, way.receiver.port
        key = (here.region, there.region, kind)
        self.traffic[key] = self.traffic.get(key, 0.0) + num_bytes
        here.bytes_sent += num_bytes
        if wire.is_stalled:
            return True
        clock = self.clock
        path = way.path
        leaves_at = clock.now
        if num_bytes >= BULK_BYTES:
            begins_at = max(leaves_at, here.up_idle_at)
            here.up_idle_at = begins_at + num_bytes / here.up_bytes_per_s
            way.idle_at = max(begins_at, way.idle_at) + num_bytes / way.stream_bytes_per_s
            leaves_at = max(here.up_idle_at, way.idle_at)
        arrives_at = leaves_at + path.latency_s
        if way.chance is not None:
            arrives_at += self._luck(way, is_bulk=num_bytes >= BULK_BYTES)
        way.arrived_at = max(arrives_at, way.arrived_at)
        clock.at(way.arrived_at, self._arrive, wire, way, num_bytes, frames)
        return True

    def _weigh(self, frames: Sequence[Frame]) -> tuple[str, float]:
        """Return what a message is and what it takes on the wire."""
        num_bytes: float = FRAMING_BYTES + len(frames[0])
        if len(frames) == 1:
            return "control", num_bytes
        if len(frames) == 3:
            return "rollouts", num_bytes + self._group_bytes(frames[1])
        if isinstance(frames[1], memoryview):
            return "weights", num_bytes + self.weight_scale * len(frames[1])
        return "control", num_bytes + len(frames[1])

    def _luck(self, way: _Way, *, is_bulk: bool) -> float:
        """Return by how much jitter and loss delay a message; bulk pays for loss by its rate."""
        assert way.chance is not None
        path = way.path
        delay_s = way.chance.uniform(0.0, path.jitter_s)
        if way.chance.random() < path.loss and not is_bulk:
            delay_s += max(LEAST_RTO_S, 4 * path.latency_s)
        return delay_s

    def _arrive(self, wire: Wire, way: _Way, num_bytes: float, frames: list[Frame]) -> None:
        """Take a message through the receiver's downlink."""
        if wire.is_stalled or not wire.is_up:
            return
        port, now = way.receiver.port, self.clock.now
        if num_bytes >= BULK_BYTES:
            # Its first byte came so much earlier as the stages before took for all of it.
            first_at = now - num_bytes / way.stream_bytes_per_s
            done_at = max(first_at, port.down_idle_at) + num_bytes / port.down_bytes_per_s
            port.down_idle_at = way.done_at = max(done_at, now)
        if way.done_at > now:
            # Or something before it on this connection is still coming through.
            self.clock.at(way.done_at, self._deliver, wire, way, num_bytes, frames)
            return
        self._deliver(wire, way, num_bytes, frames)

    def _deliver(self, wire: Wire, way: _Way, num_bytes: float, frames: list[Frame]) -> None:
        receiver = way.receiver
        if wire.is_up and not wire.is_stalled and receiver.is_alive:
            receiver.port.bytes_received += num_bytes
            receiver.on_message(way.peer, frames)

    # --- cuts ------------------------------------------------------------------------------------

    def cut(self, name: str) -> None:
        """Cut a node or a region off from everybody outside it."""
        self._cuts[name] = self._cuts.get(name, 0) + 1
        wires: dict[Wire, None] = {}
        for those in self._of.values():
            wires.update(those)
        for wire in wires:
            if wire.listener is not None and self._is_cut(wire.dialler, wire.listener):
                self._stall(wire)

    def mend(self, name: str) -> None:
        """Undo one `cut`."""
        self._cuts[name] -= 1
        if not self._cuts[name]:
            del self._cuts[name]

    def _is_cut(self, first: Client, second: Client) -> bool:
        if not self._cuts or first is second:
            return False
        here, there = first.port, second.port
        if here.name in self._cuts or there.name in self._cuts:
            return True
        is_apart = here.region != there.region
        return is_apart and (here.region in self._cuts or there.region in self._cuts)

    def _stall(self, wire: Wire) -> None:
        if wire.is_stalled or not wire.is_up:
            return
        wire.is_stalled = True
        at = self.clock.now + self._dead_after_s
        self.clock.at(at, self._end, wire, None, f"no answer for {self._dead_after_s:g} s")
