"""Controls the departure of a worker, from the decision to leave to the end of its groups.

    staying --begin--> stopping --is_stopped--> delivering --finish--> drained

A leaving worker accepts no more leases. In the state *stopping*, the worker waits for its recalled
engine calls. At the end of this state, the worker sends its unfinished groups to the learner, and
starts to write them to its own file. In the state *delivering*, the worker waits for the last
rewards, for acknowledgements, and until the file is written. Each of the two waits takes at most
DRAIN_S.

A worker leaves if its operator stops the worker, or if a limit of `ReleaseTerms` has passed. In the
second case, the machine is given back after the worker is drained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from echo.core.units import format_duration
from echo.wire.actions import Action, Note

DRAIN_S = 30.0
"""Seconds that a leaving worker waits for its engine. It then waits as long again for its last
rewards and acknowledgements."""


@dataclass(frozen=True, slots=True)
class Drained(Action):
    """Action: report that a leaving worker has handed over its groups or waited long enough."""


@dataclass(frozen=True, slots=True)
class Release(Action):
    """Action: give the worker's machine back because of `reason`. MachineReleased follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Event: the operator wants this worker to leave."""


@dataclass(frozen=True, slots=True)
class MachineReleased:
    """Event: the machine was given back."""

    is_confirmed: bool
    """Whether the command that gives the machine back succeeded. If it failed, the machine may
    still be billed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTerms:
    """Limits on how long a worker keeps its machine while it is on standby or without the learner.

    Both limits are in seconds; None means no limit.
    """

    standby_s: float | None = None
    learner_gone_s: float | None = None


class DepartureState(StrEnum):
    """How far a worker's departure has progressed."""

    STAYING = "staying"
    STOPPING = "stopping"
    """The worker waits until the engine has stopped its calls."""
    DELIVERING = "delivering"
    """The worker hands over unfinished groups, and waits until the last results are scored and
    acknowledged."""
    DRAINED = "drained"
    """The process may end, because nothing would be lost."""


class Departure:
    """Decides when a worker leaves, and when it has handed over all its groups."""

    def __init__(self, terms: ReleaseTerms) -> None:
        """Start in the state `staying`. `terms` limits how long the machine is kept."""
        self.terms = terms
        self.state = DepartureState.STAYING
        self.standby_since: float | None = None
        """Time at which the learner put this worker on standby; None while the worker is active."""
        self.reason = ""
        """The reason why this worker gives its machine back; empty if it keeps the machine."""
        self._until = math.inf
        """Time at which the present wait ends at the latest."""

    @property
    def is_releasing(self) -> bool:
        """Whether the worker is drained and is giving its machine back."""
        return bool(self.reason) and self.state is DepartureState.DRAINED

    def stand_by(self, *, is_standby: bool, now: float) -> list[Action]:
        """Record whether the worker is on standby. If this state has changed, return a log line."""
        if is_standby == (self.standby_since is not None):
            return []
        self.standby_since = now if is_standby else None
        text = "gets no more groups: standing by" if is_standby else "gets groups again"
        return [Note("info", text)]

    def is_due(self, *, lost_at: float, now: float) -> bool:
        """Return whether the worker must leave. If so, set `reason`.

        The worker must leave when a limit of its terms has passed.

        Args:
            lost_at: the time at which the learner was last known to be reachable.
            now: the present time, seconds.
        """
        standby_at, gone_at = self._release_times(lost_at)
        if self.state is not DepartureState.STAYING or now < min(standby_at, gone_at):
            return False
        if self.standby_since is not None and now >= standby_at:
            why = f"on standby for {format_duration(now - self.standby_since)}"
        else:
            why = f"without the learner for {format_duration(now - lost_at)}"
        self.reason = f"{why} (worker.release_after_s)"
        return True

    def begin(self, *, now: float) -> None:
        """Enter the state `stopping`, in which the worker waits for the engine's calls."""
        self.state, self._until = DepartureState.STOPPING, now + DRAIN_S

    def is_stopped(self, *, is_sampling: bool, now: float) -> bool:
        """Return whether the worker must hand over its unfinished groups now.

        The result is true only once.

        Args:
            is_sampling: whether a recalled engine call is still running.
            now: the present time, seconds.
        """
        if self.state is not DepartureState.STOPPING or (is_sampling and now < self._until):
            return False
        self.state, self._until = DepartureState.DELIVERING, now + DRAIN_S
        return True

    def finish(self, *, is_busy: bool, now: float) -> list[Action]:
        """If the worker is done, return Drained.

        If the worker gives its machine back, return Release as well. The worker is done when it has
        no more work, or has waited DRAIN_S.
        """
        if self.state is not DepartureState.DELIVERING or (is_busy and now < self._until):
            return []
        self.state = DepartureState.DRAINED
        return [Drained(), Release(self.reason)] if self.reason else [Drained()]

    def deadline(self, *, lost_at: float) -> float:
        """Return when the present wait ends.

        In the state `staying`, this is the time at which the next limit passes.
        """
        match self.state:
            case DepartureState.STAYING:
                return min(self._release_times(lost_at))
            case DepartureState.DRAINED:
                return math.inf
        return self._until

    def _release_times(self, lost_at: float) -> tuple[float, float]:
        """Return when the two limits `standby_s` and `learner_gone_s` of the terms are reached."""
        since, terms = self.standby_since, self.terms
        return (
            math.inf if since is None or terms.standby_s is None else since + terms.standby_s,
            math.inf if terms.learner_gone_s is None else lost_at + terms.learner_gone_s,
        )
