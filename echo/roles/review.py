"""Reviews workers.

Sets a worker aside if its groups are useless or its log-probabilities are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo.core.monitoring.metrics import Counters
from echo.leases.mismatch import Mismatches, Sampled
from echo.leases.usefulness import Usefulness
from echo.roles.members import Roster
from echo.wire.actions import Action, Note


@dataclass(frozen=True, slots=True)
class ReviewDue:
    """Event: the workers are reviewed now, because the learner waits for a batch."""


@dataclass(frozen=True, slots=True)
class SamplesTrained:
    """Event: a step was trained.

    `samples` has log-probabilities from the workers and from the learner.
    """

    samples: Sequence[Sampled]


class WorkerReview:
    """Decides which workers are set aside, and when they are admitted again."""

    def __init__(
        self,
        roster: Roster,
        usefulness: Usefulness,
        *,
        counters: Counters,
    ) -> None:
        """Start with no worker set aside.

        Args:
            roster: the known nodes, including the workers.
            usefulness: counts each worker's useful groups.
            counters: counts the workers that are set aside for their log-probabilities.
        """
        self._roster, self._counters = roster, counters
        self._usefulness, self._mismatches = usefulness, Mismatches()
        self._has_set_aside = False

    @property
    def num_discounted(self) -> int:
        """Number of groups since the last useful group that are not counted.

        These groups are from workers that are set aside. When the counted groups since the last
        useful group reach a limit, the run ends.
        """
        return self._usefulness.num_discounted

    def update(self, *, now: float) -> list[Action]:
        """Set workers aside, or admit them again. Return warnings about both.

        The learner calls this regularly.
        """
        usefulness = self._usefulness
        if usefulness.is_idle and not self._has_set_aside:
            return []
        members = self._roster.members("worker")
        can_sample = {
            member.node_id: member.worker.capacity > 0 and not member.worker.is_stuck
            for member in members
            if not member.is_standby
        }
        texts = usefulness.review(can_sample, now=now)
        for member in members:
            member.worker.is_set_aside = usefulness.is_set_aside(member.node_id)
        self._has_set_aside = any(member.worker.is_set_aside for member in members)
        return [Note("warning", text) for text in texts]

    def compare(self, samples: Sequence[Sampled], *, now: float) -> list[Action]:
        """Set aside the workers whose log-probabilities differ too much from the learner's.

        Args:
            samples: one sample for each group of a step.
            now: the present time, seconds.
        """
        for each in samples:
            member = self._roster.nodes.get(each.worker_id)
            engine = "" if member is None else member.stats.engine
            self._mismatches.trained(each, engine=engine)
        texts = [
            self._usefulness.exclude(worker_id, why, now=now)
            for worker_id, why in self._mismatches.find_outliers().items()
            if not self._usefulness.is_set_aside(worker_id)
        ]
        if texts:
            self._counters.add("mismatched_workers", len(texts))
        return [*(Note("warning", text) for text in texts), *self.update(now=now)]
