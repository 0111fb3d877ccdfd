"""What the learner makes of the staleness controller's decisions: notes them, or follows them.

Followed, a lower bound gates new leases only, shortens the publish period and publishes at once;
what is buffered or being sampled stays valid up to the hard bound. In shadow, every decision is
noted and nothing else happens. Each goes to the journal with its cause:

    bound  step, before, bound, cause, applied
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from echo.algo.staleness_control import ControlSettings, Decision, Signals, StalenessController
from echo.buffer import StalenessBuffer
from echo.config.schema import Config
from echo.runtime.ledger import Ledger
from echo.runtime.publication import PublishPace


class Adaptation:
    """The controller, and the places where its bound takes hold."""

    def __init__(
        self,
        controller: StalenessController | None,
        *,
        buffer: StalenessBuffer,
        pace: PublishPace,
        ledger: Ledger,
        is_applied: bool,
        log: logging.Logger,
    ) -> None:
        """Join the parts.

        Args:
            controller: which proposes the bound; None for one that stays as it is.
            buffer: whose bound for new leases follows it.
            pace: whose period follows it.
            ledger: the journal, open.
            is_applied: whether it is followed at all.
            log: where to tell decisions.
        """
        self._controller = controller
        self._buffer = buffer
        self._pace = pace
        self._ledger = ledger
        self._is_applied = is_applied
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
        if not self._is_applied:
            return False
        self._buffer.admission_staleness = decision.bound
        self._pace.limit(decision.bound)
        return decision.bound < decision.before

    def _tell(self, decision: Decision) -> None:
        self._ledger.append(
            "bound",
            step=decision.step,
            before=decision.before,
            bound=decision.bound,
            cause=decision.cause,
            applied=self._is_applied,
        )
        would = "" if self._is_applied else " would be"
        self._log.info(
            "staleness bound%s %d -> %d: %s", would, decision.before, decision.bound, decision.cause
        )

    def metrics(self) -> dict[str, float]:
        """Return the bound that is proposed, and the one that new leases are granted for."""
        if self._controller is None:
            return {}
        return {
            "staleness/proposed_bound": self._controller.bound,
            "staleness/bound": self._buffer.admission_staleness,
        }


def make_adaptation(
    config: Config,
    *,
    buffer: StalenessBuffer,
    pace: PublishPace,
    ledger: Ledger,
    log: logging.Logger,
) -> Adaptation:
    """Return the adaptation; it does nothing if it is off or there is nothing to choose."""
    section, hard = config.adaptive, config.sync.max_staleness
    most = hard if section.most is None else min(section.most, hard)
    is_applied = section.mode == "on"
    controller = None
    if section.mode != "off" and section.least < most:
        settings = ControlSettings(
            least=section.least,
            most=most,
            ess_low=section.ess_low,
            kl_high=section.kl_high,
            clip_high=section.clip_high,
            patience=section.patience_steps,
        )
        controller = StalenessController(settings)
    if is_applied:
        buffer.admission_staleness = most
        pace.limit(most)
    return Adaptation(
        controller, buffer=buffer, pace=pace, ledger=ledger, is_applied=is_applied, log=log
    )
