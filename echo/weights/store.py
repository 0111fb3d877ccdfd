"""Store of a node: images, encoded versions, chunks held, signatures believed.

The unit that travels chunk by chunk is an **item**: a version in one form. Its image with the
manifest is a `Transfer`, a delta or keyframe is an `EncodedVersion`; both are served and fetched
alike, as `Chunked`.

    learner   image -> blocks -> coded blocks -> segments, each signed as soon as it is coded
    network   the chunks of each segment, as they come, in any order, verified one by one
    receiver  chunks -> coded blocks -> image, in new space or in place of its base

**Encoded versions.** A delta is coded against a version that the receiver holds, a keyframe alone.

* A **block** is a run of the image, a whole number of image chunks (the last may be shorter), and
  is coded on its own, so blocks are coded and decoded in parallel (`delta.py`).
* A **segment** is a run of blocks. Its table says how long each coded block is and what each of its
  payload chunks hashes to. The learner signs each table, so chunks flow while later blocks are
  still being coded, and a relay can verify and forward them without the version that they are coded
  against. Tables come in order.
* A **hashed** table says what the image chunks that come out must hash to, and the last one carries
  the signed manifest of the image, which must promise the same. It is decoded into new space.
  Keyframes are of this kind, and deltas of versions in which much has changed.
* A delta **on its base** says instead what the words must hash to that a block replaces. The
  learner has not hashed the image yet, and neither has the receiver to: the work on both sides is
  that of the changes. Its **seal**, the manifest, follows. Until then the image may be installed,
  and be the base of the next delta, but is not offered in full.
* Every size is bounded by the image's, before anything is allocated; the decoder is bounded by the
  block that it fills.

**In place.** A delta on its base is opened block by block as it comes: positions, old and new words
(`BlockPatch`). When all blocks are open nothing has been written yet, and what is left to be done
are plain stores. `PatchMode` says who does them: a thread of this node, or the engine that installs
a version, between two tokens that it samples. From then on the same memory is the new version's.
The one before can still be read (children take it, an engine may want it back): a reader copies a
block and puts the old words back, those of a patch that is just being written included. So memory
that changes is never lent, and no reader waits for a lock. Where an engine must keep the bytes that
it was given, the base is copied and the copy is patched.

**Evict.** Images are kept while they are among the newest `keep_versions` that are whole; of the
encoded versions the newest keyframe and the newest deltas that together are smaller than an image
(a late joiner walks along them); whatever is being coded here, fetched, decoded from, or taken by a
child is kept as well. Everything else is dropped, half of an encoded version that was given up
before all, since space for a whole image hangs on it: so the store is bounded by the number of
children.

**Trust.** Any member may be a hop. So what a node takes over from the learner is signed end to end:
manifests and segment tables here, and Welcome, from which it has the key (`roles/joining.py`).
Chunks travel encrypted (`cipher.py`), and are verified as they travel.

**Resume.** An image that a killed process has left half done is resumed: each chunk must match the
hash in the manifest that the learner has signed, and the others are fetched. Encoded versions, and
an image that was being written in place, are fetched again.
"""

from __future__ import annotations

from echo.core.rollout import KEEP_VERSIONS, PolicyVersion
from echo.weights.artifacts import Chunked, Transfer
from echo.weights.cipher import SentChunks
from echo.weights.encoded import DecodeBlock, EncodedVersion, OpenBlock
from echo.weights.in_place import InPlace
from echo.weights.manifest import Manifest, SegmentTable, SignedManifest, encode_signed
from echo.weights.memory import VersionStore
from echo.weights.patches import Patch
from echo.wire.messages import FULL, EncodedVersionOffer, ItemId


