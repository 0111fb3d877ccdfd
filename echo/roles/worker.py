"""The worker's role: leases in, groups out.

A lease waits in the queue, runs in the engine, may be interrupted between two calls of the engine,
and its result lies in the outbox until the learner has it on disk (`leases/held.py`: a table of
these states). Each heartbeat lists all of them, so the learner knows what it must send again and
what it need not renew. A cut changes nothing here: running groups go on, results are kept, and
after the next Admitted everything unacknowledged is sent again.

Interrupted groups are shipped to the learner now and then (`ship`), which leases them to others if
this worker does not come back. A worker that does come back lists the groups that it still has, and
the learner acknowledges the unwanted ones.

The role decides, and its shell (`runtime/worker/node.py`, or a simulation) carries out and reports:

    Sample         ->  sampled or on_nonfinite, for each group as it grows; then returned, refused,
                       or raised
    Recall             stop that call of the engine: it returns what it has
    OfferEpisodes  ->  finished, or failed; Withdraw -> dropped  (agents)
    Score          ->  scored, or failed
    Install        ->  installed, or install_failed
    Save           ->  saved
    Release        ->  released
    Drained            nothing is left here that must not be lost

An engine that takes requests at any time gets one call per group, as soon as there is room for it.
Any other gets one batch of groups after another, and a batch lasts as long as its longest rollout,
while fewer and fewer of its rows do anything. So with `over_submission` = f > 1 (active partial
rollouts, APRIL) a batch of N groups is recalled when N / f of them are whole and others wait for
the room: what is unfinished is kept with its tokens, log-probabilities and versions, and goes on
in the next batch, before fresh groups, oldest first, under the newest weights. A continued group
takes only the rows of its unfinished rollouts, and fresh groups take the others. A group that is
whole is scored and delivered at once, whatever the others do. An engine that takes requests at any
time has no batch to wait for: there it is handed f times the groups that its memory holds, so that
its queue never runs dry while stragglers keep their places.

A call lasts `ship_s` at most: then what it has sampled is saved in this worker's own file,
shipped to the learner, and continued. So a worker that is killed loses no more than that.

The newest complete version is installed in flight: no rollout has to end for it, and each token
says which version sampled it. If the engine refuses it, the one before goes on sampling.

An engine may hold several versions side by side (adapters in vLLM). Then each call names the one
that samples it: the newest for a fresh group, and for a continued one that which began it, so that
no group mixes versions. A group whose version is too old to be trained on, or has left the engine,
is sampled from the start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from echo.core.bounds import MAX_LEASES, MAX_PAYLOAD_BYTES
from echo.core.errors import EngineError, RemoteProtocolError
from echo.core.rollout import (
    Group,
    Lineage,
    PartialRollout,
    PolicyVersion,
    Rollout,
    is_surviving,
)
from echo.core.timers import earliest
from echo.core.units import format_duration, one_line
from echo.leases.held import (
    BUSY,
    WAITING,
    Closed,
    Dropped,
    GroupState,
    HandedOver,
    HeldLeases,
    LeaseKey,
    PartialGroup,
    Reclaimed,
    Reported,
    Stopped,
    Whole,
    key_of,
)
from echo.leases.keeper import Save
from echo.leases.outbox import Outbox
from echo.leases.partials import (
    PartialRules,
    apply_staleness_policy,
    decode_continuations,
    decode_groups,
    encode_groups,
    encode_members,
)
from echo.roles.departure import DRAIN_S, Drained, Release, ReleaseTerms
from echo.roles.engine_facts import EngineFacts
from echo.roles.installing import INSTALL_AGAIN_S, Install
from echo.roles.joining import NodeSettings
from echo.roles.members import IDLE
from echo.roles.node import DialingRole
from echo.roles.sampling import (
    EngineCall,
    OfferEpisodes,
    Recall,
    Sample,
    Score,
    Withdraw,
    make_call,
)
from echo.weights.broadcast import Broadcast
from echo.wire.actions import Action, Note, Stop
from echo.wire.codec import Frame, encode_group, payload_bytes
from echo.wire.messages import (
    BAD_LOGPROBS,
    ENGINE_ERROR,
    Ack,
    Deliver,
    Failed,
    Goodbye,
    Grant,
    Lease,
    LeaseState,
    Message,
    NodeStats,
    Partial,
    Reclaim,
    TopologyPlan,
    known_reason,
)

MAX_VERSION_WAIT_S = 30.0
"""Seconds that a lease waits for its version.

