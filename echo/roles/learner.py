"""The learner's role: admission, leases out, groups in, weights out.

Theory of operation. The learner binds; all other nodes dial. Each routed message of a node is
answered
over the link on which it came, so a node may change its way (another relay, or none) at any time.

Nothing here waits: what cannot be done now is done when the next heartbeat, result or step makes it
possible. A message makes a round of grants due, and `expire` makes it: so a fault in granting loses
nothing of what was decided about the message. The role reads the size of `buffer`; its caller puts
groups in and takes them out.

Its parts: `roles/joining.py` admits nodes, `leases/scheduler.py` grants leases, `leases/results.py`
judges results, `weights/broadcast.py` distributes the weights along the plan of
`weights/topology/plan.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from echo.core.bounds import clamped_rate
from echo.core.errors import DataError, ForgedError, LocalProtocolError, RemoteProtocolError
from echo.core.metrics import Counters, NodeView
from echo.core.timers import Paced, RecentMap, earliest
from echo.core.units import one_line
from echo.leases.book import LOST_WORKER, LeaseBook, LeasedWorker
from echo.leases.mismatch import Mismatches, Sampled
from echo.leases.run import AcceptedGroups, LeaseSettings, Prompts, RunState
from echo.leases.scheduler import GRANT_S, Scheduler, WaitReason
from echo.roles.joining import Admission, AdmissionSettings
from echo.roles.members import Member, Roster, Shutdown
from echo.roles.node import MAX_PEER_NAMES, Role
from echo.weights.broadcast import Broadcast
from echo.weights.link import ParentFailed, UplinkProbe, acknowledge
from echo.weights.topology.plan import PLAN_S, Planner
from echo.weights.topology.sites import Site
from echo.wire.actions import Action, Complaints, HangUp, Note, Routes, Send, Work
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

MAX_NAMES_TOLD = 3
"""Silent nodes that one line names; the rest of them it counts."""
MAX_WORKERS_TOLD = 8
"""Workers whose state the line says of what the learner waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The learner's settings, by plane."""

    admission: AdmissionSettings
    leases: LeaseSettings
    site: Site
    """Its address may be empty for "as you reached it"; its uplink counts until transfers have
    shown it."""
    chunk_bytes: int = 1 << 20
    uplinks: dict[str, float] = field(default_factory=dict)
    """Node id -> bytes per second that it could send before the run was resumed, the learner's own
    among them."""


