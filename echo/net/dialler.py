"""Links that a node dials, and redials after every loss until `close`.

After a failed attempt, the node reads the greeting of the other side without libzmq
(`read_greeting`). libzmq reports only that the attempt failed. So without the greeting, one message
would have to cover a closed port, another program, the port for weights and a wrong key.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import zmq

from echo.core.bounds import num_connections
from echo.core.errors import TransportError
from echo.net.admission import BULK_DOMAIN
from echo.net.channel import (
    BULK_ASK,
    BULK_OFFER,
    BULK_PORT_OFFSET,
    Burst,
    Host,
    News,
    OnNews,
    ZmqChannel,
    ZmqOutbox,
)
from echo.net.transport import (
    Connected,
    DialFailed,
    Disconnected,
    Frame,
    PeerId,
    is_loopback,
    parse_dial_address,
    without_key,
)

_SAME = "security.curve must be the same on all nodes of a run"
PROBE_S = 3.0
"""Longest wait for the answer to a probe of an address, seconds."""

SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""Start of a ZMTP 3 greeting, which the other side answers with its own greeting."""
GREETING_BYTES = 64
"""Length of a ZMTP greeting; bytes 12 to 31 name the mechanism."""


class DiallerHost(Host, Protocol):
    """The part of the transport that a dialled link uses."""

    def server_keys(self, address: str) -> tuple[bytes | None, ...]:
        """Return the keys that the process at `address` may have; None means no encryption."""

    def connect(
        self,
        host: str,
        port: int,
        security: Mapping[int, int | bytes],
        on_readable: Callable[[], None],
        on_news: OnNews,
    ) -> ZmqChannel:
        """Open a DEALER socket that makes one attempt to connect."""

    def curve_of(self, server_key: bytes | None) -> dict[int, int | bytes]:
        """Return the socket options that encrypt a link to the owner of this server key."""


@dataclasses.dataclass(eq=False, slots=True)
class BulkChannel:
    """A bulk connection that this node opens for a link."""

    port: int
    channel: ZmqChannel = dataclasses.field(init=False)
    is_up: bool = False


