"""Contract of a policy loss: inputs, output, and needs.

A loss gets one micro-batch of whole rollouts, and divides by counts of the whole batch. So the
gradient does not depend on how the batch is divided. Rollouts without an advantage count in the
normaliser alone, unless the loss needs them, so leaving them out does not change the gradient. A
loss declares further inputs in `needs`, and the caller provides them.

Every loss here corrects by the ratio of learner to sampler, and applies it once.
`losses.DecoupledPpoLoss` alone has a weight as well, because its ratio is against a proximal policy
between the two.

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
    """Inputs that a loss needs from the caller, beside the inputs that every loss gets."""

    every_rollout: bool = False
    """Whether rollouts without an advantage are needed as well: the loss has a gradient for
    them.
    """
    whole_groups: bool = False
    """Whether all rollouts of a group must be in one micro-batch, also rollouts without an
    advantage. A large group may exceed the limit of tokens and take more memory.
    """
    group_expectation: bool = False
    """Whether `log_expectation` is needed; a group that has lost a member is left out."""
    batch_scores: bool = False
    """Whether `batch_scores` is needed, from a first pass over the batch without gradient, which
    takes a third more time.
    """
    proximal_logprobs: bool = False
    """Whether `proximal_logprobs` is needed; if a step makes several updates, a pass scores the
    rows of all but the first.
    """
    entropies: bool = False
    """Whether `entropies` is needed, with gradient."""
    reference_logprobs: bool = False
    """Whether `reference_logprobs` is needed, from a pass through a frozen model in memory."""
    likely_ids: int = 0
    """Number of the sampler's most likely ids of each token for which `likely` is needed; 0 if not.
    Workers then send these ids with their log-probabilities.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchScores:
    """Scores of the N trained tokens of a batch, before the gradient is computed."""

    log_ratios: Tensor
    """[N] learner minus sampler, nats; without gradient."""
    advantages: Tensor
    """[N] the advantage of each token's rollout."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LikelyIds:
    """The sampler's most likely ids of the tokens of a micro-batch, M of all tokens together."""

    places: Tensor
    """[M] int64, ascending: the place of the id's token in the flattened [B, T]."""
    learner_logprobs: Tensor
    """[M] nats of each id under the policy being trained; carries the gradient."""
    sampler_logprobs: Tensor
    """[M] nats of each id under the distribution that was sampled from; without gradient."""

    def sum(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Return the [B, T] sums of [M] values by token, 0 for a token without ids."""
        ends = torch.arange(shape.numel() + 1, device=self.places.device)
        offsets = torch.searchsorted(self.places, ends)
        return _SegmentSums.apply(values, offsets, self.places).view(shape)  # type: ignore[no-any-return, no-untyped-call]


class _SegmentSums(torch.autograd.Function):
    """Sums of consecutive values, in a fixed order on every device."""

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
    """Inputs of a loss: one micro-batch."""

    learner_logprobs: Tensor
    """[B, T] nats under the policy being trained; carries the gradient."""
    sampler_logprobs: Tensor
    """[B, T] nats under the policy that sampled; without gradient."""
    advantages: Tensor
    """[B] one per rollout."""
    completion_mask: Tensor
    """[B, T] bool, True where a token is trained; the other tensors may hold anything elsewhere."""
    num_tokens: int
    """Trained tokens of the whole batch, also of rollouts that were left out; >= 1."""
    num_rollouts: int
    """Rollouts of the whole batch with a trained token, also those left out; >= 1."""
    group_index: Tensor | None = None
    """[B] int64, equal for the rollouts of one group."""
    proximal_logprobs: Tensor | None = None
    """[B, T] nats under the policy at the start of the step, without gradient; None if not
    needed.
    """
    staleness: Tensor | None = None
    """[B, T] int64 optimizer steps from the policy that sampled a token to the learner's policy."""
    log_expectation: Tensor | None = None
    """[B] log of the group expectation of the sampler's probability (losses.py), without
    gradient.
    """
    batch_scores: BatchScores | None = None
    """Scores of the whole batch; None if not needed."""
    entropies: Tensor | None = None
    """[B, T] nats of the policy being trained, with gradient; None if not needed."""
    reference_logprobs: Tensor | None = None
    """[B, T] nats under the frozen reference policy, without gradient; None if not needed."""
    likely: LikelyIds | None = None
    """The sampler's most likely ids of each token; None if not needed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """The result of a loss."""

    loss: Tensor
    """Scalar; the sum over micro-batches is the loss of the batch."""
    token_counts: dict[str, Tensor]
    """Scalars without gradient by metric: the number of trained tokens for which its condition
    held, or the sum of its value over them. The trainer divides by the tokens that went through the
    loss.
    """


Loss = Callable[[LossInputs], LossOutput]


def needs_of(loss: Loss) -> LossNeeds:
    """Return a loss's attribute `needs`; the default if the loss has no such attribute."""
    needs: LossNeeds = getattr(loss, "needs", LossNeeds())
    return needs


def required(value: T | None, name: str, loss: object) -> T:
    """Return an optional input that this loss needs.

    Raises:
        ValueError: if the caller left it out; the text names the input and the loss.
    """
    if value is None:
        raise ValueError(f"LossInputs.{name} is missing, and {type(loss).__name__} needs it")
    return value


def masked_log_ratio(inputs: LossInputs) -> Tensor:
    """Return [B, T] log(learner / sampler), limited to 20 either way, 0 outside the mask.

    `torch.where` selects, so that even a NaN in padding has no effect; a product would keep it.
    """
    log_ratio = inputs.learner_logprobs - inputs.sampler_logprobs
    log_ratio = torch.where(inputs.completion_mask, log_ratio, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return [B] the mean of [B, T] values over each row's mask; 0 for an empty mask."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def aggregate(token_losses: Tensor, inputs: LossInputs, how: Aggregation) -> Tensor:
    """Return the scalar loss of this micro-batch from [B, T] token losses.

    token_mean: every token of the batch has the same weight. sequence_mean: every rollout has the
    same weight, which its tokens share.
    """
    if how == "sequence_mean":
        means = sequence_mean(token_losses, inputs.completion_mask)
        return means.sum() / inputs.num_rollouts
    return torch.where(inputs.completion_mask, token_losses, 0.0).sum() / inputs.num_tokens
