"""The learner's role: admits nodes, grants leases, receives groups, distributes weights.

Theory of operation. The learner listens, and all other nodes dial. The learner answers each routed
message over the link on which the message arrived. So a node may change its route (another relay,
or none) at any time.

No method waits. If an action is not possible now, a later heartbeat, result or step triggers it. A
message does not grant groups directly: it marks a round of grants as due, and `expire` makes the
round. So if the round fails, the message has still been handled in full. The role's caller puts
groups into the buffer and takes them out.

The role's parts:

    roles/joining.py       admits nodes
    roles/plans.py         tells each node its parents in the broadcast
    roles/review.py        sets workers aside
    roles/fleet.py         describes the nodes to the operator
    roles/viewers.py       shows the run to viewers, and passes on their commands
    roles/members.py       tracks the nodes, and sends them Finish at the end of the run
    leases/scheduler.py    grants leases
    leases/results.py      checks results
    weights/broadcast.py   distributes the weights along the plan

The shell that runs the role is `runtime/learner/node.py`, or a simulation. The shell reports its
work as events, which `Learner.handle` looks up in a table. The events and the resulting actions
are:

    GrantsDue          grants for new prompts, or to replace groups that have left the buffer
    GrantsStopped      no further grants
    BatchTaken         grants to replace the batch
    StepTaken          grants for the next steps
    GroupStored        acknowledgement, grants
    GroupDiscarded     record, acknowledgement, grants
    ReviewDue          workers set aside, or admitted again
    SamplesTrained     workers set aside for their log-probabilities
    StandbyChosen      plans, grants
    Paused             grants, or no further grants
    HoldChosen         plans, grants
    StatusMade         the status for viewers
    OperationDone        the answer to an operator
    Publishing         plans
    RunEnded           Finish for all nodes except relays that others may need
    LastCall           Finish for the rest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from echo.core.errors import DataError, ForgedError, LocalProtocolError, RemoteProtocolError
from echo.core.monitoring.metrics import Counters
from echo.core.records import Discarded
from echo.core.timers import MAX_NAMES_KEPT, Paced, RecentMap, earliest
from echo.core.units import one_line
from echo.leases.book import LOST_WORKER, LeaseBook, LeasedWorker
from echo.leases.open_groups import AppendRecord
from echo.leases.results import GroupDiscarded, GroupStored
from echo.leases.run import AcceptedGroups, LeaseSettings, Prompts, RunState
from echo.leases.scheduler import GRANT_S, Scheduler, WaitReason
from echo.roles.fleet import FleetView
from echo.roles.joining import Admission, AdmissionSettings
from echo.roles.members import Hold, LastCall, Member, Roster, RunEnded, Shutdown
from echo.roles.node import Handler, Role
from echo.roles.plans import Plans, Publishing
from echo.roles.review import ReviewDue, SamplesTrained, WorkerReview
from echo.roles.viewers import OperationDone, StatusMade, Viewers
from echo.weights.broadcast import Broadcast
from echo.weights.link import ParentFailed
from echo.weights.rates import acknowledge
from echo.weights.topology.sites import Site
from echo.wire.actions import Action, HangUp, Note, PeerFaults, Routes, Send, Work
from echo.wire.codec import (
    Envelope,
    Frame,
    decode_envelope,
    decode_message,
    describe,
    encode,
    other_protocol,
)
from echo.wire.messages import (
    LEARNER_ID,
    AssetRequest,
    Deliver,
    Failed,
    Finish,
    Goodbye,
    Greet,
    Greeted,
    Heartbeat,
    Hello,
    Message,
    Partial,
    Probe,
    ProbeAck,
    Pulse,
    Ready,
    Refuse,
    Rehello,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The settings of the learner's role."""

    admission: AdmissionSettings
    leases: LeaseSettings
    site: Site
    """The learner's place in the network. If the address is empty, each node uses the address at
    which it reached the learner. The uplink's rate is used until transfers have measured it."""
    chunk_bytes: int = 1 << 20
    uplinks: dict[str, float] = field(default_factory=dict)
    """For each node id, including the learner's, the bytes per second that the node could send
    before the run was resumed."""


