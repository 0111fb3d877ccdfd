"""What a node's parents have announced, and what of it to fetch next.

The way to the newest version with the fewest bytes is taken step by step; what is held already of
an item need not be fetched again and counts for nothing. A newer version pre-empts the one that is
being fetched if less than half of that has come, and going to the newer one directly costs no more
than finishing and going on from there; and not twice in a row, or a link slower than the pace of
publication would never complete any.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.delta.paths import Offer, cheapest_path
from echo.protocol.manifest import Manifest
from echo.protocol.store import Store
from echo.wire.messages import FULL, Announce, Form, ItemId

MAX_OFFERS = 1000
"""Items that one Announce may name."""
MAX_REFUSED = 64
"""Parcels that did not decode, which are remembered so as not to be tried again."""


class Offers:
    """Sizes of what can be had, by parent."""

    def __init__(self, store: Store) -> None:
        """Start with nothing; `store` tells what is held."""
        self._store = store
        self._by_peer: dict[str, dict[ItemId, int]] = {}
        self._refused: dict[ItemId, None] = {}
        self.has_preempted = False
        """Whether a fetch was given up since a version was last completed."""

    def hear(self, peer: str, message: Announce, manifest: Manifest | None) -> None:
        """Take an Announce; it replaces what the same parent said before.

        Raises:
            RemoteProtocolError: if it names too much.
        """
        if len(message.offers) > MAX_OFFERS:
            raise RemoteProtocolError(f"an Announce of {len(message.offers)} parcels")
        offers = {
            (offer.version, form_of(offer.base)): max(0, offer.num_bytes)
            for offer in message.offers
        }
        if manifest is not None:
            offers[manifest.version, FULL] = manifest.num_bytes
        self._by_peer[peer] = offers

    def forget(self, peer: str) -> None:
        """Forget a parent."""
        self._by_peer.pop(peer, None)

    def withdraw(self, peer: str, item: ItemId) -> None:
        """Note that a parent has an item no more."""
        self._by_peer.get(peer, {}).pop(item, None)

    def has(self, peer: str, item: ItemId | None) -> bool:
        """Return whether a parent has announced an item."""
        return item in self._by_peer.get(peer, {})

    def is_offered(self, item: ItemId) -> bool:
        """Return whether any parent has announced an item."""
        return any(item in offers for offers in self._by_peer.values())

    def num_bytes(self, item: ItemId) -> int:
        """Return how large an item is said to be."""
        return max((offers.get(item, 0) for offers in self._by_peer.values()), default=0)

    def refuse(self, item: ItemId) -> None:
        """Never fetch an item again: what came out of it was wrong."""
        self._refused[item] = None
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    @property
    def newest(self) -> PolicyVersion | None:
        """Newest version that a parent has announced."""
        return max((version for version, _ in self._items()), default=None)

    def _items(self) -> Iterable[ItemId]:
        return (item for offers in self._by_peer.values() for item in offers)

    def next_step(self, current: ItemId | None) -> ItemId | None:
        """Return what to fetch now: `current` to go on with it, None for nothing.

        Args:
            current: what is being fetched.
        """
        held = {version for version, image in self._store.images.items() if image.is_complete}
        target = self._newest_within_reach(held)
        found = None if target is None else self._path(target, held)
        if target is None or found is None:
            return current
        path, num_bytes = found
        step = (path[0].version, Form(path[0].kind, path[0].base))
        if current is None or step == current:
            return step
        if not self._may_preempt(current, target, held, direct_bytes=num_bytes):
            return current
        self.has_preempted = True
        return step

    def _path(
        self, target: PolicyVersion, held: set[PolicyVersion]
    ) -> tuple[list[Offer], int] | None:
        """Return the cheapest way to a version from those held, and its bytes."""
        offers = []
        for item_id in self._useful():
            version, form = item_id
            if version > target:
                continue
            num_bytes, item = self.num_bytes(item_id), self._store.get(item_id)
            if item is not None and item.num_chunks:
                num_bytes -= num_bytes * item.num_held // item.num_chunks
            offers.append(Offer(version, form.base, form.kind, num_bytes))
        path = cheapest_path(held, offers, target)
        return None if path is None else (path, sum(step.num_bytes for step in path))

    def _useful(self) -> list[ItemId]:
        """Return what leads on from what is held, by version.

        A way back over versions that were passed already would be walked again and again.
        """
        newest = self._store.newest_complete
        items = dict.fromkeys(self._items())
        return sorted(
            (
                (version, form)
                for version, form in items
                if (newest is None or version > newest)
                and (form.base is None or form.base < version)
                and (version, form) not in self._refused
            ),
            key=lambda item: item[0],
        )

    def _newest_within_reach(self, held: set[PolicyVersion]) -> PolicyVersion | None:
        """Return the newest version to which there is a way; not each that is announced has one."""
        reached: set[PolicyVersion | None] = {None, *held}
        target = None
        for version, form in self._useful():
            if form.base in reached:
                reached.add(version)
                target = version
        return target

    def _may_preempt(
        self,
        current: ItemId,
        target: PolicyVersion,
        held: set[PolicyVersion],
        *,
        direct_bytes: int,
    ) -> bool:
        """Return whether the present fetch is to be given up for the newest version."""
        item = self._store.get(current)
        if item is None:
            return True
        if self.has_preempted or 2 * item.num_held >= max(1, item.num_chunks):
            return False
        onward = self._path(target, held | {current[0]})
        remaining = item.num_bytes - item.num_bytes * item.num_held // max(1, item.num_chunks)
        return onward is None or direct_bytes <= remaining + onward[1]


def form_of(base: PolicyVersion | None) -> Form:
    """Return the form of a parcel."""
    return Form("anchor") if base is None else Form("delta", base)
