"""Admission decides how many groups may be promised to future batches.

A lease is granted to a worker with installed step w while

    (S + w + 1) * B - (consumed + buffered + running) > 0        in groups

S is the bound on staleness and B the number of groups per step. `consumed` is B times the number of
finished steps. `buffered` counts the accepted groups that no finished step has used, including the
groups of the step under way. `running` counts a group once, even if two workers run it.

The consumed, buffered and running groups are the promised groups. The first term, (S + w + 1) * B,
counts the groups of all batches that may train on samples of version w. So a group is granted only
while these batches have a place for the group. If they are full, only a later batch has a place,
and for that batch the group would be too stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from echo.core.rollout import Lineage, PolicyVersion, is_surviving
from echo.leases.book import LeasedWorker

Bounds = Mapping[PolicyVersion | None, int]
"""For each installed version, how many groups may be promised before its workers get no more
(`Quota.limit`)."""


def most_promised(*, max_staleness: int, installed_step: int, groups_per_step: int) -> int:
    """Return the number of groups in all batches that may train on what a version samples.

    A worker with this version may be granted a group while fewer groups than this number are
    consumed, buffered or running.

    Args:
        max_staleness: S, the bound on staleness in steps, inclusive.
        installed_step: w, step of the weights that the worker samples from.
        groups_per_step: B, the number of groups that a step trains on.

    Source: AReaL's capacity rule with the worker's version in place of the learner's.
    """
    return (max_staleness + installed_step + 1) * groups_per_step


def oldest_step(*, max_staleness: int, groups_per_step: int, num_promised: int) -> int:
    """Return the step of the oldest version with which the next group may be sampled.

    This is the lowest step for which `most_promised` exceeds `num_promised`, the number of groups
    consumed, buffered or running.
    """
    return max(0, num_promised // groups_per_step - max_staleness)


def oldest_version(
    lineages: Sequence[Lineage], *, max_staleness: int, groups_per_step: int, num_promised: int
) -> PolicyVersion | None:
    """Return the oldest version with which the next group may be sampled; None if there is none.

    The version's step is `oldest_step`. Versions that a resume has abandoned are left out.
    """
    step = oldest_step(
        max_staleness=max_staleness, groups_per_step=groups_per_step, num_promised=num_promised
    )
    versions = (PolicyVersion(lineage.lineage, step) for lineage in lineages)
    return min((v for v in versions if is_surviving(v, lineages)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """How many groups are promised at one instant, and how many more may be granted."""

    lineages: Sequence[Lineage]
    step: int
    """Number of optimizer steps that the learner has made."""
    groups_per_step: int
    max_staleness: int
    """How stale groups that are granted now may become, in steps."""
    num_unspent: int
    """Number of accepted groups that were not yet used by a finished step."""
    num_running: int
    """Number of groups that are leased, or whose result is being stored."""

    @property
    def num_promised(self) -> int:
        """Number of promised groups. They are the consumed, the accepted and the running groups."""
        return self.step * self.groups_per_step + self.num_unspent + self.num_running

    @property
    def is_batch_complete(self) -> bool:
        """Whether the next batch has enough accepted groups."""
        return self.num_unspent >= self.groups_per_step

    @property
    def is_batch_waiting(self) -> bool:
        """Whether the next batch still needs groups, and some are running."""
        return self.num_running > 0 and not self.is_batch_complete

    def is_closed(self, newest: PolicyVersion | None) -> bool:
        """Return whether a round of grants would change nothing.

        True if all groups that admission allows for the `newest` version are granted, and no batch
        waits for running groups. In a fast fleet, nearly all calls return true.
        """
        step = self.step if newest is None else newest.step
        return self.num_promised >= self.limit(step) and not self.is_batch_waiting

    def limit(self, installed_step: int) -> int:
        """Return how many groups may be promised before workers of a version get no more groups.

        The version's step is `installed_step`. Once this number of groups is promised, these
        workers are granted no further group.
        """
        return most_promised(
            max_staleness=self.max_staleness,
            installed_step=installed_step,
            groups_per_step=self.groups_per_step,
        )

    def bounds(self, workers: Iterable[LeasedWorker]) -> Bounds:
        """Return the limit that applies to each version that a worker has installed.

        Versions that a resume has abandoned are left out.
        """
        versions = {worker.installed for worker in workers if worker.installed is not None}
        return {v: self.limit(v.step) for v in versions if is_surviving(v, self.lineages)}

    def oldest_version(self, num_promised: int) -> PolicyVersion | None:
        """Return the oldest version that may sample the group after `num_promised` groups."""
        return oldest_version(
            self.lineages,
            max_staleness=self.max_staleness,
            groups_per_step=self.groups_per_step,
            num_promised=num_promised,
        )
