"""Messages between transports of one process, over a simulated network.

`MemoryNetwork` is the asyncio shell of `echo.sim.network`: it asks the loop for the time, and
delivers each packet when it is due. Transports belong to it by name, and the links between names
can be slow, lossy or cut. The contract is that of every transport, kept honest by the same tests
that ZeroMQ passes.

A connection is a stream, as over TCP. A packet that the network loses therefore stalls its
connection for good: nothing sent after it arrives, and `dead_after_s` later both ends are told, as
unanswered heartbeats would tell them. What waits for a peer is everything sent to it that it has
not taken with `receive`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from echo.core.errors import TransportError
from echo.net.transport import (
    MESSAGE_OVERHEAD_BYTES,
    Connected,
    Disconnected,
    Frame,
    PeerId,
    Received,
    Transport,
    TransportEvent,
    TransportOptions,
    TransportStats,
    checked_num_bytes,
    format_address,
    parse_address,
    parse_dial_address,
)
from echo.sim.network import Network, Packet

_CONTROL_BYTES = 64
"""What opening or closing a connection weighs on a link with a rate."""
_FIRST_FREE_PORT = 49152


@dataclasses.dataclass(eq=False, slots=True)
class _End:
    """One end of a connection, as its transport sees it."""

    transport: MemoryTransport
    peer: PeerId
    """What this transport calls the other side."""
    address: str | None
    """The dialled address; None at the listener's end."""
    far: _End | None = None
    unread_bytes: int = 0
    """Sent towards this end and not yet received, overhead included."""
    is_up: bool = False
    """This end's `Connected` is on its way or out."""
    is_over: bool = False
    is_hung_up: bool = False
    is_stalled: bool = False


_InFlight: TypeAlias = tuple[_End, Callable[[], None]]
"""The end that sent a packet, and what its arrival does."""


class MemoryNetwork:
    """Transports by name, joined by a simulated network on the running loop's clock.

    Args:
        links: carries the packets; its rates, delays and losses are set on it.
    """

    def __init__(self, links: Network[_InFlight] | None = None) -> None:
        self.links = links or Network()
        self._listeners: dict[str, MemoryTransport] = {}
        self._ports = itertools.count(_FIRST_FREE_PORT)
        self._timer: asyncio.TimerHandle | None = None

    def cut(self, a: str, b: str) -> None:
        """Cut two nodes apart; `links.mend` joins them again."""
        self._stall(self.links.cut(a, b))

    def partition(self, *groups: Sequence[str]) -> None:
        """Let nodes talk only within their group; `links.heal` joins them again."""
        self._stall(self.links.partition(*groups))

    def listen(self, address: str, transport: MemoryTransport) -> str:
        """Give a transport an address, and return it with a free port where 0 was asked for."""
        host, port = parse_address(address)
        address = format_address(host, port or next(self._ports))
        if address in self._listeners:
            raise TransportError(
                f"cannot listen on {address}: address already in use: "
                f"{self._listeners[address].name!r} listens there; stop it or choose another port"
            )
        self._listeners[address] = transport
        return address

    def unlisten(self, address: str) -> None:
        """Free an address."""
        del self._listeners[address]

    def listener(self, address: str) -> MemoryTransport | None:
        """Return who listens on an address."""
        return self._listeners.get(address)

    def send(self, end: _End, num_bytes: int, on_arrival: Callable[[], None]) -> None:
        """Put a packet on its way to the far end, unless the connection is stalled."""
        assert end.far is not None
        if end.is_stalled:
            return
        arrives_at = self.links.send(
            end.transport.name,
            end.far.transport.name,
            (end, on_arrival),
            num_bytes=num_bytes,
            now=asyncio.get_running_loop().time(),
        )
        if arrives_at is None:
            _stall(end)
        else:
            self._set_timer()

    def _stall(self, lost: Sequence[Packet[_InFlight]]) -> None:
        for packet in lost:
            _stall(packet.payload[0])

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_at = self.links.next_at
        if due_at is not None:
            self._timer = asyncio.get_running_loop().call_at(due_at, self._deliver, due_at)

    def _deliver(self, due_at: float) -> None:
        # A timer may fire a clock tick early; what it was set for is due all the same.
        for packet in self.links.deliver(max(due_at, asyncio.get_running_loop().time())):
            end, on_arrival = packet.payload
            if not end.is_stalled:
                on_arrival()
        self._set_timer()


def _stall(end: _End) -> None:
    """Stop a connection that lost a packet, and end it when its heartbeats would have."""
    assert end.far is not None
    if end.is_stalled:
        return
    for each in (end, end.far):
        each.is_stalled = True
        wait_s = each.transport.options.dead_after_s
        asyncio.get_running_loop().call_later(
            wait_s, each.transport.end_over, each, f"no answer for {wait_s:g} s"
        )


