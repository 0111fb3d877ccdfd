"""Predicts when workers should finish their groups. Group lengths and worker speeds decide.

The length of a group is the number of tokens of its longest completion, because that completion
ends last. The speed of a worker is this length divided by the seconds from a group's start to its
delivery. These seconds include rewards, tools and prefill.

For a group that already has n tokens, the expected number of further tokens is computed from the
lengths of recently accepted groups: the mean of the lengths above n, minus n. A group that is
longer than all of these lengths is expected to double.

A heartbeat reports the progress of a group as one number, the sum over the group's completions. The
estimate adds all of this progress to the longest completion, but at most as many tokens as the
worker's speed allows. So the estimate of a group stands still only if none of its completions makes
progress.

When groups are placed, a worker of unknown speed counts as twice as fast as the fastest worker, so
that it gets a group. Once this worker has the group, the group is expected to advance at the median
speed of all workers. An idle worker's speed estimate doubles after every `RETRY_GROUPS` durations
of a group, up to the fastest worker's speed. So a slow worker gets a group from time to time. The
slower the worker is, the less often this happens.
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

MAX_GROUPS = 256
"""Number of groups whose lengths and durations are remembered. The newest are kept, so that the
estimates follow the policy: the lengths of its answers change during a run.
"""

MAX_VERSIONS = 16
"""Number of versions whose first installation is remembered. The newest are kept."""

MEMORY = 0.8
"""When a group is measured, the sums over a worker's earlier groups are multiplied by this factor.
So the last five groups have two thirds of the weight."""

MAX_SPEED = 1e6
"""Highest speed of one completion that is accepted, tokens per second. Higher reported speeds are
cut to this value."""

EQUAL_SPEED = 0.8
"""A worker counts as equally fast if it has at least this share of the fastest worker's speed. The
share is used until the first group is made. Until then speeds come from heartbeats and are
inaccurate."""

SLOWEST = 1 / 64
"""The estimated rate of a running group's longest completion is at least this share of its worker's
speed. Otherwise a pause would make the forecast infinite."""

RETRY_GROUPS = 4.0
"""While a worker is idle for as long as this many groups would take, its speed estimate doubles."""


class LengthHistory:
    """The lengths of the groups that were accepted last."""

    def __init__(self, *, max_tokens: int) -> None:
        """Start without lengths. No group will be longer than `max_tokens`."""
        self._max_tokens = max_tokens
        self._newest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = [0]
        """For each k, the sum of the k shortest lengths."""
        self.mean = self.rest(0.0)
        """The length that a group is expected to have. While no length is known, it is half of the
        maximum."""

    @property
    def num_known(self) -> int:
        """Number of groups whose lengths are remembered."""
        return len(self._newest)

    def add(self, num_tokens: int) -> None:
        """Add the length of a group.

        If there are more than MAX_GROUPS lengths, drop the oldest.
        """
        if len(self._newest) == MAX_GROUPS:
            self._sorted.remove(self._newest.popleft())
        self._newest.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._sums = [0, *accumulate(self._sorted)]
        self.mean = self.rest(0.0)

    def rest(self, num_tokens: float) -> float:
        """Return how many more tokens a group is expected to get after its first `num_tokens`."""
        if not self._sorted:
            return max(1.0, (self._max_tokens - num_tokens) / 2)
        first = bisect_right(self._sorted, num_tokens)
        num_longer = len(self._sorted) - first
        if not num_longer:
            return max(1.0, num_tokens)
        return (self._sums[-1] - self._sums[first]) / num_longer - num_tokens


@dataclass(slots=True)
class Speed:
    """How fast one worker is, according to measurements."""

    tokens: float = 0.0
    seconds: float = 0.0
    """`tokens` and `seconds` are sums over the worker's groups. Older groups have lower weights."""
    load_s: float = 0.0
    """Weighted sum over the worker's groups. Each term is a group's seconds times the number of
    leases that the worker held.

    The number of leases is the mean while the worker made the group.
    """
    provisional: float | None = None
    """Tokens per second, estimated from heartbeats. It is used until the worker has made a
    group."""
    busy_at: float = 0.0
    """Time at which the worker last held a lease."""
    version: PolicyVersion | None = None
    lag_s: float = 0.0
    """Mean seconds by which this worker installs a version later than the first worker that
    installs it."""
    freed_at: float = 0.0
    """Time at which the worker last delivered a group. From then on it could begin the next
    group."""

    @property
    def measured(self) -> float | None:
        """Measured tokens per second.

        Until the worker has made a group, this is the estimate from heartbeats.
        """
        return self.tokens / self.seconds if self.seconds else self.provisional

    @property
    def load(self) -> float:
        """Mean number of leases that the worker held while it was measured; 1 if unknown."""
        return self.load_s / self.seconds if self.seconds else 1.0


