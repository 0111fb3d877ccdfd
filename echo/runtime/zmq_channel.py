"""One raw ZeroMQ socket on the loop, with the news of its connections and the bytes it owes.

See echo/runtime/transport_zmq.py for what it is for and why it is done so.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from echo.core.errors import TransportError
from echo.runtime.curve import KeyPair
from echo.runtime.links import News, OnNews
from echo.runtime.transport import MESSAGE_OVERHEAD_BYTES, Frame, TransportOptions

Socket: TypeAlias = "zmq.Socket[bytes]"

NEWS_PER_TURN = 1024
"""News of connections read in one turn of the loop: of strangers there may always be more."""

# Below this libzmq copies, which is cheaper than a release notice per frame; pyzmq's own choice.
_ZERO_COPY_BYTES = zmq.COPY_THRESHOLD
_NEWS: dict[int, News] = {
    zmq.EVENT_ACCEPTED: News.ACCEPTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: News.UP,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: News.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: News.HANDSHAKE_FAILED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: News.REFUSED,
    zmq.EVENT_DISCONNECTED: News.OVER,
    zmq.EVENT_CONNECT_RETRIED: News.OVER,  # an attempt that never became a connection
}


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


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
    ) -> None:
        """Make the socket; whoever asked for it binds or connects it.

        Args:
            context: to which it belongs.
            kind: zmq.ROUTER or zmq.DEALER.
            options: bounds and timings.
            loop: watches it.
            on_readable: called when messages may have come.
            on_news: called with what happens to its connections.
        """
        self._loop = loop
        self._on_readable = on_readable
        self._on_news = on_news
        self._options = options
        self._first_part: zmq.Frame | None = None
        self._is_router = kind == zmq.ROUTER
        self.socket: Socket = context.socket(kind)
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
        try:
            self.socket.monitor(endpoint, sum(_NEWS))
            self._monitor: Socket = context.socket(zmq.PAIR)
        except zmq.ZMQError:  # no descriptor left; the context waits for every socket it has
            self.socket.close(linger=0)
            raise
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(endpoint)
        self._is_reading_on = False
        self._loop.add_reader(self._monitor.FD, self._read_some_news)
        self._loop.add_reader(self.socket.FD, self.look)
        self.read_news()  # only a reader that has seen EAGAIN is woken

    def serve_curve(self, server: KeyPair) -> None:
        """Encrypt as the side that listens; who may connect is asked of the context's Admission."""
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, server.secret),
            (zmq.ZAP_DOMAIN, b"echo"),
            (zmq.ZAP_ENFORCE_DOMAIN, 1),  # nobody enters while nobody answers
        ):
            self.socket.setsockopt(option, value)

    def dial_curve(self, client: KeyPair, server_key: bytes) -> None:
        """Encrypt as the side that dials, towards the owner of this server key."""
        for option, value in (
            (zmq.CURVE_SERVERKEY, server_key),
            (zmq.CURVE_PUBLICKEY, client.public),
            (zmq.CURVE_SECRETKEY, client.secret),
        ):
            self.socket.setsockopt(option, value)

    def look(self) -> None:
        """Consume an edge, and note the socket if it has messages."""
        if not self.socket.closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_readable()

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
        self._is_reading_on = not self.read_news(NEWS_PER_TURN)
        if self._is_reading_on:
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._is_reading_on = False
        self._read_some_news()

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

    def outbox(self, identity: bytes) -> ZmqOutbox:
        """Return the means to send on one connection."""
        return ZmqOutbox(self.socket, identity, self._options.max_unsent_bytes)

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
