"""The gradient of a batch under a loss, micro-batch by micro-batch.

Each micro-batch goes forward through the policy, the reference and the loss, and then backward. The
parameters accumulate the gradients. Every loss is divided by counts of the whole batch, so the
division into micro-batches does not change the gradient.

A loss may declare needs (algo/loss.py). This module provides the needed inputs, such as entropies
or a reference.

Shapes: B rollouts of a micro-batch, T completion tokens (padded), N trained tokens of the
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from echo.algo.batching import MicroBatch
from echo.algo.diagnostics import (
    Mismatch,
    mismatch_by_group,
    mismatch_sums,
    rollout_ratio_sums,
)
from echo.algo.loss import BatchScores, LikelyIds, Loss, LossInputs, needs_of
from echo.algo.losses import ClippedTokenLoss
from echo.core.errors import ConfigError
from echo.kernels.logprob import EntropyMode, TokenLosses
from echo.train.batch import StepBatch
from echo.train.models.models import Models
from echo.train.passes.findings import ENTROPY, LOSS, NUM_TOKENS, Sums, gather_findings
from echo.train.passes.passes import as_step_errors, make_rounds
from echo.train.passes.scores import TokenScores
from echo.train.ranks.sharding import Ranks
from echo.train.speed import Speedometer
from echo.train.step import StepError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchFindings:
    """Sums over the tokens of a batch. All ranks have the same sums."""

    sums: Sums
    """Metric -> sum over trained tokens (findings.py). The metric of the loss is "loss/policy"."""
    by_group: Mapping[int, Mismatch]
    """Group id -> mismatch between the worker's and the learner's log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scored:
    """The policy's scores of a micro-batch with N trained tokens and M likely ids."""

    logprobs: Tensor
    """[B, T] log-probability of each token, nats; with gradient if `tokens` is None."""
    entropies: Tensor
    """[N] entropy of the policy's distribution at each trained token, nats."""
    likely: Tensor | None = None
    """[M] log-probabilities of the likely ids, nats, with gradient; None if the loss needs no
    likely ids.
    """
    tokens: TokenLosses | None = None
    """Clipped token losses with gradient; None if the loss was not fused with the scoring."""

    @property
    def no_loss(self) -> Tensor:
        """Return a loss of 0 with a gradient of 0.

        A rank uses this loss in a pass that only other ranks need.
        """
        return 0.0 * (self.logprobs if self.tokens is None else self.tokens.losses).sum()


@dataclass(slots=True, eq=False)
class _RankFindings:
    sums: list[dict[str, Tensor]] = field(default_factory=list)
    """For each micro-batch: metric -> sum, a scalar on the device."""
    by_group: list[Tensor] = field(default_factory=list)
    """For each micro-batch, [G, 6] sums for the G groups of the batch."""
    passed: list[tuple[list[tuple[int, int]], int, bool]] = field(default_factory=list)
    """For each micro-batch, the arguments of `Speedometer.passed`."""
    has_failed: bool = False
    """Whether the loss has raised an error on this rank."""

    def gather(self, group_ids: Sequence[int], ranks: Ranks) -> BatchFindings:
        """Return the findings of all ranks together.

        All ranks call this method. Each host waits for its device once.
        """
        sums, table = gather_findings(self.sums, self.by_group, ranks)
        by_group = {
            group_id: Mismatch(*row) for group_id, row in zip(group_ids, table, strict=False)
        }
        return BatchFindings(sums=sums, by_group=by_group)


