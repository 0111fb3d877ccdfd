"""Versions of the weights in mapped files, so that a killed node continues where it was.

Layout of the directory (network.store_dir), all names this module's own:

    v12-L1-<run>.arena       the bytes of version 12, lineage 1; <run> is a hash of the run's id
    v12-L1-<run>.manifest    the learner's signed manifest, as it travelled
    *.parcel                 what has come of anchors (`arenas_parcels.py`)
    echo-arena-<n>.tmp       what is being made, and spares that wait for recycling
    echo-arena.lock          flock held by the process that owns the directory, with its pid

What happens when
* **Killed in mid-write** (kill -9, out of memory): written pages are the kernel's and stay. The
  next process finds arena and manifest, and `verify_held` finds the chunks. Nothing is synced to
  the disk on purpose: after a power failure a lost or torn page fails its hash and is fetched
  again, and a torn manifest fails its signature. An arena gets its name only with all its room,
  an arena without a manifest is worthless: both are removed.
* **Disk full**: room is preallocated before the file is mapped, because a mapped file without room
  kills the process (SIGBUS) at some later write. Where the disk has too little, spares go first;
  then the version is kept in memory if that has room for it, with one warning: the node works as
  without network.store_dir, and only its restart costs a transfer. If memory has no room either,
  `create` raises StorageError.
* **Limit** (network.store_bytes): counts every version that was not dropped, wherever it lies.
* **Slow disk**: a write into the mapping is a write into the page cache; the kernel writes it back
  in the background. Only when more than vm.dirty_ratio (20 % of memory) is dirty does it make the
  writer wait, within a page fault. So chunks are written in threads (`write`, without the GIL) and
  credit for them is given when they are written: on a disk slower than the link the transfer falls
  to the disk's pace, and the node does everything else as before (`echo/weights/receiver.py`).
  Where that is too slow, point store_dir to a tmpfs such as /dev/shm/echo (survives the process,
  not the machine), or raise vm.dirty_ratio.
  Manifests and journals are written, and files removed, in a thread of their own, in order. On the
  loop remain what an image needs before its first chunk: its file is made, given its room and
  renamed, once per version, mostly in milliseconds (a spare needs no more than a new name); and
  the pages of one that nobody reads any more are unmapped.
  A disk that fails to read a page back kills the process (SIGBUS), as for any mapped file.
* **Shared by mistake**: the second process gets StorageError with the pid of the first.
* **Other runs**: their versions are removed in `recover`. Files of other names are never touched.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import re
from pathlib import Path

from blake3 import blake3

from echo.config.memory import read_machine
from echo.core.errors import LocalProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.core.units import format_bytes
from echo.records.files import lock_directory
from echo.runtime.arenas import (
    ArenaStore,
    MemoryArenas,
    Pages,
    Saved,
    advise_huge_pages,
    map_memory,
)
from echo.runtime.arenas_parcels import ParcelFiles, SavedParcel, is_parcel
from echo.runtime.arenas_thread import DiskThread
from echo.weights.store import SavedItem

DEFAULT_SHARE = 0.9
"""Share of the free memory or disk that versions may take, where network.store_bytes is unset."""
_LOCK = "echo-arena.lock"
_OWN = re.compile(
    r"v(?P<step>\d{1,18})-L(?P<lineage>\d{1,18})-(?P<run>[0-9a-f]{16})\.(?P<kind>arena|manifest)"
    r"|echo-arena-\d+\.tmp"
)

_log = logging.getLogger(__name__)


def open_arenas(directory: str | None, limit_bytes: int | None) -> ArenaStore:
    """Return the store that the configuration asks for.

    Args:
        directory: network.store_dir; None for memory.
        limit_bytes: network.store_bytes; None for DEFAULT_SHARE of what is free now.

    Raises:
        StorageError: if the directory cannot be used.
    """
    if directory is not None:
        return FileArenas(Path(directory), limit_bytes)
    if limit_bytes is None:
        limit_bytes = max(1, int(DEFAULT_SHARE * read_machine().host_bytes))
    return MemoryArenas(limit_bytes)


class FileArenas(ArenaStore):
    """Keeps versions in files that are mapped into memory.

    Args:
        directory: where; made if it does not exist, and locked until `close`.
        limit_bytes: what all versions may take together; None for DEFAULT_SHARE of the free disk.

    Raises:
        StorageError: if the directory cannot be used, or another process uses it.
    """

    may_block = True

    def __init__(self, directory: Path, limit_bytes: int | None = None) -> None:
        self.directory = directory
        self._lock: int | None = lock_directory(directory, _LOCK)
        if limit_bytes is None:
            limit_bytes = max(1, int(DEFAULT_SHARE * self._available_bytes()))
        super().__init__(limit_bytes)
        self._run: str | None = None
        self._thread = DiskThread()
        self._parcels = ParcelFiles(
            directory, has_room=self._has_room, warn=self._warn, thread=self._thread
        )
        self._ids = itertools.count(1)
        self._has_warned = False

    @property
    def where(self) -> str:
        """The place, for messages."""
        return f"network.store_dir = {self.directory}"

    def sealed(self, version: PolicyVersion, signed_manifest: bytes) -> None:
        """Write a manifest beside its arena; if that fails the version is just not recovered."""
        path = self._live[version].path
        if path is None:
            return
        temporary = self._temporary()
        self._thread.call(lambda: self._write_manifest(version, path, temporary, signed_manifest))

    def _write_manifest(
        self, version: PolicyVersion, path: Path, temporary: Path, signed_manifest: bytes
    ) -> None:
        try:
            # Not synced, as the arena is not: after a power failure the signature tells.
            temporary.write_bytes(signed_manifest)
            temporary.rename(path.with_suffix(".manifest"))
        except OSError as error:
            self._warn(f"the manifest of {version} cannot be written: {error.strerror}")
            _remove(temporary)

    def recover(self, run_id: str) -> list[Saved]:
        """Return what a former process left of this run, newest first, and remove the rest.

        Must be called before the first `create`. What this process itself holds is not returned;
        if it is of another run, it is dropped. May take long, and belongs into a thread.
        """
        run = blake3(run_id.encode()).hexdigest()[:16]
        if run != self._run:
            for version in list(self._live):
                self.drop(version)
        self._run = run
        self.flush()
        saved = []
        known = {spare.path for spare in self._spares} | {p.path for p in self._live.values()}
        for version in self._sift(known):
            found = self._reopen(version)
            if found is not None:
                saved.append(found)
        return saved

    def journal(self, version: PolicyVersion) -> SavedItem | None:
        """Return a file for what comes of an anchor."""
        return self._parcels.begin(version, self._run_hash)

    def recover_parcels(self) -> list[SavedParcel]:
        """Return what a former process left of the run's anchors, newest first, after `recover`."""
        self.flush()
        return self._parcels.recover(self._run_hash)

    def close(self) -> None:
        """Release the directory; the versions in it stay for a later process.

        Waits for what is queued for the disk. A later process should begin when this one has ended:
        until then its threads may still write chunks, verified ones, into the arenas.
        """
        super().close()
        self._parcels.close()
        self._thread.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def flush(self) -> None:
        """Wait until manifests and journals are written, and dropped files removed."""
        self._thread.flush()

    # --- making and taking back ------------------------------------------------------------------

    def _allocate(self, version: PolicyVersion, num_bytes: int) -> Pages:
        """Preallocate and map a file, still under a temporary name; fall back on memory."""
        assert self._run_hash
        try:
            try:
                return self._map_new(num_bytes)
            except OSError:
                self._drop_spares()
                self._parcels.remove_all()
                self.flush()
                return self._map_new(num_bytes)
        except OSError as error:
            fault = (
                f"no {format_bytes(num_bytes)} for {version}: {error.strerror} "
                f"({format_bytes(self._free_bytes())} free)"
            )
            remedy = "free some, or point network.store_dir to a larger disk"
            if num_bytes > DEFAULT_SHARE * read_machine().host_bytes:
                raise StorageError(f"{self.where}: {fault}; {remedy}") from error
            self._warn(f"{fault}; it is kept in memory and lost with this process: {remedy}")
            return self._map_memory(version, num_bytes, error)

    def _make_room(self, version: PolicyVersion, num_bytes: int) -> None:
        """Let spares go, and then journals, until `num_bytes` fit under the limit."""
        super()._make_room(version, num_bytes)
        self._parcels.make_room(num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        """Let spares go until so much fits beside versions and journals; tell whether it does."""
        room = self.limit_bytes - self.bytes_held - self._parcels.num_bytes - num_bytes
        while self._spares and sum(map(len, self._spares)) > room:
            self._free(self._spares.pop())
        return room >= 0

    def _map_memory(self, version: PolicyVersion, num_bytes: int, cause: OSError) -> Pages:
        try:
            return map_memory(num_bytes)
        except OSError as error:
            raise StorageError(
                f"{self.where}: no {format_bytes(num_bytes)} for {version}, neither there "
                f"({cause.strerror}) nor in memory ({error.strerror}); point "
                "network.store_dir to a larger disk"
            ) from error

    def _map_new(self, num_bytes: int) -> Pages:
        path = self._temporary()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
                return Pages(_map_file(descriptor, num_bytes), path)
            finally:
                os.close(descriptor)
        except OSError:
            _remove(path)
            raise

    def _enter(self, version: PolicyVersion, pages: Pages) -> None:
        if pages.path is None:
            return
        try:
            pages.path = pages.path.rename(self.directory / f"{self._stem(version)}.arena")
        except OSError as error:
            _remove(pages.path)
            raise StorageError(
                f"{self.where}: a file for {version} cannot be named: {error.strerror}; does the "
                "directory still exist?"
            ) from error

    def _leave(self, pages: Pages) -> bool:
        """Make a spare of a file, and remove its manifest, which says nothing without the arena.

        What had to be kept in memory is not recycled: the next version may fit on the disk again.
        """
        if pages.path is None:
            return False
        self._remove_later(pages.path.with_suffix(".manifest"))
        try:
            pages.path = pages.path.rename(self._temporary())
        except OSError:
            return False
        return True

    def _free(self, pages: Pages) -> None:
        if pages.path is not None:
            self._remove_later(pages.path)

    def _remove_later(self, path: Path) -> None:
        """Remove a file behind everything that is still to be written to it."""
        self._thread.call(lambda: _remove(path))

    # --- what a former process left --------------------------------------------------------------

    def _sift(self, known: set[Path | None]) -> list[PolicyVersion]:
        """Return the versions in the directory, newest first; remove what belongs to none."""
        kinds: dict[PolicyVersion, set[str]] = {}
        foreign = []
        for entry in os.scandir(self.directory):
            path, match = Path(entry.path), _OWN.fullmatch(entry.name)
            if entry.name == _LOCK or path in known or path.with_suffix(".arena") in known:
                continue
            if is_parcel(entry.name):
                continue
            if match is None or not entry.is_file(follow_symlinks=False):
                foreign.append(entry.name)
            elif match["run"] != self._run:
                _remove(path)
            else:
                version = PolicyVersion(int(match["lineage"]), int(match["step"]))
                kinds.setdefault(version, set()).add(match["kind"])
        if foreign:
            names = ", ".join(sorted(foreign)[:3])
            _log.info("%s: left alone %d foreign files: %s", self.where, len(foreign), names)
        return sorted(kinds, reverse=True)

    def _reopen(self, version: PolicyVersion) -> Saved | None:
        """Map a version again, or remove its files if they are of no use."""
        path = self.directory / f"{self._stem(version)}.arena"
        if not (path.exists() and path.with_suffix(".manifest").exists()):
            # It was being decoded (from what it comes, its journal tells), or had been dropped.
            _remove(path)
            _remove(path.with_suffix(".manifest"))
            return None
        try:
            signed_manifest = path.with_suffix(".manifest").read_bytes()
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                num_bytes = os.fstat(descriptor).st_size
                self._make_room(version, num_bytes)
                pages = Pages(_map_file(descriptor, num_bytes), path)
            finally:
                os.close(descriptor)
        except (OSError, ValueError, StorageError) as error:
            _log.warning("%s: removed what was left of %s: %s", self.where, version, error)
            _remove(path)
            _remove(path.with_suffix(".manifest"))
            return None
        self._live[version] = pages
        return Saved(version, signed_manifest, pages.lend())

    # --- names and numbers -----------------------------------------------------------------------

    @property
    def _run_hash(self) -> str:
        if self._run is None:
            raise LocalProtocolError("FileArenas: `recover` names the run, and must come first")
        return self._run

    def _stem(self, version: PolicyVersion) -> str:
        return f"v{version.step}-L{version.lineage}-{self._run}"

    def _temporary(self) -> Path:
        return self.directory / f"echo-arena-{next(self._ids)}.tmp"

    def _free_bytes(self) -> int:
        stat = os.statvfs(self.directory)
        return stat.f_bavail * stat.f_frsize

    def _available_bytes(self) -> int:
        """Return what is free and what a former process of ours has taken."""
        taken = (
            entry.stat(follow_symlinks=False).st_size
            for entry in os.scandir(self.directory)
            if _OWN.fullmatch(entry.name) or is_parcel(entry.name)
        )
        return self._free_bytes() + sum(taken)

    def _warn(self, text: str) -> None:
        """Warn once: whoever has read it need not read it again with every version."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s: %s", self.where, text)


def _map_file(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a file that has all its room; ValueError if it is empty."""
    mapping = mmap.mmap(descriptor, num_bytes)
    advise_huge_pages(mapping)
    return mapping


def _remove(path: Path) -> None:
    """Remove a file if it is there; one that cannot be removed stays."""
    with contextlib.suppress(OSError):
        path.unlink()
