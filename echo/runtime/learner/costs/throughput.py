"""Throughput of workers: the tokens per second that a worker could sample at full load.

The learner limits the number of leases, so a worker may sample below its capacity. Its load is the
number of its leases, divided by the number of groups that it can sample at the same time. A second
at a lower load counts for less: for the load to the power of the engine's scaling
(`roles/worker/throughput.py`). The estimate is the number of sampled tokens divided by these loaded
seconds. Until the worker has measured its scaling, the scaling counts as 1: each second counts in
proportion to the load.

A worker may report its tokens only once per group. In the middle of a group, time would count
without the tokens sampled in it. So the time since the worker's last report counts only as far as
it exceeds the longest time between two earlier reports. Both are loaded seconds.

The estimate is exact at full load. Below full load it is too high while the scaling is unknown: the
cores of an engine may be its limit at a small part of its places. When a worker is put on standby,
the load of the other workers rises, and their estimates become more exact. So `fleet/activation.py`
decides again after each worker that is put on standby.
"""

from __future__ import annotations

import math

THROUGHPUT_WINDOW_S = 300.0
"""After this many loaded seconds, the weight of a measurement has fallen to 1/e."""
MIN_REPORTS = 3
"""Number of reports with new tokens that an estimate needs. With fewer reports, the estimate would
depend on the lengths of single groups."""


class Throughput:
    """Estimates a worker's tokens per loaded second.

    Newer measurements weigh more than older ones.
    """

    def __init__(self, *, tokens_sampled: int | None, now: float) -> None:
        """Start without an estimate.

        Args:
            tokens_sampled: the worker's counter of sampled tokens; None before its first report.
                The counter continues while the link or the learner is down.
            now: the present time, seconds.
        """
        self._counter = tokens_sampled
        self._at = now
        self._loaded_s = 0.0
        """Weighted loaded seconds until the last report of new tokens."""
        self._silent_s = 0.0
        """Loaded seconds since the last report of new tokens."""
        self._longest_s = 0.0
        """The most loaded seconds between two reports of new tokens."""
        self._tokens = 0.0
        self._num_reports = 0

    def update(self, *, load: float, tokens_sampled: int | None, now: float) -> None:
        """Add the tokens and the loaded seconds since the last call.

        `load` is the load, 0 to 1, to the power of the engine's scaling.
        """
        if tokens_sampled is None or self._counter is None:
            self._counter, self._at = tokens_sampled, now
            return
        self._silent_s += min(1.0, load) * max(0.0, now - self._at)
        self._at = now
        if tokens_sampled > self._counter:
            kept = math.exp(-self._silent_s / THROUGHPUT_WINDOW_S)
            self._loaded_s = self._loaded_s * kept + self._silent_s
            self._tokens = self._tokens * kept + tokens_sampled - self._counter
            self._longest_s = max(self._longest_s, self._silent_s)
            self._silent_s = 0.0
            self._num_reports += 1
        self._counter = tokens_sampled

    @property
    def tokens_per_s(self) -> float | None:
        """The estimated tokens per second. None before MIN_REPORTS reports with new tokens."""
        return self.early_tokens_per_s if self._num_reports >= MIN_REPORTS else None

    @property
    def early_tokens_per_s(self) -> float | None:
        """The estimated tokens per second from the reports so far. None before the first report."""
        if self._loaded_s <= 0:
            return None
        return self._tokens / (self._loaded_s + max(0.0, self._silent_s - self._longest_s))
