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

import abc
import bisect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from echo.core.errors import ForgedError, LocalProtocolError, RemoteProtocolError, StorageError
from echo.core.rollout import KEEP_VERSIONS, PolicyVersion
from echo.weights.cipher import Encrypted, SentChunks, check_key, crypt
from echo.weights.delta import BlockPatch, decode_block, fill, open_block
from echo.weights.manifest import (
    HASH_BYTES,
    Manifest,
    SegmentTable,
    SignedManifest,
    decode_table,
    encode_signed,
    provisional,
    verify,
    verify_signature,
)
from echo.wire.actions import Work
from echo.wire.codec import Frame
from echo.wire.messages import FULL, OPEN_END, EncodedVersionOffer, Form, ItemId

# --- version store: where images lie --------------------------------------------------------------


def allocate(num_bytes: int) -> memoryview:
    """Return room for an image; its bytes mean nothing until they are written.

    The system finds the memory chunk by chunk, as they come. A bytearray would be filled with zeros
    here and now, 0.6 s for each GB in which the node does nothing else.
    """
    return np.empty(num_bytes, dtype=np.uint8).data


def touched_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros whose pages have been found."""
    piece = np.empty(num_bytes, np.uint8)
    piece.fill(0)
    return piece


class RecycledMemory:
    """Memory for images, handed out again once its last image can no longer be reached.

    An exporter lends the memory, and only views of it keep the exporter alive: slices of them, what
    torch or numpy make of them, and what libzmq has yet to send.
    """

    def __init__(
        self,
        num_pieces: int = 1,
        make: Callable[[int], npt.NDArray[np.uint8]] = touched_memory,
    ) -> None:
        """Start without any.

        Args:
            num_pieces: how many of a size will be in use at a time, at least; all of them are made
                with the first image. Their pages are found then, and not when a version is waited
                for.
            make: makes a piece of this number of zeros.
        """
        self._num_pieces = num_pieces
        self._make = make
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lent: list[tuple[npt.NDArray[np.uint8], weakref.ref[npt.NDArray[np.uint8]]]] = []

    def take(self, num_bytes: int) -> memoryview:
        """Return memory of a size; zeros, or what was in it before."""
        self._free += [piece for piece, exporter in self._lent if exporter() is None]
        self._lent = [each for each in self._lent if each[1]() is not None]
        room = max(1, self._num_pieces - len(self._lent))
        # Of another size, or more than are in use at a time: no longer of use.
        self._free = [piece for piece in self._free if piece.nbytes == num_bytes][:room]
        while len(self._free) < room:
            self._free.append(self._make(num_bytes))
        piece = self._free.pop(0)
        exporter = np.frombuffer(piece, np.uint8)
        self._lent.append((piece, weakref.ref(exporter)))
        return exporter.data


Write: TypeAlias = Callable[[memoryview, Frame], None]
"""A version store's `write`."""


class VersionStore:
    """Where images lie: in this process's memory, without a bound.

    `runtime/disk_store.py` has those that have one, and those that survive the process.
    """

    may_block = False
    """Whether `write` may take long, so that it belongs into a thread."""

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        """Return room for an image.

        Raises:
            StorageError: if there is none.
        """
        return allocate(num_bytes)

    def sealed(self, version: PolicyVersion, signed: bytes) -> None:
        """Note the manifest of an image that was created without it."""

    def drop(self, version: PolicyVersion) -> None:
        """Drop an image; its readers keep it."""

    def write(self, place: memoryview, data: Frame) -> None:
        """Copy a chunk to its place in an image; from any thread, once.

        Raises:
            OSError: if the disk refuses it.
        """
        fill(place, data)

    def begin_patch(self, patch: Patch) -> None:
        """Mark an image that is about to be written in place; from any thread.

        Raises:
            OSError: if the disk refuses it.
        """

    def cancel_patch(self, patch: Patch) -> None:
        """Take the mark back: the image is the base again; from the thread of `begin_patch`."""

    def advance(self, base: PolicyVersion, version: PolicyVersion) -> None:
        """Count the memory of a version as that of the one which it has become."""


# --- items: which chunks are here, which are missing ----------------------------------------------


