"""Tables of states: state -> kind of event -> what the event does there.

Every pair is in the table: an event moves to another state, is ignored, or is impossible, which is
a fault of this node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

State = TypeVar("State", bound=StrEnum)


@dataclass(frozen=True, slots=True, eq=False)
class Move(Generic[State]):
    """What an event does in one state."""

    then: State | None = None
    """The next state; None stays."""
    handle: Callable[..., None] | None = None
    """Called after the move."""


IGNORED: Move[Any] = Move()
IMPOSSIBLE: Move[Any] = Move()
