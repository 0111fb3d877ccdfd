"""Relief decides which running groups are moved or copied to idle workers.

Relief is the last part of a round of grants. It happens only while the next batch waits for running
groups. The rules and their numbers are in `leases/grants/dispatch.py`, "Moves" and "Hedging". This
file finds the leases to which each rule applies, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from echo.leases.book import LeaseBook
from echo.leases.grants.dispatch import (
    RELEASE_BEATS,
    Helper,
    Newcomer,
    RunningGroup,
    even_out,
    hedges,
    moves,
)
from echo.leases.grants.finish_times import FinishTimes
from echo.leases.grants.occupancy import Occupancy
from echo.leases.groups import MAX_ATTEMPTS, LeaseRecord, MoveRequest
from echo.leases.run import LeaseSettings

Requests = Mapping[LeaseRecord, MoveRequest]
"""For each lease to move, the request that asks its holder to give it up."""
Copy = tuple[LeaseRecord, str]
"""A lease to move or to copy, and the worker that receives the group."""


def is_pending(request: MoveRequest | None, *, heartbeat_s: float, now: float) -> bool:
    """Return whether a lease's holder may still answer the request to give up the lease."""
    return request is not None and now <= request.at + RELEASE_BEATS * heartbeat_s


class Relief:
    """Chooses which groups one round moves and which it copies."""

    def __init__(
        self,
        occupancy: Occupancy,
        *,
        settings: LeaseSettings,
        leases: LeaseBook,
        finish_times: FinishTimes,
        now: float,
    ) -> None:
        self._occupancy = occupancy
        self._settings = settings
        self._leases = leases
        self._finish_times = finish_times
        self._now = now

    def choose_moves(self, running: Sequence[RunningGroup]) -> Requests:
        """Choose the leases to move. Return the requests to the workers that hold these leases."""
        pending = Counter(
            group.record.request.worker_id
            for group in running
            if group.record.request is not None and self._is_pending(group.record.request)
        )
        is_first = not self._finish_times.knows_a_group
        choose = self._even_out if is_first else self._move_waiting
        is_begun_too = is_first and not self._settings.prompts_are_free
        return {
            record: MoveRequest(node_id, self._now, is_begun_too)
            for record, node_id in choose(running, pending)
        }

    def _even_out(self, running: Sequence[RunningGroup], pending: Counter[str]) -> list[Copy]:
        """Choose the leases that newcomers get before the run's first group is finished."""
        occupancy = self._occupancy
        equals = self._finish_times.equals(occupancy.able)
        newcomers = [
            Newcomer(name, occupancy.num_held(worker) + pending[name], worker.capacity)
            for name, worker in occupancy.able.items()
            # A slower worker gets no leases of others, but new groups once its speed is known.
            if name in equals and occupancy.bounds[worker.installed] == occupancy.num_promised
        ]
        return even_out(self._movable(running), newcomers) if newcomers else []

    def _move_waiting(self, running: Sequence[RunningGroup], pending: Counter[str]) -> list[Copy]:
        """Choose the leases of waiting groups that idle workers would finish sooner."""
        loads = self._occupancy.loads(self._occupancy.idle())
        for load in loads:
            for _ in range(pending[load.node_id]):
                load.add()
        waiting = [
            group
            for group in running
            if not group.record.running_s
            and self._finish_times.has_made_a_group(group.record.worker_id)
            and self._may_move(group.record)
        ]
        return moves(waiting, loads, least_gain_s=self._settings.heartbeat_s)

    def _movable(self, running: Sequence[RunningGroup]) -> dict[str, list[LeaseRecord]]:
        """Return, for each worker, those of its leases that may move.

        Leases of begun groups come first. A lease that the learner has already requested back is
        left out. If one of a worker's remaining leases may not move, all leases of this worker are
        left out.
        """
        held: dict[str, list[LeaseRecord]] = {}
        for record in (group.record for group in running):
            if record.request is None:
                held.setdefault(record.worker_id, []).append(record)
        return {
            name: sorted(records, key=lambda record: (not record.running_s, record.group_id))
            for name, records in held.items()
            if all(map(self._may_move, records))
        }

    def _may_move(self, record: LeaseRecord) -> bool:
        is_known = record.is_confirmed and not record.is_delivered and record.request is None
        is_alone = len(self._leases.group(record.group_id).leases) == 1
        return is_known and is_alone and record.attempt < MAX_ATTEMPTS // 2

    def choose_copies(self, running: Sequence[RunningGroup], requested: Requests) -> list[Copy]:
        """Choose the leases to copy. Return each with the idle worker that gets the copy.

        Args:
            running: the leased groups.
            requested: the moves of this round, which take places at idle workers.
        """
        idle = self._occupancy.idle()
        if not idle:
            return []
        newest: dict[int, RunningGroup] = {}
        holders: dict[int, list[str]] = {}
        for group in running:
            record = group.record
            holders.setdefault(record.group_id, []).append(record.worker_id)
            known = newest.get(record.group_id)
            if known is None or known.record.attempt < record.attempt:
                newest[record.group_id] = group
        chosen: list[Copy] = []
        groups = []
        for group_id, group in newest.items():
            record, num_attempts = group.record, self._leases.group(group_id).num_attempts
            request = requested.get(record, record.request)
            if request is not None and self._is_pending(request):
                idle[request.worker_id] = idle.get(request.worker_id, 0) - 1
                continue
            helper = self._withheld_from(record)
            if helper is not None and idle.get(helper, 0) > 0:
                idle[helper] -= 1
                chosen.append((record, helper))
            elif not record.is_delivered and num_attempts < MAX_ATTEMPTS:
                groups.append(group)
        factor = self._settings.hedge_factor
        helpers = self._helpers(idle)
        return chosen + hedges(groups, helpers, holders=holders, factor=factor, now=self._now)

    def _helpers(self, idle: Mapping[str, int]) -> list[Helper]:
        times = self._finish_times
        # The progress of agents is not counted in tokens, so all their groups would seem late.
        is_in_tokens = not self._settings.prompts_are_free
        return [
            Helper(
                node_id,
                times.speed(node_id, now=self._now)
                if is_in_tokens and times.has_made_a_group(node_id)
                else None,
                num_free,
                times.group_s(node_id),
            )
            for node_id, num_free in idle.items()
            if num_free > 0
        ]

    def _is_pending(self, request: MoveRequest) -> bool:
        return is_pending(request, heartbeat_s=self._settings.heartbeat_s, now=self._now)

    def _withheld_from(self, record: LeaseRecord) -> str | None:
        """Return the worker for which a lease was requested, if this worker may get a copy.

        Otherwise return None. A lease that is itself a copy is not copied. Some requests do not
        apply once the holder has begun the group. If the holder has begun the group after such a
        request, the lease is not copied either.
        """
        request = record.request
        if request is None or record.copy_of is not None:
            return None
        is_free = request.is_begun_too or not record.running_s
        return request.worker_id if is_free else None
