"""ZeroMQ transport: messages over TCP, in the only file that knows it.

Parents bind one ROUTER, and every dial is a DEALER. A `ZmqChannel` is one raw socket with its news;
a `Listener` shares one channel among all inbound peers, a `DialledLink` owns at most one at a time.

    dialled    looking up -> connecting -> up (Connected) -> over (Disconnected) -> backoff -> again
               looking up, or connecting, in vain (DialFailed) -> backoff -> again
    inbound    accepted -> known with its first message (Connected) -> over (Disconnected)

**One connection, one channel, one identity.** For a dialled link a new channel is opened for each
attempt, since messages of two connections could otherwise mix in one pipe: libzmq's own
reconnection is off, and ZMQ_IMMEDIATE stays 0, because 1 throws away what a peer said just before
it closed. The end is told only when the channel has been drained after the news of it, so that last
messages come first. The ROUTER names each inbound connection by itself (no routing id is sent), so
a node that comes back after a half-open connection is a new peer at once instead of a refused
duplicate. An inbound connection's end arrives as news about a file descriptor; the descriptor of a
peer is asked for with its first message. The end is announced before the descriptor is closed, so
reading the news before adopting a descriptor never mixes up two owners.

**Backpressure: bytes are counted by what libzmq has released.** A ROUTER cannot tell what waits for
one peer, and its high-water mark counts messages, dropping silently unless ROUTER_MANDATORY is set.
So there is none on sends. Instead pyzmq's tracker of a zero-copy frame says when libzmq has passed
it on to the kernel; a connection sends in order, so one tracker settles everything before it. That
is exact, needs no acknowledgements on the wire, and one tracker per 64 KiB keeps it cheap. On the
other side RCVHWM stops reading, TCP fills, trackers stay open, and `send` refuses. (Left to
admission: libzmq gathers the frames of one message without a bound on their number.)

**Sockets are drained raw, on the loop.** A reader callback only notes that a socket has something;
`receive` takes messages until EAGAIN or the end of its budget, one wake-up per burst instead of one
future per message, and yields to the loop before it goes on. The descriptor is edge-triggered: an
edge means "look at ZMQ_EVENTS", any send may swallow one, so that the loop's next turn looks too,
and a socket stays noted until it said EAGAIN. Monitors are drained in their callback at once, since
libzmq's I/O thread waits on a full one.

**Encryption** is CURVE (`curve.py`), on all links of a transport with keys and on none of one
without. A stranger who does not speak it, or nothing at all, is closed when the handshake's timeout
is over; a plain listener has no such defence against the bytes of ZMTP 1.

**Bulk connections** carry what is encrypted already: CURVE would cost more than all else on the way
does. A dialled link asks for one, over CURVE, and is told a port and a token:

    dialler                              listener
      BULK_ASK                 ->                      over the link
                               <-  BULK_OFFER, port, token
      PLAIN handshake, token   ->                      to that port, which has a ROUTER of its own
      an empty message         ->                      names the connection; its last one
                               <-  what is_public says, from now on; the rest stays on the link

A token is good for one connection of one link, and dies with the link. Who has none gets no further
than the handshake, in which libzmq takes 256 bytes at a time and keeps nothing; that many strangers
are let in as on the link's own port. Nothing but the empty message is read there. What comes to a
dialler from there is marked `is_public`: somebody on the way may have made it. If a bulk connection
cannot be had (its port is not let through), all goes over the link; if it ends, the link is dialled
anew.

**Heartbeats** are ZMTP's, answered by libzmq's thread: a busy loop does not make a node look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import errno
import functools
import itertools
import logging
import random
import secrets
import socket
import struct
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from echo.core.errors import TransportError
from echo.core.timers import OncePerMinute
from echo.net.curve import CurveKeys
from echo.net.kernel import MAX_SOCKETS, descriptor_limit, num_sockets
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
    format_address,
    is_loopback,
    parse_address,
    parse_dial_address,
    parse_key,
    with_key,
    without_key,
)

# --- listening socket, made here to choose its congestion control ---------------------------------
#
# It is bound first and listens later: the address is taken before a node has opened its files, and
# strangers cannot take the descriptors that it opens them with. Two learners may start on one port
# within the minutes that a model takes, and Linux lets both bind it until one listens. So a socket
# listens for an instant, and then no longer lets others share its port (`_hold`).
#
# Accepted connections inherit the setting, and it rules the direction that carries the weights:
# from the parent, who binds, to its children. BBR keeps its rate under loss where cubic collapses.
# Where the kernel does not permit the wanted algorithm, and on loopback, the system's default
# stays.

_log = logging.getLogger(__name__)

_MAX_BACKLOG = 512
"""Connections that wait in the kernel for libzmq, which accepts all of them at once; a sixteenth of
the limit of open files at most."""
_REMEDIES = {
    errno.EADDRINUSE: "another process listens there; stop it or choose another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; use one of its own or 0.0.0.0",
    errno.EACCES: "ports below 1024 need privileges; choose a higher one",
}


async def bound_socket(
    address: str,
    congestion_control: str | None,
) -> socket.socket:
    """Return a non-blocking TCP socket that is bound to `address` and does not listen yet.

    Args:
        address: tcp://host:port.
        congestion_control: how accepted connections are to send, where the kernel permits it; None
            for the system's default.

    Raises:
        TransportError: if it cannot be bound; the message names the address and the remedy.
    """
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
            if port:
                _hold(bound)
            _set_congestion_control(bound, congestion_control)
            bound.setblocking(False)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a host's name
        raise _refusal(address, error) from error
    return bound


def _hold(bound: socket.socket) -> None:
    """Have the kernel refuse the port to whoever binds it from now on; newcomers are refused, too.

    Raises:
        OSError: if somebody else listens there already.
    """
    if sys.platform == "linux":  # others refuse a port that is bound
        bound.listen(1)
        bound.shutdown(socket.SHUT_RDWR)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def listen_on(bound: socket.socket) -> None:
    """Let others connect.

    Raises:
        TransportError: if the kernel refuses.
    """
    try:
        # Connections of a process before this one may linger at the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen(min(_MAX_BACKLOG, descriptor_limit() // 16))
    except OSError as error:
        raise _refusal(format_address(*bound.getsockname()[:2]), error) from error


def _refusal(address: str, error: OSError | UnicodeError) -> TransportError:
    remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "check the host and the port")
    return TransportError(f"cannot listen on {address}: {error}: {remedy}")


def _set_congestion_control(bound: socket.socket, name: str | None) -> None:
    """Choose how accepted connections send; keep the default where the kernel refuses."""
    host = str(bound.getsockname()[0])
    if name is None or host == "::1" or host.startswith("127."):
        return
    with contextlib.suppress(OSError):  # `costly_settings` says what that costs
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


# --- connections: who is up, who is over, and what is told in which order -------------------------

PROBE_S = 3.0
"""Seconds that a look at what is at an address may take."""

SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""How the greeting of a ZMTP 3 peer begins; one that hears no more of it goes on with its own."""
GREETING_BYTES = 64
"""A whole greeting; its bytes 12 to 32 are the mechanism."""

