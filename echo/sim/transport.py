"""Implements a transport on a simulated network, for nodes in an asyncio loop.

`SimTransport` is a client of `Network` (`echo/sim/network.py`), which computes the times. It passes
the same contract tests as the ZeroMQ transport (`echo/net/transport.py`). If a connection stalls,
the network notifies the transport after `dead_after_s`.

`max_unsent_bytes` limits the bytes in memory that a peer has not yet read with `receive`. `close`
and `hang_up` return at once. Messages that were sent before the call still arrive for `linger_s`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence

from echo.core.errors import TransportError
from echo.net.transport import (
    MESSAGE_OVERHEAD_BYTES,
    Connected,
    DialFailed,
    Disconnected,
    Frame,
    PeerId,
    Received,
    Transport,
    TransportEvent,
    TransportOptions,
    TransportStats,
    checked_num_bytes,
    parse_address,
    parse_dial_address,
)
from echo.sim.network import LinkEnd, Network, Port


@dataclasses.dataclass(slots=True, eq=False)
class _Dial:
    """A peer that this process has dialled.

    `end` belongs to the connection, or to the attempt to connect. If the attempt fails or the
    connection ends, the next attempt begins after `pause_s`.
    """

    end: LinkEnd
    pause_s: float


class SimTransport(Transport):
    """The transport of one process on a simulated network."""

    def __init__(
        self, network: Network, port: Port, options: TransportOptions | None = None
    ) -> None:
        if port.address is not None:
            parse_address(port.address)
        self.options = options or TransportOptions()
        self.port = port
        port.dead_after_s = self.options.dead_after_s
        self._network = network
        self._ids = itertools.count(1)
        self._dials: dict[PeerId, _Dial] = {}
        self._ends: dict[PeerId, LinkEnd] = {}
        """For each peer, this process's end of the established connection."""
        self._inbox: deque[tuple[TransportEvent, LinkEnd, int]] = deque()
        """Events that the process has not received yet: (event, end, number of unread bytes)."""
        self._stats = TransportStats()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    @property
    def listen_address(self) -> str | None:
        """The address at which this transport listens; None if the transport only dials.

        If the configured port is 0, the address contains the real port after the start.
        """
        return self.port.address

    async def start(self) -> None:
        self._network.listen(self)

    def dial(self, address: str, *, has_bulk: bool = False) -> PeerId:
        """Start to connect to `address`. Return the peer id of the new connection.

        The connection has no encryption, and no bulk connection is opened.
        """
        self._check_open()
        parse_dial_address(address)
        peer = f"out-{next(self._ids)}"
        end = self._network.dial(self, address, peer=peer)
        self._dials[peer] = _Dial(end, self.options.min_redial_s)
        return peer

    def hang_up(self, peer: PeerId) -> None:
        """End the link to a peer.

        If the peer has dialled this process, the connection stays open, but later messages from the
        peer are discarded.
        """
        self._ends.pop(peer, None)
        dial = self._dials.pop(peer, None)
        if dial is not None:
            self._network.hang_up(dial.end, linger_s=self.options.linger_s)
        unread, self._inbox = self._inbox, deque()
        for item in unread:
            if item[0].peer == peer:
                item[1].unread_bytes -= item[2]
            else:
                self._inbox.append(item)

    def send(
        self,
        peer: PeerId,
        frames: Sequence[bytes | bytearray | memoryview],
        *,
        is_public: bool = False,
    ) -> bool:
        """Send a message to a peer. Return False if the message cannot be sent.

        A message cannot be sent if the peer is not connected or has `max_unsent_bytes` unread.
        """
        num_bytes = checked_num_bytes(frames, self.options.max_message_bytes)
        charge = num_bytes + MESSAGE_OVERHEAD_BYTES
        end = self._ends.get(peer)
        if end is None or end.far.unread_bytes + charge > self.options.max_unsent_bytes:
            self._stats.refused_sends += 1
            return False
        end.far.unread_bytes += charge
        message: list[Frame] = [
            frame if isinstance(frame, bytes) else memoryview(frame).cast("B") for frame in frames
        ]
        self._network.send(end, message)
        self._stats.messages_out += 1
        self._stats.bytes_out += num_bytes
        return True

    async def receive(self) -> list[TransportEvent]:
        """Wait until at least one event has arrived. Return all events that have arrived."""
        if self._inbox:
            await asyncio.sleep(0)  # a busy transport must not starve other tasks
        while True:
            self._check_open()
            if self._inbox:
                return self._take_burst()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def close(self) -> None:
        """Close all connections. Messages that were sent before still arrive for `linger_s`."""
        self._end(linger_s=self.options.linger_s)

    def kill(self, *, is_silent: bool = False) -> None:
        """End all connections in the same way as if the process had been killed.

        If `is_silent`, the machine is also lost, and peers are not notified.
        """
        self._end(linger_s=None if is_silent else 0.0)

    def stats(self) -> TransportStats:
        return dataclasses.replace(self._stats)

    # --- events of the network -------------------------------------------------------------------

    def on_connected(self, end: LinkEnd) -> None:
        """Report that a dialled connection is established."""
        self._dials[end.peer].pause_s = self.options.min_redial_s
        self._ends[end.peer] = end
        self._put(Connected(end.peer, end.address), end)

    def on_refused(self, end: LinkEnd, reason: str) -> None:
        """Report that an attempt to dial has failed. Schedule the next attempt."""
        if end.peer in self._dials:
            self._put(DialFailed(end.peer, reason, is_refused=False), end)
        self._redial(end.peer)

    def on_disconnected(self, end: LinkEnd, reason: str) -> None:
        """Report that a connection has ended. If this side had dialled it, dial again later."""
        if self._ends.pop(end.peer, None) is not None:
            self._put(Disconnected(end.peer, reason), end)
        self._redial(end.peer)

    def on_message(self, end: LinkEnd, frames: list[Frame]) -> None:
        """Queue a message that has arrived. `receive` will return it.

        The first message of an inbound connection also reports the connection.
        """
        charge = sum(map(len, frames)) + MESSAGE_OVERHEAD_BYTES
        if not end.peer:
            end.peer = f"in-{next(self._ids)}"
            self._ends[end.peer] = end
            self._put(Connected(end.peer, None), end)
        if end.peer in self._ends:
            self._put(Received(end.peer, frames), end, charge)
        else:
            end.unread_bytes -= charge
            self._stats.discarded_messages += 1

    # --- helpers ---------------------------------------------------------------------------------

    def _redial(self, peer: PeerId) -> None:
        dial = self._dials.get(peer)
        if dial is not None:
            network = self._network
            network.at(network.now + dial.pause_s, self._attempt, peer, dial)
            dial.pause_s = min(2 * dial.pause_s, self.options.max_redial_s)

    def _attempt(self, peer: PeerId, dial: _Dial) -> None:
        if self._dials.get(peer) is dial:
            dial.end = self._network.dial(self, dial.end.address or "", peer=peer)

    def _end(self, *, linger_s: float | None) -> None:
        """End all connections. If `linger_s` is None, peers are not notified."""
        if self._is_closed:
            return
        self._is_closed = True
        if linger_s is None:
            self._network.vanish(self)
        else:
            self._network.close(self, linger_s=linger_s)
        self._dials.clear()
        self._ends.clear()
        self._inbox.clear()
        self._wake()

    def _put(self, event: TransportEvent, end: LinkEnd, charge: int = 0) -> None:
        self._inbox.append((event, end, charge))
        self._wake()

    def _take_burst(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        inbox, options, stats = self._inbox, self.options, self._stats
        num_bytes = 0
        while (
            inbox
            and num_bytes < options.max_burst_bytes
            and len(events) < options.max_burst_messages
        ):
            event, end, charge = inbox.popleft()
            if charge:
                end.unread_bytes -= charge
                num_bytes += charge
                stats.messages_in += 1
                stats.bytes_in += charge - MESSAGE_OVERHEAD_BYTES
            events.append(event)
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("the transport is closed")
