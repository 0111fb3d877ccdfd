"""Defines state tables. A table has a move for each pair of a state and a kind of event.

A move changes the state, ignores the event, or declares the event impossible. If an impossible
event occurs, this node has a bug.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

State = TypeVar("State", bound=StrEnum)


@dataclass(frozen=True, slots=True, eq=False)
class Move(Generic[State]):
    """What an event does in a state."""

    then: State | None = None
    """The next state; None if the state does not change."""
    handle: Callable[..., None] | None = None
    """The function to call after the change of state; None if there is no function."""


IGNORED: Move[Any] = Move()
IMPOSSIBLE: Move[Any] = Move()
