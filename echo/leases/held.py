"""The leases that a worker holds: one state for each group, from its Grant to its acknowledgement.

    queued --Taken--> running --Whole--> scoring --Reported--> delivered --Closed--> ended
                       |   ^
                 Stopped   Taken           interrupted groups go before queued ones, oldest first
                       v   |
                    interrupted

All states and events (`TABLE`): what an event moves a group to; `-` leaves the state as it is, and
`!` cannot happen there, so it is refused as a fault of this node.

                 Taken    Whole    Stopped      Reclaimed  HandedOver  Reported   Closed    Dropped
    queued       running  !        !            -          ended       delivered  ended     !
    running      !        scoring  interrupted  reclaimed  !           delivered  unwanted  ended
    reclaimed    !        scoring  interrupted  -          !           delivered  unwanted  ended
    interrupted  running  !        !            -          ended       delivered  ended     !
    scoring      !        !        -            -          !           delivered  unwanted  ended
    unwanted     !        ended    ended        -          !           ended      -         ended
    delivered    !        -        -            -          !           -          ended     -
    ended        !        -        -            -          !           -          -         -

A heartbeat lists every group that has not ended, so the learner knows what it must send again. The
number of groups in a state is bounded by the number of leases that the learner grants.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from echo.core.errors import LocalProtocolError
from echo.core.rollout import PartialRollout, PolicyVersion
from echo.core.tables import IGNORED, IMPOSSIBLE, Move
from echo.leases.outbox import Outbox
from echo.wire.codec import Frame
from echo.wire.messages import Lease, LeaseState, Message

LeaseKey = tuple[int, int]
"""(group id, attempt)."""


def key_of(lease: Lease) -> LeaseKey:
    """Return the key of a lease."""
    return lease.group_id, lease.attempt


class GroupState(StrEnum):
    """Where a group is at its worker."""

    QUEUED = "queued"
    """Not begun."""
    RUNNING = "running"
    """In the engine, or with agents."""
    RECLAIMED = "reclaimed"
    """In the engine; another worker continues it as soon as it leaves the engine unfinished."""
    INTERRUPTED = "interrupted"
    """Begun, and waiting to be continued."""
    SCORING = "scoring"
    """All members have ended; they are being rewarded."""
    UNWANTED = "unwanted"
    """The engine or a reward still has it; the learner wants no result."""
    DELIVERED = "delivered"
    """Its result, or why there is none, is in the outbox until the learner acknowledges it."""
    ENDED = "ended"
    """Nothing of it is kept."""


WAITING = (GroupState.QUEUED, GroupState.INTERRUPTED)
"""The states of groups that no engine has."""
BUSY = (GroupState.RUNNING, GroupState.RECLAIMED, GroupState.SCORING, GroupState.UNWANTED)
"""The states of groups that an engine, agents or a reward may have."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class PartialGroup:
    """A leased group; it keeps its lease, whichever worker has held it before."""

    lease: Lease
    members: list[PartialRollout]
    state: GroupState = GroupState.QUEUED
    """`HeldLeases.handle` alone changes it."""
    num_progress: int = 0
    """Signs of life, tokens and rewards, since it came here: what renews the lease."""
    shipped_at: float = -1e18
    """When its members were last sent to the learner."""
    num_shipped: int = 0
    """Tokens of the members that were sent then."""
    began_at: float | None = None
    """When the engine took it."""
    is_continued: bool = False
    """Whether it was begun before that, here or elsewhere."""

    def seconds(self, now: float) -> float:
        """Return how long all of it took; 0 where that is not known."""
        return 0.0 if self.began_at is None or self.is_continued else now - self.began_at

    @property
    def key(self) -> LeaseKey:
        """(group id, attempt)."""
        return key_of(self.lease)

    @property
    def num_tokens(self) -> int:
        """Tokens of all members so far."""
        return sum(member.num_tokens for member in self.members)

    @property
    def num_unfinished(self) -> int:
        """Members that have not come to their end."""
        return sum(not member.is_finished for member in self.members)

    @property
    def is_whole(self) -> bool:
        """Whether all members have come to their end."""
        return not self.num_unfinished

    @property
    def is_sampled(self) -> bool:
        """Whether the engine is to go on with it."""
        return self.state in (GroupState.RUNNING, GroupState.RECLAIMED)

    @property
    def oldest_step(self) -> int | None:
        """Step of the oldest version that has sampled for it; None without a token."""
        steps = [int(m.policy_versions[:, 1].min()) for m in self.members if m.num_tokens]
        return min(steps, default=None)

    def seed_of(self, member: int) -> int:
        """Return the seed of a member's next segment."""
        num_segments = self.members[member].num_segments
        if not num_segments:
            return self.lease.seed + member
        text = f"{self.lease.seed}/{member}/{num_segments}"
        return random.Random(text).getrandbits(48)


# --- Events ---


@dataclass(frozen=True, slots=True)
class Taken:
    """The engine takes the group, or agents are offered it."""

    now: float | None


