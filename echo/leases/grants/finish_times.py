"""Finish times: when workers should finish their groups, predicted from lengths and speeds.

The length of a group is the number of tokens of its longest completion, because that completion
ends last. The speed of a worker is this length divided by the seconds from a group's start to its
delivery. These seconds include rewards, tools and prefill.

For a group that already has n tokens, the expected number of further tokens is computed from the
lengths of recently accepted groups: the mean of the lengths above n, minus n. A group that is
longer than all of these lengths is expected to double.

A heartbeat reports the total progress of a group's completions as one number. The estimate adds
this progress to the longest completion, but at most what the worker's speed allows. So a stalled
group is recognized, and a group with one running completion does not count as stalled.

When groups are placed, a worker of unknown speed counts as twice as fast as the fastest worker, so
that it gets a group. The group is then expected to advance at the median speed of all workers. An
idle worker's speed estimate doubles after every `RETRY_GROUPS` durations of a group, up to the
fastest worker's speed. So a slow worker gets a group from time to time. The slower the worker is,
the less often this happens.
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
"""Number of newest groups whose lengths are remembered."""

MAX_TIMES = 64
"""Number of newest groups whose durations are remembered."""

MAX_VERSIONS = 16
"""Number of newest versions whose first installation is remembered."""

MEMORY = 0.8
"""When a group is measured, the sums over the earlier groups are multiplied by this factor."""

MAX_SPEED = 1e6
"""Highest speed of one completion, tokens per second. Higher reported speeds are cut to this value.
"""

EQUAL_SPEED = 0.8
"""Share of the fastest worker's speed above which a worker counts as equally fast. The share is
used until the first group is made, because speeds from heartbeats are not more accurate.
"""

SLOWEST = 1 / 64
"""Least estimated rate of a running group's longest completion, as a share of its worker's speed.
"""

RETRY_GROUPS = 4.0
"""Idle time, in durations of a group, after which a worker's speed estimate doubles."""


class LengthHistory:
    """The lengths of the last accepted groups."""

    def __init__(self, *, max_tokens: int) -> None:
        """Start without lengths; no group is longer than `max_tokens`."""
        self._max_tokens = max_tokens
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = [0]
        """Sum of the k shortest lengths, for each k."""
        self.mean = self.rest(0.0)
        """The expected length of a group; half of the maximum while no length is known."""

    @property
    def num_known(self) -> int:
        """Number of groups whose lengths are remembered."""
        return len(self._newest)

    def add(self, num_tokens: int) -> None:
        """Add the length of a group; beyond MAX_LENGTHS drop the oldest length."""
        if len(self._newest) == MAX_LENGTHS:
            self._sorted.remove(self._newest.popleft())
        self._newest.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._sums = [0, *accumulate(self._sorted)]
        self.mean = self.rest(0.0)

    def rest(self, num_tokens: float) -> float:
        """Return the expected number of further tokens of a group with `num_tokens` tokens."""
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
    """`tokens` and `seconds` are sums over the worker's groups; older groups have lower weights."""
    load_s: float = 0.0
    """Weighted sum over the worker's groups: a group's seconds times the worker's leases.

    The number of leases is the mean while the worker made the group.
    """
    provisional: float | None = None
    """Tokens per second, estimated from heartbeats; used until the worker has made a group."""
    busy_at: float = 0.0
    """Time at which the worker last held a lease."""
    version: PolicyVersion | None = None
    lag_s: float = 0.0
    """Mean seconds from a version's first installation on any worker to its installation on this
    worker.
    """
    freed_at: float = 0.0
    """Time at which the worker last delivered a group and so could begin another group."""

    @property
    def measured(self) -> float | None:
        """Measured tokens per second; None until the worker has made a group."""
        return self.tokens / self.seconds if self.seconds else self.provisional

    @property
    def load(self) -> float:
        """Mean number of leases that the worker held while its speed was measured; 1 if unknown."""
        return self.load_s / self.seconds if self.seconds else 1.0


