"""Writes files atomically, locks directories for one process, and measures a volume's speed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from echo.core.errors import StorageError

_READ_BYTES = 16 << 20
"""Number of bytes of a file that are read and hashed at once. A much smaller number would give
BLAKE3's threads too little work. A much larger number would take memory that the process needs.
"""


def lock_directory(directory: Path, name: str, *, called: str, in_use: str) -> int:
    """Lock a directory for this process, until the returned descriptor is closed.

    Return the descriptor of the lock file. The end of the process also ends the lock.

    Args:
        directory: the directory to lock. If it is missing, it is created, readable only by its
            owner.
        name: the name of the file that is locked; this process's id is written into it.
        called: the name of the directory in messages.
        in_use: the message if another process has locked the directory; the id of that process
            replaces "{}".

    Raises:
        StorageError: if the directory cannot be locked, or another process has locked it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(directory / name, flags, 0o600)
    except OSError as error:
        raise StorageError(
            f"{called} cannot be used: {error.strerror}; choose a directory that this user may "
            "write to"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise StorageError(
                f"{called} cannot be locked: {error.strerror}; choose a directory on a local file "
                "system"
            ) from error
        raise StorageError(f"{called} {in_use.format(owner)}") from error
    with contextlib.suppress(OSError):  # on a full disk the id is left out: only people read it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether a process on this machine has locked a file; False if the file is missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def write_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write or replace a file atomically, and sync it to the disk.

    `mode` is the permission mode of a new file, before the umask.

    Raises:
        OSError: if the file cannot be written; the previous file is kept.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink()  # the disk may be full
        raise
    sync_path(path.parent)


def make_private_directory(path: Path) -> None:
    """Create a directory if it is missing, and let only its owner read it.

    Raises:
        OSError: if the directory cannot be created or its mode cannot be changed.
    """
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)


def sync_path(path: Path) -> None:
    """Sync a file's content, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the BLAKE3 hash of a file as hexadecimal digits.

    The file is not mapped into memory, because a bad sector would then kill the process.
    """
    digest = blake3(max_threads=blake3.AUTO)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


# --- speed of a volume ----------------------------------------------------------------------------

TRIAL_BYTES = 16 << 20
"""Number of bytes of the large write. A much smaller write would measure the time of its fsync."""
TRIAL_S = 2.0
"""Longest time of a write measurement, seconds."""
NUM_SYNCS = 20
"""Largest number of timed fsyncs. Their median counts, so a few slow ones do not change it."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Measured speed of a directory's volume."""

    bytes_per_s: float
    """Rate of a large write, its fsync included."""
    sync_s: float
    """Median time of an fsync after a small write, seconds."""


def measure_disk(directory: Path) -> DiskSpeed:
    """Measure the speed of a directory's volume with a temporary file, for about TRIAL_S.

    Raises:
        OSError: if the file cannot be written.
    """
    block = bytes(1 << 20)
    times: list[float] = []
    with tempfile.TemporaryFile(dir=directory) as file:
        began = time.monotonic()
        while file.tell() < TRIAL_BYTES and time.monotonic() - began < TRIAL_S:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = file.tell() / max(time.monotonic() - began, 1e-6)
        began = time.monotonic()
        while len(times) < NUM_SYNCS and (not times or time.monotonic() - began < TRIAL_S):
            file.write(b"x" * 4096)
            file.flush()
            start = time.monotonic()
            os.fsync(file.fileno())
            times.append(time.monotonic() - start)
    return DiskSpeed(rate, statistics.median(times))
