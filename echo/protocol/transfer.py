"""What travels chunk by chunk: which chunks are here, and which are missing.

An item is a version in one form. `Transfer` is a version's image with its manifest; a `Parcel`
(`parcel.py`) is its coded form. Both are served and fetched alike, through `Chunked`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from echo.core.rollout import PolicyVersion
from echo.delta.streams import fill
from echo.protocol.manifest import Manifest, SignedManifest
from echo.wire.codec import Frame
from echo.wire.messages import OPEN_END


def new_arena(num_bytes: int) -> memoryview:
    """Return room for an image; its bytes mean nothing until they are written.

    The system finds the memory chunk by chunk, as they come. A bytearray would be filled with zeros
    here and now, 0.6 s for each GB in which the node does nothing else.
    """
    return np.empty(num_bytes, dtype=np.uint8).data


class Journal(Protocol):
    """What has come of one anchor, written down so that a later process finds it."""

    def table(self, frame: bytes) -> None:
        """Add the signed table of the next segment."""

    def chunk(self, index: int, data: memoryview) -> None:
        """Add a chunk that has been verified."""

    def remove(self) -> None:
        """Forget everything: the parcel was dropped."""


class Arenas(Protocol):
    """Where images lie; `runtime/arenas.py` has those that survive the process."""

    @property
    def may_block(self) -> bool:
        """Whether `write` may take long, so that it belongs into a thread."""

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        """Return room for an image.

        Raises:
            StorageError: if there is none.
        """

    def sealed(self, version: PolicyVersion, signed: bytes) -> None:
        """Note the manifest of an image that was created without it."""

    def drop(self, version: PolicyVersion) -> None:
        """Let go of an image; who still reads it keeps it."""

    def journal(self, version: PolicyVersion) -> Journal | None:
        """Return where to write down what comes of an anchor; None if nothing is to be kept."""

    def write(self, place: memoryview, data: Frame) -> None:
        """Copy a chunk to its place in an image; from any thread, of which none does so twice.

        Raises:
            OSError: if the disk refuses it.
        """


class HeapArenas:
    """Images in this process's memory, without a bound."""

    may_block = False

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        """Return room for an image."""
        return new_arena(num_bytes)

    def sealed(self, version: PolicyVersion, signed: bytes) -> None:
        """Need nothing: it does not outlive the process."""

    def drop(self, version: PolicyVersion) -> None:
        """Need nothing: memory that nobody reads is freed."""

    def journal(self, version: PolicyVersion) -> None:
        """Write nothing down: there is no later process that could read it."""

    def write(self, place: memoryview, data: Frame) -> None:
        """Copy a chunk to its place."""
        fill(place, data)


class Chunked(abc.ABC):
    """Something of which some chunks are here."""

    has_chunk: bytearray
    """One byte per chunk: 1 if held and verified."""
    num_held: int
    writing: set[int]
    """Chunks that are being verified and written."""
    journal: Journal | None = None
    """Where chunks are written down as they come."""

    @property
    def num_chunks(self) -> int:
        """Chunks that are known so far."""
        return len(self.has_chunk)

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

    def chunk(self, index: int) -> memoryview:
        """Return the bytes of a chunk that is held, without copying."""
        return self.place(index).toreadonly()

    @abc.abstractmethod
    def chunk_size(self, index: int) -> int:
        """Return the bytes that a chunk must have."""

    @abc.abstractmethod
    def chunk_hash(self, index: int) -> bytes:
        """Return the BLAKE3-256 hash that a chunk must have."""

    def hold(self, index: int, data: Frame) -> None:
        """Keep a chunk whose hash is known to be right."""
        fill(self.place(index), data)
        self.mark(index)

    def mark(self, index: int) -> None:
        """Count a chunk that has been written and verified as held."""
        self.has_chunk[index] = 1
        self.num_held += 1
        if self.journal is not None:
            self.journal.chunk(index, self.chunk(index))

    def _come(self, lane: int, num_lanes: int) -> bytearray:
        """Return one byte per place of a lane: 1 if its chunk is held or being written."""
        has_chunk = self.has_chunk
        if self.writing:
            has_chunk = has_chunk.copy()
            for index in self.writing:
                has_chunk[index] = 1
        return has_chunk[lane::num_lanes] if num_lanes > 1 else has_chunk

    def is_missing(self, lane: int = 0, num_lanes: int = 1) -> bool:
        """Return whether a lane lacks a chunk, or may be given more."""
        has_chunk = self._come(lane, num_lanes)
        return self.is_open or has_chunk.find(0) >= 0

    def missing(self, lane: int = 0, num_lanes: int = 1) -> tuple[tuple[int, int], ...]:
        """Return the half-open runs of places of a lane that have not come, ascending.

        Place p of a lane is the chunk lane + p * num_lanes. While chunks may be added the last run
        stops at OPEN_END.
        """
        has_chunk = self._come(lane, num_lanes)
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

    signed: SignedManifest
    manifest: Manifest
    arena: bytearray | memoryview
    has_chunk: bytearray
    num_held: int = 0
    writing: set[int] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Bytes of the image."""
        return self.manifest.num_bytes

    def place(self, index: int) -> memoryview:
        """Return where the bytes of a chunk are, or are to be written."""
        start, stop = self.manifest.chunk_range(index)
        return memoryview(self.arena)[start:stop]

    def chunk_size(self, index: int) -> int:
        """Return the bytes that a chunk must have."""
        start, stop = self.manifest.chunk_range(index)
        return stop - start

    def chunk_hash(self, index: int) -> bytes:
        """Return the BLAKE3-256 hash that a chunk must have."""
        return self.manifest.chunk_hash(index)
