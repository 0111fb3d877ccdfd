"""Activation: decide which workers are active within the budget, and which are on standby.

    measure (often) -> measured rates, times, idle share
    question (once in a dwell) -> answer, in a thread -> decision -> StandbyChosen

The question is which workers shall be active (`echo.fleet.activation`). It is asked once in a
dwell, and immediately after an active worker is gone. A dwell is the longest of three times:
`min_dwell_s`, the time of MIN_STEPS steps, and the time that the slowest active worker takes for a
group. The active workers stay the same during a dwell. Meanwhile the effect of the last change is
measured, and workers without a measured rate are tried.

A worker that joins begins to generate. If the budget cannot also pay for this worker, it goes on
standby until the next question.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean, median

from echo.config.schema import ActivationSection, BatchSection, SamplingSection, SyncSection
from echo.fleet.activation import (
    ActivationDecision,
    Question,
    ReviewAnswer,
    SetPrediction,
)
from echo.fleet.job import Job
from echo.fleet.market import UNLIMITED, Offer
from echo.roles.learner import Learner, StandbyChosen
from echo.roles.members import Member
from echo.runtime.learner.costs.measurements import Measurements
from echo.runtime.learner.costs.throughput import MIN_REPORTS
from echo.weights.schedule import PublishPace
from echo.wire.actions import Action, Note
from echo.wire.codec import BYTES_PER_TOKEN

RESTART_S = 300.0
"""Assumed seconds to rent and start a new machine, and to send the weights to it."""
MIN_STEPS = 3
"""Number of steps before `train_s` is known, and smallest number of steps between two questions.

