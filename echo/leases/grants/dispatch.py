"""Dispatch decides which worker gets a new, a moved or a copied group.

The three decisions use the estimates of `leases/grants/finish_times.py`:

* dispatch: the next group goes to the worker that should finish this group first;
* moves: a worker gives up a lease, and an idle worker gets the group;
* hedging: a running group that is predicted to be late is copied to a faster, idle worker.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from echo.leases.groups import LeaseRecord

# --- Dispatch: the next group goes to the worker that should finish it first ---
#
# A round places all groups that admission allows, one after the other. Each is placed on the worker
# that should finish it first. The predicted finish is the time at which the worker is done with its
# earlier groups, plus the time of the group itself. A group that is placed on a worker with free
# capacity is granted. A group that is placed on a full worker stays with the learner until that
# worker has free capacity, even if a slower worker could take it now.
#
# A worker that should install the newest version soon is treated as having this version from the
# expected instant on. Otherwise the first worker to install the version would be granted all the
# groups that the version makes room for.
#
# An engine becomes slower the more groups it runs, so each further group of a worker is predicted
# to take longer. Otherwise an engine with places for a whole batch would be granted the whole batch
# because it was ready a moment before its equals.
# So workers get leases in proportion to their speeds. Admission allows the groups that the next S +
# 1 steps consume. A group that comes after these steps is stale. So a worker gets no group that it
# would finish after the other workers have finished all of these.


FULL_SLOWDOWN = 2.0
"""In a full engine, a group takes this many times as long as in an empty engine.

The value is an assumption, because the learner rarely sees an engine at more than one load. With a
higher value, groups go to workers with fewer groups, even if these workers become free later.
"""


def slowdown(num_groups: float, num_places: int) -> float:
    """Return the factor by which a group takes longer in a shared engine than alone.

    The engine samples `num_groups` groups, and has places for `num_places` groups.
    """
    return 1 + (FULL_SLOWDOWN - 1) * min(1.0, num_groups / num_places)


@dataclass(slots=True)
class Load:
    """How busy a worker is. The groups that the present round has given to it count, too."""

    node_id: str
    capacity: int
    """Number of groups that the worker can hold."""
    num_held: int
    most_promised: int
    """Limit on the number of promised groups. Once it is reached, the worker gets no further group.

    The limit is for the worker's present version.
    """
    most_soon: int
    """The value that `most_promised` will have with the version that the worker should install
    soon."""
    group_s: float = 1.0
    """Seconds that one group takes alone in the worker's engine."""
    trial_s: float = 1.0
    """Replaces `group_s` while the worker has no lease. The longer the worker is idle, the smaller
    this value is."""
    free_at: list[float] = field(default_factory=lambda: [0.0])
    """For each place in the worker's engine, the time at which it becomes free. The list is a
    heap."""

    @property
    def has_space(self) -> bool:
        """Whether the worker can hold one more group."""
        return self.num_held < self.capacity

    @property
    def num_free(self) -> int:
        """Number of groups that the worker could begin at once."""
        return len(self.free_at) - self.num_held

    @property
    def share(self) -> float:
        """Share of the worker's capacity that is in use."""
        return self.num_held / max(1, self.capacity)

    @property
    def finish_at(self) -> float:
        """Time at which the worker should finish a group that it is granted now."""
        group_s = self.group_s if self.num_held else self.trial_s
        return self.free_at[0] + group_s * slowdown(self.num_held + 1, len(self.free_at))

    @property
    def full_group_s(self) -> float:
        """Seconds that a group takes in the worker's engine if the engine is full."""
        return self.group_s * FULL_SLOWDOWN

    def add(self) -> None:
        """Count one more group as given to the worker."""
        heapq.heapreplace(self.free_at, self.finish_at)
        self.num_held += 1


def by_finish(loads: Sequence[Load], *, num_promised: int) -> list[str]:
    """Give each group to the worker that should finish it first.

    Return one worker for each group to grant now, in the order of the groups. A group is not
    granted now if its worker has no space, or must first install a newer version.

    Args:
        loads: the workers that can sample; modified by the placement.
        num_promised: number of groups consumed, buffered or running, as admission counts them.
    """
    granted: list[str] = []
    with_space = [load for load in loads if load.has_space]
    limit = max((load.most_promised for load in with_space), default=0)
    num_with_space = len(with_space)
    heap = [(load.finish_at, load.share, load.node_id, load) for load in loads]
    heapq.heapify(heap)
    while heap and num_with_space and num_promised < limit:
        _, _, node_id, load = heapq.heappop(heap)
        if load.most_soon <= num_promised:
            num_with_space -= load.has_space
            continue
        if load.has_space and load.most_promised > num_promised:
            granted.append(node_id)
        load.add()
        num_with_space -= load.num_held == load.capacity
        num_promised += 1
        heapq.heappush(heap, (load.finish_at, load.share, node_id, load))
    return granted


