"""Raw sockets of ZeroMQ: their messages, the events of their connections, their unsent bytes.

`zmq.py` describes the behaviour of libzmq that this file relies on.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from echo.core.errors import TransportError
from echo.net.transport import (
    MESSAGE_OVERHEAD_BYTES,
    Frame,
    PeerId,
    Received,
    TransportEvent,
    TransportOptions,
    TransportStats,
)

# --- bulk connections: requests and offers. No message of the protocol begins with these bytes. ---

BULK_ASK = b"\0bulk?"
BULK_OFFER = b"\0bulk!"
BULK_PORT_OFFSET = 1000
"""The bulk port is the listener's own port plus this number. If that port is taken, any free port
is used.
"""
TOKEN_BYTES = 16
"""Number of random bytes of a token: too many for a stranger to guess."""


class News(enum.Enum):
    """The kinds of events that can happen to a connection."""

    ACCEPTED = enum.auto()
    UP = enum.auto()
    HANDSHAKE_FAILED = enum.auto()
    REFUSED = enum.auto()
    """The listener did not admit the dialler's key."""
    OVER = enum.auto()


OnNews = Callable[[News, int], None]
"""Function that receives an event and the descriptor of its connection. If the event is about a
handshake, the second value is not a descriptor.
"""


class Burst:
    """The events that one `receive` returns, up to a limit on bytes and on messages."""

    def __init__(self, options: TransportOptions, stats: TransportStats) -> None:
        self.events: list[TransportEvent] = []
        self._bytes_left = options.max_burst_bytes
        self._messages_left = options.max_burst_messages
        self._stats = stats

    @property
    def is_full(self) -> bool:
        """Whether the burst has reached its limit on bytes or on messages."""
        return self._bytes_left <= 0 or self._messages_left <= 0

    def add(self, peer: PeerId, frames: list[Frame], *, is_public: bool = False) -> None:
        """Add a message that was received from a peer."""
        num_bytes = sum(map(len, frames))
        self._bytes_left -= num_bytes
        self._messages_left -= 1
        self._stats.messages_in += 1
        self._stats.bytes_in += num_bytes
        self._stats.public_messages_in += is_public
        self.events.append(Received(peer, frames, is_public))

    def discard(self) -> None:
        """Count a discarded message, so that a flood of discarded messages also ends the burst."""
        self._messages_left -= 1
        self._stats.discarded_messages += 1


