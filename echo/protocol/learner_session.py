"""The learner's side of the conversation: admit nodes, grant leases, take groups, send weights.

Theory of operation. The learner binds; everybody dials. Each routed message of a node is answered
over the link on which it came, so a node may change its way (another relay, or none) at any time.

Life of a group id (they are handed out in ascending order, and each stands for one prompt):

    granted --Deliver, valid--> storing --stored()--> accepted --> trained or discarded (the buffer)
       |  ^                                                |
       |  +-- expired, worker gone, refused: granted again |  any later result: Ack "duplicate"
       +--Failed--> ended with the worker's reason

* Every grant is journalled before it is sent, so that after a crash no honest result is unknown.
* A group is acknowledged only after `stored`: the journal holds it.
* A result whose samples are too old or from an abandoned lineage is refused with that reason and
  its group is granted again; the worker is told and forgets it.
* A group's content is checked against what was asked: prompt, group size, finite numbers.

Nothing here waits: what cannot be done now is done when the next heartbeat, result or step makes it
possible. `buffer` is read for its size; putting groups in and taking them out is the caller's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo.buffer import StalenessBuffer, find_fault
from echo.errors import RemoteProtocolError
from echo.metrics import Counters, NodeView
from echo.protocol.actions import Action, Note, RecordEnd, RecordGrant, Send, StoreGroup
from echo.protocol.broadcast import Broadcast, ParentFailed
from echo.protocol.codec import (
    Envelope,
    Frame,
    decode_envelope,
    decode_group,
    decode_message,
    encode,
)
from echo.protocol.joining import describe_assets, digest_mismatch
from echo.protocol.leases import LeaseBook, num_admissible
from echo.protocol.membership import Member, Roster
from echo.protocol.messages import (
    LEARNER_ID,
    PROTOCOL_VERSION,
    Ack,
    Admitted,
    Asset,
    AssetRequest,
    Deliver,
    Failed,
    Finish,
    Goodbye,
    Grant,
    Greet,
    Greeted,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Plan,
    Pulse,
    Ready,
    Refuse,
    Rehello,
    Welcome,
)
from echo.protocol.topology import plan_parents
from echo.rollout import Group, Lineage, is_surviving

MAX_ATTEMPTS = 20
"""Grants of one group after which it is given up: something about it kills workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """What the learner's session is told by the configuration."""

    run_id: str
    public_key: bytes
    advertise: str
    """Address that other nodes may dial; empty for "as you reached it"."""
    max_staleness: int
    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    vocab_size: int
    heartbeat_s: float
    dead_after_s: float
    settings: dict[str, Any]
    """What workers inherit."""
    assets: dict[str, bytes]
    digests: dict[str, str]


