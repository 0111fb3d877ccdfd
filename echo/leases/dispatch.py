"""Dispatch of groups to workers: finish times, throughput, hedging, usefulness.

Four estimates, and what is decided by them:

* finish times: when a worker will be done with a group, from recent lengths and speeds;
* throughput: what a worker could make if it had enough to do;
* dispatch: the next group goes to the worker that will have finished it first; hedging: a running
  group that is expected late is given to a faster, idle worker as well;
* usefulness: whose groups teach something.
"""

from __future__ import annotations

import heapq
import math
import statistics
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from echo.core.rollout import PolicyVersion
from echo.core.timers import RecentMap
from echo.core.units import format_duration
from echo.leases.book import MAX_WORKERS
from echo.leases.groups import LeaseRecord
from echo.wire.messages import LeaseState

# --- Finish times ---
#
# Length is counted in the tokens of a group's longest completion, since that one decides when the
# group is done, and a worker's speed in such tokens per second between the start of a group and its
# delivery: rewards, tools and prefill are in it, and it hardly depends on how many groups run
# beside.
#
# The rest of a group that already has n tokens is read from the lengths of the groups that were
# accepted recently: the mean of those above n, less n. With a heavy tail that grows with n; beyond
# the longest of them the rest is taken to be as long as what has been sampled.
#
# A heartbeat reports the progress of all completions of a running group together, and not of its
# longest. The longest one adds at most the worker's speed, and at most all of that progress: so a
# stalled group shows, and a group with a single running completion does not look stalled.
#
# A worker whose speed has not been measured is tried: it counts as twice as fast as the fastest,
# and what it then holds as on its way at the median of the others. An idle worker's speed estimate
# doubles every `RETRY_GROUPS` group times, up to the fastest worker's, so that a slow worker is
# tried again with one group, the less often the slower it was.


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


# --- Throughput: what a worker could make if it had enough to do ---
#
# Leases are paced, so a worker that is not needed in full looks slow. Each instant therefore counts
# in proportion to its load: the leases that it holds over the groups that it can run at once.
# Tokens over loaded seconds is exact at full load and too much below it where an engine gains by
# batching; after each worker that `fleet/activation.py` puts on standby it must look again, since
# the load of the others grows and their estimates become exact just when they matter.


THROUGHPUT_WINDOW_S = 300.0
"""Loaded seconds after which what was seen weighs 1/e of what it did."""
MIN_REPORTS = 3
"""Reports of new tokens before there is an estimate: tokens may come in whole groups."""


class Throughput:
    """Tokens per loaded second, with exponential weights."""

    def __init__(self, *, tokens_sampled: int | None, now: float) -> None:
        """Know nothing.

        Args:
            tokens_sampled: the worker's counter, which goes on counting when the learner or the
                link was away; None while it has not been heard.
            now: the present.
        """
        self._counter = tokens_sampled
        self._at = now
        self._loaded_s = 0.0
        self._tokens = 0.0
        self._num_reports = 0

    def look(self, *, load: float, tokens_sampled: int | None, now: float) -> None:
        """Take the worker's load (0..1) since the last look, and its counter of tokens."""
        if tokens_sampled is None or self._counter is None:
            self._counter, self._at = tokens_sampled, now
            return
        loaded_s = min(1.0, load) * max(0.0, now - self._at)
        self._at = now
        kept = math.exp(-loaded_s / THROUGHPUT_WINDOW_S)
        self._loaded_s = self._loaded_s * kept + loaded_s
        self._tokens *= kept
        if tokens_sampled > self._counter:
            self._tokens += tokens_sampled - self._counter
            self._num_reports += 1
        self._counter = tokens_sampled

    @property
    def tokens_per_s(self) -> float | None:
        """The estimate; None while it has shown too little."""
        if self._num_reports < MIN_REPORTS or self._loaded_s <= 0:
            return None
        return self._tokens / self._loaded_s


