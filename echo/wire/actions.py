"""Actions: requests of a role to the process around it.

Roles and planes decide and never act: each method returns a list of these, and the
node (`runtime/node.py`) or a test carries them out in order.
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
    """A request of a role; each plane's own actions stand beside who asks for them."""

    __slots__ = ()


class Work(Action):
    """Something to be done in a thread, and then told to the role with its result (`worked`)."""

    __slots__ = ()

    def run(self) -> str:
        """Do it, in whatever thread; return what was wrong, or nothing."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Hand these frames to the transport; if it refuses them they are lost, which is allowed."""

    peer: str
    frames: Sequence[Frame]
    is_public: bool = False
    """Whether any reader may see them: nothing, or what matters encrypted already."""


@dataclass(frozen=True, slots=True)
class Dial(Action):
    """Connect to `address` and report the new peer with the role's `dialled`."""

    address: str
    purpose: str


@dataclass(frozen=True, slots=True)
class HangUp(Action):
    """Close the link to `peer`."""

    peer: str


@dataclass(frozen=True, slots=True)
class Note(Action):
    """Something the operator may want to read."""

    level: str
    """"info" or "warning"."""
    text: str
    topic: str = ""
    """Where many may follow: one a minute of each topic is told, with how many there were."""
    ends: str = ""
    """The topic that this message ends: messages on it that still wait to be sent are dropped."""


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """This node's work has ended: cleanly, or with the error that the user must see."""

    reason: str
    error: EchoError | None = None


# --- What the learner's planes share to make actions of messages and of complaints ---

MAX_ROUTES = 100_000
"""Nodes that are remembered at most, the newest; each costs some hundred bytes."""


class Routes:
    """Over which link each node was last heard, which is how it is answered."""

    def __init__(
        self, counters: Counters, channel_of: Callable[[str], Channel | None] = lambda node_id: None
    ) -> None:
        """Start without any; what cannot be sent is counted.

        Args:
            counters: for that.
            channel_of: node id -> the channel in which its messages are sealed.
        """
        self._peers: RecentMap[str, str] = RecentMap(max_entries=MAX_ROUTES)
        self._counters = counters
        self._channel_of = channel_of

    def learn(self, node_id: str, peer: str) -> None:
        """Note over which link a node has spoken."""
        self._peers[node_id] = peer

    def restore(self, node_id: str, peer: str | None) -> None:
        """Answer a node where it was answered before, after another node's message."""
        if peer is None:
            self._peers.discard(node_id)
        else:
            self._peers[node_id] = peer

    def peer_of(self, node_id: str) -> str | None:
        """Return the link over which a node was last heard; None if there is none."""
        return self._peers.get(node_id)

    def forget(self, peer: str) -> None:
        self._peers.discard_value(peer)

    def to(self, node_id: str, message: Message, *payload: Frame) -> list[Action]:
        """Return the Send of a message to a node, or nothing if no link leads to it."""
        peer = self.peer_of(node_id)
        if peer is None:
            self._counters.add("dropped/no_route")
            return []
        channel = self._channel_of(node_id)
        frames = encode(message, payload, source=LEARNER_ID, target=node_id, channel=channel)
        return [Send(peer, frames)]


class Complaints:
    """Report to the operator of nodes that misbehave: once a minute for each and each reason."""

    def __init__(self) -> None:
        self._lines = OncePerMinute()

    def note(self, node_id: str, reason: str, text: str, *, now: float) -> list[Action]:
        """Return the Note, or nothing if it was said a moment ago."""
        line = self._lines.say(node_id, reason, text, now=now)
        return [] if line is None else [Note("warning", line)]
