"""What the learner makes of the staleness controller's decisions.

A lower bound gates new leases only, shortens the publish period and publishes at once;
what is buffered or being sampled stays valid up to the hard bound. Each goes to the journal with
its cause:

    bound  step, before, bound, cause
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from echo.algo.corrections import BoundDecision, ControlSettings, Signals, StalenessController
from echo.config.schema import Config
from echo.core.buffer import StalenessBuffer
from echo.records.ledger import Ledger
from echo.weights.schedule import PublishPace


class Adaptation:
    """The controller, and the places where its bound takes hold."""

    def __init__(
        self,
        controller: StalenessController | None,
        *,
        buffer: StalenessBuffer,
        pace: PublishPace,
        ledger: Ledger,
        log: logging.Logger,
    ) -> None:
        """Join the parts.

        Args:
            controller: which proposes the bound; None for one that stays as it is.
            buffer: whose bound for new leases follows it.
            pace: whose period follows it.
            ledger: the journal, open.
            log: where to tell decisions.
        """
        self._controller = controller
        self._buffer = buffer
        self._pace = pace
        self._ledger = ledger
        self._log = log

    def after_step(
        self, step: int, metrics: Mapping[str, float], staleness: Mapping[int, int]
    ) -> bool:
        """Let the controller decide; return whether to publish now.

        Args:
            step: optimizer steps done.
            metrics: of the last one.
            staleness: its trained tokens by staleness.
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
        self._tell(decision)
        self._buffer.admission_staleness = decision.bound
        self._pace.limit(decision.bound)
        return decision.bound < decision.before

    def _tell(self, decision: BoundDecision) -> None:
        self._ledger.append(
            "bound",
            step=decision.step,
            before=decision.before,
            bound=decision.bound,
            cause=decision.cause,
        )
        self._log.info(
            "staleness bound %d -> %d: %s", decision.before, decision.bound, decision.cause
        )

    def metrics(self) -> dict[str, float]:
        """Return the bound that new leases are granted for."""
        if self._controller is None:
            return {}
        return {"staleness/bound": self._buffer.admission_staleness}


def make_adaptation(
    config: Config,
    *,
    buffer: StalenessBuffer,
    pace: PublishPace,
    ledger: Ledger,
    log: logging.Logger,
) -> Adaptation:
    """Return the adaptation; it does nothing if it is off or there is nothing to choose."""
    sync, controller = config.sync, None
    if sync.adaptive and sync.min_staleness < sync.max_staleness:
        settings = ControlSettings(least=sync.min_staleness, most=sync.max_staleness)
        controller = StalenessController(settings)
        pace.limit(sync.max_staleness)
    return Adaptation(controller, buffer=buffer, pace=pace, ledger=ledger, log=log)
