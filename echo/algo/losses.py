"""Policy losses, each with its equation.

Losses with a ratio per token come first, then losses with a ratio per rollout and per group, and
last the wrappers around any loss. Inputs and outputs are in loss.py, masks in corrections.py. In
the equations, pi is the learner's probability of a token, mu the sampler's, r = pi / mu, and A the
advantage.

Shapes: B rollouts of this micro-batch, T completion tokens (padded), N trained tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from echo.algo.corrections import ImportanceWeight, importance_weights
from echo.algo.loss import (
    Aggregation,
    LikelyIds,
    Loss,
    LossInputs,
    LossNeeds,
    LossOutput,
    aggregate,
    masked_log_ratio,
    needs_of,
    required,
    sequence_mean,
)
from echo.core.errors import ConfigError
from echo.kernels.contract import MAX_LOG_RATIO, RatioClip

# --- divergence estimators ------------------------------------------------------------------------
#
# Each takes the log-probabilities of the same tokens under two policies and returns one estimate
# per token. With tokens sampled from `logprobs`' policy p and r = other / p, all estimate KL(p ||
# other):
#
#     k1 = -log r             unbiased, can be negative, noisy
#     k2 = (log r)^2 / 2      biased, never negative, small variance
#     k3 = r - 1 - log r      unbiased, never negative; heavy-tailed where r is large
#
# As penalties differentiated through `logprobs` they differ. The gradient of k1 has expectation 0,
# so it has no effect on average. The gradient of k2 is the gradient of KL(p || other). The gradient
# of k3 is that of the other direction, KL(other || p).
#
# Source: J. Schulman, "Approximating KL Divergence" (2020). Differs from the source: log r is
# limited in k3, so that one token cannot make a sum infinite. Limits: tokens must come from
# `logprobs`' own policy. If tokens are several versions old, multiply by the importance ratio, or
# read the result as a distance on these tokens only.


MAX_KL_LOG_RATIO = 5.0
"""Upper bound on log r in k3. It limits k3 of one token to 142 nats. Without a bound, k3 reached
3e6 in a run published with GEPO.
"""


def kl_k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return k1 of each element, an estimator of KL(p || other) in nats: k1 = log p - log other."""
    return logprobs - other_logprobs


