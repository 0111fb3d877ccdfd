"""What has come of anchors, in files that a restarted node reads again.

An image is fetched into an arena that is a file itself. An anchor is not: its size is not known
before its last table, and what comes out of its chunks lies elsewhere. So each has a journal, to
which tables and chunks are appended as they have been verified:

    v12-L1-anchor-<run>.parcel             of version 12, lineage 1

    record: magic (4 bytes), index of the chunk or 2^32 - 1 for a table, length, then the bytes

* **Killed in mid-write**: the last record is torn, and cut off before more is appended. Nothing is
  synced; after a power failure a lost page fails its hash or its signature
  (`echo/weights/store.py`), and what follows a lost header is not read.
* **Limit and full disk**: a journal only spares a later process a transfer. So all of them together
  take what versions leave of network.store_bytes, the oldest give way first, and one that cannot be
  written is removed. Chunks are in memory besides, so nothing else changes.
* **Slow disk**: files are made, added to and removed in a thread of their own (`arenas_thread.py`),
  and what is queued for it are views of chunks that are held in memory anyway. A journal that has
  MAX_BEHIND_BYTES queued is given up: what it would spare a later process, it costs this one.
* A journal is removed with its anchor, which may long outlive the fetch: children take it.

Deltas have none: one is some hundredth of an image, and is fetched again after a restart.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from echo.core.rollout import PolicyVersion
from echo.runtime.arenas_thread import DiskThread

_HEADER = struct.Struct("<4sII")
_MAGIC = b"echo"
_TABLE = 2**32 - 1
MAX_BEHIND_BYTES = 256 << 20
"""What may wait to be written to all journals; `close` waits for that."""
_NAME = re.compile(
    r"v(?P<step>\d{1,18})-L(?P<lineage>\d{1,18})-anchor-(?P<run>[0-9a-f]{16})\.parcel"
)

_log = logging.getLogger(__name__)


def is_parcel(name: str) -> bool:
    """Return whether a file bears the name of a journal."""
    return _NAME.fullmatch(name) is not None


class ParcelFile:
    """The journal of one anchor.

    Its descriptor belongs to the thread; everything else to the loop.
    """

    def __init__(self, files: ParcelFiles, path: Path, num_bytes: int = 0) -> None:
        """Name a file; `open` makes or continues it."""
        self.path = path
        self.num_bytes = num_bytes
        """Bytes on the disk, or queued for it."""
        self._files = files
        self._is_closed = True
        self._is_removed = False
        """Whether what is queued for it need not be written any more."""
        self._descriptor: int | None = None
        self._num_sound = 0
        """Bytes up to the end of the last record that was read and accepted."""

    def open(self) -> None:
        """Add behind what `records` has accepted from now on; a torn end is cut off."""
        self._is_closed = False
        self.num_bytes = self._num_sound
        self._files.thread.call(self._open)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(self.path, flags, 0o600)
            os.ftruncate(self._descriptor, self._num_sound)
        except OSError as error:
            self._give_up(error.strerror or "unknown error")

    def records(self) -> Iterator[tuple[int | None, bytes]]:
        """Yield (index of a chunk, or None for a table; bytes), up to where the file is torn.

        Whoever asks for the next record has accepted the one before.

        Raises:
            OSError: if the file cannot be read.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                magic, index, length = _HEADER.unpack(header)
                stop = self._num_sound + _HEADER.size + length
                if magic != _MAGIC or stop > size:
                    return
                yield (None if index == _TABLE else index), file.read(length)
                self._num_sound = stop

    def table(self, frame: bytes) -> None:
        """Add the signed table of the next segment."""
        self._append(_TABLE, frame)

    def chunk(self, index: int, data: memoryview) -> None:
        """Add a chunk that has been verified."""
        self._append(index, data)

    def _append(self, index: int, data: bytes | memoryview) -> None:
        if self._is_closed:
            return
        size = _HEADER.size + len(data)
        fault = ""
        if not self._files.make_room(size, keep=self):
            fault = "no room under the limit"
        elif self._files.behind_bytes + size > MAX_BEHIND_BYTES:
            fault = "the disk is behind"
        if fault:
            _log.info("%s: %s; a restart would fetch it anew", self.path, fault)
            self.remove()
            return
        self.num_bytes += size
        self._files.add_behind(size)
        self._files.thread.call(lambda: self._write(index, data))

    def _write(self, index: int, data: bytes | memoryview) -> None:
        size = _HEADER.size + len(data)
        self._files.add_behind(-size)
        if self._descriptor is None or self._is_removed:
            return
        try:
            num_written = os.writev(
                self._descriptor, [_HEADER.pack(_MAGIC, index, len(data)), data]
            )
            fault = "" if num_written == size else os.strerror(errno.ENOSPC)
        except OSError as error:
            fault = error.strerror or "unknown error"
        if fault:
            self._give_up(fault)

    def _give_up(self, fault: str) -> None:
        """Remove what cannot be written, in the thread; the loop goes on as if it were there."""
        self._files.warn(f"{self.path.name} cannot be written: {fault}")
        self._unlink()
        self.num_bytes = 0
        self._is_closed = True

    def remove(self) -> None:
        """Forget everything."""
        self._files.forget(self)
        self._is_closed = self._is_removed = True
        self._files.thread.call(self._unlink)

    def _unlink(self) -> None:
        self._close()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self._files.warn(f"{self.path.name} cannot be removed: {error.strerror}")

    def close(self) -> None:
        """Write no more; what is there, or queued, stays."""
        self._is_closed = True
        self._files.thread.call(self._close)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@dataclass(frozen=True, slots=True)
