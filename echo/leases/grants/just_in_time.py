"""Grants groups just in time: as late as the learner allows, so that the groups are fresh.

Admission (`leases/grants/admission.py`) bounds the number of groups that may be promised. If all
these groups were granted at once, nearly all would reach the bound on staleness before they are
trained on. The learner needs only few of these groups so early. `JustInTime` delays a group while
the next version can still sample the group in time:

    need(b) = (b + 1) B - consumed                    groups that must be accepted for batch b
    have(b) = accepted
            + running groups that should be done by max(ready(b) - margin, soonest)
            + delayed groups that would be done by ready(b) - margin, if each began at
              arrival(worker) or, if earlier, when its worker's running groups are done; workers
              whose groups would then reach the bound on staleness are left out. The delayed groups
              are those that admission allows, or will allow with the next version
    due     = max over b of need(b) - have(b)         groups to grant now, at least 0

* B is the number of groups per step.
* consumed is B times the number of finished steps. accepted is the number of accepted groups that
  no finished step has used.
* ready(b) is the time at which the learner can begin to train on batch b.
* arrival(worker) is the time at which the worker should install the next version.
* soonest is the time at which a group that is granted now should be done. Replacing a running group
  helps only if that group should be done later than soonest.

Only a share of recent groups was useful. Running and delayed groups are counted in proportion to
this share, so that enough useful groups arrive. If the fleet is too slow, all groups are due, so no
group is delayed.

**ready(b)** is the beginning of the newest step plus one period for each step from there to b. The
period is the median time from the beginning of a step until the learner can begin the next step.

**arrival(worker)** is the end of the optimizer step that makes the next version, plus the worker's
usual delay from there to the installation. The next version is assumed to be one period, in steps,
after the newest one. The period is the smaller of the last two differences between versions,
because broadcasts that outlast the period skip versions. A version that is late is expected at any
moment.

**margin** is a safety margin, in seconds, against errors of the estimates, such as the lengths of
groups. If the learner has waited for a batch, the margin grows by this wait, but at most by the
longest delay of the batch's groups. At a step without such a wait, the margin shrinks by the larger
of two times: WAIT_SHARE of the step's time, and SPARE_SHARE of the least spare time of recent
batches. In equilibrium the learner therefore waits about WAIT_SHARE of its time for fresher groups.

**Open**: no group is delayed in two cases. In the first case the learner has waited for more than
OPEN_SHARE of its recent time, not counting the longest wait. In the second case the fleet without
its fastest worker would be too slow for the learner. Groups that were made early then cover the
loss of a worker. Until a step has been timed and a version installed, groups are granted for two
batches. If there are more free places, groups are granted for all of them.

The method is flow control by the bandwidth-delay product, as in BBR. The queue to keep short
consists of the groups that wait for the learner.
"""

from __future__ import annotations

import heapq
import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy

from echo.core.timers import RecentMap
from echo.fleet.overlap import MAX_LOSS, OPEN_SHARE, SLACK
from echo.leases.book import MAX_WORKERS
from echo.leases.grants.dispatch import Load

RECENT_STEPS = 8
"""Times and waits are estimated from this many of the newest steps."""

SPARE_STEPS = 16
"""The least spare time is taken over this many of the newest batches."""

WAIT_SHARE = 0.007
"""Share of its time for which the learner waits in the long run. In exchange, groups are
fresher."""

FIRST_MARGIN = 0.1
"""The margin at the start, as a multiple of the duration of a step."""

MAX_MARGIN = 4.0
"""The largest margin, as a multiple of the duration of a step."""

SPARE_SHARE = 0.05
"""Each step reduces the margin by this share of the least spare time that recent batches had."""

REST = 1 / 32
"""A decision on how many groups are due stays valid for this share of the duration of a step."""

MAX_REST_S = 5.0
"""A decision on how many groups are due stays valid for at most this many seconds."""

RECENT_GROUPS = 64
"""The share of useful groups is estimated from this many of the newest groups."""

MAX_BATCHES = 64
"""Number of future batches that are considered. In practice, no staleness bound is larger than
this."""

