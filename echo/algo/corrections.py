"""Weights and masks that correct for samples of another policy, to be combined with a loss.

Weights multiply a token's loss by a bounded ratio of a proximal policy to the sampler. They belong
to losses whose own ratio starts at that proximal policy; multiplied onto a ratio against the
sampler they would count it twice, so only decoupled PPO takes them.

Masks take whole rollouts out of a loss. They look at the ratio and do not multiply it, so any loss
over rollouts can wear them. What they drop stays in the normaliser, as in AReaL: dropping must not
scale up the rest.

Shapes: B rollouts of this micro-batch, T completion tokens (padded).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from echo.algo.loss import (
    MAX_LOG_RATIO,
    Loss,
    LossInputs,
    LossNeeds,
    LossOutput,
    masked_log_ratio,
    needs_of,
    sequence_mean,
)
from echo.core.errors import ConfigError

ImportanceWeight = Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis"]
IMPORTANCE_WEIGHTS: tuple[str, ...] = ("token_tis", "sequence_tis", "token_mis", "sequence_mis")


def importance_weights(
    log_ratio: Tensor, mask: Tensor, kind: ImportanceWeight, *, cap: float
) -> Tensor:
    """Return the bounded importance weight of every token, without gradient.

    token_tis     min(r_t, cap)                    truncated importance sampling
    sequence_tis  min(prod_t r_t, cap)             the same for every token of a rollout
    token_mis     r_t where r_t <= cap             masked importance sampling; else 0
    sequence_mis  prod_t r_t where <= cap          else 0 for the whole rollout

    Args:
        log_ratio: [B, T] log(proximal / sampler), nats.
        mask: [B, T] bool, trained tokens.
        kind: which.
        cap: upper bound, > 0.

    Returns:
        [B, T], 1 outside the mask.

    Source: token TIS: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (2025); MIS/IcePop: arXiv:2510.18855; bounds as in verl and slime.
    Differs from the paper: no lower bound, which IcePop has; the log-ratio is limited to 20.
    Limits: the product over a long rollout leaves every range; prefer the token forms.
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
    """Which rollouts are left out of a loss; None is off.

    geometric   keep where low <= exp(mean_t log r_t) <= high
    veto        keep where min_t r_t >= veto
    opsm        keep where A >= 0 or mean_t(-log r_t) <= opsm

    r = learner / sampler, before the step and without gradient.

    Source: geometric mask and veto: verl and slime; off-policy sequence masking: DeepSeek-V3.2,
    arXiv:2512.02556.
    Differs from the paper: nothing; OPSM's divergence is taken against the policy that sampled.
    Limits: the geometric bounds in use (.99 to 1.01) mean engines that round differently, not
    versions that differ: under staleness they drop nearly everything, so that mask is off by
    default. Where an engine's numerics cause the mismatch, a veto of one token drops a whole
    rollout, so long rollouts suffer most.
    """

    geometric_low: float | None = None
    """Lower bound on the geometric mean of a rollout's token ratios, 0..1."""
    geometric_high: float | None = None
    """Upper bound, >= 1."""
    veto: float | None = None
    """Smallest ratio that one token may have, 0..1; 1e-4 in the field."""
    opsm: float | None = None
    """Mean log-ratio sampler over learner, nats, up to which bad rollouts are kept; >= 0."""

    def __post_init__(self) -> None:
        limits = {
            "geometric_low": (0.0, 1.0),
            "geometric_high": (1.0, math.inf),
            "veto": (0.0, 1.0),
            "opsm": (0.0, math.inf),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                raise ConfigError(
                    f"loss.{name} = {value}: must be finite and lie in {low:g}..{high:g}"
                )

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever left out."""
        return self == RolloutMasks()

    def dropped(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Return [B] bool by reason: which rollouts each mask that is on takes out."""
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
    """A loss that sees only the rollouts its masks let through.

    `dropped/<reason>` counts the tokens of rollouts each mask takes out; a rollout may have several
    reasons.
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
        """What the loss inside needs."""
        return needs_of(self.loss)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of the rollouts that are kept, in the normaliser of them all."""
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


# --- How stale rollouts may be, following what the last steps could still learn from them ---
#
# Each step reports three signals of how far sampler and learner are apart. They are smoothed; a
# bound that is too high shows in any of them, room for a higher one only in all:
#
#     too high ess < ess_low, or mismatch_kl > kl_high, or clip_ratio > clip_high room for more ess
#     > (1 + ess_low) / 2, mismatch_kl < kl_high / 2, clip_ratio < clip_high / 2, and the rollouts
#     were as old as the bound lets them be
#
# Too high lowers the bound by 1, by half of it where a signal is past twice its limit; room for
# more, `patience` steps in a row, raises it by 1. After each decision there are `patience` steps
# without one, for it acts on rollouts that are granted later. The bound stays between two limits,
# and never passes the hard one, which the buffer keeps whatever is decided here.
#
# Source: additive increase, and a decrease that may be multiplicative, as in TCP's congestion
# control; the signals are those that the field logs.


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Limits of the signals and of the bound."""

    least: int
    """Smallest bound, >= 0."""
    most: int
    """Largest bound: at most the hard one."""
    ess_low: float = 0.8
    """Effective sample size, as a share, below which the bound is too high."""
    kl_high: float = 0.05
    """Nats per token above which it is."""
    clip_high: float = 0.1
    """Share of tokens clipped above which it is."""
    patience: int = 5
    """Steps between decisions, >= 1."""
    smoothing: float = 0.7
    """Weight of the past in the smoothed signals, 0..1."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(
                f"least = {self.least}, most = {self.most}: must be 0 or more, in order"
            )
        if self.patience < 1 or not 0.0 <= self.smoothing < 1.0:
            raise ValueError(
                f"patience = {self.patience} must be at least 1, smoothing = {self.smoothing} must "
                "lie in 0..1"
            )


