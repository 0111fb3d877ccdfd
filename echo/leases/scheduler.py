"""Schedules leases: makes rounds of grants, and answers heartbeats.

These parts decide, and the scheduler carries out their decisions:

* `open_groups`: which groups are open, and the book of their leases;
* `admission`: how many groups may be granted;
* `just_in_time`: how many of these groups are granted now;
* `rounds`, with `occupancy`, `forecasts`, `relief` and `dispatch`: which worker gets which group;
* `reconciling`: which leases a heartbeat renews, enters or ends;
* `results`: whether a delivered group is accepted, and how a failed group ends.

Every grant is recorded before it is sent (`AppendRecord`). So after a crash the learner knows every
lease whose result a worker may still deliver.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from echo.core.errors import DataError
from echo.core.monitoring.metrics import Counters
from echo.core.records import Granted
from echo.core.rollout import PolicyVersion
from echo.leases.book import LeasedWorker
from echo.leases.grants.admission import Quota
from echo.leases.grants.finish_times import FinishTimes
from echo.leases.grants.forecasts import Forecasts
from echo.leases.grants.just_in_time import JustInTime
from echo.leases.grants.occupancy import Occupancy
from echo.leases.grants.relief import Relief
from echo.leases.grants.rounds import Decisions, Round
from echo.leases.groups import LeaseRecord
from echo.leases.open_groups import AppendRecord, OpenGroups
from echo.leases.reconciling import Reconciling
from echo.leases.results import Results
from echo.leases.run import AcceptedGroups, LeaseSettings, Prompts, RunState
from echo.leases.usefulness import Usefulness
from echo.wire.actions import Action, PeerFaults, Routes
from echo.wire.messages import Ack, Heartbeat, Lease, Reclaim

GRANT_S = 3e-4
"""Least time between two rounds of grants, in seconds for each node of the fleet.

