"""One version of the weights in a node's store: its manifest, its bytes, which chunks are there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echo.protocol.manifest import Manifest, SignedManifest


def new_arena(num_bytes: int) -> memoryview:
    """Return room for an image; its bytes mean nothing until they are written.

    The system finds the memory chunk by chunk, as they come. A bytearray would be filled with zeros
    here and now, 0.6 s for each GB in which the node does nothing else.
    """
    return np.empty(num_bytes, dtype=np.uint8).data


@dataclass(slots=True)
class Transfer:
    """One version in the store, whole or on its way."""

    signed: SignedManifest
    manifest: Manifest
    arena: bytearray | memoryview
    has_chunk: bytearray
    """One byte per chunk: 1 if held and verified."""
    num_held: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is held."""
        return self.num_held == self.manifest.num_chunks

    def missing_ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the half-open runs of chunk indices that are not held, ascending."""
        runs, start, has_chunk = [], 0, self.has_chunk
        while (start := has_chunk.find(0, start)) >= 0:
            stop = has_chunk.find(1, start)
            stop = len(has_chunk) if stop < 0 else stop
            runs.append((start, stop))
            start = stop
        return tuple(runs)

    def chunk(self, index: int) -> memoryview:
        """Return the bytes of a chunk that is held, without copying."""
        start, stop = self.manifest.chunk_range(index)
        return memoryview(self.arena)[start:stop].toreadonly()

    def hold(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Keep a chunk whose hash has been verified."""
        start, stop = self.manifest.chunk_range(index)
        self.arena[start:stop] = data
        self.has_chunk[index] = 1
        self.num_held += 1
