"""Finish times: when a worker will be done with a group, from recent lengths and speeds.

Length is counted in the tokens of a group's longest completion, since that one decides when the
group is done, and a worker's speed in such tokens per second between the start of a group and its
delivery: rewards, tools and prefill are in it, and it hardly depends on how many groups run
beside.

The rest of a group that already has n tokens is read from the lengths of the groups that were
accepted recently: the mean of those above n, less n. With a heavy tail that grows with n; beyond
the longest of them the rest is taken to be as long as what has been sampled.

A heartbeat reports the progress of all completions of a running group together, and not of its
longest. The longest one adds at most the worker's speed, and at most all of that progress: so a
stalled group shows, and a group with a single running completion does not look stalled.

A worker whose speed has not been measured is tried: it counts as twice as fast as the fastest,
and what it then holds as on its way at the median of the others. An idle worker's speed estimate
doubles every `RETRY_GROUPS` group times, up to the fastest worker's, so that a slow worker is
tried again with one group, the less often the slower it was.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from echo.core.rollout import PolicyVersion
from echo.core.timers import RecentMap
from echo.leases.book import MAX_WORKERS
from echo.leases.groups import LeaseRecord
from echo.wire.messages import LeaseState

MAX_LENGTHS = 256
"""Groups whose lengths are remembered, the newest."""

MAX_TIMES = 64
"""Groups whose durations are remembered, the newest."""

MAX_VERSIONS = 16
"""Versions whose first installation is remembered, the newest."""

MEMORY = 0.8
"""Weight of the speed so far when another group is measured."""

MAX_SPEED = 1e6
"""Tokens per second of one completion: no engine is faster, whatever its worker says."""

EQUAL_SPEED = 0.8
"""Share of the fastest worker's speed from which a worker counts as its equal before any group is
made: what heartbeats show by then is that uncertain."""

SLOWEST = 1 / 64
"""A group's own rate in relation to its worker's speed counts as this much at least."""

RETRY_GROUPS = 4.0
"""Idle time, in groups that the worker could have made, after which its speed counts double."""


class LengthHistory:
    """The lengths of the last groups."""

    def __init__(self, *, max_tokens: int) -> None:
        """Know nothing but the longest that there can be."""
        self._max_tokens = max_tokens
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = [0]
        """Of the k shortest, for each k."""
        self.mean = self.rest(0.0)
        """The expected length of a group; half of what is allowed while nothing is known."""

    @property
    def num_known(self) -> int:
        """Groups whose lengths are remembered."""
        return len(self._newest)

    def add(self, num_tokens: int) -> None:
        """Take the length of another group."""
        if len(self._newest) == MAX_LENGTHS:
            self._sorted.remove(self._newest.popleft())
        self._newest.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._sums = [0, *accumulate(self._sorted)]
        self.mean = self.rest(0.0)

    def rest(self, num_tokens: float) -> float:
        """Return how many more tokens a group with `num_tokens` is expected to need; above 0."""
        if not self._sorted:
            return max(1.0, (self._max_tokens - num_tokens) / 2)
        first = bisect_right(self._sorted, num_tokens)
        num_longer = len(self._sorted) - first
        if not num_longer:
            return max(1.0, num_tokens)
        return (self._sums[-1] - self._sums[first]) / num_longer - num_tokens


@dataclass(slots=True)
class Speed:
    """The measured speed of one worker."""

    tokens: float = 0.0
    seconds: float = 0.0
    """Both of the groups that it has made, the older ones weighing less."""
    load_s: float = 0.0
    """The seconds of each of them times the groups that it had in hand meanwhile."""
    provisional: float | None = None
    """Tokens per second that its heartbeats show, of use until it has made a group."""
    busy_at: float = 0.0
    """When it last held a lease."""
    version: PolicyVersion | None = None
    lag_s: float = 0.0
    """How much later than the first worker it installs a version."""
    freed_at: float = 0.0
    """When it last delivered a group: another may have begun then."""

    @property
    def measured(self) -> float | None:
        """Tokens per second, or None while nothing is known."""
        return self.tokens / self.seconds if self.seconds else self.provisional

    @property
    def load(self) -> float:
        """Groups that it had in hand when it was measured; 1 while nothing is known."""
        return self.load_s / self.seconds if self.seconds else 1.0


class FinishTimes:
    """Lengths and speeds."""

    def __init__(self, *, max_tokens: int, group_size: int, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self.lengths = LengthHistory(max_tokens=max_tokens)
        self._group_size = group_size
        self._speeds: RecentMap[str, Speed] = RecentMap(max_entries=MAX_WORKERS)
        self._first_at: RecentMap[PolicyVersion, float] = RecentMap(max_entries=MAX_VERSIONS)
        self._usual = 1.0
        self._fastest = 1.0
        self._seconds: deque[float] = deque(maxlen=MAX_TIMES)
        """Durations of the last groups, of all workers."""

    @property
    def knows_a_group(self) -> bool:
        """Whether any group was made yet, so that lengths and speeds are known."""
        return self.lengths.num_known > 0

    def group_s(self, worker_id: str) -> float:
        """Return the seconds that a group usually takes a worker, or any where it made none."""
        speed = self.of(worker_id)
        if not speed.seconds and self._seconds:
            return statistics.median(self._seconds)
        # Continued groups have a length and no time: then what heartbeats show must do.
        is_known = self.knows_a_group and speed.measured is not None
        return self.lengths.mean / self.known_speed(speed) if is_known else math.inf

    def of(self, worker_id: str) -> Speed:
        """Return what is known of a worker."""
        speed = self._speeds.get(worker_id)
        if speed is None:
            speed = self._speeds[worker_id] = Speed()
        return speed

    def made(
        self, worker_id: str, *, num_tokens: int, seconds: float, now: float, load: float = 1.0
    ) -> None:
        """Note a group that was accepted.

        Args:
            worker_id: the worker that made it.
            num_tokens: of its longest completion.
            seconds: from its start there to its delivery; 0 if that is not known.
            load: groups that the worker had in hand meanwhile, this one included.
            now: the present instant.
        """
        self.lengths.add(num_tokens)
        speed = self.of(worker_id)
        speed.freed_at = speed.busy_at = now
        if seconds > 0:
            self._seconds.append(seconds)
            seconds = max(seconds, num_tokens / MAX_SPEED)
            speed.tokens = MEMORY * speed.tokens + num_tokens
            speed.seconds = MEMORY * speed.seconds + seconds
            speed.load_s = MEMORY * speed.load_s + load * seconds

    def installed(self, worker_id: str, version: PolicyVersion, *, now: float) -> None:
        """Note which version a worker has installed."""
        first_at = self._first_at.get(version)
        if first_at is None:
            first_at = self._first_at[version] = now
        speed = self.of(worker_id)
        if speed.version != version:
            speed.version = version
            speed.lag_s = (speed.lag_s + now - first_at) / 2

    def installs_at(self, worker_id: str, version: PolicyVersion, *, now: float) -> float | None:
        """Return when a worker should have a version that others have; None if that is unknown."""
        first_at, lag_s = self._first_at.get(version), self.of(worker_id).lag_s
        if first_at is None or now > first_at + 2 * lag_s + self._heartbeat_s:
            return None
        return max(now, first_at + lag_s)

    def seen(self, worker_id: str, leases: list[LeaseRecord], *, now: float) -> None:
        """Note what a heartbeat said of a worker's leases."""
        speed = self.of(worker_id)
        if leases:
            speed.busy_at = now
        shown = [r.num_tokens / r.running_s for r in leases if r.running_s > 0]
        if shown:
            # The mean of a group's completions is below its longest: a lower bound.
            speed.provisional = max(shown) / self._group_size or None

    def refresh(self, worker_ids: list[str]) -> None:
        """Compare the workers that are here now."""
        known = [speed for name in worker_ids if (speed := self.of(name).measured) is not None]
        self._usual = statistics.median(known) if known else 1.0
        self._fastest = max(known, default=1.0)

    def equals(self, worker_ids: Iterable[str]) -> set[str]:
        """Return the workers that are nearly as fast as the fastest, as far as is known."""
        speeds = {worker_id: self.of(worker_id).measured for worker_id in worker_ids}
        least = EQUAL_SPEED * max((speed for speed in speeds.values() if speed), default=0.0)
        return {name for name, speed in speeds.items() if speed is None or speed >= least}

    def has_made_a_group(self, worker_id: str) -> bool:
        """Return whether a worker's speed is that of whole groups, rewards and tools included.

        Heartbeats show only the sampling of a first group, until a reward takes long.
        """
        return self.of(worker_id).seconds > 0

    def known_speed(self, speed: Speed) -> float:
        """Return the tokens per second that a worker made of one group, as far as is known."""
        measured = speed.measured
        return 2 * self._fastest if measured is None else measured

    def retry_factor(self, speed: Speed, *, now: float) -> float:
        """Return how many times faster than it was a worker may be by now; at least 1."""
        known = self.known_speed(speed)
        if known >= self._fastest:
            return 1.0
        idle_groups = (now - speed.busy_at) * known / self.lengths.mean
        retry_factor: float = 2.0 ** min(idle_groups / RETRY_GROUPS, 60.0)
        return max(1.0, min(retry_factor, self._fastest / known))

    def speed(self, worker_id: str, *, now: float) -> float:
        """Return the tokens per second that a worker is expected to make of one group."""
        speed = self.of(worker_id)
        return self.known_speed(speed) * self.retry_factor(speed, now=now)

    def on_lease_state(self, record: LeaseRecord, state: LeaseState, *, now: float) -> None:
        """Note what a heartbeat says of a lease."""
        if state.running_s <= 0 or state.num_tokens < 0:
            return
        speed = self.of(record.worker_id).measured or self._usual
        is_first = record.running_s <= 0
        if is_first:
            record.seen_at, record.rate = now - state.running_s, speed
        record.running_s = state.running_s
        elapsed_s = now - record.seen_at
        if elapsed_s < 0.75 * self._heartbeat_s and not is_first:
            return  # a heartbeat out of turn: the worker may not have counted again
        progress = max(0, state.num_tokens - record.seen_tokens)
        own = min(speed * elapsed_s, float(progress))
        record.longest += own
        if elapsed_s > 0:
            own_rate = max(own / elapsed_s, SLOWEST * speed)
            record.rate = own_rate if is_first and progress else (record.rate + own_rate) / 2
        record.seen_at, record.seen_tokens = now, state.num_tokens

    def forecast(self, record: LeaseRecord, *, is_running: bool, now: float) -> tuple[float, float]:
        """Return how long a leased group will be, and how long it will still run.

        Args:
            record: the lease.
            is_running: whether the worker should have begun it, where no heartbeat has shown that.
            now: the present instant.

        Returns:
            Tokens of its longest completion in the end, and seconds from its start or from now.
        """
        speed = self.of(record.worker_id)
        rate = speed.measured or self._usual
        sampled = 0.0
        if record.running_s > 0:
            rate = record.rate
            sampled = record.longest + rate * (now - record.seen_at)
        elif is_running:
            sampled = rate * (now - max(record.granted_at, speed.freed_at))
        rest = self.lengths.rest(sampled)
        return sampled + rest, rest / rate
