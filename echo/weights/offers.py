"""Offers: what the parent has announced, and which item to fetch next."""

from __future__ import annotations

from collections.abc import Iterable

from echo.core.rollout import PolicyVersion
from echo.weights.manifest import Manifest
from echo.weights.schedule import FetchPath, cheapest_paths
from echo.weights.store import ItemStore
from echo.wire.messages import FULL, Announce, Form, ItemId

MAX_REFUSED = 64
"""Encoded versions that did not decode, which are remembered so as not to be tried again."""


class Offers:
    """Sizes of what the parent has."""

    def __init__(self, store: ItemStore) -> None:
        """Start with nothing; `store` tells what is held."""
        self._store = store
        self._sizes: dict[ItemId, int] = {}
        self._refused: dict[ItemId, None] = {}
        self.has_preempted = False
        """Whether a fetch was given up since a version was last completed."""

    def replace(self, message: Announce, manifest: Manifest | None) -> None:
        """Take an Announce; it replaces what the parent said before."""
        offers = {(offer.version, form_of(offer.base)): offer.num_bytes for offer in message.offers}
        if manifest is not None:
            offers[manifest.version, FULL] = manifest.num_bytes
        self._sizes = offers

    def clear(self) -> None:
        """Forget the parent."""
        self._sizes = {}

    def withdraw(self, item: ItemId) -> None:
        """Note that the parent has an item no more."""
        self._sizes.pop(item, None)

    def __contains__(self, item: ItemId | None) -> bool:
        """Return whether the parent has announced an item."""
        return item in self._sizes

    def num_bytes(self, item: ItemId) -> int:
        """Return how large an item is said to be."""
        return self._sizes.get(item, 0)

    def is_refused(self, item: ItemId) -> bool:
        """Return whether an item is never to be taken again."""
        return item in self._refused

    def refuse(self, item: ItemId) -> None:
        """Never fetch an item again: what came out of it was wrong."""
        self._refused[item] = None
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    @property
    def newest(self) -> PolicyVersion | None:
        """Newest version that the parent has announced."""
        return max((version for version, _ in self._sizes), default=None)

    def items(self) -> Iterable[ItemId]:
        """Go through all that the parent has announced."""
        return self._sizes.keys()

    def next_step(self, current: ItemId | None) -> ItemId | None:
        """Return what to fetch now: `current` to go on with it, None for nothing.

        Args:
            current: what is being fetched.
        """
        held = self._store.held
        offers = self._useful()
        paths = cheapest_paths(held, offers)
        # Not to each that is announced there is a way.
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
        """Return what leads on from what is held, and the bytes that are missing of it.

        A way back over versions that were passed already would be walked again and again.
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
        """Return whether the present fetch is to be given up for the newest version.

        Args:
            current: what is being fetched.
            direct: the way to the newest version from what is held.
            onward: the way to it from `current`; None if there is none.
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
