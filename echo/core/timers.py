"""Provides deadlines, limits on how often work runs, and bounded maps, for thousands of nodes.

* `Paced` limits how often the learner does work on all nodes, such as granting leases and planning
  links. Nearly every message requests such work. In a small fleet, the work is done at once. In a
  large fleet, the interval between two rounds of the work grows with the number of nodes. So the
  cost per second stays constant.
* `Deadlines` finds the earliest of many moving deadlines without searching all of them.
* `OncePerMinute` limits the rate of log lines about misbehaving peers.
* `earliest` returns the earliest of a few instants. Roles call this function after every message.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, Protocol, TypeVar

# --- bounded map ----------------------------------------------------------------------------------


RecentKey = TypeVar("RecentKey")
Value = TypeVar("Value")


MAX_NAMES_KEPT = 10_000
"""Number of names of nodes or peers for which a `RecentMap` keeps a fact, also of nodes that have
left. If nodes join under ever new names, the oldest names are forgotten, and memory stays bounded.
"""


class RecentMap(Generic[RecentKey, Value]):
    """A map that keeps only the last `max_entries` entries.

    So peers cannot fill the memory with entries.
    """

    def __init__(self, *, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: dict[RecentKey, Value] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: RecentKey) -> bool:
        return key in self._entries

    def __setitem__(self, key: RecentKey, value: Value) -> None:
        self._entries.pop(key, None)
        self._entries[key] = value
        if len(self._entries) > self.max_entries:
            del self._entries[next(iter(self._entries))]

    def get(self, key: RecentKey) -> Value | None:
        return self._entries.get(key)

    def as_dict(self) -> dict[RecentKey, Value]:
        """Return the entries as a dict, in the order in which they were written."""
        return dict(self._entries)

    def discard(self, key: RecentKey) -> None:
        self._entries.pop(key, None)

    def discard_value(self, value: Value) -> None:
        self._entries = {k: v for k, v in self._entries.items() if v != value}


# --- deadlines and pacing -------------------------------------------------------------------------


MANY_NODES = 64
"""If a fleet has at most this many nodes, `Paced` never delays the work."""

LOG_PERIOD_S = 60.0
"""Log lines on the same subject are at least this many seconds apart. So the log of a day stays
readable, and an operator waits at most a minute for news.
"""

MAX_LINES = 100
"""Largest number of log lines per minute for all peers together. A limit per peer is not
sufficient, because a peer can invent names."""

Key = TypeVar("Key")


def earliest(*instants: float | None) -> float | None:
    """Return the earliest of the instants that are not None.

    The result is None if all instants are None.
    """
    first = None
    for at in instants:
        if at is not None and (first is None or at < first):
            first = at
    return first


class Paced:
    """Work that is requested often but done at a limited rate."""

    def __init__(self, node_s: float) -> None:
        """Start in a state in which no round of the work is requested.

        Args:
            node_s: seconds per node. In a large fleet, the interval between two rounds is at least
                `node_s` times the number of nodes.
        """
        self._node_s = node_s
        self._done_at = -math.inf
        self.deadline: float | None = None
        """The time of the next run; None if no run is requested."""

    def may(self, num_nodes: int, *, now: float) -> bool:
        """Return whether the work may run now.

        If the work may not run now, set `deadline` to the time when it may run.
        """
        pause_s = self._node_s * num_nodes if num_nodes > MANY_NODES else 0.0
        if now >= self._done_at + pause_s:
            self._done_at, self.deadline = now, None
            return True
        self.deadline = self._done_at + pause_s
        return False

    def want(self, *, now: float) -> None:
        """Request a round of the work as soon as possible. A pending request keeps its deadline."""
        if self.deadline is None:
            self.deadline = now

    def is_due(self, *, now: float) -> bool:
        """Return whether a run of the work is requested and its deadline has passed."""
        return self.deadline is not None and now >= self.deadline


class OncePerMinute:
    """Limits the number of log lines per minute: one for each peer and reason, MAX_LINES in total.

    The next line for the same peer and reason contains the number of omitted lines.
    """

    def __init__(self) -> None:
        self._logged: RecentMap[tuple[str, str], tuple[float, int]] = RecentMap(
            max_entries=MAX_LINES
        )
        self._minute_at = -math.inf
        self._num_lines = 0

    def line(self, peer: str, reason: str, text: str, *, now: float) -> str | None:
        """Return the line to log about a peer, or None if the line is omitted."""
        logged_at, num_left_out = self._logged.get((peer, reason)) or (-math.inf, 0)
        if now >= self._minute_at + LOG_PERIOD_S:
            self._minute_at, self._num_lines = now, 0
        if now < logged_at + LOG_PERIOD_S or self._num_lines >= MAX_LINES:
            self._logged[peer, reason] = logged_at, num_left_out + 1
            return None
        self._num_lines += 1
        self._logged[peer, reason] = now, 0
        return f"{text} ({num_left_out} more of these before)" if num_left_out else text


Item = TypeVar("Item", contravariant=True)


class DeadlineOwner(Protocol[Item]):
    """Returns the current deadlines of items."""

    def deadline_of(self, item: Item) -> float | None:
        """Return the current deadline of an item; None if the item has ended."""


class Deadlines(Generic[Key]):
    """Orders items by their deadlines, which may move to later instants.

    When a stored deadline is the earliest, the owner provides the item's current deadline. A later
    deadline replaces the stored deadline. A deadline must not move to an earlier instant.
    """

    def __init__(self, owner: DeadlineOwner[Key]) -> None:
        """Make an empty collection. `owner` is asked for the current deadlines of items."""
        self._owner = owner
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def add(self, item: Key) -> None:
        """Watch an item until the item has ended or its deadline is reached."""
        at = self._owner.deadline_of(item)
        if at is not None:
            self._serial += 1
            heapq.heappush(self._heap, (at, self._serial, item))

    @property
    def first(self) -> float | None:
        """Return the earliest deadline of all items; None if there are no items."""
        heap = self._heap
        while heap:
            at, serial, item = heap[0]
            true_at = self._owner.deadline_of(item)
            if true_at == at:
                return at
            if true_at is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (true_at, serial, item))
        return None

    def take_due(self, *, now: float) -> list[Key]:
        """Remove the items whose deadline has passed.

        Return them in the order of their deadlines.
        """
        due = []
        while (first := self.first) is not None and first <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
