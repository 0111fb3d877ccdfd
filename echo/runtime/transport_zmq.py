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

**Encryption** is CURVE (echo/runtime/curve.py), on all links of a transport with keys and on none
of one without. A stranger who does not speak it, or nothing at all, is closed when the handshake's
time is up; a plain listener has no such defence against the bytes of ZMTP 1.

Heartbeats are ZMTP's, answered by libzmq's thread: a busy loop does not make a node look dead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import socket
from collections.abc import Callable, Sequence

import zmq

from echo.core.errors import TransportError
from echo.runtime.curve import CurveKeys
from echo.runtime.links import Burst, DialledLink, Inbound, Listener, OnNews
from echo.runtime.listening_socket import Gate, bound_socket, listen_on
from echo.runtime.transport import (
    PeerId,
    Transport,
    TransportEvent,
    TransportOptions,
    TransportStats,
    checked_num_bytes,
    format_address,
    parse_address,
    parse_key,
    with_key,
    without_key,
)
from echo.runtime.zmq_admission import Admission
from echo.runtime.zmq_channel import Socket, ZmqChannel

# Longer than any run: libzmq must not redial by itself, and "never" (-1) loses unread messages.
_NEVER_MS = 1_000_000_000


class ZmqTransport(Transport):
    """Carries messages over TCP with ZeroMQ.

    Args:
        listen_address: tcp://host:port to bind, port 0 for any free one; None to dial only.
        options: bounds and timings.
        keys: those of this process; without them nothing is encrypted.
        congestion_control: wanted for what is sent to inbound peers; None for the system's default.
    """

    def __init__(
        self,
        listen_address: str | None = None,
        options: TransportOptions | None = None,
        keys: CurveKeys | None = None,
        *,
        congestion_control: str | None = "bbr",
    ) -> None:
        if listen_address is not None:
            parse_address(listen_address)
        self._listen_address = listen_address
        self._keys = keys
        self._congestion_control = congestion_control
        self._admission: Admission | None = None
        self.options = options or TransportOptions()
        self.totals = TransportStats()
        self.context: zmq.Context[Socket] = zmq.Context()
        self.context.blocky = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._peers: dict[PeerId, DialledLink | Inbound] = {}
        self._ids = itertools.count(1)
        self._noted: dict[Listener | DialledLink, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._bound: socket.socket | None = None
        self._is_closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it was started on."""
        if self._loop is None:
            raise TransportError("the transport has not been started")
        return self._loop

    @property
    def listen_address(self) -> str | None:
        """Where it listens, once started with the real port and its server key."""
        return self._listen_address

    async def start(self) -> None:
        """Bind and listen, if it has where."""
        await self.bind()
        try:
            self.listen()
        except BaseException:
            await self.close()
            raise

    async def bind(self) -> None:
        """Take the address, and let nobody connect before `listen`.

        Raises:
            TransportError: as `start`.
        """
        self._loop = asyncio.get_running_loop()
        if self._listen_address is None:
            return
        try:
            self._bound = await bound_socket(self._listen_address, self._congestion_control)
        except BaseException:
            await self.close()
            raise
        host, port = self._bound.getsockname()[:2]
        address = format_address(host, port)
        key = None if self._keys is None else self._keys.server.public
        self._listen_address = address if key is None else with_key(address, key)

    def listen(self) -> None:
        """Let others connect to the address that `bind` took.

        Raises:
            TransportError: if somebody else took it, too, and listened first.
        """
        if self._bound is not None:
            bound, self._bound = self._bound, None
            with bound:
                self._listener = self._listen(bound)

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
        if self._bound is not None:
            self._bound.close()
            self._bound = None
        if self._listener is not None:
            self._listener.close(self.options.linger_s)
            self._listener = None
        if self._admission is not None:
            self._admission.close()
            self._admission = None
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

    def dial_failed(self, peer: PeerId, reason: str, *, is_refused: bool) -> None:
        """Pass on that an attempt to dial failed."""
        if self.on_dial_failed is not None and not self._is_closed:
            self.on_dial_failed(peer, reason, is_refused)

    def adopt(self, inbound: Inbound) -> None:
        """Enter an inbound peer."""
        self._peers[inbound.peer] = inbound

    def forget(self, inbound: Inbound) -> None:
        """Let go of an inbound peer whose connection is over."""
        self._peers.pop(inbound.peer, None)

    def server_keys(self, address: str) -> tuple[bytes | None, ...]:
        """Return the keys that may be those of the process at `address`; None does not encrypt."""
        if self._keys is not None:
            return self._keys.server_keys(address)
        if parse_key(address) is not None:
            raise TransportError(
                f"{without_key(address)} is encrypted, and this node is not: security.curve must "
                "be the same on all nodes of a run"
            )
        return (None,)

    def connect(
        self,
        host: str,
        port: int,
        server_key: bytes | None,
        on_readable: Callable[[], None],
        on_news: OnNews,
    ) -> ZmqChannel:
        """Open a DEALER that makes one attempt.

        Raises:
            TransportError: if no socket is to be had now.
        """
        try:
            channel = ZmqChannel(
                self.context, zmq.DEALER, self.options, self.loop, on_readable, on_news
            )
        except zmq.ZMQError as error:
            raise TransportError(
                f"cannot connect to {format_address(host, port)}: {error}; if too many files are "
                "open, raise their limit (ulimit -n)"
            ) from error
        if self._keys is not None and server_key is not None:
            channel.dial_curve(self._keys.client, server_key)
        channel.socket.setsockopt(zmq.IPV6, int(":" in host))
        channel.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        channel.socket.connect(format_address(host, port))
        channel.look()
        return channel

    def _listen(self, bound: socket.socket) -> Listener:
        host, port = bound.getsockname()[:2]
        listen_on(bound, format_address(host, port))
        listener = Listener(self, Gate(bound))
        channel = ZmqChannel(
            self.context,
            zmq.ROUTER,
            self.options,
            self.loop,
            functools.partial(self.note, listener),
            listener.on_news,
        )
        listener.channel = channel
        if self._keys is not None:
            self._admission = Admission(self.context, self.loop, self._keys.client.public)
            channel.serve_curve(self._keys.server)
        channel.socket.setsockopt(zmq.IPV6, int(":" in host))
        channel.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        channel.socket.setsockopt(zmq.USE_FD, bound.detach())
        channel.socket.bind(format_address(host, port))
        channel.look()
        return listener

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
