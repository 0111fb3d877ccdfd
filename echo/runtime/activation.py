"""Costs and activation in the learner's process: measured, decided off the loop, written down.

    look (10 times a second) -> meter, rates, times of broadcasts
    question -> answer (in a thread) -> decision -> journal, log, plans and leases

Records in the journal:

    activation  step, cause, activated, parked, and the numbers before and after
    cost        step, total, per_h            with each step, so that a resume goes on counting
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echo.config.schema import Config
from echo.core.metrics import CostView
from echo.fleet.activation import ActivationDecision, Question, ReviewAnswer
from echo.protocol.activation import Activation, ActivationSettings, StepTimes
from echo.protocol.learner_session import LearnerSession
from echo.protocol.metering import LOST_COUNTS_FOR_S, Meter
from echo.records.ledger import Ledger, read_records
from echo.runtime.progress import Progress
from echo.runtime.threads import Pool
from echo.weights.schedule import PublishPace
from echo.wire.actions import Action

LOOK_S = 0.1
"""Seconds between looks at who holds the newest version: how finely a broadcast is timed."""
METER_S = 1.0
"""Seconds between looks at costs, and at whether anything is to be decided."""
LOOKS_PER_S = 10_000
"""Workers looked at per second at most; of larger fleets each is looked at less often."""


class Activating:
    """Watches the workers of a run, its costs, and which of them are needed."""

    def __init__(
        self,
        session: LearnerSession,
        activation: Activation | None,
        meter: Meter,
        *,
        pace: PublishPace,
        progress: Progress,
        ledger: Ledger,
        trains_on_all: bool,
        budget_per_run: float | None,
        log: logging.Logger,
    ) -> None:
        """Join the parts; `run` watches.

        Args:
            session: the learner's conversation.
            activation: who is needed; None if nobody is to be chosen.
            meter: what it costs.
            pace: is told when versions have arrived.
            progress: says whether the learner trains just now, or waits for groups.
            ledger: the journal, open.
            trains_on_all: whether groups without a gradient count towards a step.
            budget_per_run: $ after which the run is to end; None for no limit.
            log: where to tell decisions.
        """
        self._session = session
        self._activation = activation
        self._meter = meter
        self._pace = pace
        self._progress = progress
        self._ledger = ledger
        self._trains_on_all = trains_on_all
        self._budget_per_run = budget_per_run
        self._log = log
        self.train_s: float | None = None
        """Seconds of the last optimizer step."""
        self._waiting_since: float | None = None
        self._metered_at = self._looked_at = -math.inf
        self._total_at_start = meter.total
        self._num_tokens = 0.0
        self._total_at_step = meter.total
        self._last_decision = ""

    # --- watching --------------------------------------------------------------------------------

    async def run(
        self,
        perform: Callable[[Iterable[Action]], None],
        clock: Callable[[], float],
        *,
        wake: Callable[[], None],
        pool: Pool,
    ) -> None:
        """Look again and again, until the node ends.

        Args:
            perform: carries out the session's actions.
            clock: the loop's, seconds.
            wake: ends the learner's waiting, for when the budget is spent.
            pool: where questions are answered.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            now = clock()
            if self._progress.activity:
                self._waiting_since = None
            elif self._waiting_since is None:
                self._waiting_since = now
            workers = self._session.roster.active("worker")
            installed = [member.installed for member in workers]
            self._pace.received(installed, now=now, train_s=self.train_s)
            if now >= self._looked_at + len(workers) / LOOKS_PER_S:
                self._looked_at = now
                self._look(perform, now)
            if now < self._metered_at + METER_S:
                continue
            self._metered_at = now
            self._meter_now(now)
            if self.is_spent:
                wake()
            await self._review(perform, clock, pool)

    def _meter_now(self, now: float) -> None:
        session = self._session
        self._meter.update(session.roster, bytes_sent=session.broadcast.bytes_sent, now=now)

    def _look(self, perform: Callable[[Iterable[Action]], None], now: float) -> None:
        if self._activation is not None and self._session.finish_reason is None:
            perform(self._activation.look(self._session, now=now))

    async def _review(
        self,
        perform: Callable[[Iterable[Action]], None],
        clock: Callable[[], float],
        pool: Pool,
    ) -> None:
        activation, session, now = self._activation, self._session, clock()
        if activation is None or session.finish_reason is not None:
            return
        waited_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        question = activation.question(
            session,
            publish_period=self._pace.period,
            broadcast_s=self._pace.broadcast_s,
            waiting_s=waited_s,
            now=now,
        )
        if question is None:
            return
        answer = await pool.run(question.solve)
        if session.finish_reason is None:
            perform(self._decide(activation, question, answer, clock()))

    def _decide(
        self, activation: Activation, question: Question, answer: ReviewAnswer, now: float
    ) -> list[Action]:
        actions, decision = activation.decide(self._session, question, answer, now=now)
        if decision is not None:
            self._tell(decision)
        return actions

    def _tell(self, decision: ActivationDecision) -> None:
        self._last_decision = str(decision)
        self._log.info("activation: %s", self._last_decision)
        self._ledger.append("activation", **_json(asdict(decision)))

    # --- steps -----------------------------------------------------------------------------------

    @property
    def is_spent(self) -> bool:
        """Whether the budget of the run is spent."""
        return self._budget_per_run is not None and self._meter.total >= self._budget_per_run

    def describe_spent(self, step: int) -> str:
        """Say that the budget is spent, and how to go on, in one line."""
        return (
            f"${self._meter.total:.2f} are spent of activation.budget_per_run = "
            f"${self._budget_per_run:.2f}: the run ends at step {step}; go on with --resume --set "
            "activation.budget_per_run=..."
        )

    def metrics(self, row: Mapping[str, Any], *, now: float) -> dict[str, float]:
        """Take the row of a step that was just made; return what it cost.

        Args:
            row: its times, lengths and rates.
            now: the loop's clock, seconds.
        """
        if self._activation is not None:
            times = StepTimes(
                step_s=row["time/step"],
                waited_s=min(row["time/wait_for_batch"], row["time/step"]),
                completion_tokens=row.get("completions/mean_length", 1.0),
                useful_share=1.0 if self._trains_on_all else row.get("groups/useful", 1.0),
            )
            self._activation.stepped(times)
        self._meter_now(now)
        if not self._meter.has_prices:
            return {}
        self._num_tokens += row["perf/tokens_per_s"] * row["time/step"]
        bill, session = self._meter.bill(), self._session
        self._ledger.append("cost", step=session.step, total=round(bill.total, 6), per_h=bill.per_h)
        metrics = {
            "cost/per_hour": bill.per_h,
            "cost/total": bill.total,
            "cost/per_step": bill.total - self._total_at_step,
            "cost/standby_per_hour": bill.standby_per_h,
            "cost/unconfirmed_per_hour": bill.unconfirmed_per_h,
            "workers/active": len(session.roster.active("worker")),
            "workers/standby": self._num_standby,
        }
        self._total_at_step = bill.total
        per_token = self._per_million_tokens
        if per_token is not None:
            metrics["cost/per_million_tokens"] = per_token
        outlook = None if self._activation is None else self._activation.outlook
        if outlook is not None:
            metrics["activation/rate"] = outlook.rate
            metrics["activation/required_rate"] = outlook.required
            metrics["activation/predicted_idle"] = outlook.idle_share
        return metrics

    @property
    def _num_standby(self) -> int:
        return sum(member.is_standby for member in self._session.roster.members("worker"))

    @property
    def _per_million_tokens(self) -> float | None:
        if self._num_tokens <= 0:
            return None
        return (self._meter.total - self._total_at_start) / self._num_tokens * 1e6

    def view(self) -> CostView | None:
        """Return what the live view shows; None where nothing has a price."""
        if not self._meter.has_prices:
            return None
        bill = self._meter.bill()
        return CostView(
            per_h=bill.per_h,
            total=bill.total,
            per_million_tokens=self._per_million_tokens,
            standby_per_h=bill.standby_per_h,
            unconfirmed_per_h=bill.unconfirmed_per_h,
            budget_per_run=self._budget_per_run,
            num_active=len(self._session.roster.active("worker")),
            num_standby=self._num_standby,
            decision=self._last_decision,
        )


