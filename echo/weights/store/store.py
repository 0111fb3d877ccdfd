"""The item store: the images and encoded versions of a node.

An **item** is one version in one form. An image with its manifest is a `Transfer`. A delta or
keyframe is an `EncodedVersion`. `Transfer` and `EncodedVersion` are `Chunked`: nodes fetch and
serve both in the same way, chunk by chunk.

    learner   image -> blocks -> coded blocks -> segments, each signed as soon as it is coded
    network   the chunks of each segment, in any order, verified one by one
    receiver  chunks -> coded blocks -> image, in new memory or in place of the base

Each of these files decides one thing:

    memory.py      where the bytes of an image lie
    items.py       which chunks of an item are held, and how a chunk is read
    encoded.py     how a version is coded into segments and blocks
    patches.py     which bytes of an image a delta changes
    in_place.py    which delta may be written over its base
    eviction.py    which items are dropped
    trust.py       which manifests and tables are the learner's
    store.py       which items are held, which can be decoded, and what is announced

**Resume.** A new process continues the incomplete image of a killed process: it keeps the chunks
that match the hashes in the signed manifest, and fetches all other chunks. Encoded versions, and
images that were being patched in place, are fetched again.
"""

from __future__ import annotations

from echo.core.rollout import KEEP_VERSIONS, PolicyVersion
from echo.weights.cipher import SentChunks
from echo.weights.manifest import Manifest, SegmentTable, SignedManifest, encode_signed
from echo.weights.store.encoded import DecodeBlock, EncodedVersion, OpenBlock
from echo.weights.store.in_place import InPlace
from echo.weights.store.items import Chunked, Transfer
from echo.weights.store.memory import VersionStore
from echo.weights.store.patches import Patch
from echo.wire.messages import FULL, EncodedVersionOffer, ItemId


