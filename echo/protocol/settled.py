"""Which groups have come to their end, in little memory."""

from __future__ import annotations

from collections.abc import Iterable


class SettledGroups:
    """Ids of the groups that were accepted or ended; nearly all ids below some point are."""

    def __init__(self, group_ids: Iterable[int]) -> None:
        """Start with these ids."""
        self._all_below = 0
        self._others: set[int] = set()
        for group_id in group_ids:
            self.add(group_id)

    def __contains__(self, group_id: int) -> bool:
        return 0 <= group_id < self._all_below or group_id in self._others

    def add(self, group_id: int) -> None:
        """Settle a group."""
        if group_id >= self._all_below:
            self._others.add(group_id)
        while self._all_below in self._others:
            self._others.remove(self._all_below)
            self._all_below += 1
