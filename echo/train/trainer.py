"""Trainer: a policy, its optimizer, and the step that trains on one batch of rollout groups.

Three operations are enough for a program to train:

    forward_backward(batch, loss)   add the gradient of a batch to the accumulated gradient
    forward(groups)                 return log-probabilities, without a gradient
    optim_step(settings)            clip the gradient, update by AdamW, drop the gradient

`step` combines these operations: it computes advantages and rows from groups, computes the gradient
of the loss, and updates the weights. A trainer has these parts:

    models       the policy and the frozen models                         models/models.py
    scores       log-probabilities without a gradient                     passes/scores.py
    gradients    the gradient of a batch                                  passes/gradients.py
    passes       retries in smaller micro-batches if memory runs out      passes/passes.py
    weights      parameters, clipping, updates                            weights.py
    adapters     the adapter in use; moments, settings and counts         adapters.py
    state        the trainer's state on disk                              trainer_state.py

If the loss does not need rollouts with an advantage of 0, these rollouts do not go through the
model. They still count in the normaliser (the counts by which a loss divides), so the gradient is
exact.

A step may make several updates. Then the groups are divided into minibatches, each with its own
counts. The proximal policy is the policy at the start of the step. Before the first update, a pass
scores the rows of all later updates under the proximal policy.

`step_count` grows by one with every consumed batch, so each batch makes one policy version. If no
rollout of a batch has a gradient, the step makes no update: the weights stay as they are, and
neither momentum nor weight decay changes them. If the loss or gradient of a batch is not finite or
cannot be computed, `step` raises `StepError`, restores the state before the step, and makes no
version. Updates are undone from a backup in the host's memory. `find_faulty` returns the groups at
fault.

Log-probabilities are taken at `temperature`. With top-p, top-k or min-p, a worker sends the support
of each token (the ids that it was drawn from), and the trainer scores the token on its support. If
a support is too large to send, the trainer scores the token on the whole vocabulary. The token's
ratio is then below 1 even without staleness. If the loss does not accept such ratios, the group is
refused (config/losses.py).

Several processes may train one model (ranks/sharding.py). Each process has a trainer. All processes
make the same calls with the same arguments, and get the same results or errors. If one process
fails, the job ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.algo.batching import TrainingRow
from echo.algo.diagnostics import Mismatch, rollout_ess
from echo.algo.loss import Loss, needs_of
from echo.core.rollout import Group
from echo.engine.lora import NAME
from echo.train.adapters import Adapters
from echo.train.batch import AdvantageSettings, StepBatch, find_refusal, prepare_batch
from echo.train.models.models import Models
from echo.train.models.policy import Compute, ModelSource
from echo.train.models.rescoring import Rescoring
from echo.train.optimizer import OptimizerSettings
from echo.train.passes.findings import LOSS, Sums, pass_metrics
from echo.train.passes.gradients import BatchFindings, Gradients
from echo.train.passes.passes import Passes, as_step_errors
from echo.train.passes.scores import RowScores, TokenScores
from echo.train.speed import Speedometer
from echo.train.step import StepError, StepResult
from echo.train.trainer_state import TrainerState
from echo.train.weights import TrainedWeights

GroupScores = list[list[npt.NDArray[np.float32]]]
"""For each group and rollout: scores [T, ...] of the T completion tokens."""


class Trainer:
    """A policy, its optimizer, and the operations that train the policy."""

    def __init__(
        self,
        source: ModelSource,
        compute: Compute,
        *,
        loss: Loss,
        optimizer: OptimizerSettings,
        temperature: float = 1.0,
        advantages: AdvantageSettings | None = None,
        scales_by_ess: bool = False,
        reference: ModelSource | None = None,
        rescoring: Rescoring | None = None,
    ) -> None:
        """Load the model and start its optimizer.

        Args:
            source: the model to train. If `source` has an adapter, only the adapter is trained,
                under the name "default".
            compute: settings of the models' computations. Trained weights, gradients and
                log-probabilities are always float32.
            loss: the policy loss of a step, for example from `make_loss`.
            optimizer: the settings of the updates in a step.
            temperature: sampling temperature, > 0.
            advantages: settings of the advantages; None for the defaults.
            scales_by_ess: whether `step` multiplies the learning rate of each of its updates by the
                square root of the effective sample size (`rollout_ess`). `optim_step` takes the
                rate of the settings that it is given.
            reference: the frozen reference policy, if the loss needs a reference. Checkpoints do
                not contain it.
            rescoring: settings of `rescore`; None if `rescore` is not used.

        Raises:
            DataError: if a model cannot be loaded.
            EngineError: if the model cannot be trained here.
        """
        if not 0.0 < temperature < math.inf:
            raise ValueError(f"temperature = {temperature}: must be positive and finite")
        needs_reference = needs_of(loss).reference_logprobs
        if needs_reference and reference is None:
            raise ValueError("the loss pulls towards a reference policy, and none is given")
        torch.manual_seed(compute.seed)
        reference = reference if needs_reference else None
        self.models = Models(source, compute, reference=reference, rescoring=rescoring)
        self.policy = self.models.policy
        self.weights = TrainedWeights(self.policy)
        name = None if source.lora is None else NAME
        self.adapters = Adapters(self.policy, self.weights, name=name, settings=optimizer)
        self.loss = loss
        """The policy loss that a step minimises."""
        inv_temperature = 1.0 / temperature
        self._advantages = advantages or AdvantageSettings()
        self._scales_by_ess = scales_by_ess
        self._speed = Speedometer(self.policy.flops, compute)
        self._scores = TokenScores(self.models, inv_temperature=inv_temperature)
        self._gradients = Gradients(
            self.models, self._scores, self._speed, inv_temperature=inv_temperature
        )
        self._passes = Passes(self.models, self._speed)
        self._state = TrainerState(self.policy, self.weights, self.adapters)

    @property
    def compute(self) -> Compute:
        """Settings of the policy's computations, with the present limit of a micro-batch."""
        return self.models.compute

    @property
    def step_count(self) -> int:
        """Number of consumed batches; also the step of the present version."""
        return self.adapters.progress.step_count

    def describe_rows(self) -> str:
        """Return a sentence that says whether rows are packed or padded, and why."""
        return self.policy.describe_rows()

    # --- the three operations --------------------------------------------------------------------

    def prepare(self, groups: Sequence[Group]) -> StepBatch:
        """Return the batch that a step would train on, for `forward_backward`.

        Args:
            groups: at least one, each with two or more rollouts.

        Raises:
            StepError: if a group cannot be trained on. The message names the group.
        """
        with as_step_errors():
            return prepare_batch(
                groups,
                settings=self._advantages,
                needs=needs_of(self.loss),
                vocab_size=self.policy.vocab_size,
            )

    def forward_backward(self, batch: StepBatch, loss: Loss) -> Sums:
        """Add the gradient of a batch to the accumulated gradient.

        Args:
            batch: the rows to train on, with the counts that the loss divides by.
            loss: any loss. The loss gets its declared `needs`, except rollouts that `batch` has
                left out.

        Returns:
            Sums over the tokens of the pass by metric (train/passes/findings.py), and the loss as
            "loss/policy".

        Raises:
            StepError: if the gradient cannot be computed. The accumulated gradient is dropped too.
        """
        return self._add_gradient(batch, loss).sums

    @torch.no_grad()
    def forward(self, groups: Sequence[Group]) -> GroupScores:
        """Return the log-probability of every completion token, including masked tokens.

        Returns:
            For each group and rollout, [T] nats at the sampling temperature.

        Raises:
            StepError: if one rollout is too large for the memory.
        """
        rows = _rows_of(groups)
        scores = self._passes.make(
            rows, partial(self._scores.of_rows, rows), step=self.step_count + 1
        )
        return _by_group(groups, scores)

    def optim_step(self, settings: OptimizerSettings) -> float:
        """Clip the accumulated gradient, update the weights by AdamW, then drop the gradient.

        Args:
            settings: settings of this update. The learning rate is the rate at the present step.

        Returns:
            The norm of the gradient before it was clipped.

        Raises:
            StepError: if the norm is not finite. The gradient is dropped. Weights and moments are
                unchanged.
            ConfigError: if only adapters that are not in use have a gradient. Nothing has changed.
            EngineError: if the memory is too small for AdamW. Weights may have changed, so continue
                from the last checkpoint.
        """
        self.adapters.check_gradient()
        return self.weights.update(
            self.adapters.progress.optimizer, settings, step=self.step_count + 1
        )

    def _add_gradient(self, batch: StepBatch, loss: Loss) -> BatchFindings:
        """Add the gradient of a loss on a batch; return the findings of the pass."""

        def add() -> BatchFindings:
            try:
                return self._gradients.add(batch, loss, step_count=self.step_count)
            except BaseException:
                self.weights.drop_gradients()
                raise

        return self._passes.make(
            batch.samples,
            add,
            step=self.step_count + 1,
            can_begin_again=not self.weights.has_gradient,
        )

    # --- a step ----------------------------------------------------------------------------------

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Train on one batch of groups.

        Args:
            groups: at least one, each with two or more rollouts.

        Raises:
            StepError: if the batch cannot be trained on. Nothing was changed.
        """
        self._speed.begin()
        progress = self.adapters.progress
        try:
            metrics, by_group = self._train(groups)
        except StepError as error:
            progress.num_skipped_nonfinite += error.reason == "nonfinite_gradient"
            raise
        metrics.setdefault("lr", progress.settings.learning_rate_at(progress.step_count + 1))
        metrics["optimizer/skipped_nonfinite"] = progress.num_skipped_nonfinite
        progress.step_count += 1
        return StepResult(
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            speed=self._speed.metrics(),
            notices=self._passes.take_notices(),
            by_group=by_group,
        )

    def find_faulty(self, groups: Sequence[Group]) -> dict[int, str]:
        """Return the groups at fault in a refused batch: group id -> reason.

        A group is at fault if a step would refuse a batch of this group alone.
        """
        found: dict[int, str] = {}
        for group in groups:
            try:
                batch = self.prepare([group])
                if batch.samples:
                    self._take_gradient(batch)
                    self.weights.grad_norm()
            except StepError as error:
                found[group.group_id] = error.reason
            finally:
                self.weights.drop_gradients()
        return found

    def refusal(self, group: Group) -> str | None:
        """Return why a group should not count towards a step; None if it should (train/batch.py).

        Any thread may call this method at any time.
        """
        return find_refusal(
            group,
            settings=self._advantages,
            needs=needs_of(self.loss),
            vocab_size=self.policy.vocab_size,
        )

    def _train(self, groups: Sequence[Group]) -> tuple[dict[str, float], dict[int, Mismatch]]:
        """Make the updates of one batch; return metrics, and the mismatch by group id.

        The metrics include `grad_norm` if there was an update.

        Raises:
            StepError: if an update cannot be made. Weights and moments are unchanged.
        """
        progress = self.adapters.progress
        whole = self.prepare(groups)
        batches = self._with_proximal_logprobs(self._minibatches(groups, whole))
        if not batches:
            return whole.metrics | {LOSS: 0.0}, {}
        backup = self.weights.back_up(progress.optimizer) if len(batches) > 1 else None
        passes: list[BatchFindings] = []
        norms: list[float] = []
        rates: list[float] = []
        try:
            for batch in batches:
                with self._speed.part("forward_backward"):
                    passes.append(self._take_gradient(batch))
                with self._speed.part("optimizer"):
                    settings = self._scaled(progress.settings, passes[-1].sums)
                    norms.append(self.optim_step(settings))
                rates.append(settings.learning_rate_at(self.step_count + 1))
        except BaseException:
            if backup is not None:
                self.weights.restore(backup, progress.optimizer)
            raise
        metrics = whole.metrics | pass_metrics([found.sums for found in passes])
        by_group = {group_id: each for found in passes for group_id, each in found.by_group.items()}
        means = {"grad_norm": sum(norms) / len(norms), "lr": sum(rates) / len(rates)}
        return metrics | means, by_group

    def _scaled(self, settings: OptimizerSettings, sums: Sums) -> OptimizerSettings:
        """Return the settings with a learning rate that is scaled by the effective sample size.

        The rate is multiplied by sqrt(ess), where ess = `rollout_ess(sums)` is at most 1.
        On-policy, ess is 1.

        Source: VCPO, arXiv:2602.17616, with the square root for optimizers like AdamW. The
        importance weights are unclipped, as in the code of VCPO's authors. Differs from the paper:
        no off-policy baseline, and rollouts without a gradient do not count.
        """
        if not self._scales_by_ess:
            return settings
        rate = settings.learning_rate * math.sqrt(min(1.0, rollout_ess(sums)))
        return replace(settings, learning_rate=rate)

    def _minibatches(self, groups: Sequence[Group], whole: StepBatch) -> list[StepBatch]:
        """Return the batch of each update; batches without a gradient are left out.

        With n minibatches, every n-th group goes into the same minibatch. The learner orders the
        groups of a batch by age, so each minibatch has both old and new groups.
        """
        count = min(self.adapters.progress.settings.minibatches_per_step, len(groups))
        batches = [whole]
        if count > 1:
            batches = [self.prepare(groups[first::count]) for first in range(count)]
        return [batch for batch in batches if batch.samples]

    def _with_proximal_logprobs(self, batches: Sequence[StepBatch]) -> list[StepBatch]:
        """Return the batches. All batches after the first get proximal log-probabilities.

        The proximal policy is the present policy, since no update has been made yet.
        """
        if not needs_of(self.loss).proximal_logprobs:
            return list(batches)
        later = []
        for batch in batches[1:]:
            rows = batch.samples
            scores = self._passes.make(
                rows, partial(self._scores.of_rows, rows), step=self.step_count + 1
            )
            scored = [
                replace(row, proximal_logprobs=score)
                for row, score in zip(rows, scores, strict=True)
            ]
            later.append(replace(batch, samples=scored))
        return [*batches[:1], *later]

    def _take_gradient(self, batch: StepBatch) -> BatchFindings:
        """Add a batch's gradient under the step's own loss to the accumulated gradient.

        Raises:
            StepError: if the gradient cannot be computed, or the loss is not finite.
        """
        found = self._add_gradient(batch, self.loss)
        if not math.isfinite(found.sums[LOSS]):
            self.weights.drop_gradients()
            raise StepError(f"the loss is {found.sums[LOSS]:g}", reason="nonfinite_gradient")
        return found

    # --- scores of published versions -------------------------------------------------------------

    @torch.no_grad()
    def rescore(self, groups: Sequence[Group], version: Path | None) -> GroupScores:
        """Return the scores of every completion token under published weights.

        Args:
            groups: any groups, with tokens of any version.
            version: the safetensors file of the weights; None for the trainer's present weights,
                rounded as if published.

        Returns:
            For each group and rollout, [T, 2] nats: log-probabilities at the sampling temperature,
            and the log of the probability that min_p, top_k and top_p leave.

        Raises:
            StorageError: if the file cannot be read.
            StepError: if one rollout is too large for the memory.
        """
        rescorer = self.models.rescorer
        assert rescorer is not None, "it is a model of its own, which the trainer was not given"
        if version is None:
            rescorer.take(self.policy.tensors())
        else:
            rescorer.load(version)
        rows = _rows_of(groups)
        scores = self._passes.make(
            rows, partial(self._scores.of_version, rows), step=self.step_count + 1
        )
        return _by_group(groups, scores)

    # --- weights and state -----------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by name, without copying them. Tied tensors are returned once.

        The next step changes these tensors. If there are several ranks, each tensor is this rank's
        part (ranks/sharding.py).
        """
        return self.policy.tensors()

    @property
    def unrounded(self) -> frozenset[str]:
        """Names of the tensors that are published without rounding, in their own dtype."""
        return self.policy.unrounded

    def snapshot(self) -> dict[str, Tensor]:
        """Return CPU copies of the weights by name. Tied tensors are returned once.

        If there are several ranks, each copy is this rank's part of a tensor.
        """
        return {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors().items()
        }

    def save_state(self, directory: Path) -> None:
        """Write the trainer's whole state into an existing directory.

        Raises:
            NonfiniteWeightsError: if weights contain NaN or infinity.
            StorageError: if a file cannot be written.
        """
        self._state.save(directory)

    def load_state(self, directory: Path) -> None:
        """Continue from a state that `save_state` wrote, perhaps on a different number of ranks.

        Raises:
            StorageError: if the files are missing or damaged.
            DataError: if the state belongs to another model, or its adapters differ from the
                trainer's adapters.
        """
        self._state.load(directory)


def _rows_of(groups: Sequence[Group]) -> list[TrainingRow]:
    return [
        TrainingRow(prompt_ids=group.prompt_ids, rollout=rollout, advantage=0.0)
        for group in groups
        for rollout in group.rollouts
    ]


def _by_group(groups: Sequence[Group], scores: RowScores) -> GroupScores:
    rows = iter(scores)
    return [[next(rows) for _ in group.rollouts] for group in groups]
