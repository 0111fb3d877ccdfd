"""Computes a policy's scores on held-out prompts, with confidence intervals.

K answers are sampled for each of P prompts. Answers to one prompt resemble each other, so each
prompt counts as one observation in means and standard errors.

    mean (avg@K)   mean over prompts of the mean reward of a prompt's answers
    pass@k         mean over prompts of the probability that at least one of k drawn answers is
                   right. If c of n answers are right, the unbiased estimate for a prompt is
                   1 - C(n - c, k) / C(n, k), where C is the binomial coefficient
                   (Chen et al. 2021, arXiv:2107.03374)

All intervals are 95 % confidence intervals. If all values lie in [0, 1], as pass rates do, Wilson's
interval is used with an estimated number of independent answers. Wilson's interval is valid even if
all answers are right or all are wrong. For other values, the interval extends 1.96 standard errors
from the mean to both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959964
"""95 % of a normal distribution lie within this many standard deviations of its mean."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its 95 % confidence interval."""

    mean: float
    low: float
    """Lower end of the interval. With a single prompt, both ends are NaN."""
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate that one value per prompt gives.

        Without values, the estimate is NaN.
        """
        number = len(values)
        if not number:
            return cls(math.nan, math.nan, math.nan)
        mean = math.fsum(values) / number
        square = math.fsum((value - mean) ** 2 for value in values)
        error = math.sqrt(square / (number - 1) / number) if number > 1 else math.nan
        if not all(0 <= value <= 1 for value in values):
            return cls(mean, mean - Z * error, mean + Z * error)
        num_independent = mean * (1 - mean) / error**2 if error > 0 else float(number)
        shrink = Z * Z / num_independent
        center = (mean + shrink / 2) / (1 + shrink)
        width = math.sqrt(shrink * (mean * (1 - mean) + shrink / 4)) / (1 + shrink)
        # Rounding would move an end over a mean of 0 or 1.
        low, high = max(0.0, min(mean, center - width)), min(1.0, max(mean, center + width))
        return cls(mean, low, high)

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The rewards of P prompts. Each prompt has K answers."""

    by_prompt: tuple[tuple[float, ...], ...]
    """The rewards of each prompt's answers. Answers that the task could not score are left out."""
    num_samples: int
    """K, the number of sampled answers per prompt."""

    @property
    def rewards(self) -> list[float]:
        """All rewards in one list, prompt by prompt."""
        return [reward for prompt in self.by_prompt for reward in prompt]

    @property
    def is_rate(self) -> bool:
        """Whether every reward is 0 or 1. Then a reward of 1 means a right answer."""
        return all(reward in (0.0, 1.0) for reward in self.rewards)

    @property
    def mean(self) -> Estimate:
        """The mean reward, which is called avg@K if K is above 1."""
        return Estimate.of([math.fsum(each) / len(each) for each in self.by_prompt if each])

    def pass_at(self, k: int) -> Estimate:
        """Return pass@k, computed from the prompts that have at least k scored answers.

        Rewards must be 0 or 1.
        """
        return Estimate.of(
            [
                1.0 - math.comb(len(each) - round(sum(each)), k) / math.comb(len(each), k)
                for each in self.by_prompt
                if len(each) >= k
            ]
        )

    @property
    def ks(self) -> list[int]:
        """The values of k for which pass@k is shown: the powers of two below K, and K."""
        powers = {1 << n for n in range(self.num_samples.bit_length())}
        return sorted({*powers, self.num_samples})
