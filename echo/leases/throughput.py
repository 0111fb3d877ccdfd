"""Throughput of workers: what a worker could make if it had enough to do.

Leases are paced, so a worker that is not needed in full looks slow. Each instant therefore counts
in proportion to its load: the leases that it holds over the groups that it can run at once.
Tokens over loaded seconds is exact at full load and too much below it where an engine gains by
batching; after each worker that `fleet/activation.py` puts on standby it must look again, since
the load of the others grows and their estimates become exact just when they matter.
"""

from __future__ import annotations

import math

THROUGHPUT_WINDOW_S = 300.0
"""Loaded seconds after which what was seen weighs 1/e of what it did."""
MIN_REPORTS = 3
"""Reports of new tokens before there is an estimate: tokens may come in whole groups."""


class Throughput:
    """Tokens per loaded second, with exponential weights."""

    def __init__(self, *, tokens_sampled: int | None, now: float) -> None:
        """Know nothing.

        Args:
            tokens_sampled: the worker's counter, which goes on counting when the learner or the
                link was away; None while it has not been heard.
            now: the present.
        """
        self._counter = tokens_sampled
        self._at = now
        self._loaded_s = 0.0
        self._tokens = 0.0
        self._num_reports = 0

    def look(self, *, load: float, tokens_sampled: int | None, now: float) -> None:
        """Take the worker's load (0..1) since the last look, and its counter of tokens."""
        if tokens_sampled is None or self._counter is None:
            self._counter, self._at = tokens_sampled, now
            return
        loaded_s = min(1.0, load) * max(0.0, now - self._at)
        self._at = now
        kept = math.exp(-loaded_s / THROUGHPUT_WINDOW_S)
        self._loaded_s = self._loaded_s * kept + loaded_s
        self._tokens *= kept
        if tokens_sampled > self._counter:
            self._tokens += tokens_sampled - self._counter
            self._num_reports += 1
        self._counter = tokens_sampled

    @property
    def tokens_per_s(self) -> float | None:
        """The estimate; None while it has shown too little."""
        if self._num_reports < MIN_REPORTS or self._loaded_s <= 0:
            return None
        return self._tokens / self._loaded_s
