"""The leases that a worker holds. Each group has a state from its Grant to its acknowledgement.

    queued --Taken--> running --Whole--> scoring --Reported--> delivered --Closed--> ended
                       |   ^
                 Stopped   Taken           interrupted groups go before queued ones, oldest first
                       v   |
                    interrupted

All states and events (`TABLE`), with the state that an event leads to. `-`: the event leaves the
state as it is. `!`: the event cannot happen in this state, so it raises an error.

                 Taken    Whole    Stopped      Reclaimed  HandedOver  Reported   Closed    Dropped
    queued       running  !        !            -          ended       delivered  ended     !
    running      !        scoring  interrupted  reclaimed  !           delivered  unwanted  ended
    reclaimed    !        scoring  interrupted  -          !           delivered  unwanted  ended
    interrupted  running  !        !            -          ended       delivered  ended     !
    scoring      !        !        -            -          !           delivered  unwanted  ended
    unwanted     !        ended    ended        -          !           ended      -         ended
    delivered    !        -        -            -          !           -          ended     -
    ended        !        -        -            -          !           -          -         -

`handle` takes no time, because only `Taken` needs one and carries it. `handle` returns no actions,
because a group sends no messages: an event changes only the group and the outbox. The worker sends
the messages in its outbox.

A heartbeat lists every group that has not ended. So the learner can find the leases that it must
send again. The number of leases that the learner grants bounds the number of groups that a worker
holds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from echo.core.errors import LocalProtocolError
from echo.core.rollout import PartialRollout, PolicyVersion
from echo.core.tables import IGNORED, IMPOSSIBLE, Move
from echo.fleet.explain import WaitStage
from echo.leases.worker.outbox import Outbox
from echo.wire.codec import Frame
from echo.wire.messages import Lease, LeaseState, Message

LeaseKey = tuple[int, int]
"""(group id, attempt). The two numbers identify a lease."""


def key_of(lease: Lease) -> LeaseKey:
    """Return the (group id, attempt) that identifies a lease."""
    return lease.group_id, lease.attempt


class GroupState(StrEnum):
    """The state that a group has at its worker."""

    QUEUED = "queued"
    """The group is not begun."""
    RUNNING = "running"
    """The group is in the engine, or agents are working on it."""
    RECLAIMED = "reclaimed"
    """The group is in the engine, but the learner has reclaimed it. When the engine has returned
    the unfinished group, another worker continues the group."""
    INTERRUPTED = "interrupted"
    """The group was begun and waits to be continued."""
    SCORING = "scoring"
    """All members have ended, and the task computes their rewards."""
    UNWANTED = "unwanted"
    """The learner wants no result, but the engine or the task is still working on the group."""
    DELIVERED = "delivered"
    """The outbox holds the group's result or failure until the learner acknowledges it."""
    ENDED = "ended"
    """This worker has dropped the group."""


WAITING = (GroupState.QUEUED, GroupState.INTERRUPTED)
"""The states in which a group waits for the engine."""
BUSY = (GroupState.RUNNING, GroupState.RECLAIMED, GroupState.SCORING, GroupState.UNWANTED)
"""The states in which the engine, the agents or the task are working on a group."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class PartialGroup:
    """A leased group. It has the tokens that all its workers have sampled so far."""

    lease: Lease
    members: list[PartialRollout]
    state: GroupState = GroupState.QUEUED
    """The state of the group. Only `HeldLeases.handle` changes it."""
    num_progress: int = 0
    """Progress since the grant, counted in tokens and rewards. An increase renews the lease."""
    shipped_at: float = -1e18
    """Time at which the group's members were last sent to the learner."""
    num_shipped: int = 0
    """Number of tokens that all members together had when they were last sent to the learner."""
    began_at: float | None = None
    """Time at which the group last entered the engine; None before that."""
    is_continued: bool = False
    """Whether the group already had tokens when it last entered the engine."""

    def seconds(self, now: float) -> float:
        """Return the seconds since the group last entered the engine.

        Return 0 if the group has never entered the engine, or already had tokens when it last
        entered.
        """
        return 0.0 if self.began_at is None or self.is_continued else now - self.began_at

    @property
    def key(self) -> LeaseKey:
        """The (group id, attempt) that identifies the group's lease."""
        return key_of(self.lease)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all members have together so far."""
        return sum(member.num_tokens for member in self.members)

    @property
    def num_unfinished(self) -> int:
        """Number of members that have not ended, that is, have no finish reason yet."""
        return sum(not member.is_finished for member in self.members)

    @property
    def is_whole(self) -> bool:
        """Whether all members have a finish reason."""
        return not self.num_unfinished

    @property
    def is_sampled(self) -> bool:
        """Whether the group is in the engine and still wanted."""
        return self.state in (GroupState.RUNNING, GroupState.RECLAIMED)

    @property
    def oldest_step(self) -> int | None:
        """Step of the oldest version that sampled a token. None if the group has no tokens."""
        steps = [int(m.policy_versions[:, 1].min()) for m in self.members if m.num_tokens]
        return min(steps, default=None)

    def seed_of(self, member: int) -> int:
        """Return the seed with which a member's next tokens are sampled."""
        num_segments = self.members[member].num_segments
        if not num_segments:
            return self.lease.seed + member
        text = f"{self.lease.seed}/{member}/{num_segments}"
        return random.Random(text).getrandbits(48)