class Gradients:
    """Computes gradients of batches, accumulated on the policy's parameters."""

    def __init__(
        self, models: Models, scores: TokenScores, speed: Speedometer, *, inv_temperature: float
    ) -> None:
        """Store the parts that compute, score and count micro-batches.

        Args:
            models: the policy, whose parameters get the gradient, and the reference.
            scores: scores a micro-batch by the reference, and a batch by the policy.
            speed: counts the micro-batches that go through the policy.
            inv_temperature: 1 / sampling temperature.
        """
        self._models = models
        self._scores = scores
        self._speed = speed
        self._inv_temperature = inv_temperature

    def add(self, batch: StepBatch, loss: Loss, *, step_count: int) -> BatchFindings:
        """Add the gradient of a batch to the parameters' present gradient.

        Args:
            batch: the rows, and the counts that the loss divides by.
            loss: the loss to differentiate.
            step_count: number of the step that produced the present weights.

        Raises:
            MemoryShortageError: if this process trains alone, and its memory was too small. After
                any error, the gradient on the parameters is incomplete.
            StepError: on all ranks, if the loss raised an error on any rank.
        """
        if not batch.samples:
            return BatchFindings(sums={LOSS: 0.0}, by_group={})
        needs = needs_of(loss)
        scores = self._scores.of_batch(batch.samples, needs) if needs.batch_scores else None
        inputs = _BatchInputs(batch=batch, loss=loss, step_count=step_count, scores=scores)
        found = _RankFindings()
        micro_batches = self._models.policy.micro_batches(
            batch.samples, whole_groups=needs.whole_groups
        )
        make_rounds(
            self._speed.packing(micro_batches),
            partial(self._make_round, inputs, found),
            self._models.compute,
        )
        for spans, num_scored, is_packed in found.passed:
            self._speed.passed(spans, num_scored, is_packed=is_packed)
        return found.gather(batch.group_ids, self._models.compute.ranks)

    def _make_round(
        self, inputs: _BatchInputs, found: _RankFindings, indices: Sequence[int], micro: MicroBatch
    ) -> StepError | None:
        """Put a micro-batch through the policy, forward and backward; return this rank's error.

        If the loss has already failed on this rank, the micro-batch still goes through the model,
        with a loss of 0, because the other ranks wait for this pass.
        """
        failure: StepError | None = None
        objective: Tensor | None = None
        scored = self._score(micro, inputs.loss)
        reference = self._scores.of_reference(micro)
        if indices and not found.has_failed:
            try:
                with as_step_errors():
                    objective, sums = inputs.apply(scored, micro, reference)
                found.sums.append(sums)
                found.by_group.append(
                    _by_group(scored, micro, num_groups=len(inputs.batch.group_ids))
                )
            except StepError as error:
                if self._models.compute.ranks.is_alone:
                    raise
                found.has_failed, failure = True, error
        objective = scored.no_loss if objective is None else objective
        objective.backward()
        rows = [inputs.batch.samples[index] for index in indices]
        num_trained = sum(row.num_trained for row in rows)
        found.passed.append((micro.spans(rows), num_trained, micro.segments is not None))
        return failure

    def _score(self, micro: MicroBatch, loss: Loss) -> _Scored:
        """Return the policy's scores of a micro-batch, computed together with the loss if possible.

        The fused kernel uses the whole vocabulary. So the loss is not fused if a token was drawn
        from a part of the vocabulary.
        """
        policy = self._models.policy
        fused_clip = loss.fused_clip if isinstance(loss, ClippedTokenLoss) else None
        is_whole = micro.supports is None and micro.lacking is None
        if fused_clip is None or not is_whole:
            needs = needs_of(loss)
            entropy: EntropyMode = "grad" if needs.entropies else "value"
            if needs.likely_ids and micro.likely is not None:
                if not is_whole:
                    raise ConfigError(
                        "the loss compares whole distributions by their likely ids, and tokens "
                        "were drawn from a part of the vocabulary: set sampling.top_p = 1, "
                        "sampling.top_k = 0, sampling.min_p = 0 and sampling.min_tokens = 0, or "
                        "choose another loss"
                    )
                logprobs, entropies, likely = policy.further_logprobs(
                    micro, inv_temperature=self._inv_temperature, entropy=entropy
                )
                return _Scored(logprobs=logprobs, entropies=entropies, likely=likely)
            logprobs, entropies = policy.logprobs(
                micro, inv_temperature=self._inv_temperature, entropy=entropy
            )
            return _Scored(logprobs=logprobs, entropies=entropies)
        tokens = policy.token_losses(micro, clip=fused_clip, inv_temperature=self._inv_temperature)
        return _Scored(logprobs=tokens.logprobs, entropies=tokens.entropies, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BatchInputs:
    """A loss, and the inputs that all micro-batches of a batch have in common."""

    batch: StepBatch
    loss: Loss
    step_count: int
    scores: BatchScores | None

    def apply(
        self, scored: _Scored, micro: MicroBatch, reference: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch, with gradient, and the micro-batch's sums by metric.

        Args:
            scored: the policy's scores.
            micro: the micro-batch, on the device.
            reference: [B, T] log-probabilities under the reference, nats; None without a reference.
        """
        inputs = replace(self._of(micro, scored.logprobs), reference_logprobs=reference)
        if scored.tokens is not None:
            assert isinstance(self.loss, ClippedTokenLoss)
            output = self.loss.from_tokens(scored.tokens.losses, scored.tokens.ratios, inputs)
        else:
            if needs_of(self.loss).entropies:
                inputs = replace(inputs, entropies=micro.spread(scored.entropies))
            if scored.likely is not None and micro.likely is not None:
                likely = LikelyIds(
                    places=micro.likely.places,
                    learner_logprobs=scored.likely,
                    sampler_logprobs=micro.likely.sampler_logprobs,
                )
                inputs = replace(inputs, likely=likely)
            output = self.loss(inputs)
        log_ratios = scored.logprobs.detach() - micro.sampler_logprobs
        learner = micro.pick(scored.logprobs.detach())
        return output.loss, {
            LOSS: output.loss.detach(),
            NUM_TOKENS: torch.full((), len(learner), device=learner.device),
            ENTROPY: scored.entropies.detach().sum(dtype=torch.float64),
            **mismatch_sums(learner, micro.pick(micro.sampler_logprobs)),
            **rollout_ratio_sums(log_ratios, micro.completion_mask),
            **output.token_counts,
        }

    def _of(self, micro: MicroBatch, logprobs: Tensor) -> LossInputs:
        needs = needs_of(self.loss)
        proximal = micro.proximal_logprobs
        if needs.proximal_logprobs and proximal is None:
            proximal = logprobs.detach()  # the first update's proximal policy is the present one
        return LossInputs(
            learner_logprobs=logprobs,
            sampler_logprobs=micro.sampler_logprobs,
            advantages=micro.advantages,
            completion_mask=micro.completion_mask,
            num_tokens=self.batch.num_tokens,
            num_rollouts=self.batch.num_rollouts,
            group_index=micro.group_index,
            proximal_logprobs=proximal,
            staleness=self.step_count - micro.version_steps,
            log_expectation=micro.log_expectations if needs.group_expectation else None,
            batch_scores=self.scores,
        )


def _by_group(scored: _Scored, micro: MicroBatch, *, num_groups: int) -> Tensor:
    rows = micro.scored.div(micro.token_ids.shape[1], rounding_mode="floor")
    return mismatch_by_group(
        micro.pick(scored.logprobs),
        micro.pick(micro.sampler_logprobs),
        scored.entropies,
        group_of=micro.group_index.index_select(0, rows),
        num_groups=num_groups,
    )
