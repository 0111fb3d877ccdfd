"""A version in coded form: a delta against a version that the receiver holds, or an anchor.

    learner   image -> blocks -> coded blocks -> segments, each signed as soon as it is coded
    network   the chunks of each segment, as they come, in any order, verified one by one
    receiver  chunks -> coded blocks -> decoded into a new arena and checked -> image

* A **block** is a run of the image, a whole number of image chunks (the last may be shorter), and
  is coded on its own, so blocks are coded and decoded in parallel (`echo/delta/blocks.py`).
* A **segment** is a run of blocks. Its table says how long each coded block is, what each of its
  payload chunks hashes to, and what the image chunks that come out must hash to. The learner signs
  each table, so chunks flow while later blocks are still being coded, and a relay can verify and
  forward them without the version that they are coded against. Tables come in order.
* The last table carries the signed manifest of the image. Its chunk hashes must be those that the
  tables promised, so an image that has been decoded is the same thing as one that was fetched in
  full: it can be installed, and served to others chunk by chunk.
* Decoding never works in place: it reads the base and writes another arena, so a node that is
  interrupted still has the version that it had.

Every size is bounded by the image's, before anything is allocated; the decoder is bounded by the
block that it fills.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.delta.blocks import decode_block
from echo.protocol.manifest import (
    HASH_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Manifest,
    SignedManifest,
    verify,
    verify_signature,
)
from echo.protocol.transfer import Chunked, Transfer, new_arena
from echo.wire.actions import Work
from echo.wire.messages import Form

MAX_BLOCK_OVERHEAD_BYTES = 64
"""By how much a coded block may be longer than what it codes: a tag and a length."""


class SegmentTable(msgspec.Struct, frozen=True):
    """What one segment of a parcel consists of; its encoding is what the learner signs."""

    run_id: str
    version: PolicyVersion
    base: PolicyVersion | None
    index: int
    image_bytes: int
    image_chunk_bytes: int
    block_bytes: int
    chunk_bytes: int
    """Size of a payload chunk; the last of each segment may be shorter."""
    first_block: int
    block_sizes: tuple[int, ...]
    """Bytes of each coded block."""
    chunk_hashes: bytes
    """BLAKE3-256 of each payload chunk."""
    result_hashes: bytes
    """BLAKE3-256 of each image chunk that comes out."""
    manifest: bytes | None = None
    """In the last segment: the signed manifest of the image, encoded."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the segment's payload."""
        return sum(self.block_sizes)

    @property
    def num_chunks(self) -> int:
        """Payload chunks."""
        return len(self.chunk_hashes) // HASH_BYTES

    @property
    def num_blocks_in_image(self) -> int:
        """Blocks of the whole image."""
        return -(-self.image_bytes // self.block_bytes)

    @property
    def layout(self) -> tuple[object, ...]:
        """What all segments of a parcel must agree on."""
        return (
            self.run_id, self.version, self.base, self.image_bytes, self.image_chunk_bytes,
            self.block_bytes, self.chunk_bytes,
        )  # fmt: skip


_table_decoder = msgspec.msgpack.Decoder(SegmentTable)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBlock(Work):
    """Work for a thread: decode one block and check what comes out; then call `decoded`."""

    parcel: Parcel
    block: int
    coded: memoryview
    base: memoryview | None
    out: memoryview
    hashes: bytes
    """Of the image chunks in `out`."""
    chunk_bytes: int

    @property
    def version(self) -> PolicyVersion:
        """The version that it is a part of."""
        return self.parcel.version

    @property
    def form(self) -> Form:
        """The form in which that version came."""
        return self.parcel.form

    def run(self) -> str:
        """Return what is wrong with the block, or nothing."""
        try:
            decode_block(self.coded, self.base, self.out)
        except RemoteProtocolError as error:
            return str(error)
        digests = (
            blake3(self.out[start : start + self.chunk_bytes]).digest()
            for start in range(0, len(self.out), self.chunk_bytes)
        )
        if b"".join(digests) != self.hashes:
            return "what comes out does not have the hashes that the learner signed"
        return ""


@dataclass(slots=True)
class _Part:
    """A segment and its payload."""

    table: SegmentTable
    payload: memoryview
    first_chunk: int
    offsets: list[int]
    """Where each coded block begins, and where the last ends."""


class Parcel(Chunked):
    """The coded form of a version, whole or on its way."""

    def __init__(self, version: PolicyVersion, form: Form) -> None:
        """Start without segments."""
        self.version = version
        self.form = form
        self.frames: list[bytes] = []
        """The signed tables, as they travel."""
        self.has_chunk = bytearray()
        self.num_held = 0
        self.writing: set[int] = set()
        self.arena: memoryview | None = None
        """Where the image is decoded to, of `image_bytes`; the caller provides it."""
        self.expected_bytes = 0
        """Size that was announced, before all segments are known."""
        self._parts: list[_Part] = []
        self._starts: list[int] = []
        self._started_blocks: set[int] = set()
        self._decoded_blocks: set[int] = set()

    # --- segments --------------------------------------------------------------------------------

    @property
    def num_segments(self) -> int:
        """Segments whose tables are known."""
        return len(self._parts)

    @property
    def image_bytes(self) -> int:
        """Bytes of the image that comes out; 0 before the first segment."""
        return self._parts[0].table.image_bytes if self._parts else 0

    @property
    def is_open(self) -> bool:
        """Whether segments may be added."""
        return not self._parts or self._parts[-1].table.manifest is None

    @property
    def is_being_coded(self) -> bool:
        """Whether this is the learner's, which has yet to code the rest."""
        return self.is_open and not self.is_half

    @property
    def is_half(self) -> bool:
        """Whether it is being fetched, or was given up, or its image has yet to come out."""
        return not self._parts or self.arena is not None or self.num_held < self.num_chunks

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments; what was announced while they are not all known."""
        known = sum(part.table.num_bytes for part in self._parts)
        return max(known, self.expected_bytes) if self.is_open else known

    def add(self, table: SegmentTable, frame: bytes, payload: memoryview | None = None) -> None:
        """Append the next segment, with its payload at the learner."""
        first_chunk = len(self.has_chunk)
        self._starts.append(first_chunk)
        offsets = [0, *itertools.accumulate(table.block_sizes)]
        is_held = payload is not None
        self.has_chunk += (b"\1" if is_held else b"\0") * table.num_chunks
        self.num_held += table.num_chunks if is_held else 0
        if payload is None:
            payload = new_arena(table.num_bytes)
            if self.journal is not None:
                self.journal.table(frame)
        self._parts.append(_Part(table, payload, first_chunk, offsets))
        self.frames.append(frame)

    def verify(
        self, frame: bytes | bytearray | memoryview, *, public_key: bytes, run_id: str,
        max_bytes: int,
    ) -> SegmentTable:  # fmt: skip
        """Check a table that came from the network and is to be the next.

        Raises:
            RemoteProtocolError: if signature, run, order or any size is wrong.
        """
        signed = verify_signature(frame, public_key=public_key)
        try:
            table = _table_decoder.decode(signed.body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"a malformed segment: {error}") from error
        where = f"segment {self.num_segments} of {self.version} as {self.form}"
        named = (table.run_id, table.version, table.base, table.index)
        if named != (run_id, self.version, self.form.base, self.num_segments):
            raise RemoteProtocolError(f"{where}: got {named}")
        if self._parts and table.layout != self._parts[0].table.layout:
            raise RemoteProtocolError(f"{where}: its layout is not that of the first segment")
        first_block = sum(len(part.table.block_sizes) for part in self._parts)
        _check(table, where, first_block=first_block, max_bytes=max_bytes)
        if table.manifest is not None:
            self._check_manifest(table, public_key=public_key, max_bytes=max_bytes)
        return table

    def _check_manifest(self, table: SegmentTable, *, public_key: bytes, max_bytes: int) -> None:
        _, manifest = verify(
            table.manifest or b"", public_key=public_key, run_id=table.run_id, max_bytes=max_bytes
        )
        hashes = b"".join(part.table.result_hashes for part in self._parts) + table.result_hashes
        said = (table.version, table.image_bytes, table.image_chunk_bytes, hashes)
        is_so = (
            manifest.version, manifest.num_bytes, manifest.chunk_bytes, manifest.chunk_hashes
        )  # fmt: skip
        if said != is_so:
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
        """Return where the bytes of a chunk are, or are to be written."""
        part, start, stop = self._span(index)
        return part.payload[start:stop]

    def chunk_size(self, index: int) -> int:
        """Return the bytes that a chunk must have."""
        _, start, stop = self._span(index)
        return stop - start

    def chunk_hash(self, index: int) -> bytes:
        """Return the BLAKE3-256 hash that a chunk must have."""
        part = self._part(index)
        place = (index - part.first_chunk) * HASH_BYTES
        return part.table.chunk_hashes[place : place + HASH_BYTES]

    # --- blocks ----------------------------------------------------------------------------------

    def decodable(self, index: int, base: memoryview | None) -> list[DecodeBlock]:
        """Return the work that has become possible with a chunk, each piece once.

        Args:
            index: the chunk that has just been kept.
            base: the whole image of `form.base`, of the same size; None for an anchor.

        `arena` must have been given before.
        """
        part, start, stop = self._span(index)
        first = max(0, bisect.bisect_right(part.offsets, start) - 1)
        work = []
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

    def _work(self, part: _Part, number: int, base: memoryview | None) -> DecodeBlock:
        table = part.table
        assert self.arena is not None
        block = table.first_block + number
        start = block * table.block_bytes
        stop = min(start + table.block_bytes, table.image_bytes)
        hashes_per_block = table.block_bytes // table.image_chunk_bytes * HASH_BYTES
        hashes = table.result_hashes[number * hashes_per_block : (number + 1) * hashes_per_block]
        return DecodeBlock(
            parcel=self,
            block=block,
            coded=part.payload[part.offsets[number] : part.offsets[number + 1]],
            base=None if base is None else base[start:stop],
            out=self.arena[start:stop],
            hashes=hashes,
            chunk_bytes=table.image_chunk_bytes,
        )

    def decoded(self, work: DecodeBlock) -> Transfer | None:
        """Note that a block came out right; return the image when it was the last."""
        self._decoded_blocks.add(work.block)
        last = self._parts[-1].table
        if last.manifest is None or len(self._decoded_blocks) < last.num_blocks_in_image:
            return None
        signed = msgspec.msgpack.decode(last.manifest, type=SignedManifest)
        manifest = msgspec.msgpack.decode(signed.body, type=Manifest)
        # From now on it is the image's: the parcel may outlive it.
        arena, self.arena = self.arena, None
        assert arena is not None
        has_chunk = bytearray(b"\1") * manifest.num_chunks
        return Transfer(signed, manifest, arena, has_chunk, manifest.num_chunks)


def _check(table: SegmentTable, where: str, *, first_block: int, max_bytes: int) -> None:
    """Refuse a table whose numbers contradict each other or exceed what this node accepts."""
    chunk_bytes = (table.chunk_bytes, table.image_chunk_bytes)
    if not all(MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES for size in chunk_bytes):
        raise RemoteProtocolError(
            f"{where}: chunks of {chunk_bytes} bytes; {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} are "
            "accepted"
        )
    if not 0 < table.image_bytes <= max_bytes:
        raise RemoteProtocolError(
            f"{where}: an image of {table.image_bytes} bytes; this node accepts at most {max_bytes}"
        )
    if table.block_bytes < 1 or table.block_bytes % table.image_chunk_bytes:
        raise RemoteProtocolError(f"{where}: blocks of {table.block_bytes} bytes")
    stop = first_block + len(table.block_sizes)
    is_last = stop == table.num_blocks_in_image
    if table.first_block != first_block or not table.block_sizes or (
        stop > table.num_blocks_in_image or is_last != (table.manifest is not None)
    ):  # fmt: skip
        raise RemoteProtocolError(f"{where}: its blocks do not follow those before")
    image_start = first_block * table.block_bytes
    image_stop = min(stop * table.block_bytes, table.image_bytes)
    most = min(table.block_bytes, table.image_bytes) + MAX_BLOCK_OVERHEAD_BYTES
    if not all(0 < size <= most for size in table.block_sizes):
        raise RemoteProtocolError(f"{where}: a coded block that is empty or longer than its block")
    num_results = -(-(image_stop - image_start) // table.image_chunk_bytes)
    if len(table.result_hashes) != num_results * HASH_BYTES:
        raise RemoteProtocolError(f"{where}: {len(table.result_hashes)} bytes of result hashes")
    num_chunks = -(-table.num_bytes // table.chunk_bytes)
    if len(table.chunk_hashes) != num_chunks * HASH_BYTES:
        raise RemoteProtocolError(f"{where}: {len(table.chunk_hashes)} bytes of chunk hashes")


def split_blocks(image_bytes: int, block_bytes: int) -> Sequence[tuple[int, int]]:
    """Return the byte range [start, stop) of each block of an image."""
    return [
        (start, min(start + block_bytes, image_bytes))
        for start in range(0, image_bytes, block_bytes)
    ]
