"""Actions: what a role asks the process around it to do.

Roles and their planes (parts such as the weights plane) decide and never act. Their methods return
lists of actions. The node (`runtime/node.py`) or a test executes the actions in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo.core.errors import EchoError
from echo.core.monitoring.metrics import Counters
from echo.core.timers import OncePerMinute, RecentMap
from echo.wire.codec import Frame, encode
from echo.wire.messages import LEARNER_ID, Message
from echo.wire.seals import Channel


class Action:
    """A role's request to its process; planes define actions in their own modules."""

    __slots__ = ()


class Work(Action):
    """An action that takes long: a thread runs it, and the role's `worked` gets the result."""

    __slots__ = ()

    def run(self) -> str:
        """Do the work, in any thread; return text on what failed, or ""."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Pass frames to the transport, to be sent to a peer.

    If the transport refuses the frames, they are lost. The protocol permits a lost message.
    """

    peer: str
    frames: Sequence[Frame]
    is_public: bool = False
    """Whether the frames may be sent unencrypted: they are not secret, or already encrypted."""


@dataclass(frozen=True, slots=True)
class Dial(Action):
    """Connect to an address; the role's `dialled` gets the id of the new peer."""

    address: str
    purpose: str


@dataclass(frozen=True, slots=True)
class HangUp(Action):
    """Close the link to a peer."""

    peer: str


@dataclass(frozen=True, slots=True)
class Note(Action):
    """Log a message for the operator."""

    level: str
    """"info" or "warning"."""
    text: str
    topic: str = ""
    """If set, at most one message per minute on this topic is logged; the other messages are
    counted."""
    ends: str = ""
    """The topic that this message ends. Messages on this topic that were not logged yet are
    dropped."""


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """End the node: cleanly, or with an error for the user."""

    reason: str
    error: EchoError | None = None


# --- What the learner's planes share: replies by node, and faults of nodes ---

MAX_ROUTES = 100_000
"""Largest number of routes; above it the oldest are dropped. A route takes some hundred bytes."""


class Routes:
    """The route to each node: the link over which its last message arrived."""

    def __init__(
        self, counters: Counters, channel_of: Callable[[str], Channel | None] = lambda node_id: None
    ) -> None:
        """Start with no routes.

        Args:
            counters: the counters in which messages without a route are counted.
            channel_of: returns the channel that seals messages to the node with the given id; None
                if these messages have no seal.
        """
        self._peers: RecentMap[str, str] = RecentMap(max_entries=MAX_ROUTES)
        self._counters = counters
        self._channel_of = channel_of

    def learn(self, node_id: str, peer: str) -> None:
        """Record the link over which a node has sent a message."""
        self._peers[node_id] = peer

    def restore(self, node_id: str, peer: str | None) -> None:
        """Set or remove the route of a node, to undo a `learn`.

        This is needed if the message that `learn` recorded is from another node after all.
        """
        if peer is None:
            self._peers.discard(node_id)
        else:
            self._peers[node_id] = peer

    def peer_of(self, node_id: str) -> str | None:
        """Return the link over which a node last sent a message; None if it is not known."""
        return self._peers.get(node_id)

    def forget(self, peer: str) -> None:
        self._peers.discard_value(peer)

    def to(self, node_id: str, message: Message, *payload: Frame) -> list[Action]:
        """Return the action that sends a message to a node; no action if no link is known."""
        peer = self.peer_of(node_id)
        if peer is None:
            self._counters.add("dropped/no_route")
            return []
        channel = self._channel_of(node_id)
        frames = encode(message, payload, source=LEARNER_ID, target=node_id, channel=channel)
        return [Send(peer, frames)]


class PeerFaults:
    """Reports misbehaving nodes to the operator, once per minute for each node and reason."""

    def __init__(self) -> None:
        self._lines = OncePerMinute()

    def note(self, node_id: str, reason: str, text: str, *, now: float) -> list[Action]:
        """Return a Note; no action if this node and reason were reported within a minute."""
        line = self._lines.line(node_id, reason, text, now=now)
        return [] if line is None else [Note("warning", line)]
