"""Record a run's costs, and decide which of its workers are active.

    measure (10 times a second) -> meter, rates, times of broadcasts
    question -> answer (in a thread) -> decision -> ledger, log, plans and leases

The ledger records each decision, and the costs at each step. So a resumed run starts with the
recorded costs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from echo.core.monitoring.status import CostStatus
from echo.core.units import per_million
from echo.fleet.activation import (
    ActivationDecision,
    Question,
    ReviewAnswer,
)
from echo.records.ledger import ActivationChanged, Cost, LedgerQueue, totals_of
from echo.roles.learner import Learner
from echo.runtime.learner.costs.activation import Activation, ActivationSettings, StepTimes
from echo.runtime.learner.costs.meter import CostMeter, spent_before
from echo.runtime.learner.report import Progress, largest
from echo.weights.schedule import PublishPace
from echo.wire.actions import Action
from echo.wire.codec import BYTES_PER_TOKEN

METER_S = 1.0
"""Seconds between two updates of the costs. An update may ask which workers shall be active."""
POLLS_PER_S = 10_000
"""Largest number of worker measurements per second. Because of this limit, each worker of a large
fleet is measured less often than in a small fleet.
"""


class CostControl:
    """Meters the costs of a run, and decides which of its workers are active.

    `activation` is None if all workers are always active.
    """

    def __init__(
        self,
        role: Learner,
        *,
        learner_per_h: float,
        learner_per_gb: float,
        trains_on_all: bool,
        budget_per_run: float | None,
        settings: ActivationSettings | None,
        pace: PublishPace,
        progress: Progress,
        ledger: LedgerQueue,
        now: float,
        log: logging.Logger,
    ) -> None:
        self._role = role
        before = totals_of(ledger.records())
        spent = spent_before(before, now=ledger.now())
        self.activation = None if settings is None else Activation(settings, now=now)
        self._meter = CostMeter(
            learner_per_h=learner_per_h,
            learner_per_gb=learner_per_gb,
            spent=spent,
            now=now,
            bytes_per_token=(
                BYTES_PER_TOKEN if settings is None else settings.upload_bytes_per_token
            ),
        )
        if spent:
            log.info("$%.2f were spent before; they count towards the budget of the run", spent)
        self._pace = pace
        self._progress = progress
        self._ledger = ledger
        self._trains_on_all = trains_on_all
        self._budget_per_run = budget_per_run
        self._log = log
        self.train_s: float | None = None
        """Seconds of the last optimizer step."""
        self._waiting_since: float | None = None
        self._metered_at = self._measured_at = -math.inf
        self._num_tokens_before = before.num_tokens
        self._total_at_step = spent
        self._last_decision = ""
        self.num_enough: int | None = None
        """Number of active workers that the last decision found enough, when it put others on
        standby; None otherwise."""

    # --- watching --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether activation is off and every published version has reached the workers."""
        return self.activation is None and not self._pace.is_awaited

    def measure(self, *, now: float) -> list[Action]:
        """Update the measurements of workers and installations. Return the resulting actions.

        Call this method every POLL_S. While `is_idle` is true, a call every METER_S suffices.
        """
        if self._progress.activity or self._role.is_paused:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        roster = self._role.roster
        if self._pace.is_awaited:
            installed = [member.installed for member in roster.active("worker")]
            self._pace.received(installed, now=now, train_s=self.train_s)
        if self.activation is None or self._role.shutdown.reason is not None:
            return []
        if now < self._measured_at + len(roster.nodes) / POLLS_PER_S:
            return []
        self._measured_at = now
        return self.activation.measure(self._role, now=now)

    def review(self, *, now: float) -> Question | None:
        """Update the costs if METER_S has passed since the last update. Return a question, or None.

        If no question is due, the result is None. A question asks which workers shall be active.
        The caller must answer the question in a thread.
        """
        if now < self._metered_at + METER_S:
            return None
        self._metered_at = now
        self._meter_now(now)
        if self.activation is None or self._role.shutdown.reason is not None:
            return None
        waiting_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        return self.activation.question(self._role, self._pace, waiting_s=waiting_s, now=now)

    def decide(self, question: Question, answer: ReviewAnswer, *, now: float) -> list[Action]:
        """Record the answer to a question that `review` returned. Return the resulting actions.

        If the run has ended, there are no actions.
        """
        if self.activation is None or self._role.shutdown.reason is not None:
            return []
        actions, decision = self.activation.decide(self._role, question, answer, now=now)
        if decision is not None:
            self._record(decision)
        return actions

    def _meter_now(self, now: float) -> None:
        role = self._role
        self._meter.update(role.roster, bytes_sent=role.broadcast.bytes_sent, now=now)

    def _record(self, decision: ActivationDecision) -> None:
        self._last_decision = str(decision)
        is_enough = decision.deactivated and decision.slowdown <= 1
        self.num_enough = decision.num_active if is_enough else None
        self._log.info("activation: %s", self._last_decision)
        fields = asdict(decision)
        self._ledger.append(
            ActivationChanged(
                step=fields.pop("step"),
                cause=fields.pop("cause"),
                activated=fields.pop("activated"),
                deactivated=fields.pop("deactivated"),
                numbers=fields,
            )
        )

    # --- steps -----------------------------------------------------------------------------------

    @property
    def is_spent(self) -> bool:
        """Whether the run has spent activation.budget_per_run."""
        return self._budget_per_run is not None and self._meter.total >= self._budget_per_run

    def set_budget(self, budget_per_run: float) -> None:
        """Set the budget of the run, in $."""
        self._budget_per_run = budget_per_run

    def describe_spent(self, step: int) -> str:
        """Return the log line for a run that ends at `step` because its budget is spent."""
        return (
            f"${self._meter.total:.2f} are spent of activation.budget_per_run = "
            f"${self._budget_per_run:.2f}: the run ends at step {step}; go on with --resume --set "
            "activation.budget_per_run=..."
        )

    def metrics(
        self, row: Mapping[str, Any], *, now: float
    ) -> dict[str, float | Mapping[str, float]]:
        """Record a step from its row of metrics. Return metrics of costs and activation.

        Without prices the result is empty.
        """
        if self.activation is not None:
            times = StepTimes(
                step_s=row["time/step"],
                waited_s=min(row["time/wait_for_batch"], row["time/step"]),
                completion_tokens=row.get("completions/mean_length", 1.0),
                useful_share=1.0 if self._trains_on_all else row.get("groups/useful", 1.0),
            )
            self.activation.stepped(times)
        self._meter_now(now)
        view = self.view()
        if view is None:
            return {}
        self._ledger.append(
            Cost(step=self._role.step, total=round(view.total, 6), per_h=view.per_h)
        )
        metrics: dict[str, float | Mapping[str, float]] = {
            "cost/per_hour": view.per_h,
            "cost/total": view.total,
            "cost/per_step": view.total - self._total_at_step,
            "cost/by_node": largest(self._meter.take_by_node()),
            "cost/standby_per_hour": view.standby_per_h,
            "cost/unconfirmed_per_hour": view.unconfirmed_per_h,
            "workers/active": view.num_active,
            "workers/standby": view.num_standby,
        }
        self._total_at_step = view.total
        if view.per_million_tokens is not None:
            metrics["cost/per_million_tokens"] = view.per_million_tokens
        prediction = None if self.activation is None else self.activation.prediction
        if prediction is not None:
            metrics["activation/rate"] = prediction.rate
            metrics["activation/required_rate"] = prediction.required
            metrics["activation/predicted_idle"] = prediction.idle_share
        return metrics

    def view(self) -> CostStatus | None:
        """Return the costs for the live view; None if no machine has a price."""
        meter = self._meter
        if not meter.has_prices:
            return None
        num_tokens = self._num_tokens_before + self._progress.num_accepted_tokens
        workers = self._role.roster.members("worker")
        num_standby = sum(member.is_resting for member in workers)
        return CostStatus(
            per_h=meter.machines_per_h + meter.traffic_per_h,
            total=meter.total,
            per_million_tokens=per_million(meter.total, num_tokens),
            standby_per_h=meter.standby_per_h,
            unconfirmed_per_h=meter.unconfirmed_per_h,
            budget_per_run=self._budget_per_run,
            num_active=len(workers) - num_standby,
            num_standby=num_standby,
            decision=self._last_decision,
        )
