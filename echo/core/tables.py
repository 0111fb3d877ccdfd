"""Tables of states: for each state and each kind of event, a move.

A table has an entry for every pair of state and event. The event changes the state, is ignored, or
is impossible. If an impossible event occurs, this node has a bug.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

State = TypeVar("State", bound=StrEnum)


@dataclass(frozen=True, slots=True, eq=False)
class Move(Generic[State]):
    """The effect of an event that occurs in a state."""

    then: State | None = None
    """The next state; None if the state stays."""
    handle: Callable[..., None] | None = None
    """The function to call after the state has changed; None if there is nothing to call."""


IGNORED: Move[Any] = Move()
IMPOSSIBLE: Move[Any] = Move()