# --- Dispatch: the next group goes to the worker that will have finished it first ---
#
# All groups that admission allows are placed on paper, one after the other, each on the worker
# whose predicted finish (what it holds, and what was placed on it before, divided by its speed) is
# the earliest. A group that falls to a worker with room is granted; one that falls to a worker that
# has none now stays with the learner until that worker asks again, even if a slower one has room.
#
# A worker that has not installed the newest version yet, and should have it soon, counts as if it
# had, from that instant on: otherwise the first to install it would be given all that it makes room
# for.
#
# An engine is slower the more groups are in it. So what is given to one worker while another has
# nothing to do counts as that much longer: otherwise an engine with places for a whole batch would
# get all of it, for being ready a moment before its equals.
#
# So the leases are in proportion to the speeds, and a worker gets nothing that it would finish
# later than the others can finish everything that admission allows. That is no loss: such a group
# would come too late. Admission allows what the next S + 1 steps consume, and after those it is
# stale.


FULL_SLOWDOWN = 2.0
"""How many times longer a group takes in a full engine than in an empty one.

An assumption: what engines show is nearly always measured at one load. It decides only how late
another worker may be ready that is preferred for having less to do.
"""


def slowdown(num_groups: float, num_places: int) -> float:
    """Return how many times longer a group takes among `num_groups` than in an empty engine."""
    return 1 + (FULL_SLOWDOWN - 1) * min(1.0, num_groups / num_places)


@dataclass(slots=True)
class Load:
    """One worker, and what it has to do."""

    node_id: str
    capacity: int
    """Groups that it can hold."""
    num_held: int
    most_promised: int
    """It gets no group once this number is promised to the batches that may train on its
    version."""
    most_soon: int
    """The same for the version that it will have soon."""
    group_s: float = 1.0
    """Seconds that it would need for one group in an empty engine."""
    trial_s: float = 1.0
    """The same for one that it is tried with while it holds none; at most `group_s`."""
    free_at: list[float] = field(default_factory=lambda: [0.0])
    """When each of its places is free for another group, not before now; a heap."""

    @property
    def has_space(self) -> bool:
        """Whether it can hold another group."""
        return self.num_held < self.capacity

    @property
    def num_free(self) -> int:
        """Groups that it could begin at once."""
        return len(self.free_at) - self.num_held

    @property
    def share(self) -> float:
        """The part of its capacity that is in use."""
        return self.num_held / max(1, self.capacity)

    @property
    def finish_at(self) -> float:
        """When it would have finished another group."""
        group_s = self.group_s if self.num_held else self.trial_s
        return self.free_at[0] + group_s * slowdown(self.num_held + 1, len(self.free_at))

    def add(self) -> None:
        """Give it another group."""
        heapq.heapreplace(self.free_at, self.finish_at)
        self.num_held += 1


def by_finish(loads: Sequence[Load], *, num_promised: int) -> list[str]:
    """Return who gets one group after the other, by the predicted finish.

    Args:
        loads: the workers that can sample; they are changed.
        num_promised: groups consumed, buffered or running, as admission counts them.
    """
    granted: list[str] = []
    with_room = [load for load in loads if load.has_space]
    limit = max((load.most_promised for load in with_room), default=0)
    num_with_room = len(with_room)
    heap = [(load.finish_at, load.share, load.node_id, load) for load in loads]
    heapq.heapify(heap)
    while heap and num_with_room and num_promised < limit:
        _, _, node_id, load = heapq.heappop(heap)
        if load.most_soon <= num_promised:
            num_with_room -= load.has_space
            continue
        if load.has_space and load.most_promised > num_promised:
            granted.append(node_id)
        load.add()
        num_with_room -= load.num_held == load.capacity
        num_promised += 1
        heapq.heappush(heap, (load.finish_at, load.share, node_id, load))
    return granted


# --- Moves: a lease that its holder gives up for a worker with nothing to do ---
#
# While the next batch waits and admission has no group left, a worker that joins or has run dry is
# given leases of others. Their holder is asked for them (`Reclaim`), and gives up each that it has
# not begun; the next heartbeat that does not list it confirms that, and the group is granted again.
#
# A lease moves where the idle worker should finish it sooner than its holder by more than a group's
# time and a heartbeat: for less it is not worth the transfer. The holder must have made a group,
# because the estimate of its speed is too rough before.
#
# Before the first group of a run is made, nothing is known of lengths and speeds. All workers count
# as equal then: a newcomer is given an equal number of groups, so that the first batch does not
# wait for the worker that was ready first. An engine has often begun all groups by then, so groups
# that were begun move as well, with what was sampled for them. Episodes of environments and agents
# stay where they were begun.
#
# A lost request is repeated. A holder that keeps a lease for RELEASE_BEATS heartbeats is not asked
# for it again, and the idle worker copies the group: the holder may be dead, or report
# falsely.


