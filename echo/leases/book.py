"""The book of leases.

It records which worker has a lease of which group, and when the lease expires. A lease gives a
worker one attempt at a group, for a limited time. Progress renews the lease. When a lease expires,
its group waits to be granted again, ahead of new groups (`leases/groups.py` has a table of these
states). The first valid result of a group is accepted, from any attempt. A later result is a
duplicate and does no harm.

The book remembers an expired lease until its group ends. So the lease stays expired even if the
heartbeats of its worker still list it. Until the group ends, the book also remembers the worker of
each attempt. After a restart of the learner, the ledger supplies the workers of earlier attempts.
The learner accepts a result or a failure of a group only from the workers of its attempts.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from echo.core.rollout import PolicyVersion
from echo.core.timers import Deadlines
from echo.leases.groups import (
    Event,
    GroupEnded,
    LastLeaseEnded,
    Leased,
    LeaseEnded,
    LeaseOver,
    LeaseRecord,
    OpenGroup,
    OpenState,
    ResultArrived,
)

LOST_WORKER = "(before the restart)"
"""Takes the place of a lease's holder after a restart, until a worker claims the lease."""
MAX_WORKERS = 10_000
"""Number of workers that are remembered. The newest are kept, also if they have left."""


@dataclass(slots=True)
class LeasedWorker:
    """The facts about a worker that decide its grants. Each heartbeat updates them."""

    node_id: str
    installed: PolicyVersion | None = None
    capacity: int = 0
    """Number of leases that the worker can hold; 0 if the worker takes no leases at present."""
    num_places: int = 0
    """Number of groups that the worker can sample at the same time; 0 if unknown."""
    num_unknown: int = 0
    """Number of leases that have expired or are unwanted, but that the worker still holds."""
    is_stuck: bool = False
    """Whether the worker holds expired or unwanted leases and shows no progress."""
    is_set_aside: bool = False
    """Whether the worker gets no groups, because its groups were useless
    (`leases/usefulness.py`)."""
    num_waiting: int = 0
    """Number of groups that the worker has begun and that now wait at the worker."""

    def is_able(self, usable: Container[PolicyVersion | None]) -> bool:
        """Return whether the worker takes leases and has installed one of the `usable` versions."""
        is_welcome = not self.is_stuck and not self.is_set_aside
        return is_welcome and self.capacity > 0 and self.installed in usable


