"""The states of a group at the learner, from its first grant to its end.

    granted --ResultArrived--> storing --GroupEnded--> closed
     |   ^
     |   Leased
     |   |
    LastLeaseEnded
     v   |
    waiting

Waiting groups are granted again, the oldest first. A closed group has its result in the buffer, or
it has ended without a result, for a recorded reason.

The table below is `TABLE`: the state to which each event leads. `-`: the event leaves the state as
it is. `!`: the event cannot happen in this state. Such an event is a fault of the learner, and
raises an error.

             Leased   LeaseEnded  LastLeaseEnded  ResultArrived  GroupEnded
    waiting  granted  !           !               storing        closed
    granted  -        -           waiting         storing        closed
    storing  -        -           -               !              closed
    closed   !        !           !               !              -

`handle` takes no time, because only `Leased` needs one and carries it. `handle` returns no actions,
because a group sends no messages. It returns the leases that the event begins or ends, which the
book enters in its index by worker.

The result of a waiting group may arrive after its lease has expired or its worker was dropped. A
group that is being stored is not granted again, even if all of its leases end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from echo.core.errors import LocalProtocolError
from echo.core.rollout import PolicyVersion
from echo.core.tables import IGNORED, IMPOSSIBLE, Move

MAX_ATTEMPTS = 20
"""A group that was granted this many times ends, because it probably makes its workers fail."""


class OpenState(StrEnum):
    """The state of a group at the learner."""

    WAITING = "waiting"
    """No worker has a lease of the group."""
    GRANTED = "granted"
    """At least one worker has a lease of the group."""
    STORING = "storing"
    """A valid result of the group is being written to the disk."""
    CLOSED = "closed"
    """The group was accepted or has ended, and the book has forgotten it."""


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """One lease that a worker holds."""

    group_id: int
    attempt: int
    worker_id: str
    granted_at: float
    renewed_at: float
    num_tokens: int = 0
    sent_at: float = 0.0
    is_confirmed: bool = False
    """Whether the worker has listed the lease in a heartbeat since the learner last sent the
    lease."""
    is_delivered: bool = False
    """Whether the lease's result has arrived. From then on the lease does not expire."""
    is_over: bool = False
    """Whether the lease has ended, for any reason."""
    running_s: float = 0.0
    """Seconds for which the worker has sampled the group, according to its last heartbeat. It is 0
    while the group is queued at the worker."""
    seen_at: float = 0.0
    """Time at which `longest` and `rate` were last estimated (`leases/grants/finish_times.py`)."""
    seen_tokens: int = 0
    """The value that `num_tokens` had at the time `seen_at`."""
    longest: float = 0.0
    """Estimated number of tokens that the longest completion had at the time `seen_at`."""
    rate: float = 0.0
    """Estimated tokens per second at which the longest completion grows."""
    num_beside: int = 1
    """Number of leases that the worker held right after this lease was granted."""
    min_version: PolicyVersion | None = None
    """The oldest version that may sample the group; None if every version may."""
    copy_of: int | None = None
    """The attempt that this lease copies, with the same seed (`leases/grants/dispatch.py`); None if
    this lease is not a copy."""
    request: MoveRequest | None = None
    """The request that asks the holder to give up the lease; None if no request was made."""

    @property
    def key(self) -> tuple[int, int]:
        """(group id, attempt) of the lease."""
        return self.group_id, self.attempt

    @property
    def seed_attempt(self) -> int:
        """The attempt whose seed the lease has: its own, or that of the lease that it copies."""
        return self.attempt if self.copy_of is None else self.copy_of

    def renew(self, *, num_tokens: int, now: float) -> None:
        """Prolong the lease, because the worker has made progress.

        Progress is tokens, rewards or tool calls.
        """
        self.num_tokens = num_tokens
        self.renewed_at = now


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """A request that asks the holder of a lease to give it up for a different worker."""

    worker_id: str
    """The idle worker to which the group will be granted."""
    at: float
    """Time at which the request was first made."""
    is_begun_too: bool
    """Whether the holder must give up the group even if it has begun to sample the group."""


# --- Events ---


@dataclass(frozen=True, slots=True)
class Leased:
    """Event: a worker is granted an attempt, or claims an attempt that it had before a restart."""

    attempt: int
    worker_id: str
    now: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Event: a lease has ended, but at least one other worker still has a lease of the group."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class LastLeaseEnded:
    """Event: the last lease of a group has ended, so no worker has a lease of the group."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class ResultArrived:
    """Event: a valid result of an attempt has arrived and is being written to the disk."""

    attempt: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """Event: the group's result is on the disk, or the group has ended without a result."""


Event = Leased | LeaseEnded | LastLeaseEnded | ResultArrived | GroupEnded
EVENTS: tuple[type[Event], ...] = (Leased, LeaseEnded, LastLeaseEnded, ResultArrived, GroupEnded)


# --- Changes that an event makes to the leases of workers; the book enters them ---


