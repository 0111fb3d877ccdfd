"""The transport contract: what a transport guarantees to the node that uses it.

A message is a list of frames. A transport listens at one address at most, dials any number of
addresses, and reports events. The events of each peer are in this order:

    Connected  Received*  Disconnected      for a dialled peer again after each redial, with a
                                            DialFailed for each failed attempt

A *dialled* peer is the link that `dial` opened. A dialled peer keeps its id through every loss and
redial until `hang_up`. An *inbound* peer is one connection that another node opened. When the
connection is lost, the id ends. If the same node connects again, it becomes a new peer with a new
id.

Every implementation guarantees the following, and the contract tests check it:

* Between `Connected` and `Disconnected` messages arrive whole, once and in order. Messages that
  have not arrived when a connection breaks are lost. So the protocol above uses acknowledgements.
* Messages that a peer sent before closing are received before its `Disconnected`.
* The dialling side sends the first message: an inbound peer becomes known with its first message.
* A link may have **bulk connections** beside it, without encryption. Messages over bulk connections
  (`is_public`) arrive in any order, also relative to messages over the link. If a bulk connection
  ends, the link ends, too.
* Everything is bounded by `TransportOptions`. A peer that does not read fills its own queue until
  `send` returns False, and does not affect other peers. A node that does not call `receive` stops
  reading, so the queues of its peers fill.
* Only the loop's thread may call a transport. `send`, `dial` and `hang_up` never block.

A `Disconnected` may be late by `dead_after_s`, because a machine that vanishes sends nothing. For
an inbound peer the event can be missing altogether. So the protocol has heartbeats of its own.
"""

from __future__ import annotations

import abc
import base64
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from echo.core.errors import TransportError

PeerId: TypeAlias = str
"""Id of a peer within one transport: opaque, made by the transport, never used twice."""

Frame: TypeAlias = bytes | memoryview
"""One received frame; large frames are views of the memory into which they were received."""

MESSAGE_OVERHEAD_BYTES = 512
"""Number of bytes added to the size of each message, so that a limit in bytes also limits the
number of tiny messages.
"""

MAX_PORT = 65535
"""Largest TCP port."""

_ADDRESS = re.compile(
    r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]+(%[\w.-]+)?)\]|(?P<host>[\w.-]+)):(?P<port>\d{1,5})"
    r"(?:#(?P<key>[A-Za-z0-9_-]{43}))?"
)


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer is connected, so `send` accepts messages for it."""

    peer: PeerId
    address: str | None
    """The dialled address; None for an inbound peer."""
    user: str = ""
    """The name of the key that admitted an inbound guest (`curve.py`); "" for a node of the run."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection of a peer has ended; a dialled peer is redialled until `hang_up`."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A whole message has arrived from a peer."""

    peer: PeerId
    frames: list[Frame]
    is_public: bool = False
    """Whether the message arrived over a bulk connection. A machine that is not the peer may have
    read or made such a message.
    """


@dataclass(frozen=True, slots=True)
class DialFailed:
    """An attempt to connect to a dialled peer has failed. The transport will try again."""

    peer: PeerId
    reason: str
    """Cause of the failure, in words for the user."""
    is_refused: bool
    """Whether the keys or the security mechanisms of the two sides differ. If so, every attempt
    fails until the user changes the settings.
    """


TransportEvent: TypeAlias = Connected | Disconnected | DialFailed | Received


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Limits and timings of a transport."""

    max_message_bytes: int = 16 << 20
    """Largest size of a message, all frames together. A peer that sends a larger frame is
    disconnected."""
    max_unsent_bytes: int = 64 << 20
    """Largest number of bytes, including overhead, that are accepted for a peer and not yet passed
    to the kernel.
    """
    max_unread_messages: int = 256
    """Largest number of unread messages of one peer. At this number, the peer's connection is not
    read.
    """
    max_burst_bytes: int = 16 << 20
    """Number of bytes after which one `receive` takes no further message."""
    max_burst_messages: int = 256
    """Largest number of messages that one `receive` returns."""
    heartbeat_s: float = 2.0
    """Seconds between two probes on an idle connection."""
    dead_after_s: float = 10.0
    """If a probe is not answered for this number of seconds, the connection counts as dead.

    This time must exceed the time that the largest message takes on the slowest link.
    """
    connect_timeout_s: float = 10.0
    """Time limit of one attempt to connect, seconds: for TCP and for the handshake separately."""
    min_redial_s: float = 0.1
    """Pause before the first attempt to connect again after a lost connection, seconds. The pause
    doubles with each further attempt.
    """
    max_redial_s: float = 5.0
    """Longest pause between two attempts to connect, seconds."""
    max_strangers: int = 256
    """Largest number of inbound connections that have not sent a message. Above this number, the
    oldest of these connections is closed.
    """
    max_bulk_connections: int = 1
    """Largest number of bulk connections of a dialled link. A link with a short round-trip time has
    one bulk connection.
    """
    linger_s: float = 1.0
    """Seconds for which `close` and `hang_up` still deliver accepted messages."""

    def __post_init__(self) -> None:
        if self.max_unsent_bytes < self.max_message_bytes + MESSAGE_OVERHEAD_BYTES:
            raise ValueError(
                f"max_unsent_bytes={self.max_unsent_bytes} cannot hold one message of "
                f"max_message_bytes={self.max_message_bytes} and its overhead of "
                f"{MESSAGE_OVERHEAD_BYTES}; raise the first or lower the second"
            )


