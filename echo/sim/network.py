"""A network on paper: connections with rates, latency, jitter and cuts.

    sender's uplink  ->  route between two regions  ->  receiver's downlink
    (shared by all)      (one stream's rate, delay)      (shared by all)

* **Bulk** (chunks, groups) queues at the uplink, in the order in which it was sent, takes the route
  at the rate of one stream, and queues again at the downlink; each stage begins with the first
  byte, so that an idle stage adds nothing. **Small** messages slip in between, as packets of other
  connections do, and take the latency only. Within one connection nothing is overtaken.
* A connection is a stream, as over TCP: a lost packet costs time, not messages. The route's rate is
  what one stream was measured to reach, with whatever TCP makes of the packets that are lost.
* Where a cut begins, what is in flight is lost and the connection stalls; each end is told its
  `dead_after_s` later, as unanswered heartbeats would tell it. A machine that vanishes is noticed
  in the same way, a process that dies at once.
* A listener can be dialled by its address; all others, behind a NAT, can only dial.

One byte of a simulated image stands for `weight_scale` bytes: a version has few and small chunks in
memory, and its true size on every link.

Nothing here waits, and nothing is sent that only keeps a connection alive. `SimTransport` is the
client that nodes use (`echo/sim/transport.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from echo.core.errors import TransportError
from echo.net.transport import Frame, format_address, parse_address
from echo.sim.lengths import Groups

BULK_BYTES = 1 << 14
"""Messages from this size on queue at the links."""
FRAMING_BYTES = 60
"""Bytes that TCP, ZMTP and IP add to a message, roughly."""
HANDSHAKE_TRIPS = 4
"""Trips before a connection stands: two of TCP, two of CURVE."""
FIRST_FREE_PORT = 49152


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The route between two regions, in one direction."""

    bytes_per_s: float = math.inf
    """Rate of one stream."""
    latency_s: float = 0.0005
    """One way."""
    jitter_s: float = 0.0
    """Added to the latency, evenly distributed in [0, jitter_s]."""

    def __post_init__(self) -> None:
        if min(self.latency_s, self.jitter_s) < 0 or not math.isfinite(
            self.latency_s + self.jitter_s
        ):
            raise ValueError(f"latency_s and jitter_s must be finite and >= 0, got {self}")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be > 0, got {self.bytes_per_s}; to stop it, cut")

    def joined(self, other: Route) -> Route:
        """Return this route and then another as one."""
        return Route(
            bytes_per_s=min(self.bytes_per_s, other.bytes_per_s),
            latency_s=self.latency_s + other.latency_s,
            jitter_s=self.jitter_s + other.jitter_s,
        )


@dataclass(slots=True, eq=False)
class Port:
    """A machine's access to the network, which outlives its processes."""

    name: str
    region: str = ""
    """Where it stands; left empty, it is a region of its own, with its name."""
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    address: str | None = None
    """Where it can be dialled; None behind a NAT."""
    dead_after_s: float = 10.0
    """Until a connection that has stalled is given up here."""
    up_idle_at: float = 0.0
    down_idle_at: float = 0.0
    bytes_sent: float = 0.0
    bytes_received: float = 0.0

    def __post_init__(self) -> None:
        self.region = self.region or self.name


class Client(Protocol):
    """The process at an end of connections."""

    port: Port

    def on_connected(self, end: LinkEnd) -> None: ...

    def on_refused(self, end: LinkEnd, reason: str) -> None: ...

    def on_disconnected(self, end: LinkEnd, reason: str) -> None: ...

    def on_message(self, end: LinkEnd, frames: list[Frame]) -> None:
        """Handle a message; the listener learns of a connection by its first message."""


