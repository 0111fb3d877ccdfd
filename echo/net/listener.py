"""Listening sockets, and the connections that other nodes open to them.

A socket is bound first and listens later. So a node can take its address before it opens its files,
and strangers cannot use up the descriptors that these files need. Loading a model takes minutes.
Meanwhile a second learner may start on the same port. Linux lets several sockets bind the port
until one socket listens. So a bound socket listens for an instant and then stops sharing its port
(`_hold`).

The socket is made here and passed to libzmq, so that its congestion control can be chosen. Accepted
connections inherit the choice. The choice applies to the bytes that the listening side sends: a
parent listens, and sends weights to its children. When packets are lost, BBR keeps its rate, but
cubic collapses. On loopback, or if the kernel does not permit the wanted algorithm, the system's
default is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import socket
import sys
from typing import Protocol

from echo.core.errors import TransportError
from echo.net.admission import CHECK_S, AcceptedConnections, idle_rate, largest_message
from echo.net.channel import BULK_ASK, NEWS_PER_TURN, Burst, Host, News, ZmqChannel, ZmqOutbox
from echo.net.kernel import descriptor_limit
from echo.net.transport import Connected, Disconnected, Frame, PeerId, format_address, parse_address

_MAX_BACKLOG = 512
"""Largest number of connections that wait in the kernel for libzmq.

A lower limit applies if this number exceeds a sixteenth of the limit on open files.
"""
_REMEDIES = {
    errno.EADDRINUSE: "another process listens there; stop it or choose another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; use one of its own or 0.0.0.0",
    errno.EACCES: "ports below 1024 need privileges; choose a higher one",
}


async def bound_socket(
    address: str,
    congestion_control: str | None,
) -> socket.socket:
    """Return a bound, non-blocking TCP socket that does not listen yet.

    Args:
        address: tcp://host:port.
        congestion_control: congestion control algorithm of accepted connections, if the kernel
            permits it; None for the system's default.

    Raises:
        TransportError: if the socket cannot be bound; the message names the address and the remedy.
    """
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        if "%" in host:  # uvloop drops the interface; this takes no look-up, so does not block
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
    except (OSError, UnicodeError) as error:  # UnicodeError: an impossible host name
        raise _refusal(address, error) from error
    return bound


def _hold(bound: socket.socket) -> None:
    """Reserve the port.

    The kernel then refuses connections to the port. It also refuses to bind other sockets to the
    port.

    Raises:
        OSError: if another socket listens on the port already.
    """
    if sys.platform == "linux":  # other systems refuse a bound port
        bound.listen(1)
        bound.shutdown(socket.SHUT_RDWR)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def listen_on(bound: socket.socket) -> None:
    """Let a bound socket accept connections from now on.

    Raises:
        TransportError: if the kernel refuses; the message names the address and the remedy.
    """
    try:
        # Connections of an earlier process may linger at the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen(min(_MAX_BACKLOG, descriptor_limit() // 16))
    except OSError as error:
        raise _refusal(format_address(*bound.getsockname()[:2]), error) from error


def _refusal(address: str, error: OSError | UnicodeError) -> TransportError:
    remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "check the host and the port")
    return TransportError(f"cannot listen on {address}: {error}: {remedy}")


def _set_congestion_control(bound: socket.socket, name: str | None) -> None:
    """Set the congestion control algorithm that accepted connections inherit.

    The system's default is used on loopback, if `name` is None, or if the kernel refuses the
    algorithm.
    """
    host = str(bound.getsockname()[0])
    if name is None or host == "::1" or host.startswith("127."):
        return
    with contextlib.suppress(OSError):  # `costly_settings` warns of the cost
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


MAX_GUEST_UNSENT_BYTES = 4 << 20
"""Largest number of bytes that wait to be sent to a guest.

