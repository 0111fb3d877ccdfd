"""The worker's role: receives leases, and delivers finished groups of rollouts.

A leased group waits in the queue, is sampled in the engine, and may be interrupted between two
engine calls. Its result stays in the outbox until the learner has written the result to disk.
`leases/worker/held.py` has a table of these states. Each heartbeat lists all groups, so the learner
can resend missing leases and renew the other leases. When the link is lost, running groups continue
and results are kept. After the next Admitted, all unacknowledged results are sent again.

Each part of the role decides from its own state, and returns its decisions:

    HeldLeases       leases/worker/held.py    the state of each leased group
    EngineCalls      sampling.py              which groups enter the engine, and when a call ends
    EngineVersions   installing.py            which version is installed, and which samples a group
    PartialKeeper    leases/worker/keeper.py  which unfinished groups are shipped and saved
    Outcomes         outcomes.py              which result or failure of a group is reported
    Departure        departure.py             when the worker leaves, and when it is drained

`Worker` passes messages and events to these parts, sends results to the learner, and reports the
worker's state in heartbeats. The shell that runs the role (`runtime/worker/node.py`, or a
simulation) carries out actions and reports their outcomes as events. `Worker.handle` looks up the
events in a table:

    Configure      ->  EngineBuilt
    Sample         ->  MembersGrown, NonfiniteFound; then CallReturned, CallRefused or CallRaised
    Recall             the call returns soon
    OfferEpisodes  ->  GroupFinished or NoResult  (agents)
    CancelEpisodes, Withdraw  ->  LeaseDropped
    Score          ->  GroupScored or NoResult
    Install        ->  VersionInstalled, InstallFailed or InstallMissed
    Save           ->  PartialsSaved
    Release        ->  MachineReleased
    Drained            the process may end without losing anything

After every event, `_advance` carries out all actions that have become possible: install, begin,
recall, ship, send and leave.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import msgspec

from echo.core.bounds import MAX_LEASES
from echo.core.errors import RemoteProtocolError
from echo.core.rollout import Lineage, PartialRollout, PolicyVersion
from echo.core.timers import earliest
from echo.leases.partials import decode_continuations
from echo.leases.worker.held import (
    BUSY,
    WAITING,
    Closed,
    Dropped,
    GroupState,
    HandedOver,
    HeldLeases,
    PartialGroup,
    key_of,
)
from echo.leases.worker.keeper import PartialKeeper, PartialsFound, PartialsSaved
from echo.leases.worker.outbox import Outbox
from echo.roles.joining import NodeSettings
from echo.roles.node import DialingRole, Handler
from echo.roles.worker.activity import describe_activity
from echo.roles.worker.departure import (
    DRAIN_S,
    Departure,
    DrainRequested,
    MachineReleased,
    ReleaseTerms,
)
from echo.roles.worker.engine_facts import EngineFacts
from echo.roles.worker.installing import (
    InstallEvent,
    InstallFailed,
    LearnerProgress,
    VersionInstalled,
)
from echo.roles.worker.outcomes import GroupFinished, GroupScored, Outcomes
from echo.roles.worker.sampling import (
    CallReturned,
    Decision,
    EngineCalls,
    EngineEvent,
    GiveUp,
    NoResult,
    not_installed,
)
from echo.weights.broadcast import Broadcast
from echo.wire.actions import Action, Note, Stop
from echo.wire.codec import Frame
from echo.wire.messages import (
    Ack,
    Goodbye,
    Grant,
    Lease,
    LeaseState,
    Message,
    NodeStats,
    Reclaim,
    TopologyPlan,
    known_reason,
)

MAX_VERSION_WAIT_S = 30.0
"""A lease waits for at most this many seconds for a version that may sample it.

