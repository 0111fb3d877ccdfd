"""Actions: what a role requests from the process around it.

Roles and planes decide and never act. Their methods return lists of actions, which the node
(`runtime/node.py`) or a test executes in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo.core.errors import EchoError
from echo.core.metrics import Counters
from echo.core.timers import OncePerMinute, RecentMap
from echo.wire.codec import Frame, encode
from echo.wire.messages import LEARNER_ID, Message
from echo.wire.seals import Channel


class Action:
    """A request of a role; the actions of one plane are defined in its own modules."""

    __slots__ = ()


class Work(Action):
    """Work for a thread; the role receives the result (`worked`)."""

    __slots__ = ()

    def run(self) -> str:
        """Do the work, in any thread; return what is wrong with it, or an empty string."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Pass frames to the transport; frames that it refuses are lost, which the protocol permits."""

    peer: str
    frames: Sequence[Frame]
    is_public: bool = False
    """Whether the frames may be sent unencrypted: they are not secret, or already encrypted."""


@dataclass(frozen=True, slots=True)
class Dial(Action):
    """Connect to an address and report the new peer with the role's `dialled`."""

    address: str
    purpose: str


@dataclass(frozen=True, slots=True)
class HangUp(Action):
    """Close the link to a peer."""

    peer: str


@dataclass(frozen=True, slots=True)
class Note(Action):
    """A log message for the operator."""

    level: str
    """"info" or "warning"."""
    text: str
    topic: str = ""
    """If set, one message per minute on this topic is logged; others are counted."""
    ends: str = ""
    """The topic that this message ends: waiting messages on it are dropped."""


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """The node ends: cleanly, or with an error for the user."""

    reason: str
    error: EchoError | None = None


# --- What the learner's planes share: replies by node, and complaints ---

MAX_ROUTES = 100_000
"""Largest number of routes; older ones are dropped. Each takes some hundred bytes."""


class Routes:
    """The link to each node: the one over which its last message came."""

    def __init__(
        self, counters: Counters, channel_of: Callable[[str], Channel | None] = lambda node_id: None
    ) -> None:
        """Start with no routes.

        Args:
            counters: counts messages that cannot be sent.
            channel_of: returns the channel that seals messages to a node id.
        """
        self._peers: RecentMap[str, str] = RecentMap(max_entries=MAX_ROUTES)
        self._counters = counters
        self._channel_of = channel_of

    def learn(self, node_id: str, peer: str) -> None:
        """Record the link over which a node has sent a message."""
        self._peers[node_id] = peer

    def restore(self, node_id: str, peer: str | None) -> None:
        """Set or remove the route of a node, to undo `learn` after another node's message."""
        if peer is None:
            self._peers.discard(node_id)
        else:
            self._peers[node_id] = peer

    def peer_of(self, node_id: str) -> str | None:
        """Return the link over which a node last sent a message; None if there is none."""
        return self._peers.get(node_id)

    def forget(self, peer: str) -> None:
        self._peers.discard_value(peer)

    def to(self, node_id: str, message: Message, *payload: Frame) -> list[Action]:
        """Return the action that sends a message to a node, or no action without a route."""
        peer = self.peer_of(node_id)
        if peer is None:
            self._counters.add("dropped/no_route")
            return []
        channel = self._channel_of(node_id)
        frames = encode(message, payload, source=LEARNER_ID, target=node_id, channel=channel)
        return [Send(peer, frames)]


class Complaints:
    """Reports misbehaving nodes to the operator, once per minute for each node and reason."""

    def __init__(self) -> None:
        self._lines = OncePerMinute()

    def note(self, node_id: str, reason: str, text: str, *, now: float) -> list[Action]:
        """Return a Note, or no action if the same was reported less than a minute ago."""
        line = self._lines.say(node_id, reason, text, now=now)
        return [] if line is None else [Note("warning", line)]