# --- Events ---


@dataclass(frozen=True, slots=True)
class Taken:
    """Event: the group enters the engine, or is offered to agents."""

    now: float | None


@dataclass(frozen=True, slots=True)
class Whole:
    """Event: all members of the group have ended."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Event: the call of `generate` that sampled the group has ended."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Event: the learner moves the group to another worker, even if sampling has begun here."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Event: this worker has given up the group, so that another worker gets it."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Event: the group has a result for the learner, or the reason why it has none."""

    message: Message
    payload: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """Event: the learner has acknowledged the group, which has ended."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Event: no agent will work on the group, or the learner no longer wants its result."""


Event = Taken | Whole | Stopped | Reclaimed | HandedOver | Reported | Closed | Dropped
EVENTS: tuple[type[Event], ...] = (
    Taken, Whole, Stopped, Reclaimed, HandedOver, Reported, Closed, Dropped,
)  # fmt: skip


class HeldLeases:
    """The leases that a worker holds, and the tokens that were sampled for each lease."""

    def __init__(self, outbox: Outbox) -> None:
        """Start without leases. `outbox` holds the messages about delivered groups."""
        self.outbox = outbox
        self._groups: dict[LeaseKey, PartialGroup] = {}
        """For each (group id, attempt), the group. Groups that have ended are left out."""
        self._by_state: dict[GroupState, dict[LeaseKey, PartialGroup]] = {
            state: {} for state in GroupState
        }
        """For each state, the groups in this state, in the order in which they entered it."""
        self._waiting_since: dict[LeaseKey, float] = {}
        """For each (group id, attempt), the time at which `overdue` first found that the group
        waits for a newer version."""

    def __contains__(self, key: LeaseKey) -> bool:
        return key in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, key: LeaseKey) -> PartialGroup | None:
        """Return the group of a lease. Return None if this worker does not hold the lease."""
        return self._groups.get(key)

    def of(self, *states: GroupState) -> list[PartialGroup]:
        """Return the groups in these states, state by state.

        In each state, the group that entered the state first comes first.
        """
        return [group for state in states for group in self._by_state[state].values()]

    def add(self, lease: Lease, members: Sequence[PartialRollout] = ()) -> None:
        """Add a new lease. `members` are those that other workers have begun."""
        state = GroupState.INTERRUPTED if members else GroupState.QUEUED
        self._enter(PartialGroup(lease, list(members), state, is_continued=bool(members)))

    def restore(self, groups: Sequence[PartialGroup]) -> None:
        """Add the groups that an earlier process of this worker has saved."""
        for group in groups:
            if group.key not in self:
                group.state = GroupState.INTERRUPTED
                self._enter(group)

    def _enter(self, group: PartialGroup) -> None:
        self._groups[group.key] = self._by_state[group.state][group.key] = group

    def handle(self, group: PartialGroup, event: Event) -> None:
        """Apply an event to a group according to the table. No other method changes a state.

        Raises:
            LocalProtocolError: if the event cannot happen in the state of the group.
        """
        step = TABLE[group.state][type(event)]
        if step is IMPOSSIBLE:
            what = f"{type(event).__name__} of group {group.lease.group_id}"
            raise LocalProtocolError(f"{what}, which is {group.state}")
        if step.then is not None:
            del self._by_state[group.state][group.key]
            group.state = step.then
            if step.then is GroupState.ENDED:
                del self._groups[group.key]
            else:
                self._by_state[step.then][group.key] = group
        if step.handle is not None:
            step.handle(self, group, event)

    # --- into the engine ---

    def limit_tokens(self, max_tokens: int) -> int:
        """Reset the members that are longer than `max_tokens`. Return how many tokens this drops.

        A former process may have saved such members before the run was resumed with a lower limit.
        """
        num_dropped = 0
        for group in self.of(GroupState.INTERRUPTED):
            for index, member in enumerate(group.members):
                if member.num_tokens + (not member.is_finished) > max_tokens:
                    group.members[index] = member.reset()
                    num_dropped += member.num_tokens
        return num_dropped

    def take(
        self,
        max_groups: int,
        *,
        group_size: int,
        max_rollouts: int | None = None,
        now: float | None = None,
        installed: PolicyVersion | None = None,
    ) -> list[PartialGroup]:
        """Move waiting groups into the engine. Interrupted groups come first, then queued groups.

        In each state older groups come first. Groups that require a newer version than `installed`
        keep waiting. The call ends at the first group that would exceed `max_rollouts`. If a
        group's number of members is not `group_size`, for example after a change of the
        configuration, the group is sampled from the start.

        Args:
            max_groups: largest number of groups to move.
            group_size: rollouts per group.
            max_rollouts: largest number of unfinished rollouts to move; None for any number.
            now: the present time, seconds.
            installed: the version that samples new groups; None if there is no version.
        """
        taken: list[PartialGroup] = []
        waiting = self.awaiting(installed)
        able = [group for group in self.of(*WAITING) if group not in waiting]
        able.sort(key=lambda group: (group.state is GroupState.QUEUED, group.key))
        for group in able[: max(0, max_groups)]:
            is_again = len(group.members) != group_size
            num_rollouts = group_size if is_again else group.num_unfinished
            if max_rollouts is not None:
                if num_rollouts > max_rollouts:
                    break
                max_rollouts -= num_rollouts
            if is_again:
                group.members = [PartialRollout()] * group_size
            self.handle(group, Taken(now))
            taken.append(group)
        return taken

    def awaiting(self, installed: PolicyVersion | None) -> list[PartialGroup]:
        """Return the waiting groups that need a version that is newer than `installed`."""
        return [
            group
            for group in self.of(*WAITING)
            if group.lease.min_version is not None
            and (installed is None or installed < group.lease.min_version)
        ]

    def stages(self, installed: PolicyVersion | None) -> dict[str, int]:
        """Return stage -> number of groups in this stage, for explanations of waits.

        The stages are sampling, rewards, weights, queued and delivered. Empty stages are left out.
        """
        num_waiting, num_late = len(self.of(*WAITING)), len(self.awaiting(installed))
        counts = {
            WaitStage.SAMPLING: len(self.of(GroupState.RUNNING, GroupState.RECLAIMED)),
            WaitStage.REWARDS: len(self.of(GroupState.SCORING)),
            WaitStage.WEIGHTS: num_late,
            "queued": num_waiting - num_late,
            "delivered": len(self.of(GroupState.DELIVERED)),
        }
        return {str(name): count for name, count in counts.items() if count}

    def overdue(
        self, installed: PolicyVersion | None, *, wait_s: float, now: float
    ) -> list[PartialGroup]:
        """Return the groups that have waited at least `wait_s` seconds for a newer version."""
        waiting = self.awaiting(installed)
        since = self._waiting_since
        self._waiting_since = {group.key: since.get(group.key, now) for group in waiting}
        return [group for group in waiting if now >= self._waiting_since[group.key] + wait_s]

    # --- to the learner ---

    def begun(self) -> list[PartialGroup]:
        """Return the groups that are wanted and have tokens but no result yet, oldest first."""
        held = self.of(*WAITING, GroupState.RUNNING, GroupState.RECLAIMED, GroupState.SCORING)
        return sorted((group for group in held if group.num_tokens), key=lambda group: group.key)

    def take_due(self, *, interval_s: float, now: float) -> list[PartialGroup]:
        """Return the interrupted groups that must be sent to the learner now. Mark them as sent.

        These groups have new tokens and were not shipped in the last `interval_s` seconds.
        """
        due = [
            group
            for group in sorted(self.of(GroupState.INTERRUPTED), key=lambda group: group.key)
            if group.num_tokens > group.num_shipped and now >= group.shipped_at + interval_s
        ]
        for group in due:
            group.shipped_at, group.num_shipped = now, group.num_tokens
        return due

    def forget_shipments(self) -> None:
        """Mark all groups with tokens as not sent, because the learner may have lost the tokens."""
        for group in self._groups.values():
            group.num_shipped = 0

    def states(self, *, now: float = 0.0) -> list[LeaseState]:
        """Return the state of each lease at the time `now`, as a heartbeat lists it."""
        return [
            *(_lease_state(group, is_waiting=True) for group in self.of(*WAITING)),
            *(
                _lease_state(group, running_s=max(0.0, now - (group.began_at or now)))
                for group in self.of(*BUSY)
            ),
            *(
                LeaseState(group_id=group_id, attempt=attempt, num_tokens=-1)
                for group_id, attempt in self.outbox.keys
            ),
        ]

    def validate(self) -> None:
        """For tests: check that groups, states and outbox agree.

        Raises:
            AssertionError: if groups, states and outbox disagree.
        """
        for state, groups in self._by_state.items():
            for key, group in groups.items():
                assert group.state is state, f"{key} is {group.state} among the {state}"
                assert self._groups[key] is group, f"{key} is held twice"
        assert sum(map(len, self._by_state.values())) == len(self._groups), "a group has no state"
        assert not self._by_state[GroupState.ENDED], "a group that ended is kept"
        assert set(self._by_state[GroupState.DELIVERED]) == set(self.outbox.keys), "the outbox"
        for group in self.of(GroupState.INTERRUPTED, GroupState.SCORING):
            assert group.members, f"{group.key} is {group.state} without members"


