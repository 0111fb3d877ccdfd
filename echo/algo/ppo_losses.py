"""The clipped surrogate of PPO on token ratios, and the losses that are made of it.

Shapes: B rollouts of this micro-batch, T completion tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from echo.algo.corrections import IMPORTANCE_WEIGHTS, ImportanceWeight, importance_weights
from echo.algo.loss import (
    MAX_LOG_RATIO,
    Aggregation,
    LossInputs,
    LossOutput,
    aggregate,
    check_choice,
    check_range,
    masked_log_ratio,
    required,
)
from echo.core.errors import ConfigError
from echo.kernels.contract import RatioClip


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the pessimistic surrogate of each element and where each clip was active.

    l = -min(r A, clip(r, 1 - low, 1 + high) A);  for A < 0 with dual clip c also l <= -c A.
    `clip_ratio/low` marks A < 0 and r < 1 - low, `clip_ratio/high` A > 0 and r > 1 + high,
    `clip_ratio/dual` A < 0 and r > c; these have no gradient, `clip_ratio/mean` marks them all.

    Args:
        ratio: any shape; carries the gradient.
        advantages: broadcasts to it.
        mask: bool, same shape as `ratio`, where to look for clips.
        clip_low: range below 1, None for no bound.
        clip_high: range above 1, None for no bound.
        dual_clip: bound on the ratio where the advantage is negative, None for none.

    Source: PPO, arXiv:1707.06347, eq. 7; dual clip: arXiv:1912.09729.
    """
    low = 0.0 if clip_low is None else 1.0 - clip_low
    high = float("inf") if clip_high is None else 1.0 + clip_high
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clips = find_clips(
        ratio, advantages, mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    if dual_clip is not None:
        losses = torch.where(clips["clip_ratio/dual"], -dual_clip * advantages, losses)
    return losses, clips


def find_clips(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None,
) -> dict[str, Tensor]:
    """Return where each clip is active, for the arguments of `clipped_surrogate`."""
    low = 0.0 if clip_low is None else 1.0 - clip_low
    high = float("inf") if clip_high is None else 1.0 + clip_high
    is_negative = advantages < 0
    is_dual = torch.zeros_like(mask)
    if dual_clip is not None:
        is_dual = mask & is_negative & (ratio > dual_clip)
    is_low = mask & is_negative & (ratio < low)
    is_high = mask & (advantages > 0) & (ratio > high)
    return {
        "clip_ratio/low": is_low,
        "clip_ratio/high": is_high,
        "clip_ratio/dual": is_dual,
        "clip_ratio/mean": is_low | is_high | is_dual,
    }


def check_clips(clip_low: float | None, clip_high: float | None) -> None:
    """Refuse unusable clip ranges.

    Raises:
        ConfigError: naming the option.
    """
    if clip_low is not None:
        check_range("clip_low", clip_low, 0.0, 1.0)
    if clip_high is not None:
        check_range("clip_high", clip_high, 0.0, float("inf"))


def _check_dual_clip(clip_high: float | None, dual_clip: float | None) -> None:
    if dual_clip is None:
        return
    low = float("inf") if clip_high is None else 1.0 + clip_high
    if not low < dual_clip < float("inf"):
        raise ConfigError(
            f"loss.dual_clip = {dual_clip}: must be above 1 + loss.clip_high = {low}; "
            "use false to switch it off"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedTokenLoss:
    """What losses of clipped token ratios have in common: the ratio's range, and who computes it.

    A kernel that has just computed a token's log-probability can give its clipped loss with it
    (kernels/linear_logprob.py): `fused_clip` says whether it may, `from_tokens` takes the result.
    """

    clip_low: float | None = 0.2
    """Range below 1 in which a ratio still has a gradient, 0..1; None for no bound."""
    clip_high: float | None = 0.28
    """Range above 1, >= 0; None for no bound."""
    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""

    def __post_init__(self) -> None:
        check_clips(self.clip_low, self.clip_high)
        _check_dual_clip(self.clip_high, self.dual_clip)

    @property
    def fused_clip(self) -> RatioClip | None:
        """The range for a fused kernel, None if it has no such form."""
        if self.clip_low is None or self.clip_high is None:
            return None
        return RatioClip(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)

    def combine(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """Return the scalar loss of this micro-batch from [B, T] token losses."""
        raise NotImplementedError

    def from_tokens(self, token_losses: Tensor, ratios: Tensor, inputs: LossInputs) -> LossOutput:
        """Return the loss from what a fused kernel has computed.

        Args:
            token_losses: [B, T] clipped surrogates, 0 outside the mask; they carry the gradient.
            ratios: [B, T] learner over sampler; data.
            inputs: the micro-batch.
        """
        clips = find_clips(
            ratios,
            inputs.advantages[:, None],
            inputs.completion_mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return LossOutput(
            loss=self.combine(token_losses, inputs),
            token_counts={name: where.sum() for name, where in clips.items()},
        )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch and how often each clip was active."""
        losses, clips = clipped_surrogate(
            masked_log_ratio(inputs).exp(),
            inputs.advantages[:, None],
            inputs.completion_mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return LossOutput(
            loss=self.combine(losses, inputs),
            token_counts={name: where.sum() for name, where in clips.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoLoss(ClippedTokenLoss):
    """The clipped surrogate of PPO on token ratios against the policy that sampled.

    r_t = pi(t) / mu(t), learner over sampler;  l_t = -min(r_t A, clip(r_t, 1 - low, 1 + high) A);
    for A < 0 with dual clip c also l_t <= -c A;  loss = sum_t l_t / num_tokens, or with
    sequence_mean the mean over rollouts of the mean over their tokens.

    Source: GRPO, arXiv:2402.03300; clip-higher and token mean: DAPO, arXiv:2503.14476; dual clip:
    arXiv:1912.09729.
    Differs from the paper: the ratio is taken against the sampler's own log-probabilities, several
    versions old, so it is the importance weight too and no other correction may be multiplied in;
    the mean is over tokens unless told otherwise; no KL term; |log r| is limited to 20.
    Limits: clipped tokens have no gradient, and under large staleness most ratios leave the range.
    """

    dual_clip: float | None = 3.0
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number."""

    def __post_init__(self) -> None:
        ClippedTokenLoss.__post_init__(self)
        check_choice("aggregation", self.aggregation, ("token_mean", "sequence_mean"))

    def combine(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """Return the mean over tokens or rollouts."""
        return aggregate(token_losses, inputs, self.aggregation)


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoLoss(GrpoLoss):
    """Decoupled clip and token mean, as DAPO has them.

    l_t as in GRPO with low .2, high .28 and no dual clip;  loss = sum_t l_t / num_tokens.

    Source: DAPO, arXiv:2503.14476, eq. 8 and 10.
    Differs from the paper: the ratio is taken against the sampler; |log r| is limited to 20. The
    paper's other parts stand elsewhere: overlong shaping and filtering among the advantages,
    dynamic sampling in what counts towards a step.
    Limits: as GRPO's.
    """

    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGrpoLoss(ClippedTokenLoss):
    """GRPO without its two biases: no division by a rollout's length nor by the rewards' spread.

    l_t as in GRPO;  loss = sum_t l_t / (num_rollouts * L_max), with L_max the constant bound on
    completion tokens. The advantages that belong to it are r - mean(r), not normalised.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2 and appendix A (the constant normaliser).
    Differs from the paper: the ratio is taken against the sampler; clip-higher; |log r| is limited
    to 20; rollouts without any trained token do not count.
    Limits: where completions are much shorter than L_max the gradient is small in proportion, which
    AdamW undoes and plain SGD would not.
    """

    max_completion_tokens: int
    """L_max, the bound on completion tokens; >= 1."""

    def __post_init__(self) -> None:
        check_range("max_completion_tokens", self.max_completion_tokens, 1, float("inf"))
        ClippedTokenLoss.__post_init__(self)

    def combine(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """Return the sum divided by what the batch could hold at most."""
        divisor = inputs.num_rollouts * self.max_completion_tokens
        return torch.where(inputs.completion_mask, token_losses, 0.0).sum() / divisor


def loglinear_logprobs(
    learner_logprobs: Tensor, sampler_logprobs: Tensor, staleness: Tensor
) -> Tensor:
    """Return an estimate of the log-probs one version before the learner's, without gradient.

    log prox = log mu + a (log pi - log mu),  a = clip((s - 1) / s, 0, 1), 0 for s <= 0: the policy
    is taken to have moved evenly, in log space, over the s steps since the token was sampled.

    Args:
        learner_logprobs: [B, T] nats.
        sampler_logprobs: [B, T] nats.
        staleness: [B, T] whole optimizer steps.

    Source: AReaL's `prox_logp_method = "loglinear"`; with v the learner's version and v_b the
    sampler's, a = (v - 1 - v_b) / (v - v_b) and s = v - v_b.
    Differs from the source: nothing.
    """
    steps = staleness.to(learner_logprobs.dtype)
    share = ((steps - 1) / steps.clamp(min=1)).clamp(0.0, 1.0)
    return sampler_logprobs + share * (learner_logprobs.detach() - sampler_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPpoLoss:
    """PPO around a recent proximal policy, weighted by that policy's ratio to the sampler.

    u_t = pi(t) / prox(t);  w_t = bounded prox(t) / mu(t), without gradient (corrections.py);
    l_t = -w_t min(u_t A, clip(u_t, 1 - low, 1 + high) A);  loss = sum_t l_t / num_tokens, counted
    before anything was masked. u carries the trust region, w the staleness; their product is the
    ratio to the sampler, once.

    proximal = "recompute": the learner's policy at the start of the step. A batch makes one
    optimizer step here, so u is 1 where the gradient is taken, the clip never acts, and this is the
    policy gradient under bounded importance weights. proximal = "loglinear": the policy one
    version earlier, interpolated by each token's staleness (`loglinear_logprobs`), so the clip acts
    on one version's worth of change.

    Source: arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5.
    Differs from the paper: w is bounded (the paper's is not); |log u| is limited to 20.
    Limits: token_tis biases towards tokens the sampler preferred; masks lose them.
    """

    clip_low: float | None = 0.2
    """Range of u below 1 in which it still has a gradient, 0..1; None for no bound."""
    clip_high: float | None = 0.28
    """Range above 1, >= 0; None for no bound."""
    dual_clip: float | None = None
    """Bound on u where the advantage is negative, > 1 + clip_high; None for no bound."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Where the proximal policy's log-probabilities come from."""
    importance_weight: ImportanceWeight = "token_tis"
    """How prox / mu is bounded."""
    importance_cap: float = 2.0
    """Ratio at which a truncating weight stops and above which a masking one drops, > 0."""

    def __post_init__(self) -> None:
        check_clips(self.clip_low, self.clip_high)
        _check_dual_clip(self.clip_high, self.dual_clip)
        check_choice("proximal", self.proximal, ("recompute", "loglinear"))
        check_choice("importance_weight", self.importance_weight, IMPORTANCE_WEIGHTS)
        check_range("importance_cap", self.importance_cap, 1.0, float("inf"))

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch, its clips, and `dropped/importance`."""
        mask = inputs.completion_mask
        if self.proximal == "recompute":
            proximal = required(inputs.proximal_logprobs, "proximal_logprobs", self).detach()
        else:
            proximal = loglinear_logprobs(
                inputs.learner_logprobs,
                inputs.sampler_logprobs,
                required(inputs.staleness, "staleness", self),
            )
        weights = importance_weights(
            proximal - inputs.sampler_logprobs,
            mask,
            self.importance_weight,
            cap=self.importance_cap,
        )
        log_ratio = torch.where(mask, inputs.learner_logprobs - proximal, 0.0)
        losses, clips = clipped_surrogate(
            log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
            inputs.advantages[:, None],
            mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        counts = {name: where.sum() for name, where in clips.items()}
        counts["dropped/importance"] = (mask & (weights == 0)).sum()
        return LossOutput(
            loss=aggregate(weights * losses, inputs, "token_mean"), token_counts=counts
        )
