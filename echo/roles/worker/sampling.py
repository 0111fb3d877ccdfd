"""Decides which groups the engine samples in one call, and when a call is stopped.

A continuous engine accepts requests at any time: it gets one call per group as soon as it has a
free place. Any other engine gets one batch of groups after another. A batch lasts as long as its
longest rollout. Near the end of the batch, only few of the engine's rows are busy.

So with `over_submission` = f > 1, a batch of N groups is recalled early if other groups wait
(active partial rollouts, APRIL). This happens when N / f of its groups are whole, that is, all
their rollouts have ended. Whole groups are scored and delivered at once. Unfinished groups keep
their tokens, log-probabilities and versions. The next batch continues them with the newest weights,
oldest first, and fills the remaining rows with new groups.

A continuous engine has no batches. It gets f times the number of groups that fit into its memory.
So its queue does not become empty while long rollouts keep their places.

A call lasts at most `ship_s` seconds. Then its tokens are saved in this worker's file and sent to
the learner, and a new call continues the groups. So a killed worker loses at most `ship_s` seconds
of sampling.

If a call of several groups raises an error, its groups are sampled again in calls of half the size.
In the end, the group that causes the error is alone in its call and fails.

    Sample   ->  MembersGrown or NonfiniteFound, for each group as it grows;
                 then CallReturned, CallRefused or CallRaised
    Recall       stop the call: CallReturned follows with the tokens so far
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echo.core.bounds import MAX_LEASES
from echo.core.monitoring.metrics import Counters
from echo.core.rollout import PartialRollout, PolicyVersion
from echo.leases.partials import apply_staleness_policy
from echo.leases.worker.held import (
    WAITING,
    GroupState,
    HeldLeases,
    PartialGroup,
    Reclaimed,
    Stopped,
    Whole,
)
from echo.roles.worker.engine_facts import EngineFacts
from echo.roles.worker.installing import EngineVersions, Install, LearnerProgress
from echo.roles.worker.throughput import EngineThroughput
from echo.wire.actions import Action
from echo.wire.messages import BAD_LOGPROBS, ENGINE_ERROR, Lease


@dataclass(slots=True, eq=False)
class EngineCall:
    """A call of the engine, with the groups that the call samples and the call's progress.

    Only the sampler's thread writes `seen_tokens` and `seen_signs`. The event loop's thread writes
    all other fields. In `credit`, this thread reads the two counts.
    """

    groups: list[PartialGroup]
    """The groups that the call samples. Each has at least one unfinished member. Greedy groups are
    never mixed with other groups."""
    num_awaited: int
    """If other groups wait, the call is recalled as soon as this many of its groups are whole."""
    ends_at: float
    version: PolicyVersion | None
    """The version that must sample the groups; None if every installed version may."""
    num_whole: int = 0
    num_tokens: int = 0
    """Number of tokens sampled so far."""
    num_signs: int = 0
    """Number of signs of life that the call has added to each of its groups. A sampled token is a
    sign of life."""
    is_recalled: bool = False
    """Whether the engine was asked to end the call and return the tokens sampled so far."""
    seen_tokens: int = 0
    seen_signs: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the call always chooses the most likely token."""
        return self.groups[0].lease.is_greedy

    def on_tokens(self, number: int) -> None:
        """Count `number` sampled tokens. The sampler's thread calls this method."""
        self.seen_tokens += number
        self.on_progress(number)

    def on_progress(self, number: int) -> None:
        """Count `number` signs of life of the call. The sampler's thread calls this method."""
        self.seen_signs += number

    def credit(self) -> None:
        """Count the call's signs of life since the last `credit` as progress of each of its groups.

        The worker calls this method before each heartbeat, which reports the groups' progress.
        """
        num_signs, self.num_tokens = self.seen_signs, self.seen_tokens
        for group in self.groups:
            group.num_progress += num_signs - self.num_signs
        self.num_signs = num_signs


# --- Actions, events and decisions ---


