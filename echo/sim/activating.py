"""Activation and costs of a simulated run.

What `runtime/learner/cost.py` is in a process: it feeds the measurements to the same `Activation`
and `CostMeter`, asks their questions and carries out their decisions. Only the time in which an
answer is computed is left out.
"""

from __future__ import annotations

from echo.roles.learner import Learner
from echo.runtime.learner.cost import (
    LOST_COUNTS_FOR_S,
    Activation,
    ActivationSettings,
    CostMeter,
    StepTimes,
)
from echo.sim.records import BillRecord, History
from echo.sim.scenario import ActivationRule, Scenario
from echo.weights.schedule import PublishPace
from echo.wire.actions import Action

LOOK_S = 1.0
"""Between looks at costs and workers, as in `runtime/learner/cost.py`."""
WORKERS_PER_S = 2000.0
"""Larger fleets are looked at less often, so that looking costs no more."""


class Activating:
    """Watches the workers of one start of the learner."""

    def __init__(
        self,
        rule: ActivationRule,
        activation: Activation,
        meter: CostMeter,
        session: Learner,
        *,
        pace: PublishPace,
        history: History,
    ) -> None:
        """Join the parts.

        Args:
            rule: what the configuration says.
            activation: decides.
            meter: counts.
            session: the learner's.
            pace: knows what broadcasts take.
            history: takes down bills and decisions.
        """
        self.meter = meter
        self._rule = rule
        self._activation = activation
        self._session = session
        self._pace = pace
        self._history = history
        self._num_groups = self._num_useful = 0

    @property
    def look_s(self) -> float:
        """Seconds until the next look."""
        return max(LOOK_S, len(self._session.roster.nodes) / WORKERS_PER_S)

    @property
    def is_spent(self) -> bool:
        """Whether the budget of the run is spent."""
        return self.meter.total >= self._rule.budget_per_run

    def look(self, *, waiting_s: float, now: float) -> list[Action]:
        """Measure, and change what is to be changed.

        Args:
            waiting_s: how long the learner has been waiting for groups.
            now: the present.
        """
        activation, session = self._activation, self._session
        self._count(now)
        actions = activation.look(session, now=now)
        question = activation.question(
            session,
            publish_period=self._pace.period,
            broadcast_s=self._pace.broadcast_s,
            waiting_s=waiting_s,
            now=now,
        )
        if question is None:
            return actions
        changes, decision = activation.decide(session, question, question.solve(), now=now)
        if decision is not None:
            self._history.decisions.append((now, decision))
        return [*actions, *changes]

    def _count(self, now: float) -> None:
        sent = self._session.broadcast.bytes_sent
        self.meter.update(self._session.roster, bytes_sent=sent, now=now)

    def arrived(self, *, is_useful: bool) -> None:
        """Note that a group was delivered."""
        self._num_groups += 1
        self._num_useful += is_useful

    def stepped(
        self, *, step_s: float, waited_s: float, completion_tokens: float, now: float
    ) -> None:
        """Take the times of a step and the mean length of its completions."""
        times = StepTimes(
            step_s=step_s,
            waited_s=waited_s,
            completion_tokens=completion_tokens,
            useful_share=self._num_useful / self._num_groups if self._num_groups else 1.0,
        )
        self._num_groups = self._num_useful = 0
        self._activation.stepped(times)
        self._count(now)
        bill, members = self.meter.bill(), self._session.roster.members("worker")
        num_standby = sum(member.is_standby for member in members)
        self._history.bills.append(
            BillRecord(
                time_s=now,
                per_h=bill.per_h,
                standby_per_h=bill.standby_per_h,
                total=bill.total,
                num_active=len(members) - num_standby,
                num_standby=num_standby,
            )
        )


def make_activating(
    scenario: Scenario,
    session: Learner,
    *,
    scale: float,
    spent: float,
    pace: PublishPace,
    history: History,
    now: float,
) -> Activating | None:
    """Return what watches the workers; None if the scenario does not ask for it.

    Args:
        scenario: what is simulated.
        session: the learner's.
        scale: true bytes that a byte of a simulated version stands for; prices are per so many.
        spent: $ before this start of the learner.
        pace: knows what broadcasts take.
        history: takes down bills and decisions.
        now: the present.
    """
    rule, job = scenario.activation, scenario.job
    if rule is None:
        return None
    token_bytes = job.upload_bytes_per_token / scale
    settings = ActivationSettings(
        groups_per_step=job.groups_per_step,
        group_size=job.group_size,
        max_completion_tokens=max(1, round(job.max_completion_tokens)),
        margin=rule.margin,
        min_dwell_s=rule.min_dwell_s,
        budget_per_h=rule.budget_per_h,
        upload_bytes_per_token=token_bytes,
    )
    meter = CostMeter(
        learner_per_h=job.learner_price_per_h,
        learner_per_gb=session.settings.site.price_per_gb,
        spent=spent,
        now=now,
        bytes_per_token=token_bytes,
    )
    activation = Activation(settings, now=now)
    return Activating(rule, activation, meter, session, pace=pace, history=history)


def spent_before(meter: CostMeter, *, away_s: float) -> float:
    """Return $ that count before the learner's next start: machines bill while it is away."""
    return meter.total + min(away_s, LOST_COUNTS_FOR_S) / 3600 * meter.bill().per_h