@dataclass(slots=True, eq=False)
class LinkEnd:
    """One end of a connection, and the way from here to the other end."""

    client: Client
    address: str | None
    """The address that was dialled; None where the connection was answered."""
    number: int
    """Of the attempt to dial, on the whole network."""
    peer: str = ""
    """The client's name for the other side: its own affair."""
    unread_bytes: int = 0
    """Sent to here and not yet taken by the client, as far as the client counts."""
    is_open: bool = False
    is_over: bool = False
    is_stalled: bool = False
    far: LinkEnd = field(init=False)
    """Once the connection stands, as everything below."""
    route: Route = field(init=False)
    stream_bytes_per_s: float = field(init=False)
    chance: random.Random | None = None
    """Of jitter, the same at both ends; None where there is none."""
    idle_at: float = 0.0
    """When the route will have taken the last bulk."""
    arrived_at: float = 0.0
    """When the last message will have reached the receiver's downlink."""
    done_at: float = 0.0
    """When the downlink will have let through what has reached it so far."""


Sides: TypeAlias = tuple[frozenset[str], ...]
"""Groups of nodes and regions between which nothing passes."""


class Network:
    """All connections, and what they have carried."""

    def __init__(
        self,
        *,
        seed: int = 0,
        between: Route | None = None,
        weight_scale: float = 1.0,
        groups: Groups | None = None,
        bulk_bytes: int = BULK_BYTES,
    ) -> None:
        """Start without nodes.

        Args:
            seed: of jitter.
            between: the route between regions for which no other is given; None for no distance.
            weight_scale: bytes that one byte of an image stands for.
            groups: the true sizes of groups; None for those of the messages.
            bulk_bytes: size from which messages queue.
        """
        self._seed = seed
        self.weight_scale = weight_scale
        self._groups = groups
        self._bulk_bytes = bulk_bytes
        self._regions: dict[str, Route] = {}
        self._within, self._middle = Route(), Route(latency_s=0.0)
        self._between = between or self._middle
        self._routes: dict[tuple[str, str], Route] = {}
        """Of pairs of regions, as they were told or came up."""
        self._listeners: dict[str, Client] = {}
        self._ports = itertools.count(FIRST_FREE_PORT)
        self._ends: dict[Client, dict[LinkEnd, None]] = {}
        self._num_dials = 0
        self._cuts: list[Sides] = []
        self.traffic: dict[tuple[str, str, str], float] = {}
        """(from region, to region, kind) -> bytes."""

    @property
    def now(self) -> float:
        """Seconds, as the running loop counts them."""
        return asyncio.get_running_loop().time()

    def at(self, instant: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have something called at an instant; one that has passed is the present."""
        loop = asyncio.get_running_loop()
        loop.call_at(max(instant, loop.time()), call, *arguments)

    # --- the map ---------------------------------------------------------------------------------

    def add_region(self, name: str, route: Route) -> None:
        """Note the route from the middle of the world, where the learner stands, to a region."""
        self._regions[name] = route
        self._routes = {pair: known for pair, known in self._routes.items() if name not in pair}

    def set_route(self, source: str, destination: str, route: Route) -> None:
        """Replace the route from one region to another, for what is sent from now on."""
        self._routes[source, destination] = route
        for end in self._standing():
            if (end.client.port.region, end.far.client.port.region) == (source, destination):
                self._lay(end)

    def route(self, source: str, destination: str) -> Route:
        """Return the route from one region to another."""
        found = self._routes.get((source, destination))
        if found is None:
            here, there = self._regions.get(source), self._regions.get(destination)
            if source == destination:
                found = self._within
            elif here is None and there is None:
                found = self._between
            else:
                found = (here or self._middle).joined(there or self._middle)
            self._routes[source, destination] = found
        return found

    def listen(self, client: Client) -> None:
        """Let a client be dialled at its port's address; port 0 becomes a free one.

        Raises:
            TransportError: if another node listens there.
        """
        if client.port.address is None:
            return
        host, number = parse_address(client.port.address)
        address = format_address(host, number or next(self._ports))
        there = self._listeners.get(address)
        if there is not None:
            raise TransportError(
                f"cannot listen on {address}: address already in use: "
                f"{there.port.name!r} listens there; stop it or choose another port"
            )
        client.port.address = address
        self._listeners[address] = client

    def listener(self, address: str) -> Client | None:
        return self._listeners.get(address)

    # --- connections -----------------------------------------------------------------------------

    def dial(self, client: Client, address: str, *, peer: str = "") -> LinkEnd:
        """Begin to connect; the client hears whether it came to a connection."""
        self._num_dials += 1
        end = LinkEnd(client, address, self._num_dials, peer)
        self._ends.setdefault(client, {})[end] = None
        listener = self._listeners.get(address)
        region = client.port.region if listener is None else listener.port.region
        latency_s = self.route(client.port.region, region).latency_s
        self.at(self.now + HANDSHAKE_TRIPS * latency_s, self._connect, end)
        return end

    def _connect(self, end: LinkEnd) -> None:
        if end.is_over:
            return
        client = end.client
        listener = self._listeners.get(end.address or "")
        is_cut = listener is not None and self._is_cut(client.port, listener.port)
        if listener is None or is_cut:
            self._leave(end)
            client.on_refused(end, "nothing gets through" if is_cut else "nobody listens there")
            return
        far = LinkEnd(listener, None, end.number)
        self._ends.setdefault(listener, {})[far] = None
        end.far, far.far = far, end
        for each in (end, far):
            self._lay(each)
            each.is_open = True
        client.on_connected(end)

    def _lay(self, end: LinkEnd) -> None:
        """Find the way from an end to the other."""
        port = end.client.port
        end.route = route = self.route(port.region, end.far.client.port.region)
        end.stream_bytes_per_s = min(route.bytes_per_s, port.up_bytes_per_s)
        if route.jitter_s > 0:
            end.chance = end.far.chance or random.Random(f"{self._seed}/o{end.number}")

    def hang_up(
        self, end: LinkEnd, *, linger_s: float = math.inf, reason: str = "the peer hung up"
    ) -> None:
        """Close a connection, or stop dialling; the other side is told when the news arrives.

        Messages already sent still arrive for `linger_s`, and the notice of the end after them.
        This end's client hears nothing more of it.
        """
        is_told = end.is_open and not end.is_stalled
        self._leave(end)
        if is_told:
            soonest_at = self.now + end.route.latency_s
            at = max(soonest_at, min(end.arrived_at, soonest_at + linger_s))
            self.at(at, self._hear_end, end.far, reason)

    def close(self, client: Client, *, linger_s: float = 0.0) -> None:
        """End a process; its peers are told, after what was sent if it goes in good order."""
        self._unlisten(client)
        for end in list(self._ends.get(client, ())):
            self.hang_up(end, linger_s=linger_s, reason="the peer's connection closed")

    def vanish(self, client: Client) -> None:
        """End a process with its machine: no peer is notified."""
        self._unlisten(client)
        for end in list(self._ends.get(client, ())):
            is_open = end.is_open
            self._leave(end)
            if is_open:
                self._stall(end)

    def _unlisten(self, client: Client) -> None:
        address = client.port.address
        if address is not None and self._listeners.get(address) is client:
            del self._listeners[address]

    def _leave(self, end: LinkEnd) -> None:
        end.is_open, end.is_over = False, True
        ends = self._ends.get(end.client, {})
        ends.pop(end, None)
        if not ends:
            self._ends.pop(end.client, None)

    def _hear_end(self, end: LinkEnd, reason: str) -> None:
        """Learn that the other side has left, once what it sent has come through."""
        if end.is_stalled or end.is_over:
            return
        if end.far.done_at > self.now:
            self.at(end.far.done_at, self._hear_end, end, reason)
            return
        self._lose(end, reason)

    def _lose(self, end: LinkEnd, reason: str) -> None:
        if not end.is_over:
            self._leave(end)
            end.client.on_disconnected(end, reason)

    # --- messages --------------------------------------------------------------------------------

    def send(self, end: LinkEnd, frames: list[Frame]) -> bool:
        """Put a message on its way; return False if there is no connection."""
        if not end.is_open:
            return False
        here, there = end.client.port, end.far.client.port
        kind, num_bytes = self._weigh(frames)
        key = (here.region, there.region, kind)
        self.traffic[key] = self.traffic.get(key, 0.0) + num_bytes
        here.bytes_sent += num_bytes
        if end.is_stalled:
            return True
        leaves_at = self.now
        if num_bytes >= self._bulk_bytes:
            begins_at = max(leaves_at, here.up_idle_at)
            here.up_idle_at = begins_at + num_bytes / here.up_bytes_per_s
            end.idle_at = max(begins_at, end.idle_at) + num_bytes / end.stream_bytes_per_s
            leaves_at = max(here.up_idle_at, end.idle_at)
        arrives_at = leaves_at + end.route.latency_s
        if end.chance is not None:
            arrives_at += end.chance.uniform(0.0, end.route.jitter_s)
        if arrives_at > end.arrived_at:
            end.arrived_at = arrives_at
        self.at(end.arrived_at, self._arrive, end, num_bytes, frames)
        return True

    def _weigh(self, frames: Sequence[Frame]) -> tuple[str, float]:
        """Return what a message is and what it takes on the wire."""
        num_bytes: float = FRAMING_BYTES + len(frames[0])
        if len(frames) == 1:
            return "control", num_bytes
        if isinstance(frames[1], memoryview):  # chunks, one or several together
            return "weights", num_bytes + self.weight_scale * sum(map(len, frames[1:]))
        if len(frames) == 3:
            if self._groups is not None:
                return "rollouts", num_bytes + self._groups.num_bytes(frames[1])
            return "rollouts", num_bytes + len(frames[1]) + len(frames[2])
        return "control", num_bytes + sum(map(len, frames[1:]))

    def _arrive(self, end: LinkEnd, num_bytes: float, frames: list[Frame]) -> None:
        """Take a message from an end through the receiver's downlink."""
        far = end.far
        if far.is_stalled or not far.is_open:
            return
        port, now = far.client.port, self.now
        if num_bytes >= self._bulk_bytes:
            # Its first byte came so much earlier as the stages before took for all of it.
            first_at = now - num_bytes / end.stream_bytes_per_s
            done_at = max(first_at, port.down_idle_at) + num_bytes / port.down_bytes_per_s
            port.down_idle_at = end.done_at = max(done_at, now)
        if end.done_at > now:
            # Or something before it on this connection is still coming through.
            self.at(end.done_at, self._deliver, far, num_bytes, frames)
            return
        self._deliver(far, num_bytes, frames)

    def _deliver(self, end: LinkEnd, num_bytes: float, frames: list[Frame]) -> None:
        if end.is_open and not end.is_stalled:
            end.client.port.bytes_received += num_bytes
            end.client.on_message(end, frames)

    # --- cuts ------------------------------------------------------------------------------------

    def cut(self, *groups: str | Collection[str]) -> None:
        """Let nothing pass between groups of nodes and regions; one alone is cut off from all."""
        self._cuts.append(_named(groups))
        for end in self._standing():
            if self._is_cut(end.client.port, end.far.client.port):
                self._stall(end)

    def mend(self, *groups: str | Collection[str]) -> None:
        """Undo one `cut`."""
        self._cuts.remove(_named(groups))

    def _is_cut(self, here: Port, there: Port) -> bool:
        if here is there:
            return False
        for groups in self._cuts:
            first, second = _side(groups, here), _side(groups, there)
            if first != second and (len(groups) == 1 or None not in (first, second)):
                return True
        return False

    def _standing(self) -> Iterator[LinkEnd]:
        """Yield every end that is open."""
        return (end for ends in list(self._ends.values()) for end in list(ends) if end.is_open)

    def _stall(self, end: LinkEnd) -> None:
        """Let nothing pass from now on; the ends find out as unanswered heartbeats tell them."""
        for each in (end, end.far) if end.address is not None else (end.far, end):
            if each.is_open and not each.is_stalled:
                each.is_stalled = True
                wait_s = each.client.port.dead_after_s
                at = self.now + wait_s
                self.at(at, self._lose, each, f"no answer for {wait_s:g} s")


def _named(groups: Sequence[str | Collection[str]]) -> Sides:
    return tuple(frozenset([group] if isinstance(group, str) else group) for group in groups)


def _side(groups: Sides, port: Port) -> int | None:
    """Return in which group a node stands; None for no group."""
    sides = (i for i, group in enumerate(groups) if port.name in group or port.region in group)
    return next(sides, None)
