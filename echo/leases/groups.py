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
from typing import TYPE_CHECKING

from echo.core.tables import IGNORED, IMPOSSIBLE, Move

if TYPE_CHECKING:
    from echo.leases.book import LeaseRecord


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
    """A lease is over, and another worker still has one."""


class LastLeaseEnded:
    """The last lease is over: expired, given back, refused, or its worker is gone."""


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
        # What a worker has claimed by its list of leases, though its group is being stored.
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
"""What each event means to a group, by its state."""


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that was granted and has not come to its end."""

    group_id: int
    state: OpenState = OpenState.WAITING
    leases: list[LeaseRecord] = field(default_factory=list)
    """Those that are out."""
    num_attempts: int = 0
    """How often it has been granted."""
    holders: dict[int, str] = field(default_factory=dict)
    """Attempt -> the worker that was granted it, also where the lease is over."""
    expired: set[tuple[int, str]] = field(default_factory=set)
    """(attempt, worker) of leases that are over, though the worker may still list them."""
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
