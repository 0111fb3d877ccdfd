"""Offers: which item to fetch next, given those that the parent has announced.

The path to the newest version with the fewest bytes is taken step by step. Chunks of an item that
are held already cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo.core.rollout import PolicyVersion
from echo.weights.manifest import Manifest
from echo.weights.schedule import FetchPath, cheapest_paths
from echo.weights.store.store import ItemStore
from echo.wire.messages import FULL, Announce, Form, ItemId

MAX_REFUSED = 64
"""Items remembered because their result was wrong; they are not fetched again."""


class Offers:
    """The items that the parent has announced, with their sizes."""

    def __init__(self, store: ItemStore) -> None:
        """Start without offers; `store` has the items that are held."""
        self._store = store
        self._sizes: dict[ItemId, int] = {}
        self._refused: dict[ItemId, None] = {}
        self.has_preempted = False
        """Whether a fetch was abandoned for a newer version since the last complete version."""

    def replace(self, message: Announce, manifest: Manifest | None) -> None:
        """Take an Announce; it replaces all earlier offers."""
        offers = {(offer.version, form_of(offer.base)): offer.num_bytes for offer in message.offers}
        if manifest is not None:
            offers[manifest.version, FULL] = manifest.num_bytes
        self._sizes = offers

    def clear(self) -> None:
        """Remove all offers: the parent was left."""
        self._sizes = {}

    def withdraw(self, item: ItemId) -> None:
        """Note that the parent no longer has an item."""
        self._sizes.pop(item, None)

    def __contains__(self, item: ItemId | None) -> bool:
        """Return whether the parent has announced an item."""
        return item in self._sizes

    def num_bytes(self, item: ItemId) -> int:
        """Return the announced size of an item."""
        return self._sizes.get(item, 0)

    def is_refused(self, item: ItemId) -> bool:
        """Return whether an item was refused, and so is never fetched again."""
        return item in self._refused

    def refuse(self, item: ItemId) -> None:
        """Never fetch an item again: its result was wrong."""
        self._refused[item] = None
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    @property
    def newest(self) -> PolicyVersion | None:
        """Newest version that the parent has announced."""
        return max((version for version, _ in self._sizes), default=None)

    def items(self) -> Iterable[ItemId]:
        """Iterate over the announced items."""
        return self._sizes.keys()

    def next_step(self, current: ItemId | None) -> ItemId | None:
        """Return the item to fetch now: `current` to continue with it, None for no item.

        Args:
            current: the item that is being fetched.
        """
        held = self._store.held
        offers = self._useful()
        paths = cheapest_paths(held, offers)
        # Some announced versions cannot be reached from the held ones.
        target = max(paths.keys() - held, default=None)
        if target is None:
            return current
        path = paths[target]
        step = path.items[0]
        if current is None or step == current:
            return step
        onward = cheapest_paths(held | {current[0]}, offers).get(target)
        if not self._may_preempt(current, path, onward):
            return current
        self.has_preempted = True
        return step

    def _useful(self) -> dict[ItemId, int]:
        """Return the items that are newer than every held version, with their missing bytes.

        Older items would lead back to versions that this node has passed already.
        """
        newest = self._store.newest_complete
        offers = {}
        for item_id in self.items():
            if (newest is None or item_id[0] > newest) and item_id not in self._refused:
                num_bytes, item = self.num_bytes(item_id), self._store.get(item_id)
                if item is not None and item.num_chunks:
                    num_bytes -= num_bytes * item.num_held // item.num_chunks
                offers[item_id] = num_bytes
        return offers

    def _may_preempt(self, current: ItemId, direct: FetchPath, onward: FetchPath | None) -> bool:
        """Return whether to abandon the present fetch for the newest version.

        Args:
            current: the item that is being fetched.
            direct: the path to the newest version from the held ones.
            onward: the path to it from `current`; None if there is none.
        """
        item = self._store.get(current)
        if item is None:
            return True
        if self.has_preempted or 2 * item.num_held >= max(1, item.num_chunks):
            return False
        remaining = item.num_bytes - item.num_bytes * item.num_held // max(1, item.num_chunks)
        return onward is None or direct.num_bytes <= remaining + onward.num_bytes


def form_of(base: PolicyVersion | None) -> Form:
    """Return the form of an encoded version."""
    return Form("keyframe") if base is None else Form("delta", base)
