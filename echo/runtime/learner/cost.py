"""Activation of workers, and the cost of a run.

    look (often) -> measured rates, times, idle share
    question (now and then) -> answer, in a thread -> decision -> set_standby

A question (`echo.fleet.activation`) is asked once in a dwell, and at once when an active worker is
gone. A dwell is the longest of `min_dwell_s`, MIN_STEPS steps and a group on the slowest active
worker. During a dwell the active workers stay the same, the effect of the last change is measured,
and workers without a measured rate are tried. A worker that joins begins to generate. If the budget
does not pay for it too, it stands by and is tried with the next question.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean, median
from typing import Any

from echo.config.schema import ActivationSection, BatchSection, SamplingSection, SyncSection
from echo.core.metrics import CostView
from echo.core.rollout import PolicyVersion
from echo.core.units import GIGABYTE
from echo.fleet.activation import (
    ActivationDecision,
    Links,
    Outlook,
    Question,
    ReviewAnswer,
)
from echo.fleet.job import Job
from echo.fleet.market import UNLIMITED, Offer
from echo.leases.throughput import MIN_REPORTS, Throughput
from echo.records.ledger import ActivationChanged, AnyRecord, Cost, LedgerQueue, totals_of
from echo.roles.learner import Learner, StandbyChosen
from echo.roles.members import Member, Roster
from echo.runtime.learner.report import Progress
from echo.weights.schedule import PublishPace
from echo.wire.actions import Action, Note
from echo.wire.codec import BYTES_PER_TOKEN

RESTART_S = 300.0
"""Seconds to replace a lost machine: renting one, starting it and catching up take minutes."""
MIN_STEPS = 3
"""Steps before T_train is known, since the first steps include start-up; also steps of a dwell."""
MAX_STEPS = 8
"""Steps over which times are averaged."""
MIN_DWELL_S = 120.0
"""Least seconds between two questions: several times what a worker needs to fetch the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """Settings of the configuration."""

    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    margin: float
    budget_per_h: float
    """$ per hour for workers and traffic; infinite without a cap."""
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


@dataclass(slots=True)
class _State:
    """Record of a worker."""

    incarnation: str
    throughput: Throughput
    measured_at: float
    active_s: float = 0.0
    """Seconds in which it had weights and was not on standby."""
    loaded_s: float = 0.0
    """`active_s`, each second weighted by the share of the worker's places that had a group."""
    installed: PolicyVersion | None = None
    free_at: float = 0.0
    """When it received its last version, or became active without one: it can fetch from then
    on.
    """
    took_s: float | None = None
    """Seconds to install the last version, from its publication or from `free_at` if later; None
    until a version is installed after a change.
    """
    late_s: float | None = None
    """Seconds of `took_s` beyond the forecast for all active workers; None if never measured."""
    alone_s: float = 0.0
    """The forecast for this worker alone, from its links when it was last active."""