def kl_k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return k2 of each element, an estimator of KL(p || other): k2 = (log p - log other)^2 / 2."""
    return (other_logprobs - logprobs).square() / 2


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return k3 of each element, an estimator of KL(p || other).

    k3 = r - 1 - log r, where r = other / p.
    """
    log_ratio = (other_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_KL_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


# --- one ratio per token: the clipped surrogate ---------------------------------------------------


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped loss l of each element, and the clip masks by metric.

    With the ratio r, the advantage A, and dual clip c:

        l = -min(r A, clip(r, 1 - low, 1 + high) A);  for A < 0 also l <= -c A

    clip_ratio/low     A < 0 and r < 1 - low
    clip_ratio/high    A > 0 and r > 1 + high
    clip_ratio/dual    A < 0 and r > c
    clip_ratio/mean    any of the three

    Each mask is True for the elements that meet its condition. These elements have no gradient.

    Args:
        ratio: any shape; with gradient.
        advantages: any shape that broadcasts to the shape of `ratio`.
        mask: bool, same shape as `ratio`. Only elements with True count as clipped.
        clip_low: width of the range below 1; None for no bound.
        clip_high: width of the range above 1; None for no bound.
        dual_clip: bound on the ratio for a negative advantage; None for no bound.

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
    """Return, by metric, the clip masks that `clipped_surrogate` also returns."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedTokenLoss:
    """Base class of the losses that clip the ratios of tokens.

    A fused kernel can compute a token's clipped loss together with its log-probability
    (kernels/logprob.py). If `fused_clip` is set, such a kernel is used, and `from_tokens` takes its
    result.
    """

    clip_low: float | None = 0.2
    """Width of the range below 1 in which a ratio still has a gradient, 0..1; None for no bound."""
    clip_high: float | None = 0.28
    """Width of the range above 1 in which a ratio still has a gradient, >= 0; None for no bound."""
    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""

    @property
    def fused_clip(self) -> RatioClip | None:
        """The range of ratios for a fused kernel; None if no such kernel can compute the loss."""
        if self.clip_low is None or self.clip_high is None:
            return None
        return RatioClip(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)

    def combine(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """Return the scalar loss of this micro-batch from [B, T] token losses."""
        raise NotImplementedError

    def from_tokens(self, token_losses: Tensor, ratios: Tensor, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch from a fused kernel's token losses.

        Args:
            token_losses: [B, T] clipped surrogates with gradient, 0 outside the mask.
            ratios: [B, T] probability under the learner over probability under the sampler, without
                gradient.
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
        """Return the loss of one micro-batch, and the number of clipped tokens by kind of clip."""
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
    """The clipped surrogate of PPO. Its ratios compare the learner with the policy that sampled.

    With the ratio r_t of learner to sampler, the advantage A, and dual clip c:

        r_t = pi(t) / mu(t)
        l_t = -min(r_t A, clip(r_t, 1 - low, 1 + high) A);  for A < 0 also l_t <= -c A
        loss = sum_t l_t / num_tokens

    With sequence_mean, the loss is the mean over rollouts of the mean of l_t over the rollout's
    tokens.

    Source: GRPO, arXiv:2402.03300; clip-higher and token mean: DAPO, arXiv:2503.14476; dual clip:
    arXiv:1912.09729.
    Differs from the paper: the ratio is to the sampler, several versions old. So the ratio is also
    the importance weight, and no further weight is allowed. By default the mean is over tokens.
    There is no KL term. |log r| is limited to 20.
    Limits: clipped tokens have no gradient. Under large staleness most ratios leave the range.
    """

    dual_clip: float | None = 3.0
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""
    aggregation: Aggregation = "token_mean"
    """How the token losses are reduced to one number (`aggregate`)."""

    def combine(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        return aggregate(token_losses, inputs, self.aggregation)


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoLoss(GrpoLoss):
    """The loss of DAPO: a clip with a different width on each side, and the mean over tokens.

    l_t as in GRPO with low .2, high .28 and no dual clip;  loss = sum_t l_t / num_tokens.

    Source: DAPO, arXiv:2503.14476, eq. 8 and 10.
    Differs from the paper: the ratio is to the sampler; |log r| is limited to 20. The paper's other
    parts are elsewhere: the length penalty in advantages.py, the filtering in train/batch.py.
    Limits: the same as for GRPO.
    """

    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGrpoLoss(ClippedTokenLoss):
    """GRPO that divides neither by rollout length nor by the standard deviation of rewards.

    l_t as in GRPO;  loss = sum_t l_t / (num_rollouts * L_max), with L_max the constant bound on
    completion tokens. The advantages are r - mean(r), not normalised.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2 and appendix A (the constant normaliser).
    Differs from the paper: the ratio is to the sampler; clip-higher; |log r| is limited to 20;
    rollouts without any trained token do not count.
    Limits: if completions are much shorter than L_max, the gradient is proportionally small. This
    matters for SGD, but not for AdamW.
    """

    max_completion_tokens: int
    """L_max, the bound on completion tokens; >= 1."""

    def combine(self, token_losses: Tensor, inputs: LossInputs) -> Tensor:
        """Return the sum of the token losses, divided by num_rollouts * L_max."""
        divisor = inputs.num_rollouts * self.max_completion_tokens
        return torch.where(inputs.completion_mask, token_losses, 0.0).sum() / divisor


def loglinear_logprobs(
    learner_logprobs: Tensor, sampler_logprobs: Tensor, staleness: Tensor
) -> Tensor:
    """Estimate log-probabilities under the version one step before the learner's version, [B, T].

    With the log-probabilities log pi under the learner and log mu under the sampler, s steps old:

        log prox = log mu + a (log pi - log mu)
        a = clip((s - 1) / s, 0, 1), and 0 for s <= 0

    The estimate has no gradient, and assumes that the policy has moved evenly, in log space, over
    the s steps.

    Args:
        learner_logprobs: [B, T] nats under the learner's policy, pi.
        sampler_logprobs: [B, T] nats under the policy that sampled, mu.
        staleness: [B, T] s, number of optimizer steps since each token was sampled.

    Source: AReaL's `prox_logp_method = "loglinear"`.
    Differs from the source: nothing.
    """
    steps = staleness.to(learner_logprobs.dtype)
    share = ((steps - 1) / steps.clamp(min=1)).clamp(0.0, 1.0)
    return sampler_logprobs + share * (learner_logprobs.detach() - sampler_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPpoLoss:
    """PPO around a recent proximal policy, with a weight that corrects for staleness.

    With a token's probability pi under the learner, prox under the proximal policy and mu under the
    sampler, and the advantage A:

        u_t = pi(t) / prox(t)
        w_t = bounded prox(t) / mu(t), without gradient (corrections.py)
        l_t = -w_t min(u_t A, clip(u_t, 1 - low, 1 + high) A)
        loss = sum_t l_t / num_tokens, where num_tokens includes masked tokens

    The clip on u is the trust region, and w corrects for staleness.

    With proximal = "recompute", the proximal policy is the policy at the start of the step. In the
    first update of a step u is 1, and the loss is the policy gradient under bounded importance
    weights. The clip acts from the second update on.

    With proximal = "loglinear", the proximal policy is the policy one version earlier, estimated by
    `loglinear_logprobs`. So the clip acts on the change of one version.

    Source: arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5.
    Differs from the paper: w is bounded; |log u| is limited to 20.
    Limits: the importance weight token_tis has a bias towards tokens that the sampler preferred.
    The masking weights drop tokens.
    """

    clip_low: float | None = 0.2
    """Width of the range of u below 1 in which a token still has a gradient, 0..1; None for no
    bound.
    """
    clip_high: float | None = 0.28
    """Width of the range of u above 1 in which a token still has a gradient, >= 0; None for no
    bound.
    """
    dual_clip: float | None = None
    """Bound on u where the advantage is negative, > 1 + clip_high; None for no bound."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """How the proximal policy's log-probabilities are computed: "recompute" or "loglinear"."""
    importance_weight: ImportanceWeight = "token_tis"
    """Kind of bound on the weight prox / mu (`corrections.importance_weights`)."""
    importance_cap: float = 2.0
    """Cap of the ratio prox / mu, >= 1. Above it, a truncating weight is the cap, and a masking
    weight is 0.
    """

    @property
    def needs(self) -> LossNeeds:
        """Proximal log-probabilities, if `proximal` is "recompute"."""
        return LossNeeds(proximal_logprobs=self.proximal == "recompute")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch, with counts of clipped and dropped tokens.

        `dropped/importance` counts the tokens whose importance weight is 0.
        """
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


# --- score centering ------------------------------------------------------------------------------
# The score of a token, grad log pi, has expectation 0 under pi, but not under mu, which sampled it.
# So if the expected advantage at a prefix is not 0, a policy gradient on stale rollouts also pulls
# towards mu. The rewards do not matter for this. Score centering subtracts the score's expectation
# under mu. Workers send mu only for its most likely ids H. The other ids are the tail, for which mu
# is taken to be rho pi.
#
#     rho = (1 - sum_H mu) / (1 - sum_H pi);  C = sum_H sg(m - alpha pi) log pi;  loss = base + A C,
#
# where m is the weight times mu of an id in H, and alpha the weight times mu / pi of the tail. For
# a weight clip(pi / mu, lo, hi) of each token, m = clip(pi, lo mu, hi mu) and alpha = clip(1, lo
# rho, hi rho). For a weight s of a whole rollout, m = s mu and alpha = s rho, both 0 if the rollout
# is clipped. sum_tail alpha pi grad log pi is -sum_H alpha pi grad log pi, so only H is scored.
#
# If H is the whole vocabulary, a constant A has an expected gradient of exactly 0, as long as the
# prefix and the token determine the weight. s depends on all tokens of the rollout. So with s the
# expectation of the policy gradient keeps a bias, A E_mu[s (score - E_mu[score])], which falls with
# 1 / length.
#
# Source: M. Marek, M. Ryabinin, "Score Centering Stabilizes Off-policy Reinforcement Learning",
# arXiv:2609.20807.
# Differs from the paper: rho is at most 100. If the tail has less than 1e-6 of the learner's
# probability, rho is 1 (the paper divides by 1e-6). The log-probabilities of H travel in bfloat16,
# whose rounding would otherwise decide rho where the tails are tiny.
# Limits: the prefixes are still the sampler's. A token without recorded ids is not centered.


MIN_TAIL = 1e-6
"""Smallest probability of the tail under the learner for which rho is computed; below it, rho is 1.
The tail is all ids except the likely ids. rho is the sampler's probability of the tail divided by
the learner's.
"""
MAX_TAIL_RATIO = 100.0
"""Largest value of rho, the sampler's probability of the tail divided by the learner's."""


def tail_ratio(likely: LikelyIds, shape: torch.Size) -> Tensor:
    """Return rho of each token, [B, T], without gradient.

    The tail is all ids except the likely ids. rho is the sampler's probability of the tail divided
    by the learner's. If the learner's probability is below MIN_TAIL, rho is 1.
    """
    learner, sampler = (
        (1.0 - likely.sum(logprobs.detach().exp(), shape)).clamp(min=0.0)
        for logprobs in (likely.learner_logprobs, likely.sampler_logprobs)
    )
    ratio = (sampler / learner.clamp(min=MIN_TAIL)).clamp(max=MAX_TAIL_RATIO)
    return torch.where(learner < MIN_TAIL, 1.0, ratio)


def expected_scores(likely: LikelyIds, m: Tensor, alpha: Tensor) -> Tensor:
    """Return the score-centering term C of each token, [B, T].

    C = sum_i (m_i - alpha pi_i) log pi_i over the token's likely ids i, where pi_i is the learner's
    probability of id i. Only log pi_i has a gradient. The comment above derives the equation.

    Args:
        likely: the likely ids of all tokens.
        m: [M] the importance weight of each likely id times the sampler's probability of the id.
        alpha: [B, T] for each token, the importance weight of all other ids times the sampler's
            probability of these ids, divided by the learner's.
    """
    of_id = alpha.flatten().index_select(0, likely.places)
    weights = m - of_id * likely.learner_logprobs.detach().exp()
    return likely.sum(weights.detach() * likely.learner_logprobs, alpha.shape)


def centering_of_tokens(likely: LikelyIds, shape: torch.Size, *, low: float, high: float) -> Tensor:
    """Return the score-centering term C of each token, [B, T], if each token has its own weight.

    The weight of a token is its ratio, clipped to low..high. `high` may be infinite.
    """
    learner = likely.learner_logprobs.detach().exp()
    sampler = likely.sampler_logprobs.exp()
    rho = tail_ratio(likely, shape)
    m = torch.maximum(learner, low * sampler)
    alpha = (low * rho).clamp(min=1.0)
    if high < float("inf"):  # infinity times a rho of 0 would be NaN
        m = torch.minimum(m, high * sampler)
        alpha = torch.minimum(alpha, high * rho)
    return expected_scores(likely, m, alpha)


def centering_of_rollouts(likely: LikelyIds, mask: Tensor, weights: Tensor) -> Tensor:
    """Return the score-centering term C of each token, [B, T], if each rollout has one weight.

    `weights` [B] are used without gradient. A clipped rollout has the weight 0, so its C is 0.
    """
    of_token = weights.detach()[:, None].expand(mask.shape)
    of_id = of_token.flatten().index_select(0, likely.places)
    m = of_id * likely.sampler_logprobs.exp()
    return expected_scores(likely, m, of_token * tail_ratio(likely, mask.shape))


# --- one ratio per token: other shapes ------------------------------------------------------------
#
# All take the ratio r_t = pi(t) / mu(t) of learner to sampler, limited to |log r| <= 20.


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoLoss:
    """The policy gradient, weighted by clipped importance weights.

    With the ratio r_t of learner to sampler, the advantage A, and the stop-gradient sg:

        r_t = pi(t) / mu(t)
        l_t = -sg[clip(r_t, 1 - low, 1 + high)] A log pi(t)
        loss = sum_t l_t / num_tokens

    Every token has a gradient.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.
    Differs from the paper: the ratio is to the sampler; no KL term; |log r| is limited to 20.
    Limits: the weights are biased towards tokens that the sampler preferred. The value of the loss
    has no meaning.
    """

    clip_low: float | None = 1.0
    """The weight is at least 1 - clip_low. `clip_low` is in 0..1; 1 means no lower bound, as in the
    paper.
    """
    clip_high: float | None = 4.0
    """The weight is at most 1 + clip_high. `clip_high` is >= 0; None for no bound."""
    score_centering: int = 0
    """Number of likely ids at each token that score centering uses; 0 for no score centering. The
    comment "score centering" above has the equations.
    """

    @property
    def needs(self) -> LossNeeds:
        """The inputs that the loss needs: the likely ids, if scores are centered."""
        return LossNeeds(likely_ids=self.score_centering)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch, and the number of clipped weights."""
        mask = inputs.completion_mask
        low = 0.0 if self.clip_low is None else 1.0 - self.clip_low
        high = float("inf") if self.clip_high is None else 1.0 + self.clip_high
        ratio = masked_log_ratio(inputs).detach().exp()
        logprobs = torch.where(mask, inputs.learner_logprobs, 0.0)
        losses = -ratio.clamp(low, high) * inputs.advantages[:, None] * logprobs
        if self.score_centering:
            likely = required(inputs.likely, "likely", self)
            centering = centering_of_tokens(likely, mask.shape, low=low, high=high)
            losses = losses + inputs.advantages[:, None] * centering
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
    """A trust region on the change of a token's probability instead of on the token's ratio.

    With a token's probability pi under the learner and mu under the sampler, and the advantage A:

        r_t = pi(t) / mu(t)
        keep_t = 0 if (A > 0 and pi - mu > gap) or (A < 0 and mu - pi > gap), otherwise 1
        l_t = -keep_t r_t A + c (log r_t)^2
        loss = sum_t l_t / num_tokens

    |pi - mu| is the total variation between the two policies if all other tokens are merged into
    one.

    Source: DPPO (binary TV), arXiv:2602.04879; the term in (log r)^2: prime-rl, after Kimi-K2.5,
    arXiv:2602.02276.
    Differs from the paper: the ratio is to the sampler; |log r| is limited to 20; prime-rl's term
    is off by default (prime-rl has c = 1e-3).
    Limits: r itself is not bounded, so a token that is unlikely under both policies can have a
    large weight. With c > 0, rollouts with an advantage of 0 are trained too.
    """

    max_probability_gap: float = 0.2
    """Largest change of a token's probability in the direction of the token's advantage, 0..1."""
    sampler_kl_coef: float = 0.0
    """c, weight of the squared log-ratio, >= 0."""

    @property
    def needs(self) -> LossNeeds:
        """The inputs that the loss needs: if c > 0, also rollouts with an advantage of 0."""
        return LossNeeds(every_rollout=self.sampler_kl_coef > 0)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch, and the number of dropped tokens (`dropped/tv`)."""
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
    """A smooth gate on the ratio, which replaces the clip.

    With the ratio r_t of learner to sampler, the advantage A, and tau by the sign of A:

        f(r) = (4 / tau) sigmoid(tau (r - 1))
        l_t = -f(r_t) A
        loss = mean over rollouts of the mean over their tokens

    The slope df/dr is 1 at r = 1, so the on-policy gradient is the policy gradient. The slope falls
    on both sides of r = 1 but never reaches 0.

    Source: SAPO, arXiv:2511.20347, eq. 5 and 6.
    Differs from the paper: the ratio is to the sampler; |log r| is limited to 20.
    Limits: far from r = 1 the gradient rounds to 0 in float32.
    """

    tau_positive: float = 1.0
    """tau for tokens with A > 0. tau must be > 0. A larger tau closes the gate faster as r leaves
    1.
    """
    tau_negative: float = 1.05
    """tau for tokens with A < 0. tau must be > 0. The paper makes it larger than `tau_positive`,
    since tokens with A < 0 make training less stable.
    """
    aggregation: Aggregation = "sequence_mean"
    """How the token losses are reduced to one number (`aggregate`)."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch. It has no counts, because no token is clipped."""
        advantages = inputs.advantages[:, None]
        # The numbers become tensors of the log-probs' type: torch.where on two plain numbers would
        # round them to float32.
        negative, positive = (
            advantages.new_full((), tau) for tau in (self.tau_negative, self.tau_positive)
        )
        tau = torch.where(advantages < 0, negative, positive)
        gate = (4.0 / tau) * torch.sigmoid(tau * (masked_log_ratio(inputs).exp() - 1.0))
        return LossOutput(
            loss=aggregate(-gate * advantages, inputs, self.aggregation), token_counts={}
        )


def second_moment_limit(moments: Tensor, max_second_moment: float) -> Tensor:
    """Return the limit below which squared log-ratios are kept.

    The largest values are dropped until the mean of the kept values is at most the bound. The limit
    is half-way between the smallest dropped and the largest kept value, so that rounding cannot
    move a token across the limit. Equal values are dropped together.

    Args:
        moments: [N] squared log-ratios, N >= 0; infinity for tokens that do not count.
        max_second_moment: bound on the mean of the kept values, inclusive.

    Returns:
        Scalar: infinity if all values are kept, 0 if no value is kept.
    """
    if not len(moments):
        return moments.new_full((), torch.inf)
    ordered = moments.double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=moments.device)
    # Values are sorted, so the means grow, and the number of means below the bound is the place
    # where they cross it.
    num_kept = (means <= max_second_moment).sum()
    padded = torch.cat([ordered, ordered.new_full((1,), torch.inf)])
    # `take` is used because the host would wait to read an index that is a tensor of one number.
    largest_kept = padded.take((num_kept - 1).clamp(min=0))
    limit = (largest_kept + padded.take(num_kept)) / 2
    return torch.where((num_kept == 0) & padded[0].isfinite(), 0.0, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poLoss:
    """A bound on the second moment of a batch's log-ratios.

    Let r be a token's ratio of learner to sampler, and A its advantage. PPO could clip tokens with
    A > 0 and r > 1, or with A < 0 and r < 1. These tokens are the candidates. The loss masks the
    candidates with the largest (log r)^2, until the mean of (log r)^2 over the other candidates is
    at most the bound.

    l_t = -r_t A for the tokens that remain;  loss = sum_t l_t / num_tokens.

    Source: M2PO, arXiv:2510.01161, algorithm 1 and eq. 5. The authors' code uses a clip range
    instead.
    Differs from the paper: the mean is over the tokens of the batch, not of each rollout; |log r|
    is limited to 20.
    Limits: the bound is on the whole batch, so a first pass without gradient scores the batch.
    """

    needs: ClassVar[LossNeeds] = LossNeeds(batch_scores=True)

    max_second_moment: float = 0.04
    """Bound on the mean of (log r)^2 over the tokens that PPO could clip; nats squared, >= 0."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch, and the number of masked tokens (`dropped/m2`)."""
        scores = required(inputs.batch_scores, "batch_scores", self)
        mask = inputs.completion_mask
        is_candidate = scores.log_ratios * scores.advantages > 0
        moments = scores.log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()
        moments = torch.where(is_candidate, moments, torch.inf)
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


# --- one ratio per rollout ------------------------------------------------------------------------


def count_tokens(clips: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return, by clip name, the number of trained tokens in the rollouts that were clipped.

    Each of `clips` is [B] bool, True for a clipped rollout. `mask` is [B, T].
    """
    lengths = mask.sum(1)
    return {name: (where * lengths).sum() for name, where in clips.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoLoss:
    """The clipped surrogate on the geometric mean of a rollout's token ratios.

    With the advantage A_i of rollout i, and its ratio s_i of learner to sampler:

        s_i = exp(mean_t log(pi(t) / mu(t)))
        l_i = -min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)
        loss = sum_i l_i / num_rollouts

    Source: GSPO, arXiv:2507.18071, eq. 5 to 7.
    Differs from the paper: the ratio is to the sampler, several versions old. So the default range
    is wider than the paper's 3e-4 / 4e-4 (section 5.1), which would clip most of the batch. |log r|
    of each token is limited to 20, before the mean.
    Limits: a rollout's mean moves far less than a token's ratio, so ranges for tokens (.2 / .28)
    hardly ever act. The default was the best of four ranges on completions of 24 tokens
    (bench/bench_staleness.py). On longer completions the clip acts less often.
    """

    clip_low: float | None = 0.02
    """Width of the range below 1 in which a ratio still has a gradient, 0..1; None for no bound."""
    clip_high: float | None = 0.05
    """Width of the range above 1 in which a ratio still has a gradient, >= 0; None for no bound."""
    score_centering: int = 0
    """Number of likely ids at each token that score centering uses; 0 for no score centering. The
    comment "score centering" above has the equations.
    """

    @property
    def needs(self) -> LossNeeds:
        """The inputs that the loss needs: the likely ids, if scores are centered."""
        return LossNeeds(likely_ids=self.score_centering)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch, and the number of tokens in clipped rollouts."""
        mask = inputs.completion_mask
        has_tokens = mask.any(1)
        ratios = sequence_mean(masked_log_ratio(inputs), mask).exp()
        losses, clips = clipped_surrogate(
            ratios,
            inputs.advantages,
            has_tokens,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        if self.score_centering:
            likely = required(inputs.likely, "likely", self)
            weights = ratios.where(~clips["clip_ratio/mean"], 0.0)
            centering = centering_of_rollouts(likely, mask, weights)
            losses = losses + inputs.advantages * sequence_mean(centering, mask)
        return LossOutput(
            loss=losses.where(has_tokens, 0.0).sum() / inputs.num_rollouts,
            token_counts=count_tokens(clips, mask),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OaplLoss:
    """Regression of a rollout's log-ratio on its advantage.

    With the reward r_i of rollout i, and probabilities pi under the learner, mu under the sampler:

        R_i = sum_t ln(pi(t) / mu(t))
        A_i = r_i - V,  V = b ln mean exp(r / b) over the group,  b = baseline_beta (advantages.py)
        loss = sum_i (beta R_i - A_i)^2 / num_rollouts

    The policy that maximises reward - beta KL(pi || mu) minimises this loss, for rollouts of any
    policy. There is no importance weight and no clip.

    Source: OAPL, arXiv:2602.19362, eq. 2 and 3, with b = 1 and beta = 1e-3; formula and constants
    as quoted in two forks of NeMo RL.
    Differs from the paper: mu changes with every version (in the paper, every L steps). Groups of
    equal rewards are left out. |log r| of a token is limited to 20.
    Limits: only beta limits the change of the policy. At the minimum, a rollout's log-ratio is A /
    beta: hundreds of nats for beta = 1e-3.
    """

    beta: float = 1e-3
    """beta, the reward that equals one nat of a rollout's log-ratio; > 0."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch. It has no counts, because nothing is clipped."""
        mask = inputs.completion_mask
        log_ratio = masked_log_ratio(inputs).sum(1)
        losses = (self.beta * log_ratio - inputs.advantages).square()
        is_compared = mask.any(1) & (inputs.advantages != 0)
        return LossOutput(
            loss=losses.where(is_compared, 0.0).sum() / inputs.num_rollouts, token_counts={}
        )


# --- one ratio per group --------------------------------------------------------------------------
# The ratio of a single rollout is huge if the sampler gave it a tiny probability. Here the
# denominator is an expectation over the whole group, so one unlikely member does not make it tiny.
# The learner computes the expectation from the sampler's log-probabilities, once per group and
# after the final masks; workers do not send it. A group that has lost a member has no expectation
# and is left out. A member that is not trained (`overlong_filter`) was sampled and is not lost: it
# stays in the expectation, and only its loss is left out.
# A rollout that is continued under a newer policy mixes two policies in one q_i. A group sampled by
# several versions mixes these versions in one expectation. The paper has one sampler per group.
# `groups/mixed` is the share of groups that differ from the paper in this way.


def group_log_expectation(mean_logprobs: Tensor, group_index: Tensor) -> Tensor:
    """Return, for each rollout, the log of its group's expectation E.

    E = sum_i q_i^2 / sum_i q_i over the group: the mean of the sampler's probabilities q, weighted
    by q. log q_i is the mean log-probability per token of rollout i.

    Args:
        mean_logprobs: [N] log q of each rollout, nats; finite.
        group_index: [N] int64 from 0, equal within a group. Each group is complete and has two or
            more members.

    Returns:
        [N] in the dtype of `mean_logprobs`, equal within a group, without gradient.

    Raises:
        ValueError: if a group has a single member, or a value is not finite.

    Source: GEPO, arXiv:2508.17850, eq. 1 to 3 and listing 1.
    Differs from the paper: computed in log space, with the same result.
    """
    values = mean_logprobs.detach()
    if not bool(values.isfinite().all()):
        row = int((~values.isfinite()).nonzero()[0])
        raise ValueError(f"mean log-prob of rollout {row} is {values[row]}, expected finite")
    num_groups = int(group_index.max()) + 1
    sizes = torch.bincount(group_index, minlength=num_groups)
    if bool((sizes == 1).any()):
        raise ValueError(
            f"group {int((sizes == 1).nonzero()[0])} has one member: its expectation would be that "
            "rollout's own probability, and the ratio GSPO's"
        )
    largest = values.new_full((num_groups,), -torch.inf)
    largest = largest.scatter_reduce(0, group_index, values, "amax")[group_index]
    shifted = values - largest
    zeros = values.new_zeros(num_groups)
    first = zeros.scatter_add(0, group_index, shifted.exp())
    second = zeros.scatter_add(0, group_index, (2 * shifted).exp())
    return largest + (second.log() - first.log())[group_index]


@dataclass(frozen=True, slots=True, kw_only=True)
class GepoLoss:
    """The clipped surrogate on a rollout's ratio to the expectation of its group.

    With the advantage A_i of rollout i, and probabilities pi under the learner and mu under the
    sampler:

        p_i = exp(mean_t log pi(t)),  q_i = exp(mean_t log mu(t))
        E = sum_j q_j^2 / sum_j q_j over the group, without gradient
        w_i = p_i / E
        KL_i = mean_t k3, learner to sampler
        l_i = -min(w_i A_i, clip(w_i, 1 - low, 1 + high) A_i) + c KL_i
        loss = sum_i l_i / num_rollouts

    gate_kl > 0 is GEPO+: if KL_i is below the gate, w_i is p_i / q_i as in GSPO. If the KL is so
    small, a ratio to E would add bias and hardly reduce the variance. The gate has no gradient.

    Source: GEPO, arXiv:2508.17850, eq. 1 to 3, figure 1; GEPO+ and the clip: the authors' code.
    Differs from the paper: the expectation is over the group, not over a random mixed micro-batch.
    Groups that lost a member are left out. k3 is limited. The KL term is off by default (the
    paper's best coefficient is .005). |log w| is limited to 20.
    Limits: on-policy, w is not 1; only the mean of w, weighted by q, is 1. The estimate is biased
    in exchange for less variance. The clip acts on w, which compares a rollout with its group, and
    not on the policy's change. For groups of several policies, see the comment above
    `group_log_expectation`.
    """

    clip_low: float | None = 0.2
    """Width of the range below 1 in which a ratio still has a gradient, 0..1; None for no bound."""
    clip_high: float | None = 0.2
    """Width of the range above 1 in which a ratio still has a gradient, >= 0; None for no bound."""
    gate_kl: float | None = None
    """The gate, in nats per token. Rollouts whose KL is below the gate have the ratio p_i / q_i.
    GEPO+ has a gate of .002; None for no gate.
    """
    sampler_kl_coef: float = 0.0
    """c, weight of the KL to the sampler, >= 0. If c > 0, rollouts with an advantage of 0 are
    trained too.
    """

    @property
    def needs(self) -> LossNeeds:
        """The inputs that the loss needs: the expectation of each group.

        If c > 0, the loss also needs rollouts with an advantage of 0.
        """
        return LossNeeds(every_rollout=self.sampler_kl_coef > 0, group_expectation=True)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch, with counts of clipped and gated tokens."""
        mask = inputs.completion_mask
        has_tokens = mask.any(1)
        learner = torch.where(mask, inputs.learner_logprobs, 0.0)
        sampler = torch.where(mask, inputs.sampler_logprobs, 0.0)
        own = sequence_mean(sampler, mask)
        divergence = sequence_mean(kl_k3(learner, sampler), mask)
        given = required(inputs.log_expectation, "log_expectation", self)
        log_denominator = torch.where(has_tokens, given.detach(), 0.0)
        gated = torch.zeros_like(has_tokens)
        if self.gate_kl is not None:
            gated = has_tokens & (divergence.detach() < self.gate_kl)
            log_denominator = torch.where(gated, own, log_denominator)
        log_ratio = sequence_mean(learner, mask) - log_denominator
        losses, clips = clipped_surrogate(
            log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
            inputs.advantages,
            has_tokens,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        losses = losses + self.sampler_kl_coef * divergence
        return LossOutput(
            loss=losses.where(has_tokens, 0.0).sum() / inputs.num_rollouts,
            token_counts=count_tokens(clips | {"gepo/gated": gated}, mask),
        )


# --- around any loss ------------------------------------------------------------------------------


KlEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}

MAX_KL_WEIGHT = 2.0
"""Largest importance weight of a token's KL penalty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKlLoss:
    """A loss plus a penalty: c times KL(learner || reference), estimated on the batch's tokens.

    Let inner be the loss without the penalty, and k_t an estimator k1, k2 or k3 of the divergence:

        w_t = min(pi(t) / mu(t), 2), learner over sampler
        loss = inner + c sum_t w_t k_t / num_tokens

    The weights w are needed because the sampler drew the tokens. w has a gradient for k1 and k3,
    and no gradient for k2. So below the cap of 2 all three estimators have the same expected
    gradient, the gradient of the divergence.

    Rollouts with an advantage of 0 are trained too, since the divergence has a gradient.

    Source: k3 as a penalty: GRPO, arXiv:2402.03300, eq. 4; the estimators: J. Schulman (2020); with
    importance weights: slime's unbiased KL.
    Differs from the paper: the mean is over the tokens of the batch. Terms have importance weights,
    since tokens may be stale.
    Limits: above the cap the weight is constant, so the gradient of the penalty is biased.
    """

    loss: Loss
    """The inner loss, including its masks. Rollouts that a mask drops still have the penalty."""
    coef: float
    """c, the weight of the penalty, > 0."""
    estimator: KlEstimator = "k3"

    @property
    def needs(self) -> LossNeeds:
        """The needs of the inner loss, and reference log-probabilities.

        The loss also needs rollouts with an advantage of 0.
        """
        return replace(needs_of(self.loss), every_rollout=True, reference_logprobs=True)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss with the penalty, and the sum of the penalties (`kl/reference`)."""
        reference = required(inputs.reference_logprobs, "reference_logprobs", self)
        output = self.loss(inputs)
        penalties = self._penalties(inputs, reference)
        return LossOutput(
            loss=output.loss + self.coef * aggregate(penalties, inputs, "token_mean"),
            token_counts=output.token_counts | {"kl/reference": penalties.detach().sum()},
        )

    def _penalties(self, inputs: LossInputs, reference: Tensor) -> Tensor:
        """Return the penalties w_t k_t, [B, T], 0 outside the mask."""
        mask = inputs.completion_mask
        learner = torch.where(mask, inputs.learner_logprobs, 0.0)
        values = KL_ESTIMATORS[self.estimator](learner, torch.where(mask, reference, 0.0))
        weights = masked_log_ratio(inputs).exp().clamp(max=MAX_KL_WEIGHT)
        return values * (weights.detach() if self.estimator == "k2" else weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBonusLoss:
    """A loss minus c times the policy's mean entropy, so that the policy explores longer.

    loss = inner - c sum_t H_t / num_tokens, where inner is the loss without the bonus, and H_t the
    entropy of the policy's distribution at token t.

    Rollouts with an advantage of 0 are trained too, since the entropy has a gradient.

    Source: A3C, arXiv:1602.01783, section 4; PPO, arXiv:1707.06347, eq. 9.
    Differs from the paper: the mean is over the batch's trained tokens.
    Limits: the sampler drew the tokens before t, and no importance weight corrects for this. If c
    is too large, the entropy grows without bound: watch `entropy/mean`.
    """

    loss: Loss
    """The inner loss, including its masks. Rollouts that a mask drops still have the bonus."""
    coef: float
    """c, the weight of the entropy, > 0."""

    @property
    def needs(self) -> LossNeeds:
        """The needs of the inner loss, and entropies.

        The loss also needs rollouts with an advantage of 0.
        """
        return replace(needs_of(self.loss), every_rollout=True, entropies=True)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch, minus c times the entropy."""
        entropies = required(inputs.entropies, "entropies", self)
        output = self.loss(inputs)
        return replace(
            output, loss=output.loss - self.coef * aggregate(entropies, inputs, "token_mean")
        )


# --- by name --------------------------------------------------------------------------------------


LOSSES: Mapping[str, Callable[..., Loss]] = {
    "grpo": GrpoLoss,
    "dr_grpo": DrGrpoLoss,
    "dapo": DapoLoss,
    "gspo": GspoLoss,
    "gepo": GepoLoss,
    "oapl": OaplLoss,
    "cispo": CispoLoss,
    "decoupled_ppo": DecoupledPpoLoss,
    "m2po": M2poLoss,
    "sapo": SapoLoss,
    "dppo_tv": DppoTvLoss,
}
"""The class of every loss, by the loss's usual name."""


def make_loss(kind: str, **options: Any) -> Loss:
    """Return the loss called `kind`; the options are the fields of the loss's class."""
    return LOSSES[kind](**options)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """A loss that calls a user's function, with the function's options."""

    kind: str
    """Import path of the function: `loss.kind` of the configuration."""
    function: Callable[..., LossOutput]
    options: Mapping[str, Any]
    needs: LossNeeds

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the result of the function for one micro-batch.

        Raises:
            ConfigError: if the result is not a `LossOutput`.
        """
        output = self.function(inputs, **self.options)
        if not isinstance(output, LossOutput):
            raise ConfigError(
                f"loss.kind = {self.kind!r} returned {type(output).__name__}, expected "
                "echo.algo.loss.LossOutput"
            )
        return output
