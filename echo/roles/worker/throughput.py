"""The throughput of a worker's engine: whether more rollouts at once make more tokens per second.

An engine that waits for memory or for Python samples many rollouts in about the time of a few. An
engine whose cores or whose GPU are the limit takes proportionally longer. So the gain compares the
tokens per second of two loads: more than half of the most rollouts at once so far, and at most
half. Both occur in ordinary work, because rollouts end at different lengths.
"""

from __future__ import annotations

MIN_S = 5.0
"""Seconds of each load that a gain is computed from, at least."""


class EngineThroughput:
    """Measures the tokens per second of an engine by its number of rollouts."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._most = 0
        """The most rollouts that the engine has sampled at once."""
        self._last: tuple[int, int, float] | None = None
        """Number of rollouts, tokens sampled, and time at the last look."""
        self._sums = {False: (0, 0.0), True: (0, 0.0)}
        """Whether more than half of the rollouts ran -> (tokens, seconds)."""

    def look(self, num_rollouts: int, num_tokens: int, *, now: float) -> None:
        """Count the time since the last look, unless the load has changed meanwhile.

        Args:
            num_rollouts: the rollouts that the engine samples at present.
            num_tokens: the tokens that it has sampled since it was built.
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
        """Tokens per second of a high load over those of a low load; None if unknown."""
        (low, low_s), (high, high_s) = self._sums[False], self._sums[True]
        if min(low_s, high_s) < MIN_S or low <= 0 or high <= 0:
            return None
        return (high / high_s) / (low / low_s)
