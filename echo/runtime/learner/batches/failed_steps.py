"""Failed steps: end the groups at fault. After too many failures in a row, end the run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from echo.core.buffer import StalenessBuffer
from echo.core.records import Discarded
from echo.core.rollout import Group
from echo.records.ledger import LedgerQueue
from echo.roles.learner import Learner
from echo.runtime.learner.versions.publish import PublishedVersions
from echo.runtime.learner.versions.weights_check import WeightsCheck
from echo.runtime.threads import Pool
from echo.train.step import StepError

if TYPE_CHECKING:
    from echo.train.ranks.rank_group import AnyTrainer


MAX_FAILED_STEPS = 5
"""The run ends after this many failed steps in a row. Each failure ends the groups at fault, so a
longer series has another cause."""


class FailedSteps:
    """Finds and ends the groups that made a step fail."""

    def __init__(
        self,
        role: Learner,
        trainer: AnyTrainer,
        buffer: StalenessBuffer,
        ledger: LedgerQueue,
        versions: PublishedVersions,
        check: WeightsCheck,
        *,
        trainer_pool: Pool,
        log: logging.Logger,
    ) -> None:
        self._role, self._trainer = role, trainer
        self._buffer, self._ledger = buffer, ledger
        self._versions, self._check = versions, check
        self._pool = trainer_pool
        self._log = log
        self._num_in_a_row = 0

    def succeeded(self) -> None:
        """Reset the count of failed steps in a row."""
        self._num_in_a_row = 0

    async def end_faulty(self, groups: list[Group], error: StepError) -> None:
        """End the groups that made a step fail.

        The batch's other groups return to the buffer. If no single group makes the step fail, all
        groups of the batch are ended.

        Raises:
            StepError: if MAX_FAILED_STEPS steps in a row failed.
        """
        step, counters = self._role.step, self._role.counters
        self._num_in_a_row += 1
        counters.add(f"steps_failed/{error.reason}")
        faulty = await self._pool.run(self._trainer.find_faulty, groups)
        # If no group fails alone, all of them fail together.
        faulty = faulty or {group.group_id: error.reason for group in groups}
        for group_id, reason in faulty.items():
            self._ledger.append(Discarded(group=group_id, reason=reason, step=step))
            counters.add(f"discarded/{reason}")
        names = ", ".join(
            f"{group.group_id} of {group.worker_id}" for group in groups if group.group_id in faulty
        )
        text = f"step {step + 1} failed: {error}; ended without training: group {names}"
        self._log.warning("%s", text, exc_info=error.__cause__)
        if self._num_in_a_row >= MAX_FAILED_STEPS:
            raise await self._last_error(error) from error
        rest = [group for group in groups if group.group_id not in faulty]
        self._buffer.put_back(rest, num_taken=len(groups))

    async def _last_error(self, error: StepError) -> StepError:
        """Return the error that ends the run. If weights are NaN, the error names these weights."""
        if error.reason == "nonfinite_gradient":
            found = await self._check.find(await self._versions.make_unpublished())
            if found:
                return StepError(found, reason=error.reason)
        return StepError(
            f"{self._num_in_a_row} steps in a row failed, the last because {error}; the "
            "groups have ended, the run is saved, and --resume goes on with others",
            reason=error.reason,
        )
