"""Search the weights for NaN after a worker could not sample from them.

If a worker's model returns NaN probabilities, the worker reports the NaN, ends the group and
continues. The learner then checks the published version for NaN, once per version. The weights of
every checkpoint are also checked before they are saved. If weights are NaN, no worker can sample
from them or from later versions. So the weights are not saved and the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from echo.config.schema import ModelSection
from echo.core.records import Discarded
from echo.core.rollout import PolicyVersion
from echo.records.ledger import AnyRecord
from echo.runtime.learner.report import Progress
from echo.runtime.learner.versions.publish import Publication
from echo.runtime.threads import Pool
from echo.wire.messages import BAD_LOGPROBS


class WeightsCheck:
    """Searches versions of the weights for NaN, and describes the result."""

    def __init__(
        self,
        model: ModelSection,
        run_dir: Path,
        progress: Progress,
        *,
        trainer: Pool,
        log: logging.Logger,
    ) -> None:
        """Start with no suspected version. Weights are read in the thread `trainer`."""
        self.is_due = False
        """Whether the published weights must be examined, because a worker could not sample from
        them.
        """
        self.has_failed = False
        """Whether NaN was found. Checkpoints are then no longer saved."""
        self._model, self._latest = model, run_dir / "checkpoints" / "latest"
        self._progress = progress
        self._trainer = trainer
        self._log = log
        self._examined: PolicyVersion | None = None

    def suspect(self, record: AnyRecord) -> bool:
        """Set `is_due` if a record says that NaN probabilities ended a group.

        Returns:
            Whether this record set `is_due`.
        """
        is_suspect = isinstance(record, Discarded) and record.reason == BAD_LOGPROBS
        self.is_due |= is_suspect
        return is_suspect

    async def examine(self, published: Publication) -> str:
        """Search the published version for NaN. Return the error text; "" if there is no NaN.

        A version is examined only once. Later calls return "".
        """
        self.is_due, version = False, published.manifest.version
        if version == self._examined:
            return ""
        self._examined = version
        found = await self.find(published)
        if not found:
            text = "the weights of %s are finite: the fault is in the worker that cannot sample"
            self._log.warning(text, version)
        return found

    async def find(self, publication: Publication) -> str:
        """Search a version for NaN and infinity. Return the error text; "" if there are none."""
        # Only here: a simulated learner has no torch.
        from echo.engine.weights import find_nonfinite

        names = await self._trainer.run(lambda: find_nonfinite(publication.tensors()))
        if not names:
            return ""
        manifest = publication.manifest
        return self.describe(names, len(manifest.tensors), manifest.version)

    def describe(self, names: Sequence[str], num_tensors: int, version: PolicyVersion) -> str:
        """Set `has_failed`. Return an error text that names the NaN weights and a remedy.

        Args:
            names: the names of the tensors with NaN or infinity, at least one.
            num_tensors: number of tensors in the model.
            version: the version of these weights.
        """
        self.has_failed = True
        model, sampled = self._model, self._progress.newest_sampled
        what = (
            f"{version} of {model.name}, in {model.dtype}, has NaN or infinity in {len(names)} of "
            f"{num_tensors} tensors, such as {names[0]}: nothing can be sampled from it"
        )
        if sampled is not None:
            what += f". {sampled} is the newest version that has sampled a whole group"
        if not version.step:
            return f"{what}; start from other weights (model.name, learner.init_from)"
        return (
            f"{what}. Write the name of a checkpoint before {version} into {self._latest} and "
            "continue with --resume, perhaps at a lower optimizer.learning_rate"
        )
