"""The re-hash finds exactly the right chunks, and does not read what was never written."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.rollout import PolicyVersion
from echo.runtime import disk_store
from echo.runtime.disk_store import held_chunks
from echo.weights.manifest import Manifest, build_manifest

CHUNK_BYTES = 1 << 16
IMAGE = random.Random(0).randbytes(20 * CHUNK_BYTES + 1000)


def describe(image: bytes, chunk_bytes: int = CHUNK_BYTES, step: int = 1) -> Manifest:
    return build_manifest(
        run_id="run",
        version=PolicyVersion(1, step),
        model_digest="",
        tensors=[],
        image=image,
        chunk_bytes=chunk_bytes,
    )


def written_in_part(path: Path, indices: list[int], *, image: bytes = IMAGE) -> memoryview:
    """Return the bytes of a preallocated file in which these chunks were written."""
    manifest = describe(image)
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, len(image))
        for index in indices:
            start, stop = manifest.chunk_range(index)
            os.pwrite(file.fileno(), image[start:stop], start)
        # Mapped, not read: what has been read counts as data.
        return memoryview(mmap.mmap(file.fileno(), 0))


def knows_holes(directory: Path) -> bool:
    """Return whether the file system tells what was preallocated from what was written."""
    with (directory / "probe").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, CHUNK_BYTES)
        try:
            os.lseek(file.fileno(), 0, os.SEEK_DATA)
        except OSError as error:
            return error.errno == errno.ENXIO
    return False


def held(has_chunk: bytearray) -> list[int]:
    return [index for index, is_held in enumerate(has_chunk) if is_held]


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_in_memory_every_chunk_is_hashed(good: set[int], touched: set[int]) -> None:
    manifest = describe(IMAGE)
    storage = bytearray(len(IMAGE))
    for index in good:
        start, stop = manifest.chunk_range(index)
        storage[start:stop] = IMAGE[start:stop]
    for index in touched:
        storage[manifest.chunk_range(index)[1] - 1] ^= 1
    assert held(held_chunks(manifest, memoryview(storage), None)) == sorted(good - touched)


def test_small_chunks_are_hashed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "BATCH_BYTES", 8 << 10)
    manifest = describe(IMAGE, chunk_bytes=1 << 10)
    storage = bytearray(IMAGE)
    storage[5 << 10] ^= 1
    expected = [index for index in range(manifest.num_chunks) if index != 5]
    assert held(held_chunks(manifest, memoryview(storage), None)) == expected


@pytest.mark.parametrize("indices", [[], [0], [3, 4, 9], [20], list(range(21))])
def test_in_a_file_only_what_was_written_is_read(
    tmp_path: Path, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = written_in_part(tmp_path / "file", indices)
    hashed: list[int] = []
    matching = disk_store._matching

    def spy(manifest: Manifest, storage: memoryview, batch: list[int]) -> list[int]:
        hashed.extend(batch)
        return matching(manifest, storage, batch)

    monkeypatch.setattr(disk_store, "_matching", spy)
    assert held(held_chunks(describe(IMAGE), storage, tmp_path / "file")) == indices
    assert sorted(hashed) == (indices if knows_holes(tmp_path) else list(range(21)))


def test_a_hole_is_right_where_zeros_are_wanted(tmp_path: Path) -> None:
    image = IMAGE[:CHUNK_BYTES] + bytes(2 * CHUNK_BYTES) + IMAGE[:CHUNK_BYTES] + bytes(77)
    storage = written_in_part(tmp_path / "file", [0], image=image)
    assert held(held_chunks(describe(image), storage, tmp_path / "file")) == [0, 1, 2, 4]


def test_a_wanted_zero_counts_only_if_it_is_there(tmp_path: Path) -> None:
    """The file may have been replaced by another since: the version store's bytes decide."""
    image = bytes(3 * CHUNK_BYTES)
    written_in_part(tmp_path / "file", [], image=image)
    storage = memoryview(bytes(CHUNK_BYTES) + IMAGE[: 2 * CHUNK_BYTES])
    assert held(held_chunks(describe(image), storage, tmp_path / "file")) == [0]


def test_where_the_file_cannot_tell_everything_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = written_in_part(tmp_path / "file", [2, 5])
    manifest = describe(IMAGE)
    assert held(held_chunks(manifest, storage, tmp_path / "missing")) == [2, 5]

    def refuse(descriptor: int, position: int, how: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(disk_store.os, "lseek", refuse)
    assert held(held_chunks(manifest, storage, tmp_path / "file")) == [2, 5]