class Activation:
    """Measures workers and steps, asks which workers are needed, and carries out the answer."""

    def __init__(self, settings: ActivationSettings, *, now: float) -> None:
        self.settings = settings
        self.outlook: Outlook | None = None
        """Forecast for the active workers, by the last answer."""
        self._states: dict[str, _State] = {}
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self._steps_since_change = 0
        self._asked_at = now
        self._group_s = 0.0
        """The time of a group on the slowest of the active workers, by the last answer."""
        self._active: frozenset[str] = frozenset()
        """The active workers, as of the last question or decision."""
        self._published_at: dict[PolicyVersion, float] = {}
        """Publication times of the last MAX_STEPS versions."""
        self._shown_bytes_per_s = 0.0
        """Highest rate at which the learner has sent a version, up to the first worker's
        install.
        """

    # --- measuring -------------------------------------------------------------------------------

    def measure(self, role: Learner, *, now: float) -> list[Action]:
        """Measure the workers since the last call; call it at least once per heartbeat."""
        members = role.roster.members("worker")
        newest = role.broadcast.newest_complete
        if newest is not None and newest not in self._published_at:
            self._published_at[newest] = now
            if len(self._published_at) > MAX_STEPS:
                del self._published_at[min(self._published_at)]
        actions: list[Action] = []
        for member in members:
            state = self._states.get(member.node_id)
            if state is None or state.incarnation != member.incarnation:
                throughput = Throughput(tokens_sampled=member.tokens_sampled, now=now)
                self._states[member.node_id] = _State(
                    member.incarnation, throughput, now, installed=member.installed, free_at=now
                )
                actions += self._welcome(role, member, now)
                continue
            slots = max(1, member.worker.capacity // 2)
            load = role.leases.num_leases(member.node_id) / slots
            state.throughput.look(load=load, tokens_sampled=member.tokens_sampled, now=now)
            state.loaded_s += min(1.0, load) * (now - state.measured_at)
            if not member.is_standby and member.installed is not None:
                state.active_s += now - state.measured_at
            state.measured_at = now
            if member.installed is not None and member.installed != state.installed:
                self._installed(role, state, member.installed, now)
        if len(self._states) > len(members):
            present = {member.node_id for member in members}
            self._states = {name: s for name, s in self._states.items() if name in present}
        return actions

    def _installed(self, role: Learner, state: _State, version: PolicyVersion, now: float) -> None:
        """Record how long a worker needed to install a version."""
        state.took_s = now - max(self._published_at.get(version, now), state.free_at)
        if state.installed is not None and version == role.broadcast.newest_complete:
            # Not for a worker's first version, which it may have kept from before.
            shown = role.plans.version_bytes / (state.took_s + POLL_S)
            self._shown_bytes_per_s = max(self._shown_bytes_per_s, shown)
        state.installed, state.free_at = version, now

    def _welcome(self, role: Learner, member: Member, now: float) -> list[Action]:
        """Put a worker on standby that exceeds the budget; warn of a worker without a price."""
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
        """Record the times of a step."""
        self._steps.append(times)
        self._steps_since_change += 1

    @property
    def train_s(self) -> float | None:
        """T_train: seconds of a step without waiting; None before MIN_STEPS steps."""
        if len(self._steps) < MIN_STEPS:
            return None
        return median(times.step_s - times.waited_s for times in self._steps)

    def idle_share(self, waiting_s: float = 0.0) -> float:
        """Return the share of the time since the last change in which the learner has waited.

        Before the first step after a change the share is 1.
        """
        recent = list(self._steps)[-self._steps_since_change :] if self._steps_since_change else []
        step_s = sum(times.step_s for times in recent) + waiting_s
        waited_s = sum(times.waited_s for times in recent) + waiting_s
        return waited_s / step_s if step_s > 0 else 1.0

    @property
    def dwell_s(self) -> float:
        """Seconds between two questions."""
        step_s = fmean(times.step_s for times in self._steps) if self._steps else 0.0
        return max(self.settings.min_dwell_s, MIN_STEPS * step_s, self._group_s)

    # --- asking ----------------------------------------------------------------------------------

    def question(
        self, role: Learner, pace: PublishPace, *, waiting_s: float, now: float
    ) -> Question | None:
        """Return the question that is due, if one is."""
        # A worker that is set aside delivers nothing that counts, whatever rate and price it
        # states; a worker that was not looked at yet, as in a large fleet, takes part in the next
        # question.
        members = [
            member
            for member in role.roster.members("worker")
            if member.node_id in self._states and not member.worker.is_set_aside
        ]
        train_s = self.train_s
        if train_s is None or not any(member.price.per_h for member in members):
            return None
        active = frozenset(member.node_id for member in members if not member.is_standby)
        is_one_gone = not self._active <= active
        if now < self._asked_at + self.dwell_s and not is_one_gone:
            return None
        if is_one_gone:
            self._steps_since_change = 0
        rates = self._rates(members)
        if not rates:
            return None
        self._asked_at, self._active = now, active
        max_staleness = role.settings.leases.max_staleness
        return Question(
            workers=tuple(self._worker(role, each, rates[each.node_id]) for each in members),
            job=self._job(role, train_s, pace.period),
            links=self._links(role, members),
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
        """Return whether a worker without a measured rate has been active for less than a dwell."""
        state = self._states[member.node_id]
        return state.throughput.tokens_per_s is None and state.active_s < self.dwell_s

    def _rates(self, members: Collection[Member]) -> dict[str, float]:
        """Return tokens per second by worker; empty if nothing is known of any.

        A worker with too few reports for a rate counts as the mean of the others while it is tried.
        Then its few reports count. If it sent none, its rate is the mean, or that of MIN_REPORTS
        groups in its loaded time if that is less.
        """
        found = {m.node_id: self._states[m.node_id].throughput.tokens_per_s for m in members}
        known = [rate for rate in found.values() if rate is not None]
        if not known:
            return {}
        groups = MIN_REPORTS * self.settings.group_size * self._completion_tokens
        rates = {}
        for member in members:
            name, rate, mean = member.node_id, found[member.node_id], fmean(known)
            if rate is None and not self._is_untried(member):
                state = self._states[name]
                rate = state.throughput.early_tokens_per_s
                rate = rate or min(mean, groups / max(state.loaded_s, 1e-9))
            rates[name] = mean if rate is None else rate
        return rates

    @property
    def _completion_tokens(self) -> float:
        return max(1.0, fmean(times.completion_tokens for times in self._steps))

    def _job(self, role: Learner, train_s: float, publish_period: int) -> Job:
        settings, steps = self.settings, self._steps
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
        down = role.plans.planner.downlink_limits.get(member.node_id)
        return Offer(
            name=member.node_id,
            tokens_per_s=rate,
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

    def _links(self, role: Learner, members: Collection[Member]) -> Links:
        """Return the learner's links, and a forecast of the broadcast to any set of workers.

        The plan does not know every link. So a forecast adds the longest delay beyond the plan that
        any worker of the set has shown. A worker's measurements are kept while it stands by.
        """
        relays = role.roster.members("relay")
        ahead = [relay.node_id for relay in relays]
        nodes = [member.node for member in (*relays, *members)]
        active = {member.node_id for member in members if not member.is_standby}
        uplink = self._uplink(role)
        forecast = role.plans.planner.forecast(nodes, uplink_bytes_per_s=uplink)
        all_s = forecast([*ahead, *active]) if active else 0.0
        states = {member.node_id: self._states[member.node_id] for member in members}
        for name, state in states.items():
            if name in active and state.took_s is not None:
                state.late_s = max(0.0, state.took_s - all_s)
                state.alone_s = min(state.took_s, forecast([*ahead, name]))
        # Every worker needs the time of coding and installing.
        least_s = min((s.late_s for s in states.values() if s.late_s is not None), default=0.0)
        late_s = {n: least_s if s.late_s is None else s.late_s for n, s in states.items()}
        alone_s = {n: 0.0 if n in active else s.alone_s for n, s in states.items()}

        @cache
        def broadcast_s(names: frozenset[str]) -> float:
            planned_s = forecast([*ahead, *names])
            alone = max((alone_s[name] for name in names), default=0.0)
            return max(planned_s, alone) + max((late_s[name] for name in names), default=0.0)

        return Links(
            broadcast_s=lambda names: broadcast_s(frozenset(names)),
            uplink_bytes_per_s=uplink or UNLIMITED,
            price_per_gb=role.settings.site.price_per_gb,
            relay_regions=frozenset(relay.node.region for relay in relays if relay.node.region),
        )

    def _uplink(self, role: Learner) -> float | None:
        """Return the bytes per second that the learner can send; None if it never sent.

        The learner's own estimate is too low if its children are slow, and missing if versions are
        small.
        """
        estimate = role.broadcast.uplink.bytes_per_s
        assumed = role.settings.site.uplink_bytes_per_s if estimate is None else None
        return max(self._shown_bytes_per_s, estimate or 0.0, assumed or 0.0) or None

    # --- carrying out ----------------------------------------------------------------------------

    def decide(
        self,
        role: Learner,
        question: Question,
        answer: ReviewAnswer,
        *,
        now: float,
    ) -> tuple[list[Action], ActivationDecision | None]:
        """Carry out an answer; return the actions, and the decision if anything changes.

        Workers that joined since the question stay active or on standby. Of the question's workers,
        the answer changes only those that are members now and that `look` has measured.
        """
        self.outlook = answer.after
        timed = answer.active - question.untried
        self._group_s = max(
            (w.group_latency_s(question.job) for w in question.workers if w.name in timed),
            default=0.0,
        )
        members = {m.node_id: m for m in role.roster.members("worker")}
        asked = {worker.name for worker in question.workers}
        known = asked & members.keys() & self._states.keys()
        deactivated = sorted(n for n in known - answer.active if not members[n].is_standby)
        activated = sorted(n for n in known & answer.active if members[n].is_standby)
        if not deactivated and not activated:
            return [], None
        standby = {n for n, m in members.items() if m.is_standby} - set(activated) | set(
            deactivated
        )
        decision = ActivationDecision(
            step=role.step,
            cause=answer.cause,
            activated=tuple(activated),
            deactivated=tuple(deactivated),
            num_active=len(members) - len(standby),
            num_standby=len(standby),
            before=answer.before,
            after=answer.after,
            train_s=question.job.train_s,
            idle_share=question.idle_share,
            slowdown=answer.choice.slowdown,
        )
        for name in activated:
            self._states[name].free_at = now
        for state in self._states.values():
            state.took_s = None
        self._steps_since_change = 0
        self._active = answer.active & members.keys()
        return role.handle(StandbyChosen(frozenset(standby)), now=now), decision


# --- The cost meter: total, and per hour ---
#
# A machine counts from its first Hello until the learner knows that it was given back: until a
# Goodbye that says so. A worker on standby counts, because its machine bills. A worker that fell
# silent, or left without giving its machine back, counts for LOST_COUNTS_FOR_S more, since the
# learner cannot know whether it still bills; if it comes back meanwhile it simply goes on.
#
# Traffic counts by the bytes that nodes report: weights in and out, and rollouts out. Their
# counters go on while the learner is away, so what a node reports first to one that was resumed is
# what the learner before it has counted.


LOST_COUNTS_FOR_S = 3600.0
"""Seconds, the usual billing step: no message says that a lost machine is no longer billed."""
_TRAFFIC_WINDOW_S = 300.0
"""Seconds over which traffic is averaged."""


@dataclass(slots=True)
class _Machine:
    """One machine that is paid for."""

    price_per_h: float
    incarnation: str
    is_standby: bool = False
    gone_at: float | None = None
    """When the node left or fell silent; None while it is known."""
    traffic_bytes: float | None = 0.0
    """Bytes reported by this incarnation; None before its first report to a resumed learner."""


class CostMeter:
    """Adds up what the machines of a run and their traffic cost."""

    def __init__(
        self,
        *,
        learner_per_h: float,
        learner_per_gb: float,
        spent: float,
        now: float,
        bytes_per_token: float = BYTES_PER_TOKEN,
    ) -> None:
        self.total = spent
        self._is_resumed = spent > 0
        self._bytes_per_token = bytes_per_token
        self._learner_per_h = learner_per_h
        self._learner_per_gb = learner_per_gb
        self._machines: dict[str, _Machine] = {}
        self._sent_bytes = 0
        self._at = now
        self._traffic_per_s = 0.0

    @property
    def machines_per_h(self) -> float:
        """$ per hour for all machines: learner, relays, workers, and those that vanished."""
        return self._learner_per_h + sum(m.price_per_h for m in self._machines.values())

    @property
    def standby_per_h(self) -> float:
        """The part of `machines_per_h` for workers on standby."""
        return sum(m.price_per_h for m in self._machines.values() if m.is_standby)

    @property
    def unconfirmed_per_h(self) -> float:
        """The part of `machines_per_h` for machines that are gone and may still be billed."""
        return sum(m.price_per_h for m in self._machines.values() if m.gone_at is not None)

    @property
    def traffic_per_h(self) -> float:
        """$ per hour for traffic, over the last minutes."""
        return 3600 * self._traffic_per_s

    @property
    def has_prices(self) -> bool:
        """Whether any machine has a price, or any money was spent."""
        prices = [machine.price_per_h for machine in self._machines.values()]
        return bool(self._learner_per_h or self.total or any(prices))

    def update(self, roster: Roster, *, bytes_sent: int, now: float) -> None:
        """Count the cost since the last call, then record which machines are there now."""
        elapsed_s = max(0.0, now - self._at)
        self._at = now
        self.total += elapsed_s / 3600 * self.machines_per_h
        traffic = self._learner_per_gb * (bytes_sent - self._sent_bytes) / GIGABYTE
        self._sent_bytes = bytes_sent
        traffic += self._take(roster.nodes.values())
        self.total += traffic
        if elapsed_s > 0:
            weight = min(1.0, elapsed_s / _TRAFFIC_WINDOW_S)
            self._traffic_per_s += weight * (traffic / elapsed_s - self._traffic_per_s)
        self._drop_gone(roster, now)

    def _take(self, members: Iterable[Member]) -> float:
        """Record every known node; return $ for their traffic since the last call."""
        cost = 0.0
        for member in members:
            machine = self._machines.get(member.node_id)
            if machine is None:
                machine = _Machine(0.0, member.incarnation)
                machine.traffic_bytes = None if self._is_resumed else 0.0
                self._machines[member.node_id] = machine
            if machine.incarnation != member.incarnation:
                machine.incarnation, machine.traffic_bytes = member.incarnation, 0
            machine.price_per_h = member.price.per_h or 0.0
            machine.is_standby, machine.gone_at = member.is_standby, None
            stats = member.stats
            rollouts = self._bytes_per_token * stats.tokens_sampled
            total = stats.bytes_received + stats.bytes_sent + rollouts
            if machine.traffic_bytes is None:
                machine.traffic_bytes = None if member.tokens_sampled is None else total
                continue
            cost += member.price.per_gb * max(0, total - machine.traffic_bytes) / GIGABYTE
            machine.traffic_bytes = max(total, machine.traffic_bytes)
        return cost

    def _drop_gone(self, roster: Roster, now: float) -> None:
        for name, machine in list(self._machines.items()):
            if name in roster.nodes:
                continue
            if machine.gone_at is None:
                machine.gone_at, machine.is_standby = now, False
            is_released = roster.released.get(name) == machine.incarnation
            if is_released or now - machine.gone_at >= LOST_COUNTS_FOR_S:
                del self._machines[name]


# --- Costs and activation in the learner: measured, decided, written down ---
#
#     look (10 times a second) -> meter, rates, times of broadcasts
#     question -> answer (in a thread) -> decision -> ledger, log, plans and leases
#
# Each decision goes to the ledger, and the costs with each step, so that a resume goes on counting.


POLL_S = 0.1
"""Seconds between two looks at the installed versions: the resolution of broadcast times."""
METER_S = 1.0
"""Seconds between two updates of the costs, each of which may ask a question."""
POLLS_PER_S = 10_000
"""Most workers measured per second; in larger fleets each is measured less often."""


def activation_settings(
    section: ActivationSection, sync: SyncSection, batch: BatchSection, sampling: SamplingSection
) -> ActivationSettings | None:
    """Return the settings of activation; None if it is off, or if sync.mode is "pull"."""
    if section.mode == "off" or sync.mode == "pull":
        return None
    return ActivationSettings(
        groups_per_step=batch.groups_per_step,
        group_size=batch.group_size,
        max_completion_tokens=sampling.max_completion_tokens,
        margin=section.margin,
        budget_per_h=math.inf if section.budget_per_h is None else section.budget_per_h,
    )


class CostControl:
    """Meters the costs of a run, and has the workers activated that it needs."""

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
        spent = spent_before(ledger.records(), now=ledger.now())
        self._activation = None if settings is None else Activation(settings, now=now)
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
        self._total_at_start = spent
        self._num_tokens = 0.0
        self._total_at_step = spent
        self._last_decision = ""

    # --- watching --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether activation is off and every published version has reached the workers."""
        return self._activation is None and not self._pace.is_awaited

    def measure(self, *, now: float) -> list[Action]:
        """Measure the workers' versions; call it every POLL_S, or METER_S while `is_idle`."""
        if self._progress.activity:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        roster = self._role.roster
        if self._pace.is_awaited:
            installed = [member.installed for member in roster.active("worker")]
            self._pace.received(installed, now=now, train_s=self.train_s)
        if self._activation is None or self._role.shutdown.reason is not None:
            return []
        if now < self._measured_at + len(roster.nodes) / POLLS_PER_S:
            return []
        self._measured_at = now
        return self._activation.measure(self._role, now=now)

    def review(self, *, now: float) -> Question | None:
        """Count costs once in METER_S; return a question for a thread to answer, if one is due."""
        if now < self._metered_at + METER_S:
            return None
        self._metered_at = now
        self._meter_now(now)
        if self._activation is None or self._role.shutdown.reason is not None:
            return None
        waiting_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        return self._activation.question(self._role, self._pace, waiting_s=waiting_s, now=now)

    def decide(self, question: Question, answer: ReviewAnswer, *, now: float) -> list[Action]:
        """Carry out the answer to the question of `review`, unless the run has ended."""
        if self._activation is None or self._role.shutdown.reason is not None:
            return []
        actions, decision = self._activation.decide(self._role, question, answer, now=now)
        if decision is not None:
            self._record(decision)
        return actions

    def _meter_now(self, now: float) -> None:
        role = self._role
        self._meter.update(role.roster, bytes_sent=role.broadcast.bytes_sent, now=now)

    def _record(self, decision: ActivationDecision) -> None:
        self._last_decision = str(decision)
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
        """Whether the budget of the run is spent."""
        return self._budget_per_run is not None and self._meter.total >= self._budget_per_run

    def describe_spent(self, step: int) -> str:
        """Return one line that says that the budget is spent, and how to continue."""
        return (
            f"${self._meter.total:.2f} are spent of activation.budget_per_run = "
            f"${self._budget_per_run:.2f}: the run ends at step {step}; go on with --resume --set "
            "activation.budget_per_run=..."
        )

    def metrics(self, row: Mapping[str, Any], *, now: float) -> dict[str, float]:
        """Record the row of the last step; return the metrics of its cost."""
        if self._activation is not None:
            times = StepTimes(
                step_s=row["time/step"],
                waited_s=min(row["time/wait_for_batch"], row["time/step"]),
                completion_tokens=row.get("completions/mean_length", 1.0),
                useful_share=1.0 if self._trains_on_all else row.get("groups/useful", 1.0),
            )
            self._activation.stepped(times)
        self._meter_now(now)
        if self._meter.has_prices:
            self._num_tokens += row["perf/accepted_tokens_per_s"] * row["time/step"]
        view = self.view()
        if view is None:
            return {}
        self._ledger.append(
            Cost(step=self._role.step, total=round(view.total, 6), per_h=view.per_h)
        )
        metrics = {
            "cost/per_hour": view.per_h,
            "cost/total": view.total,
            "cost/per_step": view.total - self._total_at_step,
            "cost/standby_per_hour": view.standby_per_h,
            "cost/unconfirmed_per_hour": view.unconfirmed_per_h,
            "workers/active": view.num_active,
            "workers/standby": view.num_standby,
        }
        self._total_at_step = view.total
        if view.per_million_tokens is not None:
            metrics["cost/per_million_tokens"] = view.per_million_tokens
        outlook = None if self._activation is None else self._activation.outlook
        if outlook is not None:
            metrics["activation/rate"] = outlook.rate
            metrics["activation/required_rate"] = outlook.required
            metrics["activation/predicted_idle"] = outlook.idle_share
        return metrics

    def view(self) -> CostView | None:
        """Return the costs for the live view; None if nothing has a price."""
        meter, roster = self._meter, self._role.roster
        if not meter.has_prices:
            return None
        per_million_tokens = None
        if self._num_tokens > 0:
            per_million_tokens = (meter.total - self._total_at_start) / self._num_tokens * 1e6
        return CostView(
            per_h=meter.machines_per_h + meter.traffic_per_h,
            total=meter.total,
            per_million_tokens=per_million_tokens,
            standby_per_h=meter.standby_per_h,
            unconfirmed_per_h=meter.unconfirmed_per_h,
            budget_per_run=self._budget_per_run,
            num_active=len(roster.active("worker")),
            num_standby=sum(member.is_standby for member in roster.members("worker")),
            decision=self._last_decision,
        )


def spent_before(records: Iterable[AnyRecord], *, now: float) -> float:
    """Return $ that a run has cost before it is resumed.

    Machines went on billing while the learner was away. It is not known for how long, so at most
    LOST_COUNTS_FOR_S of that time count. `now` is unix time.
    """
    last = totals_of(records).cost
    if last is None:
        return 0.0
    away_s = min(max(0.0, now - last.at), LOST_COUNTS_FOR_S)
    return last.total + last.per_h * away_s / 3600
