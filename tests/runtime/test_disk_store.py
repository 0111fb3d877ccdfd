"""The disk store: the next process finds its files, and a full disk is an error in time."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import logging
import mmap
import os
import random
import resource
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from echo.config.memory.budget import Machine
from echo.core.errors import LocalProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.runtime import disk_store
from echo.runtime.disk_store import (
    MAX_SPARES,
    DiskStore,
    MemoryStore,
    held_chunks,
    open_store,
)
from echo.weights.manifest import Manifest, build_manifest, encode_signed, sign, verify
from echo.weights.store.items import Transfer
from echo.weights.store.writing import WriteChunk
from echo.wire.codec import Frame
from echo.wire.messages import FULL

SIZE = 1 << 16
LIMIT = 64 << 20
REPOSITORY = Path(__file__).parents[2]


def version(step: int, lineage: int = 1) -> PolicyVersion:
    return PolicyVersion(lineage, step)


def names(directory: Path) -> list[str]:
    """Return the names in the directory without the run's hash."""
    entries = (path.name for path in directory.iterdir())
    return sorted(name.replace("-b2dea48d667b2821", "") for name in entries)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Return a function that opens the directory anew, as a process that starts does."""
    stores: list[DiskStore] = []

    def reopen(limit_bytes: int | None = LIMIT, *, run: str | None = "r") -> DiskStore:
        for former in stores:
            former.close()
        stores.append(DiskStore(tmp_path / "version_store", limit_bytes))
        if run is not None:
            assert stores[-1].recover(run) == []
        return stores[-1]

    yield reopen
    for store in stores:
        store.close()


Opened = Callable[..., DiskStore]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[DiskStore]:
    """Return a store on a disk of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    store = DiskStore(path, LIMIT)
    store.recover("r")
    yield store
    store.close()
    subprocess.run(["umount", "--lazy", str(path)], check=True)


# --- recovery ------------------------------------------------------------------------------------


def test_the_next_process_finds_what_was_written_newest_first(
    opened: Opened, tmp_path: Path
) -> None:
    store = opened()
    for each in (version(3), version(1, 2), version(2), version(4)):
        store.create(each, str(each).encode(), SIZE)[:2] = str(each).encode()[:2]
    store.drop(version(4))
    store = opened(run=None)
    with pytest.raises(LocalProtocolError, match="`recover` names the run, and must come"):
        store.create(version(1), None, SIZE)
    saved = store.recover("r")
    assert [item.version for item in saved] == [version(1, 2), version(3), version(2)]
    assert [item.signed_manifest for item in saved] == [b"v1/L2", b"v3", b"v2"]
    assert [bytes(item.storage[:2]) for item in saved] == [b"v1", b"v3", b"v2"]
    assert store.bytes_held == 3 * SIZE
    saved[1].storage[:2] = b"v!"
    store.drop(version(2))
    store.close()
    assert names(tmp_path / "version_store") == sorted(
        ["echo-store-2.lock", "v1-L2.image", "v1-L2.manifest", "v3-L1.image", "v3-L1.manifest"]
    )
    assert bytes(opened(run=None).recover("r")[1].storage[:2]) == b"v!"


