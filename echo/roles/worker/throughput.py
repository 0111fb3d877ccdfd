"""Measures whether more concurrent rollouts increase the tokens per second of an engine.

If an engine waits for memory or for Python, many rollouts take about the time of a few. If the
cores or the GPU are the limit, the time is proportional to the number of rollouts.

The gain is the ratio of the tokens per second under high load to those under low load. A load is
high if it exceeds half of the largest number of concurrent rollouts so far. Both loads occur in
ordinary work, because rollouts end at different lengths.
"""

from __future__ import annotations

from echo.core.bounds import MAX_RATIO

MIN_S = 5.0
"""A gain is computed only if each of the two loads was measured for at least this many seconds."""


class EngineThroughput:
    """Measures an engine's tokens per second under high and low load."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._most = 0
        """Largest number of rollouts that the engine has sampled concurrently."""
        self._last: tuple[int, int, float] | None = None
        """Number of rollouts, number of sampled tokens, and time at the last `look`."""
        self._sums = {False: (0, 0.0), True: (0, 0.0)}
        """For high load (True) and for low load (False): (tokens, seconds)."""

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
            self._sums = {False: (0, 0.0), True: (0, 0.0)}
            return
        if last is None or not num_rollouts or not last[0]:
            return
        is_high = 2 * num_rollouts > self._most
        if is_high == (2 * last[0] > self._most):
            tokens, seconds = self._sums[is_high]
            self._sums[is_high] = tokens + num_tokens - last[1], seconds + now - last[2]

    @property
    def gain(self) -> float | None:
        """Tokens per second under high load, divided by those under low load; None if unknown."""
        (low, low_s), (high, high_s) = self._sums[False], self._sums[True]
        if min(low_s, high_s) < MIN_S or low <= 0 or high <= 0:
            return None
        return min(MAX_RATIO, (high / high_s) / (low / low_s))
