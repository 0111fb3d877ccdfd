"""Losses that treat the ratio of each token in another way than PPO's clip.

All take the ratio r_t = pi(t) / mu(t) of learner to sampler, limited to |log r| <= 20.

Shapes: B rollouts of this micro-batch, T completion tokens (padded), N trained tokens of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from echo.algo.loss import (
    MAX_LOG_RATIO,
    Aggregation,
    LossInputs,
    LossNeeds,
    LossOutput,
    aggregate,
    check_choice,
    check_range,
    masked_log_ratio,
)
from echo.algo.ppo_losses import check_clips


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoLoss:
    """The policy gradient under clipped importance weights: every token keeps its gradient.

    l_t = -sg[clip(r_t, 1 - low, 1 + high)] A log pi(t);  loss = sum_t l_t / num_tokens, with sg
    the stop-gradient.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.
    Differs from the paper: the ratio is taken against the sampler; no KL term; |log r| is limited
    to 20.
    Limits: the weights are biased towards tokens the sampler preferred; the loss's value has no
    meaning, only its gradient.
    """

    clip_low: float | None = 1.0
    """The weight is at least 1 - clip_low, 0..1; at 1 there is no lower bound, as in the paper."""
    clip_high: float | None = 4.0
    """The weight is at most 1 + clip_high, >= 0; None for no bound."""

    def __post_init__(self) -> None:
        check_clips(self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch and how often the weight was clipped."""
        mask = inputs.completion_mask
        low = 0.0 if self.clip_low is None else 1.0 - self.clip_low
        high = float("inf") if self.clip_high is None else 1.0 + self.clip_high
        ratio = masked_log_ratio(inputs).detach().exp()
        logprobs = torch.where(mask, inputs.learner_logprobs, 0.0)
        losses = -ratio.clamp(low, high) * inputs.advantages[:, None] * logprobs
        is_low, is_high = mask & (ratio < low), mask & (ratio > high)
        return LossOutput(
            loss=aggregate(losses, inputs, "token_mean"),
            token_counts={
                "clip_ratio/low": is_low.sum(),
                "clip_ratio/high": is_high.sum(),
                "clip_ratio/mean": (is_low | is_high).sum(),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoTvLoss:
    """A trust region on the change of a token's probability instead of its ratio.

    keep_t = not (A > 0 and pi - mu > gap) and not (A < 0 and mu - pi > gap), in probability;
    l_t = -keep_t r_t A + c (log r_t)^2;  loss = sum_t l_t / num_tokens. |pi - mu| is the total
    variation between the two policies seen as "this token or another".

    Source: DPPO (binary TV), arXiv:2602.04879; the term in (log r)^2: prime-rl, after Kimi-K2.5,
    arXiv:2602.02276.
    Differs from the paper: the ratio is taken against the sampler; |log r| is limited to 20;
    prime-rl's term is off unless asked for (there c = 1e-3).
    Limits: r itself is not bounded, so a token that the sampler thought very unlikely can weigh
    much while its probability stays small. With c > 0 rollouts without an advantage are trained on
    too.
    """

    max_probability_gap: float = 0.2
    """Largest change of a token's probability in the direction of its advantage, 0..1."""
    sampler_kl_coef: float = 0.0
    """c, weight of the squared log-ratio, >= 0."""

    def __post_init__(self) -> None:
        check_range("max_probability_gap", self.max_probability_gap, 0.0, 1.0)
        check_range("sampler_kl_coef", self.sampler_kl_coef, 0.0, float("inf"))

    @property
    def needs(self) -> LossNeeds:
        """Every rollout, if there is a penalty."""
        return LossNeeds(every_rollout=self.sampler_kl_coef > 0)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch and the tokens outside the region (`dropped/tv`)."""
        mask = inputs.completion_mask
        advantages = inputs.advantages[:, None]
        log_ratio = masked_log_ratio(inputs)
        gap = (inputs.learner_logprobs.exp() - inputs.sampler_logprobs.exp()).detach()
        is_outside = mask & (advantages.sign() * gap > self.max_probability_gap)
        losses = -torch.where(is_outside, 0.0, log_ratio.exp()) * advantages
        losses = losses + self.sampler_kl_coef * log_ratio.square()
        return LossOutput(
            loss=aggregate(losses, inputs, "token_mean"),
            token_counts={"dropped/tv": is_outside.sum()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoLoss:
    """A soft gate on the ratio in place of the clip: smooth, largest at r = 1, never quite zero.

    f(r) = (4 / tau) sigmoid(tau (r - 1));  l_t = -f(r_t) A, with tau by the sign of A;  loss = mean
    over rollouts of the mean over their tokens. df/dr = 1 at r = 1, so on-policy it is the policy
    gradient.

    Source: SAPO, arXiv:2511.20347, eq. 5 and 6.
    Differs from the paper: the ratio is taken against the sampler; |log r| is limited to 20.
    Limits: far from r = 1 the gradient vanishes, in float32 altogether.
    """

    tau_positive: float = 1.0
    """How fast the gate closes where A > 0, > 0."""
    tau_negative: float = 1.05
    """Where A < 0; the paper wants it above the other, since such tokens are less stable."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses become one number."""

    def __post_init__(self) -> None:
        for name in ("tau_positive", "tau_negative"):
            check_range(name, getattr(self, name), 1e-6, float("inf"))
        check_choice("aggregation", self.aggregation, ("token_mean", "sequence_mean"))

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch; nothing is ever clipped."""
        advantages = inputs.advantages[:, None]
        # Tensors of the log-probs' type: torch.where on two numbers would round them to float32.
        negative = advantages.new_tensor(self.tau_negative)
        tau = torch.where(advantages < 0, negative, advantages.new_tensor(self.tau_positive))
        gate = (4.0 / tau) * torch.sigmoid(tau * (masked_log_ratio(inputs).exp() - 1.0))
        return LossOutput(
            loss=aggregate(-gate * advantages, inputs, self.aggregation), token_counts={}
        )


def second_moment_limit(moments: Tensor, max_second_moment: float) -> Tensor:
    """Return the value below which squared log-ratios may stay.

    The largest are dropped, one after the other, while the mean of the rest is above the bound. The
    limit lies half-way between the smallest dropped and the largest kept, so that rounding of
    either cannot move a token across; equal values are dropped together.

    Args:
        moments: [N] squared log-ratios, N >= 0.
        max_second_moment: bound on their mean, inclusive.

    Returns:
        Scalar: infinity if all may stay, 0 if none.
    """
    if not len(moments):
        return moments.new_tensor(float("inf"))
    ordered = moments.double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=moments.device)
    # The means grow with every larger value, so counting finds where the bound is crossed.
    num_kept = (means <= max_second_moment).sum()
    padded = torch.cat([ordered, ordered.new_tensor([float("inf")])])
    largest_kept = padded[(num_kept - 1).clamp(min=0)]
    limit = (largest_kept + padded[num_kept]) / 2
    return torch.where(num_kept == 0, 0.0, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poLoss:
    """A bound on the second moment of the batch's log-ratios, kept by masking the worst tokens.

    Of the tokens that PPO could clip (A > 0 and r > 1, or A < 0 and r < 1) the largest (log r)^2
    are masked until the mean over the rest is at most the bound;  l_t = -r_t A for the tokens that
    remain;  loss = sum_t l_t / num_tokens.

    Source: M2PO, arXiv:2510.01161, algorithm 1 and eq. 5 (the authors' code turns the bound into a
    clip range instead; this is the paper).
    Differs from the paper: mean over the batch's tokens, not over each rollout's; |log r| is
    limited to 20.
    Limits: the bound is one of the batch, so it takes a first pass over it without gradient.
    """

    needs: ClassVar[LossNeeds] = LossNeeds(batch_scores=True)

    max_second_moment: float = 0.04
    """Bound on the mean of (log r)^2 over the tokens that PPO could clip, nats squared, >= 0."""

    def __post_init__(self) -> None:
        check_range("max_second_moment", self.max_second_moment, 0.0, float("inf"))

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch and the tokens that were masked (`dropped/m2`)."""
        scores = inputs.batch_scores
        if scores is None:
            raise ValueError("LossInputs.batch_scores is missing, and M2poLoss needs it")
        mask = inputs.completion_mask
        is_candidate = scores.log_ratios * scores.advantages > 0
        log_ratios = scores.log_ratios[is_candidate].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        moments = log_ratios.square()
        limit = second_moment_limit(moments, self.max_second_moment)
        advantages = inputs.advantages[:, None]
        log_ratio = masked_log_ratio(inputs)
        data = log_ratio.detach()
        is_dropped = mask & (data * advantages > 0) & (data.square() >= limit)
        losses = -torch.where(is_dropped, 0.0, log_ratio.exp()) * advantages
        return LossOutput(
            loss=aggregate(losses, inputs, "token_mean"),
            token_counts={"dropped/m2": is_dropped.sum()},
        )
