"""Transport contract: the guarantees of a transport to its node.

A message is a list of frames. A transport listens at one address at most, dials any number of
others, and reports events, in order for each peer:

    Connected  Received*  Disconnected      for a dialled peer again after each redial, with a
                                            DialFailed for each failed attempt

A *dialled* peer is the link that `dial` opened; it keeps its id through every loss and redial until
`hang_up`. An *inbound* peer is one connection that another node opened. When it is lost its id
ends, and the same node is a new peer when it returns. Ids are never used twice.

Every implementation guarantees the following, and the contract tests check it:

* Between `Connected` and `Disconnected` messages arrive whole, once and in order. Messages that
  have not arrived when a connection breaks are lost: the protocol above has acknowledgements.
* Messages that a peer sent before it closed are received before its `Disconnected`.
* The dialling side speaks first: an inbound peer becomes known with its first message.
* A link may have **bulk connections** beside it, without encryption. Messages over them
  (`is_public`) have no order, neither among each other nor with the link's. If a bulk connection
  ends, so does the link.
* Everything is bounded by `TransportOptions`. A peer that does not read fills its own queue until
  `send` returns False, and does not affect other peers. A node that does not call `receive` stops
  reading, so the queues of its peers fill.
* Only the loop's thread may call a transport. `send`, `dial` and `hang_up` never block.

A `Disconnected` may be late by `dead_after_s` (a vanished machine says nothing), and for an inbound
peer it can be missing altogether, so the protocol keeps heartbeats of its own.
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
"""Names a peer within one transport: opaque, minted by the transport, never reused."""

Frame: TypeAlias = bytes | memoryview
"""One received frame; large ones are views of the memory they arrived in."""

MESSAGE_OVERHEAD_BYTES = 512
"""Bytes counted for each message beside its frames, so that byte bounds limit tiny messages."""

_ADDRESS = re.compile(
    r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[\w.-]+)):(?P<port>\d{1,5})"
    r"(?:#(?P<key>[A-Za-z0-9_-]{43}))?"
)


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer is connected: `send` accepts messages for it from now on."""

    peer: PeerId
    address: str | None
    """The dialled address; None for an inbound peer."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection has ended; a dialled peer is dialled again until `hang_up`."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A whole message has arrived."""

    peer: PeerId
    frames: list[Frame]
    is_public: bool = False
    """Whether it arrived over a bulk connection, where another machine may have read or made it."""


@dataclass(frozen=True, slots=True)
class DialFailed:
    """An attempt to dial has failed; another one follows."""

    peer: PeerId
    reason: str
    """Cause of the failure, in words for the user."""
    is_refused: bool
    """Whether a node answers with other keys or another mechanism, so that every attempt fails."""


TransportEvent: TypeAlias = Connected | Disconnected | DialFailed | Received


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Bounds and timings of a transport."""

    max_message_bytes: int = 16 << 20
    """Largest message, frames together. A peer that sends a larger frame is disconnected."""
    max_unsent_bytes: int = 64 << 20
    """Most bytes accepted for a peer and not yet passed to the kernel, overhead included."""
    max_unread_messages: int = 256
    """Most unread messages of one peer; its connection is not read while it has more."""
    max_burst_bytes: int = 16 << 20
    """Bytes after which one `receive` takes no further message."""
    max_burst_messages: int = 256
    """Most messages that one `receive` returns."""
    heartbeat_s: float = 2.0
    """Interval of probes on an idle connection, seconds."""
    dead_after_s: float = 10.0
    """Time without an answer to a probe after which a connection is dead, seconds.

    Must exceed the time that the largest message takes on the slowest link.
    """
    connect_timeout_s: float = 10.0
    """Limit of one attempt to connect, for TCP and for the handshake each, seconds."""
    min_redial_s: float = 0.1
    """Pause after a lost connection, doubled with each further attempt, seconds."""
    max_redial_s: float = 5.0
    """Longest pause between attempts, seconds."""
    max_strangers: int = 256
    """Most inbound connections without a message yet; if there are more, the oldest is closed."""
    max_bulk_connections: int = 1
    """Most bulk connections of a dialled link; a short link has one."""
    linger_s: float = 1.0
    """Time for which `close` and `hang_up` deliver accepted messages, seconds."""

    def __post_init__(self) -> None:
        if self.max_unsent_bytes < self.max_message_bytes + MESSAGE_OVERHEAD_BYTES:
            raise ValueError(
                f"max_unsent_bytes={self.max_unsent_bytes} cannot hold one message of "
                f"max_message_bytes={self.max_message_bytes} and its overhead of "
                f"{MESSAGE_OVERHEAD_BYTES}; raise the first or lower the second"
            )


@dataclass(slots=True)
class TransportStats:
    """Totals since the transport was made."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    """Payload bytes received, framing not counted."""
    bytes_out: int = 0
    """Payload bytes accepted for sending, framing not counted."""
    refused_sends: int = 0
    """Times that `send` returned False."""
    discarded_messages: int = 0
    """Messages from inbound peers after `hang_up`, and of connections with another protocol."""
    failed_handshakes: int = 0
    """Connections whose other side does not use this protocol, or has a wrong key."""
    closed_strangers: int = 0
    """Connections closed without a message, because of too many newer ones."""
    public_messages_in: int = 0
    """Messages received over bulk connections, as part of `messages_in`."""
    refused_clients: int = 0
    """Connections that use this protocol without the run's secret."""