RELEASE_BEATS = 4
"""Heartbeats within which a worker gives up what it is asked for, if it does."""


def moves(
    waiting: Sequence[RunningGroup], helpers: Sequence[Load], *, least_gain_s: float
) -> list[tuple[LeaseRecord, str]]:
    """Return which leases that were not begun are to move, and to whom.

    Args:
        waiting: with the instants at which their holders should be done with them.
        helpers: workers with a free place; they are changed.
        least_gain_s: by how much sooner a group must be expected, at least.
    """
    chosen: list[tuple[LeaseRecord, str]] = []
    for group in sorted(waiting, key=lambda g: (-g.done_at, g.record.group_id)):
        free = [h for h in helpers if h.num_free and h.node_id != group.record.worker_id]
        helper = min(free, key=lambda h: (h.finish_at, h.share, h.node_id), default=None)
        if helper is None:
            break
        gain_s = group.done_at - helper.finish_at
        if gain_s <= max(least_gain_s, FULL_SLOWDOWN * helper.group_s):
            continue
        helper.add()
        chosen.append((group.record, helper.node_id))
    return chosen


@dataclass(slots=True)
class Newcomer:
    """A worker that has made no group yet."""

    node_id: str
    num_held: int
    capacity: int
    """Groups that it can hold."""


def even_out(
    held: Mapping[str, Sequence[LeaseRecord]], newcomers: Sequence[Newcomer]
) -> list[tuple[LeaseRecord, str]]:
    """Return which leases are to move so that newcomers hold as many as the others.

    Args:
        held: the leases of each worker that may move, the first to move last.
        newcomers: they are changed.
    """
    left = {name: list(records) for name, records in held.items()}
    chosen: list[tuple[LeaseRecord, str]] = []
    while free := [each for each in newcomers if each.num_held < each.capacity]:
        to = min(free, key=lambda each: (each.num_held, each.node_id))
        donor = max(left, key=lambda name: (len(left[name]), name), default=to.node_id)
        if donor == to.node_id or len(left[donor]) <= to.num_held + 1:
            break
        chosen.append((left[donor].pop(), to.node_id))
        to.num_held += 1
    return chosen


# --- Hedging: a second copy of a late group on a faster worker ---
#
# Only workers with a free place, and for which admission has no group left, copy anything, and only
# while the next batch is not complete: their copies cost nothing but power. Two rules:
#
# * A group that has no copy is copied where the copy, made from the start, should be done `factor`
#   times sooner than the original. The worker must have made a group.
# * When a group is expected is read from what its holder reports, which a holder may invent. So a
#   group is also copied once its newest lease is AGE_FACTOR x `factor` times as old as a group
#   usually takes on the idle worker, whatever its holders report and however often it was copied.
#   This holds with hedging switched off, too, with USUAL_FACTOR in place of `factor`.
#
# The group that is expected last comes first. A copy has the seed of the original: where both
# sample from the same version it is the same text, so that the first result to come is not, as of
# two different ones, the shorter.


