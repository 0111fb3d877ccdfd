"""Which worker should get the next group: the one that will have finished it first.

All groups that admission allows are placed on paper, one after the other, each on the worker whose
predicted finish (what it holds, and what was placed on it before, divided by its speed) is the
earliest. A group that falls to a worker with room is granted; one that falls to a worker that has
none now stays with the learner until that worker asks again, even if a slower one has room.

A worker that has not installed the newest version yet, and should have it soon, counts as if it
had, from that instant on: otherwise the first to install it would be given all that it makes room
for.

An engine is slower the more groups are in it. So what is given to one worker while another has
nothing to do counts as that much longer: otherwise an engine with places for a whole batch would
get all of it, for being ready a moment before its equals.

So the leases are in proportion to the speeds, and a worker gets nothing that it would finish later
than the others can finish everything that admission allows. That is no loss: such a group would
come too late. Admission allows what the next S + 1 steps consume, and after those it is stale.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

FULL_SLOWDOWN = 2.0
"""How many times longer a group takes in a full engine than in an empty one.

An assumption: what engines show is nearly always measured at one load. It decides only how late
another worker may be ready that is preferred for having less to do.
"""


def slowdown(num_groups: float, num_places: int) -> float:
    """Return how many times longer a group takes among so many than in an empty engine."""
    return 1 + (FULL_SLOWDOWN - 1) * min(1.0, num_groups / num_places)


@dataclass(slots=True)
class Load:
    """One worker, and what it has to do."""

    node_id: str
    capacity: int
    """Groups that it can hold."""
    num_held: int
    most_promised: int
    """It gets no group once so many are promised to the batches that may train on its version."""
    most_soon: int
    """The same for the version that it will have soon."""
    group_s: float = 1.0
    """Seconds that it would need for one group in an empty engine."""
    hoped_s: float = 1.0
    """The same for one that it is tried with while it holds none; at most `group_s`."""
    free_at: list[float] = field(default_factory=lambda: [0.0])
    """When each of its places is free for another group, not before now; a heap."""

    @property
    def has_room(self) -> bool:
        """Whether it can hold another group."""
        return self.num_held < self.capacity

    @property
    def share(self) -> float:
        """The part of its capacity that is in use."""
        return self.num_held / max(1, self.capacity)

    @property
    def finish_at(self) -> float:
        """When it would have finished another group."""
        group_s = self.group_s if self.num_held else self.hoped_s
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
    with_room = [load for load in loads if load.has_room]
    limit = max((load.most_promised for load in with_room), default=0)
    num_with_room = len(with_room)
    heap = [(load.finish_at, load.share, load.node_id, load) for load in loads]
    heapq.heapify(heap)
    while heap and num_with_room and num_promised < limit:
        _, _, node_id, load = heapq.heappop(heap)
        if load.most_soon <= num_promised:
            num_with_room -= load.has_room
            continue
        if load.has_room and load.most_promised > num_promised:
            granted.append(node_id)
        load.add()
        num_with_room -= load.num_held == load.capacity
        num_promised += 1
        heapq.heappush(heap, (load.finish_at, load.share, node_id, load))
    return granted
