"""The ZeroMQ transport: messages over TCP.

Every parent binds one ROUTER socket, and every dialled link uses a DEALER socket. A `ZmqChannel`
(`channel.py`) is one raw socket, with the events of its connections. A `Listener` (`listener.py`)
shares one channel among all inbound peers, and `admission.py` limits these peers. A `DialledLink`
(`dialler.py`) owns at most one channel at a time.

    dialled    looking up -> connecting -> up (Connected) -> ended (Disconnected) -> backoff
               -> again
               looking up or connecting fails (DialFailed) -> backoff -> again
    inbound    accepted -> known with its first message (Connected) -> ended (Disconnected)

**One connection, one channel, one identity.** libzmq would mix the messages of two connections in
one pipe. So a dialled link opens a new channel for each attempt, and libzmq's own reconnection is
off. ZMQ_IMMEDIATE stays 0. With 1, messages that a peer sent just before closing would be
discarded. The end of a connection is reported only after its channel has been drained, so the last
messages are received before the end. The ROUTER names each inbound connection itself, because
dialling sockets send no routing id. So a node that reconnects after a half-open connection is a new
peer, and is not refused as a duplicate. libzmq reports the end of an inbound connection by its
descriptor. So a peer's descriptor is read with its first message. libzmq reports the end of the
connection before it closes the descriptor. So the number of a descriptor never belongs to two peers
at once.

**Backpressure: the count of unsent bytes comes from the frames that libzmq has released.** A ROUTER
does not report how many bytes wait for one peer. The high-water mark of a ROUTER counts messages.
Without ROUTER_MANDATORY, the ROUTER drops messages silently. So sends have no high-water mark.
Instead pyzmq's tracker of a zero-copy frame reports that libzmq has passed the frame to the kernel.
A connection sends in order, so one tracker covers all frames before it. The count is exact, needs
no acknowledgements on the wire, and is cheap, because one tracker per 64 KiB is enough. If the
receiving side stops reading (RCVHWM), TCP fills, trackers stay open, and `send` returns False.

**Sockets are drained raw, on the loop.** A reader callback only marks a socket as readable.
`receive` takes messages until EAGAIN or the end of its budget, and yields to the loop before it
continues. So there is one wake-up per burst, and no future per message. ZeroMQ's descriptor is
edge-triggered: an edge means "read ZMQ_EVENTS", and any send may consume an edge. So the loop reads
ZMQ_EVENTS again in the turn after a send, and a socket stays marked until it returns EAGAIN.
Monitors are drained in their callback, because libzmq's I/O thread waits while a monitor is full.

**Encryption** is CURVE (`curve.py`). A transport with keys encrypts all its links, and a transport
without keys encrypts none. libzmq closes a connection that does not finish the handshake in time.
ZMTP 1 has no handshake. So a listener without keys cannot close a connection that sends the bytes
of ZMTP 1.

**Bulk connections** transfer chunks that are already encrypted. CURVE would take more CPU time than
all other work on a chunk. A dialled link requests each connection over CURVE, and gets a port and a
token:

    dialler                              listener
      BULK_ASK                 ->                      over the link
                               <-  BULK_OFFER, port, token
      PLAIN handshake, token   ->                      to that port, which has a ROUTER of its own
      an empty message         ->                      introduces the connection; its only message
                               <-  messages that are `is_public`; all others stay on the link

A token is valid for one connection of one link, and expires with the link. Without a token the
handshake fails. During the handshake libzmq reads at most 256 bytes at a time and buffers nothing.
The bounds on strangers are the same as on the link's own port. Only the empty message is accepted
from a dialler. A dialler marks messages over a bulk connection `is_public`, because another machine
may have made these messages. If a bulk connection cannot be opened (a firewall blocks its port),
all messages use the link. If a bulk connection ends, the link is dialled again.

**Heartbeats** are those of ZMTP. A thread of libzmq answers heartbeats, so a node with a busy loop
does not look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence

import zmq

from echo.core.bounds import MAX_CONNECTIONS
from echo.core.errors import TransportError
from echo.core.timers import OncePerMinute
from echo.net.admission import BULK_DOMAIN, DOMAIN, MAX_STRANGER_BYTES, ZapHandler
from echo.net.channel import (
    BULK_OFFER,
    BULK_PORT_OFFSET,
    TOKEN_BYTES,
    Burst,
    OnNews,
    Socket,
    ZmqChannel,
)
from echo.net.curve import CurveKeys
from echo.net.dialler import DialledLink
from echo.net.listener import BulkListener, Inbound, Listener, bound_socket, listen_on
from echo.net.transport import (
    MAX_PORT,
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

_log = logging.getLogger(__name__)

# Longer than any run: libzmq must not redial, and its value for "never" (-1) loses unread messages.
_NEVER_MS = 1_000_000_000


class ZmqTransport(Transport):
    """Exchanges messages over TCP with ZeroMQ.

    Args:
        listen_address: tcp://host:port to bind, with port 0 for any free port; None to dial only.
        options: bounds and timings.
        keys: keys of this process; None if links are not encrypted.
        congestion_control: algorithm of inbound connections; None for the system's default.
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
        self._admission: ZapHandler | None = None
        self.options = options or TransportOptions()
        self.totals = TransportStats()
        self.context: zmq.Context[Socket] = zmq.Context()
        self.context.blocky = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.listener: Listener | None = None
        self._peers: dict[PeerId, DialledLink | Inbound] = {}
        self._ids = itertools.count(1)
        self._noted: dict[Listener | DialledLink, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._bound: socket.socket | None = None
        self._bulk_bound: socket.socket | None = None
        self.bulk_listener: BulkListener | None = None
        self.bulk_port = 0
        """Port for bulk connections, offered to peers; 0 if there is no such port."""
        self._warnings = OncePerMinute()
        self._is_closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which the transport was started.

        Raises:
            TransportError: if the transport has not been started.
        """
        if self._loop is None:
            raise TransportError("the transport has not been started")
        return self._loop

    @property
    def listen_address(self) -> str | None:
        """The address at which this transport listens; None if it only dials.

        After the start, the address has the real port and the transport's server key.
        """
        return self._listen_address

    async def start(self) -> None:
        """Bind the address and listen, if there is an address."""
        await self.bind()
        try:
            self.listen()
        except BaseException:
            await self.close()
            raise

    async def bind(self) -> None:
        """Bind the address; connections are refused until `listen` is called.

        Raises:
            TransportError: if the address cannot be bound; the message names the address and the
                remedy.
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
        given, wanted = parse_address(self._listen_address)
        _, percent, interface = given.partition("%")  # the kernel does not name the interface
        host = f"{host}{percent}{interface}"
        if self._keys is not None:
            self._bulk_bound = await self._bind_bulk(host, wanted and wanted + BULK_PORT_OFFSET)
        address = format_address(host, port)
        key = None if self._keys is None else self._keys.server.public
        self._listen_address = address if key is None else with_key(address, key)

    async def _bind_bulk(self, host: str, wanted: int) -> socket.socket | None:
        """Return a socket for bulk connections at the port `wanted`, or else at any free port.

        Return None if no port can be bound.
        """
        for port in (wanted, 0):
            with contextlib.suppress(TransportError):
                bound = await bound_socket(format_address(host, port), self._congestion_control)
                if wanted and not port:
                    fault, remedy = "is taken", "free the other and start again"
                    if wanted > MAX_PORT:
                        most = MAX_PORT - BULK_PORT_OFFSET
                        fault, remedy = "does not exist", f"listen at a port up to {most}"
                    _log.warning(
                        "port %d %s, at which weights would go out: they do at port %d; open that "
                        "one, or %s",
                        wanted,
                        fault,
                        bound.getsockname()[1],
                        remedy,
                    )
                return bound
        return None

    def listen(self) -> None:
        """Accept connections at the address that `bind` took.

        Raises:
            TransportError: if the kernel refuses to listen.
        """
        if self._bound is not None:
            bound, self._bound = self._bound, None
            with bound:
                listen_on(bound)
                self.listener = Listener(self)
                self._listen(self.listener, bound)
        if self._bulk_bound is not None:
            bound, self._bulk_bound = self._bulk_bound, None
            with bound:
                listen_on(bound)
                self.bulk_port = bound.getsockname()[1]
                self.bulk_listener = BulkListener(self)
                self._listen(self.bulk_listener, bound)

    def dial(self, address: str, *, has_bulk: bool = False) -> PeerId:
        """Start to connect to `address`, and return the id of the peer."""
        self._check_open()
        peer = self.mint("out")
        self._peers[peer] = DialledLink(self, peer, address, has_bulk=has_bulk)
        return peer

    def hang_up(self, peer: PeerId) -> None:
        """End the link to a peer; no event of the peer follows."""
        match self._peers.pop(peer, None):
            case DialledLink() as link:
                link.close()
                self._noted.pop(link, None)
            case Inbound() as inbound:
                inbound.is_hung_up = True
                if inbound.user:
                    self.loop.call_later(self.options.linger_s, self._close_guest, inbound)

    @property
    def has_guests(self) -> bool:
        """Whether guests are admitted in addition to the nodes of the run."""
        return self._keys is not None and bool(self._keys.guests)

    def _close_guest(self, inbound: Inbound) -> None:
        if self.listener is not None:
            self.listener.close_guest(inbound)

    def send(
        self,
        peer: PeerId,
        frames: Sequence[bytes | bytearray | memoryview],
        *,
        is_public: bool = False,
    ) -> bool:
        """Queue a message; return False if the peer is not connected or its queue is full."""
        num_bytes = checked_num_bytes(frames, self.options.max_message_bytes)
        is_sent = False
        match self._peers.get(peer):
            case DialledLink() as link:
                is_sent = link.send(frames, num_bytes)
            case Inbound() as inbound if self.listener is not None:
                queue = inbound.outbox
                if is_public and inbound.bulk:
                    queue = min(inbound.bulk, key=lambda outbox: outbox.unsent_bytes)
                    # Among equal connections take the least recently used: bytes that wait in
                    # the kernel's buffers are not counted.
                    inbound.bulk.remove(queue)
                    inbound.bulk.append(queue)
                is_sent = queue.send(frames, num_bytes)
                self.listener.channel.check_soon()
                if inbound.bulk and self.bulk_listener is not None:
                    self.bulk_listener.channel.check_soon()
        if is_sent:
            self.totals.messages_out += 1
            self.totals.bytes_out += num_bytes
        else:
            self.totals.refused_sends += 1
        return is_sent

    async def receive(self) -> list[TransportEvent]:
        """Wait until there are events, and return at most one burst of them."""
        if self._noted:
            await asyncio.sleep(0)  # a busy transport must not starve the rest of the loop
        while True:
            self._check_open()
            burst = Burst(self.options, self.totals)
            self._drain(burst)
            if burst.events:
                return burst.events
            if self._noted:  # all messages of the burst were discarded
                await asyncio.sleep(0)
            else:
                self._waiter = self.loop.create_future()
                await self._waiter

    async def close(self) -> None:
        """Close all sockets; accepted messages are still delivered for `linger_s` seconds."""
        self._is_closed = True
        self._wake()
        for peer in self._peers.values():
            if isinstance(peer, DialledLink):
                peer.close()
        self._peers.clear()
        self._noted.clear()
        for bound in (self._bound, self._bulk_bound):
            if bound is not None:
                bound.close()
        self._bound = self._bulk_bound = None
        for listener in (self.listener, self.bulk_listener):
            if listener is not None:
                listener.close(self.options.linger_s)
        self.listener = self.bulk_listener = None
        if self._admission is not None:
            self._admission.close()
            self._admission = None
        # Waits for lingering sockets, each linger_s at most, so it runs in a thread.
        await asyncio.to_thread(self.context.term)

    def stats(self) -> TransportStats:
        """Return a copy of the totals up to now."""
        return dataclasses.replace(self.totals)

    def note(self, source: Listener | DialledLink) -> None:
        """Remember that `source` has events, so that the next `receive` takes them."""
        self._noted[source] = None
        self._wake()

    def mint(self, prefix: str) -> PeerId:
        """Return a new peer id that begins with `prefix`."""
        return f"{prefix}-{next(self._ids)}"

    def adopt(self, inbound: Inbound) -> None:
        """Add an inbound peer to the transport's peers."""
        self._peers[inbound.peer] = inbound

    def forget(self, inbound: Inbound) -> None:
        """Remove an inbound peer and the peer's unused tokens, because its connection has ended."""
        self._peers.pop(inbound.peer, None)
        if self._admission is not None:
            for token in inbound.tokens:
                self._admission.tokens.pop(token, None)

    def find_inbound(self, peer: PeerId) -> Inbound | None:
        """Return the inbound peer with this id; None if the peer's connection has ended."""
        found = self._peers.get(peer)
        return found if isinstance(found, Inbound) else None

    def offer_bulk(self, inbound: Inbound) -> None:
        """Send an inbound peer a token and the bulk port.

        The port is 0 if there is no bulk port.
        """
        if self._admission is None or len(inbound.tokens) >= MAX_CONNECTIONS:
            return
        token = secrets.token_hex(TOKEN_BYTES).encode()
        inbound.tokens.append(token)
        if self.bulk_port:
            self._admission.tokens[token] = inbound.peer
        offer = [BULK_OFFER, self.bulk_port.to_bytes(2, "big"), token]
        inbound.outbox.send(offer, sum(map(len, offer)))

    def warn(self, place: str, reason: str, text: str) -> None:
        """Log a warning, at most once a minute for each place and reason.

        So redials and further links to the same place do not repeat the warning.
        """
        line = self._warnings.line(place, reason, text, now=self.loop.time())
        if line is not None:
            _log.warning("%s", line)

    def server_keys(self, address: str) -> tuple[bytes | None, ...]:
        """Return the keys that the process at `address` may have; None means no encryption."""
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
        security: Mapping[int, int | bytes],
        on_readable: Callable[[], None],
        on_news: OnNews,
    ) -> ZmqChannel:
        """Open a DEALER socket that makes one attempt to connect.

        Raises:
            TransportError: if libzmq cannot make a socket now.
        """
        more = {**security, zmq.IPV6: int(":" in host), zmq.RECONNECT_IVL: _NEVER_MS}
        try:
            channel = ZmqChannel(
                self.context, zmq.DEALER, self.options, self.loop, on_readable, on_news, more
            )
        except zmq.ZMQError as error:
            raise TransportError(
                f"cannot connect to {format_address(host, port)}: {error}; if too many files are "
                "open, raise their limit (ulimit -n)"
            ) from error
        channel.socket.connect(format_address(host, port))
        channel.check()
        return channel

    def curve_of(self, server_key: bytes | None) -> dict[int, int | bytes]:
        """Return the socket options that encrypt a link to the owner of this server key.

        If links are not encrypted, `server_key` is None and no options are returned.
        """
        if self._keys is None or server_key is None:
            return {}
        client = self._keys.client
        return {
            zmq.CURVE_SERVERKEY: server_key,
            zmq.CURVE_PUBLICKEY: client.public,
            zmq.CURVE_SECRETKEY: client.secret,
        }

    def _listen(self, listener: Listener, bound: socket.socket) -> None:
        host, port = bound.getsockname()[:2]
        more: dict[int, int | bytes] = {zmq.IPV6: int(":" in host), zmq.ROUTER_MANDATORY: 1}
        if self._keys is not None:
            if self._admission is None:
                users = {self._keys.client.public: "", **self._keys.guests}
                self._admission = ZapHandler(self.context, self.loop, users, self.warn)
            more[zmq.ZAP_ENFORCE_DOMAIN] = 1  # libzmq refuses all clients until it is answered
            if isinstance(listener, BulkListener):
                more[zmq.ZAP_DOMAIN] = BULK_DOMAIN
                more[zmq.PLAIN_SERVER] = 1
                more[zmq.MAXMSGSIZE] = MAX_STRANGER_BYTES
            else:
                more[zmq.ZAP_DOMAIN] = DOMAIN
                more[zmq.CURVE_SERVER] = 1
                more[zmq.CURVE_SECRETKEY] = self._keys.server.secret
        note = functools.partial(self.note, listener)
        listener.channel = channel = ZmqChannel(
            self.context, zmq.ROUTER, self.options, self.loop, note, listener.on_news, more
        )
        channel.socket.setsockopt(zmq.USE_FD, bound.detach())
        channel.socket.bind(format_address(host, port))
        channel.check()

    def _drain(self, burst: Burst) -> None:
        for source in list(self._noted):
            if burst.is_full:
                break
            is_empty = source.drain(burst)
            del self._noted[source]
            if not is_empty:
                self._noted[source] = None  # the other sources are drained first

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("the transport is closed")
