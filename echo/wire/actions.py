"""Actions: requests of a role to its process.

Roles and planes (parts of a role, such as the weights plane) never act themselves. Their methods
return lists of actions, and the node (`runtime/node.py`) or a test executes the actions in order.
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
    """A role's request to its process. Planes define further actions in their own modules."""

    __slots__ = ()


class Work(Action):
    """A long-running action. A thread calls `run`, and the role's `worked` gets the result."""

    __slots__ = ()

    def run(self) -> str:
        """Do the work, in any thread; return a description of a failure, or "" on success."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Send frames to a peer.

    The frames are lost if the transport refuses them. The protocol tolerates lost messages.
    """

    peer: str
    frames: Sequence[Frame]
    is_public: bool = False
    """Whether the frames may be sent over an unencrypted link."""


@dataclass(frozen=True, slots=True)
class Dial(Action):
    """Connect to an address. The role's `dialled` gets the id of the new peer."""

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
    """If set, at most one message per minute on this topic is logged; all others are only counted.
    """
    ends: str = ""
    """A topic that this message ends: messages on this topic that were not logged yet are dropped.
    """


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """End the node, cleanly or with an error for the user."""

    reason: str
    error: EchoError | None = None


# --- What the learner's planes share: replies by node, and faults of nodes ---

MAX_ROUTES = 100_000
"""Largest number of nodes to which the learner or a relay keeps a route. Above it, the oldest route
is dropped. A route takes about a hundred bytes.
"""


class Routes:
    """The route to each node: the link over which the node's last message arrived."""

    def __init__(
        self, counters: Counters, channel_of: Callable[[str], Channel | None] = lambda node_id: None
    ) -> None:
        """Start with no routes.

        Args:
            counters: counters of messages without a route.
            channel_of: a function that returns the channel for messages to a node id; it returns
                None if messages to this node have no seal.
        """
        self._peers: RecentMap[str, str] = RecentMap(max_entries=MAX_ROUTES)
        self._counters = counters
        self._channel_of = channel_of

    def learn(self, node_id: str, peer: str) -> None:
        """Record the link over which a node has sent a message."""
        self._peers[node_id] = peer

    def restore(self, node_id: str, peer: str | None) -> None:
        """Undo a `learn`: restore the node's former route, or remove the route if it had none.

        Call this method if the message turns out to be from another node.
        """
        if peer is None:
            self._peers.discard(node_id)
        else:
            self._peers[node_id] = peer

    def peer_of(self, node_id: str) -> str | None:
        """Return the link over which a node last sent a message; None if no link is known."""
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
        """Return a Note; no action if this node and reason were reported in the last minute."""
        line = self._lines.line(node_id, reason, text, now=now)
        return [] if line is None else [Note("warning", line)]