@dataclass(frozen=True, slots=True)
class Signals:
    """What one step reports; a signal that it lacks says nothing."""

    ess: float | None
    mismatch_kl: float | None
    clip_ratio: float | None
    staleness: int
    """Of the oldest trained token."""


@dataclass(frozen=True, slots=True)
class BoundDecision:
    """A change of the bound."""

    step: int
    before: int
    bound: int
    cause: str
    """In words, with the numbers that decided."""


class StalenessController:
    """Proposes the bound; what is made of it is the caller's affair."""

    def __init__(self, settings: ControlSettings) -> None:
        """Start at the largest bound."""
        self.settings = settings
        self.bound = settings.most
        self._smoothed: dict[str, float] = {}
        self._num_good = 0
        self._quiet_until = 0

    def observe(self, step: int, signals: Signals) -> BoundDecision | None:
        """Take the signals of a step; return the decision they lead to, if any.

        Args:
            step: optimizer steps done.
            signals: of the last of them.
        """
        self._smooth("ess", signals.ess)
        self._smooth("mismatch_kl", signals.mismatch_kl)
        self._smooth("clip_ratio", signals.clip_ratio)
        excess, cause = self._excess()
        is_used = signals.staleness >= self.bound
        self._num_good = self._num_good + 1 if is_used and self._has_space() else 0
        if step < self._quiet_until or not self._smoothed:
            return None
        if excess > 1.0:
            lower = self.bound - 1 if excess <= 2.0 else self.bound // 2
            return self._decide(step, max(self.settings.least, lower), cause)
        if self._num_good >= self.settings.patience:
            values = ", ".join(f"{name} {value:.3g}" for name, value in self._smoothed.items())
            return self._decide(step, min(self.settings.most, self.bound + 1), f"room: {values}")
        return None

    def _smooth(self, name: str, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        weight = self.settings.smoothing if name in self._smoothed else 0.0
        self._smoothed[name] = weight * self._smoothed.get(name, 0.0) + (1.0 - weight) * value

    def _excess(self) -> tuple[float, str]:
        """Return the worst signal as a multiple of its limit, and which one it is, in words."""
        settings, smoothed = self.settings, self._smoothed
        # A share that is lost: 0 at ess = 1, as the others are 0 where nothing is wrong.
        loss = 1.0 - smoothed.get("ess", 1.0)
        found = [
            (_ratio(loss, 1.0 - settings.ess_low), "ess", "below", settings.ess_low),
            (_ratio(smoothed.get("mismatch_kl", 0.0), settings.kl_high), "mismatch_kl", "above",
             settings.kl_high),
            (_ratio(smoothed.get("clip_ratio", 0.0), settings.clip_high), "clip_ratio", "above",
             settings.clip_high),
        ]  # fmt: skip
        excess, name, side, limit = max(found)
        return excess, f"{name} {smoothed.get(name, 0.0):.3g} {side} {limit:g}"

    def _has_space(self) -> bool:
        return self._excess()[0] < 0.5

    def _decide(self, step: int, bound: int, cause: str) -> BoundDecision | None:
        self._num_good = 0
        if bound == self.bound:
            return None
        decision = BoundDecision(step, self.bound, bound, cause)
        self.bound = bound
        self._quiet_until = step + self.settings.patience
        return decision


def _ratio(value: float, limit: float) -> float:
    if limit > 0.0:
        return value / limit
    return math.inf if value > 0.0 else 0.0