class ItemStore:
    """Images and encoded versions by name."""

    def __init__(
        self, *, keep_versions: int = KEEP_VERSIONS, version_store: VersionStore | None = None
    ) -> None:
        """Start empty.

        Args:
            keep_versions: whole images to keep for children and for falling back, at least 1.
            version_store: where the images lie.
        """
        self.keep_versions = keep_versions
        self.version_store = VersionStore() if version_store is None else version_store
        self.images: dict[PolicyVersion, Transfer] = {}
        self.encoded_versions: dict[ItemId, EncodedVersion] = {}
        self.in_place = InPlace(self.images, self.encoded_versions, self.version_store)
        self._sent = SentChunks()

    def get(self, item: ItemId) -> Chunked | None:
        """Return an item, or None if nothing of it is here."""
        version, form = item
        return self.images.get(version) if form == FULL else self.encoded_versions.get(item)

    def begin_image(self, signed: SignedManifest, manifest: Manifest) -> None:
        """Make room for an image that is to be fetched in full.

        Raises:
            StorageError: if there is none.
        """
        version = manifest.version
        storage = self.version_store.create(version, encode_signed(signed), manifest.num_bytes)
        has_chunk = bytearray(manifest.num_chunks)
        self.add(Transfer(signed, manifest, storage, has_chunk))

    def add(self, image: Transfer) -> None:
        """Hold an image; what has been lent of it by then is lent."""
        image.may_change, image.sent = self.in_place.is_on, self._sent
        self.images[image.manifest.version] = image

    def begin_encoded(self, item: ItemId, *, expected_bytes: int) -> None:
        """Begin to fetch an encoded version."""
        encoded = self.encoded_versions[item] = EncodedVersion(*item)
        encoded.expected_bytes = expected_bytes

    def add_segment(self, encoded: EncodedVersion, table: SegmentTable, frame: bytes) -> str:
        """Add the next segment of an encoded version; the first one reserves space for its image.

        Returns:
            Why this encoded version is of no use here; nothing if it is.

        Raises:
            StorageError: if there is no space.
        """
        if not encoded.num_segments:
            fault = self._begin_decoding(encoded, table)
            if fault:
                return fault
        encoded.add(table, frame)
        return ""

    def _begin_decoding(self, encoded: EncodedVersion, table: SegmentTable) -> str:
        base = encoded.base_among(self.images)
        if base is not None and base.num_bytes != table.image_bytes:
            return f"it has {table.image_bytes} bytes, its base {base.num_bytes}"
        if table.base is not None and table.is_on_base:
            encoded.patch = Patch(table.base, table.version, table.block_bytes)
            # A base that has been lent, or may have been, must stay as it is.
            if self.in_place.is_on and (base is None or base.may_change):
                return ""
        encoded.storage = self.version_store.create(encoded.version, None, table.image_bytes)
        return ""

    def may_block(self, item: ItemId) -> bool:
        """Return whether chunks of an item are to be written by a thread."""
        return item[1] == FULL and self.version_store.may_block

    def decodable(self, encoded: EncodedVersion, index: int) -> list[DecodeBlock | OpenBlock]:
        """Return the blocks that can be decoded with a chunk that has just been kept.

        None while the base has yet to be written itself, over the one before.
        """
        if encoded.form.base is None:
            return encoded.decodable(index, None)
        base = encoded.base_among(self.images)
        if base is None or not base.is_current:
            return []
        return encoded.decodable(index, memoryview(base.storage))

    def decodable_on(self, version: PolicyVersion) -> list[DecodeBlock | OpenBlock]:
        """Return the blocks that can be decoded because a version has become whole."""
        return [
            work
            for each in self.encoded_versions.values()
            if each.form.base == version and each.is_half
            for index in range(each.num_chunks)
            if each.has_chunk[index]
            for work in self.decodable(each, index)
        ]

    def end_decoding(self, encoded: EncodedVersion) -> None:
        """Take the image that has come out of an encoded version whole."""
        image = encoded.image(encoded.base_among(self.images))
        self.add(image)
        if image.signed is not None:
            self.version_store.sealed(encoded.version, encode_signed(image.signed))

    def end_patch(self, encoded: EncodedVersion) -> None:
        """Take the version that a patch has made of its base."""
        self.add(encoded.image(encoded.base_among(self.images)))
        assert encoded.form.base is not None
        self.version_store.advance(encoded.form.base, encoded.version)

    def seal(self, version: PolicyVersion, signed: SignedManifest, manifest: Manifest) -> str:
        """Take the learner's seal of an image that has none; return what contradicts it."""
        fault = self.images[version].seal(signed, manifest)
        if not fault:
            self.version_store.sealed(version, encode_signed(signed))
        return fault

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
            encoded = self.encoded_versions.pop(item, None)
            # An image that is only half decoded goes with its encoded version.
            is_lent = encoded is not None and encoded.storage is not None
        if is_lent:
            self.version_store.drop(version)

    @property
    def held(self) -> set[PolicyVersion]:
        """Versions held whole, what is about to be written in place included."""
        whole = {version for version, image in self.images.items() if image.is_complete}
        return whole | {encoded.version for encoded in self.in_place.open}

    @property
    def newest_complete(self) -> PolicyVersion | None:
        """Newest version held whole."""
        return max(self.held, default=None)

    @property
    def newest_signed(self) -> PolicyVersion | None:
        """Newest version held whole with its manifest: any news of what is newer is welcome."""
        signed = (v for v, image in self.images.items() if image.signed and image.is_complete)
        return max(signed, default=None)

    @property
    def newest_sealed(self) -> PolicyVersion | None:
        """Newest version whose manifest is here; of its image at least the beginning."""
        return max((v for v, image in self.images.items() if image.signed), default=None)

    @property
    def newest_known(self) -> PolicyVersion | None:
        """Newest version with anything here, or about to come."""
        versions = [*self.images, *(version for version, _ in self.encoded_versions)]
        return max(versions, default=None)

    def announcement(
        self,
    ) -> tuple[PolicyVersion, tuple[EncodedVersionOffer, ...], bytes | None] | None:
        """Return what an Announce says: (version, offers, signed manifest of its image)."""
        offers = tuple(
            EncodedVersionOffer(version, form.base, encoded.num_bytes)
            for (version, form), encoded in self.encoded_versions.items()
        )
        newest = max((v for v, image in self.images.items() if image.can_be_sent), default=None)
        if newest is not None:
            signed = self.images[newest].signed
            assert signed is not None
            return newest, offers, encode_signed(signed)
        known = self.newest_known
        return None if known is None else (known, offers, None)
