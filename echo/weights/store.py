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

from collections.abc import Iterable

from echo.core.errors import LocalProtocolError
from echo.core.rollout import KEEP_VERSIONS, PolicyVersion
from echo.weights.artifacts import Chunked, Transfer
from echo.weights.cipher import SentChunks
from echo.weights.encoded import DecodeBlock, EncodedVersion, OpenBlock
from echo.weights.in_place import ApplyPatch
from echo.weights.manifest import Manifest, SegmentTable, SignedManifest, encode_signed
from echo.weights.memory import VersionStore
from echo.weights.patches import Patch, PatchMode
from echo.wire.messages import FULL, EncodedVersionOffer, Form, ItemId

MAX_ENCODED_VERSIONS = 64
"""Encoded versions kept for others at most, however small they are."""


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
        self.patch_mode: PatchMode = "copy"
        self.version_store = VersionStore() if version_store is None else version_store
        self.images: dict[PolicyVersion, Transfer] = {}
        self.encoded_versions: dict[ItemId, EncodedVersion] = {}
        self._sent = SentChunks()

    def get(self, item: ItemId) -> Chunked | None:
        """Return an item, or None if nothing of it is here."""
        version, form = item
        return self.images.get(version) if form == FULL else self.encoded_versions.get(item)

    def begun_otherwise(self, item: ItemId) -> list[ItemId]:
        """Return the halves of the same version in other forms: they give way to `item`."""
        version, _ = item
        image = self.images.get(version)
        halves = [(version, FULL)] if image is not None and not image.is_complete else []
        halves += [key for key, encoded in self.encoded_versions.items() if encoded.is_half]
        return [half for half in halves if half[0] == version and half != item]

    def begin_image(self, signed: SignedManifest, manifest: Manifest) -> None:
        """Make room for an image that is to be fetched in full.

        Raises:
            StorageError: if there is none.
        """
        version = manifest.version
        storage = self.version_store.create(version, encode_signed(signed), manifest.num_bytes)
        has_chunk = bytearray(manifest.num_chunks)
        self.add(Transfer(signed, manifest, storage, has_chunk))

    @property
    def is_in_place(self) -> bool:
        """Whether a delta on its base is written over it."""
        return self.patch_mode != "copy"

    def add(self, image: Transfer) -> None:
        """Hold an image; what has been lent of it by then is lent."""
        image.may_change, image.sent = self.is_in_place, self._sent
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
        base = self._base(encoded)
        if base is not None and base.num_bytes != table.image_bytes:
            return f"it has {table.image_bytes} bytes, its base {base.num_bytes}"
        if table.base is not None and table.is_on_base:
            encoded.patch = Patch(table.base, table.version, table.block_bytes)
            # A base that has been lent, or may have been, must stay as it is.
            if self.is_in_place and (base is None or base.may_change):
                return ""
        encoded.storage = self.version_store.create(encoded.version, None, table.image_bytes)
        return ""

    def _base(self, encoded: EncodedVersion) -> Transfer | None:
        """Return the image that a delta is coded against, if it is here whole."""
        image = None if encoded.form.base is None else self.images.get(encoded.form.base)
        return image if image is not None and image.is_complete else None

    def may_block(self, item: ItemId) -> bool:
        """Return whether chunks of an item are to be written by a thread."""
        return item[1] == FULL and self.version_store.may_block

    def decodable(self, encoded: EncodedVersion, index: int) -> list[DecodeBlock | OpenBlock]:
        """Return the blocks that can be decoded with a chunk that has just been kept.

        None while the base has yet to be written itself, over the one before.
        """
        if encoded.form.base is None:
            return encoded.decodable(index, None)
        base = self._base(encoded)
        if base is None or not base.is_current:
            return []
        return encoded.decodable(index, memoryview(base.storage))

    def end_decoding(self, encoded: EncodedVersion) -> None:
        """Take the image that has come out of an encoded version whole."""
        image = encoded.image(self._base(encoded))
        self.add(image)
        if image.signed is not None:
            self.version_store.sealed(encoded.version, encode_signed(image.signed))

    # --- in place --------------------------------------------------------------------------------

    @property
    def ready(self) -> EncodedVersion | None:
        """The delta that is ready to be written over its base, which is current."""
        return next((each for each in self._open if not self._is_being_written(each)), None)

    @property
    def _open(self) -> list[EncodedVersion]:
        """Deltas that are about to be, or are just being, written over their base."""
        found = []
        for encoded in self.encoded_versions.values():
            base = self._base(encoded) if encoded.is_ready else None
            if base is not None and (base.is_current or base.later == [encoded.patch]):
                found.append(encoded)
        return found

    def _is_being_written(self, encoded: EncodedVersion) -> bool:
        base = self._base(encoded) if encoded.is_ready else None
        return base is not None and encoded.patch in base.later

    def begin_patch(self, encoded: EncodedVersion) -> ApplyPatch:
        """Return the work that writes a delta that is ready over its base.

        From now on the base is read through the patch.
        """
        base, patch = self._base(encoded), encoded.patch
        if base is None or patch is None:
            raise LocalProtocolError(f"{encoded.version} is not ready to be written")
        for image in self._on(base.storage):
            image.later.append(patch)
        return ApplyPatch(patch, memoryview(base.storage), self.version_store)

    def end_patch(self, encoded: EncodedVersion) -> None:
        """Take the version that a patch has made of its base."""
        self.add(encoded.image(self._base(encoded)))
        assert encoded.form.base is not None
        self.version_store.advance(encoded.form.base, encoded.version)

    def encoded_of(self, patch: Patch) -> EncodedVersion | None:
        """Return the delta that a patch came from; None if its memory was given up meanwhile."""
        encoded = self.encoded_versions.get((patch.version, Form("delta", patch.base)))
        return encoded if encoded is not None and encoded.patch is patch else None

    def take_back_patch(self, encoded: EncodedVersion) -> None:
        """Forget a patch whose words are not, or no longer, in the image."""
        base = self._base(encoded)
        for image in [] if base is None else self._on(base.storage):
            image.later = [patch for patch in image.later if patch is not encoded.patch]

    def damaged(self) -> list[ItemId]:
        """Return all that is to be dropped because the memory of an image is damaged.

        Versions patched from a damaged image are damaged too, and deltas are useless without a
        base. So everything is dropped except an image that is being fetched, whose chunks are each
        verified.
        """
        whole = (version for version, image in self.images.items() if image.is_complete)
        return [*((version, FULL) for version in whole), *self.encoded_versions]

    def halves_on(self, versions: set[PolicyVersion]) -> list[ItemId]:
        """Return the halves that are of no use without some versions, or what comes of them."""
        gone, halves = set(versions), []
        for item in sorted(self.encoded_versions, key=lambda item: item[0]):
            if self.encoded_versions[item].is_half and item[1].base in gone:
                gone.add(item[0])
                halves.append(item)
        return halves

    def _on(self, storage: bytearray | memoryview) -> list[Transfer]:
        """Return the images that lie in this memory."""
        return [image for image in self.images.values() if image.storage is storage]

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
        return whole | {encoded.version for encoded in self._open}

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

    @property
    def is_lean(self) -> bool:
        """Whether there is nothing to drop, whatever is to be kept: mostly there is not."""
        if self.encoded_versions or len(self.images) > self.keep_versions:
            return False
        newest = max(self.images, default=None)
        return all(image.is_complete or v == newest for v, image in self.images.items())

    def expendable(self, keep: Iterable[ItemId]) -> list[ItemId]:
        """Return what is to be dropped, apart from `keep` and the newest."""
        kept = set(keep)
        whole = sorted((v for v, image in self.images.items() if image.is_complete), reverse=True)
        kept.update((version, FULL) for version in whole[: self.keep_versions])
        kept.update(
            (version, FULL)
            for version in (max(self.images, default=None), self.newest_sealed)
            if version is not None
        )
        kept.update(self._worthwhile_encoded())
        for item, encoded in self.encoded_versions.items():
            is_newest = encoded.is_ready and item[0] > max(whole, default=item[0])
            if is_newest or encoded.is_being_coded or self._is_being_written(encoded):
                kept.add(item)
                if encoded.is_ready and item[1].base is not None:
                    kept.add((item[1].base, FULL))
        items = [*((version, FULL) for version in self.images), *self.encoded_versions]
        return [item for item in items if item not in kept]

    def _worthwhile_encoded(self) -> list[ItemId]:
        """Return the newest keyframe, and the newest deltas that together are below an image."""
        room = max((image.num_bytes for image in self.images.values()), default=0)
        usable = (item for item, encoded in self.encoded_versions.items() if not encoded.is_half)
        newest_first = sorted(usable, key=lambda item: item[0], reverse=True)
        keyframes = [item for item in newest_first if item[1].base is None]
        items = keyframes[:1]
        for item in [item for item in newest_first if item[1].base is not None][
            :MAX_ENCODED_VERSIONS
        ]:
            room -= self.encoded_versions[item].num_bytes
            if room < 0 and len(items) > 1:
                break
            items.append(item)
        return items