STRANGERS_NEWS = 1024
"""News that is read in one go to learn who they are."""
_SAME = "security.curve must be the same on all nodes of a run"

# --- bulk connections: how they are asked for. No message of the protocol begins like that. ---

BULK_ASK = b"\0bulk?"
BULK_OFFER = b"\0bulk!"
BULK_PORT_OFFSET = 1000
"""The port is so much above the listener's own, where it is free."""
TOKEN_BYTES = 16
MAX_STRANGER_BYTES = 256
"""Of one frame of somebody who has shown no token: a handshake's are shorter."""


class News(enum.Enum):
    """What can happen to a connection."""

    ACCEPTED = enum.auto()
    UP = enum.auto()
    HANDSHAKE_FAILED = enum.auto()
    REFUSED = enum.auto()
    """The side that listens did not admit the other's key."""
    OVER = enum.auto()


OnNews = Callable[[News, int], None]
"""Called with the news and the file descriptor it is about; of a handshake none is known."""


class Burst:
    """What one `receive` returns, and how much room is left in it."""

    def __init__(self, options: TransportOptions, stats: TransportStats) -> None:
        self.events: list[TransportEvent] = []
        self._bytes_left = options.max_burst_bytes
        self._messages_left = options.max_burst_messages
        self._stats = stats

    @property
    def is_full(self) -> bool:
        """Whether no further message should be taken."""
        return self._bytes_left <= 0 or self._messages_left <= 0

    def add(self, peer: PeerId, frames: list[Frame], *, is_public: bool = False) -> None:
        """Add a message."""
        num_bytes = sum(map(len, frames))
        self._bytes_left -= num_bytes
        self._messages_left -= 1
        self._stats.messages_in += 1
        self._stats.bytes_in += num_bytes
        self._stats.public_messages_in += is_public
        self.events.append(Received(peer, frames, is_public))

    def discard(self) -> None:
        """Count a message that nobody wants; it takes room, or a flood of them would hold us."""
        self._messages_left -= 1
        self._stats.discarded_messages += 1


@dataclasses.dataclass(eq=False, slots=True)
class Inbound:
    """One connection that somebody else opened."""

    peer: PeerId
    identity: bytes
    outbox: ZmqOutbox
    descriptor: int = -1
    """Of its connection; -1 once that is over."""
    is_hung_up: bool = False
    tokens: list[bytes] = dataclasses.field(default_factory=list)
    """One for each bulk connection that it has asked for."""
    bulk: list[ZmqOutbox] = dataclasses.field(default_factory=list)


LOOK_S = 0.1
"""Between two looks for unfinished messages that have become too long."""
CONNECTIONS_PER_LOOK = 512
"""Connections in one look, by a call of the kernel for each; of more, each less often."""
_BYTES_RECEIVED = struct.Struct("=128xQ")
"""`tcpi_bytes_received` of Linux's struct tcp_info."""


