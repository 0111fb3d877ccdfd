"""Deadlines, pacing and bounded maps for thousands of nodes.

* `Paced`: work that goes through all nodes (grant leases, plan the links) is asked for by nearly
  every message. In a small fleet it is done at once; in a large one no more often than in
  proportion to its size, so that what it costs per second does not depend on the size.
* `Deadlines`: the first of many instants that move, without looking at all of them.
* `OncePerMinute`: what is logged about peers that misbehave.
* `earliest`: of a few instants; roles ask for it after every message.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, Protocol, TypeVar

# --- bounded map ----------------------------------------------------------------------------------


RecentKey = TypeVar("RecentKey")
Value = TypeVar("Value")


class RecentMap(Generic[RecentKey, Value]):
    """The last `max_entries` entries written, by key: for what a peer's messages make grow."""

    def __init__(self, *, max_entries: int) -> None:
        """Start empty."""
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
        """Return the entries, the oldest first."""
        return dict(self._entries)

    def discard(self, key: RecentKey) -> None:
        self._entries.pop(key, None)

    def discard_value(self, value: Value) -> None:
        self._entries = {k: v for k, v in self._entries.items() if v != value}


# --- deadlines and pacing -------------------------------------------------------------------------


MANY_NODES = 64
"""Fleets up to this size are served at once."""

MINUTE_S = 60.0
MAX_LINES = 100
"""Lines in a minute about all peers together: names can be made up."""

Key = TypeVar("Key")


def earliest(*instants: float | None) -> float | None:
    """Return the first of some instants, where None stands for never; None if all are."""
    first = None
    for at in instants:
        if at is not None and (first is None or at < first):
            first = at
    return first


class Paced:
    """Something that is wanted often, and done when it can be afforded."""

    def __init__(self, node_s: float) -> None:
        """Want nothing.

        Args:
            node_s: seconds for each node between doing it twice, in a fleet of many.
        """
        self._node_s = node_s
        self._done_at = -math.inf
        self.deadline: float | None = None
        """When it is to be done; None if it is not wanted."""

    def may(self, num_nodes: int, *, now: float) -> bool:
        """Return whether to do it now; if not, it is wanted at `deadline`."""
        pause_s = self._node_s * num_nodes if num_nodes > MANY_NODES else 0.0
        if now >= self._done_at + pause_s:
            self._done_at, self.deadline = now, None
            return True
        self.deadline = self._done_at + pause_s
        return False

    def want(self, *, now: float) -> None:
        """Have it done now, or when it can be afforded."""
        if self.deadline is None:
            self.deadline = now

    def is_due(self, *, now: float) -> bool:
        """Return whether it is wanted and can be afforded now."""
        return self.deadline is not None and now >= self.deadline


class OncePerMinute:
    """Lines about peers: one for each peer and reason in a minute, and not too many in all.

    Lines that are left out are counted, and the next line of that peer and reason tells their
    number.
    """

    def __init__(self) -> None:
        """Start with nothing said."""
        self._said: RecentMap[tuple[str, str], tuple[float, int]] = RecentMap(max_entries=MAX_LINES)
        self._minute_at = -math.inf
        self._num_lines = 0

    def say(self, peer: str, reason: str, text: str, *, now: float) -> str | None:
        """Return the line to log, or None if it is to be left out."""
        said_at, num_left_out = self._said.get((peer, reason)) or (-math.inf, 0)
        if now >= self._minute_at + MINUTE_S:
            self._minute_at, self._num_lines = now, 0
        if now < said_at + MINUTE_S or self._num_lines >= MAX_LINES:
            self._said[peer, reason] = said_at, num_left_out + 1
            return None
        self._num_lines += 1
        self._said[peer, reason] = now, 0
        return f"{text} ({num_left_out} more of these before)" if num_left_out else text


Item = TypeVar("Item", contravariant=True)


class DeadlineOwner(Protocol[Item]):
    """An owner of items, which knows when each is due."""

    def deadline_of(self, item: Item) -> float | None:
        """Return an item's true deadline; None for one that has ended."""


class Deadlines(Generic[Key]):
    """Items whose deadlines move to later instants, and the first of them.

    An item's true deadline is asked for when the noted one comes first, and noted again if it has
    moved; one that has become earlier than it was would be missed.
    """

    def __init__(self, owner: DeadlineOwner[Key]) -> None:
        """Start empty."""
        self._owner = owner
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def add(self, item: Key) -> None:
        """Watch an item until it is over or has been due."""
        at = self._owner.deadline_of(item)
        if at is not None:
            self._serial += 1
            heapq.heappush(self._heap, (at, self._serial, item))

    @property
    def first(self) -> float | None:
        """The first deadline; None without one."""
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
        """Return the items whose deadline has come, in order; they are no longer watched."""
        due = []
        while (first := self.first) is not None and first <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
