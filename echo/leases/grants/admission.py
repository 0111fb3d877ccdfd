"""Admission of groups: how many groups may be promised to the batches to come.

A lease is granted to a worker with installed step w while

    (S + w + 1) * B - (consumed + buffered + running) > 0        in groups

S is the bound of staleness and B the number of groups per step. Consumed are B groups for each step
that was made. Buffered are the accepted groups that no such step has used, those of the step that
is being made included. A running group counts once, even if two workers run it.

So a group is granted only if all groups that are already promised fit into the batches that may
still train on samples of version w. A group that falls beyond these batches would be stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from echo.core.rollout import Lineage, PolicyVersion, is_surviving
from echo.leases.book import LeasedWorker

Bounds = Mapping[PolicyVersion | None, int]
"""Installed version -> the number of promised groups from which on it is granted no more."""


def most_promised(*, max_staleness: int, installed_step: int, groups_per_step: int) -> int:
    """Return how many groups the batches hold that may train on samples of a version.

    A worker that has installed the version may be granted a group while fewer groups are consumed,
    buffered or running.

    Args:
        max_staleness: S, inclusive.
        installed_step: w, step of the weights that the worker samples from.
        groups_per_step: B.
    Source: AReaL's capacity rule with the worker's version in place of the learner's.
    """
    return (max_staleness + installed_step + 1) * groups_per_step


def oldest_step(*, max_staleness: int, groups_per_step: int, num_promised: int) -> int:
    """Return the step of the oldest version that may sample the next group.

    It is the lowest w for which `most_promised` is above `num_promised`, the number of groups
    consumed, buffered or running.
    """
    return max(0, num_promised // groups_per_step - max_staleness)


def oldest_version(
    lineages: Sequence[Lineage], *, max_staleness: int, groups_per_step: int, num_promised: int
) -> PolicyVersion | None:
    """Return the oldest version of that step in any lineage; None if no lineage has one."""
    step = oldest_step(
        max_staleness=max_staleness, groups_per_step=groups_per_step, num_promised=num_promised
    )
    versions = (PolicyVersion(lineage.lineage, step) for lineage in lineages)
    return min((v for v in versions if is_surviving(v, lineages)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The groups that are promised at one instant, and the rule for further ones."""

    lineages: Sequence[Lineage]
    step: int
    """Optimizer steps made."""
    groups_per_step: int
    max_staleness: int
    """The bound that new leases are granted for."""
    num_unspent: int
    """Accepted groups that no step has used."""
    num_running: int
    """Groups that are leased or being stored."""

    @property
    def num_promised(self) -> int:
        """Groups consumed, accepted or running."""
        return self.step * self.groups_per_step + self.num_unspent + self.num_running

    @property
    def is_batch_complete(self) -> bool:
        """Whether enough groups are accepted for the next batch."""
        return self.num_unspent >= self.groups_per_step

    @property
    def is_batch_waiting(self) -> bool:
        """Whether the next batch waits for groups that run."""
        return self.num_running > 0 and not self.is_batch_complete

    def is_closed(self, newest: PolicyVersion | None) -> bool:
        """Return whether a round of grants would change nothing, whatever the workers hold.

        Nearly all calls return True in a fleet that is fast enough: it has been granted all groups
        that admission allows to a worker with the newest version.
        """
        step = self.step if newest is None else newest.step
        return self.num_promised >= self.limit(step) and not self.is_batch_waiting

    def limit(self, installed_step: int) -> int:
        """Return the number of promised groups at which a version is granted no more."""
        return most_promised(
            max_staleness=self.max_staleness,
            installed_step=installed_step,
            groups_per_step=self.groups_per_step,
        )

    def bounds(self, workers: Iterable[LeasedWorker]) -> Bounds:
        """Return the limit of each version that a worker has and that a resume has not undone."""
        versions = {worker.installed for worker in workers if worker.installed is not None}
        return {v: self.limit(v.step) for v in versions if is_surviving(v, self.lineages)}

    def oldest_version(self, num_promised: int) -> PolicyVersion | None:
        """Return the oldest version that may sample the group after `num_promised` others."""
        return oldest_version(
            self.lineages,
            max_staleness=self.max_staleness,
            groups_per_step=self.groups_per_step,
            num_promised=num_promised,
        )
