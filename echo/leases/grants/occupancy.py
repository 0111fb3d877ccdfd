"""Tracks how busy each worker is during a round of grants.

A worker's leases from before the round count, and so do the leases that the round has granted so
far. A round grants one group after another. Each grant takes a place at a worker and adds a
promised group. Only these two counts change while the round is decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from echo.core.rollout import PolicyVersion
from echo.leases.book import LeaseBook, LeasedWorker
from echo.leases.grants.admission import Quota
from echo.leases.grants.dispatch import Load, RunningGroup, slowdown
from echo.leases.grants.finish_times import FinishTimes, Speed
from echo.leases.grants.forecasts import Forecasts


class Occupancy:
    """The workers in a round, and how many groups the round has given to each worker so far."""

    def __init__(
        self,
        workers: Sequence[LeasedWorker],
        quota: Quota,
        *,
        leases: LeaseBook,
        finish_times: FinishTimes,
        forecasts: Forecasts,
        now: float,
    ) -> None:
        self.bounds = quota.bounds(workers)
        self.able = {worker.node_id: worker for worker in workers if worker.is_able(self.bounds)}
        """The workers that can be granted groups, under their names."""
        self.num_promised = quota.num_promised
        """Number of groups that are consumed, accepted or running. The groups that this round
        grants count, too."""
        self._workers = workers
        self._groups_per_step = quota.groups_per_step
        self._leases = leases
        self._finish_times = finish_times
        self._forecasts = forecasts
        self._now = now
        self._num_given: Counter[str] = Counter()
        """For each worker, the number of leases that this round has given to it."""

    def give(self, worker_id: str) -> None:
        """Count a group as granted to a worker in this round."""
        self._num_given[worker_id] += 1
        self.num_promised += 1

    def num_held(self, worker: LeasedWorker) -> int:
        """Return how many leases a worker has.

        Leases from this round count, and so do expired or unwanted leases that the worker still
        holds.
        """
        num_held = self._leases.num_leases(worker.node_id) + worker.num_unknown
        return num_held + self._num_given[worker.node_id]

    def may_take(self, worker: LeasedWorker) -> bool:
        """Return whether an able worker has space, and admission allows this worker a group."""
        has_quota = self.bounds[worker.installed] > self.num_promised
        return has_quota and self.num_held(worker) < worker.capacity

    def running(self) -> list[RunningGroup]:
        """Return the leased groups of all workers.

        Each has the time at which it should be finished.
        """
        forecasts = [self._forecasts.of(worker, now=self._now) for worker in self._workers]
        return [group for forecast in forecasts for group in forecast.running]

    def idle(self) -> dict[str, int]:
        """Return the number of free places for each worker that can help other workers."""
        free = {
            node_id: (worker.num_places or worker.capacity) - self.num_held(worker)
            for node_id, worker in self.able.items()
            # The batches that may train on the worker's version must have places for all promised
            # groups.
            if self.bounds[worker.installed] >= self.num_promised
        }
        return {node_id: number for node_id, number in free.items() if number > 0}

    def loads(self, names: Iterable[str]) -> list[Load]:
        """Return how busy each of these workers is. All of them must be in `able`."""
        workers = [self.able[name] for name in names]
        newest = max((w.installed for w in workers if w.installed is not None), default=None)
        return [self._load(worker, newest) for worker in workers]

    def _load(self, worker: LeasedWorker, newest: PolicyVersion | None) -> Load:
        name, installed, capacity = worker.node_id, worker.installed, worker.capacity
        free_at = self._forecasts.of(worker, now=self._now).free_at
        speed = self._finish_times.of(name)
        if speed.measured is None:
            capacity = min(capacity, len(free_at))  # its speed is unknown: queue no group
        own = self.bounds[installed]
        soon, soon_at = own, self._now
        if newest is not None and installed is not None and installed < newest:
            soon, soon_at = self._soon(name, installed, newest, own)
        alone_s = self._alone_s(speed, len(free_at))
        num_given = self._num_given[name]
        load = Load(
            name,
            capacity,
            self.num_held(worker) - num_given,
            own,
            soon,
            alone_s,
            alone_s / self._finish_times.retry_factor(speed, now=self._now),
            [at if at > soon_at else soon_at for at in free_at],
        )
        for _ in range(num_given):
            load.add()
        return load

    def _soon(
        self, worker_id: str, installed: PolicyVersion, newest: PolicyVersion, own: int
    ) -> tuple[int, float]:
        """Return (limit, time) for the version that a worker is expected to install soon.

        `limit` bounds the promised groups for workers with this version (`Quota.limit`). `time` is
        when the installation is expected. If this time is unknown, `limit` is `own`, the limit for
        the installed version, and `time` is the present time.
        """
        at = self._finish_times.installs_at(worker_id, newest, now=self._now)
        if at is None:
            return own, self._now
        return own + (newest.step - installed.step) * self._groups_per_step, at

    def _alone_s(self, speed: Speed, num_places: int) -> float:
        """Return the seconds that a group would take if it were alone in a worker's engine.

        The speed was measured under load, so the time is divided by the slowdown at that load.
        """
        load = slowdown(speed.load, num_places)
        return self._finish_times.lengths.mean / self._finish_times.known_speed(speed) / load