class Learner(Role):
    """The learner's conversation with every node, without IO and without a clock."""

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
        for node_id, bytes_per_s in settings.uplinks.items():
            self.roster.uplinks[node_id] = bytes_per_s
        if LEARNER_ID in settings.uplinks:
            broadcast.uplink.show(settings.uplinks[LEARNER_ID])
        self.is_granting = True
        self._plans, self._grants = Paced(PLAN_S), Paced(GRANT_S)
        self._routes = Routes(self.counters, self.roster.channel_of)
        self._peer_names: RecentMap[str, str] = RecentMap(max_entries=MAX_PEER_NAMES)
        self._complaints = Complaints()
        self._admission = Admission(
            admission,
            lineages=run.lineages,
            roster=self.roster,
            counters=self.counters,
            routes=self._routes,
            complaints=self._complaints,
            role=self,
        )
        self._scheduler = Scheduler(
            settings.leases,
            run,
            buffer=buffer,
            prompts=prompts,
            counters=self.counters,
            routes=self._routes,
            complaints=self._complaints,
        )
        self._mismatches = Mismatches()
        self._has_set_aside = False
        self._shutdown = Shutdown(self.roster, self._routes)
        self.planning = Planner(learner=settings.site, chunk_bytes=settings.chunk_bytes)
        self._probing = UplinkProbe(broadcast.uplink, node_id=LEARNER_ID)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._scheduler.groups.step

    @property
    def buffer(self) -> AcceptedGroups:
        """Groups accepted and not yet used."""
        return self._scheduler.buffer

    @property
    def leases(self) -> LeaseBook:
        """Leases that are out."""
        return self._scheduler.groups.leases

    def uplinks(self) -> dict[str, float]:
        """Return what every node could send when it was last heard, bytes per second by name."""
        own = clamped_rate(self.broadcast.uplink.bytes_per_s)
        return self.roster.uplinks.as_dict() | ({LEARNER_ID: own} if own else {})

    # --- links and messages ----------------------------------------------------------------------

    def disconnected(self, peer: str, reason: str, *, now: float) -> list[Action]:
        """Forget a link; the nodes behind it are given up only by their silence."""
        self._routes.forget(peer)
        self._peer_names.discard(peer)
        return self.broadcast.remove_child(peer, now=now)

    def receive(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Handle one message; a peer's mistake is counted and noted, never raised."""
        try:
            return self._receive(peer, decode_envelope(frames), frames[1:], now)
        except RemoteProtocolError as error:
            self.counters.add("protocol_errors")
            source = describe(frames)[0] or peer
            text = f"refused a message: {error}"
            return self._complaints.note(source, "protocol", text, now=now)

    def expel(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Part with the node that sent a message, or with the link if it concerned the link alone.

        A relay's link stays for the others behind it; the node has to say hello again. Plans and
        grants follow when the next deadline is due.
        """
        self.counters.add("internal_errors")
        source, target, _ = describe(frames)
        if target != LEARNER_ID:
            return [HangUp(peer), *self.disconnected(peer, "an internal error", now=now)]
        if self._routes.peer_of(source) == peer and self._admission.expel(source, now=now):
            self.leases.drop_worker(source)
            self._plans.want(now=now)
            self._grants.want(now=now)
        return []

    def _receive(
        self, peer: str, envelope: Envelope, payload: list[Frame], now: float
    ) -> list[Action]:
        if envelope.target not in ("", LEARNER_ID):
            raise RemoteProtocolError(f"a message for {envelope.target!r} sent to the learner")
        fault = other_protocol(envelope)
        if fault is not None:
            # Answered in our version: the envelope alone tells the other what is wrong.
            self.counters.add("refused/protocol_version")
            refuse = Refuse(reason="protocol_version", detail=fault)
            frames = encode(refuse, source=LEARNER_ID, target=envelope.source)
            notes = self._complaints.note(envelope.source, "protocol_version", fault, now=now)
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
            return self._on_probe_ack(peer, now)
        results = self.broadcast.receive(peer, message, payload, now=now)
        return [action for action in results if not isinstance(action, ParentFailed)]

    def _on_routed(
        self, peer: str, envelope: Envelope, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        """Handle what comes under the name of a node.

        A node is heard over the link on which its process has joined, and answered there. A message
        under its name over another link is answered there, and is ignored unless that process has
        sealed it.
        """
        source = envelope.source
        try:
            is_genuine = self._admission.is_genuine(envelope, message, payload)
        except ForgedError as error:
            return self._refuse_forged(peer, source, message, error, now)
        if not is_genuine and self._admission.has_joined(source):
            self.counters.add("dropped/other_channel")
            return []
        former = self._routes.peer_of(source)
        self._routes.learn(source, peer)
        try:
            is_new_way = peer != former and self._admission.is_missing_hello(source, message)
            if is_new_way or not is_genuine:
                return self._routes.to(source, Rehello())
            return self._on_heard(source, message, payload, now)
        finally:
            if peer != former and not self._admission.proves_name(source, message):
                self._routes.restore(source, former)

    def _refuse_forged(
        self, peer: str, source: str, message: Message, error: ForgedError, now: float
    ) -> list[Action]:
        """Drop a message that was forged or changed on the way, and name its link."""
        self.counters.add("refused/forged")
        name = self._peer_names.get(peer) or peer
        over = f"it came over the link of {name}"
        if name == source:
            over += " itself"
        text = f"refused a {type(message).__name__} under the name of {source}: {error}; {over}"
        return self._complaints.note(name, "forged", text, now=now)

    def _on_heard(
        self, source: str, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        reason = self.finish_reason
        if isinstance(message, Hello) and message.node_id == source and reason is not None:
            return self._admission.finish(message, reason)
        is_known = source in self.roster.nodes
        if isinstance(message, AssetRequest | Ready) and is_known and reason is not None:
            return self._routes.to(source, Finish(reason=reason))
        return self._admission.receive(source, message, payload, now=now)

    def on_work(
        self, member: Member, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        """Handle a node's messages other than joining, including Goodbye."""
        match message:
            case Heartbeat():
                return self._on_heartbeat(member, message, now)
            case Deliver() | Partial() | Failed():
                self._grants.want(now=now)
                return self._scheduler.results.receive(member.node_id, message, payload, now=now)
            case Goodbye():
                if message.is_released:
                    self.roster.release(member)
                level = "warning" if message.has_failed else "info"
                note = Note(level, f"{member.node_id} left: {one_line(message.reason)}")
                return [note, *self.drop(member, now=now), *self._shutdown.tell()]
        raise LocalProtocolError(f"{type(message).__name__} is no work of a node")

    # --- the plan --------------------------------------------------------------------------------

    @property
    def version_bytes(self) -> int:
        """Bytes of the newest version on the wire; 0 before the first."""
        payload = self.broadcast.payload
        return 0 if payload is None else payload.num_bytes

    def replan(self, now: float, *, is_between: bool = False) -> list[Action]:
        """Tell every member whose parents have changed, soon if not now."""
        if not self._plans.may(len(self.roster.nodes), now=now):
            return []
        self.planning.expect(self.broadcast.payload)
        moved = self.planning.move(
            [member.node for member in self.roster.members()],
            uplink_bytes_per_s=self.broadcast.uplink.bytes_per_s,
            now=now,
            is_between=is_between,
        )
        return [action for name, plan in moved for action in self._routes.to(name, plan)]

    def _probe(self, member: Member, now: float) -> list[Action]:
        """Show this node's own uplink to one that showed its own a heartbeat ago, and is done.

        Not beside weights: it would show what they leave of it.
        """
        peer = self._routes.peer_of(member.node_id)
        is_shown = member.stats.uplink_bytes_per_s is not None
        if peer is None or not is_shown or self.broadcast.is_serving:
            return []
        return self._probing.begin(peer, payload_bytes=self.version_bytes, now=now)

    def _on_probe_ack(self, peer: str, now: float) -> list[Action]:
        was_known = self.broadcast.uplink.bytes_per_s is not None
        actions = self._probing.acknowledged(peer, now=now)
        if not was_known and self.broadcast.uplink.bytes_per_s is not None:
            self.planning.has_news = True
        return actions

    def plan_publish(self, *, now: float) -> list[Action]:
        """Plan for a version that is about to go out, if a plan is due."""
        is_due = self.planning.is_due(now=now, is_between=True)
        return self.replan(now, is_between=True) if is_due else []

    def drop(self, member: Member, *, now: float) -> list[Action]:
        """Take back everything a node was given; it is no longer in the roster or was replaced."""
        self.leases.drop_worker(member.node_id)
        self._grants.want(now=now)
        return self.replan(now)

    # --- heartbeats and leases -------------------------------------------------------------------

    def _on_heartbeat(self, member: Member, message: Heartbeat, now: float) -> list[Action]:
        if self.finish_reason is not None and self._shutdown.may_leave(member):
            return self._routes.to(member.node_id, Finish(reason=self.finish_reason))
        has_new_suspects = message.stats.suspects != member.stats.suspects
        self.planning.learn(message.stats, former=member.stats)
        probe = self._probe(member, now)
        refused = _tell_refusal(member, message)
        has_progress = member.beat(message, now=now)
        if message.stats.uplink_bytes_per_s:
            self.roster.uplinks[member.node_id] = message.stats.uplink_bytes_per_s
        actions = self._routes.to(
            member.node_id, Pulse(step=self.step, newest=self.broadcast.newest_complete)
        )
        actions += [*probe, *refused]
        plan = member.node.plan
        # A lost plan shows as a parent that is not the planned one; repeating it is harmless.
        if plan is not None and message.stats.parent != plan.first_parent:
            plan = msgspec.structs.replace(plan, epoch=self.planning.epoch)
            actions += self._routes.to(member.node_id, plan)
        if has_new_suspects or self.planning.is_due(now=now):
            actions += self.replan(now)
        self._grants.want(now=now)
        heard = self._scheduler.on_heartbeat(
            member.worker, message, has_progress=has_progress, now=now
        )
        return [*actions, *heard]

    def grant(self, *, now: float) -> list[Action]:
        """Grant the groups that admission and capacities allow, soon if not now."""
        is_over = self.finish_reason is not None or not self.is_granting
        if is_over or self._scheduler.quota.is_closed(self.broadcast.newest_complete):
            self._grants.deadline = None
            return []
        if not self._grants.may(len(self.roster.nodes), now=now):
            return []
        actions = self._scheduler.grant(self._workers, now=now)
        self.is_granting = self.prompt_fault is None
        return actions

    @property
    def prompt_fault(self) -> DataError | None:
        """Why no more groups can be granted: there are no more prompts."""
        return self._scheduler.prompt_fault

    def validate(self) -> None:
        """Check that nodes, leases and groups agree; for tests.

        Raises:
            AssertionError: if they do not.
        """
        self._scheduler.groups.validate()
        known = {*self.roster.nodes, LOST_WORKER}
        assert self.leases.worker_ids <= known, "a node that is gone holds a lease"

    def wait_reason(self) -> WaitReason:
        """Return what keeps the groups of the next batch from being granted."""
        return self._scheduler.wait_reason(self._workers, self.broadcast.newest_complete)

    @property
    def _workers(self) -> list[LeasedWorker]:
        return [member.worker for member in self.roster.active("worker")]

    def set_standby(self, names: Collection[str], *, now: float) -> list[Action]:
        """Put exactly these workers on standby; return what is to be done where anything changes.

        A worker on standby keeps its control link and its heartbeats, so that it can be activated
        within one message. It is granted nothing; what it has in hand it finishes and delivers. It
        gets no weights either (`weights/topology/plan.py`): they would cost traffic, and the
        broadcast would take as long as for all workers and not as long as for those that generate.
        Activated again it fetches, like a late joiner, the cheapest of image, keyframe and deltas,
        and is granted leases once it has them.

        A worker knows that it stands by from its plan, which then names no parents; the plan is
        repeated with each heartbeat until it is obeyed, so a lost one does no harm.
        """
        changed = False
        for member in self.roster.members("worker"):
            is_standby = member.node_id in names
            changed |= is_standby != member.is_standby
            member.node.is_standby = is_standby
        return [*self.replan(now), *self.grant(now=now)] if changed else []

    def stored(self, group_id: int, *, is_useful: bool, now: float) -> list[Action]:
        """Acknowledge a group that the ledger now holds.

        Args:
            group_id: the group; a useful one the caller has put into the buffer.
            is_useful: whether something can be learned from it, which counts for its worker.
            now: the present instant.
        """
        stored = self._scheduler.results.stored(group_id, is_useful=is_useful, now=now)
        return [*stored, *self.review_workers(now=now), *self.grant(now=now)]

    # --- whose groups teach something ------------------------------------------------------------

    @property
    def num_discounted(self) -> int:
        """Groups since the last useful one that do not say whether the run is zero-signal."""
        return self._scheduler.usefulness.num_discounted

    def review_workers(self, *, now: float) -> list[Action]:
        """Decide which workers are set aside, and for how long; call it now and then."""
        usefulness = self._scheduler.usefulness
        if usefulness.is_idle and not self._has_set_aside:
            return []
        members = self.roster.members("worker")
        can_sample = {
            member.node_id: member.worker.capacity > 0 and not member.worker.is_stuck
            for member in members
            if not member.is_standby
        }
        texts = usefulness.review(can_sample, now=now)
        for member in members:
            member.worker.is_set_aside = usefulness.is_set_aside(member.node_id)
        self._has_set_aside = any(member.worker.is_set_aside for member in members)
        return [Note("warning", text) for text in texts]

    def compare(self, samples: Sequence[Sampled], *, now: float) -> list[Action]:
        """Compare what workers state of their samples with the learner's own scores.

        Args:
            samples: the groups of a step.
            now: the present instant.
        """
        mismatches, usefulness = self._mismatches, self._scheduler.usefulness
        for each in samples:
            member = self.roster.nodes.get(each.worker_id)
            engine = "" if member is None else member.stats.engine
            mismatches.trained(each, engine=engine)
        texts = [
            usefulness.exclude(worker_id, why, now=now)
            for worker_id, why in mismatches.find_outliers().items()
            if not usefulness.is_set_aside(worker_id)
        ]
        if texts:
            self.counters.add("mismatched_workers", len(texts))
        return [*(Note("warning", text) for text in texts), *self.review_workers(now=now)]

    # --- the learner's own steps -----------------------------------------------------------------

    def advance(self, step: int, *, now: float) -> list[Action]:
        """Note that an optimizer step was made: there is room for more groups."""
        self._scheduler.groups.step = step
        return self.grant(now=now)

    @property
    def finish_reason(self) -> str | None:
        """Why the run has ended; None while it has not."""
        return self._shutdown.reason

    def finish(self, reason: str) -> list[Action]:
        """Send Finish to every node; to relays once no node behind them is left."""
        self._shutdown.reason = reason
        return self._shutdown.tell()

    def dismiss_all(self) -> list[Action]:
        """Send Finish to the nodes that are still here, and to every node that sends later."""
        self._shutdown.is_last_call = True
        return self._shutdown.tell()

    def views(self, *, now: float) -> tuple[NodeView, ...]:
        """Return every node as the live view shows it."""
        return tuple(
            member.view(step=self.step, num_leases=self.leases.num_leases(member.node_id), now=now)
            for member in self.roster.nodes.values()
        )

    def broadcast_progress(self) -> tuple[int, int]:
        """Return (chunks of the newest version that nodes hold, chunks that they want), summed."""
        newest = self.broadcast.newest_complete
        if newest is None:
            return 0, 0
        num_chunks = self.broadcast.store[newest].manifest.num_chunks
        held = 0
        members = self.roster.active()
        for member in members:
            if member.installed is not None and member.installed >= newest:
                held += num_chunks
            elif member.stats.fetching == newest:
                held += member.stats.num_chunks_held
        return held, num_chunks * len(members)

    def describe_wait(self) -> str:
        """Say what the learner waits for, and for whom, in one line."""
        num_groups = self.settings.leases.groups_per_step
        missing = num_groups - len(self.buffer)
        workers = self.roster.active("worker")
        if missing <= 0:
            return ""
        if not workers:
            has_standby = bool(self.roster.members("worker"))
            why = "every worker is on standby" if has_standby else "no worker is connected"
            return f"{missing} groups; {why}"
        held = [(self.leases.num_leases(member.node_id), member) for member in workers]
        held.sort(key=lambda each: -each[0])
        fleet = [member.describe(number) for number, member in held[:MAX_WORKERS_TOLD]]
        if others := held[MAX_WORKERS_TOLD:]:
            fleet.append(f"{len(others)} others have {sum(number for number, _ in others)}")
        return f"{missing} of {num_groups} groups; {'; '.join(fleet)}"

    def worked(self, work: Work, fault: str, *, now: float) -> list[Action]:
        """Take the result of work in a thread; the learner has none."""
        raise LocalProtocolError(f"the learner has done {work}")

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called next."""
        paced = earliest(self._plans.deadline, self._grants.deadline)
        return earliest(self.roster.deadline, self.leases.deadline, paced, self.broadcast.deadline)

    def expire(self, *, now: float) -> list[Action]:
        """Give up nodes that are silent and leases without progress.

        However many are silent, one plan and one round of grants follow: a plan costs in proportion
        to the fleet, and where a region is cut off hundreds fall silent at once.
        """
        children = self.broadcast.tend(now=now)
        actions: list[Action] = []
        silent = self._admission.take_silent(now=now)
        if silent:
            actions.append(Note("warning", self._describe_silent(silent, now)))
        for member in silent:
            self.leases.drop_worker(member.node_id)
        late = self.leases.expire(now=now)
        for record in late:
            self.counters.add("leases_expired")
            if record.worker_id in self.roster.nodes:
                # It gets no other group before its next heartbeat shows how it fares.
                self.roster.nodes[record.worker_id].worker.is_stuck = True
        if late:
            numbers = Counter(record.worker_id for record in late)
            where = ", ".join(f"{number} on {node_id}" for node_id, number in numbers.items())
            text = f"leases expired without progress: {where}"
            actions.append(Note("warning", text, "expired leases"))
        if silent or self._plans.is_due(now=now):
            actions += self.replan(now)
        if actions or self._grants.is_due(now=now):
            actions += [*self.review_workers(now=now), *self.grant(now=now)]
        return children + actions

    def _describe_silent(self, silent: Sequence[Member], now: float) -> str:
        """Say in one line who is given up, however many they are."""
        names = [member.node_id for member in silent]
        if len(names) > MAX_NAMES_TOLD:
            names[MAX_NAMES_TOLD:] = [f"{len(names) - MAX_NAMES_TOLD} others"]
        silent_s = min(now - member.last_seen_at for member in silent)
        num_groups = sum(self.leases.num_leases(member.node_id) for member in silent)
        verb = "is" if len(silent) == 1 else "are"
        return (
            f"{', '.join(names)} {verb} silent for {silent_s:.0f} s; {num_groups} groups are "
            "granted again"
        )


def _tell_refusal(member: Member, message: Heartbeat) -> list[Action]:
    """Tell which version an engine refuses, and why, when a heartbeat first says so."""
    stats, known = message.stats, member.stats
    version = stats.refused_version
    if version is None or (version, stats.refusal) == (known.refused_version, known.refusal):
        return []
    kept = "has none" if message.installed is None else f"keeps {message.installed}"
    text = f"{member.node_id} cannot install {version} and {kept}: {one_line(stats.refusal)}"
    return [Note("warning", text, "refused versions")]