@dataclass(slots=True)
class TransportStats:
    """Totals of a transport since it was made."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    """Number of received payload bytes, without framing."""
    bytes_out: int = 0
    """Number of payload bytes that were accepted for sending, without framing."""
    refused_sends: int = 0
    """Number of times that `send` returned False."""
    discarded_messages: int = 0
    """Number of discarded messages. They came from inbound peers after `hang_up`, or over
    connections that use a different protocol.
    """
    failed_handshakes: int = 0
    """Number of connections whose other side uses a different protocol or a wrong key."""
    closed_strangers: int = 0
    """Number of connections that were closed before their first message, because too many newer
    connections were open.
    """
    public_messages_in: int = 0
    """Number of messages received over bulk connections. `messages_in` includes them."""
    refused_clients: int = 0
    """Number of connections that use this protocol, but do not know the run's secret."""


class Transport(abc.ABC):
    """Exchanges messages between this node and its peers, with the guarantees above."""

    options: TransportOptions
    """The limits and timings of this transport."""

    @property
    @abc.abstractmethod
    def listen_address(self) -> str | None:
        """The address at which this transport listens; None if it only dials.

        After `start`, the address has the real port and the transport's server key.
        """

    @abc.abstractmethod
    async def start(self) -> None:
        """Begin to listen.

        Raises:
            TransportError: if the address cannot be bound; the message names the address and the
                remedy.
        """

    @abc.abstractmethod
    def dial(self, address: str, *, has_bulk: bool = False) -> PeerId:
        """Start to connect to `address`; return the id of the peer.

        After every lost connection, the address is dialled again, with growing pauses between
        attempts.

        Args:
            address: tcp://host:port#key.
            has_bulk: whether to ask the other side for a bulk connection, if links are encrypted.

        Raises:
            TransportError: if the address has another form, if the address has a key but this
                transport does not encrypt, or if this transport encrypts but has no key for the
                address.
        """

    @abc.abstractmethod
    def hang_up(self, peer: PeerId) -> None:
        """End the link to a peer; no event of the peer follows.

        Sends to the peer are refused. Accepted messages are still delivered for `linger_s` seconds.
        The connection to a dialled peer or a guest is closed. Further messages of an inbound peer
        are discarded. An unknown peer is ignored.
        """

    @abc.abstractmethod
    def send(
        self,
        peer: PeerId,
        frames: Sequence[bytes | bytearray | memoryview],
        *,
        is_public: bool = False,
    ) -> bool:
        """Queue a message for a peer, or drop the message. This method never blocks.

        Frames are not copied, so the caller must never change their memory.

        Args:
            peer: the peer that is to receive the message.
            frames: the frames of the message.
            is_public: whether any machine may read the message. If so, the message may use a bulk
                connection.

        Returns:
            Whether the message was queued. A message is dropped if the peer is unknown or not
            connected, or if `max_unsent_bytes` are already waiting for the peer.

        Raises:
            ValueError: if there is no frame, or the message exceeds `max_message_bytes`.
        """

    @abc.abstractmethod
    async def receive(self) -> list[TransportEvent]:
        """Wait until there is at least one event; return the events in order.

        Only one caller at a time may wait.

        Raises:
            TransportError: if the transport is closed before or during the call.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Deliver accepted messages for at most `linger_s` seconds, then close all connections."""

    @abc.abstractmethod
    def stats(self) -> TransportStats:
        """Return a copy of the totals up to now."""


