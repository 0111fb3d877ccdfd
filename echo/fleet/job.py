"""Defines the job that the planner plans: batch, lengths, staleness bound and learner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training run as the planner sees it: its sizes, times and limits."""

    groups_per_step: int
    group_size: int
    useful_share: float = 1.0
    """Share of the groups whose rewards differ. Only these groups are trained on."""
    max_staleness: int
    """Inclusive bound S on staleness, in optimizer steps."""
    publish_period: int
    """Optimizer steps between two publications (kappa in overlap.py)."""
    train_s: float
    """Seconds of one optimizer step (T_train in overlap.py)."""
    completion_tokens: float
    """Mean number of tokens of a completion."""
    max_completion_tokens: float
    completion_spread: float = 0.0
    """Standard deviation of the completion length, divided by the mean length. Lengths are assumed
    to be log-normal."""
    version_bytes: float
    """Bytes of one publication: all weights or a delta."""
    chunk_bytes: float = 2.0**20
    upload_bytes_per_token: float = 17.0
    """Bytes that a worker sends per completion token (echo/core/rollout.py).

    Of these bytes, 4 are for the id, 4 for the log-probability, 8 for the version and 1 for the
    mask.
    """
    has_pausing_workers: bool = False
    """Whether workers stop generating while new weights arrive."""
    margin: float = 0.1
    """Share by which the fleet's rate must exceed the required rate."""
    rate_spread: float = 0.0
    """Standard deviation of the fleet's time for a batch, divided by the mean time."""
    learner_price_per_h: float = 0.0
    budget_per_h: float = math.inf
    """Largest $ per hour for nodes and traffic, without the learner."""

    @property
    def rollouts_per_step(self) -> float:
        """Number of rollouts that are sampled for one step.

        Rollouts without a training signal count, too.
        """
        return self.groups_per_step * self.group_size / self.useful_share

    @property
    def tokens_per_step(self) -> float:
        """Number of completion tokens that one step trains on."""
        return self.groups_per_step * self.group_size * self.completion_tokens

    @property
    def longest_completion_tokens(self) -> float:
        """Expected number of tokens of the longest completion in a group.

        This is the quantile n / (n + 1) of the lengths, capped at the token limit.
        """
        if self.completion_spread == 0:
            return min(self.completion_tokens, self.max_completion_tokens)
        sigma = math.sqrt(math.log1p(self.completion_spread**2))
        quantile = NormalDist().inv_cdf(self.group_size / (self.group_size + 1))
        longest = self.completion_tokens * math.exp(sigma * quantile - sigma**2 / 2)
        return min(max(longest, self.completion_tokens), self.max_completion_tokens)