The learner grants a lease for the version that the worker reported last. A restarted worker may
hold an older version. The newer version may arrive soon, or never, for example because the engine
refuses it. So the lease waits for this time, and is then returned for another worker.
"""
# --- Events, beside those of the parts ---


@dataclass(frozen=True, slots=True)
class EngineBuilt:
    """Event: task and engine are built. `digests` has the hashes of the files of both."""

    engine: EngineFacts
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class LeasesDemanded:
    """Event: agents need `num_groups` groups in total.

    The groups that the agents already have count, too.
    """

    num_groups: int


@dataclass(frozen=True, slots=True)
class LeasesAlive:
    """Event: these leases are open at the agents, so they must be renewed.

    The learner sees each event as progress of the groups.
    """

    leases: Sequence[Lease]


@dataclass(frozen=True, slots=True)
class LeaseDropped:
    """Event: no agent will work on a lease, so the learner will let the lease expire."""

    lease: Lease


class Worker(DialingRole):
    """The role of a worker. It connects the role's parts with the learner and the shell."""

    def __init__(
        self,
        settings: NodeSettings,
        broadcast: Broadcast,
        outbox: Outbox,
        *,
        terms: ReleaseTerms | None = None,
        now: float,
    ) -> None:
        """Start without leases and without an engine. The event EngineBuilt provides the engine.

        Args:
            settings: the settings of the node.
            broadcast: receives and forwards versions of the weights.
            outbox: keeps results until they are acknowledged.
            terms: limits on the time for which the worker keeps its machine; None for no limits.
            now: the present time, seconds.
        """
        super().__init__(settings, broadcast, now=now)
        self.outbox = outbox
        self.held = HeldLeases(outbox)
        self.departure = Departure(terms or ReleaseTerms())
        self.max_groups = 0
        """Number of groups that this worker may hold at the same time. Running and waiting groups
        both count."""
        self.tokens_sampled = 0
        self.num_accepted = 0
        """Number of groups that the learner has accepted since this process started."""
        self.partial_counts: Counter[str] = Counter()
        """Counts of what happens to unfinished rollouts. The learner's metrics show them."""
        self._outcomes = Outcomes(self.held, self.counters, worker_id=settings.node_id)
        self._keeper = PartialKeeper(self.held, self.partial_counts)
        self._calls: EngineCalls | None = None
        """The calls of the engine; None until the engine is built."""

    def validate(self) -> None:
        """For tests: also check that leases, outbox and engine calls are consistent.

        Raises:
            AssertionError: if they are inconsistent.
        """
        super().validate()
        self.held.validate()
        if self._calls is not None:
            self._calls.validate()

    def handle(self, event: Any, *, now: float) -> list[Action]:
        """Handle an event from the shell, and do everything that has become possible."""
        return [*super().handle(event, now=now), *self._advance(now)]

    # --- what the learner and the operator are told ----------------------------------------------

    @property
    def installed_version(self) -> PolicyVersion | None:
        """The version that samples new groups; None if no version is installed."""
        return None if self._calls is None else self._calls.versions.installed

    def version_in_use(self) -> PolicyVersion | None:
        """Return the version that samples new groups; None if no version is installed."""
        return self.installed_version

    def capacity(self) -> int:
        """Return the number of groups that this worker may hold.

        The number is 0 without weights or with a full outbox.
        """
        is_closed = self.installed_version is None or self.outbox.is_full
        return 0 if is_closed else min(self.max_groups, MAX_LEASES)

    @property
    def lineages(self) -> tuple[Lineage, ...]:
        """The run's lineages, as the learner has sent them, oldest first."""
        return self.joining.lineages

    @property
    def activity(self) -> str:
        """Text that tells the operator what this worker is doing or what it waits for."""
        return describe_activity(self._calls, self.held, self.departure)

    def lease_states(self) -> tuple[LeaseState, ...]:
        """Return the state of each lease that is held or whose result is not yet acknowledged."""
        return tuple(self.held.states(now=self._beat_at)[:MAX_LEASES])

    def stats(self) -> NodeStats:
        """Return the status that a heartbeat reports."""
        stats = msgspec.structs.replace(
            super().stats(),
            state=self.activity,
            tokens_sampled=self.tokens_sampled,
            partials=dict(self.partial_counts),
            groups=self.held.stages(self.installed_version),
        )
        if self._calls is None:
            return stats
        engine = self._calls.engine
        # Agents are offered every lease at once, so no group waits for a place in the engine.
        num_places = 0 if engine.sampler == "agents" else engine.num_places
        refused_version, refusal = self._calls.versions.refusal or (None, "")
        return msgspec.structs.replace(
            stats,
            num_places=min(num_places, MAX_LEASES),
            num_fit=min(engine.num_fit, MAX_LEASES),
            engine=engine.name,
            scaling=self._calls.throughput.scaling,
            refused_version=refused_version,
            refusal=refusal,
        )

    def heartbeat(self, *, now: float) -> list[Action]:
        """Send a heartbeat now. It tells the learner this worker's state.

        A group that is being scored counts as making progress, so its lease does not expire. This
        state ends in any case, because every call of a task's code has a time limit. If a call
        hangs or waits for a thread too long, the group ends with the task's error.
        """
        for group in self.held.of(GroupState.SCORING):
            group.num_progress += 1
        if self._calls is not None:
            self._calls.measure(self.tokens_sampled, now=now)
        return super().heartbeat(now=now)

    def _beat(self, now: float) -> list[Action]:
        """Send a heartbeat now, because the state has changed."""
        return self.heartbeat(now=now) if self.is_admitted else []

    # --- from the learner ------------------------------------------------------------------------

    def on_work(self, message: Message, payload: list[Frame], now: float) -> list[Action]:
        """Handle a message from the learner that concerns leases, acknowledgements or plans."""
        match message:
            case Grant():
                self._on_grant(message, payload)
                return self._advance(now)
            case Reclaim():
                return [*self._on_reclaim(message, now), *self._advance(now)]
            case Ack():
                return [*self._on_ack(message, now), *self._advance(now)]
            case TopologyPlan():
                notes = self.departure.stand_by(is_standby=message.is_standby, now=now)
                return [*super().on_work(message, payload, now), *notes]
        return super().on_work(message, payload, now)

    def _on_grant(self, message: Grant, payload: list[Frame]) -> None:
        begun: list[list[PartialRollout]] = [[] for _ in message.leases]
        if payload:
            begun = decode_continuations(payload[0])
            if len(begun) != len(message.leases):
                numbers = f"{len(message.leases)} leases with {len(begun)} continuations"
                raise RemoteProtocolError(numbers)
        for lease, members in zip(message.leases, begun, strict=True):
            if key_of(lease) not in self.held:
                self.held.add(lease, members)

    def _on_reclaim(self, message: Reclaim, now: float) -> list[Action]:
        """Return the groups that the learner reclaims for other workers.

        Waiting groups are returned now. Running groups are returned after their calls have stopped.
        """
        groups = [g for key in message.leases if (g := self.held.get(key)) is not None]
        recalled: list[Decision] = []
        if message.is_begun_too and self._calls is not None:
            recalled = self._calls.reclaim(groups)
        waiting = [group for group in groups if group.state in WAITING]
        return [*self._decided(recalled, now), *self._give_up(waiting, now)]

    def _give_up(self, groups: Sequence[PartialGroup], now: float) -> list[Action]:
        """Return groups that are not in the engine. Other workers can then continue them.

        The groups' tokens are sent, too.
        """
        if not groups or not self.is_admitted:
            return []
        shipped = self.ship(interval_s=0.0, now=now)
        for group in groups:
            self.held.handle(group, HandedOver())
        return [*shipped, *self.heartbeat(now=now)]

    def _on_ack(self, message: Ack, now: float) -> list[Action]:
        group = self.held.get((message.group_id, message.attempt))
        if group is None:
            return []
        was, was_full = group.state, self.outbox.is_full
        self.held.handle(group, Closed())
        if was is not GroupState.DELIVERED:
            # A lease that is acknowledged before it is delivered is unwanted.
            if was is not GroupState.UNWANTED:
                self.partial_counts["wasted_tokens"] += group.num_tokens
            if was in WAITING or was is GroupState.UNWANTED:
                return []
            self.counters.add("cancelled")
            text = f"group {message.group_id} was finished by another worker"
            stops = self._decided(self._engine.cancel(group), now)
            return [Note("info", text, "superseded"), *stops]
        actions: list[Action] = []
        self.num_accepted += message.outcome == "accepted"
        if message.outcome == "refused":
            reason = known_reason(message.reason)
            self.counters.add(f"refused/{reason}")
            text = f"group {message.group_id} was refused: {reason}"
            actions.append(Note("warning", text, f"refused {reason}"))
        if was_full:
            actions += self.heartbeat(now=now)
        return actions

    def on_admitted(self, *, now: float) -> list[Action]:
        """Handle the admission: send a heartbeat, and send each unacknowledged result again.

        All tokens of unfinished groups count as not sent, and are sent again when they are next
        due. A restarted learner has lost these tokens, and a lost link may have lost messages.
        """
        actions = super().on_admitted(now=now)
        self.outbox.resend_all()
        self.held.forget_shipments()
        return [*actions, *self.heartbeat(now=now), *self._send_due(now)]

    def on_version(self, *, now: float) -> list[Action]:
        """Handle the arrival of a complete version."""
        return self._advance(now)

    # --- after every event -----------------------------------------------------------------------

    def _advance(self, now: float) -> list[Action]:
        """Do all that is possible now: install versions, begin and recall calls, send, leave."""
        calls = self._calls
        actions: list[Action] = []
        if calls is not None and not calls.is_broken:
            newest = self.broadcast.newest_complete
            learner = LearnerProgress(self.learner_step, self.lineages)
            decisions = calls.advance(newest, learner, is_leaving=self.is_leaving, now=now)
            actions += self._decided(decisions, now)
            if calls.engine.sampler == "engine" and not calls.is_sampling:
                # No call continues the interrupted groups soon: ship them now.
                actions += self.ship(interval_s=0.0, now=now)
        return [*actions, *self._send_due(now), *self._leave_when_done(now)]

    def _decided(self, decisions: Iterable[Decision], now: float) -> list[Action]:
        """Carry out what `EngineCalls` has decided. Return the resulting actions.

        A decision that is an action itself is returned unchanged.
        """
        actions: list[Action] = []
        for decision in decisions:
            match decision:
                case NoResult():
                    actions += self._outcomes.failed(decision)
                case GiveUp():
                    actions += self._give_up(decision.groups, now)
                case _:
                    actions.append(decision)
        return actions

    def ship(self, *, interval_s: float, now: float) -> list[Action]:
        """If this worker is admitted, send the learner the new tokens of interrupted groups.

        A group is sent at most once in `interval_s` seconds.
        """
        if not self.is_admitted:
            return []
        return [
            action
            for message, frame in self._keeper.ship(interval_s=interval_s, now=now)
            for action in self.to_learner(message, frame)
        ]

    def _send_due(self, now: float) -> list[Action]:
        if not self.is_admitted:
            return []
        return [
            action
            for delivery in self.outbox.take_due(now=now)
            for action in self.to_learner(delivery.message, *delivery.payload)
        ]

    # --- the engine ------------------------------------------------------------------------------

    @property
    def _engine(self) -> EngineCalls:
        assert self._calls is not None, "no engine reports before it is built"
        return self._calls

    def _on_engine_built(self, event: EngineBuilt, now: float) -> list[Action]:
        engine = event.engine
        self._calls = EngineCalls(
            engine, self.held, counters=self.counters, counts=self.partial_counts
        )
        self.broadcast.patch_mode = "on_install" if engine.takes_patches else "copy"
        self.max_groups = engine.max_groups
        num_dropped = self.held.limit_tokens(engine.max_completion_tokens)
        self.partial_counts["wasted_tokens"] += num_dropped
        return self.joining.configured(event.digests, now=now)

    def _on_engine(self, event: EngineEvent, now: float) -> list[Action]:
        return self._decided(self._engine.handle(event), now)

    def _on_returned(self, event: CallReturned, now: float) -> list[Action]:
        self.tokens_sampled += event.num_tokens
        actions = self._on_engine(event, now)
        engine = self._engine.engine
        interval_s = engine.rules.ship_s
        if engine.sampler != "engine" or interval_s is None:
            return actions
        run_id = self.broadcast.trust.run_id
        saved = self._keeper.save(run_id, interval_s=interval_s, now=now)
        return [*actions, *self.ship(interval_s=interval_s, now=now), *saved]

    def _on_install(self, event: InstallEvent, now: float) -> list[Action]:
        """Handle the end of an installation.

        If the installation failed and no other version is installed, stop the node.
        """
        if self._calls is None:
            return []  # a stored version was found damaged before the engine was built
        self._calls.versions.handle(event, now=now)
        if isinstance(event, VersionInstalled):
            return [*self._beat(now), *self._give_back(now)]
        if not isinstance(event, InstallFailed):
            return []
        self.counters.add("engine/installs_failed")
        beat, text = self._beat(now), f"cannot install {event.version}"
        if self.installed_version is None:
            note = Note("warning", f"{text}: {event.error}")
            return [note, *beat, Stop("failed", event.error)]
        text = f"{text}, keeping {self.installed_version}: {event.error}"
        return [Note("warning", text), *beat]

    def _give_back(self, now: float) -> list[Action]:
        installed = self.installed_version
        late = self.held.overdue(installed, wait_s=MAX_VERSION_WAIT_S, now=now)
        # First ship their tokens, for the workers that continue them.
        actions = self.ship(interval_s=0.0, now=now) if late else []
        for group in late:
            self.counters.add("engine/version_refused")
            here = (
                f"{installed or 'no version'} is installed and no newer one has arrived in "
                f"{MAX_VERSION_WAIT_S:g} s"
            )
            why = f"{group.lease.min_version} or newer is wanted, {here}"
            actions += self._outcomes.failed(not_installed(group.lease, why))
        return actions

    # --- results ---------------------------------------------------------------------------------

    def _on_scored(self, event: GroupScored, now: float) -> list[Action]:
        stale_tokens = self._engine.engine.rules.stale_tokens
        return self._outcomes.scored(event, stale_tokens=stale_tokens, now=now)

    def _on_finished(self, event: GroupFinished, now: float) -> list[Action]:
        return self._outcomes.finished(event, now=now)

    def _on_no_result(self, event: NoResult, now: float) -> list[Action]:
        return self._outcomes.failed(event)

    # --- agents ----------------------------------------------------------------------------------

    def _on_demanded(self, event: LeasesDemanded, now: float) -> list[Action]:
        if event.num_groups == self.max_groups:
            return []
        self.max_groups = event.num_groups
        return self._beat(now)

    def _on_alive(self, event: LeasesAlive, now: float) -> list[Action]:
        for lease in event.leases:
            group = self.held.get(key_of(lease))
            if group is not None:
                group.num_progress += 1
        return []

    def _on_dropped(self, event: LeaseDropped, now: float) -> list[Action]:
        group = self.held.get(key_of(event.lease))
        if group is not None:
            self.held.handle(group, Dropped())
        return []

    # --- this worker's own file ------------------------------------------------------------------

    def _on_found(self, event: PartialsFound, now: float) -> list[Action]:
        return self._keeper.on_found(event.data, self.broadcast.trust.run_id)

    def _on_saved(self, event: PartialsSaved, now: float) -> list[Action]:
        if event.fault:
            self.counters.add("partials_unsaved")
        return self._keeper.on_saved(event)

    # --- leaving ---------------------------------------------------------------------------------

    def _on_drain(self, event: DrainRequested, now: float) -> list[Action]:
        if self.is_leaving:
            return []
        self.is_leaving = True
        self.departure.begin(now=now)
        stops = [] if self._calls is None else self._calls.leave()
        return [*self._beat(now), *self._decided(stops, now)]

    def _leave_when_done(self, now: float) -> list[Action]:
        """Hand over unfinished groups once the engine has stopped. Leave once all work is done."""
        if not self.is_leaving:
            return []
        calls, departure = self._calls, self.departure
        actions: list[Action] = []
        is_sampling = calls is not None and calls.engine.sampler == "engine" and calls.is_sampling
        if departure.is_stopped(is_sampling=is_sampling, now=now):
            if is_sampling:
                text = f"the engine has not stopped within {DRAIN_S:.0f} s: leaving without it"
                actions.append(Note("warning", text))
            actions += self.ship(interval_s=0.0, now=now)
            actions += self._keeper.save(self.broadcast.trust.run_id, now=now)
        is_busy = bool(self.held.of(*BUSY) or len(self.outbox) or self._keeper.num_saving)
        return [*actions, *departure.finish(is_busy=is_busy, now=now)]

    def _on_released(self, event: MachineReleased, now: float) -> list[Action]:
        """Send a Goodbye that says whether the machine was released. Then stop."""
        reason = self.departure.reason
        goodbye: list[Action] = []
        if self.is_admitted:
            goodbye = self.to_learner(Goodbye(reason=reason, is_released=event.is_confirmed))
        return [*goodbye, Stop(reason)]

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """The time at which `expire` must be called next; None if nothing is due."""
        first = self.departure.deadline(lost_at=self.control.lost_at)
        if self._calls is not None:
            first = min(first, self._calls.deadline)
        outbox_at = self.outbox.deadline if self.is_admitted else None
        return earliest(super().deadline, outbox_at, None if first == math.inf else first)

    def expire(self, *, now: float) -> list[Action]:
        """Do everything that is due at `now`: departure, repeats, heartbeats, overdue leases."""
        actions: list[Action] = []
        if self.departure.is_due(lost_at=self.control.lost_at, now=now):
            actions.append(Note("warning", f"leaving: {self.departure.reason}"))
            actions += self._on_drain(DrainRequested(), now)
        actions += super().expire(now=now)
        if self._calls is not None:
            self._calls.versions.expire(now=now)
        return [*actions, *self._give_back(now), *self._advance(now)]

    HANDLERS: ClassVar[Mapping[type, Handler]] = {
        **DialingRole.HANDLERS,
        EngineBuilt: _on_engine_built,
        **dict.fromkeys(get_args(EngineEvent), _on_engine),
        CallReturned: _on_returned,
        **dict.fromkeys(get_args(InstallEvent), _on_install),
        GroupScored: _on_scored,
        GroupFinished: _on_finished,
        NoResult: _on_no_result,
        LeasesDemanded: _on_demanded,
        LeasesAlive: _on_alive,
        LeaseDropped: _on_dropped,
        PartialsFound: _on_found,
        PartialsSaved: _on_saved,
        DrainRequested: _on_drain,
        MachineReleased: _on_released,
    }
