"""Offers: the items that the parent has announced, and the choice of the next item to fetch.

A node takes the path with the fewest bytes to the newest version, and fetches the items of this
path one after the other. Held chunks cost no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo.core.rollout import PolicyVersion
from echo.weights.manifest import Manifest
from echo.weights.schedule import FetchPath, cheapest_paths
from echo.weights.store.store import ItemStore
from echo.wire.messages import FULL, Announce, Form, ItemId

MAX_REFUSED = 64
"""Largest number of refused items to remember. A remembered item is not fetched again."""


class Offers:
    """The items that the parent has announced, and the size of each item in bytes."""

    def __init__(self, store: ItemStore) -> None:
        """Start with no offers; `store` has the items that this node holds."""
        self.store = store
        self._sizes: dict[ItemId, int] = {}
        self._refused: dict[ItemId, None] = {}
        self.has_preempted = False
        """Whether a fetch was abandoned for a newer version since this node last completed a
        version."""

    def replace(self, message: Announce, manifest: Manifest | None) -> None:
        """Replace all offers by the offers in an Announce.

        `manifest` is the verified manifest of the Announce; None if the Announce has no manifest.
        """
        offers = {(offer.version, form_of(offer.base)): offer.num_bytes for offer in message.offers}
        if manifest is not None:
            offers[manifest.version, FULL] = manifest.num_bytes
        self._sizes = offers

    def clear(self) -> None:
        """Remove all offers, because this node leaves the parent."""
        self._sizes = {}

    def withdraw(self, item: ItemId) -> None:
        """Remove an item that the parent no longer has."""
        self._sizes.pop(item, None)

    def __contains__(self, item: ItemId | None) -> bool:
        """Return whether the parent has announced an item."""
        return item in self._sizes

    def num_bytes(self, item: ItemId) -> int:
        """Return the size in bytes that the parent announced for an item; 0 for an unknown item."""
        return self._sizes.get(item, 0)

    def is_refused(self, item: ItemId) -> bool:
        """Return whether this node has refused an item."""
        return item in self._refused

    def refuse(self, item: ItemId) -> None:
        """Never fetch this item again, because it was unusable on this node."""
        self._refused[item] = None
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest version that the parent has announced; None if there are no offers."""
        return max((version for version, _ in self._sizes), default=None)

    def items(self) -> Iterable[ItemId]:
        """Return the items that the parent has announced."""
        return self._sizes.keys()

    def next_step(self, current: ItemId | None) -> ItemId | None:
        """Return the item to fetch now; None for no item.

        Args:
            current: the item that is being fetched; returned if the fetch should continue.
        """
        held = self.store.held
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
        """Return, for each item newer than all held versions, how many of its bytes are missing.

        Refused items are left out.
        """
        newest = self.store.newest_complete
        offers = {}
        for item_id in self.items():
            if (newest is None or item_id[0] > newest) and item_id not in self._refused:
                num_bytes, item = self.num_bytes(item_id), self.store.get(item_id)
                if item is not None and item.num_chunks:
                    num_bytes -= num_bytes * item.num_held // item.num_chunks
                offers[item_id] = num_bytes
        return offers

    def _may_preempt(self, current: ItemId, direct: FetchPath, onward: FetchPath | None) -> bool:
        """Return whether to abandon the present fetch for the newest version.

        Args:
            current: the item that is being fetched.
            direct: the path to the newest version from the versions that this node holds.
            onward: the path to the newest version from `current`; None if no such path exists.
        """
        item = self.store.get(current)
        if item is None:
            return True
        if self.has_preempted or 2 * item.num_held >= max(1, item.num_chunks):
            return False
        remaining = item.num_bytes - item.num_bytes * item.num_held // max(1, item.num_chunks)
        return onward is None or direct.num_bytes <= remaining + onward.num_bytes


def form_of(base: PolicyVersion | None) -> Form:
    """Return the form of a delta against `base`, or the form of a keyframe if `base` is None."""
    return Form("keyframe") if base is None else Form("delta", base)
