"""Accepted groups that wait to be trained: oldest first, never older than the bound.

The buffer is where promise 1 is kept: `take` hands out only groups whose oldest trainable token has
staleness <= max_staleness at that moment, and `evict` removes the others with their reason. It is
bounded by admission (`protocol/leases.py`), at (S + 1) * B groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo.rollout import Group, Lineage, is_surviving


@dataclass(frozen=True, slots=True)
class Evicted:
    """A group that left the buffer untrained."""

    group: Group
    reason: str
    """"stale", "abandoned_version" or "no_trainable_token"."""


def staleness_of(group: Group, *, step: int) -> int:
    """Return how many steps the learner is ahead of the group's oldest trainable token.

    Args:
        group: a group with at least one trainable token.
        step: optimizer steps done by the learner.
    """
    oldest = group.oldest_version
    if oldest is None:
        raise ValueError(f"group {group.group_id} has no trainable token")
    return step - oldest.step


def find_fault(
    group: Group, *, step: int, max_staleness: int, lineages: Sequence[Lineage]
) -> str | None:
    """Return why `group` must not be trained at `step`, or None if it may.

    Args:
        group: the group in question.
        step: optimizer steps done by the learner.
        max_staleness: inclusive bound.
        lineages: the learner's histories so far, oldest first.
    """
    versions = group.versions
    if not versions:
        return "no_trainable_token"
    if not all(is_surviving(version, lineages) for version in versions):
        return "abandoned_version"
    if max(version.step for version in versions) > step:
        return "version_from_the_future"
    if staleness_of(group, step=step) > max_staleness:
        return "stale"
    return None


class StalenessBuffer:
    """Groups in order of age, with the staleness bound enforced at the exit."""

    def __init__(self, *, max_staleness: int, lineages: Sequence[Lineage]) -> None:
        """Start empty.

        Args:
            max_staleness: S, inclusive.
            lineages: the learner's histories; a new one means a new buffer.
        """
        self.max_staleness = max_staleness
        self.lineages = tuple(lineages)
        self._groups: dict[int, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def put(self, group: Group) -> None:
        """Add a group that the journal holds."""
        if group.group_id in self._groups:
            raise ValueError(f"group {group.group_id} is in the buffer already")
        self._groups[group.group_id] = group

    def evict(self, *, step: int) -> list[Evicted]:
        """Remove and return every group that can no longer be trained.

        Args:
            step: optimizer steps done by the learner.
        """
        evicted = []
        for group in list(self._groups.values()):
            reason = find_fault(
                group, step=step, max_staleness=self.max_staleness, lineages=self.lineages
            )
            if reason is not None:
                evicted.append(Evicted(self._groups.pop(group.group_id), reason))
        return evicted

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
        return taken
