"""Which workers generate and which stand by, while the run goes on.

    look (often) -> measured rates, times, idle share
    question (when something has drifted) -> answer, in a thread -> decision -> set_standby

A question (`echo.fleet.activation`) is asked when a worker comes or goes, when a rate, a price or
the learner's step has moved by DRIFT, when the learner waits, or while a change is still to be
made. While answers change nothing and nothing drifts, questions come more and more seldom.

A worker that was activated stays so for `min_dwell_s` before it is dropped for its cost, twice as
long each time that it was dropped and soon missed. One that joins generates, so that its rate is
seen; until then it is taken for as fast as the mean of the others. With it above the budget it
stands by from the beginning.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import fmean, median

from echo.fleet.activation import (
    IDLE_TOLERANCE,
    UNLIMITED,
    ActivationDecision,
    Links,
    Outlook,
    PricedWorker,
    Question,
    ReviewAnswer,
)
from echo.fleet.job import Job
from echo.leases.dispatch import Throughput
from echo.protocol.learner_session import LearnerSession
from echo.protocol.membership import Member
from echo.wire.actions import Action, Note
from echo.wire.codec import BYTES_PER_TOKEN

DRIFT = 0.2
"""Change of a rate or time, as a share, that asks for another answer."""
SURPRISE = 0.05
"""By how much the learner may wait more than predicted before the rates count as too high."""
RECOVERY = 0.2
"""By how much of the difference to 1 the correction of the rates returns with each question."""
CORRECTED = 0.9
"""Below this correction the rates are asked about again once the learner waits no more."""
RESTART_S = 300.0
"""Until a lost machine is replaced: renting one, starting it and catching up take minutes."""
MIN_STEPS = 3
"""Steps before T_train counts as known; the first ones contain start-up."""
MAX_STEPS = 8
"""Steps over which times are averaged."""
MAX_DOUBLINGS = 5
"""Of a worker's dwell, and of the time between questions that change nothing."""
MAX_PENDING_DOUBLINGS = 2
"""Of that time while a change waits for something, such as the end of a dwell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """What the configuration says."""

    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    margin: float
    budget_per_h: float
    """$ per hour for workers and traffic; infinite without a cap."""
    min_saving: float = 0.05
    """Share of the cost that another set must save: rates are measured to some 5 %."""
    min_dwell_s: float = 120.0
    """How long a worker stays active at least: some times what it needs for the weights."""
    review_s: float = 10.0
    """Between two questions at least: an answer takes seconds, and no fleet changes faster."""
    upload_bytes_per_token: float = BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What one optimizer step has shown."""

    step_s: float
    waited_s: float
    """Of `step_s`."""
    completion_tokens: float
    useful_share: float


@dataclass(slots=True)
class _State:
    """What is kept of a worker."""

    incarnation: str
    capability: Throughput
    since: float
    """When it became active, or was put on standby."""
    num_doublings: int = 0