class SavedParcel:
    """What a former process has written down of an anchor; nothing about it has been verified."""

    version: PolicyVersion
    journal: ParcelFile


class ParcelFiles:
    """All journals in a directory.

    Args:
        directory: where.
        has_room: whether so many bytes more would fit beside versions and journals.
        warn: says something to the operator, once.
        thread: where files are written and removed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        has_room: Callable[[int], bool],
        warn: Callable[[str], None],
        thread: DiskThread,
    ) -> None:
        self.directory = directory
        self.warn = warn
        self.thread = thread
        self.behind_bytes = 0
        """What is queued for all journals."""
        self._guard = threading.Lock()
        self._has_room = has_room
        self._open: list[ParcelFile] = []
        """Oldest first."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all journals."""
        return sum(file.num_bytes for file in self._open)

    def add_behind(self, num_bytes: int) -> None:
        """Count bytes that are queued, or no more."""
        with self._guard:
            self.behind_bytes += num_bytes

    def begin(self, version: PolicyVersion, run: str) -> ParcelFile:
        """Return a new journal."""
        path = self.directory / f"v{version.step}-L{version.lineage}-anchor-{run}.parcel"
        file = ParcelFile(self, path)
        file.open()
        self._open.append(file)
        return file

    def forget(self, file: ParcelFile) -> None:
        """Count a journal no more."""
        if file in self._open:
            self._open.remove(file)

    def make_room(self, num_bytes: int, *, keep: ParcelFile | None = None) -> bool:
        """Remove the oldest until `num_bytes` more fit; tell whether they do."""
        while not self._has_room(num_bytes):
            file = next((file for file in self._open if file is not keep), None)
            if file is None:
                return False
            file.remove()
        return True

    def remove_all(self) -> None:
        """Remove every journal: their room is wanted for a version."""
        for file in self._open[:]:
            file.remove()

    def recover(self, run: str) -> list[SavedParcel]:
        """Return what a former process left of a run, newest first, and remove the rest."""
        known = {file.path for file in self._open}
        saved = []
        for entry in os.scandir(self.directory):
            path, match = Path(entry.path), _NAME.fullmatch(entry.name)
            if match is None or path in known or not entry.is_file(follow_symlinks=False):
                continue
            journal = ParcelFile(self, path, entry.stat(follow_symlinks=False).st_size)
            if match["run"] != run:
                journal.remove()
                continue
            version = PolicyVersion(int(match["lineage"]), int(match["step"]))
            saved.append(SavedParcel(version, journal))
        saved.sort(key=lambda each: each.version, reverse=True)
        for each in saved[:]:
            if not self._has_room(each.journal.num_bytes):
                each.journal.remove()
                saved.remove(each)
            else:
                self._open.insert(0, each.journal)
        return saved

    def close(self) -> None:
        """Write no more; what is there stays for a later process."""
        for file in self._open:
            file.close()
        self._open.clear()