class Transport(abc.ABC):
    """Carries messages between this node and its peers; see the module's docstring."""

    options: TransportOptions
    """Bounds and timings."""

    @property
    @abc.abstractmethod
    def listen_address(self) -> str | None:
        """Where this transport listens, with the real port once started; None if it only dials."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Begin to listen.

        Raises:
            TransportError: if the address cannot be bound; the message names it and the remedy.
        """

    @abc.abstractmethod
    def dial(self, address: str, *, has_bulk: bool = False) -> PeerId:
        """Begin to connect to `address`, and again after every loss, with growing pauses.

        Args:
            address: tcp://host:port#key.
            has_bulk: whether to ask the other side for a bulk connection, where links are
                encrypted.

        Raises:
            TransportError: if the address is not of the form tcp://host:port#key, or has a key
                where this transport does not encrypt, or none where it does and knows none.
        """

    @abc.abstractmethod
    def hang_up(self, peer: PeerId) -> None:
        """End a peer: no event of it follows, and sends to it are refused.

        Accepted messages are still delivered for `linger_s`. A dialled peer sees the connection
        close; further messages of an inbound peer are discarded. An unknown peer is ignored.
        """

    @abc.abstractmethod
    def send(
        self,
        peer: PeerId,
        frames: Sequence[bytes | bytearray | memoryview],
        *,
        is_public: bool = False,
    ) -> bool:
        """Queue a message to be sent to a peer, or drop it; never block.

        Frames are not copied, so the caller must never change their memory.

        Args:
            peer: the receiver.
            frames: the message.
            is_public: whether any machine may read it, so that it may use a bulk connection.

        Returns:
            False if nothing was sent, because the peer is unknown, not connected, or has
            `max_unsent_bytes` waiting.

        Raises:
            ValueError: if there is no frame, or the message exceeds `max_message_bytes`.
        """

    @abc.abstractmethod
    async def receive(self) -> list[TransportEvent]:
        """Wait for events and return them in order, at least one. One caller at a time.

        Raises:
            TransportError: if the transport is closed, also while waiting.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Deliver accepted messages for at most `linger_s`, then close all connections."""

    @abc.abstractmethod
    def stats(self) -> TransportStats:
        """Return the totals so far, as a copy."""


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of "tcp://host:port" or "tcp://host:port#key".

    IPv6 addresses stand in brackets, as in tcp://[::1]:7700. Port 0 means "any free port" to a
    listener. The key belongs to the process that listens there; `parse_key` returns it.

    Raises:
        TransportError: if the address has another form.
    """
    match = _ADDRESS.fullmatch(address)
    if match is not None and int(match["port"]) <= 65535:
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
    """Return the public key in an address, 32 bytes, or None if it has none."""
    key = address.partition("#")[2]
    return base64.urlsafe_b64decode(key + "=") if len(key) == 43 else None


def with_key(address: str, key: bytes) -> str:
    """Return an address with this public key in the place of any that it had."""
    text = base64.urlsafe_b64encode(key).decode().rstrip("=")
    return f"{without_key(address)}#{text}"


def without_key(address: str) -> str:
    """Return the address without its key, and without a secret that may follow it."""
    return address.partition("#")[0]


def is_loopback(address: str) -> bool:
    """Return whether an address is on the loopback interface."""
    host, _ = parse_address(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def parse_dial_address(address: str) -> tuple[str, int]:
    """Split an address that can be dialled: as `parse_address`, with a real port."""
    host, port = parse_address(address)
    if port == 0:
        raise TransportError(
            f"{address!r} cannot be dialled: port 0 is no port; expected tcp://host:port with the "
            "port that the other side listens on"
        )
    return host, port


def format_address(host: str, port: int) -> str:
    """Join host and port to an address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def checked_num_bytes(
    frames: Sequence[bytes | bytearray | memoryview], max_message_bytes: int
) -> int:
    """Return the size of a message in bytes.

    Raises:
        ValueError: if there is no frame, or together they exceed `max_message_bytes`.
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