AGE_FACTOR = 4.0
"""How many times `factor` times older than usual a group must be to be copied for its age."""
USUAL_FACTOR = 2.0
"""The `factor` of that rule where hedging is switched off."""


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A group that one worker works on."""

    record: LeaseRecord
    done_at: float
    """When it is expected."""
    num_tokens: float
    """Expected length of its longest completion, in the end."""


@dataclass(slots=True)
class Helper:
    """A worker that would have nothing to do."""

    node_id: str
    speed: float | None
    """Tokens per second of one group; None where it has made none."""
    num_places: int
    """Groups that it can begin at once."""
    group_s: float = math.inf
    """Seconds that a group usually takes there, or anywhere where it has made none."""


def hedges(
    groups: Sequence[RunningGroup],
    helpers: Sequence[Helper],
    *,
    holders: Mapping[int, Collection[str]],
    factor: float | None,
    now: float,
) -> list[tuple[LeaseRecord, str]]:
    """Return which leases are to be copied, and to whom.

    Args:
        groups: with the newest lease of each.
        helpers: they are changed.
        holders: group -> the workers that have a lease of it.
        factor: how many times sooner the copy must be expected; None where only age counts.
        now: the present instant.
    """
    fastest_first = sorted(helpers, key=lambda helper: (-(helper.speed or 0.0), helper.node_id))
    chosen: list[tuple[LeaseRecord, str]] = []
    for group in sorted(groups, key=lambda g: (-g.done_at, g.record.group_id)):
        having = holders[group.record.group_id]
        free = (h for h in fastest_first if h.num_places and h.node_id not in having)
        helper = next(free, None)
        if helper is None:
            continue  # those that are free have a lease of it
        age_s = now - group.record.granted_at
        is_old = age_s > AGE_FACTOR * (factor or USUAL_FACTOR) * helper.group_s
        is_late = (
            factor is not None
            and helper.speed is not None
            and len(having) == 1
            and group.done_at - now >= factor * group.num_tokens / helper.speed
        )
        if is_old or is_late:
            helper.num_places -= 1
            chosen.append((group.record, helper.node_id))
    return chosen


# --- Usefulness: which workers deliver useful groups, and when one worker decides for the fleet ---
#
# Prompts are granted without regard to who gets them, so a group that teaches something is as
# likely to come from any honest worker as that worker's part of all groups delivered. A worker that
# sends equal rewards, broken or dishonest, needs not sample: it becomes the fastest and is given
# most of the leases. Two rules keep it from stopping a run.
#
# **Set aside.** Of each useful group, every worker is credited with the part that it had in the
# deliveries since the useful group before. Once that sums up to EXPECTED groups and at most a tenth
# of that number of its own were useful, it is given nothing for AWAY_S, and then judged from the
# start. For an honest worker the number of useful groups is at most as scattered as Poisson's law
# says: 2 or fewer in place of 20 have a probability of 5e-7. Where the whole fleet learns nothing
# no worker is credited with anything, so none is set aside.
#
# **A quorum.** A run is zero-signal after `max_zero_signal_groups` in a row without a useful one.
# If they are mainly one worker's, that worker is given no more until the others have delivered a
# batch: so a fast worker cannot end the run between two useful groups of slower ones. Where there
# is no other worker, or none that can sample for ALONE_S, its own groups suffice. Groups of workers
# that are set aside never count.


EXPECTED = 20.0
"""Useful groups that a worker must have been expected to deliver before it is judged."""
LEAST_SHARE = 0.1
"""Of these, what it must have delivered."""
AWAY_S = 600.0
"""How long it is set aside."""
ALONE_S = 60.0
"""Seconds without any other worker that can sample, after which a worker is no longer set aside."""


@dataclass(slots=True)
class _Record:
    """The useful groups that one worker was expected to deliver, and those that it did."""

    expected: float = 0.0
    useful: float = 0.0


class Usefulness:
    """Counts useful groups per worker."""

    def __init__(self, *, max_zero_signal_groups: int, groups_per_step: int) -> None:
        """Start without groups, with the bound after which a run without a useful one ends."""
        self._max_zero_signal_groups = max_zero_signal_groups
        self._quorum = max(1, min(groups_per_step, max_zero_signal_groups // 2))
        self._records: RecentMap[str, _Record] = RecentMap(max_entries=MAX_WORKERS)
        self._since_useful: dict[str, int] = {}
        """Groups by worker since the last useful one of the fleet."""
        self._num_void = 0
        """Such groups of workers that were set aside."""
        self._away_until: dict[str, float] = {}
        self._dominant: str | None = None
        """The worker with nearly all zero-signal groups: it gets none until others have
        delivered."""
        self._has_asked = False
        """Whether no other worker could deliver in ALONE_S, since the last useful group."""
        self._alone_since: float | None = None

    @property
    def num_discounted(self) -> int:
        """Groups since the last useful one that do not say whether the run is zero-signal."""
        dominant = 0 if self._dominant is None else self._since_useful[self._dominant]
        return self._num_void + dominant

    def is_set_aside(self, worker_id: str) -> bool:
        """Return whether this worker is to be given no groups."""
        return worker_id == self._dominant or worker_id in self._away_until

    def delivered(self, worker_id: str, *, is_useful: bool, now: float) -> list[str]:
        """Count a group; return lines for the operator on workers that are set aside now."""
        if not is_useful:
            if worker_id in self._away_until:
                self._num_void += 1
            else:
                self._since_useful[worker_id] = self._since_useful.get(worker_id, 0) + 1
            return []
        counts = self._since_useful
        counts[worker_id] = counts.get(worker_id, 0) + 1
        self._since_useful, self._num_void, self._dominant = {}, 0, None
        self._has_asked = False
        num_groups = sum(counts.values())
        texts = []
        for name, count in counts.items():
            record = self._records.get(name) or _Record()
            self._records[name] = record
            record.expected += count / num_groups
            record.useful += name == worker_id
            if record.expected >= EXPECTED and record.useful <= LEAST_SHARE * record.expected:
                texts.append(self._set_aside(name, record, now))
            elif record.expected >= 2 * EXPECTED:
                record.expected, record.useful = record.expected / 2, record.useful / 2
        return texts

    def _set_aside(self, worker_id: str, record: _Record, now: float) -> str:
        self._away_until[worker_id] = now + AWAY_S
        self._records.discard(worker_id)
        return (
            f"{worker_id} is set aside for {format_duration(AWAY_S)}: something could be learned "
            f"from {record.useful:.0f} of its groups, where {record.expected:.0f} were to be "
            "expected by what other workers deliver; check its engine, its task and who runs it"
        )

    def exclude(self, worker_id: str, why: str, *, now: float) -> str:
        """Set a worker aside for another reason than its rewards; return a line about it."""
        self._away_until[worker_id] = now + AWAY_S
        self._records.discard(worker_id)
        return (
            f"{worker_id} is set aside for {format_duration(AWAY_S)}: {why}; check its engine, its "
            "weights and who runs it"
        )

    @property
    def is_idle(self) -> bool:
        """Whether a review would change nothing."""
        return (
            not self._away_until
            and self._dominant is None
            and sum(self._since_useful.values()) < self._max_zero_signal_groups
        )

    def review(self, workers: Mapping[str, bool], *, now: float) -> list[str]:
        """Decide which workers are set aside; return the lines for the operator.

        Args:
            workers: name -> whether it can sample just now.
            now: the present instant.
        """
        others = [name for name in workers if not self.is_set_aside(name)]
        if any(workers[name] for name in others):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        is_alone = self._alone_since is not None and now >= self._alone_since + ALONE_S
        texts = []
        for name, until in list(self._away_until.items()):
            if now >= until or is_alone:
                del self._away_until[name]
                texts.append(f"{name} is no longer set aside")
        counts = self._since_useful
        if self._dominant is not None:
            if sum(counts.values()) - counts[self._dominant] >= self._quorum:
                self._dominant = None
            elif is_alone:
                # It is the only worker, so its groups count, but not those from before it was held
                # back.
                self._num_void += counts.pop(self._dominant)
                self._dominant, self._has_asked = None, True
        elif (text := self._find_dominant(others)) is not None:
            texts.append(text)
        if not self._away_until and self._dominant is None:
            self._alone_since = None
        return texts

    def _find_dominant(self, others: Collection[str]) -> str | None:
        """Set a worker aside that delivered nearly all zero-signal groups; return a line on it."""
        counts = self._since_useful
        num_groups = sum(counts.values())
        if num_groups < self._max_zero_signal_groups or self._has_asked:
            return None
        dominant = max(counts, key=lambda name: counts[name])
        is_only_one = all(name == dominant for name in others)
        if is_only_one or num_groups - counts[dominant] >= self._quorum:
            return None
        self._dominant = dominant
        return (
            f"{dominant} is set aside until other workers have delivered {self._quorum} "
            f"groups: nothing could be learned from the last {num_groups}, of which "
            f"{counts[dominant]} are its own"
        )