class FinishTimes:
    """Lengths of groups, speeds of workers, and the predictions made from them."""

    def __init__(self, *, max_tokens: int, group_size: int, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self.lengths = LengthHistory(max_tokens=max_tokens)
        self._group_size = group_size
        self._speeds: RecentMap[str, Speed] = RecentMap(max_entries=MAX_WORKERS)
        self._first_at: RecentMap[PolicyVersion, float] = RecentMap(max_entries=MAX_VERSIONS)
        self._usual = 1.0
        self._fastest = 1.0
        self._seconds: deque[float] = deque(maxlen=MAX_TIMES)
        """Durations of the last groups of all workers, seconds."""

    @property
    def knows_a_group(self) -> bool:
        """Whether any worker has made a group, so that lengths and speeds are known."""
        return self.lengths.num_known > 0

    def group_s(self, worker_id: str) -> float:
        """Return how long a group usually takes on a worker, in seconds.

        If this worker has made no group, use the durations on all workers. If no worker has made a
        group, return infinity.
        """
        speed = self.of(worker_id)
        if not speed.seconds and self._seconds:
            return statistics.median(self._seconds)
        # Continued groups have a length but no duration. If the worker made only such groups, its
        # speed is estimated from heartbeats.
        is_known = self.knows_a_group and speed.measured is not None
        return self.lengths.mean / self.known_speed(speed) if is_known else math.inf

    def of(self, worker_id: str) -> Speed:
        """Return the speed record of a worker; a new record if the worker is unknown."""
        speed = self._speeds.get(worker_id)
        if speed is None:
            speed = self._speeds[worker_id] = Speed()
        return speed

    def made(
        self, worker_id: str, *, num_tokens: int, seconds: float, now: float, load: float = 1.0
    ) -> None:
        """Record the length and duration of an accepted group for its worker.

        Args:
            worker_id: the worker that made the group.
            num_tokens: length of the group's longest completion.
            seconds: time from the group's start at the worker to its delivery; 0 if unknown.
            load: mean number of leases that the worker held in that time, including the lease of
                this group.
            now: the present time, seconds.
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
        """Record that a worker reports a version as installed."""
        first_at = self._first_at.get(version)
        if first_at is None:
            first_at = self._first_at[version] = now
        speed = self.of(worker_id)
        if speed.version != version:
            speed.version = version
            speed.lag_s = (speed.lag_s + now - first_at) / 2

    def installs_at(self, worker_id: str, version: PolicyVersion, *, now: float) -> float | None:
        """Return when a worker should install a version; None if unknown or past."""
        first_at, lag_s = self._first_at.get(version), self.of(worker_id).lag_s
        if first_at is None or now > first_at + 2 * lag_s + self._heartbeat_s:
            return None
        return max(now, first_at + lag_s)

    def seen(self, worker_id: str, leases: list[LeaseRecord], *, now: float) -> None:
        """Update a worker's provisional speed from its leases, after a heartbeat."""
        speed = self.of(worker_id)
        if leases:
            speed.busy_at = now
        shown = [r.num_tokens / r.running_s for r in leases if r.running_s > 0]
        if shown:
            # A lower bound: the mean completion of a group is shorter than its longest.
            speed.provisional = max(shown) / self._group_size or None

    def refresh(self, worker_ids: list[str]) -> None:
        """Update the median and the maximum speed of these workers."""
        known = [speed for name in worker_ids if (speed := self.of(name).measured) is not None]
        self._usual = statistics.median(known) if known else 1.0
        self._fastest = max(known, default=1.0)

    def equals(self, worker_ids: Iterable[str]) -> set[str]:
        """Return the workers whose speed is unknown or nearly the fastest worker's."""
        speeds = {worker_id: self.of(worker_id).measured for worker_id in worker_ids}
        least = EQUAL_SPEED * max((speed for speed in speeds.values() if speed), default=0.0)
        return {name for name, speed in speeds.items() if speed is None or speed >= least}

    def has_made_a_group(self, worker_id: str) -> bool:
        """Return whether a worker has made a group whose duration is known.

        If so, the worker's speed is measured over whole groups, with rewards and tools. Otherwise
        the speed is estimated from heartbeats, which do not show the time of rewards.
        """
        return self.of(worker_id).seconds > 0

    def known_speed(self, speed: Speed) -> float:
        """Return the measured speed; if unknown, twice the fastest worker's speed."""
        measured = speed.measured
        return 2 * self._fastest if measured is None else measured

    def retry_factor(self, speed: Speed, *, now: float) -> float:
        """Return the factor, at least 1, that a speed estimate gets for idle time."""
        known = self.known_speed(speed)
        if known >= self._fastest:
            return 1.0
        idle_groups = (now - speed.busy_at) * known / self.lengths.mean
        retry_factor: float = 2.0 ** min(idle_groups / RETRY_GROUPS, 60.0)
        return max(1.0, min(retry_factor, self._fastest / known))

    def speed(self, worker_id: str, *, now: float) -> float:
        """Return a worker's expected speed: tokens per second of one group."""
        speed = self.of(worker_id)
        return self.known_speed(speed) * self.retry_factor(speed, now=now)

    def on_lease_state(self, record: LeaseRecord, state: LeaseState, *, now: float) -> None:
        """Update a lease's estimated length and rate from its entry in a heartbeat."""
        if state.running_s <= 0 or state.num_tokens < 0:
            return
        speed = self.of(record.worker_id).measured or self._usual
        is_first = record.running_s <= 0
        if is_first:
            record.seen_at, record.rate = now - state.running_s, speed
        record.running_s = state.running_s
        elapsed_s = now - record.seen_at
        if elapsed_s < 0.75 * self._heartbeat_s and not is_first:
            return  # an early heartbeat: its token count may be unchanged
        progress = max(0, state.num_tokens - record.seen_tokens)
        own = min(speed * elapsed_s, float(progress))
        record.longest += own
        if elapsed_s > 0:
            own_rate = max(own / elapsed_s, SLOWEST * speed)
            record.rate = own_rate if is_first and progress else (record.rate + own_rate) / 2
        record.seen_at, record.seen_tokens = now, state.num_tokens

    def forecast(self, record: LeaseRecord, *, is_running: bool, now: float) -> tuple[float, float]:
        """Return a leased group's expected length, and the seconds until the group is done.

        The length is the final number of tokens of the group's longest completion. The seconds
        count from now, or from the group's start if the group has not begun.

        Args:
            record: the lease.
            is_running: whether to assume that the worker has begun the group, even if no heartbeat
                shows this.
            now: the present time, seconds.
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