class Activation:
    """Measures, asks, and carries out."""

    def __init__(self, settings: ActivationSettings, *, now: float) -> None:
        """Start with every worker active."""
        self.settings = settings
        self.outlook: Outlook | None = None
        """Of what is active, by the last answer."""
        self._states: dict[str, _State] = {}
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self._steps_since_change = 0
        self._inputs: dict[str, float] = {}
        """What the last question for drift was asked about, by name."""
        self._asked_at = now
        self._num_idle_answers = 0
        self._is_pending = False
        self._trust = 1.0
        """By what the rates are multiplied: below 1 if the learner waited more than predicted."""

    # --- measuring -------------------------------------------------------------------------------

    def look(self, session: LearnerSession, *, now: float) -> list[Action]:
        """Take what workers have done since the last call; call it at least with each heartbeat.

        Args:
            session: the learner's.
            now: the present.
        """
        members = session.roster.members("worker")
        actions: list[Action] = []
        for member in members:
            state = self._states.get(member.node_id)
            if state is None or state.incarnation != member.incarnation:
                capability = Throughput(tokens_sampled=member.num_sampled, now=now)
                self._states[member.node_id] = _State(member.incarnation, capability, now)
                actions += self._welcome(session, member, now)
                continue
            slots = max(1, member.worker.capacity // 2)
            state.capability.look(
                load=session.leases.num_leases(member.node_id) / slots,
                tokens_sampled=member.num_sampled,
                now=now,
            )
        if len(self._states) > len(members):
            present = {member.node_id for member in members}
            self._states = {name: s for name, s in self._states.items() if name in present}
        return actions

    def _welcome(self, session: LearnerSession, member: Member, now: float) -> list[Action]:
        """Have a worker stand by that would be too dear; warn of one without a price."""
        cap = self.settings.budget_per_h
        if math.isinf(cap):
            return []
        if member.price.per_h is None:
            text = (
                f"{member.node_id} states no price and counts as free, so activation.budget_per_h "
                "cannot see it; set worker.price_per_h there"
            )
            return [Note("warning", text)]
        workers = session.roster.members("worker")
        cost = sum(m.price.per_h or 0.0 for m in workers if not m.is_standby)
        if cost <= cap:
            return []
        standby = {m.node_id for m in workers if m.is_standby} | {member.node_id}
        text = (
            f"{member.node_id} stands by: with it the active workers would cost ${cost:.2f}/h, "
            f"activation.budget_per_h is ${cap:.2f}"
        )
        return [Note("info", text), *session.set_standby(standby, now=now)]

    def stepped(self, times: StepTimes) -> None:
        """Take the times of a step."""
        self._steps.append(times)
        self._steps_since_change += 1

    @property
    def train_s(self) -> float | None:
        """T_train: what a step takes without waiting; None before MIN_STEPS steps."""
        if len(self._steps) < MIN_STEPS:
            return None
        return median(times.step_s - times.waited_s for times in self._steps)

    def idle_share(self, waiting_s: float = 0.0) -> float:
        """Return the share of the time that the learner has waited lately, since the last change.

        Args:
            waiting_s: seconds that it has been waiting now.
        """
        recent = list(self._steps)[-self._steps_since_change :] if self._steps_since_change else []
        step_s = sum(times.step_s for times in recent) + waiting_s
        waited_s = sum(times.waited_s for times in recent) + waiting_s
        return waited_s / step_s if step_s > 0 else 0.0

    # --- asking ----------------------------------------------------------------------------------

    def question(
        self,
        session: LearnerSession,
        *,
        publish_period: int,
        broadcast_s: float | None,
        waiting_s: float,
        now: float,
    ) -> Question | None:
        """Return what is to be answered now, if anything is.

        Args:
            session: the learner's.
            publish_period: kappa.
            broadcast_s: what the last broadcast has taken; None while that is not known.
            waiting_s: seconds that the learner has been waiting for groups now.
            now: the present.
        """
        # Who is set aside delivers nothing that counts, whatever rate and price it states.
        members = [m for m in session.roster.members("worker") if not m.worker.is_set_aside]
        train_s = self.train_s
        is_too_soon = now < self._asked_at + self.settings.review_s
        if is_too_soon or not train_s or not any(member.price.per_h for member in members):
            return None
        rates = self._rates(members)
        if not rates or not self._is_due(members, rates, train_s, waiting_s, now):
            return None
        self._asked_at = now
        idle_share = self.idle_share(waiting_s)
        job = self._job(session, train_s, publish_period)
        self._learn(job, rates, members)
        return Question(
            workers=tuple(self._worker(session, m, rates[m.node_id]) for m in members),
            job=job,
            links=self._links(session, members, broadcast_s),
            active=frozenset(m.node_id for m in members if not m.is_standby),
            settled=frozenset(m.node_id for m in members if self._is_settled(m, now)),
            ready=frozenset(m.node_id for m in members if _is_ready(m, session)),
            idle_share=idle_share,
            min_saving=self.settings.min_saving,
        )

    def _is_due(
        self,
        members: Iterable[Member],
        rates: dict[str, float],
        train_s: float,
        waiting_s: float,
        now: float,
    ) -> bool:
        """Return whether anything has drifted, or there is something to mend and time to do it."""
        inputs = {f"rate of {name}": rate for name, rate in rates.items()}
        inputs |= {f"price of {m.node_id}": m.price.per_h or 0.0 for m in members}
        inputs["train_s"] = train_s
        if _has_drifted(self._inputs, inputs):
            self._inputs, self._num_idle_answers = inputs, 0
            return True
        has_seen_enough = self._steps_since_change >= MIN_STEPS or waiting_s > 2 * train_s
        is_waiting = has_seen_enough and self.idle_share(waiting_s) > IDLE_TOLERANCE
        most = MAX_PENDING_DOUBLINGS if self._is_pending else MAX_DOUBLINGS
        pause_s = self.settings.review_s * 2 ** min(most, self._num_idle_answers)
        has_cause = self._is_pending or is_waiting or self._trust < CORRECTED
        return has_cause and now >= self._asked_at + pause_s

    def _rates(self, members: Iterable[Member]) -> dict[str, float]:
        """Return tokens per second by worker; empty if nothing is known of any."""
        found = {m.node_id: self._states[m.node_id].capability.tokens_per_s for m in members}
        known = [rate for rate in found.values() if rate is not None]
        if not known:
            return {}
        mean = fmean(known)
        return {name: mean if rate is None else rate for name, rate in found.items()}

    def _learn(self, job: Job, rates: dict[str, float], members: Iterable[Member]) -> None:
        """Correct the rates by what the learner got in steps in which it had to wait for it."""
        active = [rates[m.node_id] for m in members if not m.is_standby]
        estimated = sum(active) / job.completion_tokens
        recent = list(self._steps)[-MIN_STEPS:]
        step_s, waited_s = sum(t.step_s for t in recent), sum(t.waited_s for t in recent)
        is_short = waited_s > (IDLE_TOLERANCE + SURPRISE) * step_s
        if is_short and estimated > 0 and self._steps_since_change >= MIN_STEPS:
            made = job.rollouts_per_step * len(recent) / step_s
            self._trust = min(1.0, max(0.1, made / estimated))
        else:
            self._trust += RECOVERY * (1 - self._trust)

    def _job(self, session: LearnerSession, train_s: float, publish_period: int) -> Job:
        settings, steps = self.settings, self._steps
        tokens = max(1.0, fmean(times.completion_tokens for times in steps))
        bound = min(session.settings.leases.max_staleness, session.buffer.admission_staleness)
        return Job(
            groups_per_step=settings.groups_per_step,
            group_size=settings.group_size,
            useful_share=min(1.0, max(0.01, fmean(times.useful_share for times in steps))),
            max_staleness=bound,
            publish_period=publish_period,
            train_s=train_s,
            completion_tokens=tokens,
            max_completion_tokens=max(tokens, settings.max_completion_tokens),
            version_bytes=session.planning.payload_bytes,
            chunk_bytes=min(session.planning.chunk_bytes, session.planning.payload_bytes),
            upload_bytes_per_token=settings.upload_bytes_per_token,
            margin=settings.margin,
            budget_per_h=settings.budget_per_h,
        )

    def _worker(self, session: LearnerSession, member: Member, rate: float) -> PricedWorker:
        stats, price = member.stats, member.price
        down = session.planning.downlink_limits.get(member.node_id)
        return PricedWorker(
            name=member.node_id,
            tokens_per_s=rate * self._trust,
            concurrency=max(1, member.worker.capacity // 2) * self.settings.group_size,
            price_per_h=price.per_h or 0.0,
            price_per_gb=price.per_gb,
            losses_per_h=price.losses_per_h,
            restart_s=RESTART_S,
            region=member.node.region,
            can_listen=member.node.advertise is not None,
            down_bytes_per_s=down or UNLIMITED,
            up_bytes_per_s=stats.uplink_bytes_per_s or UNLIMITED,
        )

    def _links(
        self, session: LearnerSession, members: Collection[Member], took_s: float | None
    ) -> Links:
        uplink = session.broadcast.uplink_bytes_per_s
        relays = session.roster.members("relay")
        nodes = [member.node for member in (*relays, *members)]
        forecast = session.planning.forecast(nodes, uplink_bytes_per_s=uplink)
        planned = session.planning.topology
        # What coding, decoding and installing add to the forecast.
        overhead_s = max(0.0, took_s - planned.predicted_s) if planned and took_s else 0.0

        def broadcast_s(names: Collection[str]) -> float:
            return forecast([*(relay.node_id for relay in relays), *names]) + overhead_s

        return Links(
            broadcast_s=broadcast_s,
            uplink_bytes_per_s=uplink or UNLIMITED,
            price_per_gb=session.settings.site.price_per_gb,
            relay_regions=frozenset(relay.node.region for relay in relays if relay.node.region),
        )

    def _is_settled(self, member: Member, now: float) -> bool:
        state = self._states[member.node_id]
        dwell_s = self.settings.min_dwell_s * 2**state.num_doublings
        return not member.is_standby and now >= state.since + dwell_s

    # --- carrying out ----------------------------------------------------------------------------

    def decide(
        self,
        session: LearnerSession,
        question: Question,
        answer: ReviewAnswer,
        *,
        now: float,
    ) -> tuple[list[Action], ActivationDecision | None]:
        """Carry out an answer; return the actions, and the decision if anything changes.

        Workers that came meanwhile stay active; of those that left nothing is said.
        """
        self.outlook = answer.after
        members = {m.node_id: m for m in session.roster.members("worker")}
        known = {worker.name for worker in question.workers} & members.keys()
        parked = sorted(n for n in known - answer.active if not members[n].is_standby)
        activated = sorted(n for n in known & answer.active if members[n].is_standby)
        self._is_pending = answer.is_pending
        if not parked and not activated:
            self._num_idle_answers += 1
            return [], None
        self._num_idle_answers = 0
        standby = {n for n, m in members.items() if m.is_standby} - set(activated) | set(parked)
        decision = ActivationDecision(
            step=session.step,
            cause=answer.cause,
            activated=tuple(activated),
            parked=tuple(parked),
            num_active=len(members) - len(standby),
            num_standby=len(standby),
            before=answer.before,
            after=answer.after,
            train_s=question.job.train_s,
            idle_share=question.idle_share,
            slowdown=answer.choice.slowdown,
            is_exact=answer.choice.is_exact,
        )
        for name in [*parked, *activated]:
            state = self._states[name]
            if name in activated and now < state.since + 2 * self.settings.min_dwell_s:
                # It was dropped and is missed already: not so soon again.
                state.num_doublings = min(MAX_DOUBLINGS, state.num_doublings + 1)
            state.since = now
        self._steps_since_change = 0
        return session.set_standby(standby, now=now), decision


def _is_ready(member: Member, session: LearnerSession) -> bool:
    """Return whether a worker holds weights that leases are granted for."""
    if member.installed is None:
        return False
    return session.step - member.installed.step <= session.settings.leases.max_staleness


def _has_drifted(before: dict[str, float], after: dict[str, float]) -> bool:
    """Return whether anything came or went, or moved by DRIFT of what it was."""
    if before.keys() != after.keys():
        return True
    return any(abs(after[name] - value) > DRIFT * abs(value) for name, value in before.items())
