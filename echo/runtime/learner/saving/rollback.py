"""Rollback: resume a diverged run from an earlier checkpoint, or record that the run has ended.

A rollback makes `latest` name the earlier checkpoint, writes a record to the ledger and ends the
node with a RolledBackError. The process then starts again with --resume (`cli/commands/node.py`).
As after any resume, a new lineage (branch of the run's history) begins, and the later steps and
checkpoints are void.

A divergence that ends the run is written to the ledger, too. If a launcher starts the learner
again, the learner reads this record and ends with the same error at once (`find_divergence` in
`resume.py`). Without the record, the learner would wait for hours for workers that have left.
"""

from __future__ import annotations

import logging

from echo.config.schema import AlertsSection
from echo.core.errors import DivergedError, EchoError, RolledBackError
from echo.records.ledger import Diverged, LedgerQueue, RolledBack
from echo.runtime.learner.saving.checkpoint import Checkpoints
from echo.runtime.learner.versions.weights_check import WeightsCheck
from echo.train.step import StepError


class Rollback:
    """Finds the checkpoint for a rollback, and prepares the files for a resume."""

    def __init__(
        self,
        section: AlertsSection,
        checkpoints: Checkpoints,
        ledger: LedgerQueue,
        check: WeightsCheck,
        *,
        log: logging.Logger,
    ) -> None:
        self._section, self._checkpoints, self._ledger = section, checkpoints, ledger
        self._check, self._log = check, log

    def is_divergence(self, error: EchoError) -> bool:
        """Return whether `error` means that the policy or the weights have diverged."""
        if isinstance(error, DivergedError) or self._check.has_failed:
            return True
        return isinstance(error, StepError) and error.reason == "nonfinite_gradient"

    def find(self, error: EchoError, *, step: int) -> RolledBack | None:
        """Return the record of a rollback at `step` if `error` requires a rollback, else None.

        If the run has diverged and ends, the divergence is recorded. If the run cannot be rolled
        back, the reason is logged. The method reads the disk, so call it in a thread.
        """
        if not self.is_divergence(error):
            return None
        record = self._choose(error, step) if self._section.on_divergence == "rollback" else None
        # After a failed step the workers wait for a learner that is started again.
        if record is None and not isinstance(error, StepError):
            self._ledger.append(Diverged(step=step, cause=str(error)))
        return record

    def _choose(self, error: EchoError, step: int) -> RolledBack | None:
        """Return the record of a rollback; if none is possible, log why and return None."""
        number = 1 + sum(isinstance(each, RolledBack) for each in self._ledger.records())
        if number > self._section.max_rollbacks:
            self._log.error(
                "no rollback: alerts.max_rollbacks = %d, and as many were made in this run",
                self._section.max_rollbacks,
            )
            return None
        good_step = error.good_step if isinstance(error, DivergedError) else step
        to_step = self._checkpoints.newest_up_to(good_step)
        if to_step is None:
            self._log.error(
                "no rollback: no checkpoint up to step %d is kept; raise checkpoint.keep_last (or "
                "limits.run_dir_bytes), or lower checkpoint.interval_steps",
                good_step,
            )
            return None
        return RolledBack(step=step, to_step=to_step, number=number, cause=str(error))

    def apply(self, record: RolledBack) -> RolledBackError:
        """Make the next resume continue from the checkpoint that `record` names.

        Returns:
            The error with which the node must end.

        Raises:
            StorageError: if the disk cannot be written.
        """
        self._checkpoints.go_back(record.to_step)
        self._ledger.append(record)
        self._ledger.close()
        return RolledBackError(
            f"rollback {record.number} of {self._section.max_rollbacks}, from step {record.step} "
            f"to the checkpoint of step {record.to_step}, since {record.cause}"
        )
