"""The connections of a transport: who is up, who is over, and what is told in which order.

A `Channel` is one raw socket with its news; the transport provides it, and nothing here knows how.
A `Listener` shares one channel among all inbound peers, a `DialledLink` owns at most one at a time.

    dialled    looking up -> connecting -> up (Connected) -> over (Disconnected) -> pause -> again
    inbound    accepted -> known with its first message (Connected) -> over (Disconnected)

**One channel, one connection** for a dialled link: a new channel is opened for each attempt, since
messages of two connections could otherwise mix in one pipe. The end is told only when the channel
has been read empty after the news of it, so that last words come first.

An inbound connection's end arrives as news about a file descriptor; the descriptor of a peer is
asked for with its first message. The end is announced before the descriptor is closed, so reading
the news before adopting a descriptor never mixes up two owners.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import logging
import math
import os
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from echo.core.errors import TransportError
from echo.runtime.listening_socket import Gate
from echo.runtime.transport import (
    Connected,
    Disconnected,
    Frame,
    PeerId,
    Received,
    TransportEvent,
    TransportOptions,
    TransportStats,
    parse_dial_address,
    without_key,
)

WARN_EVERY_S = 60.0
"""How often a link that cannot come up says why, seconds."""
PROBE_S = 3.0
"""Seconds that a look at what is at an address may take."""

SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""How the greeting of a ZMTP 3 peer begins; one that hears no more of it goes on with its own."""
GREETING_BYTES = 64
"""A whole greeting; its bytes 12 to 32 are the mechanism."""

RESERVED_DESCRIPTORS = 16
"""Held by a listener for the time when strangers have taken all others."""
STRANGERS_S = 0.1
"""When to look again after some were closed."""
STRANGERS_NEWS = 1024
"""News that is read in one go to learn who they are."""
STRANGERS_LOG_S = 60.0
MAX_ACCEPTED_PER_S = 1024
"""Connections after which newcomers wait for the next second, beside the few hundred that the
kernel has let in by then. So many cost a tenth of a core (bench/bench_strangers.py). Honest nodes
never come close: each has some ten connections at most, and keeps them."""

_log = logging.getLogger(__name__)

_SAME = "security.curve must be the same on all nodes of a run"


class News(enum.Enum):
    """What can happen to a connection."""

    ACCEPTED = enum.auto()
    UP = enum.auto()
    HANDSHAKE_FAILED = enum.auto()
    REFUSED = enum.auto()
    """The side that listens did not admit the other's key."""
    OVER = enum.auto()


class Outbox(Protocol):
    """Sends on one connection, within its byte bound."""

    def send(self, frames: Sequence[bytes | bytearray | memoryview], num_bytes: int) -> bool:
        """Accept a message, or refuse it."""


class Channel(Protocol):
    """One raw socket and the news about its connections."""

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        """Take one message with the identity of its connection, or None if there is none."""

    def descriptor(self) -> int | None:
        """Return the file descriptor that the last message came in on; None for a stranger."""

    def outbox(self, identity: bytes) -> Outbox:
        """Return the means to send on one connection."""

    def look(self) -> None:
        """Note the channel if it has messages; due after everything that may swallow a wake-up."""

    def read_news(self, at_most: int | None = None) -> bool:
        """Pass on the news that has come; return whether that was all."""

    def close(self, linger_s: float) -> None:
        """Close it, and go on delivering for at most `linger_s`."""


OnNews = Callable[[News, int], None]
"""Called with the news and the file descriptor it is about; of a handshake none is known."""