This is enough for several statuses of a large run. A guest that does not read gets no further
message.
"""


@dataclasses.dataclass(eq=False, slots=True)
class Inbound:
    """A peer that opened a connection to this node, or a peer's bulk connection."""

    peer: PeerId
    identity: bytes
    outbox: ZmqOutbox
    descriptor: int = -1
    """The descriptor of the peer's connection; -1 after the connection has ended."""
    is_hung_up: bool = False
    tokens: list[bytes] = dataclasses.field(default_factory=list)
    """The tokens that were sent to the peer, one for each bulk connection that the peer requested.
    """
    bulk: list[ZmqOutbox] = dataclasses.field(default_factory=list)
    user: str = ""
    """The name of the guest's key; "" for a node."""


class ListenerHost(Host, Protocol):
    """The part of the transport that its listeners use."""

    @property
    def has_guests(self) -> bool:
        """Whether guests are admitted in addition to the nodes of the run."""

    def mint(self, prefix: str) -> PeerId:
        """Return a new peer id that begins with `prefix`."""

    def adopt(self, inbound: Inbound) -> None:
        """Add an inbound peer to the transport's peers."""

    def forget(self, inbound: Inbound) -> None:
        """Remove an inbound peer and the peer's unused tokens, because its connection has ended."""

    def find_inbound(self, peer: PeerId) -> Inbound | None:
        """Return the inbound peer with this id; None if the peer's connection has ended."""

    def offer_bulk(self, inbound: Inbound) -> None:
        """Send an inbound peer the bulk port and a new token for a bulk connection."""


