"""Save a run: the trainer's state, the ledger, and the measured rates of uplinks.

The ledger is synced before a checkpoint becomes visible (`checkpoint.py`). Then the ledger records
the checkpoint. `resume.py` reads these files.
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
        """Save the trainer's state, the ledger, and the uplink rates measured by `role`.

        Args:
            checkpoints: writes the checkpoints.
            trainer: has the state to save.
            ledger: records each checkpoint.
            role: has the step, the lineage and the uplink rates.
            check: searches weights for NaN.
            limit: limits the size of the run's directory; None in a simulation, which has no files.
            run_dir: the run's directory.
            trainer_pool: the thread of the trainer, which writes checkpoints.
            disk: the thread that writes the ledger.
            log: the log of the node.
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
        """Whether the present weights are unsaved and, as far as known, free of NaN."""
        return self._checkpoints.saved_step != self._role.step and not self._check.has_failed

    def is_due(self, *, now: float) -> bool:
        """Return whether a checkpoint is due after the present step."""
        return self._checkpoints.is_due(self._role.step, now=now)

    def expect_score(self, step: int) -> None:
        """Keep the checkpoint of a step until `score` is called for this step."""
        self._checkpoints.expect_score(step)

    async def score(self, step: int, score: float | None) -> None:
        """Record the held-out score of a step. `score` is None if the evaluation gave no score.

        A new best checkpoint is logged.
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

        If writing fails, a warning is logged and the previous checkpoint stays the newest.

        Returns:
            The error that ends the run if weights are NaN; otherwise None.
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