class Host(Protocol):
    """What links need of their transport."""

    options: TransportOptions
    totals: TransportStats

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that everything runs on."""

    def note(self, source: Listener | DialledLink) -> None:
        """Remember that a channel has something for `receive`."""

    def mint(self, prefix: str) -> PeerId:
        """Return a fresh id."""

    def dial_failed(self, peer: PeerId, reason: str, *, is_refused: bool) -> None:
        """Pass on that an attempt to dial failed."""

    def adopt(self, inbound: Inbound) -> None:
        """Enter an inbound peer."""

    def forget(self, inbound: Inbound) -> None:
        """Let go of an inbound peer whose connection is over."""

    def server_keys(self, address: str) -> tuple[bytes | None, ...]:
        """Return the keys that may be those of the process at `address`, the likeliest first.

        Raises:
            TransportError: if the address has a key and this side does not encrypt.
        """

    def connect(
        self,
        host: str,
        port: int,
        server_key: bytes | None,
        on_readable: Callable[[], None],
        on_news: OnNews,
    ) -> Channel:
        """Open a channel to an IP address; it makes one attempt."""


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

    def add(self, peer: PeerId, frames: list[Frame]) -> None:
        """Add a message."""
        num_bytes = sum(map(len, frames))
        self._bytes_left -= num_bytes
        self._messages_left -= 1
        self._stats.messages_in += 1
        self._stats.bytes_in += num_bytes
        self.events.append(Received(peer, frames))

    def discard(self) -> None:
        """Count a message that nobody wants; it takes room, or a flood of them would hold us."""
        self._messages_left -= 1
        self._stats.discarded_messages += 1


@dataclasses.dataclass(eq=False, slots=True)
class Inbound:
    """One connection that somebody else opened."""

    peer: PeerId
    identity: bytes
    outbox: Outbox
    is_hung_up: bool = False


class Strangers:
    """Connections that somebody has opened and not yet said anything over, a bounded number.

    Whoever connects costs a descriptor before it has shown that it knows the secret, and without a
    descriptor the node can neither write its files nor reach anybody. So the oldest make way: an
    honest node says hello within a few round trips, which only a flood of many more than
    `max_strangers` in that time can outrun. A few descriptors are held in reserve, and let go while
    there are too many.
    """

    def __init__(self, max_strangers: int) -> None:
        self._max_strangers = max_strangers
        self._inodes: dict[int, int] = {}
        self._reserve: list[int] = []
        self._hold_reserve()

    def __len__(self) -> int:
        return len(self._inodes)

    @property
    def are_too_many(self) -> bool:
        """Whether some must go."""
        return len(self) > self._max_strangers

    def add(self, descriptor: int) -> None:
        """Note a connection that was accepted."""
        with contextlib.suppress(OSError):  # closed by now: the news of that follows
            self._inodes[descriptor] = os.fstat(descriptor).st_ino

    def discard(self, descriptor: int) -> None:
        """Note that one has spoken, or is gone."""
        self._inodes.pop(descriptor, None)

    def close_excess(self) -> int:
        """Close the oldest beyond the bound, and return how many; all news must have been read."""
        excess = list(self._inodes)[: max(0, len(self) - self._max_strangers)]
        if not excess:
            self._hold_reserve()
            return 0
        self.close()
        for descriptor in excess:
            inode = self._inodes.pop(descriptor)
            with contextlib.suppress(OSError):
                _shut_down(descriptor, inode)
        return len(excess)

    def close(self) -> None:
        """Let go of the reserve."""
        for descriptor in self._reserve:
            os.close(descriptor)
        self._reserve.clear()

    def _hold_reserve(self) -> None:
        with contextlib.suppress(OSError):  # none to be had now
            while len(self._reserve) < RESERVED_DESCRIPTORS:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _shut_down(descriptor: int, inode: int) -> None:
    """End a connection of libzmq's, unless the number has become another file's."""
    duplicate = os.dup(descriptor)  # which stays what it is while it is looked at
    try:
        if os.fstat(duplicate).st_ino == inode:
            with socket.socket(fileno=os.dup(duplicate)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(duplicate)


class Listener:
    """All inbound peers, and the one channel that they share."""

    def __init__(self, host: Host, gate: Gate) -> None:
        self.channel: Channel
        self._host = host
        self._gate = gate
        self._num_accepted, self._second_ends_at = 0, -math.inf
        self._by_identity: dict[bytes, Inbound] = {}
        self._by_descriptor: dict[int, Inbound] = {}
        self._open_descriptors: set[int] = set()
        self._strangers = Strangers(host.options.max_strangers)
        self._is_closing = False
        self._warned_at = -math.inf
        self._num_unlogged = 0
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
            if inbound is None or inbound.is_hung_up:
                burst.discard()
            else:
                burst.add(inbound.peer, frames)
        return False

    def on_news(self, news: News, descriptor: int) -> None:
        """Take in what happened to the connection behind a descriptor."""
        if news is News.REFUSED:
            self._host.totals.refused_clients += 1
        elif news is News.HANDSHAKE_FAILED:
            self._host.totals.failed_handshakes += 1
        elif news is News.ACCEPTED:
            self._open_descriptors.add(descriptor)
            self._strangers.add(descriptor)
            self._count_accepted()
            if self._strangers.are_too_many and not self._is_closing:
                self._is_closing = True
                self._host.loop.call_soon(self._close_strangers)
        elif news is News.OVER:
            self._open_descriptors.discard(descriptor)
            self._strangers.discard(descriptor)
            inbound = self._by_descriptor.pop(descriptor, None)
            if inbound is not None:
                self._ended.append(inbound)
                self._host.note(self)

    def close(self, linger_s: float) -> None:
        """Close the channel, and so every connection."""
        self._strangers.close()
        self._gate.close()
        self.channel.close(linger_s)

    def _count_accepted(self) -> None:
        """Keep newcomers waiting for the rest of a second in which many have come."""
        now = self._host.loop.time()
        if now >= self._second_ends_at:
            self._num_accepted, self._second_ends_at = 0, now + 1.0
        self._num_accepted += 1
        if self._num_accepted == MAX_ACCEPTED_PER_S:
            self._gate.shut()
            self._host.loop.call_at(self._second_ends_at, self._gate.open)

    def _close_strangers(self) -> None:
        """Close the oldest of too many, and look again soon: closing them takes a moment."""
        if not self.channel.read_news(STRANGERS_NEWS):  # a flood, which must not hold the loop
            self._host.loop.call_soon(self._close_strangers)
            return
        num_closed = self._strangers.close_excess()
        self._is_closing = num_closed > 0
        if self._is_closing:
            self._host.loop.call_later(STRANGERS_S, self._close_strangers)
        self._host.totals.closed_strangers += num_closed
        self._num_unlogged += num_closed
        now = self._host.loop.time()
        if self._num_unlogged and now - self._warned_at >= STRANGERS_LOG_S:
            _log.warning(
                "closed %d connections that said nothing: more than %d were open at once; if they "
                "are nodes of this run, raise the limit of open files (ulimit -n)",
                self._num_unlogged,
                self._host.options.max_strangers,
            )
            self._num_unlogged, self._warned_at = 0, now

    def _admit(self, identity: bytes, burst: Burst) -> Inbound | None:
        descriptor = self.channel.descriptor()
        if descriptor is None:
            return None
        self.channel.read_news()
        self._strangers.discard(descriptor)
        inbound = Inbound(self._host.mint("in"), identity, self.channel.outbox(identity))
        self._host.adopt(inbound)
        self._by_identity[identity] = inbound
        previous = self._by_descriptor.pop(descriptor, None)
        if previous is not None:
            self._ended.append(previous)
        if descriptor in self._open_descriptors:
            self._by_descriptor[descriptor] = inbound
        else:  # gone before it was heard
            self._ended.append(inbound)
        burst.events.append(Connected(inbound.peer, None))
        return inbound

    def _report_ended(self, burst: Burst) -> None:
        for inbound in self._ended:
            del self._by_identity[inbound.identity]
            self._host.forget(inbound)
            if not inbound.is_hung_up:
                burst.events.append(Disconnected(inbound.peer, "the peer's connection closed"))
        self._ended.clear()


class DialledLink:
    """A link that this node opens, and opens again after every loss until it is closed."""

    def __init__(self, host: Host, peer: PeerId, address: str) -> None:
        self.peer = peer
        self.address = address
        self._name, self._port = parse_dial_address(address)
        self._host = host
        # The one to try next comes first.
        self._keys = deque(host.server_keys(address))
        self._num_wrong_keys = 0
        self._fault: News | None = None
        self._ip_address, self._began_at = "", 0.0
        self._has_other_key = False
        self._warned_at = -math.inf
        self._channel: Channel | None = None
        self._outbox: Outbox | None = None
        self._is_up = False
        self._is_over = False
        self._up_at = 0.0
        self._num_attempts = 0
        self._redial_s = host.options.min_redial_s
        self._timer: asyncio.TimerHandle | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._begin()

    def drain(self, burst: Burst) -> bool:
        """Move news and messages into the burst; return whether all have been taken."""
        if self._channel is not None:
            self._channel.read_news()  # a message may have overtaken the news of its connection
        channel = self._channel
        if channel is None or not self._is_up:
            return True
        if self._outbox is None:
            self._outbox = channel.outbox(b"")
            burst.events.append(Connected(self.peer, self.address))
        while not burst.is_full:
            message = channel.receive()
            if message is None:
                if self._is_over:
                    reason = f"the connection to {self.address} was lost"
                    burst.events.append(Disconnected(self.peer, reason))
                    self._redial(reason)
                return True
            burst.add(self.peer, message[1])
        return False

    def send(self, frames: Sequence[bytes | bytearray | memoryview], num_bytes: int) -> bool:
        """Accept a message if the connection is up and has room."""
        if self._channel is None or self._outbox is None or self._is_over:
            return False
        is_sent = self._outbox.send(frames, num_bytes)
        self._channel.look()
        return is_sent

    def close(self) -> None:
        """End the link; what was accepted is still delivered for a while."""
        if self._timer is not None:
            self._timer.cancel()
        if self._attempt is not None:
            self._attempt.cancel()
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
        except OSError as error:
            why = error.strerror or str(error)
            self._redial(f"the host name of {without_key(self.address)} is not known: {why}")
            return
        ip_address = str(found[self._num_attempts % len(found)][4][0])
        self._num_attempts += 1
        self._ip_address, self._began_at = ip_address, self._host.loop.time()
        self._is_up = self._is_over = self._has_other_key = False
        self._fault = None
        try:
            self._channel = self._host.connect(
                ip_address,
                self._port,
                self._keys[0],
                functools.partial(self._host.note, self),
                self._on_news,
            )
        except TransportError as error:
            self._redial(str(error))

    def _on_news(self, news: News, descriptor: int) -> None:
        if news is News.UP:
            self._is_up = True
            self._num_wrong_keys = 0
            self._warned_at = -math.inf
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
                reason, is_refused = self._judge(greeting, is_prompt=is_prompt)
        is_refused = is_refused and not self._has_other_key
        self._redial(reason, is_refused=is_refused)

    def _judge(self, greeting: bytes, *, is_prompt: bool) -> tuple[str, bool]:
        """Say what is there instead of whom we want, and whether that is for good.

        Args:
            greeting: its first bytes.
            is_prompt: whether it ended our handshake, and did not just let its time pass.
        """
        place = without_key(self.address)
        if not greeting.startswith(b"\xff") or len(greeting) < GREETING_BYTES:
            return (
                f"what answers at {place} is no node, or a tunnel whose other end is closed",
                False,
            )
        does_encrypt, do_we = greeting[12:32].startswith(b"CURVE"), self._keys[0] is not None
        if do_we and not does_encrypt:
            return f"{place} does not encrypt its links, this node does: {_SAME}", True
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
        self._log(f"{reason}; next attempt in {pause_s:.1f} s", is_refused=is_refused)
        if not was_up:
            self._host.dial_failed(self.peer, reason, is_refused=is_refused)

    def _log(self, text: str, *, is_refused: bool) -> None:
        """Say why there will be another attempt; what only the user can mend is a warning."""
        now = self._host.loop.time()
        if is_refused and now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            _log.warning("%s", text)
        else:
            _log.info("%s", text)


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