MAX_STEPS = 256
"""For this many of the newest steps, the time at which the step ended is remembered."""


class JustInTime:
    """Admission allows some groups. This class decides how many of them are granted now."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, step: int = 0) -> None:
        """Start for a run that has made `step` optimizer steps. Nothing is measured yet."""
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._step = step
        self._is_training = False
        self._begun_at: float | None = None
        """Time at which the newest step began; None before the first step."""
        self._made_at: RecentMap[int, float] = RecentMap(max_entries=MAX_STEPS)
        """For each version's step, the time at which the optimizer step that made the version
        ended."""
        self._train_s: deque[float] = deque(maxlen=RECENT_STEPS)
        """For each recent step, the seconds from its beginning to its end."""
        self._busy_s: deque[float] = deque(maxlen=RECENT_STEPS)
        """For each recent step, the seconds from its beginning until the learner could begin the
        next step."""
        self._waited_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._spare_s: deque[float] = deque(maxlen=SPARE_STEPS)
        """For each recent batch, the seconds from its completion until the learner took it."""
        self._useful: deque[bool] = deque(maxlen=RECENT_GROUPS)
        """For each recent group, whether it was useful."""
        self._complete_at: float | None = None
        """Time at which the next batch became complete; None while the batch is incomplete."""
        self._delay_s: RecentMap[str, float] = RecentMap(max_entries=MAX_WORKERS)
        """For each worker, the seconds from the end of a step until the worker has installed the
        step's version."""
        self._installed: RecentMap[str, int] = RecentMap(max_entries=MAX_WORKERS)
        """For each worker, the step of the version that it has installed."""
        self._versions = (step, step, step)
        """Steps of the last three versions that at least one worker has installed."""
        self._margin_s: float | None = None
        self._held_since: dict[int, float] = {}
        """For each delayed group, the time at which it was first delayed. Groups are numbered as
        admission counts them."""
        self._delayed_s: dict[int, float] = {}
        """For each batch, the longest time, in seconds, for which one of its groups was delayed."""
        self.deadline: float | None = None
        """Time at which to decide again, if no event comes before then; None if no group is
        delayed."""

    @property
    def margin_s(self) -> float:
        """Seconds by which groups should be accepted before the learner needs them."""
        return self._margin_s or 0.0

    @property
    def is_holding(self) -> bool:
        """Whether the last decision delayed groups although a worker could have begun them."""
        return bool(self._held_since)

    def is_resting(self, *, now: float) -> bool:
        """Return whether the last decision is still valid. It is valid until its deadline."""
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
        return self._is_training and self.deadline is not None

    # --- events ----------------------------------------------------------------------------------

    def begin_step(self, *, waited_s: float, now: float) -> None:
        """Record that the learner has taken a batch. It waited `waited_s` seconds for the batch."""
        if self._begun_at is not None:
            self._busy_s.append(now - waited_s - self._begun_at)
            spare_s = 0.0 if self._complete_at is None else now - self._complete_at
            self._waited_s.append(waited_s)
            self._adjust_margin(waited_s, spare_s)
        self._begun_at, self._is_training = now, True
        self._complete_at = self.deadline = None

    def end_step(self, step: int, *, now: float) -> None:
        """Record that an optimizer step has ended. `step` is the number of steps made so far."""
        if self._begun_at is not None:
            self._train_s.append(now - self._begun_at)
        self._step, self._is_training, self.deadline = step, False, None
        self._made_at[step] = now

    def stored(self, *, is_useful: bool) -> None:
        """Record whether the learner can learn something from an accepted group."""
        self._useful.append(is_useful)

    def installed(self, worker_id: str, step: int, *, now: float) -> None:
        """Record that a worker has reported the version of `step` as installed."""
        before = self._installed.get(worker_id)
        if before == step:
            return
        self._installed[worker_id], self.deadline = step, None
        if step > self._versions[-1]:
            self._versions = (*self._versions[1:], step)
        made_at = self._made_at.get(step)
        if made_at is not None and before is not None:
            delay_s, known_s = now - made_at, self._delay_s.get(worker_id)
            self._delay_s[worker_id] = delay_s if known_s is None else (known_s + delay_s) / 2

    def _adjust_margin(self, waited_s: float, spare_s: float) -> None:
        step_s = self._step_s
        margin_s = FIRST_MARGIN * step_s if self._margin_s is None else self._margin_s
        caused_s = min(waited_s, self._delayed_s.pop(self._step, 0.0))
        if caused_s > 0:
            self._spare_s.clear()
            self._margin_s = min(margin_s + caused_s, MAX_MARGIN * step_s)
            return
        self._spare_s.append(spare_s)
        is_known = len(self._spare_s) == SPARE_STEPS
        least_spare_s = min(self._spare_s) if is_known else 0.0
        lower_s = max(WAIT_SHARE * step_s, SPARE_SHARE * least_spare_s)
        self._margin_s = max(0.0, margin_s - lower_s)

    # --- the decision ----------------------------------------------------------------------------

    def num_due(
        self,
        loads: Sequence[Load],
        installed: Sequence[int],
        *,
        running: Iterable[float],
        num_accepted: int,
        num_promised: int,
        now: float,
    ) -> int | None:
        """Return how many groups to grant now. Return None to grant all that admission allows.

        Args:
            loads: the workers that can sample. This method may change their limits: if groups are
                delayed while the learner trains, a worker that should soon install a newer version
                is granted no group now.
            installed: the step of the version that each worker has installed.
            running: the time at which each running group should be done.
            num_accepted: number of accepted groups that no finished step has used.
            num_promised: number of groups consumed, accepted or running, as admission counts them.
            now: the present time, seconds.
        """
        size, first = self._groups_per_step, self._step + self._is_training
        if self._complete_at is None and num_accepted >= (first - self._step + 1) * size:
            self._complete_at = now
        num_allowed = max((load.most_promised for load in loads), default=0) - num_promised
        if num_allowed <= 0:
            self._held_since.clear()
            return 0
        num_free = sum(max(0, load.num_free) for load in loads)
        if not self._is_timed(loads):
            return min(num_allowed, max((self._step + 2) * size - num_promised, num_free))
        if self._is_open or not self._is_redundant(loads):
            self._held_since.clear()
            return None
        due = min(
            num_allowed,
            self._num_needed(loads, installed, running, num_accepted, num_promised, now),
        )
        if due < num_allowed:
            self.deadline = now + min(REST * self._step_s, MAX_REST_S)
        self._note_held(num_promised, due, min(num_allowed, num_free), now)
        if self._is_training and due < num_allowed:
            for load in loads:
                if load.most_soon > load.most_promised:
                    load.most_promised = 0
        return due

    def _num_needed(
        self,
        loads: Sequence[Load],
        installed: Sequence[int],
        running: Iterable[float],
        num_accepted: int,
        num_promised: int,
        now: float,
    ) -> int:
        """Return how many groups the next batches will lack if no group is granted now."""
        size, first = self._groups_per_step, self._step + self._is_training
        most = max(load.most_promised for load in loads)
        num_held = min(most, (first + MAX_BATCHES) * size) - num_promised
        num_next = num_held + self._period * size
        share = self._useful_share
        soonest = min((load.finish_at for load in loads if load.num_free > 0), default=now)
        made_at = sorted(running)
        # A group that is not useful, even a running one, is replaced by a further group. A running
        # group that is late for the last batch that admission allows is replaced by a group of the
        # next version. Without these groups, a slow worker would keep the queue full.
        num_later = math.ceil((num_next + (1 - share) * len(made_at)) / share)
        held_at = sorted(self._held_done_at(loads, installed, num_later, now))
        num_needed = 0
        for batch in range(first, (num_promised + num_held - 1) // size + 1):
            until = self._ready_at(batch, now) - self.margin_s
            num_made = bisect_right(made_at, max(until, soonest)) + bisect_right(held_at, until)
            num_missing = (batch + 1 - self._step) * size - num_accepted - share * num_made
            num_needed = max(num_needed, math.ceil(num_missing / share - 1e-9))
        return num_needed

    @property
    def _useful_share(self) -> float:
        return (sum(self._useful) + 1) / (len(self._useful) + 1)

    @property
    def _step_s(self) -> float:
        return statistics.median(self._busy_s)

    @property
    def _period(self) -> int:
        """Number of steps between two publications, as far as the installed versions tell it."""
        first, second, third = self._versions
        return max(1, min(second - first or third - second, third - second))

    @property
    def _is_open(self) -> bool:
        # Leave out the longest wait: the margin prevents single waits.
        waited_s = sum(self._waited_s) - max(self._waited_s)
        return waited_s > OPEN_SHARE * len(self._waited_s) * self._step_s

    def _is_redundant(self, loads: Sequence[Load]) -> bool:
        speeds = [len(load.free_at) / load.full_group_s for load in loads]
        lost = min(max(speeds), MAX_LOSS * sum(speeds))
        num_useful = (sum(speeds) - lost) * self._useful_share * self._step_s
        return num_useful >= self._groups_per_step

    def _is_timed(self, loads: Sequence[Load]) -> bool:
        is_known = any(load.node_id in self._delay_s for load in loads)
        return self._margin_s is not None and is_known

    def _ready_at(self, batch: int, now: float) -> float:
        """Return when the learner could begin to train on a batch."""
        assert self._begun_at is not None, "a step is timed"
        num_later = batch - self._step - self._is_training
        return max(now, self._begun_at + self._step_s) + num_later * self._step_s

    def _arrival(self, worker_id: str, installed: int, now: float) -> float:
        delay_s = self._delay_s.get(worker_id)
        if delay_s is None:
            return now
        step = self._versions[-1]
        if step <= installed:
            step += self._period
        made_at = self._made_at.get(step)
        if made_at is None:
            ahead = self._ready_at(step, now) - self._step_s
            made_at = ahead + statistics.median(self._train_s)
        return max(now, made_at + delay_s)

    def _held_done_at(
        self, loads: Sequence[Load], installed: Sequence[int], num_groups: int, now: float
    ) -> list[float]:
        """Return the times at which `num_groups` delayed groups would be done.

        A worker begins a delayed group when it installs the next version, or earlier if its present
        groups are done. Workers whose groups would then nearly reach the bound on staleness are
        left out.
        """
        heap = []
        for load, version in zip(loads, installed, strict=True):
            begin, busy_until = self._arrival(load.node_id, version, now), max(load.free_at)
            if busy_until > now:
                begin = min(begin, busy_until)
            later = copy(load)
            later.free_at = [max(begin, at) for at in load.free_at]
            if self._least_staleness(later) <= self._max_staleness - SLACK:
                heap.append((later.finish_at, later.share, later.node_id, later))
        heapq.heapify(heap)
        done_at = []
        for _ in range(num_groups if heap else 0):
            at, _, _, load = heap[0]
            done_at.append(at)
            load.add()
            heapq.heapreplace(heap, (load.finish_at, load.share, load.node_id, load))
        return done_at

    def _least_staleness(self, load: Load) -> int:
        """Return how stale a group becomes if it is begun right after a version was installed."""
        group_s = load.finish_at - load.free_at[0]
        late_s = (self._delay_s.get(load.node_id) or 0.0) + group_s + self.margin_s
        return math.ceil(late_s / self._step_s) + self._period - 1

    def _note_held(self, num_promised: int, due: int, num_possible: int, now: float) -> None:
        """Record since when each group is delayed.

        Groups that no free worker could begin are ignored.
        """
        size = self._groups_per_step
        for ordinal in range(num_promised, num_promised + due):
            since = self._held_since.pop(ordinal, now)
            delayed_s = self._delayed_s.get(ordinal // size, 0.0)
            self._delayed_s[ordinal // size] = max(delayed_s, now - since)
        for ordinal in range(num_promised + due, num_promised + num_possible):
            self._held_since.setdefault(ordinal, now)
        for ordinal in [known for known in self._held_since if known < num_promised]:
            del self._held_since[ordinal]
        for batch in [known for known in self._delayed_s if known < self._step]:
            del self._delayed_s[batch]