class DialledLink:
    """A link to an address.

    After every loss, the address is dialled again until the link is closed.
    """

    def __init__(
        self, host: DiallerHost, peer: PeerId, address: str, *, has_bulk: bool = False
    ) -> None:
        self.peer = peer
        self.address = address
        self._has_bulk = has_bulk
        self._bulk: list[BulkChannel] = []
        self._asked_at = 0.0
        """Time at which the first bulk connection was requested."""
        self._name, self._port = parse_dial_address(address)
        self._host = host
        # The key to try next comes first.
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
        """The failure of the last attempt, until `drain` has reported it."""
        self._begin()

    def drain(self, burst: Burst) -> bool:
        """Move events and messages into the burst; return whether all were moved."""
        if self._failure is not None:
            burst.events.append(self._failure)
            self._failure = None
        if self._channel is not None:
            self._channel.read_news()  # a message may arrive before the news of its connection
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
        """Open a bulk connection to the offered port.

        If the link has a long round-trip time, more bulk connections are requested after the first
        offer. Each connection has its own token, so another machine that reads the token cannot use
        it again.
        """
        try:
            _, port_bytes, token = map(bytes, offer)
        except ValueError:
            return
        port = int.from_bytes(port_bytes, "big")
        if not 0 < port < 1 << 16:  # the other side has no bulk port
            return
        is_first = not self._bulk
        bulk = BulkChannel(port)
        with contextlib.suppress(TransportError):  # the link works without bulk connections
            bulk.channel = self._host.connect(
                self._ip_address,
                port,
                {zmq.PLAIN_USERNAME: BULK_DOMAIN, zmq.PLAIN_PASSWORD: token},
                functools.partial(self._host.note, self),
                functools.partial(self._on_bulk_news, bulk),
            )
            self._bulk.append(bulk)
            if is_first and self._outbox is not None:
                took_s = self._host.loop.time() - self._asked_at
                rtt_s = 0.0 if is_loopback(self.address) else took_s
                for _ in range(num_connections(rtt_s, most=self._most_bulk) - 1):
                    self._outbox.send([BULK_ASK], len(BULK_ASK))

    def _on_bulk_news(self, bulk: BulkChannel, news: News, descriptor: int) -> None:
        if bulk not in self._bulk:
            return
        if news is News.UP:
            bulk.is_up = True
            bulk.channel.outbox(b"").send([b""], 0)
            bulk.channel.check_soon()
        elif news is News.OVER and bulk.is_up:
            self._is_over = True  # its messages under way are lost, as if the link had ended
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
        """Queue a message; return False if the link is down or its queue is full."""
        if self._channel is None or self._outbox is None or self._is_over:
            return False
        is_sent = self._outbox.send(frames, num_bytes)
        self._channel.check_soon()
        return is_sent

    def close(self) -> None:
        """End the link; accepted messages are still delivered for `linger_s` seconds."""
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
        # Looked up here, because a look-up in libzmq's thread would block all traffic.
        try:
            found = await self._host.loop.getaddrinfo(
                self._name, self._port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:  # UnicodeError: an impossible host name
            why = getattr(error, "strerror", None) or str(error)
            self._redial(f"the host name of {without_key(self.address)} is not known: {why}")
            return
        ip_address = str(found[self._num_attempts % len(found)][4][0])
        # A link-local address needs the interface that leads to its network.
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
        """Report why an attempt to connect failed, and dial again after a pause."""
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
                greeting = await read_greeting(
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
                # A busy node lets the handshake time out; a node that refuses ends it at once.
                is_prompt = self._fault is not None and took_s < options.connect_timeout_s / 2
                reason, is_refused = self._diagnose(greeting, is_prompt=is_prompt)
        is_refused = is_refused and not self._has_other_key
        self._redial(reason, is_refused=is_refused)

    def _diagnose(self, greeting: bytes, *, is_prompt: bool) -> tuple[str, bool]:
        """Return what answers at this address, and whether further attempts are useless.

        The first value is a text for the user. `greeting` has the first bytes that were received
        from the address. `is_prompt` says whether the other side ended the handshake before the
        timeout.
        """
        place = without_key(self.address)
        if not greeting.startswith(b"\xff") or len(greeting) < GREETING_BYTES:
            return (
                f"what answers at {place} is no node, or a tunnel whose other end is closed",
                False,
            )
        mechanism = greeting[12:32].rstrip(b"\0")
        if mechanism == b"PLAIN":  # only a port for bulk connections uses PLAIN
            own = f"as a rule {self._port - BULK_PORT_OFFSET}"
            return (
                f"{place} is the port on which a node sends weights: name the one on which it "
                f"listens, {own}",
                True,
            )
        does_encrypt, do_we = mechanism == b"CURVE", self._keys[0] is not None
        if do_we and not does_encrypt:
            return f"{place} does not encrypt its links, this node does: {_SAME}", True
        if does_encrypt and not do_we:
            return f"{place} encrypts its links, this node does not: {_SAME}", True
        if not is_prompt or not do_we:
            return f"{place} did not finish the handshake in time: it is busy, or stopped", False
        return (
            f"{place} has another key than the address or the join string says: it is a learner of "
            "another run, or one that lost its keys; copy runs/NAME/keys/join again",
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
        # Random pauses, so that the children of a lost parent do not redial at the same time.
        pause_s = self._redial_s * random.uniform(0.5, 1.0)
        if self._has_other_key:
            pause_s = options.min_redial_s
        else:
            self._redial_s = min(2 * self._redial_s, options.max_redial_s)
        self._timer = loop.call_later(pause_s, self._begin)
        if is_refused:  # only the user can mend it
            self._host.warn(without_key(self.address), "refused", reason)
        if not was_up:
            self._failure = DialFailed(self.peer, reason, is_refused)
            self._host.note(self)


async def read_greeting(
    loop: asyncio.AbstractEventLoop, ip_address: str, port: int, *, within_s: float
) -> bytes:
    """Send the start of a ZMTP greeting; return the first bytes of the answer.

    libzmq reports that an attempt failed, but not why. The greeting names the security mechanism of
    the other side.

    Raises:
        TimeoutError: if no connection is made within `within_s` seconds.
        OSError: if the connection fails.
    """
    family = socket.AF_INET6 if ":" in ip_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as raw:
        raw.setblocking(False)
        async with asyncio.timeout(within_s):
            await loop.sock_connect(raw, (ip_address, port))
        received = b""
        with contextlib.suppress(OSError):  # the other side may end the connection at any time
            async with asyncio.timeout(within_s):
                await loop.sock_sendall(raw, SIGNATURE)
                while len(received) < GREETING_BYTES and (part := await loop.sock_recv(raw, 256)):
                    received += part
        return received
