"""What a node holds of the weights: images, parcels, and what it may offer to others.

An item is named by (version, form). Images are kept while they are among the newest
`keep_versions` that are whole; of the parcels the newest anchor and the newest deltas that together
are smaller than an image (a late joiner walks along them); whatever is being coded here, fetched,
decoded from, or taken by a child is kept as well. Everything else is dropped, half of a parcel that
was given up before all, since room for a whole image hangs on it: so the store is bounded by the
number of children.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo.core.rollout import KEEP_VERSIONS, PolicyVersion
from echo.protocol.manifest import Manifest, SignedManifest, encode_signed
from echo.protocol.parcel import DecodeBlock, Parcel, SegmentTable
from echo.protocol.transfer import Arenas, Chunked, HeapArenas, Transfer
from echo.wire.messages import FULL, EncodedVersionOffer, ItemId

MAX_PARCELS = 64
"""Parcels kept for others at most, however small they are."""


class Store:
    """Images and parcels by name."""

    def __init__(self, *, keep_versions: int = KEEP_VERSIONS, arenas: Arenas | None = None) -> None:
        """Start empty.

        Args:
            keep_versions: whole images to keep for children and for falling back, at least 1.
            arenas: where the images lie.
        """
        self.keep_versions = keep_versions
        self.arenas = HeapArenas() if arenas is None else arenas
        self.images: dict[PolicyVersion, Transfer] = {}
        self.parcels: dict[ItemId, Parcel] = {}

    def get(self, item: ItemId) -> Chunked | None:
        """Return an item, or None if nothing of it is here."""
        version, form = item
        return self.images.get(version) if form == FULL else self.parcels.get(item)

    def begun_otherwise(self, item: ItemId) -> list[ItemId]:
        """Return the halves of the same version in other forms: they give way to `item`."""
        version, _ = item
        image = self.images.get(version)
        halves = [(version, FULL)] if image is not None and not image.is_complete else []
        halves += [key for key, parcel in self.parcels.items() if parcel.is_half]
        return [half for half in halves if half[0] == version and half != item]

    def begin_image(self, signed: SignedManifest, manifest: Manifest) -> None:
        """Make room for an image that is to be fetched in full.

        Raises:
            StorageError: if there is none.
        """
        version = manifest.version
        arena = self.arenas.create(version, encode_signed(signed), manifest.num_bytes)
        has_chunk = bytearray(manifest.num_chunks)
        self.images[version] = Transfer(signed, manifest, arena, has_chunk)

    def begin_parcel(self, item: ItemId, *, expected_bytes: int) -> None:
        """Begin to fetch a parcel.

        An anchor is written down as it comes, so that a restart goes on with it as with an image;
        a delta is some hundredth of that, and is fetched again.
        """
        parcel = self.parcels[item] = Parcel(*item)
        parcel.expected_bytes = expected_bytes
        version, form = item
        if form.base is None:
            parcel.journal = self.arenas.journal(version)

    def add_segment(self, parcel: Parcel, table: SegmentTable, frame: bytes) -> str:
        """Add the next segment of a parcel, with the first one room for what comes out of it.

        Returns:
            Why this parcel is of no use here; nothing if it is.

        Raises:
            StorageError: if there is no room.
        """
        if not parcel.num_segments:
            fault = self._begin_decoding(parcel, table.image_bytes)
            if fault:
                return fault
        parcel.add(table, frame)
        return ""

    def _begin_decoding(self, parcel: Parcel, image_bytes: int) -> str:
        base = None if parcel.form.base is None else self.images.get(parcel.form.base)
        if base is not None and base.num_bytes != image_bytes:
            return f"it has {image_bytes} bytes, its base {base.num_bytes}"
        parcel.arena = self.arenas.create(parcel.version, None, image_bytes)
        return ""

    def resume(self, parcel: Parcel) -> None:
        """Take an anchor that a former process of this node has left, to go on decoding it.

        Raises:
            StorageError: if there is no room for what comes out of it.
        """
        parcel.arena = self.arenas.create(parcel.version, None, parcel.image_bytes)
        self.parcels[parcel.version, parcel.form] = parcel

    def may_block(self, item: ItemId) -> bool:
        """Return whether chunks of an item are to be written by a thread."""
        return item[1] == FULL and self.arenas.may_block

    def decodable(self, parcel: Parcel, index: int) -> list[DecodeBlock]:
        """Return the blocks that can be decoded with a chunk that has just been kept."""
        base = None
        if parcel.form.base is not None:
            image = self.images.get(parcel.form.base)
            if image is None or not image.is_complete:
                return []
            base = memoryview(image.arena)
        return parcel.decodable(index, base)

    def end_decoding(self, image: Transfer) -> None:
        """Take an image that has come out of a parcel whole."""
        version = image.manifest.version
        self.arenas.sealed(version, encode_signed(image.signed))
        self.images[version] = image

    def chunk_bytes(self, item: ItemId | None) -> int:
        """Return the size of an item's chunks, or a usual one where it is not known."""
        found = None if item is None else self.get(item)
        return found.chunk_size(0) if found is not None and found.num_chunks else 1 << 20

    def drop(self, item: ItemId) -> None:
        """Forget an item."""
        version, form = item
        if form == FULL:
            image = self.images.pop(version, None)
            is_lent = image is not None
        else:
            parcel = self.parcels.pop(item, None)
            # An image that is only half decoded goes with its parcel.
            is_lent = parcel is not None and parcel.arena is not None
            if parcel is not None and parcel.journal is not None:
                parcel.journal.remove()
        if is_lent:
            self.arenas.drop(version)

    @property
    def newest_complete(self) -> PolicyVersion | None:
        """Newest version held whole."""
        return max((v for v, image in self.images.items() if image.is_complete), default=None)

    @property
    def newest_known(self) -> PolicyVersion | None:
        """Newest version of which anything is here, or is about to come."""
        versions = [*self.images, *(version for version, _ in self.parcels)]
        return max(versions, default=None)

    def announcement(
        self,
    ) -> tuple[PolicyVersion, tuple[EncodedVersionOffer, ...], bytes | None] | None:
        """Return what an Announce says: (version, offers, signed manifest of its image)."""
        offers = tuple(
            EncodedVersionOffer(version, form.base, parcel.num_bytes)
            for (version, form), parcel in self.parcels.items()
        )
        newest = max(self.images, default=None)
        if newest is not None:
            return newest, offers, encode_signed(self.images[newest].signed)
        known = self.newest_known
        return None if known is None else (known, offers, None)

    @property
    def is_lean(self) -> bool:
        """Whether there is nothing to drop, whatever is to be kept: mostly there is not."""
        if self.parcels or len(self.images) > self.keep_versions:
            return False
        newest = max(self.images, default=None)
        return all(image.is_complete or v == newest for v, image in self.images.items())

    def expendable(self, keep: Iterable[ItemId]) -> list[ItemId]:
        """Return what is to be dropped, apart from `keep` and the newest."""
        kept = set(keep)
        whole = sorted((v for v, image in self.images.items() if image.is_complete), reverse=True)
        kept.update((version, FULL) for version in whole[: self.keep_versions])
        newest = max(self.images, default=None)
        if newest is not None:
            kept.add((newest, FULL))
        kept.update(self._worthwhile_parcels())
        kept.update(item for item, parcel in self.parcels.items() if parcel.is_being_coded)
        items = [*((version, FULL) for version in self.images), *self.parcels]
        return [item for item in items if item not in kept]

    def _worthwhile_parcels(self) -> list[ItemId]:
        """Return the newest anchor, and the newest deltas that together are below an image."""
        room = max((image.num_bytes for image in self.images.values()), default=0)
        usable = (item for item, parcel in self.parcels.items() if not parcel.is_half)
        newest_first = sorted(usable, key=lambda item: item[0], reverse=True)
        anchors = [item for item in newest_first if item[1].base is None]
        items = anchors[:1]
        for item in [item for item in newest_first if item[1].base is not None][:MAX_PARCELS]:
            room -= self.parcels[item].num_bytes
            if room < 0 and len(items) > 1:
                break
            items.append(item)
        return items
