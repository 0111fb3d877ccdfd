"""Which parents do not deliver: those that are silent, and those that only ever say that they wait.

* A lane that is silent for too long (`lanes.py` says how long) is left for its spare; without one
  its parent is asked once more, and left at the second silence.
* A parent that waits itself says so again and again, and is not silent: the fault may lie far above
  it. But offers are not signed, so one that has announced an item and never gets anything of it may
  be lying. It is left after WAIT_STALLS silences in which nothing has come, or four times the
  longest pause after which something did come from it: behind a slow link the pauses are long.
"""

from __future__ import annotations

from echo.core.timers import earliest
from echo.protocol.lanes import Lane, Lanes
from echo.protocol.offers import Offers
from echo.protocol.store import Store
from echo.wire.messages import ItemId

WAIT_STALLS = 20
"""Silences (of stall_s) that a parent may wait itself; more than SLOW_AFTER_S in `serving.py`."""


class Watchdog:
    """Watches the lanes of a node."""

    def __init__(self, lanes: Lanes, offers: Offers, store: Store, *, stall_s: float) -> None:
        """Start with nothing awaited; everything is shared with the node's `Receiver`."""
        self._lanes = lanes
        self._offers = offers
        self._store = store
        self._stall_s = stall_s
        self._waits: dict[str, float] = {}
        """Parent -> since when it has lived, and nothing new has come from it."""
        self._pauses: dict[str, float] = {}
        """Parent -> the longest such pause that has ended."""

    # --- what is heard ---------------------------------------------------------------------------

    def waits(self, lane: Lane, *, again_s: float, now: float) -> None:
        """Note that a parent lives and waits itself, and within how long it says so again."""
        lane.rate.pause()
        self.lives(lane, now=now)
        lane.waits(again_s=again_s)

    def lives(self, lane: Lane, *, now: float) -> None:
        """Note that a parent lives, though it may have brought nothing new."""
        lane.lives(now=now)
        if lane.peer is not None:
            self._waits.setdefault(lane.peer, now)

    def came(self, lane: Lane, *, now: float) -> None:
        """Note that something of the item has come from a parent."""
        since = self._waits.pop(lane.peer or "", None)
        if since is not None and lane.peer is not None:
            self._pauses[lane.peer] = max(self._pauses.get(lane.peer, 0.0), now - since)

    def forget(self, peer: str) -> None:
        """Forget a parent."""
        self._waits.pop(peer, None)
        self._pauses.pop(peer, None)

    # --- time ------------------------------------------------------------------------------------

    def _may_wait_s(self, peer: str) -> float:
        return max(WAIT_STALLS * self._stall_s, 4 * self._pauses.get(peer, 0.0))

    def _waiting(self, item: ItemId | None) -> list[tuple[Lane, str, float]]:
        """Return the lanes whose parents wait for what they have announced, and since when."""
        if not self._waits:
            return []
        return [
            (lane, lane.peer, self._waits[lane.peer])
            for lane in self._lanes
            if lane.peer in self._waits
            and lane.is_pulling
            and not lane.writing_bytes
            and self._offers.has(lane.peer, item)
        ]

    def deadline(self, item: ItemId | None) -> float | None:
        """Return when a parent should be given up, or asked again."""
        silent_at = self._lanes.deadline(self._store.chunk_bytes(item))
        if silent_at is None or not self._waits:
            return silent_at
        waiting = self._waiting(item)
        return earliest(silent_at, *[since + self._may_wait_s(peer) for _, peer, since in waiting])

    def look(
        self, item: ItemId | None, *, now: float
    ) -> tuple[list[tuple[Lane, str]], list[Lane]]:  # fmt: skip
        """Return the lanes whose parents are to be left, with the reason, and those to ask again.

        Args:
            item: what is being fetched.
            now: the present.
        """
        if item is None:
            self._waits.clear()
        chunk_bytes = self._store.chunk_bytes(item)
        leave = [
            (lane, f"it only says that it waits for {item[0]}, for {now - since:.1f} s")
            for lane, peer, since in self._waiting(item)
            if item is not None and now - since >= self._may_wait_s(peer)
        ]
        left = [lane for lane, _ in leave]
        again = []
        for lane in self._lanes.silent(chunk_bytes, now=now):
            if lane in left:
                continue
            if not lane.is_silent and not lane.has_spare:
                lane.is_silent, lane.progress_at = True, now
                again.append(lane)
                continue
            silence_s = lane.silence_s(chunk_bytes, now=now)
            lane.num_failures += 1
            what = f"no chunk of {item[0]}" if lane.is_pulling and item else "no answer"
            leave.append((lane, f"{what} for {silence_s:.1f} s"))
        return leave, again