class LeaseBook:
    """All leases, indexed by group and by worker, and the groups that wait for a lease."""

    def __init__(self, *, timeout_s: float) -> None:
        """Start without groups. A lease expires if it shows no progress for `timeout_s` seconds."""
        self.timeout_s = timeout_s
        self._groups: dict[int, OpenGroup] = {}
        """For each group id, the group. Closed groups are left out."""
        self._by_state: dict[OpenState, set[int]] = {state: set() for state in OpenState}
        """For each state, the ids of the groups in this state. Closed groups are left out."""
        self._by_worker: dict[str, list[LeaseRecord]] = {}
        self._deadlines: Deadlines[LeaseRecord] = Deadlines(self)
        self._changes: dict[str, int] = {}

    @property
    def num_running(self) -> int:
        """Number of groups that are leased, or whose result is being stored."""
        by_state = self._by_state
        return len(by_state[OpenState.GRANTED]) + len(by_state[OpenState.STORING])

    @property
    def waiting(self) -> list[int]:
        """Ids of the groups that wait to be granted again, oldest first."""
        return sorted(self._by_state[OpenState.WAITING])

    @property
    def group_ids(self) -> list[int]:
        """Ids of the groups that are open, oldest first."""
        return sorted(self._groups)

    @property
    def worker_ids(self) -> set[str]:
        """Ids of the workers that hold a lease."""
        return {name for name, records in self._by_worker.items() if records}

    @property
    def oldest_open(self) -> int | None:
        """The lowest id of an open group; None if no group is open."""
        return min(self._groups, default=None)

    @property
    def deadline(self) -> float | None:
        """Time at which the next lease expires; None if there is no lease."""
        return self._deadlines.first

    def deadline_of(self, record: LeaseRecord) -> float | None:
        """Return when a lease expires. Return None if it has ended or its result has arrived."""
        is_watched = not record.is_over and not record.is_delivered
        return record.renewed_at + self.timeout_s if is_watched else None

    def group(self, group_id: int) -> OpenGroup:
        """Return the open group with this id. If the id is unknown, return a new group."""
        return self._groups.get(group_id) or OpenGroup(group_id)

    # --- what is known of a worker ---

    def num_changes(self, worker_id: str) -> int:
        """Return how many times a worker has either got or lost a lease."""
        return self._changes.get(worker_id, 0)

    def num_leases(self, worker_id: str) -> int:
        """Return the number of leases that a worker holds."""
        return len(self._by_worker.get(worker_id, ()))

    def worker_leases(self, worker_id: str) -> list[LeaseRecord]:
        """Return the leases that a worker holds, oldest group first."""
        return sorted(self._by_worker.get(worker_id, ()), key=lambda record: record.group_id)

    def note_load(self, worker_id: str, *, now: float) -> None:
        """For each lease granted to a worker at `now`, record how many leases the worker holds."""
        records = self._by_worker[worker_id]
        for record in records:
            if record.granted_at == now:
                record.num_beside = len(records)

    def mean_leases(self, worker_id: str, group_id: int, attempt: int) -> float:
        """Return how many leases a worker has held on average since an attempt was granted.

        This is the mean of two numbers: the leases that the worker held right after the grant, and
        those that it holds now.
        """
        now = max(1, self.num_leases(worker_id))
        record = self.group(group_id).find(attempt, worker_id)
        return now if record is None else (record.num_beside + now) / 2

    # --- what happens to a group ---

    def _handle(self, group: OpenGroup, event: Event) -> None:
        """Apply an event to a group. Then update the two indexes, by state and by worker.

        Raises:
            LocalProtocolError: if the event cannot happen in the state of the group.
        """
        before = group.state
        changes = group.handle(event)
        self._by_state[before].discard(group.group_id)
        if group.state is OpenState.CLOSED:
            del self._groups[group.group_id]
        else:
            self._by_state[group.state].add(group.group_id)
        for change in changes:
            record = change.record
            if isinstance(change, LeaseOver):
                self._by_worker[record.worker_id].remove(record)
            else:
                self._by_worker.setdefault(record.worker_id, []).append(record)
                self._deadlines.add(record)
            self._changes[record.worker_id] = self.num_changes(record.worker_id) + 1

    def grant(self, group_id: int, worker_id: str, *, now: float) -> LeaseRecord:
        """Lease a group to a worker, as the next attempt at this group. Return the lease."""
        return self.adopt(group_id, self.group(group_id).num_attempts, worker_id, now=now)

    def adopt(self, group_id: int, attempt: int, worker_id: str, *, now: float) -> LeaseRecord:
        """Add a lease that a worker already holds. This happens after a restart of the learner."""
        group = self._groups.setdefault(group_id, OpenGroup(group_id))
        self._handle(group, Leased(attempt, worker_id, now))
        return group.leases[-1]

    def restore(self, group_id: int, holders: Mapping[int, str], *, now: float) -> None:
        """Add a group that was open before a restart. `holders` maps each attempt to its worker.

        At first LOST_WORKER, which stands for a missing worker, holds the lease of the newest
        attempt. The attempt's worker may claim the lease. Otherwise the lease expires.
        """
        self.adopt(group_id, max(holders), LOST_WORKER, now=now)
        self._groups[group_id].holders = dict(holders)

    def deliver(self, group_id: int, attempt: int, worker_id: str) -> None:
        """Record that a valid result of an attempt has arrived and is now being stored."""
        self._handle(self._groups[group_id], ResultArrived(attempt, worker_id))

    def finish(self, group_id: int) -> None:
        """Close a group that has ended, and end all of its leases."""
        group = self._groups.get(group_id)
        if group is not None:
            self._handle(group, GroupEnded())

    def revoke(self, record: LeaseRecord) -> None:
        """End a lease. If it was the group's only lease, the group waits to be granted again."""
        group = self._groups[record.group_id]
        event = LeaseEnded if len(group.leases) > 1 else LastLeaseEnded
        self._handle(group, event(record))

    def revoke_attempt(self, group_id: int, attempt: int) -> None:
        """If a worker holds the lease of an attempt, end this lease."""
        for record in list(self.group(group_id).leases):
            if record.attempt == attempt:
                self.revoke(record)

    def expire(self, *, now: float) -> list[LeaseRecord]:
        """End the leases that have made no progress in time, and return them."""
        late = self._deadlines.take_due(now=now)
        for record in late:
            self.revoke(record)
            self._groups[record.group_id].expired.add((record.attempt, record.worker_id))
        return late

    def give_back(self, group_id: int, attempt: int, worker_id: str) -> None:
        """End a lease that its worker gives up. The group can then be granted again."""
        self.revoke_attempt(group_id, attempt)
        # The worker lists the lease until it receives the acknowledgement.
        self._groups[group_id].expired.add((attempt, worker_id))

    def drop_worker(self, worker_id: str) -> None:
        """Forget a worker that is gone, and end all its leases."""
        for record in self.worker_leases(worker_id):
            self.revoke(record)
        self._by_worker.pop(worker_id, None)
        self._changes.pop(worker_id, None)

    def validate(self) -> None:
        """For tests: check that states, leases and workers agree.

        Raises:
            AssertionError: if states, leases and workers disagree.
        """
        for state, group_ids in self._by_state.items():
            for group_id in group_ids:
                group = self._groups[group_id]
                assert group.state is state, f"{group_id} is {group.state} among the {state}"
                assert (state is OpenState.STORING) is (group.result is not None), f"{group_id}"
                if state is not OpenState.STORING:
                    has_leases = bool(group.leases)
                    assert has_leases is (state is OpenState.GRANTED), f"{group_id} is {state}"
        assert sum(map(len, self._by_state.values())) == len(self._groups), "a group has no state"
        of_groups = [record for group in self._groups.values() for record in group.leases]
        of_workers = [record for records in self._by_worker.values() for record in records]
        assert set(map(id, of_groups)) == set(map(id, of_workers)), "groups and workers disagree"
        assert not any(record.is_over for record in of_groups), "a lease that is over is held"
