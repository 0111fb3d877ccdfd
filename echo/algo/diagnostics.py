"""Diagnostics of training: length bias, group statistics, sampler mismatch.

All diagnostics use rewards, lengths and log-probabilities that a step already has.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from echo.core.reward_parts import MAX_PARTS
from echo.core.rollout import Group

if TYPE_CHECKING:
    from torch import Tensor


# --- length bias ----------------------------------------------------------------------------------
# Short completions finish first. If groups are trained in the order in which they finish, each
# batch is biased towards short completions. The bias grows if long completions are continued in a
# later step (active partial rollouts). Long completions are delayed, not lost: over a whole run the
# two distributions agree except for discarded groups. But long completions are trained later, on
# older tokens.
# Two samples are compared. The first is the groups trained last. The second has no such bias: the
# newest groups **in the order in which they were granted**, up to the first group that has not
# ended.


WINDOW = 256
"""Largest number of groups in each of the two samples, delivered and trained."""
MIN_GROUPS = 8
"""Smallest number of groups in both samples for which metrics are reported."""


class LengthBias:
    """Compares the lengths of delivered completions with the lengths of trained completions."""

    def __init__(self, *, window: int = WINDOW) -> None:
        """Start without groups.

        The lengths of delivered completions are one sample, and those of trained completions are
        another. Each sample has the last `window` groups.
        """
        self.window = window
        self._delivered: dict[int, tuple[int, ...]] = {}
        self._trained: deque[tuple[int, ...]] = deque(maxlen=window)

    def delivered(self, group: Group) -> None:
        """Record the lengths of a finished group, trained or not."""
        self._delivered[group.group_id] = _lengths(group)

    def trained(self, groups: Iterable[Group]) -> None:
        self._trained.extend(_lengths(group) for group in groups)

    def metrics(self, *, oldest_open: int | None) -> dict[str, float]:
        """Return metrics that compare the two samples, delivered and trained.

        The result is empty until both samples have MIN_GROUPS groups.

        Args:
            oldest_open: id of the first granted group that has not ended; None if all groups have
                ended. Groups that were granted later are left out of the delivered sample. Of
                these groups, mainly those with short completions have ended, and would bias the
                sample.

        Returns:
            `lengths/{trained,sampled}/{mean,p90}` in tokens; sampled means delivered.
            `lengths/bias` is the difference of the two means as a share of the sampled mean.
            `lengths/ks` is the largest distance between the two cumulative distributions, 0 to 1.
        """
        ids = [i for i in sorted(self._delivered) if oldest_open is None or i < oldest_open]
        for group_id in ids[: -self.window]:
            del self._delivered[group_id]
        cohort = [self._delivered[group_id] for group_id in ids[-self.window :]]
        if min(len(cohort), len(self._trained)) < MIN_GROUPS:
            return {}
        sampled, trained = _flat(cohort), _flat(self._trained)
        return {
            "lengths/trained/mean": float(trained.mean()),
            "lengths/trained/p90": float(np.quantile(trained, 0.9)),
            "lengths/sampled/mean": float(sampled.mean()),
            "lengths/sampled/p90": float(np.quantile(sampled, 0.9)),
            "lengths/bias": float(trained.mean() / sampled.mean() - 1),
            "lengths/ks": _distance(trained, sampled),
        }


def _lengths(group: Group) -> tuple[int, ...]:
    return tuple(rollout.num_tokens for rollout in group.rollouts)


def _flat(groups: Iterable[tuple[int, ...]]) -> npt.NDArray[np.int64]:
    return np.sort(np.fromiter((n for lengths in groups for n in lengths), np.int64))


def _distance(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> float:
    """Return the Kolmogorov-Smirnov distance between two sorted samples, 0 to 1."""
    points = np.concatenate([a, b])
    below_a = np.searchsorted(a, points, side="right") / len(a)
    below_b = np.searchsorted(b, points, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


# --- groups ---------------------------------------------------------------------------------------
# Sums are kept in place of groups. So metrics can also cover the groups that did not count towards
# a step. A mean reward over useful groups alone would never reach 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Counts and sums over groups, for the metrics of rewards."""

    num_groups: int = 0
    num_rollouts: int = 0
    reward_sum: float = 0.0
    reward_square_sum: float = 0.0
    num_tokens: int = 0
    num_cut_off: int = 0
    """Number of completions that ended at the token limit."""
    num_all_right: int = 0
    """Number of groups whose rewards are all equal and above 0."""
    num_all_wrong: int = 0
    """Number of groups whose rewards are all equal, and 0 or less."""
    num_unscored: int = 0
    """Number of groups with fewer than two rewards. Such groups count in no other sum."""
    part_sums: Mapping[str, float] = field(default_factory=dict)
    """Sum of each part of rewards, by the part's name."""
    part_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of rewards that have the part, by the part's name."""
    num_mixed: int = 0
    """Number of groups with tokens of more than one policy version."""

    @classmethod
    def of(cls, groups: Iterable[Group]) -> Self:
        """Return the counts and sums over groups that have at least one reward."""
        groups = list(groups)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts]
        equal = [each[0] for group in groups if min(each := group.rewards) == max(each)]
        parts = [part for rollout in rollouts for part in rollout.reward_parts.items()]
        return cls(
            part_sums=_summed(parts),
            part_counts=_summed((name, 1) for name, _ in parts),
            num_groups=len(groups),
            num_rollouts=len(rollouts),
            reward_sum=math.fsum(rewards),
            reward_square_sum=math.fsum(reward * reward for reward in rewards),
            num_tokens=sum(rollout.num_tokens for rollout in rollouts),
            num_cut_off=sum(rollout.finish_reason == "length" for rollout in rollouts),
            num_all_right=sum(reward > 0 for reward in equal),
            num_all_wrong=sum(reward <= 0 for reward in equal),
            num_mixed=sum(len(group.versions) > 1 for group in groups),
        )

    def __add__(self, other: Self) -> Self:
        sums: dict[str, Any] = {}
        for each in fields(self):
            own, new = getattr(self, each.name), getattr(other, each.name)
            is_table = isinstance(own, Mapping)
            sums[each.name] = _summed([*own.items(), *new.items()]) if is_table else own + new
        return type(self)(**sums)

    def metrics(self) -> dict[str, float]:
        """Return the metrics reward/*, completions/* and groups/*."""
        if not self.num_groups:
            return {}
        mean = self.reward_sum / self.num_rollouts
        variance = self.reward_square_sum / self.num_rollouts - mean * mean
        num_useless = self.num_all_right + self.num_all_wrong + self.num_unscored
        num_useful = self.num_groups - num_useless
        return {
            "reward/mean": mean,
            "reward/std": math.sqrt(max(0.0, variance)),
            **{
                f"reward/{name}/mean": self.part_sums[name] / self.part_counts[name]
                for name in sorted(self.part_counts)[:MAX_PARTS]
            },
            "completions/mean_length": self.num_tokens / self.num_rollouts,
            "completions/clipped_ratio": self.num_cut_off / self.num_rollouts,
            "groups/all_right": self.num_all_right / self.num_groups,
            "groups/all_wrong": self.num_all_wrong / self.num_groups,
            "groups/useful": num_useful / self.num_groups,
            "groups/mixed": self.num_mixed / self.num_groups,
        }