# --- Events, beside those of the parts ---


@dataclass(frozen=True, slots=True)
class GrantsDue:
    """Event: more groups may be granted, because prompts were made or groups left the buffer."""


@dataclass(frozen=True, slots=True)
class GrantsStopped:
    """Event: no further groups may be granted, because the learner is ending."""


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """Event: a batch has left the buffer for the next step."""

    waited_s: float
    """Seconds for which the learner waited for the batch."""


@dataclass(frozen=True, slots=True)
class StepTaken:
    """Event: the optimizer has made `step` steps."""

    step: int


@dataclass(frozen=True, slots=True)
class StandbyChosen:
    """Event: the workers in `names`, and no others, should be on standby."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Paused:
    """Event: the operator has paused the run or resumed it. A paused run grants no groups."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class HoldChosen:
    """Event: the operator has chosen to hold a node on standby or to drain it.

    If `hold` is None, the operator has cancelled the earlier choice.
    """

    node_id: str
    hold: Hold | None


class Learner(Role):
    """The learner's role. It decides what the learner sends and records, without IO or a clock."""

    def __init__(
        self,
        settings: LearnerSettings,
        run: RunState,
        *,
        broadcast: Broadcast,
        buffer: AcceptedGroups,
        prompts: Prompts,
    ) -> None:
        self.settings = settings
        self.broadcast = broadcast
        self.lineages = run.lineages
        self.counters = Counters()
        admission = settings.admission
        self.roster = Roster(heartbeat_s=admission.heartbeat_s, dead_after_s=admission.dead_after_s)
        self.is_granting = True
        self.is_paused = False
        """Whether the operator has paused the run. Groups that were granted before the pause
        continue."""
        self._grants = Paced(GRANT_S)
        self.routes = Routes(self.counters, self.roster.channel_of)
        self._peer_names: RecentMap[str, str] = RecentMap(max_entries=MAX_NAMES_KEPT)
        self._peer_faults = PeerFaults()
        self.plans = Plans(
            settings.site,
            chunk_bytes=settings.chunk_bytes,
            uplinks=settings.uplinks,
            roster=self.roster,
            broadcast=broadcast,
            routes=self.routes,
        )
        self._admission = Admission(
            admission,
            lineages=run.lineages,
            roster=self.roster,
            counters=self.counters,
            routes=self.routes,
            peer_faults=self._peer_faults,
            plans=self.plans,
            role=self,
        )
        self.scheduler = Scheduler(
            settings.leases,
            run,
            buffer=buffer,
            prompts=prompts,
            counters=self.counters,
            routes=self.routes,
            peer_faults=self._peer_faults,
        )
        self.review = WorkerReview(self.roster, self.scheduler.usefulness, counters=self.counters)
        self.fleet = FleetView(self.roster, self.scheduler, broadcast)
        self.shutdown = Shutdown(self.roster, self.routes)
        self.viewers = Viewers(self.counters, self._peer_faults)

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.scheduler.groups.step

    @property
    def buffer(self) -> AcceptedGroups:
        """The groups that are accepted but not yet trained on."""
        return self.scheduler.buffer

    @property
    def leases(self) -> LeaseBook:
        """The leases that workers hold."""
        return self.scheduler.groups.leases

    # --- links and messages ----------------------------------------------------------------------

    def disconnected(self, peer: str, reason: str, *, now: float) -> list[Action]:
        """Remove a lost link.

        If the nodes behind this link stay silent for `dead_after_s`, they are dropped.
        """
        if peer in self.viewers:
            self.viewers.disconnected(peer)
            return []
        self.routes.forget(peer)
        self._peer_names.discard(peer)
        return self.broadcast.remove_child(peer, now=now)

    def guest_connected(self, peer: str, user: str, *, now: float) -> list[Action]:
        """Admit a viewer. `viewers` handles all messages from viewers."""
        return self.viewers.connected(peer, user, now=now)

    def receive(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Handle a message.

        If the message violates the protocol, count and log the error, but do not raise it.
        """
        if peer in self.viewers:
            return self.viewers.receive(peer, frames, now=now)
        try:
            return self._receive(peer, decode_envelope(frames), frames[1:], now)
        except RemoteProtocolError as error:
            self.counters.add("protocol_errors")
            source = describe(frames)[0] or peer
            text = f"refused a message: {error}"
            return self._peer_faults.note(source, "protocol", text, now=now)

    def expel(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Drop the node that sent a message. If the sender is not a node, close its link.

        A relay's link stays open for the other nodes behind the relay. The dropped node must send
        Hello again. The learner makes a new plan and new grants at the next deadline.
        """
        self.counters.add("internal_errors")
        source, target, _ = describe(frames)
        if target != LEARNER_ID or peer in self.viewers:
            return [HangUp(peer), *self.disconnected(peer, "an internal error", now=now)]
        if self.routes.peer_of(source) == peer and self._admission.expel(source, now=now):
            self.leases.drop_worker(source)
            self.plans.want(now=now)
            self._grants.want(now=now)
        return []

    def _receive(
        self, peer: str, envelope: Envelope, payload: list[Frame], now: float
    ) -> list[Action]:
        if envelope.target not in ("", LEARNER_ID):
            raise RemoteProtocolError(f"a message for {envelope.target!r} sent to the learner")
        fault = other_protocol(envelope)
        if fault is not None:
            # Answer in our version: the envelope alone shows the peer the fault.
            self.counters.add("refused/protocol_version")
            refuse = Refuse(reason="protocol_version", detail=fault)
            frames = encode(refuse, source=LEARNER_ID, target=envelope.source)
            notes = self._peer_faults.note(envelope.source, "protocol_version", fault, now=now)
            return [*notes, Send(peer, frames)]
        message = decode_message(envelope)
        if not envelope.target:
            return self._on_link_message(peer, message, payload, now)
        return self._on_routed(peer, envelope, message, payload, now)

    def _on_link_message(
        self, peer: str, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        if isinstance(message, Greet):
            self._peer_names[peer] = message.node_id
            answer = Greeted(node_id=LEARNER_ID, role="learner")
            return [Send(peer, encode(answer, source=LEARNER_ID))]
        if isinstance(message, Probe):
            return acknowledge(peer, source=LEARNER_ID)
        if isinstance(message, ProbeAck):
            return self.plans.on_probe_ack(peer, now=now)
        results = self.broadcast.receive(peer, message, payload, now=now)
        return [action for action in results if not isinstance(action, ParentFailed)]

    def _on_routed(
        self, peer: str, envelope: Envelope, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        """Handle a message that names a node as its source.

        A node's messages normally arrive, and are answered, over the link on which the node's
        process joined. A message with the node's name may also arrive over another link. Then the
        answer goes over that other link, and the message has an effect only if the node's process
        has sealed it.
        """
        source = envelope.source
        try:
            is_genuine = self._admission.is_genuine(envelope, message, payload)
        except ForgedError as error:
            return self._refuse_forged(peer, source, message, error, now)
        if not is_genuine and self._admission.has_joined(source):
            self.counters.add("dropped/other_channel")
            return []
        former = self.routes.peer_of(source)
        self.routes.learn(source, peer)
        try:
            is_new_way = peer != former and self._admission.is_missing_hello(source, message)
            if is_new_way or not is_genuine:
                return self.routes.to(source, Rehello())
            return self._on_genuine(source, message, payload, now)
        finally:
            if peer != former and not self._admission.proves_name(source, message):
                self.routes.restore(source, former)

    def _refuse_forged(
        self, peer: str, source: str, message: Message, error: ForgedError, now: float
    ) -> list[Action]:
        """Drop a message that was forged or changed on its way.

        Report the link over which the message came.
        """
        self.counters.add("refused/forged")
        name = self._peer_names.get(peer) or peer
        over = f"it came over the link of {name}"
        if name == source:
            over += " itself"
        text = f"refused a {type(message).__name__} under the name of {source}: {error}; {over}"
        return self._peer_faults.note(name, "forged", text, now=now)

    def _on_genuine(
        self, source: str, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        reason = self.shutdown.reason
        if isinstance(message, Hello) and message.node_id == source and reason is not None:
            return self._admission.finish(message, reason)
        is_known = source in self.roster.nodes
        if isinstance(message, AssetRequest | Ready) and is_known and reason is not None:
            return self.routes.to(source, Finish(reason=reason))
        return self._admission.receive(source, message, payload, now=now)

    def on_work(
        self, member: Member, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        """Handle a heartbeat, a result or a Goodbye from a node."""
        match message:
            case Heartbeat():
                return self._on_heartbeat(member, message, now)
            case Deliver() | Partial() | Failed():
                self._grants.want(now=now)
                return self.scheduler.results.receive(member.node_id, message, payload, now=now)
            case Goodbye():
                if message.is_released:
                    self.roster.release(member)
                level = "warning" if message.has_failed else "info"
                note = Note(level, f"{member.node_id} left: {one_line(message.reason)}")
                return [note, *self.drop(member, now=now), *self.shutdown.send_finish()]
        raise LocalProtocolError(f"{type(message).__name__} is no work of a node")

    def drop(self, member: Member, *, now: float) -> list[Action]:
        """Take back all leases from a node that left or was replaced."""
        self.leases.drop_worker(member.node_id)
        self._grants.want(now=now)
        return self.plans.replan(now)

    # --- heartbeats and leases -------------------------------------------------------------------

    def _on_heartbeat(self, member: Member, message: Heartbeat, now: float) -> list[Action]:
        reason = self.shutdown.reason
        if reason is not None and self.shutdown.may_leave(member):
            return self.routes.to(member.node_id, Finish(reason=reason))
        has_new_suspects = message.stats.suspects != member.stats.suspects
        probe = self.plans.before_heartbeat(member, message, now=now)
        refused = _note_refusal(member, message)
        num_sampled = member.beat(message, now=now)
        self.counters.add("tokens/sampled", num_sampled or 0)
        num_leases = len(message.leases) + self.leases.num_leases(member.node_id)
        if self.roster.is_drained(member, num_leases):
            return self.routes.to(member.node_id, Finish(reason="drained by the operator"))
        actions = self.routes.to(
            member.node_id, Pulse(step=self.step, newest=self.broadcast.newest_complete)
        )
        actions += [*probe, *refused, *self.plans.repeat(member)]
        if has_new_suspects or self.plans.planner.is_due(now=now):
            actions += self.plans.replan(now)
        self._grants.want(now=now)
        answers = self.scheduler.on_heartbeat(
            member.worker, message, has_progress=num_sampled != 0, now=now
        )
        return [*actions, *answers]

    def _grant(self, now: float) -> list[Action]:
        """Grant as many groups as the staleness bound and the workers' capacities allow.

        If the last round of grants was too recent, the next round is delayed.
        """
        is_over = self.shutdown.reason is not None or not self.is_granting or self.is_paused
        is_resting = self.scheduler.just_in_time.is_resting(now=now)
        if is_over or is_resting or self.scheduler.quota.is_closed(self.broadcast.newest_complete):
            self._grants.deadline = None
            return []
        if not self._grants.may(len(self.roster.nodes), now=now):
            return []
        actions = self.scheduler.grant(self._workers, now=now)
        self.is_granting = self.prompt_fault is None
        return actions

    @property
    def prompt_fault(self) -> DataError | None:
        """The error because of which the learner cannot make prompts, or None."""
        return self.scheduler.prompt_fault

    def validate(self) -> None:
        """For tests: check that nodes, leases and groups are consistent.

        Raises:
            AssertionError: if they are inconsistent.
        """
        self.broadcast.validate()
        self.scheduler.groups.validate()
        known = {*self.roster.nodes, LOST_WORKER}
        assert self.leases.worker_ids <= known, "a node that is gone holds a lease"

    def wait_reason(self) -> WaitReason:
        """Return why the groups of the next batch cannot be granted. Return "" if they can be."""
        if self.is_paused:
            return ""
        return self.scheduler.wait_reason(self._workers, self.broadcast.newest_complete)

    @property
    def _workers(self) -> list[LeasedWorker]:
        return [member.worker for member in self.roster.active("worker")]

    # --- from the shell --------------------------------------------------------------------------

    def handle(self, event: Any, *, now: float) -> list[Action]:
        """Handle an event from the shell. The table `HANDLERS` names the handler for each type."""
        return self.HANDLERS[type(event)](self, event, now)

    def _on_grants_due(self, event: GrantsDue, now: float) -> list[Action]:
        return self._grant(now)

    def _on_grants_stopped(self, event: GrantsStopped, now: float) -> list[Action]:
        self.is_granting = False
        return []

    def _on_batch(self, event: BatchTaken, now: float) -> list[Action]:
        self.scheduler.begin_step(waited_s=event.waited_s, now=now)
        return self._grant(now)

    def _on_step(self, event: StepTaken, now: float) -> list[Action]:
        self.scheduler.end_step(event.step, now=now)
        return self._grant(now)

    def _on_stored(self, event: GroupStored, now: float) -> list[Action]:
        return self._acknowledge(event.group_id, is_useful=True, now=now)

    def _on_discarded(self, event: GroupDiscarded, now: float) -> list[Action]:
        self.counters.add(f"discarded/{event.reason}")
        end = Discarded(group=event.group_id, reason=event.reason, step=self.step)
        acknowledgement = self._acknowledge(event.group_id, is_useful=False, now=now)
        return [AppendRecord(end), *acknowledgement]

    def _acknowledge(self, group_id: int, *, is_useful: bool, now: float) -> list[Action]:
        stored = self.scheduler.stored(group_id, is_useful=is_useful, now=now)
        return [*stored, *self.review.update(now=now), *self._grant(now)]

    def _on_review_due(self, event: ReviewDue, now: float) -> list[Action]:
        return self.review.update(now=now)

    def _on_samples(self, event: SamplesTrained, now: float) -> list[Action]:
        return self.review.compare(event.samples, now=now)

    def _on_standby(self, event: StandbyChosen, now: float) -> list[Action]:
        """Put those workers on standby that the event names, and no others.

        If nothing changes, return no actions.

        A worker on standby keeps its control link and its heartbeats, so one message can activate
        it again. The worker gets no new leases, but finishes and delivers its present groups.

        The worker also gets no weights (`weights/topology/plan.py`), which would cost traffic and
        slow down the broadcast. After its activation, the worker fetches weights like a late
        joiner, and gets leases when it has installed the version.

        A plan without parents tells the worker that it is on standby. The learner repeats the plan
        at each heartbeat until the worker follows the plan, so a lost plan is harmless.
        """
        changed = False
        for member in self.roster.members("worker"):
            is_standby = member.node_id in event.names or member.hold is not None
            changed |= is_standby != member.is_standby
            member.node.is_standby = is_standby
        return [*self.plans.replan(now), *self._grant(now)] if changed else []

    def _on_paused(self, event: Paused, now: float) -> list[Action]:
        """Stop or restart the granting of groups.

        Running leases and the buffer do not change.
        """
        self.is_paused = event.is_paused
        return self._grant(now)

    def _on_hold(self, event: HoldChosen, now: float) -> list[Action]:
        """Do what the operator chose for a node: put it on standby, drain it, or put it back.

        A drained node is on standby until it has finished its work. Then the node gets Finish.
        """
        self.roster.hold(event.node_id, event.hold)
        return [*self.plans.replan(now), *self._grant(now)]

    def _on_status(self, event: StatusMade, now: float) -> list[Action]:
        return self.viewers.status_made(event.data, now=now)

    def _on_operation_done(self, event: OperationDone, now: float) -> list[Action]:
        return self.viewers.operation_done(event.peer, event.outcome)

    def _on_publishing(self, event: Publishing, now: float) -> list[Action]:
        return self.plans.before_publish(now=now)

    def _on_ended(self, event: RunEnded, now: float) -> list[Action]:
        return self.shutdown.finish(event.reason)

    def _on_last_call(self, event: LastCall, now: float) -> list[Action]:
        return self.shutdown.dismiss_all()

    # --- for the shell ---------------------------------------------------------------------------

    def worked(self, work: Work, fault: str, *, now: float) -> list[Action]:
        """Raise LocalProtocolError, because the role of a learner never starts work in a thread."""
        raise LocalProtocolError(f"the learner has done {work}")

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """The time at which `expire` must be called next; None if nothing is due."""
        paced = earliest(self.plans.deadline, self._grants.deadline)
        paced = earliest(paced, self.scheduler.just_in_time.deadline)
        paced = earliest(paced, self.viewers.deadline)
        return earliest(self.roster.deadline, self.leases.deadline, paced, self.broadcast.deadline)

    def expire(self, *, now: float) -> list[Action]:
        """Drop the nodes that are silent, and the leases that make no progress.

        All dropped nodes together cause one plan and one round of grants, because a plan is costly
        in a large fleet. If a region is cut off, hundreds of nodes become silent at once.
        """
        children = self.broadcast.tend(now=now)
        actions: list[Action] = []
        silent = self._admission.take_silent(now=now)
        if silent:
            actions.append(Note("warning", self.fleet.describe_silent(silent, now=now)))
        for member in silent:
            self.leases.drop_worker(member.node_id)
        late = self.leases.expire(now=now)
        for record in late:
            self.counters.add("leases_expired")
            if record.worker_id in self.roster.nodes:
                # This worker gets no other group before its next heartbeat.
                self.roster.nodes[record.worker_id].worker.is_stuck = True
        if late:
            numbers = Counter(record.worker_id for record in late)
            where = ", ".join(f"{number} on {node_id}" for node_id, number in numbers.items())
            text = f"leases expired without progress: {where}"
            actions.append(Note("warning", text, "expired leases"))
        if silent or self.plans.is_due(now=now):
            actions += self.plans.replan(now)
        held_until = self.scheduler.just_in_time.deadline
        is_due = self._grants.is_due(now=now) or (held_until is not None and now >= held_until)
        if actions or is_due:
            actions += [*self.review.update(now=now), *self._grant(now)]
        return children + actions + self.viewers.expire(now=now)

    HANDLERS: ClassVar[Mapping[type, Handler]] = {
        GrantsDue: _on_grants_due,
        GrantsStopped: _on_grants_stopped,
        BatchTaken: _on_batch,
        StepTaken: _on_step,
        GroupStored: _on_stored,
        GroupDiscarded: _on_discarded,
        ReviewDue: _on_review_due,
        SamplesTrained: _on_samples,
        StandbyChosen: _on_standby,
        Paused: _on_paused,
        HoldChosen: _on_hold,
        StatusMade: _on_status,
        OperationDone: _on_operation_done,
        Publishing: _on_publishing,
        RunEnded: _on_ended,
        LastCall: _on_last_call,
    }
    """For each type of event, the method that handles it."""


def _note_refusal(member: Member, message: Heartbeat) -> list[Action]:
    """If the heartbeat says that a worker's engine refuses a version, return a warning.

    Each refused version causes one warning.
    """
    stats, known = message.stats, member.stats
    version = stats.refused_version
    if version is None or (version, stats.refusal) == (known.refused_version, known.refusal):
        return []
    kept = "has none" if message.installed is None else f"keeps {message.installed}"
    text = f"{member.node_id} cannot install {version} and {kept}: {one_line(stats.refusal)}"
    return [Note("warning", text, "refused versions")]