class Chunked(abc.ABC):
    """An item with some chunks here."""

    has_chunk: bytearray
    """One byte per chunk: 1 if held and verified."""
    num_held: int
    writing: set[int]
    """Chunks that are being verified and written."""

    @property
    def num_chunks(self) -> int:
        """Chunks that are known so far."""
        return len(self.has_chunk)

    @property
    @abc.abstractmethod
    def is_encrypted(self) -> bool:
        """Whether its chunks travel encrypted, so that the link need not."""

    @property
    def can_be_sent(self) -> bool:
        """Whether what is held of it can be passed on."""
        return True

    @property
    def is_open(self) -> bool:
        """Whether chunks may be added."""
        return False

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is held."""
        return self.num_held == self.num_chunks and not self.is_open

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all chunks that are known so far."""

    @abc.abstractmethod
    def place(self, index: int) -> memoryview:
        """Return where the bytes of a chunk are, or are to be written."""

    def chunk(self, index: int) -> Frame:
        """Return a chunk that is held as it travels, mostly without copying.

        Raises:
            StorageError: if it is no longer what the learner signed.
        """
        return self.place(index).toreadonly()

    @abc.abstractmethod
    def chunk_size(self, index: int) -> int:
        """Return the bytes that a chunk must have."""

    @abc.abstractmethod
    def chunk_hash(self, index: int) -> bytes:
        """Return the BLAKE3-256 hash that a chunk must have as it travels."""

    def put(self, index: int, data: Frame, write: Write | None = None) -> None:
        """Write a chunk that has come to its place, from any thread.

        Args:
            index: of the chunk.
            data: as it travels, and known to be right.
            write: the store's; None for memory.

        Raises:
            OSError: if the disk refuses it.
        """
        (write or fill)(self.place(index), data)

    def mark(self, index: int) -> None:
        """Count a chunk that has been written and verified as held."""
        self.has_chunk[index] = 1
        self.num_held += 1

    def _come(self) -> bytearray:
        """Return one byte per chunk: 1 if it is held or being written."""
        if not self.writing:
            return self.has_chunk
        has_chunk = self.has_chunk.copy()
        for index in self.writing:
            has_chunk[index] = 1
        return has_chunk

    @property
    def is_missing(self) -> bool:
        """Whether a chunk has not come, or more may be added."""
        return self.is_open or self._come().find(0) >= 0

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Return the half-open runs of chunks that have not come, ascending.

        While chunks may be added the last run stops at OPEN_END.
        """
        has_chunk = self._come()
        runs, start = [], 0
        while (start := has_chunk.find(0, start)) >= 0:
            stop = has_chunk.find(1, start)
            stop = len(has_chunk) if stop < 0 else stop
            runs.append((start, stop))
            start = stop
        if self.is_open:
            first = runs.pop()[0] if runs and runs[-1][1] == len(has_chunk) else len(has_chunk)
            runs.append((first, OPEN_END))
        return tuple(runs)


@dataclass(slots=True)
class Transfer(Chunked):
    """A version's image in the store, whole or on its way."""

    signed: SignedManifest | None
    """None until the learner's seal has come."""
    manifest: Manifest
    """Without any hash until then."""
    storage: bytearray | memoryview
    has_chunk: bytearray
    num_held: int = 0
    writing: set[int] = field(default_factory=set)
    may_change: bool = False
    """Whether its memory may become that of a later version: it is never lent."""
    is_hashed: bool = True
    """Whether each chunk was hashed when it came; else it is made of signed changes."""
    later: list[Patch] = field(default_factory=list)
    """Patches that have been, or are being, written over it since: oldest first."""
    sent: SentChunks = field(default_factory=SentChunks)
    """Its chunks as they travel, the most recent ones."""
    is_damaged: bool = False
    """Whether a chunk was found that is not what the learner signed; the audit will find it too."""

    @property
    def is_current(self) -> bool:
        """Whether its memory holds this version and no later one."""
        return not self.later

    def seal(self, signed: SignedManifest, manifest: Manifest) -> str:
        """Take the manifest that the learner has made meanwhile; return what contradicts it."""
        if provisional(manifest, manifest.version) != self.manifest:
            return f"the seal of {manifest.version} describes another image than its deltas"
        self.signed, self.manifest = signed, manifest
        return ""

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes of this version, copied where the memory under them may change.

        A patch that begins while this reads is noticed: what it writes is taken back as well. So
        any thread may read.
        """
        if not self.may_change:
            return memoryview(self.storage)[start:stop].toreadonly()
        while True:
            known = self.later
            later = known[:]
            size = later[0].block_bytes if later else 1  # words are put back in whole blocks
            first = start - start % size
            piece = np.frombuffer(self.storage, np.uint8)[first : -(-stop // size) * size].copy()
            for patch in reversed(later):
                patch.take_back(piece.data, first // size)
            # A patch that was begun and taken back meanwhile has left another list.
            if known is self.later and len(later) == len(known):
                return piece.data[start - first : stop - first].toreadonly()

    @property
    def is_encrypted(self) -> bool:
        """Whether its chunks travel encrypted."""
        return bool(self.manifest.key_hash)

    @property
    def can_be_sent(self) -> bool:
        """Whether its manifest is here, and with it the key, and nothing wrong was found."""
        return self.signed is not None and not self.is_damaged

    @property
    def _key(self) -> bytes:
        return b"" if self.signed is None else self.signed.key

    def put(self, index: int, data: Frame, write: Write | None = None) -> None:
        """Write a chunk to its place, decrypted: straight into memory, or beside it for a disk."""
        place = self.place(index)
        if not self.is_encrypted:
            (write or fill)(place, data)
            return
        plain = place if write is None else np.empty(len(data), np.uint8).data
        crypt(self._key, index, data, plain)
        if write is not None:
            write(place, plain)

    def chunk(self, index: int) -> Frame:
        """Return a chunk that is held as it travels: encrypted again, to what it was."""
        plain = self.read(*self.manifest.chunk_range(index))
        if not self.is_encrypted:
            return plain
        found = self.sent.get(self._key, index)
        if found is not None:
            return found
        encrypted = np.empty(len(plain), np.uint8).data
        crypt(self._key, index, plain, encrypted)
        if self.may_change and blake3(encrypted).digest() != self.chunk_hash(index):
            self.is_damaged = True
            raise StorageError(f"chunk {index} of {self.manifest.version} has changed in memory")
        self.passed_on(index, encrypted.toreadonly())
        return encrypted.toreadonly()

    def passed_on(self, index: int, data: Frame) -> None:
        """Keep a chunk for a while, as it travels: more nodes may ask for it."""
        if self.is_encrypted:
            self.sent.add(self._key, index, data)

    def is_right(self, index: int) -> bool:
        """Return whether a chunk is still what the learner signed."""
        piece = self.read(*self.manifest.chunk_range(index))
        return blake3(piece).digest() == self.manifest.chunk_hash(index)

    @property
    def num_bytes(self) -> int:
        """Bytes of the image."""
        return self.manifest.num_bytes

    def place(self, index: int) -> memoryview:
        """Return where the bytes of a chunk are, or are to be written."""
        start, stop = self.manifest.chunk_range(index)
        return memoryview(self.storage)[start:stop]

    def chunk_size(self, index: int) -> int:
        """Return the bytes that a chunk must have."""
        start, stop = self.manifest.chunk_range(index)
        return stop - start

    def chunk_hash(self, index: int) -> bytes:
        """Return the BLAKE3-256 hash that a chunk must have as it travels."""
        return self.manifest.sent_hash(index)


# --- patches: what a delta changes of an image, in place ------------------------------------------

PatchMode: TypeAlias = Literal["copy", "now", "on_install"]
"""States of a delta on its base: a patched copy of the base, or the base patched in place; at once,
or when the engine installs the version.
"""


class Patch:
    """Everything that a delta changes of an image."""

    def __init__(self, base: PolicyVersion, version: PolicyVersion, block_bytes: int) -> None:
        """Start without a block.

        Args:
            base: the version that the memory holds.
            version: what it becomes.
            block_bytes: image bytes per block.
        """
        self.base = base
        self.version = version
        self.block_bytes = block_bytes
        self.blocks: dict[int, BlockPatch] = {}
        """By number; threads add them while a delta comes."""

    @property
    def num_words(self) -> int:
        """Words that change."""
        return sum(block.new.size for block in self.blocks.values())

    def write(self, image: memoryview) -> None:
        """Write the new words to an image that holds the base."""
        for number, block in self.blocks.items():
            start = number * self.block_bytes
            block.write(image[start : start + self.block_bytes])

    def take_back(self, piece: memoryview, first: int = 0) -> None:
        """Write the old words, whichever of the new ones had been written.

        Args:
            piece: the image, or a copy of some whole blocks of it.
            first: the number of the block that it begins with.
        """
        num_blocks = -(-len(piece) // self.block_bytes)
        for number in range(first, first + num_blocks):
            block = self.blocks.get(number)
            if block is not None:
                start = (number - first) * self.block_bytes
                block.take_back(piece[start : start + self.block_bytes])


@dataclass(frozen=True, slots=True, eq=False)
class ApplyPatch(Work):
    """Work for a thread: write a patch that is whole over its base; then call `worked`."""

    patch: Patch
    image: memoryview
    store: VersionStore

    def run(self) -> str:
        """Return what the disk has against it, or nothing."""
        try:
            self.store.begin_patch(self.patch)
        except OSError as error:
            return error.strerror or str(error) or "unknown error"
        self.patch.write(self.image)
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class AuditChunks(Work):
    """Work for a thread: hash some chunks of a sealed image again; then call `worked`."""

    image: Transfer
    first: int
    stop: int

    def run(self) -> str:
        """Return which chunk is not what the learner signed, or nothing."""
        for index in range(self.first, self.stop):
            if not self.image.is_right(index):
                return f"chunk {index}"
        return ""


# --- encoded versions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class OpenBlock(Work):
    """Work for a thread: find what one block changes of its base; then call `worked`."""

    encoded: EncodedVersion
    block: int
    coded: memoryview
    """As it came."""
    encrypted: Encrypted | None
    base: memoryview
    old_hash: bytes
    out: memoryview | None
    """Where the patched copy of the base goes; None where it is patched in place."""

    def run(self) -> str:
        """Return what is wrong with block or base, or nothing."""
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
    """Work for a thread: decode one block and check what comes out; then call `worked`."""

    encoded: EncodedVersion
    block: int
    coded: memoryview
    """As it came."""
    encrypted: Encrypted | None
    base: memoryview | None
    out: memoryview
    hashes: bytes
    """Of the image chunks in `out`."""
    chunk_bytes: int

    @property
    def version(self) -> PolicyVersion:
        """The version that it is a part of."""
        return self.encoded.version

    @property
    def form(self) -> Form:
        """The form in which that version came."""
        return self.encoded.form

    def run(self) -> str:
        """Return what is wrong with the block, or nothing."""
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
    """A segment and its payload."""

    table: SegmentTable
    payload: memoryview
    first_chunk: int
    offsets: list[int]
    """Where each coded block begins, and where the last ends."""


class EncodedVersion(Chunked):
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
        self.storage: memoryview | None = None
        """Where the image is decoded to, of `image_bytes`; the caller provides it."""
        self.patch: Patch | None = None
        """Its changes, where it is a delta on its base, until they have been written."""
        self.expected_bytes = 0
        """Size that was announced, before all segments are known."""
        self._key = b""
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
    def is_on_base(self) -> bool:
        """Whether it says what it replaces, and not what comes out."""
        return bool(self._parts) and self._parts[0].table.is_on_base

    @property
    def is_encrypted(self) -> bool:
        """Whether its chunks travel encrypted."""
        return bool(self._key)

    @property
    def is_open(self) -> bool:
        """Whether segments may be added."""
        return not self._parts or not self._parts[-1].table.is_last

    @property
    def is_ready(self) -> bool:
        """Whether all that it changes in place is known, and has yet to be written."""
        return (
            self.patch is not None
            and self.storage is None
            and not self.is_open
            and len(self._decoded_blocks) == self._parts[-1].table.num_blocks_in_image
        )

    @property
    def is_being_coded(self) -> bool:
        """Whether this is the learner's, which has yet to code the rest."""
        return self.is_open and not self.is_half

    @property
    def is_half(self) -> bool:
        """Whether it is being fetched, or was given up, or its image has yet to come out."""
        is_in_work = self.storage is not None or self.patch is not None
        return not self._parts or is_in_work or self.num_held < self.num_chunks

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments; what was announced while they are not all known."""
        known = sum(part.table.num_bytes for part in self._parts)
        return max(known, self.expected_bytes) if self.is_open else known

    def add(self, table: SegmentTable, frame: bytes, payload: memoryview | None = None) -> None:
        """Append the next segment, with its payload at the learner, as it travels."""
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
        """Check a table that came from the network and is to be the next.

        Raises:
            RemoteProtocolError: if signature, run, order or any size is wrong.
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

    def decodable(self, index: int, base: memoryview | None) -> list[DecodeBlock | OpenBlock]:
        """Return the work that has become possible with a chunk, each piece once.

        Args:
            index: the chunk that has just been kept.
            base: the whole image of `form.base`, of the same size; None for a keyframe.

        `storage` or `patch` must have been given before.
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
        """Note that a block came out right; return whether it was the last."""
        self._decoded_blocks.add(work.block)
        last = self._parts[-1].table
        return last.is_last and len(self._decoded_blocks) == last.num_blocks_in_image

    def image(self, base: Transfer | None) -> Transfer:
        """Return the image that has come out; from now on the memory under it is its own.

        Args:
            base: what it was coded against.
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


