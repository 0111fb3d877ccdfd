"""Measures how the tokens per second of an engine grow with the number of its rollouts.

If an engine waits for memory or for Python, twice the rollouts make nearly twice the tokens per
second. If the cores or the GPU are the limit, they make no more. The scaling is the exponent of
this growth: tokens per second are proportional to the number of rollouts to the power of the
scaling.

The scaling is computed from the tokens per second under high and under low load. A load is high if
it exceeds half of the largest number of concurrent rollouts so far. Both loads occur in ordinary
work, because rollouts end at different lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_S = 5.0
"""A scaling is computed only if each of the two loads was measured for at least this many seconds.
In a shorter time, the rates would depend on single tokens.
"""
MIN_RATIO = 1.5
"""A scaling is computed only if the high load had on average at least this many times the rollouts
of the low load. With nearly equal loads, a small error of a rate would change the exponent much."""


@dataclass(slots=True)
class _Sums:
    """Sums over the time of one of the two loads."""

    tokens: int = 0
    seconds: float = 0.0
    rollout_s: float = 0.0
    """Rollouts multiplied by the seconds in which the engine sampled them."""


class EngineThroughput:
    """Measures an engine's tokens per second under high and low load."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._most = 0
        """Largest number of rollouts that the engine has sampled concurrently."""
        self._last: tuple[int, int, float] | None = None
        """Number of rollouts, number of sampled tokens, and time at the last `look`."""
        self._low, self._high = _Sums(), _Sums()

    def look(self, num_rollouts: int, num_tokens: int, *, now: float) -> None:
        """Add the time and the tokens since the last `look` to the sums for high or low load.

        Nothing is added if only one of the two loads was high, or if the engine was empty. A new
        largest number of rollouts clears the sums, because it changes which loads are high.

        Args:
            num_rollouts: number of rollouts in the engine now.
            num_tokens: number of tokens that the engine has sampled since its start.
            now: the present time, seconds.
        """
        last, self._last = self._last, (num_rollouts, num_tokens, now)
        if num_rollouts > self._most:
            self._most = num_rollouts
            self._low, self._high = _Sums(), _Sums()
            return
        if last is None or not num_rollouts or not last[0]:
            return
        is_high = 2 * num_rollouts > self._most
        if is_high == (2 * last[0] > self._most):
            sums = self._high if is_high else self._low
            sums.tokens += num_tokens - last[1]
            sums.seconds += now - last[2]
            sums.rollout_s += (num_rollouts + last[0]) / 2 * (now - last[2])

    @property
    def scaling(self) -> float | None:
        """The scaling, 0 to 1; None if unknown."""
        low, high = self._low, self._high
        if min(low.seconds, high.seconds) < MIN_S or min(low.tokens, high.tokens) <= 0:
            return None
        ratio = high.rollout_s / high.seconds / (low.rollout_s / low.seconds)
        if ratio < MIN_RATIO:
            return None
        gain = high.tokens / high.seconds / (low.tokens / low.seconds)
        return min(1.0, max(0.0, math.log(gain) / math.log(ratio)))