def _lease_state(
    group: PartialGroup, *, is_waiting: bool = False, running_s: float = 0.0
) -> LeaseState:
    group_id, attempt = group.key
    return LeaseState(
        group_id=group_id,
        attempt=attempt,
        num_tokens=group.num_progress,
        is_waiting=is_waiting,
        running_s=running_s,
    )


# --- The table ---


def _begin(leases: HeldLeases, group: PartialGroup, event: Taken) -> None:
    group.began_at = event.now


def _continue(leases: HeldLeases, group: PartialGroup, event: Taken) -> None:
    group.began_at, group.is_continued = event.now, True


def _report(leases: HeldLeases, group: PartialGroup, event: Reported) -> None:
    leases.outbox.put(group.key, event.message, *event.payload)


def _forget_report(leases: HeldLeases, group: PartialGroup, event: Closed) -> None:
    leases.outbox.acknowledge(group.key)


_BUSY_STEPS: dict[type[Event], Move[GroupState]] = {
    Taken: IMPOSSIBLE,
    HandedOver: IMPOSSIBLE,
    Reclaimed: IGNORED,
    Reported: Move(GroupState.DELIVERED, _report),
    Closed: Move(GroupState.UNWANTED),
    Dropped: Move(GroupState.ENDED),
}
_RUNNING_STEPS: dict[type[Event], Move[GroupState]] = _BUSY_STEPS | {
    Whole: Move(GroupState.SCORING),
    Stopped: Move(GroupState.INTERRUPTED),
}
_WAITING_STEPS: dict[type[Event], Move[GroupState]] = {
    Whole: IMPOSSIBLE,
    Stopped: IMPOSSIBLE,
    Reclaimed: IGNORED,
    HandedOver: Move(GroupState.ENDED),
    Reported: Move(GroupState.DELIVERED, _report),
    Closed: Move(GroupState.ENDED),
    Dropped: IMPOSSIBLE,
}
_OVER_STEPS: dict[type[Event], Move[GroupState]] = dict.fromkeys(EVENTS, IGNORED) | {
    Taken: IMPOSSIBLE,
    HandedOver: IMPOSSIBLE,
}
TABLE: dict[GroupState, dict[type[Event], Move[GroupState]]] = {
    GroupState.QUEUED: _WAITING_STEPS | {Taken: Move(GroupState.RUNNING, _begin)},
    GroupState.RUNNING: _RUNNING_STEPS | {Reclaimed: Move(GroupState.RECLAIMED)},
    GroupState.RECLAIMED: _RUNNING_STEPS,
    GroupState.INTERRUPTED: _WAITING_STEPS | {Taken: Move(GroupState.RUNNING, _continue)},
    GroupState.SCORING: _BUSY_STEPS | {Whole: IMPOSSIBLE, Stopped: IGNORED},
    GroupState.UNWANTED: _BUSY_STEPS
    | dict.fromkeys((Whole, Stopped, Reported, Dropped), Move(GroupState.ENDED))
    | {Closed: IGNORED},
    GroupState.DELIVERED: _OVER_STEPS | {Closed: Move(GroupState.ENDED, _forget_report)},
    GroupState.ENDED: _OVER_STEPS,
}
"""For each state and each type of event, what the event does in this state."""