With 1000 nodes the time is 0.3 s. Between two rounds the workers sample the groups in their queues.
"""

WaitReason = Literal["", "outdated", "no_worker", "no_weights", "no_agent", "busy"]
"""The reason why no worker can be granted a group for the next batch. It is "" if a worker can be
granted a group, or if the batch needs no further group."""


class Scheduler:
    """Grants and tracks leases.

    Admission, just-in-time granting and the capacities of workers limit how many it grants.
    """

    def __init__(
        self,
        settings: LeaseSettings,
        run: RunState,
        *,
        buffer: AcceptedGroups,
        prompts: Prompts,
        counters: Counters,
        routes: Routes,
        peer_faults: PeerFaults,
    ) -> None:
        self.buffer = buffer
        self.groups = OpenGroups(run, counters)
        self.finish_times = FinishTimes(
            max_tokens=settings.max_completion_tokens,
            group_size=settings.group_size,
            heartbeat_s=settings.heartbeat_s,
        )
        self.usefulness = Usefulness(
            max_zero_signal_groups=settings.max_zero_signal_groups,
            groups_per_step=settings.groups_per_step,
        )
        self.results = Results(
            settings,
            self.groups,
            prompts,
            finish_times=self.finish_times,
            usefulness=self.usefulness,
            counters=counters,
            routes=routes,
            peer_faults=peer_faults,
        )
        self.just_in_time = JustInTime(
            groups_per_step=settings.groups_per_step,
            max_staleness=settings.max_staleness,
            step=run.step,
        )
        self.prompt_fault: DataError | None = None
        """The error because of which no prompt can be used, so that no group is granted; None
        without such an error."""
        self._forecasts = Forecasts(
            self.groups.leases, self.finish_times, max_age_s=settings.heartbeat_s
        )
        self._reconciling = Reconciling(
            self.groups,
            prompts,
            heartbeat_s=settings.heartbeat_s,
            finish_times=self.finish_times,
            forecasts=self._forecasts,
            just_in_time=self.just_in_time,
            counters=counters,
        )
        self.settings = settings
        self._prompts = prompts
        self._counters = counters
        self._routes = routes

    @property
    def _is_just_in_time(self) -> bool:
        # Agents ask for a group when they are ready to play, so they would wait for a group that is
        # held back.
        return not (self.settings.is_eager or self.settings.prompts_are_free)

    @property
    def quota(self) -> Quota:
        """How many groups are promised now, and how many more may be granted."""
        groups = self.groups
        return Quota(
            lineages=groups.lineages,
            step=groups.step,
            groups_per_step=self.settings.groups_per_step,
            max_staleness=min(self.settings.max_staleness, self.buffer.admission_staleness),
            num_unspent=self.buffer.num_unspent(step=groups.step),
            num_running=groups.leases.num_running,
        )

    def wait_reason(
        self, workers: Sequence[LeasedWorker], newest: PolicyVersion | None
    ) -> WaitReason:
        """Return why no group of the next batch can be granted. Return "" if one can."""
        quota = self.quota
        if quota.num_running or quota.is_batch_complete:
            return ""
        if newest is not None and quota.is_closed(newest):
            return "outdated"
        if not workers:
            return "no_worker"
        bounds = quota.bounds(workers)
        fresh = [w for w in workers if bounds.get(w.installed, 0) > quota.num_promised]
        if not fresh:
            return "no_weights"
        num_leases = self.groups.leases.num_leases
        if any(
            w.is_able(bounds) and num_leases(w.node_id) + w.num_unknown < w.capacity for w in fresh
        ):
            return ""
        # Workers take leases only for the groups that agents ask them for.
        is_asked = any(w.capacity > 0 or w.num_unknown > 0 for w in fresh)
        return "no_agent" if self.settings.prompts_are_free and not is_asked else "busy"

    def usable(
        self, workers: Sequence[LeasedWorker], newest: PolicyVersion | None
    ) -> tuple[frozenset[PolicyVersion], bool]:
        """Return the versions that may sample a further group, and whether admission is full.

        The versions are among those that workers have installed. Admission is full if not even the
        version `newest` may sample a further group.
        """
        quota = self.quota
        bounds = quota.bounds(workers)
        fresh = frozenset(v for v, most in bounds.items() if v and most > quota.num_promised)
        step = self.groups.step if newest is None else newest.step
        return fresh, quota.num_promised >= quota.limit(step)

    # --- rounds of grants ------------------------------------------------------------------------

    def grant(self, workers: Sequence[LeasedWorker], *, now: float) -> list[Action]:
        """Make a round of grants. Return the actions that record the grants and send them."""
        return self._apply(self._decide(workers, now), now)

    def _decide(self, workers: Sequence[LeasedWorker], now: float) -> Decisions:
        """Make the decisions of a round. Groups and leases are not changed."""
        quota = self.quota
        occupancy = Occupancy(
            workers,
            quota,
            leases=self.groups.leases,
            finish_times=self.finish_times,
            forecasts=self._forecasts,
            now=now,
        )
        relief = Relief(
            occupancy,
            settings=self.settings,
            leases=self.groups.leases,
            finish_times=self.finish_times,
            now=now,
        )
        return Round(
            occupancy,
            quota,
            relief,
            groups=self.groups,
            prompts=self._prompts,
            finish_times=self.finish_times,
            just_in_time=self.just_in_time if self._is_just_in_time else None,
            now=now,
        ).decide()

    def _apply(self, decided: Decisions, now: float) -> list[Action]:
        self.prompt_fault = decided.fault
        for group_id in decided.released:
            del self.groups.released[group_id]
        actions: list[Action] = []
        for group_id, fault in decided.ends:
            self.groups.reach(group_id)
            if fault is None:
                actions += self.groups.end(group_id, "attempts_exhausted")
            else:
                actions += self.groups.leave_out(group_id, fault)
        granted: dict[str, list[Lease]] = {}
        for new in decided.grants:
            worker, lease = new.worker, new.lease
            self.groups.reach(lease.group_id)
            record = self.groups.leases.grant(lease.group_id, worker.node_id, now=now)
            record.min_version, record.copy_of = lease.min_version, new.copy_of
            grant = Granted(
                group=lease.group_id,
                attempt=lease.attempt,
                worker=worker.node_id,
                version=worker.installed,
                copy_of=new.copy_of,
            )
            actions.append(AppendRecord(grant))
            granted.setdefault(worker.node_id, []).append(lease)
            if new.copy_of is not None:
                self._counters.add("hedges/issued")
        for node_id, leases in granted.items():
            self.groups.leases.note_load(node_id, now=now)
            actions += self._send(node_id, leases)
        for record, request in decided.requests.items():
            record.request = request
        return actions + self._reclaim(decided.requests)

    def begin_step(self, *, waited_s: float, now: float) -> None:
        """Record that the learner has taken a batch. It waited `waited_s` seconds for the batch."""
        self.just_in_time.begin_step(waited_s=waited_s, now=now)

    def end_step(self, step: int, *, now: float) -> None:
        """Record that an optimizer step has ended. `step` is the number of steps made so far."""
        self.groups.step = step
        self.just_in_time.end_step(step, now=now)

    def stored(self, group_id: int, *, is_useful: bool, now: float) -> list[Action]:
        """Acknowledge a group, because it is now in the ledger or has ended as useless."""
        self.just_in_time.stored(is_useful=is_useful)
        return self.results.stored(group_id, is_useful=is_useful, now=now)

    # --- heartbeats ------------------------------------------------------------------------------

    def on_heartbeat(
        self, worker: LeasedWorker, message: Heartbeat, *, has_progress: bool, now: float
    ) -> list[Action]:
        """Compare a worker's list of leases with the book.

        Return the messages that the worker gets.

        Args:
            worker: the worker; its state is updated.
            message: the worker's heartbeat.
            has_progress: whether the worker has sampled anything since its previous heartbeat.
            now: the present time, seconds.
        """
        found = self._reconciling.reconcile(worker, message, has_progress=has_progress, now=now)
        actions = self._send(worker.node_id, found.lost) + self._reclaim(found.unanswered)
        for group_id, attempt in found.unwanted:
            ack = Ack(group_id=group_id, attempt=attempt, outcome="duplicate")
            actions += self._routes.to(worker.node_id, ack)
        return actions

    # --- messages --------------------------------------------------------------------------------

    def _send(self, node_id: str, leases: Sequence[Lease]) -> list[Action]:
        messages = self.groups.shipped.grants(leases)
        return [a for grant, payload in messages for a in self._routes.to(node_id, grant, *payload)]

    def _reclaim(self, records: Iterable[LeaseRecord]) -> list[Action]:
        asked: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        for record in records:
            assert record.request is not None, "it is asked for"
            asked.setdefault((record.worker_id, record.request.is_begun_too), []).append(record.key)
        return [
            action
            for (node_id, is_begun_too), keys in asked.items()
            for action in self._routes.to(
                node_id, Reclaim(leases=tuple(sorted(keys)), is_begun_too=is_begun_too)
            )
        ]