class ItemStore:
    """The images of a node by version, and the encoded versions of the node by item."""

    def __init__(
        self, *, keep_versions: int = KEEP_VERSIONS, version_store: VersionStore | None = None
    ) -> None:
        """Start with no items.

        Args:
            keep_versions: number of complete images to keep; at least 1. Children may fetch these
                images, and this node may fall back to an older image.
            version_store: provides the memory of images; None for memory without a limit.
        """
        self.keep_versions = keep_versions
        self.version_store = VersionStore() if version_store is None else version_store
        self.images: dict[PolicyVersion, Transfer] = {}
        self.encoded_versions: dict[ItemId, EncodedVersion] = {}
        self.in_place = InPlace(self.images, self.encoded_versions, self.version_store)
        self._sent = SentChunks()

    def get(self, item: ItemId) -> Chunked | None:
        """Return an item, complete or partial; None if the store lacks the item."""
        version, form = item
        return self.images.get(version) if form == FULL else self.encoded_versions.get(item)

    def begin_image(self, signed: SignedManifest, manifest: Manifest) -> None:
        """Allocate memory for an image that will be fetched whole, and add the image.

        Raises:
            StorageError: if there is no space.
        """
        version = manifest.version
        storage = self.version_store.create(version, encode_signed(signed), manifest.num_bytes)
        has_chunk = bytearray(manifest.num_chunks)
        self.add(Transfer(signed, manifest, storage, has_chunk))

    def add(self, image: Transfer) -> None:
        """Add an image, in place of an earlier image of the same version.

        Frames over the memory of the earlier image stay valid.
        """
        image.may_change, image.sent = self.in_place.is_on, self._sent
        self.images[image.manifest.version] = image

    def begin_encoded(self, item: ItemId, *, expected_bytes: int) -> None:
        """Add an encoded version that will be fetched. It has no segments yet."""
        encoded = self.encoded_versions[item] = EncodedVersion(*item)
        encoded.expected_bytes = expected_bytes

    def add_segment(self, encoded: EncodedVersion, table: SegmentTable, frame: bytes) -> str:
        """Add the next segment of an encoded version.

        The first segment reserves memory for the decoded image.

        Returns:
            The reason if this node cannot use the encoded version, otherwise "".

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
            # Frames of another base may be lent, so its memory must not change.
            if self.in_place.is_on and (base is None or base.may_change):
                return ""
        encoded.storage = self.version_store.create(encoded.version, None, table.image_bytes)
        return ""

    def may_block(self, item: ItemId) -> bool:
        """Return whether writing a chunk of an item may block.

        If so, a thread must write the chunk.
        """
        return item[1] == FULL and self.version_store.may_block

    def decodable(self, encoded: EncodedVersion, index: int) -> list[DecodeBlock | OpenBlock]:
        """Return work for the blocks that the newly written chunk `index` completes.

        The list is empty while the base is missing or is being patched.
        """
        if encoded.form.base is None:
            return encoded.decodable(index, None)
        base = encoded.base_among(self.images)
        if base is None or not base.is_current:
            return []
        return encoded.decodable(index, memoryview(base.storage))

    def decodable_on(self, version: PolicyVersion) -> list[DecodeBlock | OpenBlock]:
        """Return work for the blocks that need the newly complete `version` as their base."""
        return [
            work
            for each in self.encoded_versions.values()
            if each.form.base == version and each.is_half
            for index in range(each.num_chunks)
            if each.has_chunk[index]
            for work in self.decodable(each, index)
        ]

    def end_decoding(self, encoded: EncodedVersion) -> None:
        """Add the image that was decoded from a complete encoded version."""
        image = encoded.image(encoded.base_among(self.images))
        self.add(image)
        if image.signed is not None:
            self.version_store.sealed(encoded.version, encode_signed(image.signed))

    def end_patch(self, encoded: EncodedVersion) -> None:
        """Add the image that a patch has made from its base."""
        self.add(encoded.image(encoded.base_among(self.images)))
        assert encoded.form.base is not None
        self.version_store.advance(encoded.form.base, encoded.version)

    def seal(self, version: PolicyVersion, signed: SignedManifest, manifest: Manifest) -> str:
        """Add the learner's manifest to an image; return why it does not fit, or "" if it fits."""
        fault = self.images[version].seal(signed, manifest)
        if not fault:
            self.version_store.sealed(version, encode_signed(signed))
        return fault

    def chunk_bytes(self, item: ItemId | None) -> int:
        """Return the size of an item's chunks in bytes; 1 MiB if the size is unknown."""
        found = None if item is None else self.get(item)
        return found.chunk_size(0) if found is not None and found.num_chunks else 1 << 20

    def drop(self, item: ItemId) -> None:
        """Drop an item and its memory."""
        version, form = item
        if form == FULL:
            image = self.images.pop(version, None)
            is_lent = image is not None
        else:
            encoded = self.encoded_versions.pop(item, None)
            # The memory of a half decoded image is dropped with its encoded version.
            is_lent = encoded is not None and encoded.storage is not None
        if is_lent:
            self.version_store.drop(version)

    @property
    def held(self) -> set[PolicyVersion]:
        """The versions that this node can install.

        These are the complete versions, and the versions whose patch is ready or being written.
        """
        whole = {version for version, image in self.images.items() if image.is_complete}
        return whole | {encoded.version for encoded in self.in_place.open}

    @property
    def newest_complete(self) -> PolicyVersion | None:
        """The newest version in `held`; None if `held` is empty."""
        return max(self.held, default=None)

    @property
    def newest_signed(self) -> PolicyVersion | None:
        """The newest complete version whose manifest has arrived; None if there is no such version.

        A child asks its parent to announce versions that are newer than this version.
        """
        signed = (v for v, image in self.images.items() if image.signed and image.is_complete)
        return max(signed, default=None)

    @property
    def newest_sealed(self) -> PolicyVersion | None:
        """The newest version whose manifest has arrived.

        The image of the version may be partial.
        """
        return max((v for v, image in self.images.items() if image.signed), default=None)

    @property
    def newest_known(self) -> PolicyVersion | None:
        """The newest version in any form, complete or partial; None if the store is empty."""
        versions = [*self.images, *(version for version, _ in self.encoded_versions)]
        return max(versions, default=None)

    def announcement(
        self,
    ) -> tuple[PolicyVersion, tuple[EncodedVersionOffer, ...], bytes | None] | None:
        """Return the content of an Announce: (version, offers, signed manifest of the version).

        The manifest is None if no image can be sent. The result is None if the store is empty.
        """
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