class Host(Protocol):
    """The part of the transport that its listeners and dialled links use."""

    options: TransportOptions
    totals: TransportStats

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which the transport was started."""

    def note(self, source: Any) -> None:
        """Remember that `source` has events, so that the next `receive` takes them."""

    def warn(self, place: str, reason: str, text: str) -> None:
        """Log a warning, at most once a minute for each pair of place and reason."""


Socket: TypeAlias = "zmq.Socket[bytes]"

NEWS_PER_TURN = 1024
"""Largest number of events of connections that are read in one turn of the loop. The limit is
needed because strangers can cause any number of events."""

# Smaller frames are copied, which is cheaper than a release notice per frame; pyzmq's own choice.
_ZERO_COPY_BYTES = zmq.COPY_THRESHOLD
# Plain numbers, because operations on pyzmq's enumerations take longer than the calls of libzmq.
_AT_ONCE, _MORE_AT_ONCE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_NEWS: dict[int, News] = {
    zmq.EVENT_ACCEPTED: News.ACCEPTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: News.UP,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: News.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: News.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: News.REFUSED,
    zmq.EVENT_DISCONNECTED: News.OVER,
    zmq.EVENT_CONNECT_RETRIED: News.OVER,  # an attempt that made no connection
}


_MAX_MS = 6_553_599
"""Largest time to live that libzmq accepts, in milliseconds: 16 bits for tenths of a second."""


def _ms(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), _MAX_MS) if seconds > 0 else 0


class ZmqOutbox:
    """Sends messages on one connection, and counts the bytes that the kernel does not have yet."""

    def __init__(self, to: Socket, identity: bytes, max_unsent_bytes: int) -> None:
        self._to = to
        self._identity = identity
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent_bytes = 0
        self._untracked_bytes = 0
        self._tracked: deque[tuple[int, zmq.MessageTracker]] = deque()

    def send(self, frames: Sequence[bytes | bytearray | memoryview], num_bytes: int) -> bool:
        """Queue a message; return False if the queue is full or the connection is closed.

        Raises:
            TransportError: if libzmq cannot send for another reason.
        """
        charge = num_bytes + MESSAGE_OVERHEAD_BYTES
        if self.unsent_bytes + charge > self._max_unsent_bytes:
            return False
        is_tracked = self._untracked_bytes + charge >= _ZERO_COPY_BYTES
        try:
            tracker = self._hand_over(frames, is_tracked)
        except zmq.ZMQError as error:
            # Only the first part can fail: the other parts follow into the same pipe.
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
        """Number of accepted bytes that were not yet passed to the kernel, including overhead."""
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
    """One raw socket and its monitor, which reports events; the event loop watches both."""

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
        """Make a ROUTER or DEALER socket, which the caller then binds or connects.

        `more` has further socket options, which override the options derived from `options`.
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
        except zmq.ZMQError:  # no descriptor is left, or a peer's token is invalid
            self.socket.close(linger=0)  # the context waits for all its sockets
            raise
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(endpoint)
        self._is_reading_on = self._will_check = self._is_closed = False
        self._loop.add_reader(self._monitor.FD, self._read_some_news)
        self._loop.add_reader(self.socket.FD, self.check)
        self.read_news()  # only a reader that has seen EAGAIN is woken

    def has_whole_message(self) -> bool:
        """Return whether a whole message can be received now.

        This call reads EVENTS, which may consume a wake-up of the loop (`zmq.py`). So the call also
        schedules `check`.
        """
        self.check_soon()  # reading EVENTS may consume the edge
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def check(self) -> None:
        """Read the socket's EVENTS, and call `on_readable` if messages have arrived."""
        self._will_check = False
        if not self._is_closed and int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE:
            self._on_readable()

    def check_soon(self) -> None:
        """Schedule a call of `check` for the loop's next turn, if none is scheduled."""
        if not self._will_check:
            self._will_check = True
            self._loop.call_soon(self.check)

    def read_news(self, at_most: int | None = None) -> bool:
        """Report up to `at_most` events of connections; return whether all were reported."""
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
        """Read NEWS_PER_TURN events of connections now, and read all further events later.

        So a flood of events does not block the loop.
        """
        if self._is_reading_on:
            return
        if not self.read_news(NEWS_PER_TURN):
            self._is_reading_on = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._is_reading_on = False
        self._read_some_news()

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        """Return the identity of the next message's connection, and the message's frames.

        Return None if no message remains.

        If None is returned, the next message wakes the loop.
        """
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
        """Return the descriptor of the connection over which the last message arrived.

        Return None if libzmq does not report the descriptor.
        """
        try:
            return None if self._first_part is None else int(self._first_part.get(zmq.SRCFD))
        except zmq.ZMQError:  # ZMTP 1 has no metadata, and almost any bytes pass for ZMTP 1
            return None

    def user(self) -> PeerId:
        """Return the name under which the connection of the last message was admitted.

        For a bulk connection, the name is the id of the peer whose token opened the connection. For
        a guest, the name is that of the guest's key. For any other connection, the name is "".
        """
        try:
            return "" if self._first_part is None else str(self._first_part.get("User-Id"))
        except zmq.ZMQError:
            return ""

    def outbox(self, identity: bytes, *, max_unsent_bytes: int | None = None) -> ZmqOutbox:
        """Return a new outbox for the connection that libzmq names by this identity.

        `max_unsent_bytes` limits the bytes that wait in the outbox. If None, the limit of the
        options applies.
        """
        most = self._options.max_unsent_bytes if max_unsent_bytes is None else max_unsent_bytes
        return ZmqOutbox(self.socket, identity, most)

    def close(self, linger_s: float) -> None:
        """Close the socket. libzmq still sends accepted messages for at most `linger_s` seconds."""
        self._loop.remove_reader(self._monitor.FD)
        self._loop.remove_reader(self.socket.FD)
        self._is_closed = True
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=_ms(linger_s))


def _as_frame(part: zmq.Frame) -> Frame:
    # A small frame is a slice of libzmq's shared read buffer, which a view would keep alive.
    return part.bytes if len(part) < _ZERO_COPY_BYTES else part.buffer
