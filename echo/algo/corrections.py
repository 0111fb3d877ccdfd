"""Importance weights and rollout masks.

Importance weights multiply a token's loss by a bounded ratio of a proximal policy to the sampler.
Only decoupled PPO needs these weights, because its own ratio is learner to proximal policy. The
ratios of all other losses are learner to sampler.

Masks drop whole rollouts from a loss, and can be put around any loss. Dropped tokens stay in the
normaliser (the count by which a loss divides), as in AReaL. So the weight of the kept tokens does
not grow.

Shapes: B rollouts of this micro-batch, T completion tokens (padded).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from echo.algo.loss import (
    Loss,
    LossInputs,
    LossNeeds,
    LossOutput,
    masked_log_ratio,
    needs_of,
    sequence_mean,
)
from echo.core.errors import ConfigError
from echo.kernels.contract import MAX_LOG_RATIO

ImportanceWeight = Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis"]


def importance_weights(
    log_ratio: Tensor, mask: Tensor, kind: ImportanceWeight, *, cap: float
) -> Tensor:
    """Return the bounded importance weight of every token, without gradient.

    token_tis     min(r_t, cap)                    truncated importance sampling
    sequence_tis  min(R, cap)                      the same for R
    token_mis     r_t if r_t <= cap, otherwise 0   masked importance sampling
    sequence_mis  R if R <= cap, otherwise 0       the same for R

    R = prod_t r_t is the ratio of the rollout. All tokens of a rollout get the same weight from R.

    Args:
        log_ratio: [B, T] log r_t = log(proximal / sampler) of each token t, nats.
        mask: [B, T] bool, trained tokens.
        kind: one of the four kinds above.
        cap: upper bound, > 0.

    Returns:
        [B, T], 1 outside the mask.

    Source: token TIS: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (2025); MIS/IcePop: arXiv:2510.18855; bounds as in verl and slime.
    Differs from the paper: no lower bound, which IcePop has; the log-ratio is limited to 20.
    Limits: the product over a long rollout goes far below or above any bound, so prefer the token
    kinds.
    """
    log_ratio = torch.where(mask, log_ratio.detach(), 0.0)
    if kind.startswith("sequence"):
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind.endswith("tis"):
        weights = ratio.clamp(max=cap)
    else:
        weights = torch.where(ratio <= cap, ratio, 0.0)
    return torch.where(mask, weights, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMasks:
    """Bounds beyond which a loss drops rollouts; None for no bound.

    geometric   keep where low <= exp(mean_t log r_t) <= high
    veto        keep where min_t r_t >= veto
    opsm        keep where A >= 0 or mean_t(-log r_t) <= opsm

    r_t is the ratio of learner to sampler at token t, under the present weights and without
    gradient. A is the advantage.

    Source: geometric mask and veto: verl and slime; off-policy sequence masking: DeepSeek-V3.2,
    arXiv:2512.02556.
    Differs from the paper: |log r_t| is limited to 20.
    Limits: the usual geometric bounds (.99 to 1.01) only allow for differences in rounding. Under
    staleness these bounds would drop nearly every rollout, so the geometric mask is off by default.
    The veto drops long rollouts more often than short rollouts, because one token is enough.
    """

    geometric_low: float | None = None
    """Lower bound on the geometric mean of a rollout's token ratios, 0..1."""
    geometric_high: float | None = None
    """Upper bound on the geometric mean of a rollout's token ratios, >= 1."""
    veto: float | None = None
    """Smallest ratio that a token of a kept rollout may have, 0..1; usually 1e-4."""
    opsm: float | None = None
    """Largest mean of log(sampler / learner) for which a rollout with an advantage below 0 is kept;
    nats, >= 0.
    """

    @property
    def is_off(self) -> bool:
        return self == RolloutMasks()

    def dropped(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Return, by mask name, which rollouts the mask drops, [B] bool."""
        mask = inputs.completion_mask
        log_ratio = masked_log_ratio(inputs).detach()
        mean = sequence_mean(log_ratio, mask)
        found: dict[str, Tensor] = {}
        if self.geometric_low is not None or self.geometric_high is not None:
            ratio = mean.exp()
            low = 0.0 if self.geometric_low is None else self.geometric_low
            high = math.inf if self.geometric_high is None else self.geometric_high
            found["geometric"] = (ratio < low) | (ratio > high)
        if self.veto is not None:
            found["veto"] = log_ratio.amin(1).exp() < self.veto
        if self.opsm is not None:
            found["opsm"] = (inputs.advantages < 0) & (-mean > self.opsm)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLoss:
    """A loss over the rollouts that none of its masks drops.

    `dropped/<mask>` counts the tokens of the rollouts that the mask drops.
    """

    loss: Loss
    masks: RolloutMasks

    def __post_init__(self) -> None:
        needs = needs_of(self.loss)
        if needs.group_expectation or needs.whole_groups:
            raise ConfigError(
                "loss: geometric_low, geometric_high, veto and opsm take single rollouts out, and "
                "this loss is defined over complete groups; remove them"
            )

    @property
    def needs(self) -> LossNeeds:
        return needs_of(self.loss)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of the kept rollouts, divided by the counts of all rollouts."""
        mask = inputs.completion_mask
        dropped = self.masks.dropped(inputs)
        keep = torch.ones_like(mask[:, 0])
        for rows in dropped.values():
            keep = keep & ~rows
        output = self.loss(replace(inputs, completion_mask=mask & keep[:, None]))
        counts = {
            f"dropped/{reason}": (mask & rows[:, None]).sum() for reason, rows in dropped.items()
        }
        return LossOutput(loss=output.loss, token_counts=output.token_counts | counts)
