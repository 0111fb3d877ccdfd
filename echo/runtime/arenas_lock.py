"""One process per directory of arenas: who comes second is told who has it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from echo.core.errors import StorageError


def lock_directory(directory: Path, name: str) -> int:
    """Make a directory this process's own until the descriptor is closed, or the process ends.

    Args:
        directory: network.store_dir; made if it does not exist.
        name: of the file that is locked, and bears the pid.

    Raises:
        StorageError: if it cannot be used, or another process uses it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(directory / name, flags, 0o600)
    except OSError as error:
        raise StorageError(
            f"network.store_dir = {directory} cannot be used: {error.strerror}; choose a directory "
            "that this user may write to"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise StorageError(
                f"network.store_dir = {directory} cannot be locked: {error.strerror}; choose a "
                "directory on a local file system"
            ) from error
        raise StorageError(
            f"network.store_dir = {directory} is in use by process {owner}; give each node on a "
            "machine a directory of its own"
        ) from error
    with contextlib.suppress(OSError):  # the pid is for people; a full disk must not stop us here
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    return descriptor
