"""Group expectation policy optimisation: the sampler's probability replaced by its group's mean.

A single rollout's ratio explodes where the sampler thought it unlikely. Here the denominator is an
expectation over the whole group, so one unlikely member cannot blow up. It needs nothing but the
sampler's log-probabilities: the learner computes it once per group, after the final masks, and no
worker's number is trusted. A group that lost a member has no such expectation and is left out
whole. A member that is not trained on (`overlong_filter`) is not lost: it was sampled, so it stays
in the expectation, and leaves the sum.

Rollouts continued under a newer policy mix two policies in one q_i, and groups sampled by several
versions mix them in one expectation. The paper has one sampler per group; such mixtures deviate
from it. `groups/mixed` measures them.

Shapes: B rollouts of this micro-batch, T completion tokens (padded), N rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echo.algo.gspo import count_tokens
from echo.algo.kl import kl_k3
from echo.algo.loss import (
    MAX_LOG_RATIO,
    LossInputs,
    LossNeeds,
    LossOutput,
    check_range,
    required,
    sequence_mean,
)
from echo.algo.ppo_losses import check_clips, clipped_surrogate


def group_log_expectation(mean_logprobs: Tensor, group_index: Tensor) -> Tensor:
    """Return each rollout's group expectation of the sampler's probability, as a log.

    log E = logsumexp_i(2 lq_i) - logsumexp_i(lq_i) over the group: the mean of q weighted by q.

    Args:
        mean_logprobs: [N] mean log-prob per token of each rollout under its sampler, nats; finite.
        group_index: [N] int64 from 0, equal within a group; groups are complete, of two or more.

    Returns:
        [N] in the dtype of `mean_logprobs`, equal within a group, without gradient.

    Raises:
        ValueError: if a group has one member only, or a value is not finite.

    Source: GEPO, arXiv:2508.17850, eq. 1 to 3 and listing 1.
    Differs from the paper: computed in log space; the numbers are the same.
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
    """The clipped surrogate on group-expectation ratios.

    p_i = exp(mean_t log pi(t)), q_i = exp(mean_t log mu(t));  E = sum_j q_j^2 / sum_j q_j over the
    group, data;  w_i = p_i / E;  l_i = -min(w_i A_i, clip(w_i, 1 - low, 1 + high) A_i) + c KL_i;
    loss = sum_i l_i / num_rollouts;  KL_i = mean_t k3, learner to sampler (kl.py).

    gate_kl > 0 is GEPO+: rollouts with KL_i below the gate are divided by their own q_i, as in
    GSPO, since there the expectation adds bias and saves nothing. The gate carries no gradient.

    Source: GEPO, arXiv:2508.17850, eq. 1 to 3, figure 1; GEPO+ and the clip: its code.
    Differs from the paper: the expectation is over the group, while the published numbers come from
    random mixed micro-batches; a group that lost a member is left out; k3 is limited; the KL
    term is off unless asked for (the paper's best coefficient is .005); |log w| is limited to 20.
    Limits: even on-policy w is not 1, only its mean under q / sum(q) is. Biased in exchange for
    less variance. Mixtures: see the file's head. The clip
    acts on w, which says how a rollout compares with its group, not how far it has moved.
    """

    clip_low: float | None = 0.2
    """Range below 1 in which a ratio still has a gradient, 0..1; None for no bound."""
    clip_high: float | None = 0.2
    """Range above 1, >= 0; None for no bound."""
    gate_kl: float | None = None
    """KL per token, nats, below which a rollout is divided by its own probability (GEPO+ .002)."""
    sampler_kl_coef: float = 0.0
    """c, weight of the KL to the sampler, >= 0; rollouts without an advantage are trained then."""

    def __post_init__(self) -> None:
        check_clips(self.clip_low, self.clip_high)
        if self.gate_kl is not None:
            check_range("gate_kl", self.gate_kl, 0.0, float("inf"))
        check_range("sampler_kl_coef", self.sampler_kl_coef, 0.0, float("inf"))

    @property
    def needs(self) -> LossNeeds:
        """The expectation of complete groups, and what the options ask for."""
        return LossNeeds(every_rollout=self.sampler_kl_coef > 0, group_expectation=True)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch, the tokens of clipped and of gated rollouts."""
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
