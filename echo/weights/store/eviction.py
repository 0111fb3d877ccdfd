"""Eviction: chooses the items to drop, so that the size of a node's store stays limited.

A node keeps these items:

* the newest `keep_versions` complete images, and the newest image, complete or not; while an item
  lacks space, only the newest complete image;
* for nodes that join late, the newest keyframe and the newest deltas; these deltas are in total
  smaller than an image;
* items that this node is coding, fetching or decoding, and items that children are fetching.

All other items are dropped. So the size of the store grows at most with the number of children.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo.core.rollout import PolicyVersion
from echo.weights.store.store import ItemStore
from echo.wire.messages import FULL, ItemId

MAX_ENCODED_VERSIONS = 64
"""Largest number of deltas to keep for other nodes. Each Announce lists all of them."""


def expendable(
    store: ItemStore, keep: Iterable[ItemId], *, lacks_space: bool = False
) -> list[ItemId]:
    """Return the items to drop.

    All items are dropped except the items in `keep`, the newest items, and the items that other
    nodes may need. If `lacks_space` is true, of the images only the newest complete one is kept.
    """
    images, encoded_versions = store.images, store.encoded_versions
    kept = set(keep)
    whole = sorted((v for v, image in images.items() if image.is_complete), reverse=True)
    newest: list[PolicyVersion | None] = [*whole[:1]]
    if not lacks_space:
        newest += [*whole[: store.keep_versions], max(images, default=None), store.newest_sealed]
    kept.update((version, FULL) for version in newest if version is not None)
    kept.update(_worthwhile_encoded(store))
    for item, encoded in encoded_versions.items():
        is_newest = encoded.is_ready and item[0] > max(whole, default=item[0])
        if is_newest or encoded.is_being_coded or store.in_place.is_being_written(encoded):
            kept.add(item)
            if encoded.is_ready and item[1].base is not None:
                kept.add((item[1].base, FULL))
    items = [*((version, FULL) for version in images), *encoded_versions]
    return [item for item in items if item not in kept]


def with_base(item: ItemId | None) -> set[ItemId]:
    """Return the item itself and, for a delta, the image of the delta's base.

    The set is empty if `item` is None.
    """
    if item is None:
        return set()
    base = item[1].base
    return {item} if base is None else {item, (base, FULL)}


def is_lean(store: ItemStore) -> bool:
    """Return True only if `expendable` would return no item, whatever `keep` contains.

    This check is cheap. If the store has an encoded version, the result is always False.
    """
    if store.encoded_versions or len(store.images) > store.keep_versions:
        return False
    newest = max(store.images, default=None)
    return all(image.is_complete or v == newest for v, image in store.images.items())


def _worthwhile_encoded(store: ItemStore) -> list[ItemId]:
    """Return the newest keyframe, and the newest deltas that together are smaller than an image."""
    space = max((image.num_bytes for image in store.images.values()), default=0)
    usable = (item for item, encoded in store.encoded_versions.items() if not encoded.is_half)
    newest_first = sorted(usable, key=lambda item: item[0], reverse=True)
    items = [item for item in newest_first if item[1].base is None][:1]
    deltas = [item for item in newest_first if item[1].base is not None]
    for item in deltas[:MAX_ENCODED_VERSIONS]:
        space -= store.encoded_versions[item].num_bytes
        if space < 0 and len(items) > 1:
            break
        items.append(item)
    return items


def begun_otherwise(store: ItemStore, item: ItemId) -> list[ItemId]:
    """Return the partial downloads that `item` replaces: other forms of the same version."""
    version, _ = item
    image = store.images.get(version)
    halves = [(version, FULL)] if image is not None and not image.is_complete else []
    halves += [key for key, encoded in store.encoded_versions.items() if encoded.is_half]
    return [half for half in halves if half[0] == version and half != item]


def partial_on(store: ItemStore, versions: set[PolicyVersion]) -> list[ItemId]:
    """Return the partial deltas that depend, directly or indirectly, on one of these versions."""
    gone, halves = set(versions), []
    for item in sorted(store.encoded_versions, key=lambda item: item[0]):
        if store.encoded_versions[item].is_half and item[1].base in gone:
            gone.add(item[0])
            halves.append(item)
    return halves


def damaged(store: ItemStore) -> list[ItemId]:
    """Return the items to drop when the memory of an image is damaged.

    Versions that deltas made from a damaged image are damaged too, and deltas are useless without
    their base. So all items are dropped except partial images, whose chunks are verified on
    arrival.
    """
    whole = (version for version, image in store.images.items() if image.is_complete)
    return [*((version, FULL) for version in whole), *store.encoded_versions]