T = TypeVar("T", int, float)


def _summed(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    sums: dict[str, T] = {}
    for name, number in pairs:
        sums[name] = sums[name] + number if name in sums else number
    return sums


# --- mismatch -------------------------------------------------------------------------------------


RATIO, MAX_RATIO, ESS, KL = "is_ratio/mean", "is_ratio/max", "ess", "mismatch_kl"


def mismatch_sums(learner_logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, Tensor]:
    """Return the sums that `mismatch_metrics` needs, as float64 scalars.

    Args:
        learner_logprobs: [N] log-probabilities under the policy being trained, nats; N >= 1.
        sampler_logprobs: [N] log-probabilities under the policy that sampled, nats.
    """
    log_ratio = (learner_logprobs.detach() - sampler_logprobs).double()
    ratio = log_ratio.exp()
    return {
        RATIO: ratio.sum(),
        MAX_RATIO: ratio.max(),
        ESS: ratio.square().sum(),
        KL: (log_ratio.expm1() - log_ratio).sum(),
    }


def mismatch_metrics(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Return the statistics of the importance ratio r = pi / mu over a batch of N tokens.

    With a token's probability pi under the learner and mu under the sampler:

        is_ratio/mean, is_ratio/max    mean and maximum of r
        ess                            (sum r)^2 / (N sum r^2), the effective sample size as a share
                                       of N; 1 if all ratios are equal
        mismatch_kl                    mean(r - 1 - log r), an unbiased estimate of KL(mu || pi) in
                                       nats per token; never negative

    Args:
        sums: the result of `mismatch_sums`: the sum of r, the sum of r^2 (under the name "ess"),
            the sum of r - 1 - log r, and the largest r.
        num_tokens: the number of tokens, N.

    Source: the estimator k3 of J. Schulman, "Approximating KL Divergence" (2020); Kish's effective
    sample size.
    """
    mean, square = sums[RATIO] / num_tokens, sums[ESS] / num_tokens
    return {
        RATIO: mean,
        MAX_RATIO: sums[MAX_RATIO],
        ESS: mean * mean / square if square else math.nan,
        KL: sums[KL] / num_tokens,
    }


# --- effective sample size of rollouts ------------------------------------------------------------


ROLLOUT_ESS = "ess/rollouts"
ROLLOUT_SUMS = NUM_ROLLOUTS, ROLLOUT_RATIO, ROLLOUT_SQUARE = (
    "num_rollouts",
    "rollout_ratio",
    "rollout_ratio_square",
)
"""Names of the sums that `rollout_ratio_sums` returns, in order."""
MAX_LOG_RATIO = 20.0
"""Bound on the absolute log-ratio of a token or a rollout in nats, so that sums stay finite. It is
the bound of kernels/contract.py, which would load torch.
"""


def rollout_ratio_sums(log_ratios: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the number of rollouts, the sum of their ratios and the sum of the squared ratios.

    The sums are float64.

    Args:
        log_ratios: [B, T] log(learner / sampler) of each token, nats.
        mask: [B, T] bool, trained tokens. Rollouts without trained tokens do not count.
    """
    has_tokens = mask.any(1)
    of_rollout = log_ratios.detach().double().where(mask, 0.0).sum(1)
    ratio = of_rollout.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio = ratio.where(has_tokens, 0.0)
    return {
        NUM_ROLLOUTS: has_tokens.sum(),
        ROLLOUT_RATIO: ratio.sum(),
        ROLLOUT_SQUARE: ratio.square().sum(),
    }


def rollout_ess(sums: Mapping[str, float]) -> float:
    """Return the effective sample size of B rollouts as a share of B.

    With a token's probability pi under the learner and mu under the sampler:

        w_i = prod_t pi(t) / mu(t) over the tokens of rollout i
        ess = (sum_i w_i)^2 / (B sum_i w_i^2)

    ess is 1 if all w_i are equal, 1 / B if one rollout outweighs all others, and NaN without
    rollouts.

    Args:
        sums: from `rollout_ratio_sums`.

    Source: VCPO, arXiv:2602.17616, rho_ess.
    Differs from the paper: |log w| is limited to 20.
    Limits: the product over a long rollout varies much, even if each token's ratio is near 1. So a
    few rollouts may outweigh all others.
    """
    square = sums[NUM_ROLLOUTS] * sums[ROLLOUT_SQUARE]
    return sums[ROLLOUT_RATIO] ** 2 / square if square else math.nan


# --- mismatch by group ----------------------------------------------------------------------------
# The same sums per group, from which each worker's mismatch is computed. Two more sums show faults
# that the ratio cannot show: the mean log-ratio, and the **surprise**, which is -log pi minus the
# entropy of pi. Its mean is 0 for tokens sampled from pi, and positive for less likely tokens. A
# worker may sample at a higher temperature and report the learner's own log-probabilities. Then its
# mismatch is 0, and its surprise is not.


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over the trained tokens of groups, from which metrics of mismatch are computed."""

    num_tokens: float = 0.0
    log_ratio: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    ratio_square: float = 0.0
    surprise: float = 0.0

    def __add__(self, other: Mismatch) -> Mismatch:
        sums = (getattr(self, f.name) + getattr(other, f.name) for f in fields(self))
        return Mismatch(*sums)

    @property
    def mean_kl(self) -> float:
        """Estimate of KL(sampler || learner) in nats per token; 0 without tokens."""
        return self.kl / self.num_tokens if self.num_tokens else 0.0

    def metrics(self) -> dict[str, float]:
        """Return means per token, and the effective sample size as a share of the tokens.

        The result is empty without tokens.
        """
        if not self.num_tokens:
            return {}
        return {
            "logprob_difference": self.log_ratio / self.num_tokens,
            "mismatch_kl": self.mean_kl,
            "ess": self.ratio**2 / (self.num_tokens * self.ratio_square),
            "surprise": self.surprise / self.num_tokens,
        }


def mismatch_by_group(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    entropies: Tensor,
    *,
    group_of: Tensor,
    num_groups: int,
) -> Tensor:
    """Return each group's sums, [G, 6] float64, in the field order of `Mismatch`.

    Args:
        learner_logprobs: [N] log-probabilities under the policy being trained, nats.
        sampler_logprobs: [N] log-probabilities that the worker reported, nats.
        entropies: [N] entropy of the learner's distribution at each token, nats.
        group_of: [N] int64, index of each token's group.
        num_groups: the number of groups, G.
    """
    learner = learner_logprobs.detach().double()
    log_ratio = (learner - sampler_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    columns = [
        log_ratio.new_ones(len(log_ratio)),
        log_ratio,
        log_ratio.expm1() - log_ratio,
        ratio,
        ratio.square(),
        -learner - entropies.detach(),
    ]
    found = log_ratio.new_zeros(num_groups, len(columns))
    for index, column in enumerate(columns):
        found[:, index].index_add_(0, group_of, column)
    return found
