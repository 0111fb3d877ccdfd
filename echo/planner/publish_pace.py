"""How often to publish: a fixed period, or the smallest that hides the broadcast of a version.

The period is counted from the last publication, whatever its step, and is at most S + 1 of the
bound in force: so two versions never lie more than S + 1 steps apart, however often period and
bound change in between. Further apart, the last version would be too old to sample for the step
after which the next one is due, and learner and workers would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo.core.rollout import PolicyVersion
from echo.fleet.overlap import auto_publish_period

MAX_PENDING = 64
"""Versions whose arrival is awaited for the measurement; a slower node is not waited for."""


class PublishPace:
    """When to publish: a fixed period, or one that follows what was measured."""

    def __init__(self, *, period: int, is_auto: bool, max_staleness: int) -> None:
        """Start with `period` steps between publications.

        Args:
            period: kappa, or where to begin if it is measured.
            is_auto: whether it follows what is measured.
            max_staleness: S, which bounds it.
        """
        self.period = period
        self._longest = period
        self._is_auto = is_auto
        self._max_staleness = max_staleness
        self._published_step: int | None = None
        self._published_at: dict[PolicyVersion, float] = {}
        self._num_bytes = 0
        self.broadcast_s: float | None = None
        """Seconds that the last fully received version took to reach every node."""

    def limit(self, max_staleness: int) -> None:
        """Follow another bound on staleness from now on: a version for each S + 1 steps at least.

        A period that is measured follows with the next measurement.
        """
        self._max_staleness = max_staleness
        longest = self.period if self._is_auto else self._longest
        self.period = min(longest, max_staleness + 1)

    def is_due(self, step: int) -> bool:
        """Return whether the weights after `step` are to be published."""
        last = self._published_step
        return last is None or step - last >= min(self.period, self._max_staleness + 1)

    def published(self, version: PolicyVersion, *, num_bytes: int, now: float) -> None:
        """Note when a version of this size was published."""
        self._num_bytes = num_bytes
        self._published_step = version.step
        self._published_at[version] = now
        if len(self._published_at) > MAX_PENDING:
            del self._published_at[min(self._published_at)]

    def received(
        self, installed: Sequence[PolicyVersion | None], *, now: float, train_s: float | None
    ) -> bool:
        """Note what every node holds; return whether a version has reached all of them."""
        slowest = min((v for v in installed if v is not None), default=None)
        if slowest is None or None in installed:
            return False
        arrived = [v for v in self._published_at if v <= slowest]
        if not arrived:
            return False
        self.broadcast_s = now - self._published_at[max(arrived)]
        for version in arrived:
            del self._published_at[version]
        if self._is_auto and train_s is not None:
            self.period = auto_publish_period(train_s, self.broadcast_s, self._max_staleness)
        return True

    def metrics(self) -> dict[str, float]:
        """Return the period, and what the last measured broadcast took."""
        row: dict[str, float] = {"publish_period": self.period}
        if self.broadcast_s is not None:
            row["broadcast/seconds"] = self.broadcast_s
            row["broadcast/goodput"] = self._num_bytes / max(self.broadcast_s, 1e-6)
        return row