class AcceptedConnections:
    """The connections that libzmq has accepted, with two bounds that libzmq does not have.

    **Strangers** are connections over which no message has come. libzmq accepts every connection,
    and each takes a descriptor, without which the node can neither write its files nor dial. So at
    most `max_strangers` stay open: the oldest is closed first. A member sends its first message
    within a few round trips, so only many more connections in that time can displace it.

    **Unfinished messages.** libzmq shows a message when its last frame has come. It bounds the size
    of a frame and not the number of frames, so it would store a message without an end. The kernel
    counts the bytes of each connection; one that has received more than `max_message_bytes` since
    its last whole message is closed. Linux only: other kernels do not report the count.

    The descriptors are libzmq's. It reports that a connection is over before it closes the
    descriptor, so after all news is read a number still stands for the connection that was noted,
    but for a few microseconds. A number that has become another's in those is harmless: `shutdown`
    fails on a file, and a link that it ends is dialled again.
    """

    def __init__(self, max_strangers: int, max_message_bytes: int) -> None:
        self._max_strangers = max_strangers
        self._max_message_bytes = max_message_bytes
        self._strangers: dict[int, None] = {}
        self._whole_bytes: OrderedDict[int, int] = OrderedDict()
        """Descriptor -> bytes received when the last look found a whole message. Next look first.
        """
        self._has_spoken: set[int] = set()
        """Those over which a whole message has come since their last look."""

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._whole_bytes

    @property
    def has_excess(self) -> bool:
        """Whether there are more strangers than may stay."""
        return len(self._strangers) > self._max_strangers

    def add(self, descriptor: int) -> None:
        """Note a connection that libzmq has accepted."""
        self._strangers[descriptor] = None
        self._whole_bytes[descriptor] = 0

    def discard(self, descriptor: int) -> None:
        """Note that a connection is over."""
        self._strangers.pop(descriptor, None)
        self._whole_bytes.pop(descriptor, None)
        self._has_spoken.discard(descriptor)

    def spoke(self, descriptor: int) -> None:
        """Note that a whole message has come over a connection."""
        if descriptor in self._whole_bytes:
            self._strangers.pop(descriptor, None)
            self._has_spoken.add(descriptor)

    def close_excess(self) -> int:
        """Close the oldest strangers beyond the bound; return how many. All news must be read."""
        excess = list(self._strangers)[: max(0, len(self._strangers) - self._max_strangers)]
        for descriptor in excess:
            del self._strangers[descriptor]
            _shut_down(descriptor)
        return len(excess)

    def close_unfinished(self) -> int:
        """Close connections whose unfinished message is too long; return how many."""
        num_closed = 0
        for descriptor in list(itertools.islice(self._whole_bytes, CONNECTIONS_PER_LOOK)):
            self._whole_bytes.move_to_end(descriptor)
            received = _bytes_received(descriptor)
            if descriptor in self._has_spoken:
                self._has_spoken.discard(descriptor)
                self._whole_bytes[descriptor] = received
            elif received - self._whole_bytes[descriptor] > self._max_message_bytes:
                self.discard(descriptor)
                _shut_down(descriptor)
                num_closed += 1
        return num_closed


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket object for a descriptor that stays libzmq's to close."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _shut_down(descriptor: int) -> None:
    """End a connection; libzmq closes it when it reads the end."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _bytes_received(descriptor: int) -> int:
    """Return what a connection has received; 0 where the kernel does not say."""
    if sys.platform != "linux":
        return 0
    try:
        with _borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    except OSError:
        return 0
    whole = len(info) == _BYTES_RECEIVED.size
    return int(_BYTES_RECEIVED.unpack(info)[0]) if whole else 0


def _largest_message(options: TransportOptions) -> int:
    """Return how many bytes a whole message may take on the wire, with what CURVE adds."""
    return options.max_message_bytes * 17 // 16 + (1 << 20)


class Listener:
    """All inbound peers, and the one channel that they share."""

    def __init__(self, host: ZmqTransport) -> None:
        self.channel: ZmqChannel
        self._host = host
        self._by_identity: dict[bytes, Inbound] = {}
        self._by_descriptor: dict[int, Inbound] = {}
        self._accepted = AcceptedConnections(
            host.options.max_strangers, _largest_message(host.options)
        )
        self._look: asyncio.TimerHandle | None = None
        """The next look for unfinished messages that have become too long."""
        self._closing: asyncio.Handle | None = None
        """The next look at strangers of whom there are too many."""
        self._ended: list[Inbound] = []

    def drain(self, burst: Burst) -> bool:
        """Move messages into the burst; return whether all have been taken."""
        while not burst.is_full:
            message = self.channel.receive()
            if message is None:
                self._report_ended(burst)
                return True
            identity, frames = message
            inbound = self._by_identity.get(identity) or self._admit(identity, burst)
            if inbound is not None:
                self._accepted.spoke(inbound.descriptor)
            if inbound is None or inbound.is_hung_up:
                burst.discard()
            else:
                self._hear(inbound, frames, burst)
        return False

    def _hear(self, inbound: Inbound, frames: list[Frame], burst: Burst) -> None:
        """Take in a message."""
        if frames == [BULK_ASK]:
            self._host.offer_bulk(inbound)
        else:
            burst.add(inbound.peer, frames)

    def on_news(self, news: News, descriptor: int) -> None:
        """Take in what happened to the connection behind a descriptor."""
        if news is News.REFUSED:
            self._host.totals.refused_clients += 1
        elif news is News.HANDSHAKE_FAILED:
            self._host.totals.failed_handshakes += 1
        elif news is News.ACCEPTED:
            self._accepted.add(descriptor)
            if self._look is None:
                self._look = self._host.loop.call_later(LOOK_S, self._close_unfinished)
            if self._accepted.has_excess and self._closing is None:
                self._closing = self._host.loop.call_soon(self._close_strangers)
        elif news is News.OVER:
            self._accepted.discard(descriptor)
            inbound = self._by_descriptor.pop(descriptor, None)
            if inbound is not None:
                inbound.descriptor = -1  # the next connection may get the number
                self._ended.append(inbound)
                self._host.note(self)

    def close(self, linger_s: float) -> None:
        """Close the channel, and so every connection."""
        for handle in (self._closing, self._look):
            if handle is not None:
                handle.cancel()
        self.channel.close(linger_s)

    def _close_strangers(self) -> None:
        """Close the oldest of too many strangers, as soon as all news of connections is read."""
        # A turn's share of the news only, so that a flood does not hold the loop.
        is_current = self.channel.read_news(STRANGERS_NEWS)
        num_closed = self._accepted.close_excess() if is_current else 0
        if num_closed:
            text = (
                "closed connections that said nothing: more than "
                f"{self._host.options.max_strangers} were open at once; if they are nodes of this "
                "run, raise the limit of open files (ulimit -n)"
            )
            self._host.warn("", "strangers", text)
            self._host.totals.closed_strangers += num_closed
        self._closing = None
        if num_closed or not is_current:
            self._closing = self._host.loop.call_soon(self._close_strangers)

    def _close_unfinished(self) -> None:
        """Close connections whose unfinished message is too long, and look again soon.

        Not while whole messages wait for the node to receive them: those are finished.
        """
        is_idle = not self.channel.has_whole_message()
        num_closed = self._accepted.close_unfinished() if is_idle else 0
        if num_closed:
            text = "closed a connection over which a message came that was too long, in many frames"
            self._host.warn("", "unfinished", text)
            self._host.totals.discarded_messages += num_closed
        self._look = self._host.loop.call_later(LOOK_S, self._close_unfinished)

    def _admit(self, identity: bytes, burst: Burst) -> Inbound | None:
        descriptor = self.channel.descriptor()
        if descriptor is None:
            return None
        self.channel.read_news()
        inbound = self._meet(identity, burst)
        if inbound is None:
            return None
        self._by_identity[identity] = inbound
        previous = self._by_descriptor.pop(descriptor, None)
        if previous is not None:
            previous.descriptor = -1
            self._ended.append(previous)
        if descriptor in self._accepted:
            inbound.descriptor = descriptor
            self._by_descriptor[descriptor] = inbound
        else:  # gone before it was heard
            self._ended.append(inbound)
        return inbound

    def _meet(self, identity: bytes, burst: Burst) -> Inbound | None:
        """Return the peer whose first message has come; None if it is nobody's."""
        inbound = Inbound(self._host.mint("in"), identity, self.channel.outbox(identity))
        self._host.adopt(inbound)
        burst.events.append(Connected(inbound.peer, None))
        return inbound

    def _report_ended(self, burst: Burst) -> None:
        for inbound in self._ended:
            del self._by_identity[inbound.identity]
            self._host.forget(inbound)
            if not inbound.is_hung_up:
                burst.events.append(Disconnected(inbound.peer, "the peer's connection closed"))
        self._ended.clear()