@dataclass(frozen=True, slots=True)
class LeaseBegan:
    """Change: a worker has a new lease."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """Change: a worker no longer has this lease."""

    record: LeaseRecord


Change = LeaseBegan | LeaseOver


TABLE: dict[OpenState, dict[type[Event], Move[OpenState]]] = {
    OpenState.WAITING: {
        Leased: Move(OpenState.GRANTED),
        LeaseEnded: IMPOSSIBLE,
        LastLeaseEnded: IMPOSSIBLE,
        ResultArrived: Move(OpenState.STORING),
        GroupEnded: Move(OpenState.CLOSED),
    },
    OpenState.GRANTED: {
        Leased: IGNORED,
        LeaseEnded: IGNORED,
        LastLeaseEnded: Move(OpenState.WAITING),
        ResultArrived: Move(OpenState.STORING),
        GroupEnded: Move(OpenState.CLOSED),
    },
    OpenState.STORING: {
        # A worker may list a lease of a group that is being stored.
        Leased: IGNORED,
        LeaseEnded: IGNORED,
        LastLeaseEnded: IGNORED,
        ResultArrived: IMPOSSIBLE,
        GroupEnded: Move(OpenState.CLOSED),
    },
    OpenState.CLOSED: {
        Leased: IMPOSSIBLE,
        LeaseEnded: IMPOSSIBLE,
        LastLeaseEnded: IMPOSSIBLE,
        ResultArrived: IMPOSSIBLE,
        GroupEnded: IGNORED,
    },
}
"""For each state and each type of event, the next state."""


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that was granted and has not ended: its state, its leases and its attempts."""

    group_id: int
    state: OpenState = OpenState.WAITING
    """The state of the group, which only `handle` changes."""
    leases: list[LeaseRecord] = field(default_factory=list)
    """The leases of the group that workers hold."""
    num_attempts: int = 0
    """Number of times that the group was granted so far. Attempts are counted from 0, so this is
    also the number of the next attempt."""
    holders: dict[int, str] = field(default_factory=dict)
    """For each attempt, the worker to which it was granted. The entry is kept after the lease has
    ended."""
    expired: set[tuple[int, str]] = field(default_factory=set)
    """The leases that have ended but that the worker may still list, as (attempt, worker)."""
    fatal: set[int] = field(default_factory=set)
    """The attempts that made their worker's engine unusable."""
    result: tuple[str, int] | None = None
    """The (worker, attempt) whose result is being stored; None if no result is being stored."""

    @property
    def is_storing(self) -> bool:
        """Whether the result of the group is being stored."""
        return self.state is OpenState.STORING

    @property
    def workers(self) -> list[str]:
        """The ids of the workers that have a lease of the group."""
        return [record.worker_id for record in self.leases]

    @property
    def newest_attempt(self) -> int:
        """The newest attempt for which a worker holds a lease; -1 if there is no such lease."""
        return max((record.attempt for record in self.leases), default=-1)

    def find(self, attempt: int, worker_id: str) -> LeaseRecord | None:
        """Return the lease that this worker holds for an attempt. Return None if it holds none."""
        key = attempt, worker_id
        return next((r for r in self.leases if (r.attempt, r.worker_id) == key), None)

    def others(self, attempt: int) -> list[LeaseRecord]:
        """Return the leases of all attempts except this one."""
        return [record for record in self.leases if record.attempt != attempt]

    def was_granted(self, attempt: int, worker_id: str) -> bool:
        """Return whether this worker was granted this attempt.

        If so, the learner accepts this worker's result, even if the lease has since expired or the
        worker was dropped.
        """
        return self.holders.get(attempt) == worker_id

    def handle(self, event: Event) -> list[Change]:
        """Apply an event. No other method changes the state of a group.

        Returns:
            The leases that the event begins or ends.

        Raises:
            LocalProtocolError: if the event cannot happen in the present state.
        """
        step = TABLE[self.state][type(event)]
        if step is IMPOSSIBLE:
            what = f"{type(event).__name__} of group {self.group_id}"
            raise LocalProtocolError(f"{what}, which is {self.state}")
        if step.then is not None:
            self.state = step.then
        match event:
            case Leased():
                return self._lease(event)
            case LeaseEnded() | LastLeaseEnded():
                self.leases.remove(event.record)
                return _end([event.record])
            case ResultArrived():
                self.result = event.worker_id, event.attempt
                record = self.find(event.attempt, event.worker_id)
                if record is not None:
                    record.is_delivered = True
                return []
            case GroupEnded():
                ended, self.leases = self.leases, []
                return _end(ended)

    def _lease(self, event: Leased) -> list[Change]:
        attempt, worker_id, now = event.attempt, event.worker_id, event.now
        record = LeaseRecord(self.group_id, attempt, worker_id, now, now, sent_at=now)
        self.leases.append(record)
        self.num_attempts = max(self.num_attempts, attempt + 1)
        self.holders[attempt] = worker_id
        return [LeaseBegan(record)]


def _end(records: list[LeaseRecord]) -> list[Change]:
    for record in records:
        record.is_over = True
    return [LeaseOver(record) for record in records]