The learner grants by the version that the worker reported last. A worker that holds an older one
since, as after a restart, has the newer one soon, or never: its uplink may be cut off, or its
engine may refuse the version. So it waits, and then gives the lease back for another worker.
"""


MAX_DETAIL_LENGTH = 500
"""Characters that are told of a group that cannot be finished."""
MAX_TRACEBACK_LENGTH = 10_000


class Worker(DialingRole):
    """A dialling role with a queue of leases, an engine's calls, and an outbox of results."""

    def __init__(
        self,
        settings: NodeSettings,
        broadcast: Broadcast,
        outbox: Outbox,
        *,
        terms: ReleaseTerms | None = None,
        version_wait_s: float = MAX_VERSION_WAIT_S,
        now: float,
    ) -> None:
        """Start without leases and without an engine; `built` brings it.

        Args:
            settings: of the node.
            broadcast: its part of the weights plane.
            outbox: for results.
            terms: for how long its machine is kept; None is forever.
            version_wait_s: for how long a lease may wait for its version.
            now: the present.
        """
        super().__init__(settings, broadcast, now=now)
        self.outbox = outbox
        self.terms = terms or ReleaseTerms()
        self.engine: EngineFacts | None = None
        self.max_groups = 0
        """Groups that may run and wait here at once."""
        self.installed_version: PolicyVersion | None = None
        self.standby_since: float | None = None
        """Since when the learner has had no work for this worker; None while it is active."""
        self.tokens_sampled = 0
        self.num_accepted = 0
        """Groups that the learner has taken since this process started."""
        self.held = HeldLeases(outbox)
        self.partial_counts: Counter[str] = Counter()
        """Counts of unfinished rollouts, for the learner's metrics."""
        self._version_wait_s = version_wait_s
        self._waiting_since: dict[LeaseKey, float] = {}
        """Of leases that ask for newer weights."""
        self._versions: tuple[PolicyVersion, ...] = ()
        """The versions that the engine holds, as they were installed."""
        self._calls: list[EngineCall] = []
        self._max_together = MAX_LEASES
        """Groups to sample in one call: fewer after one that raised, to find whose fault it is."""
        self._installing: PolicyVersion | None = None
        self._refusal: tuple[PolicyVersion, str] | None = None
        """The version that the engine refused last, and why; None once it has installed one."""
        self._install_again_at = math.inf
        self._is_held = False
        """Whether the engine is kept empty until newer weights are in it."""
        self._saved = b""
        self._saved_at = -math.inf
        self._num_saving = 0
        self._drain_until = math.inf
        """Until when it waits for its engine to stop; once it has handed over, for the rest."""
        self._has_handed_over = self._is_drained = False
        self._retiring = ""
        """Why this worker gives its machine back; empty if it does not."""

    def validate(self) -> None:
        """Check that leases, outbox and calls of the engine agree; for tests.

        Raises:
            AssertionError: if they do not.
        """
        self.held.validate()
        in_calls = [group for call in self._calls for group in call.groups]
        assert len(set(in_calls)) == len(in_calls), "two calls of the engine have the same group"
        if self.engine is not None and self.engine.sampler != "agents":
            sampled = self.held.of(GroupState.RUNNING, GroupState.RECLAIMED)
            assert set(sampled) <= set(in_calls), "no call of the engine has a running group"
        is_waiting = self._waits_for_whole and self._installing is not None
        assert not (is_waiting and self._calls), "newer weights come into a running group"

    # --- what the learner and the operator are told ----------------------------------------------

    def version_in_use(self) -> PolicyVersion | None:
        """Return the version that the engine samples from."""
        return self.installed_version

    def capacity(self) -> int:
        """Return how many groups may be held; 0 while nothing could be sampled or delivered."""
        is_closed = self.installed_version is None or self.outbox.is_full
        return 0 if is_closed else min(self.max_groups, MAX_LEASES)

    @property
    def lineages(self) -> tuple[Lineage, ...]:
        """The learner's histories so far, oldest first."""
        return self._joining.lineages

    @property
    def activity(self) -> str:
        """The present work of this worker, or the thing that it waits for."""
        if self._retiring and self._is_drained:
            return "releasing"
        if self.engine is None:
            return "starting"
        if self.engine.sampler == "agents":
            return "serving agents"
        if self._calls:
            return "sampling"
        if self.held.of(GroupState.SCORING):
            return "scoring"
        if self._installing is not None:
            return f"installing {self._installing}"
        if self.standby_since is not None:
            return "standing by"
        if self.installed_version is None:
            return "waiting for weights"
        if self.held.awaiting(self.installed_version):
            return "waiting for newer weights"
        return "waiting for acks" if len(self.outbox) else IDLE

    def lease_states(self) -> tuple[LeaseState, ...]:
        """Return every lease here: waiting, running, or not yet acknowledged."""
        return tuple(self.held.states(now=self._beat_at)[:MAX_LEASES])

    def stats(self) -> NodeStats:
        """Return what to tell the learner about this worker."""
        stats = super().stats()
        num_places = 0 if self.engine is None else self.engine.num_places
        refused_version, refusal = self._refusal or (None, "")
        return msgspec.structs.replace(
            stats,
            state=self.activity,
            tokens_sampled=self.tokens_sampled,
            partials=dict(self.partial_counts),
            num_places=min(num_places, MAX_LEASES),
            engine="" if self.engine is None else self.engine.name,
            refused_version=refused_version,
            refusal=refusal,
        )

    def heartbeat(self, *, now: float) -> list[Action]:
        """Tell the learner this node's state, now.

        A group that is being rewarded lives: every call of a task's code is bounded, also one that
        hangs or waits for a free thread. Its end, and not that of its lease, tells what was wrong.
        """
        for group in self.held.of(GroupState.SCORING):
            group.num_progress += 1
        return super().heartbeat(now=now)

    # --- from the learner ------------------------------------------------------------------------

    def on_work(self, message: Message, payload: list[Frame], now: float) -> list[Action]:
        """Handle what the learner says beside joining: leases and acknowledgements above all."""
        match message:
            case Grant():
                return self._on_grant(message, payload, now)
            case Reclaim():
                return self._on_reclaim(message, now)
            case Ack():
                return [*self._on_ack(message, now), *self._next(now)]
            case TopologyPlan():
                actions = super().on_work(message, payload, now)
                return [*actions, *self._stand_by(is_standby=message.is_standby, now=now)]
        return super().on_work(message, payload, now)

    def _stand_by(self, *, is_standby: bool, now: float) -> list[Action]:
        """Follow a plan that says whether this worker is needed."""
        if is_standby == (self.standby_since is not None):
            return []
        self.standby_since = now if is_standby else None
        text = "not needed for now: standing by" if is_standby else "needed: active again"
        return [Note("info", text)]

    def _on_grant(self, message: Grant, payload: list[Frame], now: float) -> list[Action]:
        begun: list[list[PartialRollout]] = [[] for _ in message.leases]
        if payload:
            begun = decode_continuations(payload[0])
            if len(begun) != len(message.leases):
                numbers = f"{len(message.leases)} leases with {len(begun)} continuations"
                raise RemoteProtocolError(numbers)
        pairs = zip(message.leases, begun, strict=True)
        fresh = [pair for pair in pairs if key_of(pair[0]) not in self.held]
        for lease, members in fresh:
            self.held.add(lease, members)
        return self._next(now) if fresh else []

    def _on_reclaim(self, message: Reclaim, now: float) -> list[Action]:
        """Give up leases that others wait for; what the engine has of them, once it has stopped."""
        groups = [g for key in message.leases if (g := self.held.get(key)) is not None]
        calls: list[EngineCall] = []
        if message.is_begun_too and self.engine is not None and self.engine.sampler == "engine":
            for group in groups:
                self.held.handle(group, Reclaimed())
            is_reclaimed = GroupState.RECLAIMED
            calls = [c for c in self._calls if any(g.state is is_reclaimed for g in c.groups)]
        given_up = self._hand_over([g for g in groups if g.state in WAITING], now)
        return [*self._recall(calls), *given_up]

    def _hand_over(self, groups: Sequence[PartialGroup], now: float) -> list[Action]:
        """Give up groups that are not in the engine, and what was sampled for them, to others."""
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
            return [Note("info", text, "superseded")]
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
        """Tell where this worker stands and send again what was not acknowledged.

        Unfinished groups are shipped again when their time comes: a restarted learner has lost all
        of them, and a shipment may have been lost with the link.
        """
        actions = super().on_admitted(now=now)
        self.outbox.resend_all()
        self.held.forget_shipments()
        return [*actions, *self.heartbeat(now=now), *self._send_due(now)]

    def on_version(self, *, now: float) -> list[Action]:
        """Handle that a version of the weights is here as a whole."""
        return self._next(now)

    # --- into the engine -------------------------------------------------------------------------

    def built(self, engine: EngineFacts, digests: dict[str, str], *, now: float) -> list[Action]:
        """Note that task and engine are built, with these hashes, and what they can do."""
        self.engine = engine
        self.broadcast.patch_mode = "on_install" if engine.takes_patches else "copy"
        self.max_groups = engine.max_groups
        num_dropped = self.held.limit_tokens(engine.max_completion_tokens)
        self.partial_counts["wasted_tokens"] += num_dropped
        return [*self.configured(digests, now=now), *self._next(now)]

    def _next(self, now: float) -> list[Action]:
        """Begin and stop what can be begun and what is to be stopped now."""
        engine = self.engine
        if engine is None:
            return self._settle(now)
        actions = [] if self.is_leaving else self._install_newest(engine)
        actions += self._begin(engine, now)
        if engine.sampler == "engine":
            actions += self._recall(call for call in self._calls if self._has_enough(call, now))
            if not self._calls:
                # Interrupted groups are not continued soon.
                actions += self.ship(interval_s=0.0, now=now)
        return [*actions, *self._settle(now)]

    def _begin(self, engine: EngineFacts, now: float) -> list[Action]:
        """Take groups into the engine, as far as there is room: begun ones first, oldest first."""
        num_free = self._free_places(engine)
        if num_free <= 0:
            return []
        is_batch = engine.sampler == "engine" and not engine.is_continuous
        taken = self.held.take(
            min(num_free, self._max_together),
            group_size=engine.group_size,
            max_rollouts=engine.groups_per_batch * engine.group_size if is_batch else None,
            now=now,
            installed=self.installed_version,
        )
        if engine.sampler == "agents":
            return [OfferEpisodes([group.lease for group in taken])] if taken else []
        actions: list[Action] = []
        groups = []
        for group in taken:
            if engine.sampler == "engine":
                self._apply_staleness(group, engine.rules)
            num_prompt = len(group.lease.prompt_ids)
            if group.is_whole:
                # By another worker, or by this worker before it was stopped.
                actions += self._score(group)
            elif num_prompt > engine.max_prompt_tokens:
                detail = (
                    f"the prompt has {num_prompt} tokens, {engine.prompt_bound} leaves "
                    f"{engine.max_prompt_tokens} beside {engine.max_completion_tokens} sampled ones"
                )
                actions += self.failed(group.lease, "prompt_too_long", detail, now=now)
            else:
                groups.append(group)
        size = 1 if engine.is_continuous else max(1, len(groups))
        for start in range(0, len(groups), size):
            some = groups[start : start + size]
            wanted = (version for group in some if (version := self._version_of(group)) is not None)
            self._calls.append(make_call(some, engine, now, next(wanted, None)))
            actions.append(Sample(self._calls[-1]))
        return actions

    def _usable(self) -> tuple[PolicyVersion, ...]:
        """Return the versions that may begin or go on: the newest, and others good for training."""
        newest, engine = self.installed_version, self.engine
        if newest is None or engine is None:
            return ()
        oldest_step = max(self.learner_step, newest.step) - engine.rules.max_age
        return tuple(
            version
            for version in self._versions
            if version == newest
            or (version.step >= oldest_step and is_surviving(version, self.lineages))
        )

    def _version_of(self, group: PartialGroup) -> PolicyVersion | None:
        """Return the only version that may sample a group; None for whichever is installed."""
        lease = group.lease
        if not self._has_several:
            return self.installed_version if self._waits_for_whole else None
        begun = {version for member in group.members for version in member.versions}
        for version in begun.intersection(self._usable()) if len(begun) == 1 else ():
            if lease.min_version is None or version >= lease.min_version:
                return version
        return self.installed_version

    @property
    def _has_several(self) -> bool:
        return self.engine is not None and self.engine.num_versions > 1

    @property
    def _waits_for_whole(self) -> bool:
        """Whether newer weights wait until the groups in the engine are whole."""
        engine = self.engine
        return engine is not None and engine.num_versions == 1 and engine.rules.one_version

    def _free_places(self, engine: EngineFacts) -> int:
        """Return how many groups may go into the engine now."""
        is_closed = self._is_held or self.is_leaving or self.outbox.is_full
        if is_closed or self.installed_version is None:
            return 0
        if engine.sampler == "agents":
            return MAX_LEASES
        is_played = engine.sampler == "episodes"
        if engine.is_continuous:
            num_places = engine.groups_per_batch if is_played else engine.num_places
            return num_places - sum(len(call.groups) for call in self._calls)
        if self._calls:
            return 0
        return engine.groups_per_batch if is_played else engine.max_groups

    def _apply_staleness(self, group: PartialGroup, rules: PartialRules) -> None:
        """Decide what the tokens so far are worth under the present weights."""
        installed, num_tokens = self.installed_version, group.num_tokens
        assert installed is not None
        if not num_tokens:
            return
        step = max(self.learner_step, installed.step)
        # A whole one needs no engine, nor its version.
        version = None if group.is_whole else self._version_of(group)
        oldest = group.oldest_step
        result = apply_staleness_policy(
            group.members,
            stale_tokens=rules.stale_tokens,
            max_age=rules.max_age,
            step=step,
            installed=version or installed,
            lineages=self.lineages,
            only_version=version,
        )
        group.members = result.members
        counts = self.partial_counts
        counts["resumed"] += 1
        counts["resumed_tokens"] += num_tokens
        counts["masked_tokens"] += result.num_masked
        counts["wasted_tokens"] += result.num_dropped
        counts["age_sum"] += 0 if oldest is None else max(0, step - oldest)

    # --- out of the engine -----------------------------------------------------------------------

    def counted(self, call: EngineCall, *, num_tokens: int, num_signs: int) -> None:
        """Note how many tokens and signs of life there were so far of a call under way."""
        for group in call.groups:
            group.num_progress += num_signs - call.num_signs
        call.num_tokens, call.num_signs = num_tokens, num_signs

    def count(self, name: str, number: float = 1) -> None:
        """Add to a count of the engine or the task."""
        self.counters.add(name, number)

    def sampled(
        self,
        call: EngineCall,
        group: PartialGroup,
        members: Sequence[PartialRollout],
        *,
        now: float,
    ) -> list[Action]:
        """Note how far the members of a group are, and have it scored once all have ended."""
        group.members = list(members)
        if not group.is_whole:
            return []
        call.num_whole += 1
        return [*self._score(group), *self._next(now)]

    def on_nonfinite(self, group: PartialGroup, why: str, *, now: float) -> list[Action]:
        """End a group for one of whose members the model gives no probabilities.

        It ends for good: elsewhere it would most likely be the same. The rest of its rollouts is
        not awaited.
        """
        if not group.is_sampled:
            return []
        return [*self.failed(group.lease, BAD_LOGPROBS, why, now=now), *self._next(now)]

    def _score(self, group: PartialGroup) -> list[Action]:
        is_wanted = group.is_sampled
        self.held.handle(group, Whole())
        return [Score(group)] if is_wanted else []

    def returned(self, call: EngineCall, *, num_tokens: int, now: float) -> list[Action]:
        """Take back a call that has ended, and keep the groups that it has left unfinished."""
        self._calls.remove(call)
        self._max_together = min(2 * self._max_together, MAX_LEASES)
        self.tokens_sampled += num_tokens
        engine = self.engine
        assert engine is not None
        if engine.sampler != "engine":
            return self._next(now)
        self.partial_counts["interrupted"] += sum(not group.is_whole for group in call.groups)
        actions = self._stop(call.groups, now)
        interval_s = engine.rules.ship_s
        if interval_s is None:
            return [*actions, *self._next(now)]
        actions += self.ship(interval_s=interval_s, now=now)
        if now >= self._saved_at + interval_s:
            actions += self._save(now)
        return [*actions, *self._next(now)]

    def refused(self, call: EngineCall, why: str, *, now: float) -> list[Action]:
        """Have another version begin groups whose version the engine no longer holds.

        Where that is the newest there is no other, and they are given back.
        """
        self._calls.remove(call)
        actions: list[Action] = []
        if call.version == self.installed_version:
            for group in call.groups:
                actions += self._refuse(group, why)
        else:
            self._versions = tuple(v for v in self._versions if v != call.version)
            actions += self._stop(call.groups, now)
        return [*actions, *self._send_due(now), *self._next(now)]

    def _stop(self, groups: Sequence[PartialGroup], now: float) -> list[Action]:
        """Take unfinished groups back from the engine; hand over those that others wait for."""
        reclaimed = [group for group in groups if group.state is GroupState.RECLAIMED]
        for group in groups:
            self.held.handle(group, Stopped())
        return self._hand_over(reclaimed, now)

    def raised(
        self, call: EngineCall, why: str, *, traceback: str, is_usable: bool, now: float
    ) -> list[Action]:
        """End a group whose sampling raised; of several groups, sample half at once to find it.

        Args:
            call: what raised.
            why: the error, in one line.
            traceback: of it.
            is_usable: whether the engine still samples. If not this worker ends, and gives back
                all that the engine had: the learner counts how many engines a group has ended.
            now: the present instant.
        """
        self.counters.add("engine/calls_failed")
        calls = [call] if is_usable else list(self._calls)
        kept = GroupState.RUNNING, GroupState.RECLAIMED, GroupState.UNWANTED
        unfinished = [group for each in calls for group in each.groups if group.state in kept]
        self._calls.remove(call)
        actions: list[Action] = []
        if not is_usable:
            for group in unfinished:
                if group.is_sampled:
                    actions += self._report(
                        group, ENGINE_ERROR, why, is_elsewhere=True, traceback=traceback
                    )
            return [*actions, *self._send_due(now)]
        if len(unfinished) > 1:
            self._max_together = len(unfinished) // 2
            actions += self._stop(unfinished, now)
        else:
            for group in unfinished:
                actions += self.failed(group.lease, ENGINE_ERROR, why, traceback=traceback, now=now)
        return [*actions, *self._next(now)]

    def _has_enough(self, call: EngineCall, now: float) -> bool:
        """Return whether what is unfinished in a call goes on another time."""
        if call.num_whole == len(call.groups):
            return False  # it returns by itself
        if not any(group.is_sampled for group in call.groups):
            return True  # no group of it is wanted
        if self._has_several and call.version not in self._usable():
            return True  # its tokens are too old to be trained on, and its slot is wanted
        if now >= call.ends_at:
            # Only with some tokens, or a slow start would be repeated forever.
            if call.num_tokens or call.num_whole:
                return True
            assert self.engine is not None
            call.ends_at = now + (self.engine.rules.ship_s or 0.0)
        has_others = bool(self.held.of(*WAITING))
        return call.num_whole >= call.num_awaited and has_others

    def _recall(self, calls: Iterable[EngineCall]) -> list[Action]:
        """Have calls end soon that were not told so before."""
        actions: list[Action] = []
        for call in calls:
            if not call.is_recalled:
                call.is_recalled = True
                actions.append(Recall(call))
        return actions

    # --- whole groups ----------------------------------------------------------------------------

    def scored(self, group: PartialGroup, rewards: Sequence[float], *, now: float) -> list[Action]:
        """Deliver a whole group with its rewards; they may be fewer where it became unwanted."""
        if group.state is not GroupState.SCORING:
            return self._drop(group, now)
        assert self.engine is not None
        stale_tokens = self.engine.rules.stale_tokens
        rollouts = [
            member.rollout(reward, stale_tokens=stale_tokens)
            for member, reward in zip(group.members, rewards, strict=True)
        ]
        return self.played(group.lease, rollouts, now=now)

    def played(self, lease: Lease, rollouts: Sequence[Rollout], *, now: float) -> list[Action]:
        """Deliver the rollouts of a lease, rewarded."""
        group = Group(
            group_id=lease.group_id,
            attempt=lease.attempt,
            worker_id=self.settings.node_id,
            prompt_ids=np.array(lease.prompt_ids, dtype=np.int32),
            rollouts=tuple(rollouts),
        )
        return self.finished(group, now=now)

    def finished(self, group: Group, *, now: float) -> list[Action]:
        """Deliver a finished group."""
        partial = self.held.get((group.group_id, group.attempt))
        if partial is None:
            return self._settle(now)
        payload = encode_group(group)
        if (num_bytes := payload_bytes(payload)) > MAX_PAYLOAD_BYTES:
            detail = (
                f"it has {num_bytes} bytes, a message holds {MAX_PAYLOAD_BYTES}; lower "
                "batch.group_size or sampling.max_completion_tokens"
            )
            return self.failed(partial.lease, "group_too_large", detail, now=now)
        seconds = partial.seconds(now)
        message = Deliver(group_id=group.group_id, attempt=group.attempt, seconds=seconds)
        self.held.handle(partial, Reported(message, tuple(payload)))
        return [*self._send_due(now), *self._settle(now)]

    def failed(
        self, lease: Lease, reason: str, detail: str, *, traceback: str = "", now: float
    ) -> list[Action]:
        """Report a group that cannot be finished and that a retry will not mend."""
        group = self.held.get(key_of(lease))
        if group is None or group.state is GroupState.UNWANTED:
            return self._drop(group, now)
        self.counters.add(f"failed/{reason}")
        report = self._report(group, reason, detail, traceback=traceback)
        return [*report, *self._send_due(now), *self._settle(now)]

    def _drop(self, group: PartialGroup | None, now: float) -> list[Action]:
        if group is not None:
            self.held.handle(group, Dropped())
        return self._settle(now)

    def _report(
        self,
        group: PartialGroup,
        reason: str,
        detail: str,
        *,
        is_elsewhere: bool = False,
        traceback: str = "",
    ) -> list[Action]:
        group_id, attempt = group.key
        message = Failed(
            group_id=group_id,
            attempt=attempt,
            reason=reason,
            detail=detail[:MAX_DETAIL_LENGTH],
            is_elsewhere=is_elsewhere,
            traceback=traceback[-MAX_TRACEBACK_LENGTH:],
        )
        self.held.handle(group, Reported(message))
        # It may be what a task's code says of what the model said.
        text = one_line(detail[:MAX_DETAIL_LENGTH])
        return [Note("warning", f"group {group_id}: {reason}: {text}", reason)]

    def _refuse(self, group: PartialGroup, detail: str) -> list[Action]:
        """Give a lease back whose version is not here."""
        if group.state is GroupState.UNWANTED:
            self.held.handle(group, Stopped())
            return []
        self.counters.add("engine/version_refused")
        return self._report(group, "version_not_installed", detail, is_elsewhere=True)

    # --- agents ----------------------------------------------------------------------------------

    def demand(self, num_groups: int, *, now: float) -> list[Action]:
        """Ask for the number of groups that agents need, those that they have included."""
        if num_groups == self.max_groups:
            return []
        self.max_groups = num_groups
        return self.heartbeat(now=now) if self.is_admitted else []

    def dropped(self, lease: Lease, *, now: float) -> list[Action]:
        """Note that no agent works on a lease, nor will; the lease expires at the learner."""
        return self._drop(self.held.get(key_of(lease)), now)

    def progress(self, lease: Lease, number: int) -> None:
        """Note how many signs of life there were of a lease that agents have."""
        group = self.held.get(key_of(lease))
        if group is not None:
            group.num_progress = number

    # --- weights ---------------------------------------------------------------------------------

    def _install_newest(self, engine: EngineFacts) -> list[Action]:
        """Install the newest version that is here, or the newest of several."""
        if self._installing is not None:
            return []
        self._is_held = False
        version, installed = self.broadcast.newest_complete, self.installed_version
        if version is None or (installed is not None and version <= installed):
            return []
        is_too_soon = self._install_again_at < math.inf
        if is_too_soon and self._refusal is not None and version == self._refusal[0]:
            return []
        # With "drop" nothing that older weights have begun goes on, in flight or not; of several
        # versions it goes on under its own.
        is_dropped = engine.rules.stale_tokens == "drop" and engine.sampler == "engine"
        self._is_held = self._waits_for_whole or (is_dropped and not self._has_several)
        if self._is_held and self._calls:
            return [] if self._waits_for_whole else self._recall(self._calls)
        self._installing = version
        self._install_again_at = math.inf
        return [Install(version)]

    def installed(self, version: PolicyVersion, *, now: float) -> list[Action]:
        """Note which version samples from now on, tell the learner, and give back what it ends."""
        self._installing = self._refusal = None
        self.installed_version = version
        num_versions = 1 if self.engine is None else self.engine.num_versions
        self._versions = (*self._versions, version)[-num_versions:]
        beat = self.heartbeat(now=now) if self.is_admitted else []
        return [*beat, *self._give_back(now), *self._send_due(now), *self._next(now)]

    def install_failed(
        self, version: PolicyVersion, error: EngineError, *, now: float
    ) -> list[Action]:
        """Keep the version before, and tell the learner; there is no going on without any."""
        self._installing = None
        self._refusal = version, one_line(str(error))[:MAX_DETAIL_LENGTH]
        self._install_again_at = now + INSTALL_AGAIN_S
        self.counters.add("engine/installs_failed")
        beat = self.heartbeat(now=now) if self.is_admitted else []
        if self.installed_version is None:
            text = f"cannot install {version}: {error}"
            return [Note("warning", text), *beat, Stop("failed", error)]
        text = f"cannot install {version}, keeping {self.installed_version}: {error}"
        return [Note("warning", text), *beat, *self._next(now)]

    def install_missed(self, *, now: float) -> list[Action]:
        """Note that a version was given up before it was installed: another one follows."""
        self._installing = None
        return self._next(now)

    def damaged(self, *, now: float) -> list[Action]:
        """Sample nothing from damaged memory: a version must be received again first."""
        self.installed_version = None
        return self._next(now)

    def _give_back(self, now: float) -> list[Action]:
        """Give back the leases whose version has not come in time."""
        installed = self.installed_version
        waiting = {group.key: group for group in self.held.awaiting(installed)}
        self._waiting_since = {key: self._waiting_since.get(key, now) for key in waiting}
        late = [
            waiting[key]
            for key, since in self._waiting_since.items()
            if now >= since + self._version_wait_s
        ]
        # First what was sampled of them, for the worker that continues them.
        actions = self.ship(interval_s=0.0, now=now) if late else []
        for group in late:
            here = f"{installed or 'no version'} is installed and no newer one has come"
            wait = f"in {self._version_wait_s:g} s"
            why = f"{group.lease.min_version} or newer is wanted, {here} {wait}"
            actions += self._refuse(group, why)
        return actions

    # --- unfinished groups: to the learner, and across a restart ---------------------------------

    def ship(self, *, interval_s: float, now: float) -> list[Action]:
        """Send the learner what has been sampled for interrupted groups since it was last sent.

        Args:
            interval_s: seconds between two shipments of one partial group; 0 where this worker is
                about to pause or to leave.
            now: the present instant.
        """
        if not self.is_admitted:
            return []
        actions: list[Action] = []
        for partial in self.held.take_due(interval_s=interval_s, now=now):
            message = Partial(group_id=partial.lease.group_id, attempt=partial.lease.attempt)
            frame = encode_members(partial.members)
            if payload_bytes([frame]) > MAX_PAYLOAD_BYTES:
                continue  # if this worker is lost, it is sampled again
            actions += self.to_learner(message, frame)
            self.partial_counts["shipped"] += 1
        return actions

    def restore(self, saved: Frame) -> list[Action]:
        """Take over what a former process of this worker has saved."""
        try:
            partials = decode_groups(saved, run_id=self.broadcast.trust.run_id)
        except RemoteProtocolError as error:
            return [Note("warning", f"dropped the unfinished groups that were left here: {error}")]
        self._saved = bytes(saved)
        self.held.restore(partials)
        if not partials:
            return []
        num_tokens = sum(partial.num_tokens for partial in partials)
        return [Note("info", f"found {len(partials)} unfinished groups of {num_tokens} tokens")]

    def _save(self, now: float) -> list[Action]:
        self._saved_at = now
        partials = self.held.begun()
        data = encode_groups(self.broadcast.trust.run_id, partials)
        if data == self._saved or not (partials or self._saved):
            return []
        self._saved = data
        self._num_saving += 1
        return [Save(data)]

    def saved(self, fault: str, *, now: float) -> list[Action]:
        """Note that a Save has been carried out, or what was wrong: that is told and survived."""
        self._num_saving -= 1
        if not fault:
            return self._settle(now)
        self.counters.add("partials_unsaved")
        text = f"cannot keep unfinished rollouts: {fault}; a restart would sample them anew"
        return [Note("warning", text), *self._settle(now)]

    # --- leaving ---------------------------------------------------------------------------------

    def drain(self, *, now: float) -> list[Action]:
        """Take no more leases, hand over what is unfinished, and await what is finished."""
        if self.is_leaving:
            return []
        self.is_leaving, self._drain_until = True, now + DRAIN_S
        actions = self.heartbeat(now=now) if self.is_admitted else []
        sampler = None if self.engine is None else self.engine.sampler
        if sampler == "engine":
            actions += self._recall(self._calls)
        elif sampler == "agents":
            actions.append(Withdraw())
        return [*actions, *self._next(now)]

    def _settle(self, now: float) -> list[Action]:
        """Say so once a worker that leaves has nothing left to wait for, or has waited enough."""
        if not self.is_leaving or self._is_drained:
            return []
        actions: list[Action] = []
        if not self._has_handed_over:
            is_stoppable = self.engine is not None and self.engine.sampler == "engine"
            if is_stoppable and self._calls:
                if now < self._drain_until:
                    return []
                text = f"the engine has not stopped within {DRAIN_S:.0f} s: leaving without it"
                actions.append(Note("warning", text))
            self._has_handed_over, self._drain_until = True, now + DRAIN_S
            actions += [*self.ship(interval_s=0.0, now=now), *self._save(now)]
        is_busy = bool(self.held.of(*BUSY) or len(self.outbox) or self._num_saving)
        if is_busy and now < self._drain_until:
            return actions
        self._is_drained = True
        release: list[Action] = [Release(self._retiring)] if self._retiring else []
        return [*actions, Drained(), *release]

    def _retire(self, now: float) -> list[Action]:
        """Leave, and give the machine back, once the terms say so."""
        standby_at, gone_at = self._release_times()
        if self.is_leaving or now < min(standby_at, gone_at):
            return []
        if now >= standby_at:
            assert self.standby_since is not None
            why = f"on standby for {format_duration(now - self.standby_since)}"
        else:
            why = f"without the learner for {format_duration(now - self._lost_at)}"
        self._retiring = f"{why} (worker.release_after_s)"
        return [Note("warning", f"leaving: {self._retiring}"), *self.drain(now=now)]

    def _release_times(self) -> tuple[float, float]:
        """Return when this worker will have been on standby, and without the learner, too long."""
        since, terms = self.standby_since, self.terms
        return (
            math.inf if since is None or terms.standby_s is None else since + terms.standby_s,
            math.inf if terms.learner_gone_s is None else self._lost_at + terms.learner_gone_s,
        )

    def released(self, is_released: bool) -> list[Action]:
        """Say goodbye after a Release, with the news of how it went: if confirmed, costs end."""
        goodbye: list[Action] = []
        if self.is_admitted:
            goodbye = self.to_learner(Goodbye(reason=self._retiring, is_released=is_released))
        return [*goodbye, Stop(self._retiring)]

    # --- time ------------------------------------------------------------------------------------

    def _send_due(self, now: float) -> list[Action]:
        if not self.is_admitted:
            return []
        return [
            action
            for encoded in self.outbox.take_due(now=now)
            for action in self.to_learner(encoded.message, *encoded.payload)
        ]

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called next."""
        own = [call.ends_at for call in self._calls if not call.is_recalled]
        own.append(self._install_again_at)
        if not self.is_leaving:
            own += self._release_times()
        elif not self._is_drained:
            own.append(self._drain_until)
        outbox_at = self.outbox.deadline if self.is_admitted else None
        first = min(own)
        return earliest(super().deadline, outbox_at, None if first == math.inf else first)

    def expire(self, *, now: float) -> list[Action]:
        """Do what has become due."""
        actions = self._retire(now)
        actions += super().expire(now=now)
        if now >= self._install_again_at:
            self._install_again_at = math.inf
        return [*actions, *self._give_back(now), *self._send_due(now), *self._next(now)]
