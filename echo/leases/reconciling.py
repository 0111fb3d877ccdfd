"""Reconciles the leases of a worker: compares the list in its heartbeat with the book of leases.

* If the worker should have a lease by now but does not list it, the lease is sent again.
* The learner may have asked the worker to give up a lease in favour of another worker. If the
  worker no longer lists this lease, the lease ends, and its group is reserved for the other worker.
* If the worker lists a lease that the book lacks, for example after the learner's restart, the
  lease is added to the book. In three cases it is not added, and the worker is told to drop it: the
  group has ended, another worker continues the group, or the worker was not granted this attempt.
* A listed lease that has expired stays expired, but still occupies a place of its worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from echo.core.monitoring.metrics import Counters
from echo.leases.book import LeasedWorker
from echo.leases.grants.finish_times import FinishTimes
from echo.leases.grants.forecasts import Forecasts
from echo.leases.grants.just_in_time import JustInTime
from echo.leases.grants.relief import is_pending
from echo.leases.groups import LeaseRecord
from echo.leases.open_groups import OpenGroups
from echo.leases.run import Prompts, find_prompt_fault
from echo.wire.messages import Heartbeat, Lease, LeaseState


@dataclass(slots=True)
class Differences:
    """How the book of leases and a worker's list differ. The worker is told the differences."""

    lost: list[Lease] = field(default_factory=list)
    """Leases that the worker does not have. They are sent to it again."""
    unanswered: list[LeaseRecord] = field(default_factory=list)
    """Leases that the worker was asked to give up but still has. It is asked again."""
    unwanted: list[tuple[int, int]] = field(default_factory=list)
    """Leases that the worker must drop, as (group, attempt)."""


class Reconciling:
    """Updates the book of leases according to the lists in the workers' heartbeats."""

    def __init__(
        self,
        groups: OpenGroups,
        prompts: Prompts,
        *,
        heartbeat_s: float,
        finish_times: FinishTimes,
        forecasts: Forecasts,
        just_in_time: JustInTime,
        counters: Counters,
    ) -> None:
        self._groups = groups
        self._prompts = prompts
        self._heartbeat_s = heartbeat_s
        self._finish_times = finish_times
        self._forecasts = forecasts
        self._just_in_time = just_in_time
        self._counters = counters

    def reconcile(
        self, worker: LeasedWorker, message: Heartbeat, *, has_progress: bool, now: float
    ) -> Differences:
        """Update the book according to a worker's heartbeat. Return the differences for the worker.

        Args:
            worker: the worker; its `num_unknown` and `is_stuck` are updated.
            message: the worker's heartbeat.
            has_progress: whether the worker has sampled anything since its previous heartbeat.
            now: the present time, seconds.
        """
        leases = self._groups.leases
        self._groups.shipped.count(worker, message)
        listed = {(state.group_id, state.attempt): state for state in message.leases}
        records = leases.worker_leases(worker.node_id)
        # Progress of a running group also renews the leases of groups that wait behind it.
        has_progress |= any(
            record.key in listed and listed[record.key].num_tokens > record.num_tokens
            for record in records
        )
        found = Differences()
        for record in records:
            state = listed.pop(record.key, None)
            if state is not None:
                self._on_listed(record, state, has_progress, now)
            elif (lease := self._on_missing(record, now)) is not None:
                found.lost.append(lease)
        self._finish_times.seen(worker.node_id, records, now=now)
        if worker.installed is not None:
            self._finish_times.installed(worker.node_id, worker.installed, now=now)
            self._just_in_time.installed(worker.node_id, worker.installed.step, now=now)
        self._forecasts.discard(worker.node_id)
        found.unwanted = self._enter(worker, listed, now)
        worker.is_stuck = worker.num_unknown > 0 and not has_progress
        found.unanswered = [
            record
            for record in leases.worker_leases(worker.node_id)
            if record.request is not None
            and record.request.at <= now - self._heartbeat_s
            and is_pending(record.request, heartbeat_s=self._heartbeat_s, now=now)
        ]
        return found

    def _on_listed(
        self, record: LeaseRecord, state: LeaseState, has_progress: bool, now: float
    ) -> None:
        """Handle a lease that its worker lists. If the worker makes progress, renew the lease.

        While the lease's own group waits, the worker's progress on other groups counts, too.
        """
        record.is_confirmed = True
        self._finish_times.on_lease_state(record, state, now=now)
        is_idle = state.num_tokens <= 0 or state.is_waiting
        if state.num_tokens > record.num_tokens or (has_progress and is_idle):
            record.renew(num_tokens=max(state.num_tokens, record.num_tokens), now=now)

    def _on_missing(self, record: LeaseRecord, now: float) -> Lease | None:
        """Handle a lease that its worker does not list.

        Return the lease if it must be sent again, or None.
        """
        if record.is_confirmed and record.request is not None:
            self._groups.leases.revoke(record)
            self._groups.released[record.group_id] = record.request.worker_id
            self._counters.add("leases_moved")
            return None
        if not record.is_confirmed and now - record.sent_at <= 2 * self._heartbeat_s:
            return None
        # The Grant was lost, or the worker was restarted under the same incarnation.
        record.sent_at, record.is_confirmed = now, False
        is_usable = find_prompt_fault(self._prompts, record.group_id) is None
        return self._lease_of(record) if is_usable else None

    def _lease_of(self, record: LeaseRecord) -> Lease:
        """Return a lease as it was sent.

        If the lease copies another lease, it has the seed of that other lease.
        """
        lease = self._prompts.lease(record.group_id, record.attempt)
        seed = self._prompts.lease(record.group_id, record.seed_attempt).seed
        return msgspec.structs.replace(lease, seed=seed, min_version=record.min_version)

    def _enter(
        self, worker: LeasedWorker, listed: Mapping[tuple[int, int], LeaseState], now: float
    ) -> list[tuple[int, int]]:
        """Add to the book the leases that only the worker lists. Unwanted leases are not added.

        Return the (group id, attempt) of each unwanted lease.
        """
        unwanted: list[tuple[int, int]] = []
        worker.num_unknown = 0
        for (group_id, attempt), state in listed.items():
            group = self._groups.leases.group(group_id)
            is_given_up = state.is_waiting and group.newest_attempt > attempt
            is_theirs = group.was_granted(attempt, worker.node_id)
            if not self._groups.is_open(group_id) or is_given_up or not is_theirs:
                unwanted.append((group_id, attempt))
            elif (attempt, worker.node_id) not in group.expired:
                record = self._groups.leases.adopt(group_id, attempt, worker.node_id, now=now)
                record.is_confirmed = True
                continue
            # The learner accepts the result of an expired lease, and grants its group again.
            worker.num_unknown += state.num_tokens >= 0
        return unwanted
