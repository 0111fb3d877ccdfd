"""Contract of a policy loss: inputs, output, and needs.

A loss sees one micro-batch of whole rollouts, but divides by counts of the whole batch that the
caller gives. So the gradient does not depend on how the batch is cut, and rollouts without an
advantage may be left out exactly: they count in the normaliser and contribute nothing else. A loss
declares further inputs in `needs`, and the caller provides them.

The ratio that every loss here corrects by is learner over sampler. It appears once: a weight that
multiplies the ratio in again exists only where a proximal policy stands between the two
(`losses.DecoupledPpoLoss`).

Shapes: B rollouts of this micro-batch, T completion tokens (padded), N trained tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from echo.kernels.contract import MAX_LOG_RATIO

Aggregation = Literal["token_mean", "sequence_mean"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNeeds:
    """Inputs that a loss asks of the caller; the default is what every loss gets."""

    every_rollout: bool = False
    """Rollouts without an advantage too, because the loss has a gradient there."""
    whole_groups: bool = False
    """All rollouts of a group in one micro-batch, those without an advantage included. The memory
    for it grows with the group, whatever the budget of tokens."""
    group_expectation: bool = False
    """`log_expectation`; a group that lost a member has none and is left out whole."""
    batch_scores: bool = False
    """`batch_scores`: a first pass over the batch without gradient, a third more time."""
    proximal_logprobs: bool = False
    """`proximal_logprobs`; where a step makes several updates, a pass over the later ones' rows."""
    entropies: bool = False
    """`entropies`, with gradient."""
    reference_logprobs: bool = False
    """`reference_logprobs`: a frozen model beside the learner's, and a pass through it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchScores:
    """Every trained token of the batch that has an advantage, before the gradient is taken."""

    log_ratios: Tensor
    """[N] learner minus sampler, nats; data."""
    advantages: Tensor
    """[N] of the token's rollout."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One micro-batch as a loss sees it."""

    learner_logprobs: Tensor
    """[B, T] nats under the policy being trained; carries the gradient."""
    sampler_logprobs: Tensor
    """[B, T] nats under the policy that sampled; data."""
    advantages: Tensor
    """[B] one per rollout."""
    completion_mask: Tensor
    """[B, T] bool, True where a token is trained; what other positions hold does not matter."""
    num_tokens: int
    """Trained tokens of the whole batch, rollouts that were left out included; >= 1."""
    num_rollouts: int
    """Rollouts of the whole batch with a trained token, those left out included; >= 1."""
    group_index: Tensor | None = None
    """[B] int64, equal for the rollouts of one group."""
    proximal_logprobs: Tensor | None = None
    """[B, T] nats under the policy at the start of the step; data, where the loss needs them."""
    staleness: Tensor | None = None
    """[B, T] int64 optimizer steps between the policy that sampled a token and the learner's."""
    log_expectation: Tensor | None = None
    """[B] log of the group expectation of the sampler's probability (losses.py); data."""
    batch_scores: BatchScores | None = None
    """Where the loss needs them."""
    entropies: Tensor | None = None
    """[B, T] nats, of the policy being trained; carry a gradient, where the loss needs them."""
    reference_logprobs: Tensor | None = None
    """[B, T] nats under the frozen reference policy; data, where the loss needs them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """The result of a loss."""

    loss: Tensor
    """Scalar; the sum over micro-batches is the loss of the batch."""
    token_counts: dict[str, Tensor]
    """Scalars without gradient: for how many trained tokens each metric's condition held, or the
    sum of its value over them. The trainer divides by the tokens that went through the loss."""


Loss = Callable[[LossInputs], LossOutput]


def needs_of(loss: Loss) -> LossNeeds:
    """Return what a loss asks for: its attribute `needs`, or nothing special."""
    needs: LossNeeds = getattr(loss, "needs", LossNeeds())
    return needs


def required(value: T | None, name: str, loss: object) -> T:
    """Return an optional input that this loss needs.

    Raises:
        ValueError: naming the input and the loss, if the caller left it out.
    """
    if value is None:
        raise ValueError(f"LossInputs.{name} is missing, and {type(loss).__name__} needs it")
    return value


def masked_log_ratio(inputs: LossInputs) -> Tensor:
    """Return [B, T] log(learner / sampler), limited to 20 either way, 0 outside the mask.

    Selected, not multiplied: whatever stands in padding, NaN included, leaves no trace.
    """
    log_ratio = inputs.learner_logprobs - inputs.sampler_logprobs
    log_ratio = torch.where(inputs.completion_mask, log_ratio, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return [B] the mean of [B, T] values over each row's mask; 0 for a row without any."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def aggregate(token_losses: Tensor, inputs: LossInputs, how: Aggregation) -> Tensor:
    """Return the scalar loss of this micro-batch from [B, T] token losses.

    token_mean: every token of the batch weighs the same. sequence_mean: every rollout does, and
    the tokens within it share its weight.
    """
    if how == "sequence_mean":
        means = sequence_mean(token_losses, inputs.completion_mask)
        return means.sum() / inputs.num_rollouts
    return torch.where(inputs.completion_mask, token_losses, 0.0).sum() / inputs.num_tokens
