"""Contract of a policy loss: inputs, output, and needs.

A loss gets one micro-batch of whole rollouts, and divides by counts of the whole batch (the
normaliser). So the gradient does not depend on the division into micro-batches. If the advantages
are the only source of the gradient, a rollout with an advantage of 0 has no gradient. The rollout
then need not be in a micro-batch, but still counts in the normaliser. A loss declares further
inputs in `needs`, and the caller provides these inputs.

Every loss corrects staleness by the ratio of learner to sampler. Only `losses.DecoupledPpoLoss`
takes the ratio to a proximal policy, and so needs an importance weight too.

Shapes: B rollouts of this micro-batch, T completion tokens (padded), N trained tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from echo.kernels.contract import MAX_LOG_RATIO

Aggregation = Literal["token_mean", "sequence_mean"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNeeds:
    """Inputs that a loss needs in addition to the common inputs."""

    every_rollout: bool = False
    """Whether the loss has a gradient for rollouts with an advantage of 0. If so, it needs these
    rollouts.
    """
    whole_groups: bool = False
    """Whether all rollouts of a group must be in one micro-batch. A large group may then exceed the
    limit of tokens and take more memory.
    """
    group_expectation: bool = False
    """Whether `LossInputs.log_expectation` is needed. If it is, groups that have lost a member are
    left out.
    """
    batch_scores: bool = False
    """Whether `LossInputs.batch_scores` is needed. If it is, a first pass without gradient scores
    the batch, and the passes of a step take a third more time.
    """
    proximal_logprobs: bool = False
    """Whether `LossInputs.proximal_logprobs` is needed. If it is, and a step makes several updates,
    an additional pass scores the rows of all updates after the first.
    """
    entropies: bool = False
    """Whether `LossInputs.entropies` is needed, with gradient."""
    reference_logprobs: bool = False
    """Whether `LossInputs.reference_logprobs` is needed. If it is, a frozen model is kept in
    memory, and each micro-batch also goes through this model.
    """
    likely_ids: int = 0
    """Number of likely ids per token that `LossInputs.likely` needs; 0 for none. Workers send this
    number of the sampler's most likely ids, with their log-probabilities. Sampling must then not be
    truncated.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchScores:
    """Scores of the N trained tokens of a batch, before the gradient is computed."""

    log_ratios: Tensor
    """[N] log(learner / sampler) of each token's probability, nats; without gradient."""
    advantages: Tensor
    """[N] advantage of each token's rollout."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LikelyIds:
    """The sampler's most likely ids at all tokens of a micro-batch, M ids in all."""

    places: Tensor
    """[M] int64, ascending: place of each id's token in the flattened [B, T]."""
    learner_logprobs: Tensor
    """[M] log-probability of each id under the policy being trained, nats; with gradient."""
    sampler_logprobs: Tensor
    """[M] log-probability of each id under the distribution that was sampled from, nats; without
    gradient.
    """

    def sum(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Return the sum of the values of each token's ids, [B, T] from [M].

        A token without ids gets 0.
        """
        ends = torch.arange(shape.numel() + 1, device=self.places.device)
        offsets = torch.searchsorted(self.places, ends)
        return _SegmentSums.apply(values, offsets, self.places).view(shape)  # type: ignore[no-any-return, no-untyped-call]


class _SegmentSums(torch.autograd.Function):
    """Sums the consecutive values of each segment, in the same order on every device."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return torch.segment_reduce(values, "sum", offsets=offsets, initial=0, unsafe=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The inputs of a loss for one micro-batch."""

    learner_logprobs: Tensor
    """[B, T] log-probability of each token under the policy being trained, nats; with gradient."""
    sampler_logprobs: Tensor
    """[B, T] log-probability of each token under the policy that sampled it, nats; without
    gradient.
    """
    advantages: Tensor
    """[B] advantage of each rollout."""
    completion_mask: Tensor
    """[B, T] bool: whether a token is trained. Where it is False, the values of other tensors are
    undefined.
    """
    num_tokens: int
    """Number of trained tokens in the whole batch, including left-out rollouts; >= 1."""
    num_rollouts: int
    """Number of rollouts with a trained token in the whole batch, including left-out rollouts; >=
    1.
    """
    group_index: Tensor | None = None
    """[B] int64: index of each rollout's group, equal within a group."""
    proximal_logprobs: Tensor | None = None
    """[B, T] log-probability of each token under the policy at the start of the step, nats, without
    gradient; None if not needed.
    """
    staleness: Tensor | None = None
    """[B, T] int64: number of optimizer steps from the policy that sampled a token to the learner's
    policy.
    """
    log_expectation: Tensor | None = None
    """[B] log of the group expectation of the sampler's probability (losses.py), without
    gradient.
    """
    batch_scores: BatchScores | None = None
    """Scores of the trained tokens of the whole batch; None if not needed."""
    entropies: Tensor | None = None
    """[B, T] entropy of the trained policy's distribution at each token, nats, with gradient; None
    if not needed.
    """
    reference_logprobs: Tensor | None = None
    """[B, T] log-probability of each token under the frozen reference policy, nats, without
    gradient; None if not needed.
    """
    likely: LikelyIds | None = None
    """The sampler's most likely ids at each token; None if not needed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """The result of a loss for one micro-batch."""

    loss: Tensor
    """Scalar. The loss of a batch is the sum of this scalar over all micro-batches."""
    token_counts: dict[str, Tensor]
    """Scalars by metric, without gradient: the number of trained tokens with the metric's
    condition, or the sum of the metric over tokens. The trainer divides each scalar by the number
    of tokens that went through the loss.
    """


Loss = Callable[[LossInputs], LossOutput]


def needs_of(loss: Loss) -> LossNeeds:
    """Return the `needs` of a loss; `LossNeeds()` for a loss without `needs`."""
    needs: LossNeeds = getattr(loss, "needs", LossNeeds())
    return needs


def required(value: T | None, name: str, loss: object) -> T:
    """Return `value`; raise an error if `value` is None.

    `value` is an optional input that this loss needs.

    Raises:
        ValueError: if the value is None. The message names the input and the loss.
    """
    if value is None:
        raise ValueError(f"LossInputs.{name} is missing, and {type(loss).__name__} needs it")
    return value


def masked_log_ratio(inputs: LossInputs) -> Tensor:
    """Return [B, T] log(learner / sampler), limited to -20..20, and 0 outside the mask.

    NaN in padding is removed.
    """
    log_ratio = inputs.learner_logprobs - inputs.sampler_logprobs
    log_ratio = torch.where(inputs.completion_mask, log_ratio, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row's values at the places where `mask` is True, [B] from [B, T].

    The mean of a row without True in `mask` is 0.
    """
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def aggregate(token_losses: Tensor, inputs: LossInputs, how: Aggregation) -> Tensor:
    """Return the scalar loss of this micro-batch from [B, T] token losses.

    With "token_mean" every token of the batch has the same weight. With "sequence_mean" every
    rollout has the same weight, divided equally among its tokens.
    """
    if how == "sequence_mean":
        means = sequence_mean(token_losses, inputs.completion_mask)
        return means.sum() / inputs.num_rollouts
    return torch.where(inputs.completion_mask, token_losses, 0.0).sum() / inputs.num_tokens
