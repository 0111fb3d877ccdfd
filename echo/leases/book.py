"""Book of leases, and the admission rule that bounds how many are granted.

A lease is (group, attempt) given to one worker for a time; progress renews it. The group of an
expired lease waits to be granted again, before new groups (`leases/groups.py`: a table of these
states). The first valid result of a group wins, whatever its attempt, so a late one is a benign
duplicate. The book remembers an expired lease until its group ends, so that a worker which still
lists it does not get it back. It remembers each attempt's worker as long, and the ledger does for a
restart: from any other worker the learner takes neither a result nor an end of the group.

Admission (DESIGN.md 5): a lease is granted to a worker with installed step w while

    (S + w + 1) * B - (consumed + buffered + running) > 0        in groups

consumed = B groups for each step done; buffered includes those of a step that is being made. So the
rule says: what is already promised fits into the batches that may still train on samples of version
w. A group that two workers run counts once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from echo.core.errors import LocalProtocolError
from echo.core.rollout import Lineage, PolicyVersion, is_surviving
from echo.core.tables import IMPOSSIBLE
from echo.core.timers import Deadlines
from echo.leases.groups import (
    TABLE,
    Event,
    GroupEnded,
    LastLeaseEnded,
    Leased,
    LeaseEnded,
    LeaseRecord,
    OpenGroup,
    OpenState,
    ResultArrived,
)

LOST_WORKER = "(before the restart)"
"""Stands for the holder of a lease from before a restart that no worker has claimed."""
MAX_WORKERS = 10_000
"""The number of workers that are remembered, the newest; those that are away keep theirs."""


@dataclass(slots=True)
class LeasedWorker:
    """A worker as far as leases go; the role keeps it up to date with each heartbeat."""

    node_id: str
    installed: PolicyVersion | None = None
    capacity: int = 0
    """Leases that it takes; 0 for a worker that takes none now."""
    num_places: int = 0
    """Groups that it samples at a time; 0 if it has not said."""
    num_unknown: int = 0
    """Leases that it still holds although they have expired or are unwanted."""
    is_stuck: bool = False
    """Whether it holds such leases and nothing shows that it works."""
    is_set_aside: bool = False
    """Whether it is given no groups because nothing can be learned from its own
    (`leases/dispatch.py`)."""
    num_waiting: int = 0
    """Groups that wait there to be continued."""

    def is_able(self, usable: Container[PolicyVersion | None]) -> bool:
        """Return whether it can be given groups, and samples from a version of use for them."""
        is_welcome = not self.is_stuck and not self.is_set_aside
        return is_welcome and self.capacity > 0 and self.installed in usable


def most_promised(*, max_staleness: int, installed_step: int, groups_per_step: int) -> int:
    """Return how many groups the batches hold that may train on samples of a version.

    A worker that holds it may be granted a group while fewer are consumed, buffered or running.

    Args:
        max_staleness: S, inclusive.
        installed_step: w, step of the weights that the worker samples from.
        groups_per_step: B.
    Source: AReaL's capacity rule with the worker's version in place of the learner's.
    """
    return (max_staleness + installed_step + 1) * groups_per_step


def oldest_step(*, max_staleness: int, groups_per_step: int, num_promised: int) -> int:
    """Return the step of the oldest version that the next group may be sampled under.

    It is the lowest w for which `most_promised` is above `num_promised`, the groups consumed,
    buffered or running.
    """
    return max(0, num_promised // groups_per_step - max_staleness)


def oldest_version(
    lineages: Sequence[Lineage], *, max_staleness: int, groups_per_step: int, num_promised: int
) -> PolicyVersion | None:
    """Return the oldest version of that step, for any lineage that has it will do."""
    step = oldest_step(
        max_staleness=max_staleness, groups_per_step=groups_per_step, num_promised=num_promised
    )
    versions = (PolicyVersion(lineage.lineage, step) for lineage in lineages)
    return min((v for v in versions if is_surviving(v, lineages)), default=None)


class LeaseBook:
    """The leases that are out, and the open groups that they are of."""

    def __init__(self, *, timeout_s: float) -> None:
        """Start with nothing granted; leases expire after `timeout_s` without progress."""
        self.timeout_s = timeout_s
        self._groups: dict[int, OpenGroup] = {}
        """All but the closed ones."""
        self._by_state: dict[OpenState, set[int]] = {state: set() for state in OpenState}
        """Ids of the same groups, by state."""
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
        """The groups that are open."""
        return list(self._groups)

    @property
    def worker_ids(self) -> set[str]:
        """The workers that hold a lease."""
        return {name for name, records in self._by_worker.items() if records}

    @property
    def oldest_open(self) -> int | None:
        """The first group that is open; None if there is none."""
        return min(self._groups, default=None)

    @property
    def deadline(self) -> float | None:
        """When the next lease expires."""
        return self._deadlines.first

    def deadline_of(self, record: LeaseRecord) -> float | None:
        """Return when a lease expires; None if it has ended."""
        is_watched = not record.is_over and not record.is_delivered
        return record.renewed_at + self.timeout_s if is_watched else None

    # --- what is known of a group ---

    def group(self, group_id: int) -> OpenGroup:
        """Return what is known of a group; of one that is not open, nothing."""
        return self._groups.get(group_id) or OpenGroup(group_id)

    def is_storing(self, group_id: int) -> bool:
        """Return whether the result of a group is being stored."""
        return group_id in self._by_state[OpenState.STORING]

    def leases_of(self, group_id: int) -> list[LeaseRecord]:
        """Return the leases of a group that are out."""
        return list(self.group(group_id).leases)

    def workers_of(self, group_id: int) -> list[str]:
        """Return the workers that have a lease of this group."""
        return self.group(group_id).workers

    def newest_attempt(self, group_id: int) -> int:
        """Return the newest attempt of a group that is out; -1 if none is."""
        return max((record.attempt for record in self.group(group_id).leases), default=-1)

    def num_attempts(self, group_id: int) -> int:
        """Return how often a group has been granted: the number of its next attempt."""
        return self.group(group_id).num_attempts

    def was_granted(self, group_id: int, attempt: int, worker_id: str) -> bool:
        """Return whether an open group was granted to this worker, as this attempt.

        The lease may have expired since, or its worker been gone: its result is welcome all the
        same.
        """
        return self.group(group_id).holders.get(attempt) == worker_id

    def has_expired(self, group_id: int, attempt: int, worker_id: str) -> bool:
        """Return whether this lease of an open group has ended."""
        return (attempt, worker_id) in self.group(group_id).expired

    # --- what is known of a worker ---

    def num_changes(self, worker_id: str) -> int:
        """Return how often a worker was given a lease, or one of its leases ended."""
        return self._changes.get(worker_id, 0)

    def num_leases(self, worker_id: str) -> int:
        """Return how many leases a worker holds."""
        return len(self._by_worker.get(worker_id, ()))

    def worker_leases(self, worker_id: str) -> list[LeaseRecord]:
        """Return the leases that a worker holds, oldest group first."""
        return sorted(self._by_worker.get(worker_id, ()), key=lambda record: record.group_id)

    def note_load(self, worker_id: str, *, now: float) -> None:
        """Note what a worker holds, for the leases that it was granted at this instant."""
        records = self._by_worker[worker_id]
        for record in records:
            if record.granted_at == now:
                record.num_beside = len(records)

    def load(self, worker_id: str, group_id: int, attempt: int) -> float:
        """Return how many leases a worker held while it made a group: the mean of start and end."""
        now = max(1, self.num_leases(worker_id))
        record = self.group(group_id).find(attempt, worker_id)
        return now if record is None else (record.num_beside + now) / 2

    # --- events ---

    def _handle(self, group: OpenGroup, event: Event) -> None:
        """Do what the table says of an event: the one place where the state of a group changes.

        Raises:
            LocalProtocolError: if it cannot happen in the state of the group.
        """
        step = TABLE[group.state][event]
        if step is IMPOSSIBLE:
            raise LocalProtocolError(
                f"{event.__name__} of group {group.group_id}, which is {group.state}"
            )
        if step.then is not None:
            self._by_state[group.state].discard(group.group_id)
            group.state = step.then
            if step.then is OpenState.CLOSED:
                del self._groups[group.group_id]
            else:
                self._by_state[step.then].add(group.group_id)

    def grant(self, group_id: int, worker_id: str, *, now: float) -> LeaseRecord:
        """Lease a group to a worker, as the next attempt."""
        return self.adopt(group_id, self.num_attempts(group_id), worker_id, now=now)

    def adopt(self, group_id: int, attempt: int, worker_id: str, *, now: float) -> LeaseRecord:
        """Enter a lease that is already out, as after a restart of the learner."""
        group = self._groups.setdefault(group_id, OpenGroup(group_id))
        self._handle(group, Leased)
        record = LeaseRecord(group_id, attempt, worker_id, now, now, sent_at=now)
        group.leases.append(record)
        group.num_attempts = max(group.num_attempts, attempt + 1)
        group.holders[attempt] = worker_id
        self._by_worker.setdefault(worker_id, []).append(record)
        self._deadlines.add(record)
        self._changed(worker_id)
        return record

    def restore(self, group_id: int, holders: Mapping[int, str], *, now: float) -> None:
        """Enter the attempts of a group, by number, from before a restart of the learner.

        The newest is out to LOST_WORKER until its holder claims it or it expires.
        """
        self.adopt(group_id, max(holders), LOST_WORKER, now=now)
        self._groups[group_id].holders = dict(holders)

    def renew(self, record: LeaseRecord, *, num_tokens: int, now: float) -> None:
        """Prolong a lease whose worker shows progress on it, be it tokens, rewards or tools."""
        record.num_tokens = num_tokens
        record.renewed_at = now

    def deliver(self, group_id: int, attempt: int, worker_id: str) -> None:
        """Note that the valid result of an attempt is here and being stored."""
        group = self._groups[group_id]
        self._handle(group, ResultArrived)
        group.result = worker_id, attempt
        record = group.find(attempt, worker_id)
        if record is not None:
            record.is_delivered = True

    def finish(self, group_id: int) -> None:
        """Close a group that has come to its end, with all of its leases."""
        group = self.group(group_id)
        for record in group.leases:
            self._end(record)
        if group_id in self._groups:
            self._handle(group, GroupEnded)

    def revoke(self, record: LeaseRecord) -> None:
        """End one lease; a group with no other lease waits to be granted again."""
        group = self._groups[record.group_id]
        group.leases.remove(record)
        self._end(record)
        self._handle(group, LeaseEnded if group.leases else LastLeaseEnded)

    def _end(self, record: LeaseRecord) -> None:
        record.is_over = True
        self._by_worker[record.worker_id].remove(record)
        self._changed(record.worker_id)

    def _changed(self, worker_id: str) -> None:
        self._changes[worker_id] = self._changes.get(worker_id, 0) + 1

    def revoke_attempt(self, group_id: int, attempt: int) -> None:
        """End an attempt, whichever worker holds it; after a restart that may be none yet."""
        for record in self.leases_of(group_id):
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
        # The worker lists it until it knows that this was received.
        self._groups[group_id].expired.add((attempt, worker_id))

    def note_fatal(self, group_id: int, attempt: int) -> int:
        """Note that an attempt ended its worker's engine; return how many of the group have."""
        fatal = self._groups[group_id].fatal
        fatal.add(attempt)
        return len(fatal)

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


# --- Finished groups, in little memory ---


class FinishedGroups:
    """Ids of the groups that were accepted or ended; nearly all ids below some point are."""

    def __init__(self, group_ids: Iterable[int]) -> None:
        self._all_below = 0
        self._others: set[int] = set()
        for group_id in group_ids:
            self.add(group_id)

    def __contains__(self, group_id: int) -> bool:
        return 0 <= group_id < self._all_below or group_id in self._others

    def add(self, group_id: int) -> None:
        """Settle a group."""
        if group_id >= self._all_below:
            self._others.add(group_id)
        while self._all_below in self._others:
            self._others.remove(self._all_below)
            self._all_below += 1
