"""Book of leases: which worker has which group, and when a lease expires.

A lease is (group, attempt) given to one worker for a time; progress renews it. The group of an
expired lease waits to be granted again, before new groups (`leases/groups.py`: a table of these
states). The first valid result of a group is accepted, whatever its attempt. A later result is a
duplicate and does no harm.

The book remembers an expired lease until its group ends, so that the lease does not start again
when its worker still lists it. Until then it also remembers which worker was granted each attempt;
after a restart the ledger supplies these workers. The learner accepts a result or a failure of a
group from them only.
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
"""Holder of a lease from before a restart, until a worker claims the lease."""
MAX_WORKERS = 10_000
"""Number of newest workers that are remembered; workers that have left are among them."""


@dataclass(slots=True)
class LeasedWorker:
    """The state of a worker that grants depend on; each heartbeat updates it."""

    node_id: str
    installed: PolicyVersion | None = None
    capacity: int = 0
    """Most leases that it holds at once; 0 if it takes none at present."""
    num_places: int = 0
    """Groups that it samples at a time; 0 if unknown."""
    num_unknown: int = 0
    """Leases that it still holds although they have expired or are unwanted."""
    is_stuck: bool = False
    """Whether it holds expired or unwanted leases and shows no progress."""
    is_set_aside: bool = False
    """Whether it is granted no groups because its groups teach nothing (`leases/usefulness.py`)."""
    num_waiting: int = 0
    """Groups that wait at the worker to be continued."""

    def is_able(self, usable: Container[PolicyVersion | None]) -> bool:
        """Return whether it can be granted groups: it takes leases and its version is usable."""
        is_welcome = not self.is_stuck and not self.is_set_aside
        return is_welcome and self.capacity > 0 and self.installed in usable


class LeaseBook:
    """The leases that workers hold, by group and by worker."""

    def __init__(self, *, timeout_s: float) -> None:
        """Start with nothing granted; leases expire after `timeout_s` without progress."""
        self.timeout_s = timeout_s
        self._groups: dict[int, OpenGroup] = {}
        """All groups that are not closed."""
        self._by_state: dict[OpenState, set[int]] = {state: set() for state in OpenState}
        """State -> ids of the groups in it, without closed groups."""
        self._by_worker: dict[str, list[LeaseRecord]] = {}
        self._deadlines: Deadlines[LeaseRecord] = Deadlines(self)
        self._changes: dict[str, int] = {}

    @property
    def num_running(self) -> int:
        """Groups that are leased or being stored."""
        by_state = self._by_state
        return len(by_state[OpenState.GRANTED]) + len(by_state[OpenState.STORING])

    @property
    def waiting(self) -> list[int]:
        """The groups that wait to be granted again, oldest first."""
        return sorted(self._by_state[OpenState.WAITING])

    @property
    def group_ids(self) -> list[int]:
        """The groups that are open, oldest first."""
        return sorted(self._groups)

    @property
    def worker_ids(self) -> set[str]:
        """The workers that hold a lease."""
        return {name for name, records in self._by_worker.items() if records}

    @property
    def oldest_open(self) -> int | None:
        """The lowest id of an open group; None if no group is open."""
        return min(self._groups, default=None)

    @property
    def deadline(self) -> float | None:
        """When the next lease expires; None if there is no lease."""
        return self._deadlines.first

    def deadline_of(self, record: LeaseRecord) -> float | None:
        """Return when a lease expires; None if it has ended or is delivered."""
        is_watched = not record.is_over and not record.is_delivered
        return record.renewed_at + self.timeout_s if is_watched else None

    def group(self, group_id: int) -> OpenGroup:
        """Return an open group; for any other id, a group without leases and attempts."""
        return self._groups.get(group_id) or OpenGroup(group_id)

    # --- what is known of a worker ---

    def num_changes(self, worker_id: str) -> int:
        """Return how often a worker's leases have changed: a lease was added or has ended."""
        return self._changes.get(worker_id, 0)

    def num_leases(self, worker_id: str) -> int:
        """Return how many leases a worker holds."""
        return len(self._by_worker.get(worker_id, ()))

    def worker_leases(self, worker_id: str) -> list[LeaseRecord]:
        """Return the leases that a worker holds, oldest group first."""
        return sorted(self._by_worker.get(worker_id, ()), key=lambda record: record.group_id)

    def note_load(self, worker_id: str, *, now: float) -> None:
        """Set `num_beside` of the leases granted at `now` to the number that the worker holds."""
        records = self._by_worker[worker_id]
        for record in records:
            if record.granted_at == now:
                record.num_beside = len(records)

    def load(self, worker_id: str, group_id: int, attempt: int) -> float:
        """Return a worker's mean number of leases while it made a group: at the grant and now."""
        now = max(1, self.num_leases(worker_id))
        record = self.group(group_id).find(attempt, worker_id)
        return now if record is None else (record.num_beside + now) / 2

    # --- what happens to a group ---

    def _handle(self, group: OpenGroup, event: Event) -> None:
        """Apply an event to a group, then update the indexes by state and by worker.

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
        """Lease a group to a worker, as the next attempt."""
        return self.adopt(group_id, self.group(group_id).num_attempts, worker_id, now=now)

    def adopt(self, group_id: int, attempt: int, worker_id: str, *, now: float) -> LeaseRecord:
        """Enter an attempt that a worker holds, such as one from before a restart."""
        group = self._groups.setdefault(group_id, OpenGroup(group_id))
        self._handle(group, Leased(attempt, worker_id, now))
        return group.leases[-1]

    def restore(self, group_id: int, holders: Mapping[int, str], *, now: float) -> None:
        """Enter the attempts (number -> worker) of a group from before a restart of the learner.

        LOST_WORKER holds the newest attempt until its worker claims it or the lease expires.
        """
        self.adopt(group_id, max(holders), LOST_WORKER, now=now)
        self._groups[group_id].holders = dict(holders)

    def deliver(self, group_id: int, attempt: int, worker_id: str) -> None:
        """Note that the valid result of an attempt has arrived and is being stored."""
        self._handle(self._groups[group_id], ResultArrived(attempt, worker_id))

    def finish(self, group_id: int) -> None:
        """Close a group that has ended, with all of its leases."""
        group = self._groups.get(group_id)
        if group is not None:
            self._handle(group, GroupEnded())

    def revoke(self, record: LeaseRecord) -> None:
        """End one lease; a group with no other lease waits to be granted again."""
        group = self._groups[record.group_id]
        event = LeaseEnded if len(group.leases) > 1 else LastLeaseEnded
        self._handle(group, event(record))

    def revoke_attempt(self, group_id: int, attempt: int) -> None:
        """End an attempt, whichever worker holds it; do nothing if no worker does."""
        for record in list(self.group(group_id).leases):
            if record.attempt == attempt:
                self.revoke(record)

    def expire(self, *, now: float) -> list[LeaseRecord]:
        """End the leases that showed no progress in time; return them."""
        late = self._deadlines.take_due(now=now)
        for record in late:
            self.revoke(record)
            self._groups[record.group_id].expired.add((record.attempt, record.worker_id))
        return late

    def give_back(self, group_id: int, attempt: int, worker_id: str) -> None:
        """End an attempt that its worker gives up; its group waits to be granted again."""
        self.revoke_attempt(group_id, attempt)
        # The worker lists the lease until it receives the acknowledgement.
        self._groups[group_id].expired.add((attempt, worker_id))

    def drop_worker(self, worker_id: str) -> None:
        """End all leases of a worker that is gone, and forget it."""
        for record in self.worker_leases(worker_id):
            self.revoke(record)
        self._by_worker.pop(worker_id, None)
        self._changes.pop(worker_id, None)

    def validate(self) -> None:
        """Check that states, leases and workers agree; for tests.

        Raises:
            AssertionError: if they do not.
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
