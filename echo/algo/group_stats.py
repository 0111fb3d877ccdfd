"""What can be said of groups without a model: rewards, lengths, and which of them teach anything.

Sums, not groups, are kept, so that the groups which did not count towards a step can be told
together with those which did: a mean reward over useful groups only would never reach 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

from echo.core.rollout import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Sums over groups; empty by default."""

    num_groups: int = 0
    num_rollouts: int = 0
    reward_sum: float = 0.0
    reward_square_sum: float = 0.0
    num_tokens: int = 0
    num_cut_off: int = 0
    """Completions that ran into the token limit."""
    num_all_right: int = 0
    """Groups with equal rewards above 0."""
    num_all_wrong: int = 0
    """Groups with equal rewards of 0 or less."""
    num_mixed: int = 0
    """Groups that several policy versions sampled."""

    @classmethod
    def of(cls, groups: Iterable[Group]) -> Self:
        """Return the sums over `groups`."""
        total = cls()
        for group in groups:
            rewards = group.rewards
            is_equal = min(rewards) == max(rewards)
            total += cls(
                num_groups=1,
                num_rollouts=len(rewards),
                reward_sum=math.fsum(rewards),
                reward_square_sum=math.fsum(reward * reward for reward in rewards),
                num_tokens=group.num_tokens,
                num_cut_off=sum(rollout.finish_reason == "length" for rollout in group.rollouts),
                num_all_right=int(is_equal and rewards[0] > 0),
                num_all_wrong=int(is_equal and rewards[0] <= 0),
                num_mixed=int(len(group.versions) > 1),
            )
        return total

    def __add__(self, other: Self) -> Self:
        return type(self)(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            }
        )

    def metrics(self) -> dict[str, float]:
        """Return rewards, lengths and shares of groups under the field's names; empty for none."""
        if not self.num_groups:
            return {}
        mean = self.reward_sum / self.num_rollouts
        variance = self.reward_square_sum / self.num_rollouts - mean * mean
        num_useful = self.num_groups - self.num_all_right - self.num_all_wrong
        return {
            "reward/mean": mean,
            "reward/std": math.sqrt(max(0.0, variance)),
            "completions/mean_length": self.num_tokens / self.num_rollouts,
            "completions/clipped_ratio": self.num_cut_off / self.num_rollouts,
            "groups/all_right": self.num_all_right / self.num_groups,
            "groups/all_wrong": self.num_all_wrong / self.num_groups,
            "groups/useful": num_useful / self.num_groups,
            "groups/mixed": self.num_mixed / self.num_groups,
        }
