"""Items of the store: the held chunks of an item, and the reading of a chunk to be sent.

A delta may be written over the image of its base (a patch). Readers never get a view of such
memory: `Transfer.read` returns a copy with the old words, even while the patch is being written. So
readers need no lock.
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
    """An item of the store: one version in one form, complete or partial."""

    has_chunk: bytearray
    """One byte for each known chunk: 1 if the chunk was verified and written."""
    num_held: int
    writing: set[int]
    """Indices of the chunks that are being verified and written."""

    @property
    def num_chunks(self) -> int:
        """Number of known chunks. Each arriving table adds chunks."""
        return len(self.has_chunk)

    @property
    @abc.abstractmethod
    def is_encrypted(self) -> bool:
        """Whether chunks are sent encrypted."""

    @property
    def can_be_sent(self) -> bool:
        """Whether the held chunks of the item can be sent to children."""
        return True

    @property
    def is_open(self) -> bool:
        """Whether the item may still get further chunks."""
        return False

    @property
    def is_complete(self) -> bool:
        """Whether this node holds every chunk of the item."""
        return self.num_held == self.num_chunks and not self.is_open

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Number of bytes of all known chunks."""

    @abc.abstractmethod
    def place(self, index: int) -> memoryview:
        """Return the memory for the bytes of a chunk, held or not."""

    def chunk(self, index: int) -> Frame:
        """Return a held chunk in the form in which it is sent.

        Usually the chunk is not copied.

        Raises:
            StorageError: if the bytes of the chunk no longer match its hash.
        """
        return self.place(index).toreadonly()

    @abc.abstractmethod
    def chunk_size(self, index: int) -> int:
        """Return the number of bytes of a chunk."""

    @abc.abstractmethod
    def chunk_hash(self, index: int) -> bytes:
        """Return the BLAKE3-256 hash of a chunk as it is sent."""

    def put(self, index: int, data: Frame, write: Write | None = None) -> None:
        """Write a verified chunk to its memory; thread-safe.

        Args:
            index: the index of the chunk.
            data: the received bytes, in the form in which chunks are sent.
            write: the version store's `write`; None to write to memory.

        Raises:
            OSError: if the disk refuses the write.
        """
        (write or fill)(self.place(index), data)

    def mark(self, index: int) -> None:
        """Mark a verified and written chunk as held."""
        self.has_chunk[index] = 1
        self.num_held += 1

    def _held_flags(self) -> bytearray:
        """Return one byte for each known chunk: 1 if the chunk is held or being written."""
        if not self.writing:
            return self.has_chunk
        has_chunk = self.has_chunk.copy()
        for index in self.writing:
            has_chunk[index] = 1
        return has_chunk

    @property
    def is_missing(self) -> bool:
        """Whether some chunk is missing, or the item is still open."""
        return self.is_open or self._held_flags().find(0) >= 0

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Return the half-open ranges of missing chunks, in ascending order.

        Chunks that are being written are not missing. If the item may still get further chunks, the
        last range ends at OPEN_END.
        """
        has_chunk = self._held_flags()
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
    """The image of a version in the store, complete or partial."""

    signed: SignedManifest | None
    """The manifest that the learner has signed; None until it has arrived."""
    manifest: Manifest
    """The manifest. It has no hashes until `signed` has arrived."""
    storage: bytearray | memoryview
    has_chunk: bytearray
    num_held: int = 0
    writing: set[int] = field(default_factory=set)
    may_change: bool = False
    """Whether a patch may change the memory of the image into a later version. If so, readers get
    copies.
    """
    is_hashed: bool = True
    """Whether each chunk was hashed on arrival. False for an image that was built from signed
    deltas.
    """
    later: list[Patch] = field(default_factory=list)
    """Patches that were written or are being written over the image's memory, oldest first.

    Appending to the list begins a patch, and assigning a new list takes a patch back. So if the
    list has become longer, `read` detects a new patch. If the list is another object, `read`
    detects that a patch was taken back.
    """
    sent: SentChunks = field(default_factory=SentChunks)
    """A cache of recently sent encrypted chunks."""
    is_damaged: bool = False
    """Whether a chunk was found whose bytes do not match its hash."""

    @property
    def is_current(self) -> bool:
        """Whether the image's memory still holds this version, not a later version."""
        return not self.later

    def seal(self, signed: SignedManifest, manifest: Manifest) -> str:
        """Add the learner's manifest if it fits the image.

        Return the reason why the manifest does not fit; "" if it fits.
        """
        if provisional(manifest, manifest.version) != self.manifest:
            return f"the seal of {manifest.version} describes another image than its deltas"
        self.signed, self.manifest = signed, manifest
        return ""

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes of this version's image; thread-safe.

        If the memory may change, the result is a copy. If a patch begins during the copying, the
        copy is repeated.
        """
        if not self.may_change:
            return memoryview(self.storage)[start:stop].toreadonly()
        while True:
            known = self.later
            later = known[:]
            size = later[0].block_bytes if later else 1  # old words are restored in whole blocks
            first = start - start % size
            piece = np.frombuffer(self.storage, np.uint8)[first : -(-stop // size) * size].copy()
            for patch in reversed(later):
                patch.take_back(piece.data, first // size)
            # See `later`: no patch has begun, and none was taken back, during the copy.
            if known is self.later and len(later) == len(known):
                return piece.data[start - first : stop - first].toreadonly()

    @property
    def is_encrypted(self) -> bool:
        """Whether the chunks of the image are sent encrypted."""
        return bool(self.manifest.key_hash)

    @property
    def can_be_sent(self) -> bool:
        """Whether chunks can be sent: the manifest has arrived, and no chunk is damaged."""
        return self.signed is not None and not self.is_damaged

    @property
    def _key(self) -> bytes:
        return b"" if self.signed is None else self.signed.key

    def put(self, index: int, data: Frame, write: Write | None = None) -> None:
        """Decrypt and write a chunk: directly to memory, or through a buffer to a disk."""
        place = self.place(index)
        if not self.is_encrypted:
            (write or fill)(place, data)
            return
        plain = place if write is None else np.empty(len(data), np.uint8).data
        crypt(self._key, index, data, plain)
        if write is not None:
            write(place, plain)

    def chunk(self, index: int) -> Frame:
        """Return a held chunk in the form in which it is sent.

        If the cache lacks the encrypted chunk, the chunk is encrypted again. Key and nonce are the
        learner's, so the result is the bytes that the learner signed.

        Raises:
            StorageError: if the bytes of the chunk no longer match its hash.
        """
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
        """Add an encrypted chunk to the cache, for the next child that requests this chunk."""
        if self.is_encrypted:
            self.sent.add(self._key, index, data)

    def is_right(self, index: int) -> bool:
        """Return whether the bytes of a chunk in memory still match the chunk's hash."""
        piece = self.read(*self.manifest.chunk_range(index))
        return blake3(piece).digest() == self.manifest.chunk_hash(index)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the image."""
        return self.manifest.num_bytes

    def place(self, index: int) -> memoryview:
        """Return the memory for the bytes of a chunk, held or not."""
        start, stop = self.manifest.chunk_range(index)
        return memoryview(self.storage)[start:stop]

    def chunk_size(self, index: int) -> int:
        """Return the number of bytes of a chunk."""
        start, stop = self.manifest.chunk_range(index)
        return stop - start

    def chunk_hash(self, index: int) -> bytes:
        """Return the BLAKE3-256 hash of a chunk as it is sent."""
        return self.manifest.sent_hash(index)


@dataclass(frozen=True, slots=True, eq=False)
class AuditChunks(Work):
    """Work for a thread: hash some chunks of an image again."""

    image: Transfer
    first: int
    stop: int

    def run(self) -> str:
        """Hash the chunks; return the name of the first wrong chunk, or "" if all are right."""
        for index in range(self.first, self.stop):
            if not self.image.is_right(index):
                return f"chunk {index}"
        return ""