def parse_address(address: str) -> tuple[str, int]:
    """Return the host and the port of "tcp://host:port" or "tcp://host:port#key".

    IPv6 addresses are in brackets, as in tcp://[::1]:7700. For a listener, port 0 means any free
    port. `parse_key` returns the key.

    Raises:
        TransportError: if the address has another form.
    """
    match = _ADDRESS.fullmatch(address)
    if match is not None and int(match["port"]) <= MAX_PORT:
        if match["v6"] is None:
            return match["host"], int(match["port"])
        try:
            return str(ipaddress.IPv6Address(match["v6"])), int(match["port"])
        except ipaddress.AddressValueError:
            pass
    raise TransportError(
        f"{without_key(address)!r} is not an address; expected tcp://host:port, for example "
        "tcp://192.0.2.7:7700 or tcp://[2001:db8::7]:7700, with a port up to 65535 and, after #, "
        "the key of 43 letters of the process that listens there"
    )


def parse_key(address: str) -> bytes | None:
    """Return the public key in an address, 32 bytes; None if there is no key."""
    key = address.partition("#")[2]
    return base64.urlsafe_b64decode(key + "=") if len(key) == 43 else None


def with_key(address: str, key: bytes) -> str:
    """Return an address with this public key, which replaces any key that the address has."""
    text = base64.urlsafe_b64encode(key).decode().rstrip("=")
    return f"{without_key(address)}#{text}"


def without_key(address: str) -> str:
    """Return an address without its key, and without the secret that may follow the key."""
    return address.partition("#")[0]


def is_loopback(address: str) -> bool:
    """Return whether the host of an address is on the loopback interface."""
    host, _ = parse_address(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def parse_dial_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address that can be dialled.

    Raises:
        TransportError: if the address has another form, or its port is 0.
    """
    host, port = parse_address(address)
    if port == 0:
        raise TransportError(
            f"{address!r} cannot be dialled: port 0 is no port; expected tcp://host:port with the "
            "port that the other side listens on"
        )
    return host, port


def format_address(host: str, port: int) -> str:
    """Return the address of a host and a port, with brackets around an IPv6 host."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def checked_num_bytes(
    frames: Sequence[bytes | bytearray | memoryview], max_message_bytes: int
) -> int:
    """Return the size of a message in bytes.

    Raises:
        ValueError: if there is no frame, or the frames together exceed `max_message_bytes`.
    """
    if not frames:
        raise ValueError("a message needs at least one frame")
    num_bytes = sum(
        frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames
    )
    if num_bytes > max_message_bytes:
        raise ValueError(
            f"a message of {num_bytes} bytes exceeds max_message_bytes={max_message_bytes}; "
            "send it in parts"
        )
    return num_bytes