class BulkListener(Listener):
    """The bulk connections of inbound peers."""

    def _meet(self, identity: bytes, burst: Burst) -> Inbound | None:
        owner = self._host.find_inbound(self.channel.user())
        if owner is None:
            return None
        outbox = self.channel.outbox(identity)
        owner.bulk.append(outbox)
        return Inbound(owner.peer, identity, outbox)

    def _hear(self, inbound: Inbound, frames: list[Frame], burst: Burst) -> None:
        if frames != [b""]:  # its first message has been told by `_meet`, and says nothing
            burst.discard()

    def _report_ended(self, burst: Burst) -> None:
        for inbound in self._ended:
            del self._by_identity[inbound.identity]
            owner = self._host.find_inbound(inbound.peer)
            if owner is not None and inbound.outbox in owner.bulk:
                owner.bulk.remove(inbound.outbox)
        self._ended.clear()


@dataclasses.dataclass(eq=False, slots=True)
class BulkChannel:
    """One bulk connection of a link that this node opens."""

    port: int
    channel: ZmqChannel = dataclasses.field(init=False)
    is_up: bool = False


class DialledLink:
    """A link that this node opens, and opens again after every loss until it is closed."""

    def __init__(
        self, host: ZmqTransport, peer: PeerId, address: str, *, has_bulk: bool = False
    ) -> None:
        self.peer = peer
        self.address = address
        self._has_bulk = has_bulk
        self._bulk: list[BulkChannel] = []
        self._asked_at = 0.0
        """When the first of them was asked for."""
        self._name, self._port = parse_dial_address(address)
        self._host = host
        # The one to try next comes first.
        self._keys = deque(host.server_keys(address))
        self._num_wrong_keys = 0
        self._fault: News | None = None
        self._ip_address, self._began_at = "", 0.0
        self._has_other_key = False
        self._channel: ZmqChannel | None = None
        self._outbox: ZmqOutbox | None = None
        self._is_up = False
        self._is_over = False
        self._up_at = 0.0
        self._num_attempts = 0
        self._redial_s = host.options.min_redial_s
        self._timer: asyncio.TimerHandle | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._failure: DialFailed | None = None
        """The last attempt, if it came to nothing and nobody has been told."""
        self._begin()

    def drain(self, burst: Burst) -> bool:
        """Move news and messages into the burst; return whether all have been taken."""
        if self._failure is not None:
            burst.events.append(self._failure)
            self._failure = None
        if self._channel is not None:
            self._channel.read_news()  # a message may have overtaken the news of its connection
        channel = self._channel
        if channel is None or not self._is_up:
            return True
        if self._outbox is None:
            self._outbox = channel.outbox(b"")
            burst.events.append(Connected(self.peer, self.address))
            if self._has_bulk and self._keys[0] is not None:
                self._asked_at = self._host.loop.time()
                self._outbox.send([BULK_ASK], len(BULK_ASK))
        is_empty = self._drain_channel(channel, burst)
        for bulk in self._bulk:
            is_empty &= self._drain_bulk(bulk.channel, burst)
        if is_empty and self._is_over:
            reason = f"the connection to {self.address} was lost"
            burst.events.append(Disconnected(self.peer, reason))
            self._redial(reason)
        return is_empty

    def _drain_channel(self, channel: ZmqChannel, burst: Burst) -> bool:
        while not burst.is_full:
            message = channel.receive()
            if message is None:
                return True
            _, frames = message
            if frames[0] == BULK_OFFER and self._has_bulk and len(self._bulk) < self._most_bulk:
                self._open_bulk(frames)
            else:
                burst.add(self.peer, frames)
        return False

    def _drain_bulk(self, bulk: ZmqChannel, burst: Burst) -> bool:
        while not burst.is_full:
            message = bulk.receive()
            if message is None:
                return True
            burst.add(self.peer, message[1], is_public=True)
        return False

    @property
    def _most_bulk(self) -> int:
        return self._host.options.max_bulk_connections

    def _open_bulk(self, offer: list[Frame]) -> None:
        """Connect to where the other side says that it waits; ask for more where the link is long.

        Each connection has a token of its own: whoever reads one on the way cannot use it again.
        """
        try:
            _, port_bytes, token = map(bytes, offer)
        except ValueError:
            return
        port = int.from_bytes(port_bytes, "big")
        if not 0 < port < 1 << 16:  # it could not listen
            return
        is_first = not self._bulk
        bulk = BulkChannel(port)
        with contextlib.suppress(TransportError):  # it goes without
            bulk.channel = self._host.connect(
                self._ip_address,
                port,
                {zmq.PLAIN_USERNAME: _BULK_DOMAIN, zmq.PLAIN_PASSWORD: token},
                functools.partial(self._host.note, self),
                functools.partial(self._on_bulk_news, bulk),
            )
            self._bulk.append(bulk)
            if is_first and self._outbox is not None:
                took_s = self._host.loop.time() - self._asked_at
                rtt_s = 0.0 if is_loopback(self.address) else took_s
                for _ in range(num_sockets(rtt_s, most=self._most_bulk) - 1):
                    self._outbox.send([BULK_ASK], len(BULK_ASK))

    def _on_bulk_news(self, bulk: BulkChannel, news: News, descriptor: int) -> None:
        if bulk not in self._bulk:
            return
        if news is News.UP:
            bulk.is_up = True
            bulk.channel.outbox(b"").send([b""], 0)
            bulk.channel.look_soon()
        elif news is News.OVER and bulk.is_up:
            self._is_over = True  # what was on its way is lost: as if the link were
            self._host.note(self)
        elif news is News.OVER:
            place = without_key(self.address)
            text = (
                f"port {bulk.port} of {place} cannot be reached: weights come over the other "
                "port, encrypted twice, at far more CPU; let connections to it through"
            )
            self._host.warn(place, "bulk", text)
            self._bulk.remove(bulk)
            bulk.channel.close(0)

    def _close_bulk(self) -> None:
        for bulk in self._bulk:
            bulk.channel.close(0)
        self._bulk.clear()

    def send(self, frames: Sequence[bytes | bytearray | memoryview], num_bytes: int) -> bool:
        """Accept a message if the connection is up and has room."""
        if self._channel is None or self._outbox is None or self._is_over:
            return False
        is_sent = self._outbox.send(frames, num_bytes)
        self._channel.look_soon()
        return is_sent

    def close(self) -> None:
        """End the link; what was accepted is still delivered for a while."""
        if self._timer is not None:
            self._timer.cancel()
        if self._attempt is not None:
            self._attempt.cancel()
        self._close_bulk()
        if self._channel is not None:
            is_useful = self._is_up and not self._is_over
            self._channel.close(self._host.options.linger_s if is_useful else 0)
            self._channel = None

    def _begin(self) -> None:
        self._timer = None
        self._attempt = self._host.loop.create_task(self._connect(), name=f"dial {self.address}")

    async def _connect(self) -> None:
        # Looked up here and not in the socket's own thread, where it would hold up all traffic.
        try:
            found = await self._host.loop.getaddrinfo(
                self._name, self._port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:  # the latter for what cannot be a host's name
            why = getattr(error, "strerror", None) or str(error)
            self._redial(f"the host name of {without_key(self.address)} is not known: {why}")
            return
        ip_address = str(found[self._num_attempts % len(found)][4][0])
        # An address of one network alone is nothing without the interface that leads there.
        _, percent, interface = self._name.partition("%")
        ip_address = ip_address.partition("%")[0] + percent + interface
        self._num_attempts += 1
        self._ip_address, self._began_at = ip_address, self._host.loop.time()
        self._is_up = self._is_over = self._has_other_key = False
        self._fault = None
        try:
            self._channel = self._host.connect(
                ip_address,
                self._port,
                self._host.curve_of(self._keys[0]),
                functools.partial(self._host.note, self),
                self._on_news,
            )
        except TransportError as error:
            self._redial(str(error))

    def _on_news(self, news: News, descriptor: int) -> None:
        if news is News.UP:
            self._is_up = True
            self._num_wrong_keys = 0
            self._up_at = self._host.loop.time()
            self._host.note(self)
        elif news in (News.HANDSHAKE_FAILED, News.REFUSED):
            self._host.totals.failed_handshakes += 1
            self._fault = news
            if news is News.HANDSHAKE_FAILED:
                self._keys.rotate(-1)
                self._num_wrong_keys += 1
                self._has_other_key = self._num_wrong_keys % len(self._keys) > 0
        elif self._is_up:
            self._is_over = True
            self._host.note(self)
        elif self._attempt is None or self._attempt.done():
            self._attempt = self._host.loop.create_task(self._explain())

    async def _explain(self) -> None:
        """Find out why an attempt came to nothing, and dial again."""
        options, place = self._host.options, without_key(self.address)
        took_s = self._host.loop.time() - self._began_at
        is_refused = False
        if self._fault is News.REFUSED:
            is_refused = True
            reason = (
                f"{place} refuses this node: it has another secret than the join string says, so "
                "it is of another run; copy runs/NAME/keys/join of the right learner"
            )
        else:
            probe_s = min(PROBE_S, options.connect_timeout_s)
            try:
                greeting = await look_at(
                    self._host.loop, self._ip_address, self._port, within_s=probe_s
                )
            except TimeoutError:
                reason = (
                    f"{place} does not answer: the host is off or cannot be reached, or a firewall "
                    "drops what is sent to it"
                )
            except ConnectionRefusedError:
                reason = f"the port of {place} is closed: nothing listens there"
            except OSError as error:
                reason = f"{place} cannot be reached: {error.strerror or error}"
            else:
                # One that is busy lets the handshake's time pass; one that refuses ends it at once.
                is_prompt = self._fault is not None and took_s < options.connect_timeout_s / 2
                reason, is_refused = self._diagnose(greeting, is_prompt=is_prompt)
        is_refused = is_refused and not self._has_other_key
        self._redial(reason, is_refused=is_refused)

    def _diagnose(self, greeting: bytes, *, is_prompt: bool) -> tuple[str, bool]:
        """Say what is there instead of whom we want, and whether that is for good.

        `greeting` is its first bytes; it `is_prompt` where it ended our handshake, and did not just
        let its time pass.
        """
        place = without_key(self.address)
        if not greeting.startswith(b"\xff") or len(greeting) < GREETING_BYTES:
            return (
                f"what answers at {place} is no node, or a tunnel whose other end is closed",
                False,
            )
        does_encrypt, do_we = greeting[12:32].startswith(b"CURVE"), self._keys[0] is not None
        if do_we and not does_encrypt:
            port = "or this is the port on which a node sends weights, and not its own"
            return f"{place} does not encrypt its links, this node does: {_SAME}, {port}", True
        if does_encrypt and not do_we:
            return f"{place} encrypts its links, this node does not: {_SAME}", True
        if not is_prompt or not do_we:
            return f"{place} did not finish the handshake in time: it is busy, or stopped", False
        return (
            f"{place} has another key than the address or the join string says: it is a learner of "
            "another run, or one that lost its keys; copy runs/NAME/keys/join anew",
            True,
        )

    def _redial(self, reason: str, *, is_refused: bool = False) -> None:
        was_up = self._is_up
        options, loop = self._host.options, self._host.loop
        if self._is_up and loop.time() - self._up_at > options.max_redial_s:
            self._redial_s = options.min_redial_s
        self._close_bulk()
        if self._channel is not None:
            self._channel.close(0)
            self._channel = self._outbox = None
        # Spread out, so that the children of a lost parent do not come back in one instant.
        pause_s = self._redial_s * random.uniform(0.5, 1.0)
        if self._has_other_key:
            pause_s = options.min_redial_s
        else:
            self._redial_s = min(2 * self._redial_s, options.max_redial_s)
        self._timer = loop.call_later(pause_s, self._begin)
        if is_refused:  # what only the user can mend
            self._host.warn(without_key(self.address), "refused", reason)
        if not was_up:
            self._failure = DialFailed(self.peer, reason, is_refused)
            self._host.note(self)


async def look_at(
    loop: asyncio.AbstractEventLoop, ip_address: str, port: int, *, within_s: float
) -> bytes:
    """Return the first bytes that a listener says to who greets it, up to the whole of a greeting.

    A raw socket of ZeroMQ's tells only that an attempt failed; this tells why.

    Raises:
        TimeoutError: if there is no connection in time.
        OSError: if there can be none.
    """
    family = socket.AF_INET6 if ":" in ip_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as raw:
        raw.setblocking(False)
        async with asyncio.timeout(within_s):
            await loop.sock_connect(raw, (ip_address, port))
        said = b""
        with contextlib.suppress(OSError):  # it may end the connection as it likes
            async with asyncio.timeout(within_s):
                await loop.sock_sendall(raw, SIGNATURE)
                while len(said) < GREETING_BYTES and (part := await loop.sock_recv(raw, 256)):
                    said += part
        return said


# --- channel: one raw socket, the news of its connections, the bytes it owes ----------------------

Socket: TypeAlias = "zmq.Socket[bytes]"

NEWS_PER_TURN = 1024
"""News of connections read in one turn of the loop: of strangers there may always be more."""

# Below this libzmq copies, which is cheaper than a release notice per frame; pyzmq's own choice.
_ZERO_COPY_BYTES = zmq.COPY_THRESHOLD
# Plain numbers: what Python does with pyzmq's enumerations takes longer than what libzmq does.
_AT_ONCE, _MORE_AT_ONCE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_NEWS: dict[int, News] = {
    zmq.EVENT_ACCEPTED: News.ACCEPTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: News.UP,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: News.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: News.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: News.REFUSED,
    zmq.EVENT_DISCONNECTED: News.OVER,
    zmq.EVENT_CONNECT_RETRIED: News.OVER,  # an attempt that never became a connection
}


_MAX_MS = 6_553_599
"""What libzmq takes for a time to live, which has 16 bits; for other times it takes more."""


def _ms(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), _MAX_MS) if seconds > 0 else 0