def _json(value: Any) -> Any:
    """Return a value as JSON has it: without infinity, with short numbers."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def spent_before(ledger: Path, *, now: float) -> float:
    """Return $ that a run has cost before it is resumed.

    Machines went on billing while the learner was away; for how much of that time is not known,
    and LOST_COUNTS_FOR_S of it count at most.

    Args:
        ledger: the journal.
        now: unix time, seconds.
    """
    last: Mapping[str, Any] | None = None
    for _, record in read_records(ledger):
        if record["kind"] == "cost":
            last = record
    if last is None:
        return 0.0
    away_s = min(max(0.0, now - last["at"]), LOST_COUNTS_FOR_S)
    return float(last["total"] + last["per_h"] * away_s / 3600)


def make_activating(
    config: Config,
    session: LearnerSession,
    *,
    pace: PublishPace,
    progress: Progress,
    ledger: Ledger,
    spent: float,
    now: float,
    log: logging.Logger,
) -> Activating:
    """Return what watches a run's workers and costs.

    Args:
        config: the learner's.
        session: its conversation.
        pace: when to publish.
        progress: running totals.
        ledger: the journal, open.
        spent: $ before a resume.
        now: the loop's clock, seconds.
        log: where to tell decisions.
    """
    section = config.activation
    activation = None
    if section.mode != "off" and config.sync.mode != "pull":
        settings = ActivationSettings(
            groups_per_step=config.batch.groups_per_step,
            group_size=config.batch.group_size,
            max_completion_tokens=config.sampling.max_completion_tokens,
            margin=section.margin,
            budget_per_h=math.inf if section.budget_per_h is None else section.budget_per_h,
        )
        activation = Activation(settings, now=now)
    meter = Meter(
        learner_per_h=config.learner.price_per_h or 0.0,
        learner_per_gb=config.network.price_per_gb,
        spent=spent,
        now=now,
    )
    if spent:
        log.info("$%.2f were spent before; they count towards the budget of the run", spent)
    return Activating(
        session,
        activation,
        meter,
        pace=pace,
        progress=progress,
        ledger=ledger,
        trains_on_all=config.batch.keep_zero_variance,
        budget_per_run=section.budget_per_run,
        log=log,
    )


def resumed_spending(ledger: Ledger, *, resume: bool) -> float:
    """Return $ that count before this start."""
    return spent_before(ledger.path, now=time.time()) if resume else 0.0
