"""Scheduler of leases: grant, reconcile, accept, expire, settle.

Every grant is recorded before it is sent (`AppendRecord`), so that after a crash no honest result
is unknown. Workers list their leases in each heartbeat; `reconcile` compares that list with the
book: what the worker lacks is sent again, what the book lacks is entered, what has ended is told.

How many groups may be granted is decided by the admission rule (`leases/book.py`); which worker
gets each of them, whether a lease moves to another worker, and whether a late group is hedged on
one, by `leases/dispatch.py`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from echo.core.errors import DataError, EchoError, RemoteProtocolError
from echo.core.metrics import Counters
from echo.core.records import Cancelled, Discarded, Granted, Refused
from echo.core.rollout import (
    MAX_LOGPROB,
    Group,
    Lineage,
    PartialRollout,
    PolicyVersion,
    find_fault,
    is_surviving,
    trim_stale,
)
from echo.core.timers import RecentMap
from echo.leases.book import (
    MAX_WORKERS,
    FinishedGroups,
    LeaseBook,
    LeasedWorker,
    most_promised,
    oldest_version,
)
from echo.leases.dispatch import (
    RELEASE_BEATS,
    FinishTimes,
    Helper,
    Load,
    Newcomer,
    RunningGroup,
    Speed,
    Usefulness,
    by_finish,
    even_out,
    hedges,
    moves,
    slowdown,
)
from echo.leases.groups import LeaseRecord
from echo.leases.mismatch import Mismatches
from echo.leases.partials import ShippedPartials, decode_members
from echo.wire.actions import Action, Complaints, Note, Routes
from echo.wire.codec import Frame, decode_group, encode_group
from echo.wire.messages import (
    BAD_LOGPROBS,
    ENGINE_ERROR,
    Ack,
    Deliver,
    Failed,
    Heartbeat,
    Lease,
    LeaseState,
    Partial,
    Reclaim,
    known_reason,
)

GRANT_S = 3e-4
"""Seconds per node between two rounds of grants: 0.3 s with 1000 nodes; each holds more groups than
it samples at a time."""
MAX_ATTEMPTS = 20
"""Grants of one group after which it is given up: something about it kills workers."""
MAX_FATAL = 3
"""Engines that may end while they sample a group, after which it is given up."""
MAX_UNUSABLE = 1000
"""Prompts in a row that cannot be turned into tokens, after which the run ends."""
MAX_CAUSE_LENGTH = 2600
"""The last characters that are kept of the cause that a worker reports: a sentence and a
traceback."""

NO_FAULT = frozenset({"stale", "abandoned_version"})
"""Why a result is refused that was right when it was sampled."""

WaitReason = Literal["", "outdated", "no_worker", "no_weights", "no_agent", "busy"]
"""Why no worker can be given a group for the next batch; "" if one can, or the batch is out."""

Bounds = Mapping[PolicyVersion | None, int]
"""Installed version -> how many groups may be promised before it is good for no more."""


@dataclass(frozen=True, slots=True)
class StoreGroup(Action):
    """Put this group on the disk, then call the role's `stored`."""

    group: Group
    header: Frame
    arrays: Frame


@dataclass(frozen=True, slots=True)
class AppendRecord(Action):
    """Record what became of a group or a lease, before the messages that follow are sent."""

    record: Granted | Cancelled | Refused | Discarded
    worker_id: str = ""
    """Of a group that ends: the worker that could not finish it; empty where none was asked to."""
    cause: str = ""
    """The cause that this worker reports, with the traceback of the task's code in further
    lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """The requirements on groups, and how many are under way."""

    max_staleness: int
    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    """Tokens of a rollout, masked ones included."""
    vocab_size: int
    heartbeat_s: float
    max_zero_signal_groups: int
    """Groups in a row from which nothing can be learned, after which the run ends."""
    prompts_are_free: bool = False
    """Whether rollouts may be of other prompts than their leases', as those of agents are."""
    trims_stale: bool = False
    """Whether a group with some tokens beyond the bound is masked there, or refused."""
    hedge_factor: float | None = None
    """How many times sooner a copy must be expected (`leases/dispatch.py`); None copies for age
    alone."""
    exact_version: bool = False
    """Whether one version alone must have sampled each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands when its learner starts."""

    leases: LeaseBook
    """Leases that are out, as far as is known after a restart."""
    lineages: tuple[Lineage, ...]
    """Histories so far, the present one last."""
    step: int = 0
    """Optimizer steps done."""
    next_group_id: int = 0
    """First id never granted."""
    finished: Iterable[int] = ()
    """Ids below it that are accepted or ended."""


@dataclass(slots=True)
class _Round:
    """The decisions of a round of grants; nothing changes before all of them are made."""

    grants: list[tuple[Lease, LeasedWorker, int | None]] = field(default_factory=list)
    """A lease, the worker that is to have it, and the attempt that it repeats elsewhere."""
    ends: list[tuple[int, DataError | None]] = field(default_factory=list)
    """A group that ends, and what is wrong with its prompt; None where it was granted too often."""
    fault: DataError | None = None
    """Why there are no more prompts."""
    released: list[int] = field(default_factory=list)
    """Groups given up for a worker, whether that worker can take them or not."""
    num_given: Counter[str] = field(default_factory=Counter)
    """Worker -> its new leases."""
    group_ids: set[int] = field(default_factory=set)
    """Of the new leases that are no copies."""

    @property
    def num_groups(self) -> int:
        """Groups that will run because of this round."""
        return len(self.group_ids)

    def grant(self, lease: Lease, worker: LeasedWorker) -> None:
        """Give a group to a worker."""
        self.grants.append((lease, worker, None))
        self.group_ids.add(lease.group_id)
        self.num_given[worker.node_id] += 1

    def copy(self, original: LeaseRecord, lease: Lease, worker: LeasedWorker) -> None:
        """Give a copy of a running group to a worker."""
        self.grants.append((lease, worker, original.attempt))
        self.num_given[worker.node_id] += 1