# --- Moves: a holder gives up a lease for a worker with nothing to do ---
#
# Moves happen while the next batch waits for running groups and admission has no further group. An
# idle worker, such as one that has just joined, then gets leases of other workers. The learner asks
# their holder for them (`Reclaim`). The holder gives up each lease that it has not begun. The
# holder's next heartbeat, which no longer lists the lease, confirms this. Then the group is granted
# to the idle worker.
#
# A lease moves if the idle worker should finish the group sooner than the holder by more than a
# group's time and a heartbeat; a smaller gain does not justify the transfer. The holder must have
# made a group, because before that the estimate of its speed is too rough.
#
# Until the first group of a run is made, lengths and speeds are unknown and all workers count as
# equal. A newcomer then gets an equal number of groups, so that the first batch does not wait for
# the worker that was ready first. When a newcomer joins, most engines have begun all of their
# groups, so begun groups move as well, together with their partial rollouts. Episodes of
# environments and agents do not move once begun.
#
# A lost request is repeated. If a holder keeps a lease for RELEASE_BEATS heartbeats, it is not
# asked again, and the idle worker copies the group: the holder may be dead or report falsely.


RELEASE_BEATS = 4
"""If a worker ignores a request to give up a lease for this many heartbeats, the request has
failed. A worker answers in its next heartbeat, but messages may be lost."""


def moves(
    waiting: Sequence[RunningGroup], helpers: Sequence[Load], *, least_gain_s: float
) -> list[tuple[LeaseRecord, str]]:
    """Choose the leases to move. Return each with the worker that gets its group.

    Args:
        waiting: groups that have not begun, each with its predicted finish at its holder.
        helpers: workers with a free place; the moves modify these objects.
        least_gain_s: a move must make a group finish earlier by at least this number of seconds.
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
    """A worker that may take over leases from others, before the run's first group is finished."""

    node_id: str
    num_held: int
    capacity: int
    """Number of groups that the worker can hold."""


def even_out(
    held: Mapping[str, Sequence[LeaseRecord]], newcomers: Sequence[Newcomer]
) -> list[tuple[LeaseRecord, str]]:
    """Choose the leases to move, so that all workers hold about the same number of leases.

    Each lease is returned with its new worker.

    Args:
        held: worker -> its leases that may move; the last lease moves first.
        newcomers: the workers that leases move to; the moves modify these objects.
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
# Copies are made only while the next batch is incomplete, and only by workers that have a free
# place but that admission allows no further group. So copies cost power and delay no other group.
# Two rules:
#
# * A group without a copy is copied if the copy, sampled from the start, should be done `factor`
#   times sooner than the original. The copying worker must have made a group.
# * The first rule depends on what the holder reports, which may be false. So a group is also copied
#   once its newest lease is AGE_FACTOR times as old as a group usually takes on the idle worker,
#   whatever its holders report and however often it was copied. This rule applies with hedging
#   switched off as well.
#
# The group with the latest predicted finish is copied first. A copy has the seed of the original.
# If both sample from the same version, both have the same text. With different texts, the first
# result to arrive would more often be the shorter one, and training would prefer short texts.


AGE_FACTOR = 8.0
"""A group may be copied once its lease is older than this many times the seconds that a group
usually takes. With a much lower value, the long groups of honest workers would be copied, too.
"""


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A group that a worker is sampling."""

    record: LeaseRecord
    done_at: float
    """Predicted time at which the group is finished."""
    num_tokens: float
    """Predicted number of tokens of the group's longest completion when the group is finished."""


@dataclass(slots=True)
class Helper:
    """An idle worker that may copy groups.

    The worker has a free place, but admission allows no new group for this worker.
    """

    node_id: str
    speed: float | None
    """Tokens per second that one group gets; None if the worker has made no group, or if agents
    play the groups. Then only the second rule applies."""
    num_places: int
    """Number of groups that the worker can begin now."""
    group_s: float = math.inf
    """Seconds that a group usually takes on this worker. If this worker has made no group, these
    are the usual seconds on all workers."""


def hedges(
    groups: Sequence[RunningGroup],
    helpers: Sequence[Helper],
    *,
    holders: Mapping[int, Collection[str]],
    factor: float | None,
    now: float,
) -> list[tuple[LeaseRecord, str]]:
    """Choose the leases to copy. Return each with the worker that gets the copy.

    Args:
        groups: running groups, each with its newest lease.
        helpers: idle workers; modified by the copies.
        holders: group -> the workers that have a lease of it.
        factor: a group is copied if its lease is expected to need at least `factor` times as long
            as the copy. If None, only the lease's age decides.
        now: the present time, seconds.
    """
    fastest_first = sorted(helpers, key=lambda helper: (-(helper.speed or 0.0), helper.node_id))
    chosen: list[tuple[LeaseRecord, str]] = []
    for group in sorted(groups, key=lambda g: (-g.done_at, g.record.group_id)):
        having = holders[group.record.group_id]
        free = (h for h in fastest_first if h.num_places and h.node_id not in having)
        helper = next(free, None)
        if helper is None:
            continue  # every free worker has a lease of it
        age_s = now - group.record.granted_at
        is_old = age_s > AGE_FACTOR * helper.group_s
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
