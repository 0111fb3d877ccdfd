"""The simulated ledger, and where a run resumes after a crash.

It holds in memory what `records/ledger.py` writes and `runtime/learner/resume.py` reads: groups
granted, accepted and trained, and checkpoints. After a crash the run continues from the newest
checkpoint in a new lineage: the steps after it are void, their groups wait again where they may
still be trained, and what was granted and not delivered is leased to nobody until its worker claims
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from echo.core.rollout import Group, Lineage, find_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a learner starts from."""

    lineages: tuple[Lineage, ...]
    step: int = 0
    next_group_id: int = 0
    finished: tuple[int, ...] = ()
    """Groups below `next_group_id` that were accepted or ended."""
    open_attempts: dict[int, int] = field(default_factory=dict)
    """Granted groups without a result: id -> attempts so far."""
    buffered: tuple[Group, ...] = ()
    """Accepted groups that may be trained."""
    ends: tuple[tuple[Group, str], ...] = ()
    """Those that cannot any more, and why."""


class Journal:
    """One run's, whatever becomes of its learner."""

    def __init__(self, *, max_staleness: int, checkpoint_steps: int) -> None:
        """Begin a run.

        Args:
            max_staleness: S, inclusive.
            checkpoint_steps: optimizer steps between checkpoints.
        """
        self._max_staleness = max_staleness
        self._checkpoint_steps = checkpoint_steps
        self._lineages: tuple[Lineage, ...] = (Lineage(1, 0),)
        self._checkpoint = 0
        self._next_group_id = 0
        self._attempts: dict[int, int] = {}
        self._waiting: dict[int, Group] = {}
        self._trained: list[Group] = []
        """Since the newest checkpoint."""

    @property
    def beginning(self) -> Start:
        """Where a new run starts."""
        return Start(lineages=self._lineages)

    def granted(self, group_id: int, attempt: int) -> None:
        """Write down a lease."""
        self._next_group_id = max(self._next_group_id, group_id + 1)
        self._attempts[group_id] = attempt + 1

    def accepted(self, group: Group) -> None:
        """Write down a group."""
        self._attempts.pop(group.group_id, None)
        self._waiting[group.group_id] = group

    def ended(self, group_id: int) -> None:
        """Write down that a group will not be trained."""
        self._attempts.pop(group_id, None)
        self._waiting.pop(group_id, None)

    def trained(self, groups: Iterable[Group], *, step: int) -> list[Group]:
        """Write down a step, and save the state if it is time for that.

        Args:
            groups: those of the step.
            step: optimizer steps done with this one.

        Returns:
            The groups that no crash can bring back.
        """
        for group in groups:
            del self._waiting[group.group_id]
            self._trained.append(group)
        if step % self._checkpoint_steps:
            return []
        self._checkpoint = step
        done, self._trained = self._trained, []
        return done

    def recover(self) -> Start:
        """Open a new lineage at the newest checkpoint, and return what there is."""
        lineage = Lineage(self._lineages[-1].lineage + 1, self._checkpoint)
        self._lineages += (lineage,)
        found = {group.group_id: group for group in self._trained} | self._waiting
        self._trained, self._waiting = [], {}
        ends = []
        for group_id, group in sorted(found.items()):
            fault = find_fault(
                group,
                step=self._checkpoint,
                max_staleness=self._max_staleness,
                lineages=self._lineages,
            )
            if fault is None:
                self._waiting[group_id] = group
            else:
                ends.append((group, fault))
        return Start(
            lineages=self._lineages,
            step=self._checkpoint,
            next_group_id=self._next_group_id,
            finished=tuple(i for i in range(self._next_group_id) if i not in self._attempts),
            open_attempts=dict(self._attempts),
            buffered=tuple(self._waiting.values()),
            ends=tuple(ends),
        )