class Listener:
    """The inbound peers of one listening socket, and the channel that they share."""

    def __init__(self, host: ListenerHost) -> None:
        self.channel: ZmqChannel
        self._host = host
        self._by_identity: dict[bytes, Inbound] = {}
        self._by_descriptor: dict[int, Inbound] = {}
        self._accepted = AcceptedConnections(
            host.options.max_strangers,
            largest_message(host.options),
            idle_bytes_per_s=idle_rate(host.options),
            has_guests=host.has_guests,
        )
        self._checking: asyncio.TimerHandle | None = None
        """The next scheduled call of `_close_unfinished`; None before the first connection."""
        self._closing: asyncio.Handle | None = None
        """The next scheduled call of `_close_strangers`; None if none is scheduled."""
        self._ended: list[Inbound] = []

    def drain(self, burst: Burst) -> bool:
        """Move messages into the burst; return whether no message remains."""
        while not burst.is_full:
            message = self.channel.receive()
            if message is None:
                self._report_ended(burst)
                return True
            identity, frames = message
            inbound = self._by_identity.get(identity) or self._admit(identity, burst)
            if inbound is not None:
                self._accepted.spoke(inbound.descriptor, is_guest=bool(inbound.user))
            if inbound is None or inbound.is_hung_up:
                burst.discard()
            else:
                self._take(inbound, frames, burst)
        return False

    def _take(self, inbound: Inbound, frames: list[Frame], burst: Burst) -> None:
        """Answer an inbound peer's bulk request, or add the peer's message to the burst."""
        if frames == [BULK_ASK] and not inbound.user:
            self._host.offer_bulk(inbound)
        else:
            burst.add(inbound.peer, frames)

    def on_news(self, news: News, descriptor: int) -> None:
        """Handle an event of the connection with this descriptor."""
        if news is News.REFUSED:
            self._host.totals.refused_clients += 1
        elif news is News.HANDSHAKE_FAILED:
            self._host.totals.failed_handshakes += 1
        elif news is News.ACCEPTED:
            self._accepted.add(descriptor, now=self._host.loop.time())
            if self._checking is None:
                self._checking = self._host.loop.call_later(CHECK_S, self._close_unfinished)
            if self._accepted.has_excess and self._closing is None:
                self._closing = self._host.loop.call_soon(self._close_strangers)
        elif news is News.OVER:
            self._accepted.discard(descriptor)
            inbound = self._by_descriptor.pop(descriptor, None)
            if inbound is not None:
                inbound.descriptor = -1  # the next connection may reuse the number
                self._ended.append(inbound)
                self._host.note(self)

    def close(self, linger_s: float) -> None:
        """Close the channel, which closes all connections of inbound peers."""
        for handle in (self._closing, self._checking):
            if handle is not None:
                handle.cancel()
        self.channel.close(linger_s)

    def close_guest(self, inbound: Inbound) -> None:
        """Close the connection of a guest if it is still open."""
        self.channel.read_news()
        if inbound.descriptor >= 0:
            self._accepted.close(inbound.descriptor)

    def _close_strangers(self) -> None:
        # Only a part of the news in one turn, so that a flood does not block the loop.
        is_current = self.channel.read_news(NEWS_PER_TURN)
        num_closed = self._accepted.close_excess() if is_current else 0
        if num_closed:
            text = (
                "closed connections that sent nothing: more than "
                f"{self._host.options.max_strangers} were open at once; if they are nodes of this "
                "run, raise the limit of open files (ulimit -n)"
            )
            self._host.warn("", "strangers", text)
            self._host.totals.closed_strangers += num_closed
        self._closing = None
        if num_closed or not is_current:
            self._closing = self._host.loop.call_soon(self._close_strangers)

    def _close_unfinished(self) -> None:
        """Close connections whose unfinished message is too long, and check again soon.

        While whole messages are unread, no connection is closed, because the kernel's count
        includes their bytes.
        """
        is_idle = not self.channel.has_whole_message()
        now = self._host.loop.time()
        num_closed = self._accepted.close_unfinished(now=now) if is_idle else 0
        if num_closed:
            text = "closed a connection over which a message came that was too long, in many frames"
            self._host.warn("", "unfinished", text)
            self._host.totals.discarded_messages += num_closed
        self._checking = self._host.loop.call_later(CHECK_S, self._close_unfinished)

    def _admit(self, identity: bytes, burst: Burst) -> Inbound | None:
        descriptor = self.channel.descriptor()
        if descriptor is None:
            return None
        self.channel.read_news()
        inbound = self._admit_peer(identity, burst)
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
        else:  # its connection ended before its message was read
            self._ended.append(inbound)
        return inbound

    def _admit_peer(self, identity: bytes, burst: Burst) -> Inbound | None:
        """Return the inbound peer for a new connection whose first message has arrived.

        If the connection belongs to no peer, return None. The messages of such a connection are
        discarded.
        """
        user = self.channel.user()
        most = MAX_GUEST_UNSENT_BYTES if user else None
        outbox = self.channel.outbox(identity, max_unsent_bytes=most)
        inbound = Inbound(self._host.mint("in"), identity, outbox, user=user)
        self._host.adopt(inbound)
        burst.events.append(Connected(inbound.peer, None, user))
        return inbound

    def _report_ended(self, burst: Burst) -> None:
        for inbound in self._ended:
            del self._by_identity[inbound.identity]
            self._host.forget(inbound)
            if not inbound.is_hung_up:
                burst.events.append(Disconnected(inbound.peer, "the peer's connection closed"))
        self._ended.clear()


class BulkListener(Listener):
    """The bulk connections that inbound peers have opened. They have a port of their own."""

    def _admit_peer(self, identity: bytes, burst: Burst) -> Inbound | None:
        owner = self._host.find_inbound(self.channel.user())
        if owner is None:
            return None
        outbox = self.channel.outbox(identity)
        owner.bulk.append(outbox)
        return Inbound(owner.peer, identity, outbox)

    def _take(self, inbound: Inbound, frames: list[Frame], burst: Burst) -> None:
        if frames != [b""]:  # `_admit_peer` has handled its first message, which is empty
            burst.discard()

    def _report_ended(self, burst: Burst) -> None:
        for inbound in self._ended:
            del self._by_identity[inbound.identity]
            owner = self._host.find_inbound(inbound.peer)
            if owner is not None and inbound.outbox in owner.bulk:
                owner.bulk.remove(inbound.outbox)
        self._ended.clear()
