"""Simulates the network: connections with rates, latency, jitter and cuts.

    sender's uplink  ->  route between two regions  ->  receiver's downlink
    (shared by all)      (one stream's rate, delay)      (shared by all)

* **Bulk** messages are chunks and groups. They queue at the uplink in the order of sending, travel
  along the route at the rate of one stream, and queue again at the downlink. The three stages
  overlap: the next stage starts when it receives the first byte of a message. So a message that
  meets no queue takes the time of its slowest stage plus the latency. **Small** messages do not
  queue, and only the latency delays them. Messages of one connection arrive in order.
* A connection is a stream, like TCP: a lost packet costs time, but no message is lost. The rate of
  a route is the measured rate of one stream, which includes TCP's response to lost packets.
* When a cut begins or a machine is lost, messages in flight are lost and the connection stalls.
  Each end of the connection is notified after its machine's `dead_after_s`, as if heartbeats had
  not been answered. When only a process dies, its peers are notified after the latency.
* A listener has an address that other nodes can dial. Nodes without an address are behind a NAT and
  can only dial.

One byte of a simulated image represents `weight_scale` bytes of a real image. So a version has few
and small chunks in memory, but its true size on every link.

The calls of this module never wait, and there are no keep-alive messages. Nodes use the network
through `SimTransport` (`echo/sim/transport.py`).
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
"""A message of at least this many bytes is a bulk message. Bulk messages queue at the links."""
FRAMING_BYTES = 60
"""Approximate number of bytes that TCP, IP and ZMTP (ZeroMQ's protocol) add to a message."""
HANDSHAKE_TRIPS = 4
"""Number of one-way trips that a handshake takes: two for TCP and two for CURVE."""
FIRST_FREE_PORT = 49152
"""The first port that a listener without a port gets: the first of the dynamic ports of RFC 6335.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The route from one region to another."""

    bytes_per_s: float = math.inf
    """Rate of one stream, bytes per second."""
    latency_s: float = 0.0005
    """Latency in one direction, seconds."""
    jitter_s: float = 0.0
    """Largest additional delay of a message, seconds. Each message's delay is uniformly distributed
    in [0, jitter_s]."""

    def __post_init__(self) -> None:
        if min(self.latency_s, self.jitter_s) < 0 or not math.isfinite(
            self.latency_s + self.jitter_s
        ):
            raise ValueError(f"latency_s and jitter_s must be finite and >= 0, got {self}")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be > 0, got {self.bytes_per_s}; to stop it, cut")

    def joined(self, other: Route) -> Route:
        """Return the route that consists of this route and then of `other`."""
        return Route(
            bytes_per_s=min(self.bytes_per_s, other.bytes_per_s),
            latency_s=self.latency_s + other.latency_s,
            jitter_s=self.jitter_s + other.jitter_s,
        )


@dataclass(slots=True, eq=False)
class Port:
    """The point at which a machine joins the network.

    The port remains when the machine's processes end.
    """

    name: str
    region: str = ""
    """The machine's region. If empty, the machine is alone in a region that has the machine's
    name."""
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    address: str | None = None
    """The address at which other nodes can dial the machine; None behind a NAT."""
    dead_after_s: float = 10.0
    """If a connection stalls for this many seconds, a process on this machine closes it."""
    up_idle_at: float = 0.0
    down_idle_at: float = 0.0
    bytes_sent: float = 0.0
    bytes_received: float = 0.0

    def __post_init__(self) -> None:
        self.region = self.region or self.name


class Client(Protocol):
    """A process with connections over the network, such as a SimTransport."""

    port: Port

    def on_connected(self, end: LinkEnd) -> None: ...

    def on_refused(self, end: LinkEnd, reason: str) -> None: ...

    def on_disconnected(self, end: LinkEnd, reason: str) -> None: ...

    def on_message(self, end: LinkEnd, frames: list[Frame]) -> None:
        """Handle a message that has arrived at this process's end of a connection.

        The first message of an inbound connection also notifies a listener of the connection.
        """


@dataclass(slots=True, eq=False)
class LinkEnd:
    """One end of a connection, and the route from this end to the other end."""

    client: Client
    address: str | None
    """The address that this end has dialled; None if the other end has dialled this end."""
    number: int
    """Serial number of the attempt to dial, counted over the whole network."""
    peer: str = ""
    """The name that this end's client uses for the other side."""
    unread_bytes: int = 0
    """Number of bytes that were sent to this end but that its client has not read yet. The clients
    update the number."""
    is_open: bool = False
    is_over: bool = False
    is_stalled: bool = False
    far: LinkEnd = field(init=False)
    """The other end of the connection. This field and the following fields are set when the
    connection is established."""
    route: Route = field(init=False)
    stream_bytes_per_s: float = field(init=False)
    chance: random.Random | None = None
    """Source of random numbers for the jitter, which both ends share; None without jitter."""
    idle_at: float = 0.0
    """Time at which the route becomes free for the next bulk message."""
    arrived_at: float = 0.0
    """Time at which the newest message from this end reaches the receiver's downlink."""
    done_at: float = 0.0
    """Time at which the receiver's downlink will have delivered all messages that have reached
    it."""


Sides: TypeAlias = tuple[frozenset[str], ...]
"""The groups of nodes and regions that a cut separates from each other."""


class Network:
    """All connections of a simulation, and the number of transported bytes."""

    def __init__(
        self,
        *,
        seed: int = 0,
        between: Route | None = None,
        weight_scale: float = 1.0,
        groups: Groups | None = None,
        bulk_bytes: int = BULK_BYTES,
    ) -> None:
        """Make a network without nodes, regions and connections.

        Args:
            seed: seed of the random jitter.
            between: the default route between two regions; None for a route without delay.
            weight_scale: number of bytes of a real image per byte of a simulated image.
            groups: the true sizes of groups; None to use the sizes of the messages.
            bulk_bytes: smallest size of a bulk message, in bytes.
        """
        self._seed = seed
        self.weight_scale = weight_scale
        self._groups = groups
        self._bulk_bytes = bulk_bytes
        self._regions: dict[str, Route] = {}
        self._within, self._middle = Route(), Route(latency_s=0.0)
        self._between = between or self._middle
        self._routes: dict[tuple[str, str], Route] = {}
        """The route for each pair of regions. A route that was not set is computed when it is first
        used."""
        self._listeners: dict[str, Client] = {}
        self._ports = itertools.count(FIRST_FREE_PORT)
        self._ends: dict[Client, dict[LinkEnd, None]] = {}
        self._num_dials = 0
        self._cuts: list[Sides] = []
        self.traffic: dict[tuple[str, str, str], float] = {}
        """For each (source region, destination region, kind of message), the number of bytes
        sent."""

    @property
    def now(self) -> float:
        """The present virtual time of the running loop, seconds."""
        return asyncio.get_running_loop().time()

    def at(self, instant: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call for an instant. If the instant has already passed, make the call now."""
        loop = asyncio.get_running_loop()
        loop.call_at(max(instant, loop.time()), call, *arguments)

    # --- the map ---------------------------------------------------------------------------------

    def add_region(self, name: str, route: Route) -> None:
        """Set the route between a region and the learner.

        The route between two regions consists of their two routes to the learner.
        """
        self._regions[name] = route
        self._routes = {pair: known for pair, known in self._routes.items() if name not in pair}

    def set_route(self, source: str, destination: str, route: Route) -> None:
        """Replace the route from one region to another.

        Messages in flight still take the old route.
        """
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
        """Let a client accept connections at the address that its port has.

        If the port number in the address is 0, a free port number replaces it.

        Raises:
            TransportError: if another node listens at this address.
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
        """Start to connect a client to an address. Return the client's end of the connection.

        The client's `on_connected` or `on_refused` is called after the handshake. `peer` is the
        client's name for the other side.
        """
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
            client.on_refused(end, "nothing gets through" if is_cut else "no node listens there")
            return
        far = LinkEnd(listener, None, end.number)
        self._ends.setdefault(listener, {})[far] = None
        end.far, far.far = far, end
        for each in (end, far):
            self._lay(each)
            each.is_open = True
        client.on_connected(end)

    def _lay(self, end: LinkEnd) -> None:
        port = end.client.port
        end.route = route = self.route(port.region, end.far.client.port.region)
        end.stream_bytes_per_s = min(route.bytes_per_s, port.up_bytes_per_s)
        if route.jitter_s > 0:
            end.chance = end.far.chance or random.Random(f"{self._seed}/o{end.number}")

    def hang_up(
        self, end: LinkEnd, *, linger_s: float = math.inf, reason: str = "the peer hung up"
    ) -> None:
        """Close a connection, or stop dialling.

        Messages that were already sent still arrive for `linger_s` seconds. After the last of these
        messages, and after the latency of the route, the other side is notified. This end's client
        gets no further events of the connection.
        """
        is_notified = end.is_open and not end.is_stalled
        self._leave(end)
        if is_notified:
            soonest_at = self.now + end.route.latency_s
            at = max(soonest_at, min(end.arrived_at, soonest_at + linger_s))
            self.at(at, self._on_end, end.far, reason)

    def close(self, client: Client, *, linger_s: float = 0.0) -> None:
        """End a process and notify its peers.

        Messages that it has sent still arrive for `linger_s`.
        """
        self._unlisten(client)
        for end in list(self._ends.get(client, ())):
            self.hang_up(end, linger_s=linger_s, reason="the peer's connection closed")

    def vanish(self, client: Client) -> None:
        """End a process without notifying its peers, because its machine is lost.

        The peers' ends of the connections stall, and each peer gives up after its own
        `dead_after_s`.
        """
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

    def _on_end(self, end: LinkEnd, reason: str) -> None:
        """Notify an end that the other side has closed.

        All messages from the other side arrive first.
        """
        if end.is_stalled or end.is_over:
            return
        if end.far.done_at > self.now:
            self.at(end.far.done_at, self._on_end, end, reason)
            return
        self._lose(end, reason)

    def _lose(self, end: LinkEnd, reason: str) -> None:
        if not end.is_over:
            self._leave(end)
            end.client.on_disconnected(end, reason)

    # --- messages --------------------------------------------------------------------------------

    def send(self, end: LinkEnd, frames: list[Frame]) -> bool:
        """Send a message from this end to the other end. Return False if there is no connection."""
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
        """Deliver a message from `end` when the receiver's downlink has had time to transfer it."""
        far = end.far
        if far.is_stalled or not far.is_open:
            return
        port, now = far.client.port, self.now
        if num_bytes >= self._bulk_bytes:
            # The last byte arrives now; the first arrived `num_bytes` / stream rate earlier.
            first_at = now - num_bytes / end.stream_bytes_per_s
            done_at = max(first_at, port.down_idle_at) + num_bytes / port.down_bytes_per_s
            port.down_idle_at = end.done_at = max(done_at, now)
        if end.done_at > now:
            # An earlier message of this connection may still be arriving.
            self.at(end.done_at, self._deliver, far, num_bytes, frames)
            return
        self._deliver(far, num_bytes, frames)

    def _deliver(self, end: LinkEnd, num_bytes: float, frames: list[Frame]) -> None:
        if end.is_open and not end.is_stalled:
            end.client.port.bytes_received += num_bytes
            end.client.on_message(end, frames)

    # --- cuts ------------------------------------------------------------------------------------

    def cut(self, *groups: str | Collection[str]) -> None:
        """Cut off groups of nodes and regions from each other.

        With a single group, cut off this group from all other nodes.
        """
        self._cuts.append(_named(groups))
        for end in self._standing():
            if self._is_cut(end.client.port, end.far.client.port):
                self._stall(end)

    def mend(self, *groups: str | Collection[str]) -> None:
        """Undo a `cut` that was made with the same groups."""
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
        return (end for ends in list(self._ends.values()) for end in list(ends) if end.is_open)

    def _stall(self, end: LinkEnd) -> None:
        """Stall a connection. Each end is notified after the `dead_after_s` of its own machine."""
        for each in (end, end.far) if end.address is not None else (end.far, end):
            if each.is_open and not each.is_stalled:
                each.is_stalled = True
                wait_s = each.client.port.dead_after_s
                at = self.now + wait_s
                self.at(at, self._lose, each, f"no answer for {wait_s:g} s")


def _named(groups: Sequence[str | Collection[str]]) -> Sides:
    return tuple(frozenset([group] if isinstance(group, str) else group) for group in groups)


def _side(groups: Sides, port: Port) -> int | None:
    """Return the index of the group that has the port's node or region.

    Return None if no group has the node or the region.
    """
    sides = (i for i, group in enumerate(groups) if port.name in group or port.region in group)
    return next(sides, None)
