"""Defines the rollout buffer. It holds accepted groups within the staleness bound, oldest first.

The buffer enforces the staleness bound S (max_staleness): `take` returns only groups whose oldest
trainable token has staleness <= S at the step. `evict` removes all other groups, each with a
reason.
With B groups per step, admission (`leases/grants/admission.py`) bounds the buffer to (S + 1) * B
groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echo.core.rollout import Group, Lineage, find_fault, trim_stale


@dataclass(frozen=True, slots=True)
class Evicted:
    """A group that was removed from the buffer before it was trained on."""

    group: Group
    reason: str
    """The reason for the removal, as from `find_fault`: "stale", "abandoned_version" or another
    fault."""


class StalenessBuffer:
    """Holds the groups that wait for training. Their staleness is within the bound."""

    def __init__(
        self, *, max_staleness: int, lineages: Sequence[Lineage], trims_stale: bool = False
    ) -> None:
        """Make an empty buffer.

        Args:
            max_staleness: the bound S, inclusive.
            lineages: the learner's lineages. A new lineage starts with a new buffer.
            trims_stale: whether `evict` masks the stale tokens of a group, instead of removing the
                group, if each rollout keeps a trainable token.
        """
        self.trims_stale = trims_stale
        self.num_trimmed_tokens = 0
        """Number of stale tokens that this buffer has masked in groups that it kept."""
        self.num_too_old_tokens = 0
        """Number of stale tokens that this buffer has masked, or has removed with their groups."""
        self.max_staleness = max_staleness
        self.admission_staleness = max_staleness
        """The staleness bound for new leases. A lower bound does not affect groups in the
        buffer."""
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
        """Return the number of groups in the buffer and in the present step together.

        The groups of the present step were taken from the buffer at `step`. Admission adds this
        number to the number of groups of completed steps.
        """
        return len(self._groups) + (self._num_taken if self._taken_at == step else 0)

    def put(self, group: Group) -> None:
        """Add a group that is recorded in the ledger and is not yet in the buffer."""
        if group.group_id in self._groups:
            raise ValueError(f"group {group.group_id} is in the buffer already")
        self._groups[group.group_id] = group

    def evict(self, *, step: int) -> list[Evicted]:
        """Remove and return every group that cannot be trained at this step.

        With `trims_stale`, a group with stale tokens at the start of continued rollouts stays, and
        these tokens are masked.
        """
        evicted = []
        for group in list(self._groups.values()):
            reason = find_fault(
                group, step=step, max_staleness=self.max_staleness, lineages=self.lineages
            )
            if reason == "stale" and self._trim(group, step):
                continue
            if reason == "stale":
                self.num_too_old_tokens += group.num_trained
            if reason is not None:
                evicted.append(Evicted(self._groups.pop(group.group_id), reason))
        return evicted

    def _trim(self, group: Group, step: int) -> bool:
        """Mask a group's stale tokens. Return whether the group can still be trained."""
        trimmed = trim_stale(group, step=step, max_staleness=self.max_staleness)
        if not self.trims_stale or trimmed is None:
            return False
        num_trimmed = group.num_trained - trimmed.num_trained
        self.num_trimmed_tokens += num_trimmed
        self.num_too_old_tokens += num_trimmed
        self._groups[group.group_id] = trimmed
        return True

    def take(self, num_groups: int, *, step: int) -> list[Group] | None:
        """Remove and return the `num_groups` oldest groups. If there are too few, return None.

        Call `evict` first.

        Args:
            num_groups: the number of groups per step, B.
            step: the number of completed optimizer steps.

        Raises:
            ValueError: if one of these groups cannot be trained at this step.
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
        """Undo the last `take` after its step failed.

        Args:
            groups: the groups to put back. Groups that must not be trained are left out.
            num_taken: the number of groups that `take` returned.
        """
        self._num_taken -= num_taken
        for group in groups:
            self.put(group)

    def clear(self) -> list[Group]:
        """Remove and return all groups. This happens at the end of a run."""
        groups = list(self._groups.values())
        self._groups.clear()
        return groups
