"""Saves a whole run: its trainer's state, its ledger, and the measured rates of uplinks.

The ledger is synced before a checkpoint becomes visible (`checkpoint.py`). Afterwards the ledger
records the checkpoint. `resume.py` reads all these files.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echo.core.errors import EngineError, StorageError
from echo.core.rollout import PolicyVersion
from echo.records.ledger import LedgerQueue
from echo.roles.learner import Learner
from echo.runtime.learner.saving.checkpoint import Checkpoints
from echo.runtime.learner.saving.disk_limit import DiskLimit
from echo.runtime.learner.saving.resume import save_uplinks
from echo.runtime.learner.versions.weights_check import WeightsCheck
from echo.runtime.threads import Pool
from echo.train.step import NonfiniteWeightsError

if TYPE_CHECKING:
    from echo.train.ranks.rank_group import AnyTrainer


class StateSaver:
    """Saves the state of a run so that --resume can continue from it."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: AnyTrainer,
        ledger: LedgerQueue,
        role: Learner,
        check: WeightsCheck,
        limit: DiskLimit | None,
        *,
        run_dir: Path,
        trainer_pool: Pool,
        disk: Pool,
        log: logging.Logger,
    ) -> None:
        """Save the trainer's state, the ledger and the rates of uplinks that `role` knows.

        `trainer_pool` and `disk` are the threads that write. `check` knows whether weights hold
        NaN. `limit` removes what is old; it is None in a simulation, which has no files.
        """
        self._checkpoints = checkpoints
        self._trainer, self._ledger, self._role, self._check = trainer, ledger, role, check
        self._limit, self._run_dir = limit, run_dir
        self._trainer_pool, self._disk = trainer_pool, disk
        self._log = log

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint; 0 if there is no checkpoint."""
        return self._checkpoints.saved_step or 0

    @property
    def has_to_save(self) -> bool:
        """Whether the present weights are unsaved and not known to hold NaN."""
        return self._checkpoints.saved_step != self._role.step and not self._check.has_failed

    def is_due(self, *, now: float) -> bool:
        """Return whether a checkpoint is due after the present step."""
        return self._checkpoints.is_due(self._role.step, now=now)

    def expect_score(self, step: int) -> None:
        """Keep the checkpoint of a step until the score of the step's evaluation is known."""
        self._checkpoints.expect_score(step)

    async def score(self, step: int, score: float | None) -> None:
        """Note the held-out score of a step; None if its evaluation gave no score.

        If the step's checkpoint is now the best, this is logged.
        """
        try:
            is_best = await self._trainer_pool.run(self._checkpoints.score, step, score)
        except StorageError as error:
            self._log.warning("%s; the best checkpoint before stays", error)
            return
        if is_best:
            self._log.info("the checkpoint of step %d is the best so far: %.3f", step, score)

    async def save(self, *, now: float) -> EngineError | None:
        """Write a checkpoint.

        If the checkpoint cannot be written, this is logged, and the previous one stays the newest.

        Returns:
            The error that ends the run, if weights hold NaN; otherwise None.
        """
        role, checkpoints, ledger = self._role, self._checkpoints, self._ledger
        lineage, step = role.lineages[-1].lineage, role.step

        def write_checkpoint() -> int:
            ledger.sync()
            if self._limit is not None:
                self._limit.make_space(step=step)
            return checkpoints.save(self._trainer.save_state, lineage=lineage, step=step, now=now)

        try:
            oldest_step = await self._trainer_pool.run(write_checkpoint)
        except NonfiniteWeightsError as error:
            version = PolicyVersion(lineage, step)
            return EngineError(self._check.describe(error.names, error.num_tensors, version))
        except StorageError as error:
            role.counters.add("checkpoints_failed")
            self._log.warning("%s; the checkpoint before stays the newest", error)
            return None
        record = partial(ledger.checkpointed, lineage=lineage, step=step, oldest_step=oldest_step)
        await self._disk.run(record)
        save_rates = partial(save_uplinks, self._run_dir, role.plans.uplinks(), log=self._log)
        await self._disk.run(save_rates)
        if self._limit is not None:
            await self._trainer_pool.run(partial(self._limit.enforce, step=step))
        self._log.info("checkpoint of step %d saved", step)
        return None
