"""What a session asks of the process around it.

The sessions of this package decide and never act: each method returns a list of these, and the
node (`runtime/node.py`) or a test carries them out in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo.core.errors import EchoError
from echo.wire.codec import Frame


class Action:
    """What a session asks for; each plane's own actions stand beside who asks for them."""

    __slots__ = ()


class Work(Action):
    """Something to be done in a thread, and then told to the session with its result (`worked`)."""

    __slots__ = ()

    def run(self) -> str:
        """Do it, in whatever thread; return what was wrong, or nothing."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Hand these frames to the transport; if it refuses them they are lost, which is allowed."""

    peer: str
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True)
class Dial(Action):
    """Connect to `address` and report the new peer with the session's `dialled`."""

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


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """This node's work is over: cleanly, or with the error that the user must see."""

    reason: str
    error: EchoError | None = None
