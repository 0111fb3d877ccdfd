"""Tables of states: state -> kind of event -> move.

A table has every pair: the event changes the state, is ignored, or is impossible. An impossible
event is a bug of this node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

State = TypeVar("State", bound=StrEnum)


@dataclass(frozen=True, slots=True, eq=False)
class Move(Generic[State]):
    """The effect of an event in a state."""

    then: State | None = None
    """The next state; None for no change."""
    handle: Callable[..., None] | None = None
    """Called after the move."""


IGNORED: Move[Any] = Move()
IMPOSSIBLE: Move[Any] = Move()
