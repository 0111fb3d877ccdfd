"""Rollout buffer: accepted groups, oldest first, within the staleness bound.

The buffer is where promise 1 is kept: `take` hands out only groups whose oldest trainable token has
staleness <= max_staleness at that moment, and `evict` removes the others with their reason. It is
bounded by admission (`leases/admission.py`), at (S + 1) * B groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echo.core.rollout import Group, Lineage, find_fault, trim_stale


@dataclass(frozen=True, slots=True)
class Evicted:
    """A group that left the buffer untrained."""

    group: Group
    reason: str
    """As `echo.core.rollout.find_fault` names it, for example "stale" or "abandoned_version"."""


class StalenessBuffer:
    """Groups in order of age, with the staleness bound enforced at the exit."""

    def __init__(
        self, *, max_staleness: int, lineages: Sequence[Lineage], trims_stale: bool = False
    ) -> None:
        """Start empty.

        Args:
            max_staleness: S, inclusive.
            lineages: the learner's histories; a new one means a new buffer.
            trims_stale: whether a group keeps its other tokens when some have grown too old.
        """
        self.trims_stale = trims_stale
        self.num_trimmed_tokens = 0
        """Tokens masked here because they had grown too old."""
        self.max_staleness = max_staleness
        self.admission_staleness = max_staleness
        """The bound that new leases are granted for; groups that are in the buffer stay valid when
        it is lowered.
        """
        self.lineages = tuple(lineages)
        self._groups: dict[int, Group] = {}
        self._taken_at = -1
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def num_unspent(self, *, step: int) -> int:
        """Return how many groups admission must count besides those of the steps done.

        These are the groups here, and those taken at this same step: their step is being made, so
        it is not counted yet.
        """
        return len(self._groups) + (self._num_taken if self._taken_at == step else 0)

    def put(self, group: Group) -> None:
        """Add a group that the ledger holds and that is not here yet."""
        if group.group_id in self._groups:
            raise ValueError(f"group {group.group_id} is in the buffer already")
        self._groups[group.group_id] = group

    def evict(self, *, step: int) -> list[Evicted]:
        """Remove and return every group that can no longer be trained.

        A rollout that newer weights continued stays when only its first tokens have grown too old;
        these are masked.
        """
        evicted = []
        for group in list(self._groups.values()):
            reason = find_fault(
                group, step=step, max_staleness=self.max_staleness, lineages=self.lineages
            )
            if reason == "stale" and self._trim(group, step):
                continue
            if reason is not None:
                evicted.append(Evicted(self._groups.pop(group.group_id), reason))
        return evicted

    def _trim(self, group: Group, step: int) -> bool:
        """Mask what is too old of a group; return whether enough of it is left."""
        trimmed = trim_stale(group, step=step, max_staleness=self.max_staleness)
        if not self.trims_stale or trimmed is None:
            return False
        self.num_trimmed_tokens += group.num_trained - trimmed.num_trained
        self._groups[group.group_id] = trimmed
        return True

    def take(self, num_groups: int, *, step: int) -> list[Group] | None:
        """Remove and return the `num_groups` oldest groups, or None if there are too few.

        Call `evict` first: a group beyond the bound raises.

        Args:
            num_groups: B.
            step: optimizer steps done by the learner, the step about to be made not counted.
        """
        if len(self._groups) < num_groups:
            return None
        oldest = sorted(self._groups.values(), key=lambda g: (g.oldest_version, g.group_id))
        taken = oldest[:num_groups]
        for group in taken:
            fault = find_fault(
                group, step=step, max_staleness=self.max_staleness, lineages=self.lineages
            )
            if fault is not None:
                raise ValueError(
                    f"group {group.group_id} cannot be trained at step {step}: {fault}"
                )
        for group in taken:
            del self._groups[group.group_id]
        self._num_taken = len(taken) + (self._num_taken if self._taken_at == step else 0)
        self._taken_at = step
        return taken

    def put_back(self, groups: Sequence[Group], *, num_taken: int) -> None:
        """Undo the last `take` when no step could be made of it.

        Args:
            groups: those of it that may be taken again.
            num_taken: how many it returned.
        """
        self._num_taken -= num_taken
        for group in groups:
            self.put(group)

    def clear(self) -> list[Group]:
        """Remove and return everything, as at the end of a run."""
        groups = list(self._groups.values())
        self._groups.clear()
        return groups