@dataclass(frozen=True, slots=True)
class _Forecast:
    """When a worker will be done with what it has."""

    key: tuple[int, int, int]
    made_at: float
    free_at: list[float]
    running: list[RunningGroup]


class AcceptedGroups(Protocol):
    """The groups that are accepted and not yet trained on, as the scheduler sees them."""

    num_trimmed_tokens: int
    """Tokens masked there because they had grown too old."""

    admission_staleness: int
    """The bound that new leases are granted for; at most the hard one."""

    def __len__(self) -> int:
        """Return how many groups wait to be trained."""

    def num_unspent(self, *, step: int) -> int:
        """Return how many accepted groups are not yet part of a step that was made."""


class PromptPendingError(EchoError):
    """A prompt is being made; its maker has `grant` called afterwards."""


class Prompts(Protocol):
    """The prompts of a run, as leases."""

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease of a group; the same id always has the same prompt.

        Raises:
            DataError: if there is no prompt of this group.
            PromptPendingError: if there is none yet; there is, once it has been there.
        """


class Scheduler:
    """Leases for workers, as far as admission and their capacities allow."""

    def __init__(
        self,
        settings: LeaseSettings,
        run: RunState,
        *,
        buffer: AcceptedGroups,
        prompts: Prompts,
        counters: Counters,
        routes: Routes,
        complaints: Complaints,
    ) -> None:
        self.settings = settings
        self.leases = run.leases
        self.buffer = buffer
        self.prompts = prompts
        self.lineages = run.lineages
        self.step = run.step
        self.next_group_id = run.next_group_id
        self.finished = FinishedGroups(run.finished)
        self.counters = counters
        self.shipped = ShippedPartials(counters)
        self.finish_times = FinishTimes(
            max_tokens=settings.max_completion_tokens,
            group_size=settings.group_size,
            heartbeat_s=settings.heartbeat_s,
        )
        self.usefulness = Usefulness(
            max_zero_signal_groups=settings.max_zero_signal_groups,
            groups_per_step=settings.groups_per_step,
        )
        self.mismatches = Mismatches()
        self._forecasts: RecentMap[str, _Forecast] = RecentMap(max_entries=MAX_WORKERS)
        self._routes = routes
        self._complaints = complaints
        self._round = _Round()
        """The decisions so far, while groups are being granted."""
        self.prompt_fault: DataError | None = None
        """Why no more groups can be granted: there are no more prompts."""
        self._asked: list[LeaseRecord] = []
        """Leases whose holders are to be asked for them."""
        self._released: dict[int, str] = {}
        """Group that its holder has given up -> the worker for which it did."""

    def is_open(self, group_id: int) -> bool:
        """Return whether a group has been granted and its result is still wanted."""
        return 0 <= group_id < self.next_group_id and group_id not in self.finished

    def settle(self, group_id: int) -> None:
        """End all leases of a group: its result is here, or is unwanted."""
        self.finished.add(group_id)
        self.leases.finish(group_id)
        self.shipped.discard(group_id)

    def end(
        self, group_id: int, reason: str, *, worker_id: str = "", cause: str = ""
    ) -> list[Action]:
        """End a group that was never accepted: `worker_id` could not finish it, for this cause."""
        self.settle(group_id)
        self.counters.add(f"discarded/{reason}")
        record = Discarded(group=group_id, reason=reason, step=self.step)
        return [AppendRecord(record, worker_id, cause)]

    # --- who gets what ---------------------------------------------------------------------------

    def is_closed(self, newest: PolicyVersion | None) -> bool:
        """Return whether no worker can be given a group, without a look at the workers.

        So it is most of the time in a fleet that is fast enough: all that admission allows to a
        worker with the newest version is promised.
        """
        step = self.step if newest is None else newest.step
        return self._num_promised >= self._limit(step) and not self._is_batch_waiting

    def wait_reason(
        self, workers: Sequence[LeasedWorker], newest: PolicyVersion | None
    ) -> WaitReason:
        """Return what keeps the groups of the next batch from being granted."""
        num_unspent = self.buffer.num_unspent(step=self.step)
        if self.leases.num_running or num_unspent >= self.settings.groups_per_step:
            return ""
        if newest is not None and self.is_closed(newest):
            return "outdated"
        if not workers:
            return "no_worker"
        bounds, num_promised = self._bounds(workers), self._num_promised
        fresh = [w for w in workers if bounds.get(w.installed, 0) > num_promised]
        if not fresh:
            return "no_weights"
        if any(w.is_able(bounds) and self._num_held(w) < w.capacity for w in fresh):
            return ""
        # Where agents play, a worker takes the groups that they ask for.
        is_asked = any(w.capacity > 0 or w.num_unknown > 0 for w in fresh)
        return "no_agent" if self.settings.prompts_are_free and not is_asked else "busy"

    def send_grants(self, workers: Sequence[LeasedWorker], *, now: float) -> list[Action]:
        """Grant groups, have them recorded, and send them with what others have sampled of them."""
        actions, granted = self.grant(workers, now=now)
        for node_id, leases in granted.items():
            actions += self._send(node_id, leases)
        asked, self._asked = self._asked, []
        return [*actions, *self._reclaim(asked)]

    def _send(self, node_id: str, leases: Sequence[Lease]) -> list[Action]:
        messages = self.shipped.grants(leases)
        return [a for grant, payload in messages for a in self._routes.to(node_id, grant, *payload)]

    def _reclaim(self, records: Sequence[LeaseRecord]) -> list[Action]:
        """Ask holders to give leases up."""
        asked: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        for record in records:
            key = (record.worker_id, record.is_begun_too)
            asked.setdefault(key, []).append((record.group_id, record.attempt))
        return [
            action
            for (node_id, is_begun_too), keys in asked.items()
            for action in self._routes.to(
                node_id, Reclaim(leases=tuple(sorted(keys)), is_begun_too=is_begun_too)
            )
        ]

    def grant(
        self, workers: Sequence[LeasedWorker], *, now: float
    ) -> tuple[list[Action], dict[str, list[Lease]]]:
        """Grant groups; return the records to be made, and the new leases of each worker."""
        decided = self._decide(workers, now)
        return self._apply(decided, now)

    def _decide(self, workers: Sequence[LeasedWorker], now: float) -> _Round:
        """Decide which groups are granted and which end; change nothing if that fails."""
        self._round = decided = _Round()
        try:
            bounds = self._bounds(workers)
            able = {worker.node_id: worker for worker in workers if worker.is_able(bounds)}
            is_waiting = self._is_batch_waiting
            if is_waiting or self._has_use(able.values(), bounds):
                self._decide_released(able, bounds)
                self.finish_times.refresh(list(able))
                forecasts = [self._forecast_of(w, now) for w in workers] if is_waiting else []
                self._decide_groups(able, bounds, now)
            if is_waiting:
                running = [each for forecast in forecasts for each in forecast.running]
                self._ask(able, bounds, running, now)
                for original, node_id in self._copies(able, bounds, running, now):
                    if self._find_prompt_fault(original.group_id) is None:
                        decided.copy(original, self._copy_of(original), able[node_id])
        finally:
            self._round = _Round()
        return decided

    def _decide_released(self, able: Mapping[str, LeasedWorker], bounds: Bounds) -> None:
        """Grant what was given up for a worker to that one, if it can take it."""
        for group_id, node_id in sorted(self._released.items()):
            self._round.released.append(group_id)
            worker, num_promised = able.get(node_id), self._num_promised
            is_free = self.is_open(group_id) and not self.leases.workers_of(group_id)
            if worker is None or not is_free or self._find_prompt_fault(group_id) is not None:
                continue
            if self._num_held(worker) < worker.capacity and bounds[worker.installed] > num_promised:
                self._round.grant(self._next_lease(group_id), worker)

    def _decide_groups(self, able: Mapping[str, LeasedWorker], bounds: Bounds, now: float) -> None:
        """Grant groups in the order of their predicted finish, as long as prompts can be had."""
        loads = self._loads(able.values(), bounds, now)
        candidates = self._candidates()
        for node_id in by_finish(loads, num_promised=self._num_promised):
            group_id = self._next_group(candidates)
            if group_id is None:
                break
            self._round.grant(self._next_lease(group_id), able[node_id])

    def _apply(self, decided: _Round, now: float) -> tuple[list[Action], dict[str, list[Lease]]]:
        """Enter what a round has decided; return its records, and the leases of each worker."""
        for group_id in decided.released:
            del self._released[group_id]
        records: list[Action] = []
        for group_id, fault in decided.ends:
            self.next_group_id = max(self.next_group_id, group_id + 1)
            if fault is None:
                records += self.end(group_id, "attempts_exhausted")
            else:
                records += self._leave_out(group_id, fault)
        granted: dict[str, list[Lease]] = {}
        for lease, worker, copy_of in decided.grants:
            self.next_group_id = max(self.next_group_id, lease.group_id + 1)
            record = self.leases.grant(lease.group_id, worker.node_id, now=now)
            record.min_version, record.copy_of = lease.min_version, copy_of
            grant = Granted(
                group=lease.group_id,
                attempt=lease.attempt,
                worker=worker.node_id,
                version=worker.installed,
                copy_of=copy_of,
            )
            records.append(AppendRecord(grant))
            granted.setdefault(worker.node_id, []).append(lease)
            if copy_of is not None:
                self.counters.add("hedges/issued")
        for node_id in granted:
            self.leases.note_load(node_id, now=now)
        self.prompt_fault = decided.fault
        return records, granted

    def _next_lease(self, group_id: int) -> Lease:
        """Return the next lease of a group, as the round stands."""
        lease = self.prompts.lease(group_id, self.leases.num_attempts(group_id))
        return msgspec.structs.replace(lease, min_version=self._oldest_version(self._num_promised))

    def _copy_of(self, original: LeaseRecord) -> Lease:
        """Return a copy of a lease: the next attempt, with the seed of the original."""
        lease = self.prompts.lease(original.group_id, self.leases.num_attempts(original.group_id))
        seed = self.prompts.lease(original.group_id, original.attempt).seed
        return msgspec.structs.replace(lease, seed=seed, min_version=original.min_version)

    def _lease_of(self, record: LeaseRecord) -> Lease:
        """Return what the worker is sent; a copy has the seed of its original."""
        lease = self.prompts.lease(record.group_id, record.attempt)
        origin = record.attempt if record.copy_of is None else record.copy_of
        seed = self.prompts.lease(record.group_id, origin).seed
        return msgspec.structs.replace(lease, seed=seed, min_version=record.min_version)

    def _oldest_version(self, num_promised: int) -> PolicyVersion | None:
        """Return the oldest version that may sample the next group; any of its step will do."""
        return oldest_version(
            self.lineages,
            max_staleness=min(self.settings.max_staleness, self.buffer.admission_staleness),
            groups_per_step=self.settings.groups_per_step,
            num_promised=num_promised,
        )

    @property
    def _num_promised(self) -> int:
        """Groups consumed, accepted or running; one that two workers run counts once."""
        num_running = self.leases.num_running + self._round.num_groups
        consumed = self.step * self.settings.groups_per_step
        return consumed + self.buffer.num_unspent(step=self.step) + num_running

    @property
    def _is_batch_waiting(self) -> bool:
        """Whether the next batch waits for groups that run."""
        return (
            self.leases.num_running > 0
            and self.buffer.num_unspent(step=self.step) < self.settings.groups_per_step
        )

    def _num_held(self, worker: LeasedWorker) -> int:
        num_held = self.leases.num_leases(worker.node_id) + worker.num_unknown
        return num_held + self._round.num_given[worker.node_id]

    def _bounds(self, workers: Iterable[LeasedWorker]) -> Bounds:
        """Return the versions in use from which may still be sampled, and what each is good for."""
        versions = {worker.installed for worker in workers if worker.installed is not None}
        return {v: self._limit(v.step) for v in versions if is_surviving(v, self.lineages)}

    def _limit(self, installed_step: int) -> int:
        return most_promised(
            max_staleness=min(self.settings.max_staleness, self.buffer.admission_staleness),
            installed_step=installed_step,
            groups_per_step=self.settings.groups_per_step,
        )

    def _has_use(self, able: Iterable[LeasedWorker], bounds: Bounds) -> bool:
        """Return whether any of these has room for a group and admission has one for it."""
        num_promised = self._num_promised
        return any(
            bounds[worker.installed] > num_promised and self._num_held(worker) < worker.capacity
            for worker in able
        )

    def _loads(self, able: Collection[LeasedWorker], bounds: Bounds, now: float) -> list[Load]:
        """Return what each able worker has to do."""
        versions = {worker.installed for worker in able if worker.installed is not None}
        newest = max(versions, default=None)
        loads: list[Load] = []
        for worker in able:
            name, installed, capacity = worker.node_id, worker.installed, worker.capacity
            free_at = self._forecast_of(worker, now).free_at
            speed = self.finish_times.of(name)
            if speed.measured is None:
                capacity = min(capacity, len(free_at))  # no queue before it shows its speed
            own = bounds[installed]
            soon, soon_at = own, now
            alone_s = self._alone_s(speed, len(free_at))
            if newest is not None and installed is not None and installed < newest:
                soon, soon_at = self._soon(worker, installed, newest, own, now)
            num_given = self._round.num_given[name]
            load = Load(
                name,
                capacity,
                self._num_held(worker) - num_given,
                own,
                soon,
                alone_s,
                alone_s / self.finish_times.retry_factor(speed, now=now),
                [at if at > soon_at else soon_at for at in free_at],
            )
            for _ in range(num_given):
                load.add()
            loads.append(load)
        return loads

    def _soon(
        self,
        worker: LeasedWorker,
        installed: PolicyVersion,
        newest: PolicyVersion,
        own: int,
        now: float,
    ) -> tuple[int, float]:
        """Return how many groups may be promised with the version it has soon, and from when on."""
        at = self.finish_times.installs_at(worker.node_id, newest, now=now)
        if at is None:
            return own, now
        return own + (newest.step - installed.step) * self.settings.groups_per_step, at

    def _alone_s(self, speed: Speed, num_places: int) -> float:
        """Return how long a group would take in the empty engine, from what the load has cost."""
        load = slowdown(speed.load, num_places)
        return self.finish_times.lengths.mean / self.finish_times.known_speed(speed) / load

    def _forecast_of(self, worker: LeasedWorker, now: float) -> _Forecast:
        """Return when a worker will be done with what it has; a little old, if nothing changed."""
        key = (
            self.leases.num_changes(worker.node_id),
            worker.num_unknown,
            worker.num_places or max(1, worker.capacity),
        )
        known = self._forecasts.get(worker.node_id)
        if known is None or known.key != key or now > known.made_at + self.settings.heartbeat_s:
            known = self._forecasts[worker.node_id] = self._make_forecast(worker, key, now)
        return known

    def _make_forecast(
        self, worker: LeasedWorker, key: tuple[int, int, int], now: float
    ) -> _Forecast:
        _, num_unknown, num_places = key
        forecast = _Forecast(key, now, [now] * num_places, [])
        records = self.leases.worker_leases(worker.node_id)
        records.sort(key=lambda record: (not record.running_s, record.group_id))
        for index, record in enumerate(records):
            num_tokens, rest_s = self.finish_times.forecast(
                record, is_running=index < num_places, now=now
            )
            done_at = forecast.free_at[0] + rest_s
            heapq.heapreplace(forecast.free_at, done_at)
            forecast.running.append(RunningGroup(record, done_at, num_tokens))
        for _ in range(num_unknown):
            speed = self.finish_times.speed(worker.node_id, now=now)
            done_at = forecast.free_at[0] + self.finish_times.lengths.mean / speed
            heapq.heapreplace(forecast.free_at, done_at)
        return forecast

    def _idle(self, able: dict[str, LeasedWorker], bounds: Bounds) -> dict[str, int]:
        """Return the workers that admission has no group for, and how many each could begin."""
        free = {
            node_id: (worker.num_places or worker.capacity) - self._num_held(worker)
            for node_id, worker in able.items()
            # Its groups must be as fresh as the promised ones.
            if bounds[worker.installed] >= self._num_promised
        }
        return {node_id: number for node_id, number in free.items() if number > 0}

    def _is_asked(self, record: LeaseRecord, now: float) -> bool:
        """Return whether a lease is about to be given up, if its holder does as it was asked."""
        patience_s = RELEASE_BEATS * self.settings.heartbeat_s
        return bool(record.reclaimed_for) and now <= record.reclaimed_at + patience_s

    def _may_move(self, record: LeaseRecord) -> bool:
        """Return whether a holder may be asked for a lease: it knows of it, and was not asked."""
        is_known = record.is_confirmed and not record.is_delivered and not record.reclaimed_for
        is_alone = len(self.leases.workers_of(record.group_id)) == 1
        return is_known and is_alone and record.attempt < MAX_ATTEMPTS // 2

    def _ask(
        self, able: dict[str, LeasedWorker], bounds: Bounds, running: list[RunningGroup], now: float
    ) -> None:
        """Choose the leases that are to move to workers with nothing else to do."""
        pending = Counter(g.record.reclaimed_for for g in running if self._is_asked(g.record, now))
        is_first = not self.finish_times.knows_a_group
        if is_first:
            equals = self.finish_times.equals(able)
            newcomers = [
                Newcomer(name, self._num_held(worker) + pending[name], worker.capacity)
                for name, worker in able.items()
                # Else it gets new groups, once it shows its speed.
                if name in equals and bounds[worker.installed] == self._num_promised
            ]
            chosen = even_out(self._movable(running), newcomers) if newcomers else []
        else:
            idle = self._idle(able, bounds)
            loads = self._loads([able[node_id] for node_id in idle], bounds, now) if idle else []
            for load in loads:
                for _ in range(pending[load.node_id]):
                    load.add()
            waiting = [
                group
                for group in running
                if not group.record.running_s
                and self.finish_times.has_made_a_group(group.record.worker_id)
                and self._may_move(group.record)
            ]
            chosen = moves(waiting, loads, least_gain_s=self.settings.heartbeat_s)
        for record, node_id in chosen:
            record.reclaimed_for, record.reclaimed_at = node_id, now
            record.is_begun_too = is_first and not self.settings.prompts_are_free
            self._asked.append(record)

    def _movable(self, running: list[RunningGroup]) -> dict[str, list[LeaseRecord]]:
        """Return the leases of each worker that knows of all of its own, begun ones first."""
        held: dict[str, list[LeaseRecord]] = {}
        for record in (group.record for group in running):
            if not record.reclaimed_for:
                held.setdefault(record.worker_id, []).append(record)
        return {
            name: sorted(records, key=lambda record: (not record.running_s, record.group_id))
            for name, records in held.items()
            if all(map(self._may_move, records))
        }

    def _copies(
        self, able: dict[str, LeasedWorker], bounds: Bounds, running: list[RunningGroup], now: float
    ) -> list[tuple[LeaseRecord, str]]:
        """Return which leases to copy to workers that have nothing else to do."""
        times = self.finish_times
        idle = self._idle(able, bounds)
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
        chosen: list[tuple[LeaseRecord, str]] = []
        groups = []
        for group_id, group in newest.items():
            record = group.record
            if self._is_asked(record, now):
                idle[record.reclaimed_for] = idle.get(record.reclaimed_for, 0) - 1
            elif self._is_withheld(record) and idle.get(record.reclaimed_for, 0) > 0:
                idle[record.reclaimed_for] -= 1
                chosen.append((record, record.reclaimed_for))
            elif not record.is_delivered and self.leases.num_attempts(group_id) < MAX_ATTEMPTS:
                groups.append(group)
        helpers = [
            Helper(
                node_id,
                times.speed(node_id, now=now) if times.has_made_a_group(node_id) else None,
                num_free,
                times.group_s(node_id),
            )
            for node_id, num_free in idle.items()
            if num_free > 0
        ]
        factor = self.settings.hedge_factor
        return chosen + hedges(groups, helpers, holders=holders, factor=factor, now=now)

    def _is_withheld(self, record: LeaseRecord) -> bool:
        """Return whether a holder has kept a lease that it was asked for and could give up."""
        is_free = record.is_begun_too or not record.running_s
        return bool(record.reclaimed_for) and is_free and record.copy_of is None

    def _candidates(self) -> Iterator[int]:
        """Yield the groups to be granted: those that wait, the oldest first, then new ones."""
        decided = self._round
        for group_id in self.leases.waiting:
            if self.leases.num_attempts(group_id) >= MAX_ATTEMPTS:
                decided.ends.append((group_id, None))
            elif group_id not in decided.group_ids:
                yield group_id
        yield from itertools.count(self.next_group_id)

    def _next_group(self, candidates: Iterator[int]) -> int | None:
        """Return the group to grant next, passing over those whose prompt cannot be had.

        None where its prompt is still being made, or too many in a row cannot be had.
        """
        fault: DataError | PromptPendingError | None = None
        for group_id in itertools.islice(candidates, MAX_UNUSABLE):
            fault = self._find_prompt_fault(group_id)
            if fault is None:
                return group_id
            if isinstance(fault, PromptPendingError):
                return None
            self._round.ends.append((group_id, fault))
        text = f"{MAX_UNUSABLE} prompts in a row cannot be used, the last because: {fault}"
        self._round.fault = DataError(text)
        return None

    def _find_prompt_fault(self, group_id: int) -> DataError | PromptPendingError | None:
        """Return why the prompt of a group cannot be had; it may have been before a restart."""
        try:
            self.prompts.lease(group_id, 0)
        except (DataError, PromptPendingError) as error:
            return error
        return None

    def _leave_out(self, group_id: int, fault: DataError) -> list[Action]:
        note = Note("warning", f"group {group_id} is left out: {fault}")
        return [note, *self.end(group_id, "prompt_error")]

    def on_heartbeat(
        self, worker: LeasedWorker, message: Heartbeat, *, has_progress: bool, now: float
    ) -> list[Action]:
        """Send a worker the leases that it lacks again, and acknowledge the unwanted ones."""
        lost, unwanted = self.reconcile(worker, message, has_progress=has_progress, now=now)
        actions = self._send(worker.node_id, lost)
        earlier = now - self.settings.heartbeat_s
        actions += self._reclaim(
            [
                record
                for record in self.leases.worker_leases(worker.node_id)
                if self._is_asked(record, now) and record.reclaimed_at <= earlier
            ]
        )
        for group_id, attempt in unwanted:
            ack = Ack(group_id=group_id, attempt=attempt, outcome="duplicate")
            actions += self._routes.to(worker.node_id, ack)
        return actions

    def reconcile(
        self, worker: LeasedWorker, message: Heartbeat, *, has_progress: bool, now: float
    ) -> tuple[list[Lease], list[tuple[int, int]]]:
        """Bring the book and the worker's own list together.

        Args:
            worker: the worker.
            message: its heartbeat.
            has_progress: whether it has sampled anything since the last one.
            now: the present instant.

        Returns:
            The leases to send again, and (group, attempt) of the unwanted ones.
        """
        self.shipped.count(worker, message)
        listed = {(state.group_id, state.attempt): state for state in message.leases}
        records = self.leases.worker_leases(worker.node_id)
        # A group that waits behind a running one shares its progress.
        has_progress |= any(
            (record.group_id, record.attempt) in listed
            and listed[record.group_id, record.attempt].num_tokens > record.num_tokens
            for record in records
        )
        lost: list[Lease] = []
        for record in records:
            state = listed.pop((record.group_id, record.attempt), None)
            if state is not None:
                record.is_confirmed = True
                self.finish_times.on_lease_state(record, state, now=now)
                is_idle = state.num_tokens <= 0 or state.is_waiting
                if state.num_tokens > record.num_tokens or (has_progress and is_idle):
                    num_tokens = max(state.num_tokens, record.num_tokens)
                    self.leases.renew(record, num_tokens=num_tokens, now=now)
            elif record.is_confirmed and record.reclaimed_for:
                self.leases.revoke(record)
                self._released[record.group_id] = record.reclaimed_for
                self.counters.add("leases_moved")
            elif record.is_confirmed or now - record.sent_at > 2 * self.settings.heartbeat_s:
                # The Grant was lost, or the worker was restarted under the same incarnation.
                record.sent_at, record.is_confirmed = now, False
                if self._find_prompt_fault(record.group_id) is None:
                    lost.append(self._lease_of(record))
        self.finish_times.seen(worker.node_id, records, now=now)
        if worker.installed is not None:
            self.finish_times.installed(worker.node_id, worker.installed, now=now)
        self._forecasts.discard(worker.node_id)
        unwanted = self._enter_listed(worker, listed, now=now)
        worker.is_stuck = worker.num_unknown > 0 and not has_progress
        return lost, unwanted

    def _enter_listed(
        self, worker: LeasedWorker, listed: dict[tuple[int, int], LeaseState], *, now: float
    ) -> list[tuple[int, int]]:
        """Enter what a worker lists and the book lacks; return the unwanted ones."""
        unwanted: list[tuple[int, int]] = []
        worker.num_unknown = 0
        for (group_id, attempt), state in listed.items():
            is_given_up = state.is_waiting and self.leases.newest_attempt(group_id) > attempt
            is_theirs = self.leases.was_granted(group_id, attempt, worker.node_id)
            if not self.is_open(group_id) or is_given_up or not is_theirs:
                unwanted.append((group_id, attempt))
            elif not self.leases.has_expired(group_id, attempt, worker.node_id):
                record = self.leases.adopt(group_id, attempt, worker.node_id, now=now)
                record.is_confirmed = True
                continue
            # An expired lease's result is welcome, but it no longer binds the group.
            worker.num_unknown += state.num_tokens >= 0
        return unwanted

    def validate(self) -> None:
        """Check that the book and what is known of groups agree; for tests.

        Raises:
            AssertionError: if they do not.
        """
        self.leases.validate()
        for group_id in self.leases.group_ids:
            assert self.is_open(group_id), f"group {group_id} is in the book and not open"
        assert not self._round.grants, "a round of grants is not over"

    # --- results ---------------------------------------------------------------------------------
    #
    # The states of a group: `leases/groups.py`.
    #
    # * A group is ended by a worker that was granted the named attempt, now or before; from any
    #   other worker it is refused, and the lease stays as it is.
    # * A group is acknowledged only after `stored`: the ledger holds it.
    # * A group's content is checked against what was asked: prompt, group size, finite numbers.
    # * A result whose samples are too old or from an abandoned lineage is refused with that reason
    #   and its group is granted again; the worker is told and forgets it. The refusal of a group
    #   that was asked for is recorded.
    # * Where two workers had a group, the one that was not the first is told to stop, and that is
    #   recorded as well.

    def receive(
        self,
        node_id: str,
        message: Deliver | Partial | Failed,
        payload: list[Frame],
        *,
        now: float,
    ) -> list[Action]:
        """Handle what a worker says of a group; see the methods for each message."""
        match message:
            case Deliver():
                return self.on_deliver(node_id, message, payload, now=now)
            case Partial():
                return self.on_partial(node_id, message, payload)
            case Failed():
                return self.on_failed(node_id, message, now=now)

    def on_deliver(
        self, node_id: str, message: Deliver, payload: list[Frame], *, now: float
    ) -> list[Action]:
        """Judge a finished group.

        Raises:
            RemoteProtocolError: if the message has no group.
        """
        if len(payload) != 2:
            raise RemoteProtocolError(f"a Deliver from {node_id} without its two frames")
        if self.leases.is_storing(message.group_id):
            return []
        if message.group_id in self.finished:
            self.counters.add("duplicates")
            return self._ack(node_id, message, "duplicate")
        if not self._may_end(node_id, message):
            return self._disown(node_id, message, now)
        try:
            group = decode_group(payload[0], payload[1])
        except RemoteProtocolError as error:
            self.counters.add("protocol_errors")
            notes = self._complaints.note(node_id, "malformed", f"{node_id}: {error}", now=now)
            return [*notes, *self._refuse(node_id, message, "malformed", now)]
        group_id = message.group_id
        if self.is_open(group_id) and (fault := self._find_prompt_fault(group_id)) is not None:
            return self._without_prompt(node_id, message, fault)
        header, arrays = payload
        if self.settings.trims_stale:
            # Tokens beyond the bound are masked here; the bound itself is checked as ever.
            trimmed = trim_stale(group, step=self.step, max_staleness=self.settings.max_staleness)
            if trimmed is not None:
                self.counters.add(
                    "partials/trimmed_tokens", group.num_trained - trimmed.num_trained
                )
                group = replace(trimmed, is_trimmed=False)
                header, arrays = encode_group(group)
        reason = self._find_fault(group, message, node_id)
        if reason is not None:
            return self._refuse(node_id, message, reason, now)
        self.leases.deliver(group.group_id, group.attempt, node_id)
        self.finish_times.made(
            node_id,
            num_tokens=max(rollout.num_tokens for rollout in group.rollouts),
            seconds=message.seconds,
            load=self.leases.load(node_id, group.group_id, group.attempt),
            now=now,
        )
        return [StoreGroup(group, header, arrays)]

    def _without_prompt(
        self, node_id: str, message: Deliver, fault: DataError | PromptPendingError
    ) -> list[Action]:
        """End a group that cannot be compared with what was asked for; not yet, if that may come.

        The worker delivers it again until it is acknowledged.
        """
        if isinstance(fault, PromptPendingError):
            return []
        leases = self.leases.leases_of(message.group_id)
        others = [record for record in leases if record.attempt != message.attempt]
        return [
            *self._leave_out(message.group_id, fault),
            *self._ack(node_id, message, "refused", "prompt_error"),
            *self._cancel(others),
        ]

    def _find_fault(self, group: Group, message: Deliver, node_id: str) -> str | None:
        """Return why a delivered group cannot be accepted, or None."""
        label = (message.group_id, message.attempt, node_id)
        if (group.group_id, group.attempt, group.worker_id) != label:
            return "mislabelled"
        if not self.is_open(group.group_id):
            return "unknown_group"
        return self._find_content_fault(group) or find_fault(
            group, step=self.step, max_staleness=self.settings.max_staleness, lineages=self.lineages
        )

    def _find_content_fault(self, group: Group) -> str | None:
        """Return in what a group differs from what was asked for, or None."""
        lease = self.prompts.lease(group.group_id, group.attempt)
        if group.prompt_ids.tolist() != list(lease.prompt_ids):
            if not self.settings.prompts_are_free:
                return "another_prompt"
            if int(group.prompt_ids.min()) < 0:
                return "bad_token_ids"
            if int(group.prompt_ids.max()) >= self.settings.vocab_size:
                return "bad_token_ids"
        if len(group.rollouts) != self.settings.group_size:
            return "group_size"
        if self.settings.exact_version and len(group.versions) > 1:
            return "mixed_versions"
        for rollout in group.rollouts:
            if rollout.num_tokens > self.settings.max_completion_tokens:
                return "too_long"
            fault = _find_token_fault(
                rollout.token_ids, rollout.sampler_logprobs, self.settings.vocab_size
            )
            if fault is not None:
                return fault
        return None

    def _may_end(self, node_id: str, message: Deliver | Failed) -> bool:
        """Return whether a worker has a say in an attempt: it was granted, or the group is none."""
        group_id, attempt = message.group_id, message.attempt
        return not self.is_open(group_id) or self.leases.was_granted(group_id, attempt, node_id)

    def _disown(self, node_id: str, message: Deliver | Failed, now: float) -> list[Action]:
        """Refuse the result or the end of another worker's lease, which stays as it is."""
        self.counters.add("refused/not_leased")
        text = f"{node_id} was not granted attempt {message.attempt} of group {message.group_id}"
        notes = self._complaints.note(node_id, "not_leased", text, now=now)
        return [*notes, *self._ack(node_id, message, "refused", "not_leased")]

    def _refuse(self, node_id: str, message: Deliver, reason: str, now: float) -> list[Action]:
        """Tell the worker to forget this result; the group is granted again."""
        self.counters.add(f"refused/{reason}")
        group_id, attempt = message.group_id, message.attempt
        leases = self.leases
        # Once per lease, so that no worker can fill the disk with them.
        is_leased = any(record.attempt == attempt for record in leases.leases_of(group_id))
        records: list[Action] = []
        if is_leased:
            refusal = Refused(group=group_id, attempt=attempt, worker=node_id, reason=reason)
            records.append(AppendRecord(refusal))
            if reason not in NO_FAULT:
                records += self._count(node_id, is_useful=False, now=now)
        leases.revoke_attempt(group_id, attempt)
        return [*records, *self._ack(node_id, message, "refused", reason)]

    def _ack(
        self, node_id: str, message: Deliver | Failed, outcome: str, reason: str = ""
    ) -> list[Action]:
        ack = Ack(
            group_id=message.group_id, attempt=message.attempt, outcome=outcome, reason=reason
        )
        return self._routes.to(node_id, ack)

    def stored(self, group_id: int, *, is_useful: bool, now: float) -> list[Action]:
        """Acknowledge a group that the ledger now holds; count it for or against its worker."""
        group = self.leases.group(group_id)
        assert group.result is not None, "it was stored without a result"
        node_id, attempt = group.result
        first, leases = group.find(attempt, node_id), group.leases
        self.settle(group_id)
        self.counters.add("accepted")
        others = [record for record in leases if record.attempt != attempt]
        if first is not None and others:
            self.counters.add("hedges/lost" if first.copy_of is None else "hedges/won")
        ack = Ack(group_id=group_id, attempt=attempt, outcome="accepted")
        counted = self._count(node_id, is_useful=is_useful, now=now)
        return [*counted, *self._routes.to(node_id, ack), *self._cancel(others)]

    def _count(self, node_id: str, *, is_useful: bool, now: float) -> list[Action]:
        texts = self.usefulness.delivered(node_id, is_useful=is_useful, now=now)
        return [Note("warning", text) for text in texts]

    def _cancel(self, leases: list[LeaseRecord]) -> list[Action]:
        """Tell the workers that have the other attempts of a group to stop."""
        actions: list[Action] = []
        for record in leases:
            group_id, attempt, worker_id = record.group_id, record.attempt, record.worker_id
            self.counters.add("leases_cancelled")
            self.counters.add("hedges/tokens_lost", record.num_tokens)
            end = Cancelled(
                group=group_id, attempt=attempt, worker=worker_id, tokens=record.num_tokens
            )
            actions.append(AppendRecord(end))
            ack = Ack(group_id=group_id, attempt=attempt, outcome="duplicate")
            actions += self._routes.to(worker_id, ack)
        return actions

    def on_partial(self, node_id: str, message: Partial, payload: list[Frame]) -> list[Action]:
        """Keep the rollouts that a worker has sampled for a group, for the next worker of it.

        Only from a worker that holds a lease of it; anything else may be late, or invented.

        Raises:
            RemoteProtocolError: if it is malformed or cannot have been sampled.
        """
        if len(payload) != 1:
            raise RemoteProtocolError(f"a Partial from {node_id} without its frame")
        if node_id not in self.leases.workers_of(message.group_id):
            self.counters.add("partials/late")
            return []
        members = decode_members(payload[0])
        fault = self._find_partial_fault(members)
        if fault is not None:
            raise RemoteProtocolError(f"partial rollouts of {node_id}: {fault}")
        num_tokens = sum(member.num_tokens for member in members)
        self.shipped.put(message.group_id, message.attempt, payload[0], num_tokens=num_tokens)
        return []

    def _find_partial_fault(self, members: list[PartialRollout]) -> str | None:
        """Return why these cannot be what was sampled for a group, or None."""
        if len(members) != self.settings.group_size:
            return f"{len(members)} members"
        for member in (member for member in members if member.num_tokens):
            if member.num_tokens > self.settings.max_completion_tokens:
                return f"{member.num_tokens} tokens"
            if not member.is_finished and member.num_tokens >= self.settings.max_completion_tokens:
                return "nothing is left to sample"
            fault = _find_token_fault(
                member.token_ids, member.sampler_logprobs, self.settings.vocab_size
            )
            if fault is not None:
                return fault
            if int(member.policy_versions[:, 1].max()) > self.step:
                return "version_from_the_future"
        return None

    def on_failed(self, node_id: str, message: Failed, *, now: float) -> list[Action]:
        """End a group that a worker could not finish, with its reason."""
        if self.leases.is_storing(message.group_id) or not self.is_open(message.group_id):
            return self._ack(node_id, message, "duplicate")
        if not self._may_end(node_id, message):
            return self._disown(node_id, message, now)
        if message.is_elsewhere and not self._is_too_fatal(message):
            return self._on_given_back(node_id, message, now)
        reason, detail = known_reason(message.reason), message.detail
        if message.is_elsewhere:
            detail += f"; it has ended the engines of {MAX_FATAL} workers"
        text = f"group {message.group_id} failed on {node_id}: {reason}: {detail}"
        leases = self.leases.leases_of(message.group_id)
        others = [record for record in leases if record.attempt != message.attempt]
        return [
            *self._complaints.note(node_id, reason, text, now=now),
            *self.end(
                message.group_id,
                reason,
                worker_id=node_id,
                cause=_printable(f"{detail}\n{message.traceback}".strip()),
            ),
            *self._count(node_id, is_useful=False, now=now),
            *self._ack(node_id, message, "refused", reason),
            *self._cancel(others),
        ]

    def _is_too_fatal(self, message: Failed) -> bool:
        """Return whether a group has ended MAX_FATAL engines, so that no other is to try it."""
        if message.reason != ENGINE_ERROR:
            return False
        return self.leases.note_fatal(message.group_id, message.attempt) >= MAX_FATAL

    def _on_given_back(self, node_id: str, message: Failed, now: float) -> list[Action]:
        """Grant a group again that a worker cannot sample now, though others can."""
        self.leases.give_back(message.group_id, message.attempt, node_id)
        self.counters.add("leases_given_back")
        acks = self._ack(node_id, message, "duplicate")
        text = f"{node_id} gives group {message.group_id} back: {message.detail}"
        return [*self._complaints.note(node_id, "given_back", text, now=now), *acks]


def _printable(text: str) -> str:
    """Return the end of a peer's text as lines that are harmless on a terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else "?" for char in text[-MAX_CAUSE_LENGTH:]
    )


def _find_token_fault(
    ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], vocab_size: int
) -> str | None:
    """Return what is wrong with sampled tokens, at least one, or None."""
    if not np.isfinite(logprobs).all() or float(logprobs.max()) > MAX_LOGPROB:
        return BAD_LOGPROBS
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return "bad_token_ids"
    return None