class MemoryTransport(Transport):
    """One node's access to a `MemoryNetwork`.

    Args:
        network: where its peers are.
        name: this node's name on the network's links.
        listen_address: as for every transport; ports are the network's own.
        options: bounds and timings.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        listen_address: str | None = None,
        options: TransportOptions | None = None,
    ) -> None:
        if listen_address is not None:
            parse_address(listen_address)
        self.name = name
        self.options = options or TransportOptions()
        self._network = network
        self._listen_address = listen_address
        self._is_listening = False
        self._ids = itertools.count(1)
        self._ends: dict[PeerId, _End] = {}
        self._redial_s: dict[PeerId, float] = {}
        self._timers: dict[PeerId, asyncio.TimerHandle] = {}
        self._inbox: deque[tuple[TransportEvent, _End, int]] = deque()
        self._stats = TransportStats()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    @property
    def listen_address(self) -> str | None:
        """Where it listens, with the real port once started."""
        return self._listen_address

    async def start(self) -> None:
        """Take the address."""
        if self._listen_address is not None:
            self._listen_address = self._network.listen(self._listen_address, self)
            self._is_listening = True

    def dial(self, address: str) -> PeerId:
        """Begin to connect."""
        self._check_open()
        parse_dial_address(address)
        peer = f"out-{next(self._ids)}"
        self._redial_s[peer] = self.options.min_redial_s
        self._attempt(peer, address)
        return peer

    def hang_up(self, peer: PeerId) -> None:
        """End a peer; what was sent to it before still arrives."""
        is_dialled = self._redial_s.pop(peer, None) is not None
        if peer in self._timers:
            self._timers.pop(peer).cancel()
        end = self._ends.get(peer)
        if end is None:
            return
        end.is_hung_up = True
        if is_dialled:
            self._close_end(end)

    def send(self, peer: PeerId, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Accept a message if the peer is connected and below its byte bound."""
        num_bytes = checked_num_bytes(frames, self.options.max_message_bytes)
        charge = num_bytes + MESSAGE_OVERHEAD_BYTES
        end = self._ends.get(peer)
        if end is None or end.far is None or not end.is_up or end.is_hung_up:
            self._stats.refused_sends += 1
            return False
        far = end.far
        if far.unread_bytes + charge > self.options.max_unsent_bytes:
            self._stats.refused_sends += 1
            return False
        far.unread_bytes += charge
        message = [frame if isinstance(frame, bytes) else memoryview(frame) for frame in frames]
        self._network.send(end, charge, lambda: far.transport.take_in(far, message, num_bytes))
        self._stats.messages_out += 1
        self._stats.bytes_out += num_bytes
        return True

    async def receive(self) -> list[TransportEvent]:
        """Wait for events, and return a burst of them."""
        if self._inbox:
            await asyncio.sleep(0)  # a busy transport must not starve the rest of the loop
        while True:
            self._check_open()
            events = self._take_burst()
            if events:
                return events
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def close(self) -> None:
        """Close every connection; what was sent before still arrives."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_listening and self._listen_address is not None:
            self._network.unlisten(self._listen_address)
        for timer in self._timers.values():
            timer.cancel()
        for end in list(self._ends.values()):
            self._close_end(end)
        self._inbox.clear()
        self._wake()

    def stats(self) -> TransportStats:
        """Return the totals so far."""
        return dataclasses.replace(self._stats)

    def answer(self, near: _End) -> None:
        """Answer a dial that has arrived here: open this end, or refuse."""
        assert near.far is not None
        end = near.far
        if not self._is_listening or self._is_closed:
            self._network.send(
                end, _CONTROL_BYTES, lambda: near.transport.end_over(near, "nobody listens there")
            )
            return
        end.peer = f"in-{next(self._ids)}"
        self._ends[end.peer] = end
        self._network.send(end, _CONTROL_BYTES, lambda: near.transport.opened(near))

    def opened(self, end: _End) -> None:
        """Learn that a dial was answered."""
        if not end.is_over:
            end.is_up = True
            self._redial_s[end.peer] = self.options.min_redial_s
            self._put(Connected(end.peer, end.address), end)

    def take_in(self, end: _End, frames: list[Frame], num_bytes: int) -> None:
        """Take in a message that has arrived."""
        charge = num_bytes + MESSAGE_OVERHEAD_BYTES
        if end.is_over or end.is_hung_up:
            end.unread_bytes -= charge
            self._stats.discarded_messages += 1
            return
        if not end.is_up:
            end.is_up = True
            self._put(Connected(end.peer, None), end)
        self._put(Received(end.peer, frames), end, charge)

    def end_over(self, end: _End, reason: str) -> None:
        """Learn that a connection is over; a dialled one is opened again later."""
        if end.is_over:
            return
        end.is_over = True
        self._ends.pop(end.peer, None)
        if end.is_up and not end.is_hung_up:
            self._put(Disconnected(end.peer, reason), end)
        pause_s = self._redial_s.get(end.peer)
        if end.address is not None and pause_s is not None:
            self._redial_s[end.peer] = min(2 * pause_s, self.options.max_redial_s)
            self._timers[end.peer] = asyncio.get_running_loop().call_later(
                pause_s, self._attempt, end.peer, end.address
            )

    def _attempt(self, peer: PeerId, address: str) -> None:
        self._timers.pop(peer, None)
        end = _End(self, peer, address)
        there = self._network.listener(address)
        if there is None:
            self.end_over(end, "nobody listens there")
            return
        end.far = _End(there, "", None, far=end)
        self._ends[peer] = end
        self._network.send(end, _CONTROL_BYTES, lambda: there.answer(end))

    def _close_end(self, end: _End) -> None:
        end.is_over = True
        self._ends.pop(end.peer, None)
        far = end.far
        if far is not None:
            self._network.send(
                end,
                _CONTROL_BYTES,
                lambda: far.transport.end_over(far, "the peer closed the connection"),
            )

    def _put(self, event: TransportEvent, end: _End, charge: int = 0) -> None:
        if not self._is_closed:
            self._inbox.append((event, end, charge))
            self._wake()

    def _take_burst(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        num_bytes = 0
        while (
            self._inbox
            and num_bytes < self.options.max_burst_bytes
            and len(events) < self.options.max_burst_messages
        ):
            event, end, charge = self._inbox.popleft()
            end.unread_bytes -= charge
            if end.is_hung_up:
                continue
            num_bytes += charge
            if isinstance(event, Received):
                self._stats.messages_in += 1
                self._stats.bytes_in += charge - MESSAGE_OVERHEAD_BYTES
            events.append(event)
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("the transport is closed")
