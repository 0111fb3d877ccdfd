"""Admission of inbound connections: keys, tokens, and limits on strangers.

During the handshake with a client, libzmq asks whether to admit the client, by a message to an
address inside the process (ZAP, RFC 27). The event loop answers, so no thread is needed. All nodes
of the run dial with the same key. Each kind of guest dials with a key of its own. libzmq informs a
refused client and closes its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import zmq

from echo.net.channel import Socket
from echo.net.transport import PeerId, TransportOptions

MAX_STRANGER_BYTES = 256
"""Largest frame, in bytes, that a connection without a token may send. All frames of a handshake
are shorter.
"""
MAX_GUEST_BYTES = 256 << 10
"""Largest number of bytes of a guest's unfinished message. If guests are admitted, this limit also
holds for the first message of every connection, which is a short Greet.
"""
HEARTBEAT_BYTES = 128
"""Bytes that an idle connection receives per heartbeat interval, at most. libzmq's probe and its
answer to this node's probe take 82 bytes with encryption.
"""
CHECK_S = 0.1
"""Seconds between two checks of connections. A check finds connections whose unfinished message is
too long.
"""
CONNECTIONS_PER_CHECK = 512
"""Largest number of connections in one check, because each connection takes a system call. The next
check continues with further connections.
"""
_BYTES_RECEIVED = struct.Struct("=128xQ")


class AcceptedConnections:
    """The connections that libzmq has accepted, with two limits that libzmq lacks.

    **Strangers** are connections over which no message has arrived. libzmq accepts every
    connection. Each connection takes a descriptor, and the node needs descriptors for its files and
    links. So at most `max_strangers` stay open, and the oldest is closed first. A node of the run
    sends its first message within a few round trips. So a node's connection is closed only if
    `max_strangers` newer connections arrive before that message.

    **Unfinished messages.** libzmq reports a message when its last frame has arrived. libzmq limits
    the size of a frame but not the number of frames, so it would store an endless message. The
    kernel counts the bytes of each connection. A connection is closed if more bytes than its limit
    have arrived since its last whole message. The limit is `max_message_bytes` for a node and
    MAX_GUEST_BYTES for a guest. If guests are admitted, a stranger has a guest's limit. The kernel
    also counts heartbeats, so the limit grows with time by `idle_bytes_per_s`. The limit works only
    on Linux, because other kernels do not report the count.

    libzmq owns the descriptors. libzmq reports the end of a connection before it closes the
    descriptor. So if all events have been read, the number of a descriptor recorded here still
    belongs to the recorded connection. The number may be reused in the few microseconds between
    reading the events and closing the connection. This does no harm: `shutdown` fails on a file,
    and a link that `shutdown` ends is dialled again.
    """

    def __init__(
        self,
        max_strangers: int,
        max_message_bytes: int,
        *,
        idle_bytes_per_s: float,
        has_guests: bool,
    ) -> None:
        self._max_strangers = max_strangers
        self._max_message_bytes = max_message_bytes
        self._idle_bytes_per_s = idle_bytes_per_s
        self._max_guest_bytes = MAX_GUEST_BYTES if has_guests else max_message_bytes
        self._strangers: dict[int, None] = {}
        self._whole: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """Descriptor -> bytes that the connection had received when a check last found a whole
        message, and the time of that check. The connection to check next is first."""
        self._has_spoken: set[int] = set()
        """Descriptors over which a whole message has arrived since their last check."""
        self._nodes: set[int] = set()
        """Descriptors of connections of nodes."""

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._whole

    @property
    def has_excess(self) -> bool:
        """Whether more than `max_strangers` strangers are connected."""
        return len(self._strangers) > self._max_strangers

    def add(self, descriptor: int, *, now: float) -> None:
        """Add a connection that libzmq has accepted, as a stranger until `spoke` is called."""
        self._strangers[descriptor] = None
        self._whole[descriptor] = 0, now

    def discard(self, descriptor: int) -> None:
        """Remove a connection that has ended."""
        self._strangers.pop(descriptor, None)
        self._whole.pop(descriptor, None)
        self._has_spoken.discard(descriptor)
        self._nodes.discard(descriptor)

    def spoke(self, descriptor: int, *, is_guest: bool = False) -> None:
        """No longer count a connection as a stranger: a whole message has arrived over it."""
        if descriptor in self._whole:
            self._strangers.pop(descriptor, None)
            self._has_spoken.add(descriptor)
            if not is_guest:
                self._nodes.add(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a connection. The caller must have read all events of all connections first."""
        if descriptor in self._whole:
            _shut_down(descriptor)

    def close_excess(self) -> int:
        """Close the oldest strangers beyond `max_strangers`; return how many were closed.

        The caller must first read all events of connections, so that no descriptor belongs to an
        ended connection.
        """
        excess = list(self._strangers)[: max(0, len(self._strangers) - self._max_strangers)]
        for descriptor in excess:
            del self._strangers[descriptor]
            _shut_down(descriptor)
        return len(excess)

    def close_unfinished(self, *, now: float) -> int:
        """Close connections whose unfinished message is too long; return how many were closed.

        One call checks at most CONNECTIONS_PER_CHECK connections.
        """
        num_closed = 0
        for descriptor in list(itertools.islice(self._whole, CONNECTIONS_PER_CHECK)):
            self._whole.move_to_end(descriptor)
            received, (before, since) = _bytes_received(descriptor), self._whole[descriptor]
            idle_bytes = self._idle_bytes_per_s * (now - since)
            if descriptor in self._has_spoken:
                self._has_spoken.discard(descriptor)
                self._whole[descriptor] = received, now
            elif received - before > self._limit_of(descriptor) + idle_bytes:
                self.discard(descriptor)
                _shut_down(descriptor)
                num_closed += 1
        return num_closed

    def _limit_of(self, descriptor: int) -> int:
        return self._max_message_bytes if descriptor in self._nodes else self._max_guest_bytes


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket object for a descriptor, which stays open because libzmq owns it."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _shut_down(descriptor: int) -> None:
    """Shut down a connection; libzmq then notices the end and closes the descriptor."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _bytes_received(descriptor: int) -> int:
    if sys.platform != "linux":
        return 0
    try:
        with _borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    except OSError:
        return 0
    whole = len(info) == _BYTES_RECEIVED.size
    return int(_BYTES_RECEIVED.unpack(info)[0]) if whole else 0


def largest_message(options: TransportOptions) -> int:
    """Return the largest size of a message on the wire, in bytes.

    CURVE's overhead is included.
    """
    return options.max_message_bytes * 17 // 16 + (1 << 20)


def idle_rate(options: TransportOptions) -> float:
    """Return the largest number of bytes per second that a connection receives without messages."""
    return HEARTBEAT_BYTES / options.heartbeat_s if options.heartbeat_s > 0 else 0.0


_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN, BULK_DOMAIN = b"echo", b"echo bulk"


class ZapHandler:
    """Answers libzmq when it asks whether the listeners of a context may admit a client."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        loop: asyncio.AbstractEventLoop,
        users: Mapping[bytes, str],
        warn: Callable[[str, str, str], None],
    ) -> None:
        """Start to answer; admit the clients whose public keys are in `users`.

        Make the handler before the listener is bound. `users` maps each public key to its name. The
        key of nodes has the name "". `warn` is called when a client is refused.
        """
        self._loop = loop
        self._users = users
        self._warn = warn
        self.tokens: dict[bytes, PeerId] = {}
        """Unused token -> the peer that may open one bulk connection with it."""
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        loop.add_reader(self._socket.FD, self.answer)
        self.answer()  # a reader is woken only after it has returned EAGAIN

    def answer(self) -> None:
        """Answer all questions of libzmq that have arrived."""
        while not self._socket.closed:
            try:
                envelope, _, version, request, *facts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            domain, host, _identity, mechanism, *credentials = facts
            user: PeerId | None = None
            if (domain, mechanism) == (DOMAIN, b"CURVE") and len(credentials) == 1:
                user = self._users.get(credentials[0])
            elif (domain, mechanism) == (BULK_DOMAIN, b"PLAIN"):
                user = self.tokens.pop(credentials[-1], None)
            status = (b"400", b"unknown key") if user is None else (b"200", b"OK")
            name = (user or "").encode()
            self._socket.send_multipart([envelope, b"", version, request, *status, name, b""])
            if user is None:
                where = host.decode(errors="replace")
                text = f"refused a connection without the secret of this run, from {where}"
                self._warn("", "secret", text)

    def close(self) -> None:
        """Stop answering; libzmq then refuses all further clients."""
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)