class FinishTimes:
    """The lengths of groups, the speeds of workers, and what is predicted from both."""

    def __init__(self, *, max_tokens: int, group_size: int, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self.lengths = LengthHistory(max_tokens=max_tokens)
        self._group_size = group_size
        self._speeds: RecentMap[str, Speed] = RecentMap(max_entries=MAX_WORKERS)
        self._first_at: RecentMap[PolicyVersion, float] = RecentMap(max_entries=MAX_VERSIONS)
        self._usual = 1.0
        self._fastest = 1.0
        self._seconds: deque[float] = deque(maxlen=MAX_GROUPS)
        """Seconds that each of the last groups took, for all workers together."""

    @property
    def knows_a_group(self) -> bool:
        """Whether any worker has made a group, so that lengths and speeds are known."""
        return self.lengths.num_known > 0

    def group_s(self, worker_id: str) -> float:
        """Return how long a group usually takes on a worker, in seconds.

        If this worker has made no group, return how long a group usually takes on all workers. If
        no worker has made a group, return infinity.
        """
        speed = self.of(worker_id)
        if not speed.seconds and self._seconds:
            return statistics.median(self._seconds)
        # Continued groups have a length but no duration. If the worker made only such groups, its
        # speed is estimated from heartbeats.
        is_known = self.knows_a_group and speed.measured is not None
        return self.lengths.mean / self.known_speed(speed) if is_known else math.inf

    def of(self, worker_id: str) -> Speed:
        """Return what is known about a worker's speed.

        For an unknown worker, start a new record.
        """
        speed = self._speeds.get(worker_id)
        if speed is None:
            speed = self._speeds[worker_id] = Speed()
        return speed

    def made(
        self, worker_id: str, *, num_tokens: int, seconds: float, now: float, load: float = 1.0
    ) -> None:
        """Record how long an accepted group is, and how much time its worker took for it.

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
        """Record that a worker has reported a version as installed."""
        first_at = self._first_at.get(version)
        if first_at is None:
            first_at = self._first_at[version] = now
        speed = self.of(worker_id)
        if speed.version != version:
            speed.version = version
            speed.lag_s = (speed.lag_s + now - first_at) / 2

    def installs_at(self, worker_id: str, version: PolicyVersion, *, now: float) -> float | None:
        """Return when a worker should install a version. Return None if that is unknown or past."""
        first_at, lag_s = self._first_at.get(version), self.of(worker_id).lag_s
        if first_at is None or now > first_at + 2 * lag_s + self._heartbeat_s:
            return None
        return max(now, first_at + lag_s)

    def seen(self, worker_id: str, leases: list[LeaseRecord], *, now: float) -> None:
        """After a heartbeat, estimate a worker's provisional speed from its leases."""
        speed = self.of(worker_id)
        if leases:
            speed.busy_at = now
        shown = [r.num_tokens / r.running_s for r in leases if r.running_s > 0]
        if shown:
            # A lower bound: the mean completion of a group is shorter than its longest.
            speed.provisional = max(shown) / self._group_size or None

    def refresh(self, worker_ids: list[str]) -> None:
        """Compute the median speed and the highest speed of these workers again."""
        known = [speed for name in worker_ids if (speed := self.of(name).measured) is not None]
        self._usual = statistics.median(known) if known else 1.0
        self._fastest = max(known, default=1.0)

    def equals(self, worker_ids: Iterable[str]) -> set[str]:
        """Return the workers that are nearly as fast as the fastest, or whose speed is unknown."""
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
        """Return the measured speed.

        If it is unknown, return twice the speed of the fastest worker.
        """
        measured = speed.measured
        return 2 * self._fastest if measured is None else measured

    def retry_factor(self, speed: Speed, *, now: float) -> float:
        """Return the factor by which a speed estimate grows because its worker is idle.

        It is at least 1.
        """
        known = self.known_speed(speed)
        if known >= self._fastest:
            return 1.0
        idle_groups = (now - speed.busy_at) * known / self.lengths.mean
        retry_factor: float = 2.0 ** min(idle_groups / RETRY_GROUPS, 60.0)
        return max(1.0, min(retry_factor, self._fastest / known))

    def speed(self, worker_id: str, *, now: float) -> float:
        """Return the speed that is expected of a worker: tokens per second of one group."""
        speed = self.of(worker_id)
        return self.known_speed(speed) * self.retry_factor(speed, now=now)

    def on_lease_state(self, record: LeaseRecord, state: LeaseState, *, now: float) -> None:
        """Update the estimates of a lease's length and rate according to a heartbeat."""
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
        """Predict how long a leased group will be, and in how many seconds it will be done.

        The length is the final number of tokens of the group's longest completion. If the group has
        not begun, the seconds count from its start. Otherwise they count from now.

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
