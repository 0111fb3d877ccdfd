"""A dictionary of bounded size that forgets the entry that was written longest ago."""

from __future__ import annotations

from typing import Generic, TypeVar

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
        """Return the value of `key`, or None."""
        return self._entries.get(key)

    def discard(self, key: RecentKey) -> None:
        """Forget `key`, if it is there."""
        self._entries.pop(key, None)

    def discard_value(self, value: Value) -> None:
        """Forget every key with this value."""
        self._entries = {k: v for k, v in self._entries.items() if v != value}
