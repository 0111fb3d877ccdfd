"""What lies in files is found again by the next process, and a full disk is an error in time."""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.memory import Machine
from echo.core.errors import LocalProtocolError, RemoteProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.records import files
from echo.runtime import disk_store
from echo.runtime.disk_store import DiskStore
from echo.weights.manifest import encode_signed, sign, verify
from echo.weights.receiver import WriteChunk
from echo.weights.store import Transfer
from echo.wire.codec import Frame
from echo.wire.messages import FULL
from tests.runtime.test_disk_store_scan import CHUNK_BYTES, IMAGE, describe, held

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
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a disk of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    yield path
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
    assert opened(run=None).recover("r")[1].storage[:2] == b"v!"


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
    assert len(store._spares) == 1
    assert [item.version for item in opened(run=None).recover("r")] == [version(1)]


def test_other_runs_and_leftovers_are_removed_and_foreign_files_left_alone(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "version_store"
    opened(run="other").create(version(1), b"manifest", SIZE)
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
    assert [item.version for item in opened(run=None).recover("r")] == [version(2)]
    foreign = ["notes.txt", "v1-L1-zz.image", "v10-L1.image", "v9-L1.image"]
    own = ["echo-store-2.lock", "v2-L1.image", "v2-L1.manifest"]
    assert names(directory) == sorted([*own, *foreign])
    assert "removed what was left of v7: " in caplog.text
    assert "left alone 4 foreign files: notes.txt, v1-L1-zz.image" in caplog.text


def test_what_exceeds_the_limit_is_removed_oldest_first(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    for step in (1, 2, 3):
        store.create(version(step), b"manifest", SIZE)
    saved = opened(2 * SIZE, run=None).recover("r")
    assert [item.version for item in saved] == [version(3), version(2)]
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


def kill_writer(tmp_path: Path, after: bytes, order: list[int], signed: bytes) -> list[int]:
    """Let a process write chunks, kill it at the line `after`; return what it has written."""
    image, manifest = tmp_path / "image", tmp_path / "manifest"
    image.write_bytes(IMAGE)
    manifest.write_bytes(signed)
    arguments = [
        tmp_path / "version_store",
        image,
        manifest,
        CHUNK_BYTES,
        ",".join(map(str, order)),
    ]
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    text = b""
    while after not in text:
        assert select.select([child.stdout], [], [], 120)[0], "the writer is silent"
        piece = os.read(child.stdout.fileno(), 4096)
        assert piece, "the writer has ended"
        text += piece
    child.send_signal(signal.SIGKILL)
    text += child.stdout.read()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith(b"done")]


@pytest.mark.slow
def test_a_killed_process_leaves_exactly_the_chunks_that_it_wrote(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    signed = encode_signed(sign(describe(IMAGE), key))
    order = [7, 3, 20, 0, 12, 13, 1, 19]
    done = kill_writer(tmp_path, b"done 19\n", order, signed)
    assert done == order
    store = DiskStore(tmp_path / "version_store", LIMIT)  # the lock went with the process
    (saved,) = store.recover("run")
    _, manifest = verify(
        saved.signed_manifest,
        public_key=key.public_key().public_bytes_raw(),
        run_id="run",
        max_bytes=LIMIT,
    )
    assert held(store.verify_held(manifest, saved.storage)) == sorted(order)
    # It goes on where the other was killed.
    for index in set(range(manifest.num_chunks)) - set(order):
        start, stop = manifest.chunk_range(index)
        saved.storage[start:stop] = IMAGE[start:stop]
    assert all(store.verify_held(manifest, saved.storage))
    assert saved.storage == IMAGE
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [b"begun 0\n", b"begun 5\n", b"done 2\n"])
def test_a_chunk_written_in_part_is_not_held(tmp_path: Path, moment: bytes) -> None:
    done = kill_writer(tmp_path, moment, list(range(21)), b"manifest")
    store = DiskStore(tmp_path / "version_store", LIMIT)
    (saved,) = store.recover("run")
    found = held(store.verify_held(describe(IMAGE), saved.storage))
    # The one under way at the kill may just have been finished; nothing else may differ.
    assert found in (done, [*done, len(done)])
    store.close()


# --- full disks ----------------------------------------------------------------------------------


def test_a_full_disk_falls_back_on_memory_with_one_warning(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(disk, LIMIT)
    store.recover("r")
    store.create(version(1), b"manifest", 512 << 10)
    second = store.create(version(2), b"manifest", 768 << 10)
    second[:] = b"2" * len(second)
    store.create(version(3), b"manifest", 768 << 10)
    assert caplog.text.count("it is kept in memory and lost with this process: free some") == 1
    assert (
        f"network.store_dir = {disk}: no 768 KiB for v2: No space left on device (" in caplog.text
    )
    assert names(disk) == ["echo-store-2.lock", "v1-L1.image", "v1-L1.manifest"]
    assert store.bytes_held == 2 << 20
    assert store.verify_held(describe(bytes(second), step=2), second) == b"\1" * 12
    # The disk has room again.
    for step in (1, 2, 3):
        store.drop(version(step))
    store.create(version(4), b"manifest", 768 << 10)
    store.close()
    assert [item.version for item in DiskStore(disk, LIMIT).recover("r")] == [version(4)]


def test_a_full_disk_and_no_memory_is_an_error_that_names_everything(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(disk, LIMIT)
    store.recover("r")
    monkeypatch.setattr(disk_store, "read_machine", lambda: Machine(host_bytes=1 << 20))
    with pytest.raises(StorageError) as caught:
        store.create(version(1), b"manifest", 2 << 20)
    assert str(caught.value).startswith(
        f"network.store_dir = {disk}: no 2 MiB for v1: No space left on device ("
    )
    assert " free); free some, or point" in str(caught.value)
    assert names(disk) == ["echo-store-2.lock"]
    assert store.bytes_held == 0
    store.close()


def test_a_spare_makes_room_on_a_full_disk(disk: Path) -> None:
    store = DiskStore(disk, LIMIT)
    store.recover("r")
    store.create(version(1), b"manifest", 512 << 10)
    store.drop(version(1))
    store.create(version(2), b"manifest", 700 << 10)
    store.flush()
    assert names(disk) == ["echo-store-2.lock", "v2-L1.image", "v2-L1.manifest"]
    store.close()


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
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def exhausted(num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, f"Cannot allocate {num_bytes} bytes")

    store = opened()
    monkeypatch.setattr(disk_store.os, "posix_fallocate", refuse)
    monkeypatch.setattr(disk_store, "map_memory", exhausted)
    with pytest.raises(StorageError, match=r"neither there \(No space .* memory \(Cannot allocate"):
        store.create(version(1), None, SIZE)


def test_a_manifest_that_cannot_be_written_costs_only_the_recovery(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(disk, LIMIT)
    store.recover("r")
    storage = store.create(version(1), b"x" * (1 << 20), 512 << 10)
    storage[:] = b"1" * len(storage)
    store.flush()
    assert "the manifest of v1 cannot be written: No space left on device" in caplog.text
    assert names(disk) == ["echo-store-2.lock", "v1-L1.image"]
    store.close()


def test_a_directory_that_disappears_is_an_error(opened: Opened) -> None:
    store = opened()
    store.create(version(1), None, SIZE)
    for path in store.directory.iterdir():
        path.unlink()
    store.drop(version(1))  # nothing left to recycle
    assert store._spares == []
    store.create(version(2), None, SIZE)
    store.drop(version(2))
    for path in store.directory.iterdir():
        path.unlink()
    with pytest.raises(StorageError, match=r"a file for v3 cannot be named: No such file"):
        store.create(version(3), None, SIZE)
    assert store.bytes_held == 0


# --- the directory -------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_never_share_a_directory(opened: Opened, tmp_path: Path) -> None:
    opened()
    program = (
        "import sys; from pathlib import Path; from echo.core.errors import StorageError\n"
        "from echo.runtime.disk_store import DiskStore\n"
        "try: DiskStore(Path(sys.argv[1]), 1)\n"
        "except StorageError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "version_store")],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    assert done.stdout == (
        f"network.store_dir = {tmp_path / 'version_store'} is in use by process {os.getpid()}; "
        "give each node on a machine a directory of its own\n"
    )


def test_a_closed_store_lets_go_of_its_directory(opened: Opened) -> None:
    store = opened()
    store.close()
    store.close()
    opened()


def test_a_directory_that_cannot_be_used_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StorageError, match=r"file/version_store cannot be used: Not a directory; choose"
    ):
        DiskStore(tmp_path / "file" / "version_store", LIMIT)

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="cannot be locked: No locks available; choose a"):
        DiskStore(tmp_path / "version_store", LIMIT)


def test_nobody_else_may_read_the_weights(opened: Opened, tmp_path: Path) -> None:
    opened().create(version(1), None, SIZE)
    assert stat.S_IMODE((tmp_path / "version_store").stat().st_mode) == 0o700
    (storage,) = (tmp_path / "version_store").glob("*.image")
    assert stat.S_IMODE(storage.stat().st_mode) == 0o600


def test_the_run_must_be_known_first(opened: Opened) -> None:
    with pytest.raises(LocalProtocolError, match="`recover` names the run"):
        opened(run=None).create(version(1), None, SIZE)


def test_the_default_limit_counts_what_a_former_process_has_taken(opened: Opened) -> None:
    before = opened(None).limit_bytes
    num_bytes = min(32 << 20, before // 2)
    store = opened(None)
    store.create(version(1), b"manifest", num_bytes)
    store = opened(None, run=None)
    # Without its own files it would be 0.9 x num_bytes less; others may use the disk meanwhile.
    free = disk_store.DEFAULT_SHARE * store._free_bytes()
    assert store.limit_bytes == pytest.approx(free + 0.9 * num_bytes, abs=0.45 * num_bytes)


def test_garbage_under_a_good_name_is_left_to_the_caller_s_checks(opened: Opened) -> None:
    store = opened()
    store.create(version(1), b"garbage", SIZE)
    store = opened(run=None)
    (saved,) = store.recover("r")
    with pytest.raises(RemoteProtocolError):
        verify(saved.signed_manifest, public_key=bytes(32), run_id="r", max_bytes=LIMIT)
    store.drop(saved.version)
    assert store.bytes_held == 0


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
    assert store._spares == []
