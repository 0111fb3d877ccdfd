"""Job to plan for: batch, lengths, staleness bound, learner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run as the planner sees it."""

    groups_per_step: int
    group_size: int
    useful_share: float = 1.0
    """Share of the groups that are trained on: those whose rewards are not all equal."""
    max_staleness: int
    """Inclusive bound S, optimizer steps."""
    publish_period: int
    """Optimizer steps between two publications, kappa."""
    train_s: float
    """Seconds of one optimizer step, T_train."""
    completion_tokens: float
    """Mean length of a completion."""
    max_completion_tokens: float
    completion_spread: float = 0.0
    """Standard deviation of the length divided by its mean; lengths are assumed log-normal."""
    version_bytes: float
    """Bytes of one publication: all weights, or a delta."""
    chunk_bytes: float = 2.0**20
    upload_bytes_per_token: float = 17.0
    """Token id and log-prob of 4 bytes, version of 8, mask of 1 (echo/core/rollout.py)."""
    has_pausing_workers: bool = False
    """Whether workers stop generating while new weights arrive."""
    margin: float = 0.1
    """Share by which the rented rate exceeds the required one."""
    rate_spread: float = 0.0
    """Standard deviation of the time in which the fleet makes a batch, divided by its mean."""
    learner_price_per_h: float = 0.0
    budget_per_h: float = math.inf
    """$ per hour for nodes and traffic, without the learner."""

    @property
    def rollouts_per_step(self) -> float:
        """R, the rollouts to generate for one step, including groups without a signal."""
        return self.groups_per_step * self.group_size / self.useful_share

    @property
    def tokens_per_step(self) -> float:
        """Completion tokens that one step trains on."""
        return self.groups_per_step * self.group_size * self.completion_tokens

    @property
    def longest_completion_tokens(self) -> float:
        """Expected longest of a group's n completions: quantile n / (n + 1), up to the limit."""
        if self.completion_spread == 0:
            return min(self.completion_tokens, self.max_completion_tokens)
        sigma = math.sqrt(math.log1p(self.completion_spread**2))
        quantile = NormalDist().inv_cdf(self.group_size / (self.group_size + 1))
        longest = self.completion_tokens * math.exp(sigma * quantile - sigma**2 / 2)
        return min(max(longest, self.completion_tokens), self.max_completion_tokens)