class LearnerSession:
    """The learner's conversation with every node, without IO and without a clock."""

    def __init__(
        self,
        settings: LearnerSettings,
        *,
        broadcast: Broadcast,
        buffer: StalenessBuffer,
        leases: LeaseBook,
        make_lease: Callable[[int, int], Lease],
        lineages: tuple[Lineage, ...],
        step: int,
        next_group_id: int,
        settled: Iterable[int],
    ) -> None:
        """Start without nodes.

        Args:
            settings: see there.
            broadcast: this node's part of the weights plane.
            buffer: groups accepted and not yet used.
            leases: leases that are out; after a restart the groups granted before are returned ones.
            make_lease: (group id, attempt) -> lease; the same id always has the same prompt.
            lineages: histories so far, the present one last.
            step: optimizer steps done.
            next_group_id: first id never granted.
            settled: ids below it that are accepted or ended.
        """
        self.settings = settings
        self.broadcast = broadcast
        self.buffer = buffer
        self.leases = leases
        self.lineages = lineages
        self.step = step
        self.counters = Counters()
        self.roster = Roster(heartbeat_s=settings.heartbeat_s, dead_after_s=settings.dead_after_s)
        self.next_group_id = next_group_id
        self.finish_reason: str | None = None
        self.is_granting = True
        self._make_lease = make_lease
        self._settled = set(settled)
        self._storing: dict[int, tuple[str, int]] = {}
        self._routes: dict[str, str] = {}
        self._plan_epoch = 0

    # --- links and messages ----------------------------------------------------------------------

    def disconnected(self, peer: str, *, now: float) -> list[Action]:
        """Forget a link; the nodes behind it are given up only by their silence."""
        for node_id in [n for n, p in self._routes.items() if p == peer]:
            del self._routes[node_id]
        return self.broadcast.remove_child(peer, now=now)

    def receive(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Handle one message; a peer's mistake is counted and noted, never raised."""
        try:
            envelope = decode_envelope(frames)
            if envelope.target not in ("", LEARNER_ID):
                raise RemoteProtocolError(f"a message for {envelope.target!r} sent to the learner")
            if envelope.target == LEARNER_ID:
                self._routes[envelope.source] = peer
            if envelope.protocol != PROTOCOL_VERSION:
                return self._refuse_protocol(envelope)
            message = decode_message(envelope)
            if not envelope.target:
                return self._on_link_message(peer, message, frames[1:], now)
            return self._on_routed(envelope.source, message, frames[1:], now)
        except RemoteProtocolError as error:
            self.counters.add("protocol_errors")
            return [Note("warning", f"refused a message: {error}")]

    def _refuse_protocol(self, envelope: Envelope) -> list[Action]:
        self.counters.add("refused/protocol_version")
        detail = (
            f"node {envelope.source} speaks protocol version {envelope.protocol}, the learner "
            f"{PROTOCOL_VERSION}; install the same release of echo-rl on both"
        )
        refuse = Refuse(reason="protocol_version", detail=detail)
        return [Note("warning", detail), *self._to(envelope.source, refuse)]

    def _on_link_message(
        self, peer: str, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        if isinstance(message, Greet):
            answer = Greeted(node_id=LEARNER_ID, role="learner")
            return [Send(peer, encode(answer, source=LEARNER_ID))]
        results = self.broadcast.receive(peer, message, payload, now=now)
        return [action for action in results if not isinstance(action, ParentFailed)]

    def _on_routed(
        self, source: str, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        match message:
            case Hello():
                return self._on_hello(source, message, now)
            case AssetRequest():
                return self._on_asset_request(source, message)
            case Ready():
                return self._on_ready(source, message, now)
        member = self.roster.nodes.get(source)
        if member is None or not member.is_member:
            return self._to(source, Rehello())
        match message:
            case Heartbeat():
                return self._on_heartbeat(member, message, now)
            case Deliver():
                return self._on_deliver(member, message, payload, now)
            case Failed():
                return self._on_failed(member, message, now)
            case Goodbye():
                del self.roster.nodes[source]
                note = Note("info", f"{source} left: {message.reason}")
                return [note, *self._drop(member, now)]
        raise RemoteProtocolError(f"{type(message).__name__} from {source} is not for the learner")

    def _to(self, node_id: str, message: Message, *payload: Frame) -> list[Action]:
        """Return the Send of a message to a node, or nothing if no link leads to it."""
        peer = self._routes.get(node_id)
        if peer is None:
            self.counters.add("dropped/no_route")
            return []
        return [Send(peer, encode(message, payload, source=LEARNER_ID, target=node_id))]

    # --- joining ---------------------------------------------------------------------------------

    def _on_hello(self, source: str, message: Hello, now: float) -> list[Action]:
        if (
            message.node_id != source
            or source == LEARNER_ID
            or message.role not in ("worker", "relay")
        ):
            raise RemoteProtocolError(
                f"a Hello of {message.role} {message.node_id!r} from {source!r}"
            )
        if self.finish_reason is not None:
            return self._to(source, Finish(reason=self.finish_reason))
        fault = digest_mismatch(ours=message.digests, theirs=self.settings.digests)
        if fault is not None:
            return self._refuse(source, "digest_mismatch", fault)
        old = self.roster.nodes.get(source)
        outcome = self.roster.hello(message, now=now)
        if outcome == "wait":
            return []
        if outcome == "name_taken":
            detail = f"another live node is called {source!r}; give this one its own [worker] name"
            return self._refuse(source, "name_taken", detail)
        actions: list[Action] = []
        if outcome == "new" and old is not None:
            actions.append(Note("warning", f"{source} was restarted; its leases are granted again"))
            actions += self._drop(old, now)
        settings = self.settings
        welcome = Welcome(
            run_id=settings.run_id,
            incarnation=message.incarnation,
            public_key=settings.public_key,
            lineages=self.lineages,
            settings=settings.settings,
            assets=describe_assets(settings.assets),
            digests=settings.digests,
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
        )
        return actions + self._to(source, welcome)

    def _refuse(self, source: str, reason: str, detail: str) -> list[Action]:
        self.counters.add(f"refused/{reason}")
        note = Note("warning", f"refused node {source} ({reason}): {detail}")
        return [note, *self._to(source, Refuse(reason=reason, detail=detail))]

    def _on_asset_request(self, source: str, message: AssetRequest) -> list[Action]:
        data = self.settings.assets.get(message.name)
        if data is None:
            raise RemoteProtocolError(f"{source} asked for the unknown file {message.name!r}")
        return self._to(source, Asset(name=message.name), data)

    def _on_ready(self, source: str, message: Ready, now: float) -> list[Action]:
        member = self.roster.nodes.get(source)
        if member is None or member.incarnation != message.incarnation:
            return self._to(source, Rehello())
        fault = digest_mismatch(ours=message.digests, theirs=self.settings.digests)
        if fault is not None:
            del self.roster.nodes[source]
            return self._refuse(source, "digest_mismatch", fault)
        was_member, member.is_member, member.heard_at = member.is_member, True, now
        actions = self._to(source, Admitted(incarnation=message.incarnation))
        if not was_member:
            actions += [Note("info", f"{member.role} {source} joined"), *self._replan()]
        return actions

    def _replan(self) -> list[Action]:
        """Tell every member whose parents have changed."""
        self._plan_epoch += 1
        plan = plan_parents(self.roster.sites(), learner_address=self.settings.advertise)
        actions: list[Action] = []
        for member in self.roster.members():
            if member.parents != plan[member.node_id]:
                member.parents = plan[member.node_id]
                actions += self._send_plan(member)
        return actions

    def _send_plan(self, member: Member) -> list[Action]:
        return self._to(member.node_id, Plan(epoch=self._plan_epoch, parents=member.parents))

    def _drop(self, member: Member, now: float) -> list[Action]:
        """Take back everything a node was given; it is no longer in the roster or was replaced."""
        self.leases.drop_worker(member.node_id)
        return [*self._replan(), *self.grant(now=now)]

    # --- heartbeats and leases -------------------------------------------------------------------

    def _on_heartbeat(self, member: Member, message: Heartbeat, now: float) -> list[Action]:
        if self.finish_reason is not None:
            return self._to(member.node_id, Finish(reason=self.finish_reason))
        has_progress = member.beat(message, now=now)
        actions = self._to(
            member.node_id, Pulse(step=self.step, newest=self.broadcast.newest_complete)
        )
        # A lost Plan shows as a parent that is not the planned one; repeating it is harmless.
        if member.parents and message.stats.parent != member.parents[0][0]:
            actions += self._send_plan(member)
        actions += self._reconcile(member, message, has_progress, now)
        return actions + self.grant(now=now)

    def _reconcile(
        self, member: Member, message: Heartbeat, has_progress: bool, now: float
    ) -> list[Action]:
        """Bring the lease book and the worker's own list together."""
        listed = {(state.group_id, state.attempt): state for state in message.leases}
        actions: list[Action] = []
        for record in self.leases.worker_leases(member.node_id):
            state = listed.pop((record.group_id, record.attempt), None)
            if state is not None:
                record.is_confirmed = True
                if state.num_tokens > record.num_tokens or (has_progress and state.num_tokens <= 0):
                    self.leases.renew(record, num_tokens=max(0, state.num_tokens), now=now)
            elif record.is_confirmed or now - record.sent_at > 2 * self.settings.heartbeat_s:
                # The Grant was lost, or the worker was restarted under the same incarnation.
                record.sent_at, record.is_confirmed = now, False
                lease = self._make_lease(record.group_id, record.attempt)
                actions += self._to(member.node_id, Grant(leases=(lease,)))
        for group_id, attempt in listed:
            if self._is_open(group_id):
                self.leases.adopt(group_id, attempt, member.node_id, now=now).is_confirmed = True
            else:
                ack = Ack(group_id=group_id, attempt=attempt, outcome="duplicate")
                actions += self._to(member.node_id, ack)
        return actions

    def _is_open(self, group_id: int) -> bool:
        """Whether a group has been granted and its result is still wanted."""
        return 0 <= group_id < self.next_group_id and group_id not in self._settled

    def grant(self, *, now: float) -> list[Action]:
        """Hand out as many groups as admission and the workers' capacities allow."""
        if self.finish_reason is not None or not self.is_granting:
            return []
        actions: list[Action] = []
        granted: dict[str, list[Lease]] = {}
        able = [(self._load(m), m.node_id, m) for m in self.roster.members("worker")]
        able = [entry for entry in able if self._may_grant(entry[2])]
        heapq.heapify(able)
        while able:
            # One group at a time to the worker with the smallest share of its capacity in use.
            _, node_id, member = heapq.heappop(able)
            group_id = self._next_group(actions)
            record = self.leases.grant(group_id, node_id, now=now)
            lease = self._make_lease(group_id, record.attempt)
            actions.append(RecordGrant(lease, node_id, member.installed))
            granted.setdefault(node_id, []).append(lease)
            if self._may_grant(member):
                heapq.heappush(able, (self._load(member), node_id, member))
        for node_id, leases in granted.items():
            actions += self._to(node_id, Grant(leases=tuple(leases)))
        return actions

    def _load(self, member: Member) -> float:
        return self.leases.num_leases(member.node_id) / max(1, member.capacity)

    def _may_grant(self, member: Member) -> bool:
        if member.installed is None or self.leases.num_leases(member.node_id) >= member.capacity:
            return False
        if not is_surviving(member.installed, self.lineages):
            return False
        return (
            num_admissible(
                max_staleness=self.settings.max_staleness,
                installed_step=member.installed.step,
                step=self.step,
                groups_per_step=self.settings.groups_per_step,
                num_buffered=len(self.buffer),
                num_running=self.leases.num_running,
            )
            > 0
        )

    def _next_group(self, actions: list[Action]) -> int:
        """Return the group to grant next: one that came back, otherwise a new one."""
        while (group_id := self.leases.next_returned()) is not None:
            if group_id in self._settled:
                continue
            if self.leases.num_attempts(group_id) < MAX_ATTEMPTS:
                return group_id
            actions += self._end(group_id, "attempts_exhausted")
        self.next_group_id += 1
        return self.next_group_id - 1

    def _end(self, group_id: int, reason: str) -> list[Action]:
        self._settled.add(group_id)
        self.leases.finish(group_id)
        self.counters.add(f"discarded/{reason}")
        return [RecordEnd(group_id, reason)]

    # --- results ---------------------------------------------------------------------------------

    def _on_deliver(
        self, member: Member, message: Deliver, payload: list[Frame], now: float
    ) -> list[Action]:
        if len(payload) != 2:
            raise RemoteProtocolError(f"a Deliver from {member.node_id} without its two frames")
        if message.group_id in self._storing:
            return []
        if message.group_id in self._settled:
            self.counters.add("duplicates")
            return self._ack(member.node_id, message, "duplicate")
        try:
            group = decode_group(payload[0], payload[1])
            reason = self._find_fault(group, message, member)
        except RemoteProtocolError as error:
            self.counters.add("protocol_errors")
            note = Note("warning", f"{member.node_id}: {error}")
            return [note, *self._refuse_group(member.node_id, message, "malformed", now)]
        if reason is not None:
            return self._refuse_group(member.node_id, message, reason, now)
        self._storing[group.group_id] = (member.node_id, group.attempt)
        return [StoreGroup(group, payload[0], payload[1])]

    def _find_fault(self, group: Group, message: Deliver, member: Member) -> str | None:
        """Return why a delivered group cannot be accepted, or None."""
        if (group.group_id, group.attempt, group.worker_id) != (
            message.group_id,
            message.attempt,
            member.node_id,
        ):
            return "mislabelled"
        if not self._is_open(group.group_id):
            return "unknown_group"
        expected = self._make_lease(group.group_id, group.attempt)
        if group.prompt_ids.tolist() != list(expected.prompt_ids):
            return "another_prompt"
        if len(group.rollouts) != self.settings.group_size:
            return "group_size"
        for rollout in group.rollouts:
            logprobs = rollout.sampler_logprobs
            if rollout.num_tokens > self.settings.max_completion_tokens:
                return "too_long"
            if not np.isfinite(logprobs).all() or float(logprobs.max()) > 1e-3:
                return "bad_logprobs"
            ids = rollout.token_ids
            if int(ids.min()) < 0 or int(ids.max()) >= self.settings.vocab_size:
                return "bad_token_ids"
        return find_fault(
            group,
            step=self.step,
            max_staleness=self.settings.max_staleness,
            lineages=self.lineages,
        )

    def _refuse_group(
        self, node_id: str, message: Deliver, reason: str, now: float
    ) -> list[Action]:
        """Tell the worker to forget this result; the group is granted again."""
        self.counters.add(f"refused/{reason}")
        for record in self.leases.worker_leases(node_id):
            if (record.group_id, record.attempt) == (message.group_id, message.attempt):
                self.leases.revoke(record)
        if self._is_open(message.group_id):
            self.leases.return_group(message.group_id)
        return [*self._ack(node_id, message, "refused", reason), *self.grant(now=now)]

    def _ack(
        self, node_id: str, message: Deliver | Failed, outcome: str, reason: str = ""
    ) -> list[Action]:
        ack = Ack(
            group_id=message.group_id, attempt=message.attempt, outcome=outcome, reason=reason
        )
        return self._to(node_id, ack)

    def stored(self, group_id: int, *, now: float) -> list[Action]:
        """Acknowledge a group that the journal now holds; the caller has put it into the buffer."""
        node_id, attempt = self._storing.pop(group_id)
        self._settled.add(group_id)
        self.leases.finish(group_id)
        self.counters.add("accepted")
        ack = Ack(group_id=group_id, attempt=attempt, outcome="accepted")
        return [*self._to(node_id, ack), *self.grant(now=now)]

    def _on_failed(self, member: Member, message: Failed, now: float) -> list[Action]:
        if message.group_id in self._storing or not self._is_open(message.group_id):
            return self._ack(member.node_id, message, "duplicate")
        reason = message.reason if message.reason.isidentifier() else "failed"
        text = f"group {message.group_id} failed on {member.node_id}: {reason}: {message.detail}"
        return [
            Note("warning", text),
            *self._end(message.group_id, reason),
            *self._ack(member.node_id, message, "refused", reason),
            *self.grant(now=now),
        ]

    # --- the learner's own steps -----------------------------------------------------------------

    def advance(self, step: int, *, now: float) -> list[Action]:
        """Note that an optimizer step was made: there is room for more groups."""
        self.step = step
        return self.grant(now=now)

    def finish(self, reason: str) -> list[Action]:
        """Tell every node that the run is over."""
        self.finish_reason = reason
        return [
            action
            for node_id in self.roster.nodes
            for action in self._to(node_id, Finish(reason=reason))
        ]

    def views(self, *, now: float) -> tuple[NodeView, ...]:
        """Return every node as the live view shows it."""
        return tuple(
            member.view(step=self.step, num_leases=self.leases.num_leases(member.node_id), now=now)
            for member in self.roster.nodes.values()
        )

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called next."""
        instants = (self.roster.deadline, self.leases.deadline)
        return min((t for t in instants if t is not None), default=None)

    def expire(self, *, now: float) -> list[Action]:
        """Give up nodes that are silent and leases without progress."""
        actions: list[Action] = []
        for member in self.roster.expire(now=now):
            silent_s = now - member.heard_at
            num_leases = self.leases.num_leases(member.node_id)
            text = f"{member.node_id} is silent for {silent_s:.0f} s; {num_leases} groups granted again"
            actions += [Note("warning", text), *self._drop(member, now)]
        for record in self.leases.expire(now=now):
            self.counters.add("leases_expired")
            text = (
                f"lease of group {record.group_id} on {record.worker_id} expired without progress"
            )
            actions.append(Note("warning", text))
        return actions + self.grant(now=now) if actions else []
