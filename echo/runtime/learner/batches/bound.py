"""Adapt the staleness bound of new leases to training signals, within the hard bound."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict

from echo.algo.staleness import ControlSettings, Signals, StalenessController
from echo.config.schema import SyncSection
from echo.core.buffer import StalenessBuffer
from echo.core.errors import ConfigError
from echo.records.ledger import BoundChanged, LedgerQueue
from echo.weights.schedule import PublishPace


class AdaptiveBound:
    """Adapts the staleness bound of new leases to the signals of each step."""

    def __init__(
        self,
        sync: SyncSection,
        buffer: StalenessBuffer,
        pace: PublishPace,
        ledger: LedgerQueue,
        *,
        log: logging.Logger,
    ) -> None:
        """Start with the hard bound, sync.max_staleness.

        The bound is fixed if `sync` is not adaptive, or if its least and largest staleness are
        equal.
        """
        self._most = sync.max_staleness
        self._controller: StalenessController | None = None
        if sync.adaptive and sync.min_staleness < sync.max_staleness:
            settings = ControlSettings(least=sync.min_staleness, most=sync.max_staleness)
            self._controller = StalenessController(settings)
        self._buffer, self._pace, self._ledger = buffer, pace, ledger
        self._log = log

    def adapt(self, step: int, metrics: Mapping[str, float], staleness: Mapping[int, int]) -> bool:
        """Raise, lower or keep the bound, according to the signals of a step.

        Return whether the bound became lower. If the bound is not adaptive, it never changes.

        A lower bound applies to new leases only. Buffered and running groups stay valid up to the
        hard bound. A lower bound also shortens the publish period, so the caller must publish at
        once.

        Args:
            step: number of optimizer steps done.
            metrics: the trainer's metrics of the last step.
            staleness: staleness in steps -> number of trained tokens with this staleness.
        """
        if self._controller is None:
            return False
        signals = Signals(
            ess=metrics.get("ess"),
            mismatch_kl=metrics.get("mismatch_kl"),
            clip_ratio=metrics.get("clip_ratio/mean"),
            staleness=max(staleness, default=0),
        )
        decision = self._controller.observe(step, signals)
        if decision is None:
            return False
        self._ledger.append(BoundChanged(**asdict(decision)))
        self._log.info(
            "staleness bound %d -> %d: %s", decision.before, decision.bound, decision.cause
        )
        self._buffer.admission_staleness = decision.bound
        self._pace.limit(decision.bound)
        return decision.bound < decision.before

    def set(self, step: int, bound: int, *, cause: str) -> None:
        """Set the bound for new leases to `bound`.

        If the bound is adaptive, it continues from this value.

        Raises:
            ConfigError: if the bound is not between 0 and the hard bound.
        """
        if not 0 <= bound <= self._most:
            raise ConfigError(
                f"sync.max_staleness = {bound}: must be from 0 to {self._most}, the bound with "
                "which the run was started; a higher one needs a resume"
            )
        before = self._buffer.admission_staleness
        if self._controller is not None:
            self._controller.bound = bound
        self._ledger.append(BoundChanged(step=step, before=before, bound=bound, cause=cause))
        self._buffer.admission_staleness = bound
        self._pace.limit(bound)

    def metrics(self) -> dict[str, float]:
        """Return {"staleness/bound": the present bound}."""
        return {"staleness/bound": self._buffer.admission_staleness}
