"""Messages over ZeroMQ: the only file that knows it.

Parents bind one ROUTER, and every dial is a DEALER (`echo.runtime.links` keeps their states).

**One connection, one identity.** The ROUTER names each inbound connection by itself (no routing id
is sent), so a node that comes back after a half-open connection is a new peer at once instead of a
refused duplicate. A DEALER lives for one connection: libzmq's own reconnection is off, and
ZMQ_IMMEDIATE stays 0, because 1 throws away what a peer said just before it closed.

**Bytes are counted by what libzmq has released.** A ROUTER cannot tell what waits for one peer, and
its high-water mark counts messages, dropping silently unless ROUTER_MANDATORY is set. So there is
none on sends. Instead pyzmq's tracker of a zero-copy frame says when libzmq has passed it on to the
kernel; a connection sends in order, so one tracker settles everything before it. That is exact,
needs no acknowledgements on the wire, and one tracker per 64 KiB keeps it cheap. On the other side
RCVHWM stops reading, TCP fills, trackers stay open, and `send` refuses. (Left to admission: libzmq
gathers the frames of one message without a bound on their number.)

**Sockets are drained raw, on the loop.** A reader callback only notes that a socket has something;
`receive` takes messages until EAGAIN or the end of its budget, one wake-up per burst instead of one
future per message, and yields to the loop before it goes on. The descriptor is edge-triggered: an
edge means "look at ZMQ_EVENTS", any send may swallow one and therefore looks too, and a socket
stays noted until it said EAGAIN. Monitors are drained in their callback at once, since libzmq's I/O
thread waits on a full one.

Heartbeats are ZMTP's, answered by libzmq's thread: a busy loop does not make a node look dead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from echo.errors import TransportError
from echo.runtime.links import Burst, DialledLink, Inbound, Listener, News, OnNews
from echo.runtime.listening_socket import listening_socket
from echo.runtime.transport import (
    MESSAGE_OVERHEAD_BYTES,
    Frame,
    PeerId,
    Transport,
    TransportEvent,
    TransportOptions,
    TransportStats,
    checked_num_bytes,
    format_address,
    parse_address,
)

_Socket: TypeAlias = "zmq.Socket[bytes]"

# Below this libzmq copies, which is cheaper than a release notice per frame; pyzmq's own choice.
_ZERO_COPY_BYTES = zmq.COPY_THRESHOLD
# Longer than any run: libzmq must not redial by itself, and "never" (-1) loses unread messages.
_NEVER_MS = 1_000_000_000
_NEWS: dict[int, News] = {
    zmq.EVENT_ACCEPTED: News.ACCEPTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: News.UP,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: News.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: News.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: News.HANDSHAKE_FAILED,
    zmq.EVENT_DISCONNECTED: News.OVER,
    zmq.EVENT_CONNECT_RETRIED: News.OVER,  # an attempt that never became a connection
}


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


class _Outbox:
    """Sends on one connection, and counts what libzmq has not yet passed on to the kernel."""

    def __init__(self, to: _Socket, identity: bytes, max_unsent_bytes: int) -> None:
        self._to = to
        self._identity = identity
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent_bytes = 0
        self._untracked_bytes = 0
        self._tracked: deque[tuple[int, zmq.MessageTracker]] = deque()

    def send(self, frames: Sequence[bytes | bytearray | memoryview], num_bytes: int) -> bool:
        """Accept a message, or refuse it."""
        charge = num_bytes + MESSAGE_OVERHEAD_BYTES
        while self._tracked and self._tracked[0][1].done:
            self._unsent_bytes -= self._tracked.popleft()[0]
        if self._unsent_bytes + charge > self._max_unsent_bytes:
            return False
        is_tracked = self._untracked_bytes + charge >= _ZERO_COPY_BYTES
        try:
            tracker = self._hand_over(frames, is_tracked)
        except zmq.ZMQError as error:
            # Only the first part can fail: the rest follows into the pipe that took it.
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise TransportError(f"cannot send {num_bytes} bytes: {error}") from error
        self._unsent_bytes += charge
        self._untracked_bytes += charge
        if tracker is not None:
            self._tracked.append((self._untracked_bytes, tracker))
            self._untracked_bytes = 0
        return True

    def _hand_over(
        self, frames: Sequence[bytes | bytearray | memoryview], is_tracked: bool
    ) -> zmq.MessageTracker | None:
        *first, last = frames
        if self._identity:
            self._to.send(self._identity, zmq.SNDMORE | zmq.NOBLOCK)
        for frame in first:
            self._to.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=False)
        if is_tracked:
            tracked = zmq.Frame(last, track=True, copy=False)
            return self._to.send(tracked, zmq.NOBLOCK, copy=False, track=True)
        self._to.send(last, zmq.NOBLOCK, copy=False)
        return None


class _Channel:
    """One raw socket and its monitor, watched by the loop."""

    _ids = itertools.count(1)

    def __init__(
        self,
        transport: ZmqTransport,
        kind: int,
        on_readable: Callable[[], None],
        on_news: OnNews,
    ) -> None:
        self._loop = transport.loop
        self._on_readable = on_readable
        self._on_news = on_news
        self._options = transport.options
        self._first_part: zmq.Frame | None = None
        self._is_router = kind == zmq.ROUTER
        self.socket: _Socket = transport.context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, self._options.max_unread_messages),
            (zmq.MAXMSGSIZE, self._options.max_message_bytes),
            (zmq.CONNECT_TIMEOUT, _ms(self._options.connect_timeout_s)),
            (zmq.HANDSHAKE_IVL, _ms(self._options.connect_timeout_s)),
            (zmq.HEARTBEAT_IVL, _ms(self._options.heartbeat_s)),
            (zmq.HEARTBEAT_TIMEOUT, _ms(self._options.dead_after_s)),
            (zmq.HEARTBEAT_TTL, _ms(self._options.dead_after_s)),
        ):
            self.socket.setsockopt(option, value)
        endpoint = f"inproc://monitor-{next(self._ids)}"
        self.socket.monitor(endpoint, sum(_NEWS))
        self._monitor: _Socket = transport.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(endpoint)
        self._loop.add_reader(self._monitor.FD, self.read_news)
        self._loop.add_reader(self.socket.FD, self.look)
        self.read_news()  # only a reader that has seen EAGAIN is woken

    def look(self) -> None:
        """Consume an edge, and note the socket if it has messages."""
        if not self.socket.closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_readable()

    def read_news(self) -> None:
        """Drain the monitor."""
        while not self._monitor.closed:
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            report = parse_monitor_message(parts)
            self._on_news(_NEWS[report["event"]], report["value"])

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        """Take one message; None is EAGAIN, which arms the edge again."""
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._first_part = None
            return None
        if not self._is_router:
            return b"", [_as_frame(part) for part in parts]
        self._first_part, *payload = parts
        return self._first_part.bytes, [_as_frame(part) for part in payload]

    def descriptor(self) -> int | None:
        """Return the file descriptor that the last message came in on; None for a stranger."""
        try:
            return None if self._first_part is None else int(self._first_part.get(zmq.SRCFD))
        except zmq.ZMQError:  # ZMTP 1 has no metadata, and almost any bytes pass for ZMTP 1
            return None

    def outbox(self, identity: bytes) -> _Outbox:
        """Return the means to send on one connection."""
        return _Outbox(self.socket, identity, self._options.max_unsent_bytes)

    def close(self, linger_s: float) -> None:
        """Close the socket; libzmq goes on sending for at most `linger_s`."""
        self._loop.remove_reader(self._monitor.FD)
        self._loop.remove_reader(self.socket.FD)
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=_ms(linger_s))


def _as_frame(part: zmq.Frame) -> Frame:
    # A small one is a slice of libzmq's shared read buffer, which a view would keep alive.
    return part.bytes if len(part) < _ZERO_COPY_BYTES else part.buffer


class ZmqTransport(Transport):
    """Carries messages over TCP with ZeroMQ.

    Args:
        listen_address: tcp://host:port to bind, port 0 for any free one; None to dial only.
        options: bounds and timings.
        congestion_control: wanted for what is sent to inbound peers; None for the system's default.
    """

    def __init__(
        self,
        listen_address: str | None = None,
        options: TransportOptions | None = None,
        *,
        congestion_control: str | None = "bbr",
    ) -> None:
        if listen_address is not None:
            parse_address(listen_address)
        self._listen_address = listen_address
        self._congestion_control = congestion_control
        self.options = options or TransportOptions()
        self.totals = TransportStats()
        self.context: zmq.Context[_Socket] = zmq.Context()
        self.context.blocky = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._peers: dict[PeerId, DialledLink | Inbound] = {}
        self._ids = itertools.count(1)
        self._noted: dict[Listener | DialledLink, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it was started on."""
        if self._loop is None:
            raise TransportError("the transport has not been started")
        return self._loop

    @property
    def listen_address(self) -> str | None:
        """Where it listens, with the real port once started."""
        return self._listen_address

    async def start(self) -> None:
        """Bind, if it listens."""
        self._loop = asyncio.get_running_loop()
        if self._listen_address is None:
            return
        bound = await listening_socket(self._listen_address, self._congestion_control)
        self._listener, self._listen_address = self._listen(bound)

    def dial(self, address: str) -> PeerId:
        """Begin to connect."""
        self._check_open()
        peer = self.mint("out")
        self._peers[peer] = DialledLink(self, peer, address)
        return peer

    def hang_up(self, peer: PeerId) -> None:
        """End a peer."""
        match self._peers.pop(peer, None):
            case DialledLink() as link:
                link.close()
                self._noted.pop(link, None)
            case Inbound() as inbound:
                inbound.is_hung_up = True

    def send(self, peer: PeerId, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Accept a message if the peer is connected and below its byte bound."""
        num_bytes = checked_num_bytes(frames, self.options.max_message_bytes)
        is_sent = False
        match self._peers.get(peer):
            case DialledLink() as link:
                is_sent = link.send(frames, num_bytes)
            case Inbound() as inbound if self._listener is not None:
                is_sent = inbound.outbox.send(frames, num_bytes)
                self._listener.channel.look()
        if is_sent:
            self.totals.messages_out += 1
            self.totals.bytes_out += num_bytes
        else:
            self.totals.refused_sends += 1
        return is_sent

    async def receive(self) -> list[TransportEvent]:
        """Wait for events, and return a burst of them."""
        if self._noted:
            await asyncio.sleep(0)  # a busy transport must not starve the rest of the loop
        while True:
            self._check_open()
            burst = Burst(self.options, self.totals)
            self._drain(burst)
            if burst.events:
                return burst.events
            if self._noted:  # a burst of discarded messages only
                await asyncio.sleep(0)
            else:
                self._waiter = self.loop.create_future()
                await self._waiter

    async def close(self) -> None:
        """Close all sockets; bounded by `linger_s`."""
        self._is_closed = True
        self._wake()
        for peer in self._peers.values():
            if isinstance(peer, DialledLink):
                peer.close()
        self._peers.clear()
        self._noted.clear()
        if self._listener is not None:
            self._listener.channel.close(self.options.linger_s)
            self._listener = None
        # Waits for lingering sockets, each linger_s at most, and so not on the loop.
        await asyncio.to_thread(self.context.term)

    def stats(self) -> TransportStats:
        """Return the totals so far."""
        return dataclasses.replace(self.totals)

    def note(self, source: Listener | DialledLink) -> None:
        """Remember that a channel has something for `receive`."""
        self._noted[source] = None
        self._wake()

    def mint(self, prefix: str) -> PeerId:
        """Return a fresh id."""
        return f"{prefix}-{next(self._ids)}"

    def adopt(self, inbound: Inbound) -> None:
        """Enter an inbound peer."""
        self._peers[inbound.peer] = inbound

    def forget(self, inbound: Inbound) -> None:
        """Let go of an inbound peer whose connection is over."""
        self._peers.pop(inbound.peer, None)

    def connect(
        self, host: str, port: int, on_readable: Callable[[], None], on_news: OnNews
    ) -> _Channel:
        """Open a DEALER that makes one attempt."""
        channel = _Channel(self, zmq.DEALER, on_readable, on_news)
        channel.socket.setsockopt(zmq.IPV6, int(":" in host))
        channel.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        channel.socket.connect(format_address(host, port))
        channel.look()
        return channel

    def _listen(self, bound: socket.socket) -> tuple[Listener, str]:
        host, port = bound.getsockname()[:2]
        listener = Listener(self)
        channel = _Channel(
            self, zmq.ROUTER, functools.partial(self.note, listener), listener.on_news
        )
        listener.channel = channel
        address = format_address(host, port)
        channel.socket.setsockopt(zmq.IPV6, int(":" in host))
        channel.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        channel.socket.setsockopt(zmq.USE_FD, bound.detach())
        channel.socket.bind(address)
        channel.look()
        return listener, address

    def _drain(self, burst: Burst) -> None:
        for source in list(self._noted):
            if burst.is_full:
                break
            is_empty = source.drain(burst)
            del self._noted[source]
            if not is_empty:
                self._noted[source] = None  # behind the others: each has its turn

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("the transport is closed")
