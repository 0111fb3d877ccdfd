"""Open groups at the learner: one state for each, from its first grant to its end.

    granted --ResultArrived--> storing --GroupEnded--> closed       its result is in the buffer, or
     |   ^                                                          it has ended with a reason
     |   Leased
     |   |
    LastLeaseEnded
     v   |
    waiting                                                         granted again, oldest first

All states and events (`TABLE`): what an event moves a group to; `-` leaves the state as it is, and
`!` cannot happen there, so it is refused as a fault of the learner.

             Leased   LeaseEnded  LastLeaseEnded  ResultArrived  GroupEnded
    waiting  granted  !           !               storing        closed
    granted  -        -           waiting         storing        closed
    storing  -        -           -               !              closed
    closed   !        !           !               !              -

A result may arrive for a waiting group: of a lease that has expired, or whose worker was gone. A
group that is being stored is not granted again, whatever becomes of its leases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from echo.core.rollout import PolicyVersion
from echo.core.tables import IGNORED, IMPOSSIBLE, Move


class OpenState(StrEnum):
    """Where a group is at the learner."""

    WAITING = "waiting"
    """No worker has a lease of it."""
    GRANTED = "granted"
    """One worker or more have a lease of it."""
    STORING = "storing"
    """A valid result is on its way to the disk."""
    CLOSED = "closed"
    """Accepted or ended: nothing of it is kept here."""


class Leased:
    """A worker is given a lease."""


class LeaseEnded:
    """A lease has ended, and another worker still has one."""


class LastLeaseEnded:
    """The last lease has ended: expired, given back, refused, or its worker is gone."""


class ResultArrived:
    """A valid result has come and is being written."""


class GroupEnded:
    """The result is on the disk, or the group has ended without any."""


Event = type[Leased | LeaseEnded | LastLeaseEnded | ResultArrived | GroupEnded]
EVENTS: tuple[Event, ...] = (Leased, LeaseEnded, LastLeaseEnded, ResultArrived, GroupEnded)


TABLE: dict[OpenState, dict[Event, Move[OpenState]]] = {
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
"""The move of each event, by state."""


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """One lease that is out."""

    group_id: int
    attempt: int
    worker_id: str
    granted_at: float
    renewed_at: float
    num_tokens: int = 0
    sent_at: float = 0.0
    is_confirmed: bool = False
    """Whether a heartbeat of the worker has listed it since it was (last) sent."""
    is_delivered: bool = False
    """Whether its result is here and being judged or written: it no longer expires."""
    is_over: bool = False
    """Whether it was ended, in whatever way."""
    running_s: float = 0.0
    """How long the worker has been at it, as its last heartbeat said; 0 while it waits there."""
    seen_at: float = 0.0
    """When `longest` and `rate` were estimated last (`leases/dispatch.py`)."""
    seen_tokens: int = 0
    """`num_tokens` at that instant."""
    longest: float = 0.0
    """Tokens that its longest completion is expected to have had then."""
    rate: float = 0.0
    """Tokens per second that are expected to be added to that one."""
    num_beside: int = 1
    """Groups that its worker held when it was granted, itself included."""
    min_version: PolicyVersion | None = None
    """The oldest version to sample it under."""
    copy_of: int | None = None
    """The attempt that it repeats elsewhere, with the same seed (`leases/dispatch.py`)."""
    reclaimed_for: str = ""
    """The idle worker for which its holder was asked to give it up; empty if it was not asked."""
    reclaimed_at: float = 0.0
    """When its holder was asked first."""
    is_begun_too: bool = False
    """Whether its holder was to give it up begun or not."""


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that was granted and has not come to its end."""

    group_id: int
    state: OpenState = OpenState.WAITING
    leases: list[LeaseRecord] = field(default_factory=list)
    """The leases that are out."""
    num_attempts: int = 0
    """How often it has been granted."""
    holders: dict[int, str] = field(default_factory=dict)
    """Attempt -> the worker that was granted it, also where the lease has ended."""
    expired: set[tuple[int, str]] = field(default_factory=set)
    """(attempt, worker) of leases that have ended, though the worker may still list them."""
    fatal: set[int] = field(default_factory=set)
    """The attempts that ended the engine of their worker."""
    result: tuple[str, int] | None = None
    """The worker and the attempt whose result is being stored."""

    @property
    def workers(self) -> list[str]:
        """The workers that have a lease of it."""
        return [record.worker_id for record in self.leases]

    def find(self, attempt: int, worker_id: str) -> LeaseRecord | None:
        """Return the lease of an attempt, if that worker has it."""
        key = attempt, worker_id
        return next((r for r in self.leases if (r.attempt, r.worker_id) == key), None)