@dataclass(frozen=True, slots=True)
class Whole:
    """All members have ended."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The call of the engine that had the group has ended."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Another worker is to continue the group, begun or not."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The group is given up for another worker."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The learner is to be sent the result of the group, or why there is none."""

    message: Message
    payload: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """The learner wants nothing more of the group: it acknowledges it, or has it from another."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """No agent works on the group, nor will."""


Event = Taken | Whole | Stopped | Reclaimed | HandedOver | Reported | Closed | Dropped
EVENTS: tuple[type[Event], ...] = (
    Taken, Whole, Stopped, Reclaimed, HandedOver, Reported, Closed, Dropped,
)  # fmt: skip


class HeldLeases:
    """The leases of a worker, with what has been sampled for them."""

    def __init__(self, outbox: Outbox) -> None:
        """Begin without leases; `outbox` holds the messages of delivered groups."""
        self.outbox = outbox
        self._groups: dict[LeaseKey, PartialGroup] = {}
        """All that have not ended."""
        self._by_state: dict[GroupState, dict[LeaseKey, PartialGroup]] = {
            state: {} for state in GroupState
        }
        """The same, by state; none has ended."""
        self._waiting_since: dict[LeaseKey, float] = {}
        """Since when a group has waited for a newer version, as `overdue` found it."""

    def __contains__(self, key: LeaseKey) -> bool:
        return key in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, key: LeaseKey) -> PartialGroup | None:
        """Return the group of a lease; None if it is not held."""
        return self._groups.get(key)

    def of(self, *states: GroupState) -> list[PartialGroup]:
        """Return the groups in these states, in the order in which they came to them."""
        return [group for state in states for group in self._by_state[state].values()]

    def add(self, lease: Lease, members: Sequence[PartialRollout] = ()) -> None:
        """Enter a new lease, with what others have sampled for it."""
        state = GroupState.INTERRUPTED if members else GroupState.QUEUED
        self._enter(PartialGroup(lease, list(members), state, is_continued=bool(members)))

    def restore(self, groups: Sequence[PartialGroup]) -> None:
        """Enter what a former process of this worker has left."""
        for group in groups:
            if group.key not in self:
                group.state = GroupState.INTERRUPTED
                self._enter(group)

    def _enter(self, group: PartialGroup) -> None:
        self._groups[group.key] = self._by_state[group.state][group.key] = group

    def handle(self, group: PartialGroup, event: Event) -> None:
        """Do what the table says of an event: the one place where a state changes.

        Raises:
            LocalProtocolError: if it cannot happen in the state of the group.
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
        """Have members begin again that are longer than a completion may be; return their tokens.

        A former process may have left such members before the run was resumed with a lower limit.
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
        """Move groups into the engine: begun ones first, oldest first; none is passed over.

        Groups that want a newer version than `installed` stay where they are. A group that does not
        have `group_size` members, such as one from before a change of the configuration, begins
        again.

        Args:
            max_groups: take no more than these.
            group_size: rollouts of a group.
            max_rollouts: the most rollouts to be sampled; None for any number.
            now: the present instant.
            installed: the newest version that can sample them.
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
        """Return the groups that want a newer version than the one that is installed."""
        return [
            group
            for group in self.of(*WAITING)
            if group.lease.min_version is not None
            and (installed is None or installed < group.lease.min_version)
        ]

    def overdue(
        self, installed: PolicyVersion | None, *, wait_s: float, now: float
    ) -> list[PartialGroup]:
        """Return the groups that have waited for a newer version for `wait_s` seconds."""
        waiting = self.awaiting(installed)
        since = self._waiting_since
        self._waiting_since = {group.key: since.get(group.key, now) for group in waiting}
        return [group for group in waiting if now >= self._waiting_since[group.key] + wait_s]

    # --- to the learner ---

    def begun(self) -> list[PartialGroup]:
        """Return every group with tokens that is still wanted and not delivered, oldest first."""
        held = self.of(*WAITING, GroupState.RUNNING, GroupState.RECLAIMED, GroupState.SCORING)
        return sorted((group for group in held if group.num_tokens), key=lambda group: group.key)

    def take_due(self, *, interval_s: float, now: float) -> list[PartialGroup]:
        """Return the interrupted groups that have grown since they were shipped, and note it."""
        due = [
            group
            for group in sorted(self.of(GroupState.INTERRUPTED), key=lambda group: group.key)
            if group.num_tokens > group.num_shipped and now >= group.shipped_at + interval_s
        ]
        for group in due:
            group.shipped_at, group.num_shipped = now, group.num_tokens
        return due

    def forget_shipments(self) -> None:
        """Have all of them shipped again: the learner may have lost them."""
        for group in self._groups.values():
            group.num_shipped = 0

    def states(self, *, now: float = 0.0) -> list[LeaseState]:
        """Return the leases here as a heartbeat lists them, now."""
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
        """Check that the parts of this state agree.

        Raises:
            AssertionError: if they do not.
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
"""The move of each event, by state."""