@dataclass(frozen=True, slots=True)
class Sample(Action):
    """Action: sample the groups of this call. Unfinished members continue where they stopped."""

    call: EngineCall


@dataclass(frozen=True, slots=True)
class Recall(Action):
    """Action: stop this engine call. CallReturned follows with the tokens sampled so far."""

    call: EngineCall


@dataclass(frozen=True, slots=True)
class OfferEpisodes(Action):
    """Action: offer the episodes of `leases` to outside agents."""

    leases: Sequence[Lease]


@dataclass(frozen=True, slots=True)
class CancelEpisodes(Action):
    """Action: offer no more episodes of an unwanted lease to agents. LeaseDropped follows."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Withdraw(Action):
    """Action: stop offering episodes to agents.

    LeaseDropped follows for each lease that has no agent.
    """


@dataclass(frozen=True, slots=True)
class Score(Action):
    """Action: compute the rewards of a whole group. Stop if the group becomes unwanted."""

    group: PartialGroup


@dataclass(frozen=True, slots=True)
class MembersGrown:
    """Event: the engine has sampled more tokens of a group.

    `members` has the group's present members.
    """

    call: EngineCall
    group: PartialGroup
    members: Sequence[PartialRollout]


@dataclass(frozen=True, slots=True)
class NonfiniteFound:
    """Event: the model has returned NaN or infinite log-probabilities for a member of a group."""

    group: PartialGroup
    why: str


@dataclass(frozen=True, slots=True)
class CallReturned:
    """Event: a call of the engine has ended. The call has sampled `num_tokens` tokens."""

    call: EngineCall
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CallRefused:
    """Event: the engine has refused a call, because it no longer holds the call's version."""

    call: EngineCall
    why: str


@dataclass(frozen=True, slots=True)
class CallRaised:
    """Event: a call has raised an error.

    If the engine is no longer usable, this worker ends, and the learner grants the groups of all
    calls to other workers. The learner counts the engines that a group has made unusable.
    """

    call: EngineCall
    why: str
    """The error, in one line."""
    traceback: str
    is_usable: bool
    """Whether the engine can still sample."""


@dataclass(frozen=True, slots=True)
class NoResult:
    """Event and decision: a leased group ends without a result. `reason` says why."""

    lease: Lease
    reason: str
    detail: str
    traceback: str = ""
    is_elsewhere: bool = False
    """Whether the group may succeed if a different worker samples it."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision: give `groups` to other workers. None of these groups is in the engine."""

    groups: Sequence[PartialGroup]


EngineEvent = MembersGrown | NonfiniteFound | CallReturned | CallRefused | CallRaised
Decision = Action | NoResult | GiveUp