class ZmqOutbox:
    """Sends on one connection, and counts what libzmq has not yet passed on to the kernel."""

    def __init__(self, to: Socket, identity: bytes, max_unsent_bytes: int) -> None:
        self._to = to
        self._identity = identity
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent_bytes = 0
        self._untracked_bytes = 0
        self._tracked: deque[tuple[int, zmq.MessageTracker]] = deque()

    def send(self, frames: Sequence[bytes | bytearray | memoryview], num_bytes: int) -> bool:
        """Accept a message, or refuse it."""
        charge = num_bytes + MESSAGE_OVERHEAD_BYTES
        if self.unsent_bytes + charge > self._max_unsent_bytes:
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

    @property
    def unsent_bytes(self) -> int:
        """Bytes accepted that libzmq has not yet passed on to the kernel, overhead included."""
        while self._tracked and self._tracked[0][1].done:
            self._unsent_bytes -= self._tracked.popleft()[0]
        return self._unsent_bytes

    def _hand_over(
        self, frames: Sequence[bytes | bytearray | memoryview], is_tracked: bool
    ) -> zmq.MessageTracker | None:
        *first, last = frames
        if self._identity:
            self._to.send(self._identity, _MORE_AT_ONCE)
        for frame in first:
            self._to.send(frame, _MORE_AT_ONCE, copy=len(frame) < _ZERO_COPY_BYTES)
        if is_tracked:
            tracked = zmq.Frame(last, track=True, copy=False)
            return self._to.send(tracked, _AT_ONCE, copy=False, track=True)
        self._to.send(last, _AT_ONCE)
        return None