The first steps include start-up.
"""
MAX_STEPS = 8
"""Number of recent steps over which times are averaged."""
MIN_DWELL_S = 120.0
"""Smallest number of seconds between two questions. A worker fetches the weights in much less time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """The settings of activation, from the configuration."""

    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    margin: float
    budget_per_h: float
    """Largest cost of workers and traffic, $ per hour; infinite if there is no limit."""
    min_dwell_s: float = MIN_DWELL_S
    upload_bytes_per_token: float = BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Measurements of one optimizer step."""

    step_s: float
    waited_s: float
    """Seconds of `step_s` in which the learner waited for groups."""
    completion_tokens: float
    useful_share: float


def activation_settings(
    section: ActivationSection, sync: SyncSection, batch: BatchSection, sampling: SamplingSection
) -> ActivationSettings | None:
    """Return the settings of activation; None if activation is off or sync.mode is "pull"."""
    if section.mode == "off" or sync.mode == "pull":
        return None
    return ActivationSettings(
        groups_per_step=batch.groups_per_step,
        group_size=batch.group_size,
        max_completion_tokens=sampling.max_completion_tokens,
        margin=section.margin,
        budget_per_h=math.inf if section.budget_per_h is None else section.budget_per_h,
    )


class Activation:
    """Measures steps and workers, and decides which workers are active."""

    def __init__(self, settings: ActivationSettings, *, now: float) -> None:
        self.settings = settings
        self.prediction: SetPrediction | None = None
        """The last answer's forecast for the active workers; None before the first answer."""
        self.measured = Measurements()
        """Measured rates of workers and times of broadcasts."""
        self.steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self._train_s: deque[float] = deque(maxlen=MAX_STEPS)
        """Seconds without waits of the newest steps whose batch had a training signal."""
        self._steps_since_change = 0
        self._asked_at = now
        self._group_s = 0.0
        """Seconds that a group takes on the slowest active worker, as of the last answer."""
        self._active: frozenset[str] = frozenset()
        """Names of the active workers, as of the last question or decision."""

    # --- measuring -------------------------------------------------------------------------------

    def measure(self, role: Learner, *, now: float) -> list[Action]:
        """Update the measurements of the workers.

        Return actions that put new workers on standby if the budget cannot pay for them.
        """
        new = self.measured.update(role, now=now)
        return [action for member in new for action in self._welcome(role, member, now)]

    def _welcome(self, role: Learner, member: Member, now: float) -> list[Action]:
        """Return the actions for a new worker.

        If the budget cannot pay for the worker, an action puts it on standby. If the worker states
        no price, an action logs a warning.
        """
        cap = self.settings.budget_per_h
        if math.isinf(cap):
            return []
        if member.price.per_h is None:
            text = (
                f"{member.node_id} states no price and counts as free, so activation.budget_per_h "
                "cannot see it; set worker.price_per_h there"
            )
            return [Note("warning", text)]
        workers = role.roster.members("worker")
        cost = sum(m.price.per_h or 0.0 for m in workers if not m.is_standby)
        if cost <= cap:
            return []
        standby = {m.node_id for m in workers if m.is_standby} | {member.node_id}
        text = (
            f"{member.node_id} stands by: with it the active workers would cost ${cost:.2f}/h, "
            f"activation.budget_per_h is ${cap:.2f}"
        )
        return [Note("info", text), *role.handle(StandbyChosen(frozenset(standby)), now=now)]

    def stepped(self, times: StepTimes) -> None:
        """Record the measured times of an optimizer step."""
        self.steps.append(times)
        if times.useful_share > 0:  # otherwise nothing is computed, and a step takes no time
            self._train_s.append(times.step_s - times.waited_s)
        self._steps_since_change += 1

    @property
    def train_s(self) -> float | None:
        """Median seconds of a step without waits; None before MIN_STEPS steps with a signal."""
        return median(self._train_s) if len(self._train_s) >= MIN_STEPS else None

    def idle_share(self, waiting_s: float = 0.0) -> float:
        """Return the share of time that the learner has waited since the active workers changed.

        The share is 1 until a step has ended after this change. `waiting_s` is the length of the
        present wait, seconds.
        """
        recent = list(self.steps)[-self._steps_since_change :] if self._steps_since_change else []
        step_s = sum(times.step_s for times in recent) + waiting_s
        waited_s = sum(times.waited_s for times in recent) + waiting_s
        return waited_s / step_s if step_s > 0 else 1.0

    @property
    def dwell_s(self) -> float:
        """Seconds between two questions."""
        step_s = fmean(times.step_s for times in self.steps) if self.steps else 0.0
        return max(self.settings.min_dwell_s, MIN_STEPS * step_s, self._group_s)

    # --- asking ----------------------------------------------------------------------------------

    def question(
        self, role: Learner, pace: PublishPace, *, waiting_s: float, now: float
    ) -> Question | None:
        """Return a question that asks which workers shall be active; None if no question is due.

        `waiting_s` is the length of the learner's present wait, seconds.
        """
        # The operator's choice for a worker stands. A worker that is set aside delivers nothing
        # that counts, whatever rate and price it states. In a large fleet a worker may not be
        # measured yet. Then it takes part in the next question.
        members = [
            member
            for member in role.roster.members("worker")
            if member.node_id in self.measured.workers
            and not member.worker.is_set_aside
            and member.hold is None
        ]
        train_s = self.train_s
        if train_s is None or not any(member.price.per_h for member in members):
            return None
        active = frozenset(member.node_id for member in members if not member.is_standby)
        has_left = not self._active <= active
        if now < self._asked_at + self.dwell_s and not has_left:
            return None
        if has_left:
            self._steps_since_change = 0
        rates = self._rates(members)
        if not rates:
            return None
        self._asked_at, self._active = now, active
        max_staleness = role.settings.leases.max_staleness
        return Question(
            workers=tuple(self._worker(role, each, rates[each.node_id]) for each in members),
            job=self._job(role, train_s, pace.period),
            links=self.measured.links(role, members),
            active=active,
            untried=frozenset(m.node_id for m in members if self._is_untried(m)),
            ready=frozenset(
                m.node_id
                for m in members
                if m.installed is not None and role.step - m.installed.step <= max_staleness
            ),
            idle_share=self.idle_share(waiting_s),
            periods=tuple(pace.choices),
        )

    def _is_untried(self, member: Member) -> bool:
        state = self.measured.workers[member.node_id]
        return state.throughput.tokens_per_s is None and state.active_s < self.dwell_s

    def _rates(self, members: Collection[Member]) -> dict[str, float]:
        """Return each worker's rate, tokens per second; empty if no worker has a measured rate.

        * A worker with enough reports has a measured rate.
        * An untried worker (without a measured rate, and active for less than a dwell) gets the
          mean of the measured rates.
        * For any other worker with a report, the rate is estimated from its reports.
        * Any other worker gets the mean of the measured rates, but at most the rate at which it
          would have sampled MIN_REPORTS groups in its loaded seconds.
        """
        times = self.measured.workers
        found = {m.node_id: times[m.node_id].throughput.tokens_per_s for m in members}
        known = [rate for rate in found.values() if rate is not None]
        if not known:
            return {}
        groups = MIN_REPORTS * self.settings.group_size * self._completion_tokens
        rates = {}
        for member in members:
            name, rate, mean = member.node_id, found[member.node_id], fmean(known)
            if rate is None and not self._is_untried(member):
                state = self.measured.workers[name]
                rate = state.throughput.early_tokens_per_s
                rate = rate or min(mean, groups / max(state.loaded_s, 1e-9))
            rates[name] = mean if rate is None else rate
        return rates

    @property
    def _completion_tokens(self) -> float:
        return max(1.0, fmean(times.completion_tokens for times in self.steps))

    def _job(self, role: Learner, train_s: float, publish_period: int) -> Job:
        settings, steps = self.settings, self.steps
        tokens = self._completion_tokens
        bound = min(role.settings.leases.max_staleness, role.buffer.admission_staleness)
        return Job(
            groups_per_step=settings.groups_per_step,
            group_size=settings.group_size,
            useful_share=min(1.0, max(0.01, fmean(times.useful_share for times in steps))),
            max_staleness=bound,
            publish_period=publish_period,
            train_s=train_s,
            completion_tokens=tokens,
            max_completion_tokens=max(tokens, settings.max_completion_tokens),
            version_bytes=role.plans.planner.payload_bytes,
            chunk_bytes=min(role.plans.planner.chunk_bytes, role.plans.planner.payload_bytes),
            upload_bytes_per_token=settings.upload_bytes_per_token,
            margin=settings.margin,
            budget_per_h=settings.budget_per_h,
        )

    def _worker(self, role: Learner, member: Member, rate: float) -> Offer:
        stats, price = member.stats, member.price
        state = self.measured.workers[member.node_id]
        # An engine that does not scale samples its groups as fast as at the present load only while
        # it has no more of them.
        share = state.load ** (1 - state.scaling) if state.load else 1.0
        places = max(1, member.worker.capacity // 2) * self.settings.group_size
        down = role.plans.planner.downlink_limits.get(member.node_id)
        return Offer(
            name=member.node_id,
            tokens_per_s=rate,
            concurrency=max(1, math.ceil(share * places)),
            price_per_h=price.per_h or 0.0,
            price_per_gb=price.per_gb,
            losses_per_h=price.losses_per_h,
            restart_s=RESTART_S,
            region=member.node.region,
            can_listen=member.node.advertise is not None,
            down_bytes_per_s=down or UNLIMITED,
            up_bytes_per_s=stats.uplink_bytes_per_s or UNLIMITED,
        )

    # --- carrying out ----------------------------------------------------------------------------

    def decide(
        self,
        role: Learner,
        question: Question,
        answer: ReviewAnswer,
        *,
        now: float,
    ) -> tuple[list[Action], ActivationDecision | None]:
        """Return the actions that carry out an answer, and a description of the decision.

        If nothing changes, there are no actions and the decision is None. Only members that were
        part of the question are changed.
        """
        self.prediction = answer.after
        timed = answer.active - question.untried
        self._group_s = max(
            (w.group_latency_s(question.job) for w in question.workers if w.name in timed),
            default=0.0,
        )
        members = {m.node_id: m for m in role.roster.members("worker")}
        asked = {worker.name for worker in question.workers}
        known = asked & members.keys() & self.measured.workers.keys()
        deactivated = sorted(n for n in known - answer.active if not members[n].is_standby)
        activated = sorted(n for n in known & answer.active if members[n].is_standby)
        if not deactivated and not activated:
            return [], None
        standby = {n for n, m in members.items() if m.is_standby} - set(activated) | set(
            deactivated
        )
        num_standby = sum(members[name].hold != "drain" for name in standby)
        decision = ActivationDecision(
            step=role.step,
            cause=answer.cause,
            activated=tuple(activated),
            deactivated=tuple(deactivated),
            num_active=len(members) - num_standby,
            num_standby=num_standby,
            before=answer.before,
            after=answer.after,
            train_s=question.job.train_s,
            idle_share=question.idle_share,
            slowdown=answer.choice.slowdown,
        )
        self.measured.changed(activated, now=now)
        self._steps_since_change = 0
        self._active = answer.active & members.keys()
        return role.handle(StandbyChosen(frozenset(standby)), now=now), decision
