"""Which chunks of an arena are right: hash every one, but for those never written.

A file that was preallocated and written in part has holes (extents without data), which the file
system knows. A hole reads as zeros, so a chunk that lies in one is looked at only if its hash is to
be that of zeros. Where the file system cannot tell, every chunk is hashed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from echo.weights.manifest import Manifest

BATCH_BYTES = 1 << 20
"""Bytes hashed per task of the pool: below, handing out the task costs more than the hash."""


def held_chunks(manifest: Manifest, arena: memoryview, path: Path | None) -> bytearray:
    """Return one byte per chunk: 1 if its bytes match their hash.

    Args:
        manifest: what the arena should hold; of the arena's size.
        arena: the bytes.
        path: the file under the arena, to skip its holes; None for memory.
    """
    has_chunk = bytearray(manifest.num_chunks)
    descriptor = _open(path)
    try:
        written = _chunks_with_data(manifest, descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    worthwhile = [*written, *_zeros(manifest, set(written))]
    step = max(1, BATCH_BYTES // manifest.chunk_bytes)
    batches = [worthwhile[start : start + step] for start in range(0, len(worthwhile), step)]
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="rehash") as pool:
        for found in pool.map(lambda batch: _matching(manifest, arena, batch), batches):
            for index in found:
                has_chunk[index] = 1
    return has_chunk


def _open(path: Path | None) -> int | None:
    """Open the file under an arena; it may have been dropped since, which is no error."""
    try:
        return None if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _matching(manifest: Manifest, arena: memoryview, batch: list[int]) -> list[int]:
    return [
        index
        for index in batch
        if blake3(arena[slice(*manifest.chunk_range(index))]).digest() == manifest.chunk_hash(index)
    ]


def _zeros(manifest: Manifest, written: set[int]) -> Iterator[int]:
    """Yield the chunks that lie in holes and are meant to be zeros."""
    hash_by_size: dict[int, bytes] = {}
    for index in range(manifest.num_chunks):
        if index not in written:
            start, stop = manifest.chunk_range(index)
            if stop - start not in hash_by_size:
                hash_by_size[stop - start] = blake3(bytes(stop - start)).digest()
            if manifest.chunk_hash(index) == hash_by_size[stop - start]:
                yield index


def _chunks_with_data(manifest: Manifest, descriptor: int | None) -> list[int]:
    """Return the chunks that do not lie in a hole of the file, ascending; all if unknown."""
    if descriptor is None or not hasattr(os, "SEEK_DATA"):
        return list(range(manifest.num_chunks))
    try:
        return list(_walk_data(manifest, descriptor))
    except OSError:  # a file system that cannot tell
        return list(range(manifest.num_chunks))


def _walk_data(manifest: Manifest, descriptor: int) -> Iterator[int]:
    index = 0
    while index < manifest.num_chunks:
        try:
            data_at = os.lseek(descriptor, manifest.chunk_range(index)[0], os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            raise
        index = max(index, data_at // manifest.chunk_bytes)
        if index < manifest.num_chunks:
            yield index
        index += 1
