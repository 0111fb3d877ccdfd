"""Which worker works on which prompt group, and how many more groups may be handed out.

A lease is (group, attempt) given to one worker for a time; progress renews it. An expired lease
returns its group to the front of the queue and the next attempt is granted to whoever asks; the
first valid result of a group wins, whatever its attempt, so a late one is a benign duplicate. An
expired lease is remembered until its group ends, so that a worker which still lists it does not
get it back.

Admission (DESIGN.md 5): a lease is granted to a worker with installed step w while

    (S + w + 1) * B - (consumed + buffered + running) > 0        in groups

consumed = B groups for each step done; buffered includes those of a step that is being made. So the
rule says: what is already promised fits into the batches that may still train on samples of version
w. A group that two workers run counts once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


def num_admissible(
    *,
    max_staleness: int,
    installed_step: int,
    step: int,
    groups_per_step: int,
    num_buffered: int,
    num_running: int,
) -> int:
    """Return how many more groups may be granted to a worker at `installed_step`; at least 0.

    Args:
        max_staleness: S, inclusive.
        installed_step: w, step of the weights that the worker samples from.
        step: t, optimizer steps done by the learner.
        groups_per_step: B.
        num_buffered: groups accepted and neither discarded nor part of a step done.
        num_running: distinct groups leased and not yet accepted.
    Source: AReaL's capacity rule with the worker's version in place of the learner's.
    """
    promised = step * groups_per_step + num_buffered + num_running
    return max(0, (max_staleness + installed_step + 1) * groups_per_step - promised)


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


class LeaseBook:
    """The leases that are out, and the groups that wait to be granted again."""

    def __init__(self, *, timeout_s: float) -> None:
        """Start with nothing granted.

        Args:
            timeout_s: seconds without progress after which a lease expires.
        """
        self.timeout_s = timeout_s
        self._by_group: dict[int, list[LeaseRecord]] = {}
        self._by_worker: dict[str, list[LeaseRecord]] = {}
        self._attempts: dict[int, int] = {}
        self._returned: list[int] = []
        self._expired: dict[int, set[tuple[int, str]]] = {}

    @property
    def num_running(self) -> int:
        """Distinct groups that are leased."""
        return len(self._by_group)

    @property
    def num_returned(self) -> int:
        """Groups that wait to be granted again."""
        return len(self._returned)

    @property
    def deadline(self) -> float | None:
        """When the next lease expires."""
        if not self._by_group:
            return None
        return self.timeout_s + min(
            record.renewed_at for records in self._by_group.values() for record in records
        )

    def num_leases(self, worker_id: str) -> int:
        """Return how many leases a worker holds."""
        return len(self._by_worker.get(worker_id, ()))

    def worker_leases(self, worker_id: str) -> list[LeaseRecord]:
        """Return the leases that a worker holds, oldest group first."""
        return sorted(self._by_worker.get(worker_id, ()), key=lambda record: record.group_id)

    def workers_of(self, group_id: int) -> list[str]:
        """Return who holds a lease of this group."""
        return [record.worker_id for record in self._by_group.get(group_id, ())]

    def next_returned(self) -> int | None:
        """Take the oldest group that waits to be granted again, if any."""
        return heapq.heappop(self._returned) if self._returned else None

    def return_group(self, group_id: int) -> None:
        """Put a group without any lease into the queue of groups to be granted again."""
        if group_id not in self._by_group and group_id not in self._returned:
            heapq.heappush(self._returned, group_id)

    def grant(self, group_id: int, worker_id: str, *, now: float) -> LeaseRecord:
        """Lease a group to a worker, as the next attempt."""
        attempt = self._attempts.get(group_id, 0)
        return self.adopt(group_id, attempt, worker_id, now=now)

    def adopt(self, group_id: int, attempt: int, worker_id: str, *, now: float) -> LeaseRecord:
        """Enter a lease that is already out, as after a restart of the learner."""
        record = LeaseRecord(group_id, attempt, worker_id, now, now, sent_at=now)
        self._by_group.setdefault(group_id, []).append(record)
        self._by_worker.setdefault(worker_id, []).append(record)
        self._attempts[group_id] = max(self._attempts.get(group_id, 0), attempt + 1)
        if group_id in self._returned:
            self._returned.remove(group_id)
            heapq.heapify(self._returned)
        return record

    def num_attempts(self, group_id: int) -> int:
        """Return how often a group has been granted."""
        return self._attempts.get(group_id, 0)

    def renew(self, record: LeaseRecord, *, num_tokens: int, now: float) -> None:
        """Prolong a lease whose worker shows progress on it."""
        record.num_tokens = num_tokens
        record.renewed_at = now

    def finish(self, group_id: int) -> list[LeaseRecord]:
        """End all leases of a group that has come to its end; return them."""
        records = self._by_group.pop(group_id, [])
        for record in records:
            self._by_worker[record.worker_id].remove(record)
        if group_id in self._returned:
            self._returned.remove(group_id)
            heapq.heapify(self._returned)
        self._attempts.pop(group_id, None)
        self._expired.pop(group_id, None)
        return records

    def revoke(self, record: LeaseRecord) -> None:
        """End one lease; a group with no other lease waits to be granted again."""
        records = self._by_group[record.group_id]
        records.remove(record)
        self._by_worker[record.worker_id].remove(record)
        if not records:
            del self._by_group[record.group_id]
            self.return_group(record.group_id)

    def revoke_attempt(self, group_id: int, attempt: int) -> None:
        """End an attempt, whoever holds it: after the learner's restart that may be nobody yet."""
        for record in list(self._by_group.get(group_id, ())):
            if record.attempt == attempt:
                self.revoke(record)

    def expire(self, *, now: float) -> list[LeaseRecord]:
        """End the leases that showed no progress in time; return them."""
        late = [
            record
            for records in self._by_group.values()
            for record in records
            if now >= record.renewed_at + self.timeout_s
        ]
        for record in late:
            self.revoke(record)
            expired = self._expired.setdefault(record.group_id, set())
            expired.add((record.attempt, record.worker_id))
        return late

    def has_expired(self, group_id: int, attempt: int, worker_id: str) -> bool:
        """Return whether this lease of a group that has not ended is over."""
        return (attempt, worker_id) in self._expired.get(group_id, ())

    def drop_worker(self, worker_id: str) -> list[LeaseRecord]:
        """End all leases of a worker that is gone; return them."""
        records = self.worker_leases(worker_id)
        for record in records:
            self.revoke(record)
        return records
