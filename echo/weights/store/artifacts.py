"""Artifacts: which chunks of an item are held, which are missing, and how a chunk travels.

Memory that may be patched is never lent: `Transfer.read` returns a copy in which the old words are
put back, also those of a patch that is being written. So readers need no lock.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from echo.core.errors import StorageError
from echo.weights.cipher import SentChunks, crypt
from echo.weights.delta import fill
from echo.weights.manifest import Manifest, SignedManifest, provisional
from echo.weights.store.memory import Write
from echo.weights.store.patches import Patch
from echo.wire.actions import Work
from echo.wire.codec import Frame
from echo.wire.messages import OPEN_END


class Chunked(abc.ABC):
    """An item, complete or partial."""

    has_chunk: bytearray
    """One byte per chunk: 1 if held and verified."""
    num_held: int
    writing: set[int]
    """Chunks that are being verified and written."""

    @property
    def num_chunks(self) -> int:
        """Number of known chunks: the tables of an encoded version arrive one by one."""
        return len(self.has_chunk)

    @property
    @abc.abstractmethod
    def is_encrypted(self) -> bool:
        """Whether its chunks travel encrypted, so that the link need not encrypt them."""

    @property
    def can_be_sent(self) -> bool:
        """Whether its held chunks can be sent to children."""
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
        """Bytes of all known chunks."""

    @abc.abstractmethod
    def place(self, index: int) -> memoryview:
        """Return the memory of a chunk, held or not."""

    def chunk(self, index: int) -> Frame:
        """Return a held chunk as it travels, mostly without a copy.

        Raises:
            StorageError: if its bytes no longer match their hash.
        """
        return self.place(index).toreadonly()

    @abc.abstractmethod
    def chunk_size(self, index: int) -> int:
        """Return the number of bytes of a chunk."""

    @abc.abstractmethod
    def chunk_hash(self, index: int) -> bytes:
        """Return the BLAKE3-256 hash that a chunk must have as it travels."""

    def put(self, index: int, data: Frame, write: Write | None = None) -> None:
        """Write a verified chunk to its memory; from any thread.

        Args:
            index: of the chunk.
            data: as it travels.
            write: the version store's `write`; None for memory.

        Raises:
            OSError: if the disk refuses it.
        """
        (write or fill)(self.place(index), data)

    def mark(self, index: int) -> None:
        """Mark a verified and written chunk as held."""
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
        """Whether a known chunk is neither held nor being written, or more may be added."""
        return self.is_open or self._come().find(0) >= 0

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Return the half-open runs of missing chunks, ascending.

        While chunks may be added the last run ends at OPEN_END.
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
    """A version's image in the store, complete or partial."""

    signed: SignedManifest | None
    """None until the learner's seal has arrived."""
    manifest: Manifest
    """Without hashes until `signed` is known."""
    storage: bytearray | memoryview
    has_chunk: bytearray
    num_held: int = 0
    writing: set[int] = field(default_factory=set)
    may_change: bool = False
    """Whether a patch may turn its memory into a later version; then it is never lent."""
    is_hashed: bool = True
    """Whether each chunk was hashed on arrival; otherwise signed changes have made the image."""
    later: list[Patch] = field(default_factory=list)
    """Patches written, or being written, over its memory; oldest first.

    `read` notices a patch by a longer list, and one that was begun and taken back by another list:
    so a patch is appended in place, and taken back by assigning a new list.
    """
    sent: SentChunks = field(default_factory=SentChunks)
    """The chunks that were sent most recently, as they travel."""
    is_damaged: bool = False
    """Whether a chunk no longer matches its hash; the audit will find it too."""

    @property
    def is_current(self) -> bool:
        """Whether its memory holds this version and no later one."""
        return not self.later

    def seal(self, signed: SignedManifest, manifest: Manifest) -> str:
        """Add the missing manifest; return why it does not fit, or an empty string."""
        if provisional(manifest, manifest.version) != self.manifest:
            return f"the seal of {manifest.version} describes another image than its deltas"
        self.signed, self.manifest = signed, manifest
        return ""

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes of this version, as a copy where its memory may change; from any thread.

        If a patch begins during the read, the bytes are read again.
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
            # See `later`: no patch has begun, and none was taken back, during the copy.
            if known is self.later and len(later) == len(known):
                return piece.data[start - first : stop - first].toreadonly()

    @property
    def is_encrypted(self) -> bool:
        """Whether its chunks travel encrypted."""
        return bool(self.manifest.key_hash)

    @property
    def can_be_sent(self) -> bool:
        """Whether manifest and chunk key are known, and no chunk was found damaged."""
        return self.signed is not None and not self.is_damaged

    @property
    def _key(self) -> bytes:
        return b"" if self.signed is None else self.signed.key

    def put(self, index: int, data: Frame, write: Write | None = None) -> None:
        """Write a chunk decrypted: directly into memory, or by way of a buffer to a disk."""
        place = self.place(index)
        if not self.is_encrypted:
            (write or fill)(place, data)
            return
        plain = place if write is None else np.empty(len(data), np.uint8).data
        crypt(self._key, index, data, plain)
        if write is not None:
            write(place, plain)

    def chunk(self, index: int) -> Frame:
        """Return a held chunk as it travels: encrypted again, to the same bytes."""
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
        """Keep a chunk as it travels for a while, for the next child that requests it."""
        if self.is_encrypted:
            self.sent.add(self._key, index, data)

    def is_right(self, index: int) -> bool:
        """Return whether the bytes of a chunk still match their hash."""
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


@dataclass(frozen=True, slots=True, eq=False)
class AuditChunks(Work):
    """Work for a thread: hash some chunks of a sealed image again; then call `worked`."""

    image: Transfer
    first: int
    stop: int

    def run(self) -> str:
        """Hash the chunks; return the first with a wrong hash, or an empty string."""
        for index in range(self.first, self.stop):
            if not self.image.is_right(index):
                return f"chunk {index}"
        return ""