class ZmqChannel:
    """One raw socket and its monitor, watched by the loop."""

    _ids = itertools.count(1)

    def __init__(
        self,
        context: zmq.Context[Socket],
        kind: int,
        options: TransportOptions,
        loop: asyncio.AbstractEventLoop,
        on_readable: Callable[[], None],
        on_news: OnNews,
        more: Mapping[int, int | bytes],
    ) -> None:
        """Make a ROUTER or DEALER; whoever asked for it binds or connects it.

        `more` are options of the socket, beside or in place of what follows from the others.
        """
        self._loop = loop
        self._on_readable = on_readable
        self._on_news = on_news
        self._options = options
        self._first_part: zmq.Frame | None = None
        self._is_router = kind == zmq.ROUTER
        self.socket: Socket = context.socket(kind)
        usual: dict[int, int | bytes] = {
            zmq.LINGER: 0,
            zmq.SNDHWM: 0,
            zmq.RCVHWM: options.max_unread_messages,
            zmq.MAXMSGSIZE: options.max_message_bytes,
            zmq.CONNECT_TIMEOUT: _ms(options.connect_timeout_s),
            zmq.HANDSHAKE_IVL: _ms(options.connect_timeout_s),
            zmq.HEARTBEAT_IVL: _ms(options.heartbeat_s),
            zmq.HEARTBEAT_TIMEOUT: _ms(options.dead_after_s),
            zmq.HEARTBEAT_TTL: _ms(options.dead_after_s),
        }
        endpoint = f"inproc://monitor-{next(self._ids)}"
        try:
            for option, value in {**usual, **more}.items():
                self.socket.setsockopt(option, value)
            self.socket.monitor(endpoint, sum(_NEWS))
            self._monitor: Socket = context.socket(zmq.PAIR)
        except zmq.ZMQError:  # no descriptor left, or a peer's token that cannot be one
            self.socket.close(linger=0)  # the context waits for every socket it has
            raise
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(endpoint)
        self._is_reading_on = self._will_look = self._is_closed = False
        self._loop.add_reader(self._monitor.FD, self._read_some_news)
        self._loop.add_reader(self.socket.FD, self.look)
        self.read_news()  # only a reader that has seen EAGAIN is woken

    def has_whole_message(self) -> bool:
        """Return whether a message waits to be received; it is looked at in the next turn."""
        self.look_soon()  # this question may swallow the edge
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def look(self) -> None:
        """Consume an edge, and note the socket if it has messages."""
        self._will_look = False
        if not self._is_closed and int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE:
            self._on_readable()

    def look_soon(self) -> None:
        """Look in the next turn of the loop: once, whatever is sent until then."""
        if not self._will_look:
            self._will_look = True
            self._loop.call_soon(self.look)

    def read_news(self, at_most: int | None = None) -> bool:
        """Read the monitor, and return whether it has been read empty."""
        for _ in itertools.count() if at_most is None else range(at_most):
            if self._monitor.closed:
                return True
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            report = parse_monitor_message(parts)
            self._on_news(_NEWS[report["event"]], report["value"])
        return False

    def _read_some_news(self) -> None:
        """Read a turn's share: who connects and leaves all the time must not hold the loop."""
        if self._is_reading_on:
            return
        if not self.read_news(NEWS_PER_TURN):
            self._is_reading_on = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._is_reading_on = False
        self._read_some_news()

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        """Take one message; None is EAGAIN, which arms the edge again."""
        try:
            parts = [self.socket.recv(_AT_ONCE, copy=False)]
        except zmq.Again:
            self._first_part = None
            return None
        while parts[-1].more:
            parts.append(self.socket.recv(_AT_ONCE, copy=False))
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

    def user(self) -> PeerId:
        """Return whose token the connection showed that the last message came in on."""
        try:
            return "" if self._first_part is None else str(self._first_part.get("User-Id"))
        except zmq.ZMQError:
            return ""

    def outbox(self, identity: bytes) -> ZmqOutbox:
        """Return the means to send on one connection."""
        return ZmqOutbox(self.socket, identity, self._options.max_unsent_bytes)

    def close(self, linger_s: float) -> None:
        """Close the socket; libzmq goes on sending for at most `linger_s`."""
        self._loop.remove_reader(self._monitor.FD)
        self._loop.remove_reader(self.socket.FD)
        self._is_closed = True
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=_ms(linger_s))


