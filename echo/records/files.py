"""Files that are there whole or not at all, and directories that one process has to itself."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from blake3 import blake3

from echo.core.errors import StorageError

_READ_BYTES = 16 << 20


def lock_directory(directory: Path, name: str, *, called: str, in_use: str) -> int:
    """Make a directory this process's own until the descriptor is closed, or the process ends.

    Args:
        directory: what to lock; made, for its owner alone, if it does not exist.
        name: of the file that is locked, and bears the pid.
        called: what the user knows the directory as.
        in_use: what to say where another process has it, whose pid replaces "{}".

    Raises:
        StorageError: if it cannot be used, or another process uses it.
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
    with contextlib.suppress(OSError):  # the pid is for people; a full disk must not stop us here
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    return descriptor


def write_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically and force it onto the disk; one of the same name is replaced.

    `mode` is that before the umask.

    Raises:
        OSError: if it cannot be written; what was there before is kept.
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
        temporary.unlink()  # or it would go on taking the space that there is too little of
        raise
    sync_path(path.parent)


def make_private_directory(path: Path) -> None:
    """Make a directory that only its owner may look into, or make it one.

    Raises:
        OSError: if that cannot be.
    """
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)


def sync_path(path: Path) -> None:
    """Force a file's bytes, or the names in a directory, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the BLAKE3 hash of a file as hexadecimal digits.

    It is read, not mapped: a bad sector raises OSError here, and would kill the process there.
    """
    digest = blake3(max_threads=blake3.AUTO)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
