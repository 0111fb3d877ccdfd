"""Encoded versions: the division of a delta or keyframe into segments, chunks and blocks.

A delta is coded against its base, a version that the receiver holds. A keyframe has no base.

* A **block** is a run of whole image chunks. The last block may be shorter. Each block is coded on
  its own, so blocks are coded and decoded in parallel (`delta.py`).
* A **segment** is a run of blocks. The table of a segment has the length of each coded block and
  the hash of each payload chunk. The learner signs each table as soon as the segment is coded, so
  chunks are sent while later blocks are still being coded. A relay can verify and forward chunks
  without the base. Tables arrive in order.
* A **hashed** table has the hashes of the decoded image chunks. The last hashed table of an encoded
  version also has the signed manifest of the image, with the same hashes. The image is decoded into
  new memory. Keyframes have hashed tables, and so do deltas with many changes.
* A delta **on its base** has another kind of table. For each block, this table has the hash of the
  base's words that the block replaces. At first, learner and receiver do not hash the image. So
  their work grows with the number of changes, and not with the size of the image. The manifest,
  called the **seal** of the version, follows later. Before the seal arrives, the image may be
  installed and be the base of the next delta, but is not offered to children as a whole image.
* Every size is checked against the size of the image before memory is allocated. The decoder writes
  only inside its block.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.weights.cipher import Encrypted, check_key
from echo.weights.delta import decode_block, fill, open_block
from echo.weights.manifest import (
    HASH_BYTES,
    Manifest,
    SegmentTable,
    SignedManifest,
    decode_table,
    provisional,
    verify,
    verify_signature,
)
from echo.weights.store.items import Chunked, Transfer
from echo.weights.store.memory import allocate
from echo.weights.store.patches import Patch
from echo.wire.actions import Work
from echo.wire.messages import Form


@dataclass(frozen=True, slots=True, eq=False)
class OpenBlock(Work):
    """Work for a thread: find the changes that a block makes to its base."""

    encoded: EncodedVersion
    block: int
    coded: memoryview
    """The coded block as it has arrived, perhaps encrypted."""
    encrypted: Encrypted | None
    base: memoryview
    old_hash: bytes
    out: memoryview | None
    """Memory of the block in a patched copy of the base; None if the base is patched in place."""

    def run(self) -> str:
        """Find the changes; return a description of a fault, or "" if there was none."""
        patch = self.encoded.patch
        assert patch is not None
        try:
            opened = open_block(_plain(self.coded, self.encrypted), self.base, self.old_hash)
        except (RemoteProtocolError, StorageError) as error:
            return str(error)
        if self.out is None:
            patch.blocks[self.block] = opened
        else:
            fill(self.out, self.base)
            opened.write(self.out)
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBlock(Work):
    """Work for a thread: decode a block and check the result."""

    encoded: EncodedVersion
    block: int
    coded: memoryview
    """The coded block as it has arrived, perhaps encrypted."""
    encrypted: Encrypted | None
    base: memoryview | None
    out: memoryview
    hashes: bytes
    """Signed hashes of the decoded image chunks."""
    chunk_bytes: int

    @property
    def version(self) -> PolicyVersion:
        """The version to which the block belongs."""
        return self.encoded.version

    @property
    def form(self) -> Form:
        """The form of the encoded version to which the block belongs."""
        return self.encoded.form

    def run(self) -> str:
        """Decode the block; return a description of a fault, or "" if there was none."""
        try:
            decode_block(_plain(self.coded, self.encrypted), self.base, self.out)
        except RemoteProtocolError as error:
            return str(error)
        digests = (
            blake3(self.out[start : start + self.chunk_bytes]).digest()
            for start in range(0, len(self.out), self.chunk_bytes)
        )
        if b"".join(digests) != self.hashes:
            return "what comes out does not have the hashes that the learner signed"
        return ""


def _plain(coded: memoryview, encrypted: Encrypted | None) -> memoryview:
    return coded if encrypted is None else encrypted.decrypt(coded)


@dataclass(slots=True)
class _Part:
    table: SegmentTable
    payload: memoryview
    first_chunk: int
    offsets: list[int]
    """Offset of each coded block in `payload`, then the end of the last block."""


class EncodedVersion(Chunked):
    """A delta or keyframe of a version, complete or partial."""

    def __init__(self, version: PolicyVersion, form: Form) -> None:
        """Start with no segments."""
        self.version = version
        self.form = form
        self.frames: list[bytes] = []
        """The signed tables, as they are sent."""
        self.has_chunk = bytearray()
        self.num_held = 0
        self.writing: set[int] = set()
        self.storage: memoryview | None = None
        """Memory for the decoded image, set by the item store; None if the base is patched in
        place.
        """
        self.patch: Patch | None = None
        """The changes that a delta makes to its base, until they are written; otherwise None."""
        self.expected_bytes = 0
        """The announced size in bytes, used until all segments are known."""
        self._key = b""
        self._parts: list[_Part] = []
        self._starts: list[int] = []
        self._started_blocks: set[int] = set()
        self._decoded_blocks: set[int] = set()

    # --- segments --------------------------------------------------------------------------------

    @property
    def num_segments(self) -> int:
        """Number of segments whose tables have arrived."""
        return len(self._parts)

    @property
    def image_bytes(self) -> int:
        """Number of bytes of the decoded image; 0 before the first segment."""
        return self._parts[0].table.image_bytes if self._parts else 0

    @property
    def is_on_base(self) -> bool:
        """Whether the tables have hashes of the replaced words, and not of the decoded image."""
        return bool(self._parts) and self._parts[0].table.is_on_base

    @property
    def is_encrypted(self) -> bool:
        """Whether the chunks of the encoded version are sent encrypted."""
        return bool(self._key)

    @property
    def is_open(self) -> bool:
        """Whether further segments will be added."""
        return not self._parts or not self._parts[-1].table.is_last

    @property
    def is_ready(self) -> bool:
        """Whether the changes of all blocks are known, but not yet written over the base."""
        return (
            self.patch is not None
            and self.storage is None
            and not self.is_open
            and len(self._decoded_blocks) == self._parts[-1].table.num_blocks_in_image
        )

    @property
    def is_being_coded(self) -> bool:
        """Whether this node is the learner and still codes this version."""
        return self.is_open and not self.is_half

    @property
    def is_half(self) -> bool:
        """Whether chunks are missing, or the image is not decoded completely."""
        is_in_work = self.storage is not None or self.patch is not None
        return not self._parts or is_in_work or self.num_held < self.num_chunks

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all segments; the announced size while segments are unknown."""
        known = sum(part.table.num_bytes for part in self._parts)
        return max(known, self.expected_bytes) if self.is_open else known

    def add(self, table: SegmentTable, frame: bytes, payload: memoryview | None = None) -> None:
        """Append the next segment. The table must have been verified.

        Only the learner passes `payload`, in the form in which chunks are sent.
        """
        if not self._parts and table.key_hash:
            self._key = msgspec.msgpack.decode(frame, type=SignedManifest).key
        first_chunk = len(self.has_chunk)
        self._starts.append(first_chunk)
        offsets = [0, *itertools.accumulate(table.block_sizes)]
        is_held = payload is not None
        self.has_chunk += (b"\1" if is_held else b"\0") * table.num_chunks
        self.num_held += table.num_chunks if is_held else 0
        if payload is None:
            payload = allocate(table.num_bytes)
        self._parts.append(_Part(table, payload, first_chunk, offsets))
        self.frames.append(frame)

    def verify(
        self, frame: bytes | bytearray | memoryview, *, public_key: bytes, run_id: str,
        max_bytes: int,
    ) -> SegmentTable:  # fmt: skip
        """Verify the frame of the next table, which came from the network; return the table.

        Raises:
            RemoteProtocolError: if the signature, the run, the order of segments or any size is
                wrong.
        """
        signed = verify_signature(frame, public_key=public_key)
        table = decode_table(signed.body)
        where = f"segment {self.num_segments} of {self.version} as {self.form}"
        named = (table.run_id, table.version, table.base, table.index)
        if named != (run_id, self.version, self.form.base, self.num_segments):
            raise RemoteProtocolError(f"{where}: got {named}")
        if self._parts and table.layout != self._parts[0].table.layout:
            raise RemoteProtocolError(f"{where}: its layout is not that of the first segment")
        first_block = sum(len(part.table.block_sizes) for part in self._parts)
        table.check(where, first_block=first_block, max_bytes=max_bytes)
        check_key(signed.key, table.key_hash)
        if table.manifest is not None:
            self._check_manifest(table, public_key=public_key, max_bytes=max_bytes)
        return table

    def _check_manifest(self, table: SegmentTable, *, public_key: bytes, max_bytes: int) -> None:
        _, manifest = verify(
            table.manifest or b"", public_key=public_key, run_id=table.run_id, max_bytes=max_bytes
        )
        hashes = b"".join(part.table.result_hashes for part in self._parts) + table.result_hashes
        stated = (table.version, table.image_bytes, table.image_chunk_bytes, hashes)
        found = (
            manifest.version, manifest.num_bytes, manifest.chunk_bytes, manifest.chunk_hashes
        )  # fmt: skip
        if stated != found:
            raise RemoteProtocolError(
                f"the segments of {self.version} promise another image than its manifest"
            )

    # --- chunks ----------------------------------------------------------------------------------

    def _part(self, index: int) -> _Part:
        return self._parts[bisect.bisect_right(self._starts, index) - 1]

    def _span(self, index: int) -> tuple[_Part, int, int]:
        part = self._part(index)
        start = (index - part.first_chunk) * part.table.chunk_bytes
        return part, start, min(start + part.table.chunk_bytes, part.table.num_bytes)

    def place(self, index: int) -> memoryview:
        """Return the memory for the bytes of a chunk, held or not."""
        part, start, stop = self._span(index)
        return part.payload[start:stop]

    def chunk_size(self, index: int) -> int:
        """Return the number of bytes of a chunk."""
        _, start, stop = self._span(index)
        return stop - start

    def chunk_hash(self, index: int) -> bytes:
        """Return the BLAKE3-256 hash of a chunk as it is sent."""
        part = self._part(index)
        place = (index - part.first_chunk) * HASH_BYTES
        return part.table.chunk_hashes[place : place + HASH_BYTES]

    # --- blocks ----------------------------------------------------------------------------------

    def base_among(self, images: Mapping[PolicyVersion, Transfer]) -> Transfer | None:
        """Return the image in `images` that is the base of this delta.

        None for a keyframe, or if `images` lacks the complete image.
        """
        image = None if self.form.base is None else images.get(self.form.base)
        return image if image is not None and image.is_complete else None

    def decodable(self, index: int, base: memoryview | None) -> list[DecodeBlock | OpenBlock]:
        """Return work for the blocks that chunk `index` has completed.

        The work for each block is returned only once. `storage` or `patch` must be set before the
        call.

        Args:
            index: the index of the chunk that was written last.
            base: the complete image of `form.base`, of the same size; None for a keyframe.
        """
        part, start, stop = self._span(index)
        first = max(0, bisect.bisect_right(part.offsets, start) - 1)
        work: list[DecodeBlock | OpenBlock] = []
        for number in range(first, len(part.table.block_sizes)):
            if part.offsets[number] >= stop:
                break
            block = part.table.first_block + number
            if block not in self._started_blocks and self._has_block(part, number):
                self._started_blocks.add(block)
                work.append(self._work(part, number, base))
        return work

    def _has_block(self, part: _Part, number: int) -> bool:
        size = part.table.chunk_bytes
        first = part.first_chunk + part.offsets[number] // size
        last = part.first_chunk + (part.offsets[number + 1] - 1) // size
        return self.has_chunk.find(0, first, last + 1) < 0

    def _work(self, part: _Part, number: int, base: memoryview | None) -> DecodeBlock | OpenBlock:
        table = part.table
        block = table.first_block + number
        start = block * table.block_bytes
        stop = min(start + table.block_bytes, table.image_bytes)
        offset = part.offsets[number]
        coded, encrypted = part.payload[offset : part.offsets[number + 1]], None
        if self._key:
            chunk, begin = divmod(offset, table.chunk_bytes)
            chunk += part.first_chunk
            encrypted = Encrypted(self._key, chunk, begin, table.chunk_bytes)
        if table.is_on_base:
            assert base is not None
            old_hash = table.old_hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
            out = None if self.storage is None else self.storage[start:stop]
            return OpenBlock(self, block, coded, encrypted, base[start:stop], old_hash, out)
        assert self.storage is not None
        hashes_per_block = table.block_bytes // table.image_chunk_bytes * HASH_BYTES
        hashes = table.result_hashes[number * hashes_per_block : (number + 1) * hashes_per_block]
        return DecodeBlock(
            encoded=self,
            block=block,
            coded=coded,
            encrypted=encrypted,
            base=None if base is None else base[start:stop],
            out=self.storage[start:stop],
            hashes=hashes,
            chunk_bytes=table.image_chunk_bytes,
        )

    def decoded(self, work: DecodeBlock | OpenBlock) -> bool:
        """Record that a block was decoded correctly; return whether it was the last block."""
        self._decoded_blocks.add(work.block)
        last = self._parts[-1].table
        return last.is_last and len(self._decoded_blocks) == last.num_blocks_in_image

    def image(self, base: Transfer | None) -> Transfer:
        """Return the decoded image. The image takes over the memory of this object.

        Args:
            base: the image of the delta's base; None for a keyframe.
        """
        body = self._parts[-1].table.manifest
        signed = None if body is None else msgspec.msgpack.decode(body, type=SignedManifest)
        if signed is None:
            assert base is not None
            manifest = provisional(base.manifest, self.version)
        else:
            manifest = msgspec.msgpack.decode(signed.body, type=Manifest)
        storage: bytearray | memoryview | None = self.storage
        if storage is None:
            assert base is not None
            storage = base.storage
        self.storage = self.patch = None
        num_chunks = -(-manifest.num_bytes // manifest.chunk_bytes)
        has_chunk, is_hashed = bytearray(b"\1") * num_chunks, signed is not None
        return Transfer(signed, manifest, storage, has_chunk, num_chunks, is_hashed=is_hashed)