# --- item store: hold, offer, evict ---------------------------------------------------------------

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


# --- trust: what the learner of the run has signed ------------------------------------------------


@contextmanager
def _taken_for_forged() -> Iterator[None]:
    """Blame the peer that passed on an item that cannot be verified."""
    try:
        yield
    except RemoteProtocolError as error:
        raise ForgedError(str(error)) from error


class TrustedManifests:
    """The learner's key, and the manifests that it was found under."""

    def __init__(self) -> None:
        """Verify nothing until `set` is called."""
        self.manifests: dict[PolicyVersion, tuple[SignedManifest, Manifest]] = {}
        self.local_image: tuple[bytearray, bytes] | None = None
        """Bytes that lie here, laid out as an image, and their hash."""
        self._public_key: bytes | None = None
        self.run_id = ""
        self._max_image_bytes = 0

    def set(self, *, public_key: bytes, run_id: str, max_image_bytes: int) -> None:
        """Accept what this key has signed for this run, up to this size."""
        self._public_key, self.run_id, self._max_image_bytes = public_key, run_id, max_image_bytes

    @property
    def has_key(self) -> bool:
        """Whether `set` was called."""
        return self._public_key is not None

    def _key(self) -> bytes:
        if self._public_key is None:
            raise LocalProtocolError("a parent was set before the learner's key was known")
        return self._public_key

    def manifest(self, version: PolicyVersion, frame: Frame) -> Manifest:
        """Return the verified manifest of a version that was announced.

        Raises:
            ForgedError: if it is not what it says, or not the learner's.
        """
        if version not in self.manifests:
            with _taken_for_forged():
                signed, manifest = verify(
                    frame,
                    public_key=self._key(),
                    run_id=self.run_id,
                    max_bytes=self._max_image_bytes,
                )
            if manifest.version != version:
                raise ForgedError(
                    f"an Announce of {version} with the manifest of {manifest.version}"
                )
            self.manifests[version] = signed, manifest
        return self.manifests[version][1]

    def use_local_image(self, version: PolicyVersion) -> Transfer | None:
        """Return the image that this machine has already, if it is the first one announced."""
        found, local = self.manifests.get(version), self.local_image
        if found is None or local is None:
            return None
        self.local_image = None
        signed, manifest = found
        if local[1] != manifest.image_hash:
            return None
        has_chunk = bytearray(b"\1") * manifest.num_chunks
        return Transfer(signed, manifest, local[0], has_chunk, manifest.num_chunks)

    def segment(self, encoded: EncodedVersion, frame: Frame) -> SegmentTable:
        """Return the verified next table of an encoded version.

        Raises:
            ForgedError: if it is not that, or not the learner's.
        """
        with _taken_for_forged():
            return encoded.verify(
                frame,
                public_key=self._key(),
                run_id=self.run_id,
                max_bytes=self._max_image_bytes,
            )

    def retire(self, oldest: PolicyVersion | None, offered: Iterable[ItemId] = ()) -> None:
        """Forget the manifests of older versions, except those that may be fetched again."""
        kept = {version for version, form in offered if form == FULL}
        old = [v for v in self.manifests if oldest is not None and v < oldest and v not in kept]
        for version in old:
            del self.manifests[version]
