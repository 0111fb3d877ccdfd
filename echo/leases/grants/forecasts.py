"""Forecasts when each worker will finish its groups.

A round of grants needs the forecasts of all workers, and most workers have not changed since the
previous round. So a forecast is reused for one heartbeat period while the worker's leases stay the
same.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from echo.core.timers import RecentMap
from echo.leases.book import MAX_WORKERS, LeaseBook, LeasedWorker
from echo.leases.grants.dispatch import RunningGroup
from echo.leases.grants.finish_times import FinishTimes

_Key = tuple[int, int, int]
"""A forecast is valid while these three numbers stay the same.

They are the number of changes to the worker's leases so far, the number of the worker's unknown
leases, and the number of the worker's places.
"""


@dataclass(slots=True)
class WorkerForecast:
    """When a worker will finish its groups, as predicted."""

    made_at: float
    free_at: list[float]
    """For each place of the worker, the time at which it becomes free for the next group. The list
    is a heap."""
    running: list[RunningGroup] = field(default_factory=list)
    """The worker's groups. Each has the time at which it should be finished."""

    def take_place(self, seconds: float) -> float:
        """Occupy the place that is free first, for `seconds`. Return when it is free again."""
        done_at = self.free_at[0] + seconds
        heapq.heapreplace(self.free_at, done_at)
        return done_at


class Forecasts:
    """Makes forecasts, and keeps the newest forecast of each worker."""

    def __init__(self, leases: LeaseBook, finish_times: FinishTimes, *, max_age_s: float) -> None:
        self._leases = leases
        self._finish_times = finish_times
        self._max_age_s = max_age_s
        self._kept: RecentMap[str, tuple[_Key, WorkerForecast]] = RecentMap(max_entries=MAX_WORKERS)

    def of(self, worker: LeasedWorker, *, now: float) -> WorkerForecast:
        """Return a forecast for a worker. It is at most `max_age_s` seconds old."""
        key = (
            self._leases.num_changes(worker.node_id),
            worker.num_unknown,
            worker.num_places or max(1, worker.capacity),
        )
        kept = self._kept.get(worker.node_id)
        if kept is not None and kept[0] == key and now <= kept[1].made_at + self._max_age_s:
            return kept[1]
        forecast = self._make(worker, key, now)
        self._kept[worker.node_id] = key, forecast
        return forecast

    def discard(self, worker_id: str) -> None:
        """Drop a worker's forecast, because a heartbeat has reported newer progress."""
        self._kept.discard(worker_id)

    def _make(self, worker: LeasedWorker, key: _Key, now: float) -> WorkerForecast:
        _, num_unknown, num_places = key
        forecast = WorkerForecast(now, [now] * num_places)
        records = self._leases.worker_leases(worker.node_id)
        records.sort(key=lambda record: (not record.running_s, record.group_id))
        for index, record in enumerate(records):
            num_tokens, rest_s = self._finish_times.forecast(
                record, is_running=index < num_places, now=now
            )
            done_at = forecast.take_place(rest_s)
            forecast.running.append(RunningGroup(record, done_at, num_tokens))
        for _ in range(num_unknown):
            speed = self._finish_times.speed(worker.node_id, now=now)
            forecast.take_place(self._finish_times.lengths.mean / speed)
        return forecast
