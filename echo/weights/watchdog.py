"""The watchdog: decides when a node asks a silent parent again, and when the node leaves a parent.

If a parent is silent for longer than `patience_s` (`link.py`), a node with a spare parent leaves
the parent. A node without a spare parent asks again, and leaves the parent at the second silence. A
parent that waits for a chunk sends Waiting repeatedly, and so is not silent.

Offers are not signed, so a parent may announce an item that it will never receive. A node leaves
such a parent when no chunk has arrived for WAIT_STALLS * stall_s. Behind a slow link, the pauses
between chunks are long. So the node waits at least four times the longest past pause.
"""

from __future__ import annotations

from echo.core.timers import earliest
from echo.weights.link import ParentLink
from echo.weights.offers import Offers
from echo.weights.store.store import ItemStore
from echo.wire.messages import ItemId

WAIT_STALLS = 20
"""How long a parent may send no new chunk, as a multiple of stall_s; longer than SLOW_AFTER_S of
`weights/sender.py`.
"""


class Watchdog:
    """Decides when a node asks its parent again, and when the node leaves the parent."""

    def __init__(self, link: ParentLink, offers: Offers, store: ItemStore) -> None:
        """Start with no awaited item. The `Receiver` shares `link`, `offers` and `store`."""
        self._link, self._offers, self._store = link, offers, store
        self._since: float | None = None
        """Time of the parent's first message after its last new chunk; None before such a message.
        """
        self._longest_pause_s = 0.0
        """The longest time, in seconds, from `_since` to the next new chunk."""

    def lives(self, *, now: float) -> None:
        """Record that the parent has sent a message, which may contain no new chunk."""
        self._link.lives(now=now)
        self._since = now if self._since is None else self._since

    def waits(self, *, again_s: float, now: float) -> None:
        """Record that the parent has sent Waiting and will repeat it within `again_s`."""
        self._link.waits(again_s=again_s, now=now)
        self._since = now if self._since is None else self._since

    def received(self, *, now: float) -> None:
        """Record that a new chunk or table of the item has arrived."""
        if self._since is not None:
            self._longest_pause_s = max(self._longest_pause_s, now - self._since)
        self._since = None

    def clear(self) -> None:
        """Forget the pauses, because the node leaves the parent."""
        self._since, self._longest_pause_s = None, 0.0

    def _gives_up_at(self, item: ItemId | None) -> float | None:
        """Return the time at which the parent has waited too long for an item that it announced.

        None while the parent does not wait for the item.
        """
        link = self._link
        is_waiting = link.awaits_chunks and not link.writing_bytes and item in self._offers
        if self._since is None or not is_waiting:
            return None
        return self._since + max(WAIT_STALLS * link.stall_s, 4 * self._longest_pause_s)

    def deadline(self, item: ItemId | None) -> float | None:
        """Return the time at which to call `check` next; None if no call is due."""
        silent_at = self._link.deadline(self._store.chunk_bytes(item))
        return None if silent_at is None else earliest(silent_at, self._gives_up_at(item))

    def check(self, item: ItemId | None, *, now: float) -> tuple[str, bool]:
        """Return (reason to leave the parent, whether to ask the parent again).

        Args:
            item: the item that is being fetched; None for no item.
            now: the present time.
        """
        link = self._link
        if item is None:
            self._since = None
        gives_up_at = self._gives_up_at(item)
        if item is not None and gives_up_at is not None and now >= gives_up_at:
            waited_s = now - (self._since or 0.0)
            return f"it reports only that it waits for {item[0]}, for {waited_s:.1f} s", False
        chunk_bytes = self._store.chunk_bytes(item)
        silent_at = link.deadline(chunk_bytes)
        if silent_at is None or now < silent_at:
            return "", False
        silence_s = link.silence_s(chunk_bytes, now=now)
        what = f"no chunk of {item[0]}" if link.awaits_chunks and item else "no answer"
        return (f"{what} for {silence_s:.1f} s", False) if link.silence(now=now) else ("", True)