class EngineCalls:
    """Decides which groups enter the engine, which version samples them, and when calls end."""

    def __init__(
        self,
        engine: EngineFacts,
        held: HeldLeases,
        *,
        counters: Counters,
        counts: Counter[str],
    ) -> None:
        """Start with an idle engine that has no version installed.

        Args:
            engine: the facts about the engine.
            held: the leases of this worker.
            counters: the counters of this node.
            counts: counts unfinished rollouts, for the learner's metrics.
        """
        self.engine = engine
        self.versions = EngineVersions(engine)
        self.is_broken = False
        """Whether the engine has become unusable. Then the node ends soon."""
        self._held = held
        self._counters = counters
        self._counts = counts
        self.throughput = EngineThroughput()
        self._calls: list[EngineCall] = []
        self._max_together = MAX_LEASES
        """Largest number of groups in one call. After an error it is smaller, so that the group
        that causes the error is found."""

    def measure(self, num_returned: int, *, now: float) -> None:
        """Measure the engine's throughput.

        `num_returned` is the number of tokens that all ended calls have sampled.
        """
        if self.engine.sampler == "engine":
            groups = [group for call in self._calls for group in call.groups]
            num_rollouts = sum(not m.is_finished for group in groups for m in group.members)
            num_tokens = num_returned + sum(call.seen_tokens for call in self._calls)
            self.throughput.look(num_rollouts, num_tokens, now=now)

    def validate(self) -> None:
        """For tests: check that leases and calls are consistent.

        Raises:
            AssertionError: if leases and calls are inconsistent.
        """
        in_calls = [group for call in self._calls for group in call.groups]
        assert len(set(in_calls)) == len(in_calls), "two calls of the engine have the same group"
        if self.engine.sampler != "agents":
            sampled = self._held.of(GroupState.RUNNING, GroupState.RECLAIMED)
            assert set(sampled) <= set(in_calls), "no call of the engine has a running group"
        is_waiting = self.versions.waits_for_whole and self.versions.installing is not None
        assert not (is_waiting and self._calls), "newer weights come into a running group"

    @property
    def is_sampling(self) -> bool:
        """Whether a call of the engine is running."""
        return bool(self._calls)

    @property
    def deadline(self) -> float:
        """Time at which a call is recalled next, or a refused version may be installed again."""
        ends = [call.ends_at for call in self._calls if not call.is_recalled]
        return min([self.versions.again_at, *ends])

    # --- into the engine -------------------------------------------------------------------------

    def advance(
        self,
        newest: PolicyVersion | None,
        learner: LearnerProgress,
        *,
        is_leaving: bool,
        now: float,
    ) -> list[Decision]:
        """Return what can be done now: install a version, begin calls, or recall calls.

        Args:
            newest: the newest complete version.
            learner: the learner's progress.
            is_leaving: whether this worker is leaving. If so, only recalls are possible.
            now: the present time, seconds.
        """
        decisions: list[Decision] = []
        if not is_leaving:
            version = self.versions.choose(newest, is_sampling=self.is_sampling)
            if version is not None:
                decisions.append(Install(version))
            elif self.versions.is_held and not self.versions.waits_for_whole:
                decisions += self._recall(self._calls)
            decisions += self._begin(learner, now)
        if self.engine.sampler == "engine":
            decisions += self._recall(c for c in self._calls if self._has_enough(c, learner, now))
        return decisions

    def _begin(self, learner: LearnerProgress, now: float) -> list[Decision]:
        """Return decisions that fill the engine's free places.

        Begun groups come before new groups, and older groups come before younger groups.
        """
        num_free, engine = self._free_places(), self.engine
        if num_free <= 0:
            return []
        is_batch = engine.sampler == "engine" and not engine.is_continuous
        taken = self._held.take(
            min(num_free, self._max_together),
            group_size=engine.group_size,
            max_rollouts=engine.groups_per_batch * engine.group_size if is_batch else None,
            now=now,
            installed=self.versions.installed,
        )
        if engine.sampler == "agents":
            return [OfferEpisodes([group.lease for group in taken])] if taken else []
        decisions: list[Decision] = []
        groups = []
        for group in taken:
            if engine.sampler == "engine":
                self._apply_staleness(group, learner)
            num_prompt = len(group.lease.prompt_ids)
            if group.is_whole:
                # Another worker finished the group, or this worker did before its call was stopped.
                decisions += self._score(group)
            elif num_prompt > engine.max_prompt_tokens:
                detail = (
                    f"the prompt has {num_prompt} tokens, {engine.prompt_bound} leaves "
                    f"{engine.max_prompt_tokens} beside {engine.max_completion_tokens} sampled ones"
                )
                decisions.append(NoResult(group.lease, "prompt_too_long", detail))
            else:
                groups.append(group)
        size = 1 if engine.is_continuous else max(1, len(groups))
        for is_greedy in (False, True):
            alike = [group for group in groups if group.lease.is_greedy == is_greedy]
            for start in range(0, len(alike), size):
                self._calls.append(self._make_call(alike[start : start + size], learner, now))
                decisions.append(Sample(self._calls[-1]))
        return decisions

    def _make_call(
        self, groups: list[PartialGroup], learner: LearnerProgress, now: float
    ) -> EngineCall:
        engine = self.engine
        samplers = [self.versions.sampler_of(group, learner) for group in groups]
        version = next((each for each in samplers if each is not None), None)
        max_s = engine.rules.ship_s
        is_continuable = version is None or self.versions.has_several
        if max_s is None or not is_continuable or engine.sampler != "engine":
            max_s = math.inf
        return EngineCall(
            groups,
            num_awaited=math.ceil(len(groups) / engine.rules.over_submission),
            ends_at=now + max_s,
            version=version,
        )

    def _free_places(self) -> int:
        engine, versions = self.engine, self.versions
        if versions.is_held or versions.installed is None or self._held.outbox.is_full:
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

    def _apply_staleness(self, group: PartialGroup, learner: LearnerProgress) -> None:
        installed, num_tokens = self.versions.installed, group.num_tokens
        assert installed is not None
        if not num_tokens:
            return
        step = max(learner.step, installed.step)
        # A whole group needs no engine, so its version need not be installed.
        version = None if group.is_whole else self.versions.sampler_of(group, learner)
        oldest = group.oldest_step
        result = apply_staleness_policy(
            group.members,
            stale_tokens=self.engine.rules.stale_tokens,
            max_age=self.engine.rules.max_age,
            step=step,
            installed=version or installed,
            lineages=learner.lineages,
            only_version=version,
        )
        group.members = result.members
        self._counts["resumed"] += 1
        self._counts["resumed_tokens"] += num_tokens
        self._counts["masked_tokens"] += result.num_masked
        self._counts["wasted_tokens"] += result.num_dropped
        self._counts["too_old_tokens"] += result.num_masked + result.num_dropped
        self._counts["age_sum"] += 0 if oldest is None else max(0, step - oldest)

    # --- out of the engine -----------------------------------------------------------------------

    def handle(self, event: EngineEvent) -> list[Decision]:
        """Handle an event from the engine. Return the decisions that follow from it."""
        match event:
            case MembersGrown():
                return self._on_grown(event)
            case NonfiniteFound():
                return self._on_nonfinite(event)
            case CallReturned():
                return self._on_returned(event.call)
            case CallRefused():
                return self._on_refused(event)
            case CallRaised():
                return self._on_raised(event)

    def _on_grown(self, event: MembersGrown) -> list[Decision]:
        """Store the members of a group.

        When all members have ended, request the group's rewards.
        """
        event.group.members = list(event.members)
        if not event.group.is_whole:
            return []
        event.call.num_whole += 1
        return self._score(event.group)

    def _on_nonfinite(self, event: NonfiniteFound) -> list[Decision]:
        """End a group because the model returned NaN or infinity for one of its members.

        The group's remaining rollouts are not awaited. A retry on another worker would probably
        fail too, because all workers have the same weights.
        """
        if not event.group.is_sampled:
            return []
        return [NoResult(event.group.lease, BAD_LOGPROBS, event.why)]

    def _score(self, group: PartialGroup) -> list[Decision]:
        is_wanted = group.is_sampled
        self._held.handle(group, Whole())
        return [Score(group)] if is_wanted else []

    def _on_returned(self, call: EngineCall) -> list[Decision]:
        self._calls.remove(call)
        self._max_together = min(2 * self._max_together, MAX_LEASES)
        if self.engine.sampler != "engine":
            return []
        self._counts["interrupted"] += sum(not group.is_whole for group in call.groups)
        return self._stop(call.groups)

    def _on_refused(self, event: CallRefused) -> list[Decision]:
        """Remove a call whose version the engine has dropped.

        The call's groups get another version. If the dropped version is the newest, no other
        version may sample the groups, and they are returned to the learner.
        """
        call = event.call
        self._calls.remove(call)
        if call.version != self.versions.installed:
            self.versions.on_lost(call.version)
            return self._stop(call.groups)
        wanted = [group for group in call.groups if group.state is not GroupState.UNWANTED]
        for group in set(call.groups).difference(wanted):
            self._held.handle(group, Stopped())
        self._counters.add("engine/version_refused", len(wanted))
        return [not_installed(group.lease, event.why) for group in wanted]

    def _on_raised(self, event: CallRaised) -> list[Decision]:
        """Handle a call that raised an error.

        If the call had several unfinished groups, these groups are sampled again in calls of half
        the size, to find the group that causes the error. A group that was alone in its call ends.
        If the engine is no longer usable, the groups of all calls end on this worker; other workers
        may sample them.
        """
        self._counters.add("engine/calls_failed")
        calls = [event.call] if event.is_usable else list(self._calls)
        kept = GroupState.RUNNING, GroupState.RECLAIMED, GroupState.UNWANTED
        unfinished = [group for each in calls for group in each.groups if group.state in kept]
        self._calls.remove(event.call)
        if event.is_usable and len(unfinished) > 1:
            self._max_together = len(unfinished) // 2
            return self._stop(unfinished)
        self.is_broken = not event.is_usable
        return [
            NoResult(group.lease, ENGINE_ERROR, event.why, event.traceback, self.is_broken)
            for group in unfinished
        ]

    def _stop(self, groups: Sequence[PartialGroup]) -> list[Decision]:
        """Take unfinished groups back from the engine.

        Groups that the learner has reclaimed go to other workers.
        """
        reclaimed = [group for group in groups if group.state is GroupState.RECLAIMED]
        for group in groups:
            self._held.handle(group, Stopped())
        return [GiveUp(reclaimed)] if reclaimed else []

    # --- recalling -------------------------------------------------------------------------------

    def reclaim(self, groups: Sequence[PartialGroup]) -> list[Decision]:
        """Recall the calls that contain `groups`, so that another worker can continue these groups.

        Episodes are not recalled, because other workers lack their environments and agents.
        """
        if self.engine.sampler != "engine":
            return []
        for group in groups:
            self._held.handle(group, Reclaimed())
        return self._recall(
            call
            for call in self._calls
            if any(group.state is GroupState.RECLAIMED for group in call.groups)
        )

    def cancel(self, group: PartialGroup) -> list[Decision]:
        """Stop offering the episodes of an unwanted group to agents."""
        return [CancelEpisodes(group.lease)] if self.engine.sampler == "agents" else []

    def leave(self) -> list[Decision]:
        """Stop sampling: recall the calls, or stop offering episodes to agents.

        Episodes that are running continue to their end.
        """
        if self.engine.sampler == "agents":
            return [Withdraw()]
        return self._recall(self._calls) if self.engine.sampler == "engine" else []

    def _has_enough(self, call: EngineCall, learner: LearnerProgress, now: float) -> bool:
        """Return whether to recall a call now.

        The call's unfinished groups would continue later.
        """
        if call.num_whole == len(call.groups):
            return False  # the call returns soon by itself
        if not any(group.is_sampled for group in call.groups):
            return True  # none of its groups is wanted
        if self.versions.has_several and call.version not in self.versions.usable(learner):
            return True  # its tokens are too old to be trained on, and its slot is wanted
        if now >= call.ends_at:
            # Recall it only once it has tokens; otherwise a slow start would be repeated forever.
            if call.num_tokens or call.num_whole:
                return True
            call.ends_at = now + (self.engine.rules.ship_s or 0.0)
        return call.num_whole >= call.num_awaited and bool(self._held.of(*WAITING))

    def _recall(self, calls: Iterable[EngineCall]) -> list[Decision]:
        decisions: list[Decision] = []
        for call in calls:
            if not call.is_recalled:
                call.is_recalled = True
                decisions.append(Recall(call))
        return decisions


def not_installed(lease: Lease, why: str) -> NoResult:
    """Return the decision that gives a lease back, because its version is not installed."""
    return NoResult(lease, "version_not_installed", why, is_elsewhere=True)