def test_a_manifest_may_come_later_and_without_one_nothing_is_recovered(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    store.create(version(1), None, SIZE)
    store.create(version(2), None, SIZE)
    store.sealed(version(1), b"manifest")
    store.sealed(version(1), b"the manifest")
    saved = opened(run=None).recover("r")
    assert [(item.version, item.signed_manifest) for item in saved] == [
        (version(1), b"the manifest")
    ]
    assert caplog.text == "", "it is no fault to be killed while a delta is decoded"


def test_recovering_twice_gives_nothing_twice(opened: Opened) -> None:
    store = opened()
    storage = store.create(version(1), b"manifest", SIZE)
    storage[:1] = b"a"
    store.create(version(2), b"manifest", SIZE)
    store.drop(version(2))
    assert store.recover("r") == []
    assert store.bytes_held == SIZE
    assert len(store.spares) == 1
    store.drop(version(2))  # what is not there
    assert [item.version for item in opened(run=None).recover("r")] == [version(1)]


def test_other_runs_and_leftovers_are_removed_and_foreign_files_left_alone(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "version_store"
    store = opened(run="other")
    store.create(version(1), b"manifest", SIZE)
    store = opened()
    store.create(version(2), b"manifest", SIZE)
    store.close()
    run = "b2dea48d667b2821"
    (directory / "echo-image-12.tmp").write_bytes(b"half made")
    (directory / f"v7-L1-{run}.image").write_bytes(b"")
    (directory / f"v7-L1-{run}.manifest").write_bytes(b"of an empty version store")
    (directory / f"v8-L1-{run}.manifest").write_bytes(b"without a version store")
    (directory / f"v9-L1-{run}.image").symlink_to(tmp_path / "elsewhere")
    (directory / f"v10-L1-{run}.image").mkdir()
    (directory / "notes.txt").write_text("mine")
    (directory / "v1-L1-zz.image").write_text("mine")
    caplog.set_level(logging.INFO)
    store = opened(run=None)
    assert [item.version for item in store.recover("r")] == [version(2)]
    foreign = ["notes.txt", "v1-L1-zz.image", "v10-L1.image", "v9-L1.image"]
    own = ["echo-store-2.lock", "v2-L1.image", "v2-L1.manifest"]
    assert names(directory) == sorted([*own, *foreign])
    assert "removed what was left of v7: " in caplog.text
    assert "left alone 4 foreign files: notes.txt, v1-L1-zz.image, " in caplog.text


def test_what_exceeds_the_limit_is_removed_oldest_first(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    for step in (1, 2, 3):
        store.create(version(step), b"manifest", SIZE)
    store = opened(2 * SIZE + SIZE // 2, run=None)
    assert [item.version for item in store.recover("r")] == [version(3), version(2)]
    assert "removed what was left of v1: " in caplog.text


def test_a_recycled_file_bears_its_new_name_only(opened: Opened) -> None:
    """A kill right after must not show old bytes under a manifest that fits them."""
    store = opened()
    store.create(version(1), b"first", SIZE)[:] = b"1" * SIZE
    store.drop(version(1))
    storage = store.create(version(2), b"second", SIZE)
    assert storage[0] == ord("1")  # recycled
    store.flush()
    assert names(store.directory) == ["echo-store-2.lock", "v2-L1.image", "v2-L1.manifest"]


# --- a killed process ----------------------------------------------------------------------------

WRITER = """
import os, sys
from pathlib import Path
from echo.core.rollout import PolicyVersion
from echo.runtime.disk_store import DiskStore
directory, image, manifest, chunk_bytes, order = sys.argv[1:]
image, chunk_bytes = Path(image).read_bytes(), int(chunk_bytes)
store = DiskStore(Path(directory), 1 << 26)
assert store.recover("run") == []
version = store.create(PolicyVersion(1, 1), Path(manifest).read_bytes(), len(image))
store.flush()
for index in map(int, order.split(",")):
    start, stop = index * chunk_bytes, min(len(image), (index + 1) * chunk_bytes)
    version[start : start + 100] = image[start : start + 100]
    os.write(1, f"begun {index}\\n".encode())
    version[start:stop] = image[start:stop]
    os.write(1, f"done {index}\\n".encode())
sys.stdin.read()
"""


def kill_writer(tmp_path: Path, after: bytes, order: list[int], signed: bytes) -> None:
    """Let a process write chunks, and kill it at the line `after`."""
    image, manifest = tmp_path / "image", tmp_path / "manifest"
    image.write_bytes(IMAGE)
    manifest.write_bytes(signed)
    indices = ",".join(map(str, order))
    arguments = [tmp_path / "version_store", image, manifest, CHUNK_BYTES, indices]
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert child.stdout is not None
    text = b""
    while after not in text:
        assert select.select([child.stdout], [], [], 120)[0], "the writer is silent"
        piece = os.read(child.stdout.fileno(), 4096)
        assert piece, "the writer has ended"
        text += piece
    child.kill()
    child.communicate()


@pytest.mark.slow
def test_a_killed_process_leaves_exactly_the_chunks_that_it_wrote(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    signed = encode_signed(sign(describe(IMAGE), key))
    order = [7, 3, 20, 0, 12, 13, 1, 19]
    kill_writer(tmp_path, b"begun 19\n", order, signed)
    store = DiskStore(tmp_path / "version_store", LIMIT)  # the lock went with the process
    (saved,) = store.recover("run")
    _, manifest = verify(
        saved.signed_manifest,
        public_key=key.public_key().public_bytes_raw(),
        run_id="run",
        max_bytes=LIMIT,
    )
    # The last was written in part at the kill, or had just been finished.
    found = held(store.verify_held(manifest, saved.storage))
    assert found in (sorted(order[:-1]), sorted(order))
    # It goes on where the other was killed.
    for index in set(range(manifest.num_chunks)) - set(found):
        start, stop = manifest.chunk_range(index)
        saved.storage[start:stop] = IMAGE[start:stop]
    assert all(store.verify_held(manifest, saved.storage))
    assert saved.storage == IMAGE
    store.close()


# --- full disks ----------------------------------------------------------------------------------


def test_a_full_disk_falls_back_on_memory_with_one_warning(
    small: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    small.create(version(1), b"manifest", 512 << 10)
    small.flush()  # its manifest must not meet the disk that the next one fills for a moment
    second = small.create(version(2), b"manifest", 768 << 10)
    second[:] = b"2" * len(second)
    small.create(version(3), b"manifest", 768 << 10)
    assert caplog.text.count("it is kept in memory and lost with this process: free some") == 1
    assert (
        f"network.store_dir = {small.directory}: no 768 KiB for v2: No space left on device ("
        in caplog.text
    )
    assert names(small.directory) == ["echo-store-2.lock", "v1-L1.image", "v1-L1.manifest"]
    assert small.bytes_held == 2 << 20
    assert small.verify_held(describe(bytes(second), step=2), second) == b"\1" * 12
    # The disk has room again.
    for step in (1, 2, 3):
        small.drop(version(step))
    small.create(version(4), b"manifest", 768 << 10)
    small.close()
    assert [item.version for item in DiskStore(small.directory, LIMIT).recover("r")] == [version(4)]


def test_a_full_disk_and_no_memory_is_an_error_that_names_everything(
    small: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "read_machine", lambda: Machine(host_bytes=1 << 20))
    with pytest.raises(StorageError) as caught:
        small.create(version(1), b"manifest", 2 << 20)
    assert str(caught.value).startswith(
        f"network.store_dir = {small.directory}: no 2 MiB for v1: No space left on device ("
    )
    assert " free); free some, or point" in str(caught.value)
    assert names(small.directory) == ["echo-store-2.lock"]
    assert small.bytes_held == 0


def test_a_spare_makes_room_on_a_full_disk(small: DiskStore) -> None:
    small.create(version(1), b"manifest", 512 << 10)
    small.drop(version(1))
    small.create(version(2), b"manifest", 700 << 10)
    small.flush()
    assert names(small.directory) == ["echo-store-2.lock", "v2-L1.image", "v2-L1.manifest"]


def test_a_file_that_may_not_grow_is_like_a_full_disk(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, limits[1]))
    try:
        store.create(version(1), b"manifest", 2 * SIZE)[:] = b"1" * (2 * SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "no 128 KiB for v1: File too large" in caplog.text
    assert names(store.directory) == ["echo-store-2.lock"]


def test_neither_disk_nor_memory_names_both(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    exhausted = OSError(errno.ENOMEM, "Cannot allocate memory")
    store = opened()
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=full))
    monkeypatch.setattr(disk_store, "map_memory", mock.Mock(side_effect=exhausted))
    with pytest.raises(StorageError, match=r"neither there \(No space .* memory \(Cannot allocate"):
        store.create(version(1), None, SIZE)


def test_a_manifest_that_cannot_be_written_costs_only_the_recovery(
    small: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    storage = small.create(version(1), b"x" * (1 << 20), 512 << 10)
    storage[:] = b"1" * len(storage)
    small.flush()
    assert "the manifest of v1 cannot be written: No space left on device" in caplog.text
    assert names(small.directory) == ["echo-store-2.lock", "v1-L1.image"]


def test_a_directory_that_disappears_is_an_error(opened: Opened) -> None:
    store = opened()
    store.create(version(1), None, SIZE)
    for path in store.directory.iterdir():
        path.unlink()
    store.drop(version(1))  # nothing left to recycle
    assert store.spares == []
    store.create(version(2), None, SIZE)
    store.drop(version(2))
    for path in store.directory.iterdir():
        path.unlink()
    with pytest.raises(StorageError, match=r"a file for v3 cannot be named: No such file"):
        store.create(version(3), None, SIZE)
    assert store.bytes_held == 0


# --- the directory -------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_used_is_an_error(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened()
    with pytest.raises(StorageError, match=rf"in use by process {os.getpid()}; give each node"):
        DiskStore(tmp_path / "version_store", LIMIT)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"version_store cannot be used: Not a dir.*; choose"):
        DiskStore(tmp_path / "file" / "version_store", LIMIT)
    no_locks = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=no_locks))
    with pytest.raises(StorageError, match="cannot be locked: No locks available; choose a"):
        DiskStore(tmp_path / "version_store", LIMIT)


def test_nobody_else_may_read_the_weights(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    store.create(version(1), None, SIZE)
    assert stat.S_IMODE((tmp_path / "version_store").stat().st_mode) == 0o700
    store.sealed(version(1), b"manifest")
    store.flush()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in store.directory.glob("v*")]
    assert modes == [0o600, 0o600]


def test_the_default_limit_counts_what_a_former_process_has_taken(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskStore, "_free_bytes", lambda _: 10 * SIZE)
    store = opened(None)
    assert store.limit_bytes == int(disk_store.STORE_SHARE * 10 * SIZE)
    store.create(version(1), b"manifest", SIZE)
    limit_bytes = opened(None, run=None).limit_bytes
    assert limit_bytes == pytest.approx(disk_store.STORE_SHARE * 11 * SIZE, abs=SIZE / 10)


# --- writes that end late ------------------------------------------------------------------------


def test_a_storage_that_is_dropped_while_a_chunk_is_written_is_not_recycled(opened: Opened) -> None:
    store = opened()
    manifest = describe(IMAGE)
    signed = sign(manifest, Ed25519PrivateKey.generate())
    storage = store.create(version(1), encode_signed(signed), len(IMAGE))
    image = Transfer(signed, manifest, storage, bytearray(manifest.num_chunks))
    begun, goes_on = threading.Event(), threading.Event()

    def write(place: memoryview, data: Frame) -> None:
        begun.set()
        assert goes_on.wait(60)
        store.write(place, data)

    data = IMAGE[slice(*manifest.chunk_range(0))]
    work = WriteChunk((version(1), FULL), image, 0, "parent", data, write)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work.run)
        assert begun.wait(60)
        del image, storage, work
        store.drop(version(1))
        other = store.create(version(2), b"manifest", len(IMAGE))
        other[:] = b"2" * len(IMAGE)
        goes_on.set()
        assert future.result() == ""
    del future
    assert bytes(other) == b"2" * len(IMAGE)
    # Now that nobody can write to it any more, it is.
    store.create(version(3), b"manifest", len(IMAGE))
    assert store.spares == []


# --- what a version store verifies ----------------------------------------------------------------


CHUNK_BYTES = 1 << 16
IMAGE = random.Random(0).randbytes(20 * CHUNK_BYTES + 1000)


def describe(image: bytes, chunk_bytes: int = CHUNK_BYTES, step: int = 1) -> Manifest:
    return build_manifest(
        run_id="run",
        version=PolicyVersion(1, step),
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
        return memoryview(mmap.mmap(file.fileno(), 0))


def held(has_chunk: bytearray) -> list[int]:
    return [index for index, is_held in enumerate(has_chunk) if is_held]


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
@pytest.mark.slow
def test_in_memory_every_chunk_is_hashed(good: set[int], touched: set[int]) -> None:
    manifest = describe(IMAGE)
    storage = bytearray(len(IMAGE))
    for index in good:
        start, stop = manifest.chunk_range(index)
        storage[start:stop] = IMAGE[start:stop]
    for index in touched:
        storage[manifest.chunk_range(index)[1] - 1] ^= 1
    assert held(held_chunks(manifest, memoryview(storage))) == sorted(good - touched)


def test_small_chunks_are_hashed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "BATCH_BYTES", 8 << 10)
    manifest = describe(IMAGE, chunk_bytes=1 << 10)
    storage = bytearray(IMAGE)
    storage[5 << 10] ^= 1
    expected = [index for index in range(manifest.num_chunks) if index != 5]
    assert held(held_chunks(manifest, memoryview(storage))) == expected


@pytest.mark.parametrize("indices", [[], [3, 4, 9], [20], list(range(21))])
def test_in_a_file_what_was_written_is_held(tmp_path: Path, indices: list[int]) -> None:
    storage = written_in_part(tmp_path / "file", indices)
    assert held(held_chunks(describe(IMAGE), storage)) == indices


def test_what_was_not_written_is_right_where_zeros_are_wanted(tmp_path: Path) -> None:
    image = IMAGE[:CHUNK_BYTES] + bytes(2 * CHUNK_BYTES) + IMAGE[:CHUNK_BYTES] + bytes(77)
    storage = written_in_part(tmp_path / "file", [0], image=image)
    assert held(held_chunks(describe(image), storage)) == [0, 1, 2, 4]


# --- limits and recycling -------------------------------------------------------------------------


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryStore]:
    made = MemoryStore(8 * SIZE) if request.param == "memory" else DiskStore(tmp_path, 8 * SIZE)
    assert made.recover("run") == []
    yield made
    made.close()


def test_the_same_version_twice_or_no_bytes_is_a_bug(store: MemoryStore) -> None:
    store.create(version(1), None, SIZE)
    with pytest.raises(ValueError, match=r"v1: .* asked for twice"):
        store.create(version(1), None, SIZE)
    with pytest.raises(ValueError, match="v2: 0 bytes"):
        store.create(version(2), None, 0)
    with pytest.raises(ValueError, match="limit_bytes is 0"):
        MemoryStore(0)


def test_the_limit_counts_what_was_not_dropped(store: MemoryStore) -> None:
    store.create(version(1), None, 5 * SIZE)
    with pytest.raises(
        StorageError, match=r"v2 needs 256 KiB, but 320 KiB of 512 KiB .* v1; raise"
    ):
        store.create(version(2), None, 4 * SIZE)
    store.create(version(2), None, 3 * SIZE)
    store.drop(version(1))
    store.create(version(3), None, 4 * SIZE)  # the spare had to make room
    assert store.bytes_held == 7 * SIZE
    assert store.spares == []


@pytest.mark.parametrize(
    "hold",
    [
        lambda storage: storage[16:32].toreadonly(),
        lambda storage: np.frombuffer(storage, np.uint8)[5:],
        lambda storage: torch.frombuffer(storage[:64], dtype=torch.float32).view(4, 4)[1:],
    ],
    ids=["slice", "numpy", "tensor"],
)
def test_a_dropped_storage_is_recycled_when_no_view_is_left(
    store: MemoryStore, hold: Callable[[memoryview], Any]
) -> None:
    storage = store.create(version(1), None, SIZE)
    storage[:] = b"\1" * SIZE
    place, view = address(storage), hold(storage)
    del storage
    store.drop(version(1))
    gc.collect()
    second = store.create(version(2), None, SIZE)
    second[:] = bytes(SIZE)
    assert address(second) != place
    assert set(np.asarray(view).tobytes()) == {1}
    del view
    gc.collect()
    assert address(store.create(version(3), None, SIZE - 1)) != place  # another size
    assert address(store.create(version(4), None, SIZE)) == place


def test_only_the_largest_spares_are_kept_and_views_of_the_others_stay_valid(
    store: MemoryStore,
) -> None:
    views = [store.create(version(step), None, step * 4096) for step in range(1, 5)]
    for step, view in enumerate(views, start=1):
        view[:] = bytes([step]) * len(view)
    for step in range(1, 5):
        store.drop(version(step))
    assert [len(spare) for spare in store.spares] == [4 * 4096, 3 * 4096]
    assert len(store.spares) == MAX_SPARES
    assert [view[0] for view in views] == [1, 2, 3, 4]


def test_views_outlive_the_store(store: MemoryStore) -> None:
    kept = store.create(version(1), None, SIZE)
    dropped = store.create(version(2), None, SIZE)
    kept[:4], dropped[:4] = b"kept", b"drop"
    store.drop(version(2))
    store.close()
    gc.collect()
    assert (bytes(kept[:4]), bytes(dropped[:4])) == (b"kept", b"drop")


@pytest.mark.slow
def test_what_libzmq_has_not_sent_yet_is_not_handed_out(store: MemoryStore) -> None:
    """The receiver takes nothing at first, so slices wait in the sender without a copy."""
    num_bytes, piece_bytes = 4 << 20, 1 << 17  # more than the sockets' buffers hold
    store.limit_bytes = 8 * num_bytes
    storage = store.create(version(1), None, num_bytes)
    storage[:] = b"\1" * num_bytes
    place = address(storage)
    with (
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
        context.socket(zmq.PULL) as pull,
    ):
        push.sndhwm, pull.rcvhwm, push.linger = 0, 1, 0
        push.sndbuf = pull.rcvbuf = 1 << 16
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.connect(f"tcp://127.0.0.1:{port}")
        for start in range(0, num_bytes, piece_bytes):
            push.send(storage[start : start + piece_bytes].toreadonly(), copy=False)
        del storage
        store.drop(version(1))
        second = store.create(version(2), None, num_bytes)
        second[:] = b"\2" * num_bytes
        assert address(second) != place
        for _ in range(num_bytes // piece_bytes):
            assert set(pull.recv()) == {1}
        deadline = time.monotonic() + 60  # libzmq tells Python in a thread of its own
        while store.spares[0].is_lent and time.monotonic() < deadline:
            time.sleep(0.01)
        assert address(store.create(version(3), None, num_bytes)) == place


def test_the_rehash_looks_at_the_version_s_own_bytes(store: MemoryStore) -> None:
    store.limit_bytes = 2 * len(IMAGE)
    manifest = describe(IMAGE)
    storage = store.create(manifest.version, b"", len(IMAGE))
    storage[: 3 * CHUNK_BYTES] = IMAGE[: 3 * CHUNK_BYTES]
    assert held(store.verify_held(manifest, storage)) == [0, 1, 2]
    with pytest.raises(StorageError, match="image of v1 has 5 bytes, its manifest says"):
        store.verify_held(manifest, storage[:5])


def test_a_new_run_drops_the_versions_of_the_old_one(store: MemoryStore) -> None:
    store.create(version(1), b"manifest", SIZE)
    assert store.recover("another") == []
    assert store.bytes_held == 0
    store.create(version(1), b"manifest", SIZE)


def test_no_memory_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    too_much = 1 << 60
    with pytest.raises(StorageError, match=r"no 1024 PiB for v1: .*set network.store_dir"):
        MemoryStore(too_much).create(version(1), None, too_much)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert len(MemoryStore(SIZE).create(version(1), None, SIZE)) == SIZE


def test_the_configuration_chooses_the_store(tmp_path: Path) -> None:
    memory = open_store(None, None)
    assert isinstance(memory, MemoryStore)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.limit_bytes <= pages
    assert open_store(None, 5).limit_bytes == 5
    files = open_store(str(tmp_path / "new" / "directory"), None)
    assert isinstance(files, DiskStore)
    assert files.limit_bytes > SIZE
    files.close()


class Recycling(RuleBasedStateMachine):
    """Whatever is created, dropped and kept, no view ever sees another version's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(6 * 4096)
        self.steps = itertools.count(1)
        self.live: dict[int, memoryview] = {}
        self.pending: list[tuple[int, memoryview]] = []

    @rule(num_pages=st.integers(1, 2))
    def create(self, num_pages: int) -> None:
        step = next(self.steps)
        num_bytes = num_pages * 4096
        held_bytes = sum(len(view) for view in self.live.values())
        if held_bytes + num_bytes > self.store.limit_bytes:
            with pytest.raises(StorageError):
                self.store.create(version(step), None, num_bytes)
            return
        view = self.store.create(version(step), None, num_bytes)
        view[:] = bytes([step % 256]) * num_bytes
        self.live[step] = view

    @rule(data=st.data(), keeps=st.booleans())
    def drop(self, data: st.DataObject, keeps: bool) -> None:
        if self.live:
            step = data.draw(st.sampled_from(sorted(self.live)))
            view = self.live.pop(step)
            if keeps:
                self.pending.append((step, view[7:100].toreadonly()))
            self.store.drop(version(step))

    @rule()
    def send(self) -> None:
        if self.pending:
            self.pending.pop(0)

    @invariant()
    def all_bytes_are_as_written(self) -> None:
        for step, view in [*self.live.items(), *self.pending]:
            assert set(bytes(view)) == {step % 256}

    @invariant()
    def the_books_are_right(self) -> None:
        spares = sum(map(len, self.store.spares))
        assert self.store.bytes_held == sum(map(len, self.live.values()))
        assert self.store.bytes_held + spares <= self.store.limit_bytes
        assert len(self.store.spares) <= MAX_SPARES


TestRecycling = Recycling.TestCase
TestRecycling.settings = settings(stateful_step_count=30)


# --- formats ------------------------------------------------------------------------------------


def test_a_directory_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "echo-store-3.lock").touch()
    with pytest.raises(StorageError, match="holds versions in format 3, this release has format 2"):
        DiskStore(tmp_path)
