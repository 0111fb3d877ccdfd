"""A round of grants decides which groups are granted to which workers, and which groups end.

`leases/grants/admission.py` decides how many groups may be granted. `leases/grants/dispatch.py`
decides which worker gets each group. A round grants, in this order,

1. each group that its holder gave up for another worker, to that worker;
2. waiting groups, oldest first, and then new groups, each to the worker that should finish it
   first;
3. while the next batch waits for running groups: moves and copies to idle workers
   (`leases/grants/relief.py`).

`Round.decide` changes no group and no lease, so a round that fails has no effect. The method
returns `Decisions`, which the scheduler carries out afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from echo.core.errors import DataError
from echo.leases.book import LeasedWorker
from echo.leases.grants.admission import Quota
from echo.leases.grants.dispatch import Load, by_finish
from echo.leases.grants.finish_times import FinishTimes
from echo.leases.grants.just_in_time import JustInTime
from echo.leases.grants.occupancy import Occupancy
from echo.leases.grants.relief import Relief
from echo.leases.groups import MAX_ATTEMPTS, LeaseRecord, MoveRequest
from echo.leases.open_groups import OpenGroups
from echo.leases.run import PromptPendingError, Prompts, find_prompt_fault
from echo.wire.messages import Lease

MAX_UNUSABLE = 1000
"""If this many prompts in a row cannot be turned into tokens, the run ends."""


@dataclass(frozen=True, slots=True)
class NewLease:
    """A lease that a round grants to a worker."""

    lease: Lease
    worker: LeasedWorker
    copy_of: int | None = None
    """The attempt whose seed the lease has, if the lease is a copy; None if it is not a copy."""


@dataclass(slots=True)
class Decisions:
    """What a round has decided."""

    grants: list[NewLease] = field(default_factory=list)
    ends: list[tuple[int, DataError | None]] = field(default_factory=list)
    """For each group that ends: (group id, fault of its prompt). The fault is None if the group was
    granted too often."""
    requests: Mapping[LeaseRecord, MoveRequest] = field(default_factory=dict)
    """For each lease to move, the request that asks its holder to give it up."""
    released: list[int] = field(default_factory=list)
    """Ids of those groups in `OpenGroups.released` that the round has considered, whether it
    granted them or not."""
    fault: DataError | None = None
    """The error that ends the run because no prompt can be used; None if there is no such error."""


class Round:
    """One round of grants while it is being decided."""

    def __init__(
        self,
        occupancy: Occupancy,
        quota: Quota,
        relief: Relief,
        *,
        groups: OpenGroups,
        prompts: Prompts,
        finish_times: FinishTimes,
        just_in_time: JustInTime | None,
        now: float,
    ) -> None:
        self._occupancy = occupancy
        self._quota = quota
        self._relief = relief
        self._groups = groups
        self._prompts = prompts
        self._finish_times = finish_times
        self._just_in_time = just_in_time
        self._now = now
        self._decisions = Decisions()

    def decide(self) -> Decisions:
        """Make the decisions of the round. Groups and leases are not changed."""
        able, is_waiting = self._occupancy.able, self._quota.is_batch_waiting
        if is_waiting or any(map(self._occupancy.may_take, able.values())):
            self._finish_times.refresh(list(able))
            self._grant_released()
            self._grant_groups()
        if is_waiting:
            self._relieve()
        return self._decisions

    def _grant_released(self) -> None:
        """Grant each group that its holder gave up for a worker, if this worker has space."""
        for group_id, node_id in sorted(self._groups.released.items()):
            self._decisions.released.append(group_id)
            worker = self._occupancy.able.get(node_id)
            has_leases = bool(self._groups.leases.group(group_id).leases)
            if worker is None or has_leases or not self._groups.is_open(group_id):
                continue
            if find_prompt_fault(self._prompts, group_id) is not None:
                continue
            if self._occupancy.may_take(worker):
                self._grant(group_id, worker)

    def _grant_groups(self) -> None:
        candidates = self._candidates()
        loads = self._occupancy.loads(self._occupancy.able)
        num_due = None if self._just_in_time is None else self._num_due(self._just_in_time, loads)
        order = by_finish(loads, num_promised=self._occupancy.num_promised)
        for node_id in itertools.islice(order, num_due):
            group_id = self._next_group(candidates)
            if group_id is None:
                break
            self._grant(group_id, self._occupancy.able[node_id])

    def _num_due(self, just_in_time: JustInTime, loads: Sequence[Load]) -> int | None:
        versions = [self._occupancy.able[load.node_id].installed for load in loads]
        return just_in_time.num_due(
            loads,
            [version.step for version in versions if version is not None],
            running=[group.done_at for group in self._occupancy.running()],
            num_accepted=self._quota.num_unspent,
            num_promised=self._occupancy.num_promised,
            now=self._now,
        )

    def _grant(self, group_id: int, worker: LeasedWorker) -> None:
        lease = msgspec.structs.replace(
            self._next_lease(group_id),
            min_version=self._quota.oldest_version(self._occupancy.num_promised),
        )
        self._decisions.grants.append(NewLease(lease, worker))
        self._occupancy.give(worker.node_id)

    def _next_lease(self, group_id: int) -> Lease:
        return self._prompts.lease(group_id, self._groups.leases.group(group_id).num_attempts)

    def _candidates(self) -> Iterator[int]:
        """Yield the ids of waiting groups, oldest first, and after them the ids of new groups.

        Waiting groups that were granted too often are ended.
        """
        granted = {new.lease.group_id for new in self._decisions.grants}
        for group_id in self._groups.leases.waiting:
            if self._groups.leases.group(group_id).num_attempts >= MAX_ATTEMPTS:
                self._decisions.ends.append((group_id, None))
            elif group_id not in granted:
                yield group_id
        yield from itertools.count(self._groups.next_group_id)

    def _next_group(self, candidates: Iterator[int]) -> int | None:
        """Return the id of the next group to grant. End the groups whose prompts cannot be used.

        Return None if the group's prompt is still being made, or if MAX_UNUSABLE prompts in a row
        cannot be used.
        """
        fault: DataError | PromptPendingError | None = None
        for group_id in itertools.islice(candidates, MAX_UNUSABLE):
            fault = find_prompt_fault(self._prompts, group_id)
            if fault is None:
                return group_id
            if isinstance(fault, PromptPendingError):
                return None
            self._decisions.ends.append((group_id, fault))
        text = f"{MAX_UNUSABLE} prompts in a row cannot be used, the last because: {fault}"
        self._decisions.fault = DataError(text)
        return None

    def _relieve(self) -> None:
        running = self._occupancy.running()
        requests = self._decisions.requests = self._relief.choose_moves(running)
        if self._just_in_time is not None and self._just_in_time.is_holding:
            return  # a new group serves the batch as well as a copy, and nothing is thrown away
        for original, node_id in self._relief.choose_copies(running, requests):
            if find_prompt_fault(self._prompts, original.group_id) is None:
                copy, worker = self._copy_of(original), self._occupancy.able[node_id]
                self._decisions.grants.append(NewLease(copy, worker, copy_of=original.seed_attempt))

    def _copy_of(self, original: LeaseRecord) -> Lease:
        """Return a lease that copies the lease `original`.

        The copy is the group's next attempt, and has the seed of `original`.
        """
        seed = self._prompts.lease(original.group_id, original.seed_attempt).seed
        return msgspec.structs.replace(
            self._next_lease(original.group_id), seed=seed, min_version=original.min_version
        )
