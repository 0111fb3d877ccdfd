"""Who is given which group next, and which groups have come to their end.

Every grant is journalled before it is sent (`RecordGrant`), so that after a crash no honest result
is unknown. Workers list their leases in each heartbeat; `reconcile` compares that list with the
book: what the worker lacks is sent again, what the book lacks is entered, what is settled is told.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from echo.metrics import Counters
from echo.protocol.actions import Action, RecordEnd, RecordGrant
from echo.protocol.leases import LeaseBook, num_admissible
from echo.protocol.membership import Member
from echo.protocol.messages import Heartbeat, Lease
from echo.rollout import Lineage, is_surviving

MAX_ATTEMPTS = 20
"""Grants of one group after which it is given up: something about it kills workers."""


class AcceptedGroups(Protocol):
    """What the session needs to know of the buffer."""

    def __len__(self) -> int:
        """Return how many groups wait to be trained."""

    def num_unspent(self, *, step: int) -> int:
        """Return how many accepted groups are not yet part of a step that was made."""


class SettledGroups:
    """Ids of the groups that were accepted or ended; nearly all ids below some point are."""

    def __init__(self, group_ids: Iterable[int]) -> None:
        """Start with these ids."""
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


class Granting:
    """Leases for workers, as far as admission and their capacities allow."""

    def __init__(
        self,
        *,
        leases: LeaseBook,
        buffer: AcceptedGroups,
        make_lease: Callable[[int, int], Lease],
        lineages: Sequence[Lineage],
        max_staleness: int,
        groups_per_step: int,
        step: int,
        next_group_id: int,
        settled: Iterable[int],
        counters: Counters,
    ) -> None:
        """Start; for the arguments see `LearnerSession`."""
        self.leases = leases
        self.buffer = buffer
        self.make_lease = make_lease
        self.lineages = lineages
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.step = step
        self.next_group_id = next_group_id
        self.settled = SettledGroups(settled)
        self.counters = counters

    def is_open(self, group_id: int) -> bool:
        """Return whether a group has been granted and its result is still wanted."""
        return 0 <= group_id < self.next_group_id and group_id not in self.settled

    def settle(self, group_id: int) -> None:
        """End all leases of a group: its result is here, or is not wanted any more."""
        self.settled.add(group_id)
        self.leases.finish(group_id)

    def end(self, group_id: int, reason: str) -> list[Action]:
        """End a group that was never accepted."""
        self.settle(group_id)
        self.counters.add(f"discarded/{reason}")
        return [RecordEnd(group_id, reason)]

    def grant(
        self, workers: Sequence[Member], *, now: float
    ) -> tuple[list[Action], dict[str, list[Lease]]]:
        """Hand out groups; return the records to journal, and the new leases of each worker."""
        records: list[Action] = []
        granted: dict[str, list[Lease]] = {}
        able = [(self._load(m), m.node_id, m) for m in workers if self._may_grant(m)]
        heapq.heapify(able)
        while able:
            # One group at a time to the worker with the smallest share of its capacity in use.
            _, node_id, member = heapq.heappop(able)
            if not self._may_grant(member):
                continue
            group_id = self._next_group(records)
            record = self.leases.grant(group_id, node_id, now=now)
            lease = self.make_lease(group_id, record.attempt)
            records.append(RecordGrant(lease, node_id, member.installed))
            granted.setdefault(node_id, []).append(lease)
            heapq.heappush(able, (self._load(member), node_id, member))
        return records, granted

    def _num_held(self, member: Member) -> int:
        return self.leases.num_leases(member.node_id) + member.num_strays

    def _load(self, member: Member) -> float:
        return self._num_held(member) / max(1, member.capacity)

    def _may_grant(self, member: Member) -> bool:
        if member.installed is None or self._num_held(member) >= member.capacity:
            return False
        if member.is_stuck or not is_surviving(member.installed, self.lineages):
            return False
        return (
            num_admissible(
                max_staleness=self.max_staleness,
                installed_step=member.installed.step,
                step=self.step,
                groups_per_step=self.groups_per_step,
                num_buffered=self.buffer.num_unspent(step=self.step),
                num_running=self.leases.num_running,
            )
            > 0
        )

    def _next_group(self, records: list[Action]) -> int:
        """Return the group to grant next: one that came back, otherwise a new one."""
        while (group_id := self.leases.next_returned()) is not None:
            if group_id in self.settled:
                continue
            if self.leases.num_attempts(group_id) < MAX_ATTEMPTS:
                return group_id
            records += self.end(group_id, "attempts_exhausted")
        self.next_group_id += 1
        return self.next_group_id - 1

    def reconcile(
        self,
        member: Member,
        message: Heartbeat,
        *,
        has_progress: bool,
        resend_after_s: float,
        now: float,
    ) -> tuple[list[Lease], list[tuple[int, int]]]:
        """Bring the book and the worker's own list together.

        Args:
            member: the worker.
            message: its heartbeat.
            has_progress: whether it has sampled anything since the last one.
            resend_after_s: how long a lease may be missing from its list before it is sent again.
            now: the present instant.

        Returns:
            The leases to send again, and (group, attempt) of those that are not wanted any more.
        """
        listed = {(state.group_id, state.attempt): state for state in message.leases}
        lost: list[Lease] = []
        records = self.leases.worker_leases(member.node_id)
        # What waits behind a running group shares its progress.
        has_progress |= any(
            (record.group_id, record.attempt) in listed
            and listed[record.group_id, record.attempt].num_tokens > record.num_tokens
            for record in records
        )
        for record in records:
            state = listed.pop((record.group_id, record.attempt), None)
            if state is not None:
                record.is_confirmed = True
                if state.num_tokens > record.num_tokens or (has_progress and state.num_tokens <= 0):
                    self.leases.renew(record, num_tokens=max(0, state.num_tokens), now=now)
            elif record.is_confirmed or now - record.sent_at > resend_after_s:
                # The Grant was lost, or the worker was restarted under the same incarnation.
                record.sent_at, record.is_confirmed = now, False
                lost.append(self.make_lease(record.group_id, record.attempt))
        unwanted: list[tuple[int, int]] = []
        member.num_strays = 0
        for (group_id, attempt), state in listed.items():
            if not self.is_open(group_id):
                unwanted.append((group_id, attempt))
            elif not self.leases.has_expired(group_id, attempt, member.node_id):
                record = self.leases.adopt(group_id, attempt, member.node_id, now=now)
                record.is_confirmed = True
                continue
            # An expired lease's result is welcome, but it does not bind the group any more.
            member.num_strays += state.num_tokens >= 0
        member.is_stuck = member.num_strays > 0 and not has_progress
        return lost, unwanted
