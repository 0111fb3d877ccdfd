"""Watchdog: when a parent that does not deliver is asked again, and when it is left."""

from __future__ import annotations

from echo.core.timers import earliest
from echo.weights.link import ParentLink
from echo.weights.offers import Offers
from echo.weights.store import ItemStore
from echo.wire.messages import ItemId

WAIT_STALLS = 20
"""Silences (of stall_s) that a parent may wait itself; more than SLOW_AFTER_S in
`weights/sender.py`."""


class Watchdog:
    """Watches the parent of a node."""

    def __init__(self, link: ParentLink, offers: Offers, store: ItemStore) -> None:
        """Start with nothing awaited; everything is shared with the node's `Receiver`."""
        self._link, self._offers, self._store = link, offers, store
        self._since: float | None = None
        """Since when the parent has lived, and nothing new has come from it."""
        self._longest_pause_s = 0.0
        """The longest such pause that has ended."""

    def lives(self, *, now: float) -> None:
        """Note that the parent lives, though it may have brought nothing new."""
        self._link.lives(now=now)
        self._since = now if self._since is None else self._since

    def waits(self, *, again_s: float, now: float) -> None:
        """Note that the parent lives and waits itself, and within how long it says so again."""
        self._link.waits(again_s=again_s, now=now)
        self._since = now if self._since is None else self._since

    def came(self, *, now: float) -> None:
        """Note that something of the item has come."""
        if self._since is not None:
            self._longest_pause_s = max(self._longest_pause_s, now - self._since)
        self._since = None

    def clear(self) -> None:
        """Forget the parent."""
        self._since, self._longest_pause_s = None, 0.0

    def _gives_up_at(self, item: ItemId | None) -> float | None:
        """Return when the parent has waited too long for what it has announced."""
        link = self._link
        is_waiting = link.awaits_chunks and not link.writing_bytes and item in self._offers
        if self._since is None or not is_waiting:
            return None
        return self._since + max(WAIT_STALLS * link.stall_s, 4 * self._longest_pause_s)

    def deadline(self, item: ItemId | None) -> float | None:
        """Return when the parent should be given up, or asked again."""
        silent_at = self._link.deadline(self._store.chunk_bytes(item))
        return None if silent_at is None else earliest(silent_at, self._gives_up_at(item))

    def look(self, item: ItemId | None, *, now: float) -> tuple[str, bool]:
        """Return (why the parent is to be left, whether it is to be asked again).

        Args:
            item: what is being fetched.
            now: the present.
        """
        link = self._link
        if item is None:
            self._since = None
        gives_up_at = self._gives_up_at(item)
        if item is not None and gives_up_at is not None and now >= gives_up_at:
            waited_s = now - (self._since or 0.0)
            return f"it only says that it waits for {item[0]}, for {waited_s:.1f} s", False
        chunk_bytes = self._store.chunk_bytes(item)
        silent_at = link.deadline(chunk_bytes)
        if silent_at is None or now < silent_at:
            return "", False
        silence_s = link.silence_s(chunk_bytes, now=now)
        what = f"no chunk of {item[0]}" if link.awaits_chunks and item else "no answer"
        return (f"{what} for {silence_s:.1f} s", False) if link.silence(now=now) else ("", True)
