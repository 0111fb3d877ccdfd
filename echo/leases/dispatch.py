"""Dispatch of groups to workers: which worker gets a group, a running one included.

Three decisions, all from the estimates of `leases/finish_times.py`:

* dispatch: the next group goes to the worker that should finish it first;
* moves: a holder gives up a lease for a worker with nothing to do;
* hedging: a running group that is expected late is also given to a faster, idle worker.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from echo.leases.groups import LeaseRecord

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
