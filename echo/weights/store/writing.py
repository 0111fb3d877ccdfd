"""Received chunks: verification and writing, and early chunks that wait for their table."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from echo.weights.link import MAX_WINDOW_BYTES
from echo.weights.manifest import MIN_CHUNK_BYTES
from echo.weights.store.items import Chunked
from echo.weights.store.memory import Write
from echo.wire.actions import Work
from echo.wire.codec import Frame
from echo.wire.messages import Chunk, ItemId

WRONG_HASH = "its hash is wrong"
"""The result of `run` for a chunk that does not match the signed hash."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteChunk(Work):
    """Work for a thread: verify and write a chunk."""

    item_id: ItemId
    item: Chunked
    index: int
    peer: str
    """The link to the parent that sent the chunk."""
    data: Frame
    write: Write | None
    """The version store's `write`, if a write may block; None to write to memory."""

    def run(self) -> str:
        """Verify and write the chunk; return "" for success, WRONG_HASH, or the disk's error."""
        item, index = self.item, self.index
        is_whole = len(self.data) == item.chunk_size(index)
        if not is_whole or blake3(self.data).digest() != item.chunk_hash(index):
            return WRONG_HASH
        try:
            self.item.put(self.index, self.data, self.write)
        except OSError as error:
            return error.strerror or str(error) or "unknown error"
        return ""


class EarlyChunks:
    """Chunks of an encoded version that have arrived before the tables with their hashes."""

    def __init__(self) -> None:
        """Start with no chunks."""
        self._by_index: dict[int, tuple[str, Chunk, list[Frame]]] = {}
        self._num_bytes = 0

    def keep(self, peer: str, message: Chunk, payload: list[Frame]) -> None:
        """Keep a chunk until its table arrives.

        If the kept chunks would then exceed the largest window of a link, this chunk is discarded.
        The node requests the chunk again later.
        """
        size = self._charge(payload)
        if message.index not in self._by_index and self._num_bytes + size <= MAX_WINDOW_BYTES:
            self._by_index[message.index] = peer, message, payload
            self._num_bytes += size

    def take(self, num_chunks: int) -> list[tuple[str, Chunk, list[Frame]]]:
        """Remove and return the chunks whose tables have arrived: indices below `num_chunks`."""
        known = sorted(index for index in self._by_index if index < num_chunks)
        taken = [self._by_index.pop(index) for index in known]
        self._num_bytes -= sum(self._charge(payload) for _, _, payload in taken)
        return taken

    @staticmethod
    def _charge(payload: list[Frame]) -> int:
        return max(MIN_CHUNK_BYTES, len(payload[0]))

    def clear(self) -> None:
        """Drop all chunks."""
        self._by_index.clear()
        self._num_bytes = 0
