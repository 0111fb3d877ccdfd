"""The departure of a worker."""

from __future__ import annotations

from dataclasses import dataclass

from echo.wire.actions import Action

DRAIN_S = 30.0
"""Seconds that a worker that leaves waits for its engine, then for its last rewards and acks."""


@dataclass(frozen=True, slots=True)
class Drained(Action):
    """A worker that leaves has handed over all that it could."""


@dataclass(frozen=True, slots=True)
class Release(Action):
    """Give this machine back, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTerms:
    """For how long a machine is kept; None is forever."""

    standby_s: float | None = None
    learner_gone_s: float | None = None