def _as_frame(part: zmq.Frame) -> Frame:
    # A small one is a slice of libzmq's shared read buffer, which a view would keep alive.
    return part.bytes if len(part) < _ZERO_COPY_BYTES else part.buffer


# --- admission: those who dial with the key of the run, and nobody else ---------------------------
#
# libzmq asks inside its own process, by messages to an agreed address (ZAP, RFC 27), while it
# shakes hands with a client. The answers come from the loop: no thread, and no list of keys to
# keep, since the run has one key for all who dial. A client that is refused learns that it was, and
# is closed.

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN, _BULK_DOMAIN = b"echo", b"echo bulk"


class ZapHandler:
    """Answers libzmq's questions about clients of the listeners of one context."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        loop: asyncio.AbstractEventLoop,
        client_key: bytes,
        warn: Callable[[str, str, str], None],
    ) -> None:
        """Admit who has `client_key`; must exist before the listener is bound."""
        self._loop = loop
        self._client_key = client_key
        self._warn = warn
        self.tokens: dict[bytes, PeerId] = {}
        """Whose bulk connection is awaited, by the token that it shows: once."""
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        loop.add_reader(self._socket.FD, self.answer)
        self.answer()  # only a reader that has seen EAGAIN is woken

    def answer(self) -> None:
        """Answer all questions that have come."""
        while not self._socket.closed:
            try:
                envelope, _, version, request, *facts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            domain, host, _identity, mechanism, *credentials = facts
            user: PeerId | None = None
            if (domain, mechanism) == (_DOMAIN, b"CURVE") and credentials == [self._client_key]:
                user = ""
            elif (domain, mechanism) == (_BULK_DOMAIN, b"PLAIN"):
                user = self.tokens.pop(credentials[-1], None)
            status = (b"400", b"unknown key") if user is None else (b"200", b"OK")
            name = (user or "").encode()
            self._socket.send_multipart([envelope, b"", version, request, *status, name, b""])
            if user is None:
                where = host.decode(errors="replace")
                text = f"refused a connection without the secret of this run, from {where}"
                self._warn("", "secret", text)

    def close(self) -> None:
        """Stop to answer; clients that come later are refused by libzmq."""
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)


# --- transport ------------------------------------------------------------------------------------

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
        self._admission: ZapHandler | None = None
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
        self._bulk_bound: socket.socket | None = None
        self._bulk_listener: BulkListener | None = None
        self._bulk_port = 0
        self._warnings = OncePerMinute()
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
        if self._keys is not None:
            wanted = parse_address(self._listen_address)[1]
            self._bulk_bound = await self._bind_bulk(host, wanted and wanted + BULK_PORT_OFFSET)
        address = format_address(host, port)
        key = None if self._keys is None else self._keys.server.public
        self._listen_address = address if key is None else with_key(address, key)

    async def _bind_bulk(self, host: str, wanted: int) -> socket.socket | None:
        """Return a socket for bulk connections: at the port wanted, or any other one."""
        for port in (wanted, 0):
            with contextlib.suppress(TransportError):
                bound = await bound_socket(format_address(host, port), self._congestion_control)
                if wanted and not port:
                    _log.warning(
                        "port %d is taken, at which weights would go out: they do at port %d; open "
                        "that one, or free the other and start again",
                        wanted,
                        bound.getsockname()[1],
                    )
                return bound
        return None

    def listen(self) -> None:
        """Let others connect to the address that `bind` took.

        Raises:
            TransportError: if the kernel refuses.
        """
        if self._bound is not None:
            bound, self._bound = self._bound, None
            with bound:
                listen_on(bound)
                self._listener = Listener(self)
                self._listen(self._listener, bound)
        if self._bulk_bound is not None:
            bound, self._bulk_bound = self._bulk_bound, None
            with bound:
                listen_on(bound)
                self._bulk_port = bound.getsockname()[1]
                self._bulk_listener = BulkListener(self)
                self._listen(self._bulk_listener, bound)

    def dial(self, address: str, *, has_bulk: bool = False) -> PeerId:
        """Begin to connect."""
        self._check_open()
        peer = self.mint("out")
        self._peers[peer] = DialledLink(self, peer, address, has_bulk=has_bulk)
        return peer

    def hang_up(self, peer: PeerId) -> None:
        """End a peer."""
        match self._peers.pop(peer, None):
            case DialledLink() as link:
                link.close()
                self._noted.pop(link, None)
            case Inbound() as inbound:
                inbound.is_hung_up = True

    def send(
        self,
        peer: PeerId,
        frames: Sequence[bytes | bytearray | memoryview],
        *,
        is_public: bool = False,
    ) -> bool:
        """Accept a message if the peer is connected and below its byte bound."""
        num_bytes = checked_num_bytes(frames, self.options.max_message_bytes)
        is_sent = False
        match self._peers.get(peer):
            case DialledLink() as link:
                is_sent = link.send(frames, num_bytes)
            case Inbound() as inbound if self._listener is not None:
                queue = inbound.outbox
                if is_public and inbound.bulk:
                    queue = min(inbound.bulk, key=lambda outbox: outbox.unsent_bytes)
                is_sent = queue.send(frames, num_bytes)
                self._listener.channel.look_soon()
                if inbound.bulk and self._bulk_listener is not None:
                    self._bulk_listener.channel.look_soon()
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
        for bound in (self._bound, self._bulk_bound):
            if bound is not None:
                bound.close()
        self._bound = self._bulk_bound = None
        for listener in (self._listener, self._bulk_listener):
            if listener is not None:
                listener.close(self.options.linger_s)
        self._listener = self._bulk_listener = None
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

    def adopt(self, inbound: Inbound) -> None:
        """Enter an inbound peer."""
        self._peers[inbound.peer] = inbound

    def forget(self, inbound: Inbound) -> None:
        """Let go of an inbound peer whose connection is over."""
        self._peers.pop(inbound.peer, None)
        if self._admission is not None:
            for token in inbound.tokens:
                self._admission.tokens.pop(token, None)

    def find_inbound(self, peer: PeerId) -> Inbound | None:
        """Return an inbound peer; None if it is gone."""
        found = self._peers.get(peer)
        return found if isinstance(found, Inbound) else None

    def offer_bulk(self, inbound: Inbound) -> None:
        """Tell an inbound peer where a bulk connection of it is awaited, port 0 for nowhere."""
        if self._admission is None or len(inbound.tokens) >= MAX_SOCKETS:
            return
        token = secrets.token_hex(TOKEN_BYTES).encode()
        inbound.tokens.append(token)
        if self._bulk_port:
            self._admission.tokens[token] = inbound.peer
        offer = [BULK_OFFER, self._bulk_port.to_bytes(2, "big"), token]
        inbound.outbox.send(offer, sum(map(len, offer)))

    def warn(self, place: str, reason: str, text: str) -> None:
        """Tell the operator, unless that was told of this place within the last minute.

        A link that is given up and dialled anew says nothing twice, nor do several to one place.
        """
        line = self._warnings.say(place, reason, text, now=self.loop.time())
        if line is not None:
            _log.warning("%s", line)

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
        security: Mapping[int, int | bytes],
        on_readable: Callable[[], None],
        on_news: OnNews,
    ) -> ZmqChannel:
        """Open a DEALER that makes one attempt.

        Raises:
            TransportError: if no socket is to be had now.
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
        channel.look()
        return channel

    def curve_of(self, server_key: bytes | None) -> dict[int, int | bytes]:
        """Return the options that encrypt a link to the owner of this server key; None does not."""
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
                self._admission = ZapHandler(
                    self.context, self.loop, self._keys.client.public, self.warn
                )
            more[zmq.ZAP_ENFORCE_DOMAIN] = 1  # nobody enters while nobody answers
            if isinstance(listener, BulkListener):
                more[zmq.ZAP_DOMAIN] = _BULK_DOMAIN
                more[zmq.PLAIN_SERVER] = 1
                more[zmq.MAXMSGSIZE] = MAX_STRANGER_BYTES
            else:
                more[zmq.ZAP_DOMAIN] = _DOMAIN
                more[zmq.CURVE_SERVER] = 1
                more[zmq.CURVE_SECRETKEY] = self._keys.server.secret
        note = functools.partial(self.note, listener)
        listener.channel = channel = ZmqChannel(
            self.context, zmq.ROUTER, self.options, self.loop, note, listener.on_news, more
        )
        channel.socket.setsockopt(zmq.USE_FD, bound.detach())
        channel.socket.bind(format_address(host, port))
        channel.look()

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
