"""Memory-mapped version stores on disk, from which a restarted node resumes.

This module creates these files in the directory network.store_dir:

    v12-L1-<run>.image       the bytes of version 12, lineage 1; <run> is a hash of the run's id
    v12-L1-<run>.manifest    the learner's signed manifest, as received
    echo-image-<n>.tmp       unfinished files, and spare files that will be reused
    echo-store-2.lock        lock file with the pid of the process that uses the directory; 2 is the
                             format, and a directory in another format is refused

Faults and their effects:

* **Killed while chunks are written** (kill -9, out of memory): the kernel keeps the written pages.
  The next process finds the image and its manifest, and `verify_held` determines which chunks are
  whole. Files are deliberately not synced to the disk. After a power failure, a chunk with a lost
  or torn page does not match its hash, and is fetched again. A torn manifest does not match its
  signature. An image gets its name only after its whole file is allocated. The next process removes
  unfinished files, and images without a manifest.
* **Killed while a version is written in place**: the image gets the new version's name before its
  first byte changes. The new version has no manifest yet. So the next process drops the image, and
  fetches a whole image.
* **Killed while a keyframe or delta is fetched**: it is fetched again, because only images are
  stored in files.
* **Disk full**: a file is preallocated before it is mapped. Otherwise a write to a mapped file on a
  full disk would kill the process (SIGBUS). If the disk has too little space, spares are removed
  first. If this is not enough, the version is kept in memory and one warning is logged. The node
  then works as if network.store_dir were not set, and a restart fetches the version again. If
  memory has no space either, `create` raises StorageError.
* **Limit** (network.store_bytes): counts all versions in the store, on disk or in memory.
* **Slow disk**: a write into the mapping goes to the page cache, and the kernel writes the cache
  back in the background. When more than vm.dirty_ratio (20 % of memory) is dirty, the kernel makes
  the writer wait in a page fault. So chunks are written in threads (`write`, without the GIL). The
  node lets its parent send more chunks only after the received chunks are written
  (`echo/weights/receiver.py`). So a slow disk slows down only the transfer. If the transfer is too
  slow, point store_dir to a tmpfs such as /dev/shm/echo, or raise vm.dirty_ratio. A tmpfs survives
  the process, but not the machine. One thread writes manifests and removes files, in order. The
  event loop itself preallocates and renames an image's file. This happens once per version and
  usually takes milliseconds. A disk that fails to read a page back kills the process (SIGBUS), as
  for any mapped file.
* **Shared by mistake**: the second process gets StorageError with the pid of the first.
* **Other runs**: their versions are removed in `recover`. Files that do not have the names above
  are not touched.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import re
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from echo.config.memory.budget import read_machine
from echo.core.errors import LocalProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.core.units import format_bytes, listed
from echo.records.files import lock_directory
from echo.weights.manifest import Manifest
from echo.weights.store.memory import VersionStore
from echo.weights.store.patches import Patch

# --- Verification of held chunks by their hashes ---


BATCH_BYTES = 1 << 20
"""Number of bytes that one task of the pool hashes. A smaller task would take longer to start than
to run.
"""


def held_chunks(manifest: Manifest, storage: memoryview) -> bytearray:
    """Return one byte per chunk: 1 if the chunk matches its hash, else 0.

    `storage` must have the image size that the manifest states. Bytes that were never written to
    the file read as zeros.
    """

    def is_held(index: int) -> bool:
        found = blake3(storage[slice(*manifest.chunk_range(index))]).digest()
        return found == manifest.chunk_hash(index)

    def check(batch: range) -> bytes:
        return bytes(map(is_held, batch))

    step = max(1, BATCH_BYTES // manifest.chunk_bytes)
    num_chunks = manifest.num_chunks
    batches = [range(i, min(i + step, num_chunks)) for i in range(0, num_chunks, step)]
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="rehash") as pool:
        return bytearray(b"".join(pool.map(check, batches)))


# --- One thread writes and removes small files beside the version stores, in order ---
#
# Even a small write waits when the kernel throttles processes that dirty pages, or commits the
# journal of its file system. The loop must not wait. Only a later process uses these files, so only
# `flush` waits for them: before the directory is read, or its free space is counted.


_log = logging.getLogger(__name__)


class DiskThread:
    """Calls functions in one thread, in the order in which `call` received them."""

    def __init__(self) -> None:
        """Create the thread's pool; the thread starts with the first call."""
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(
            1, thread_name_prefix="version_store"
        )

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread; after `close`, call it directly.

        The function must handle its own errors.
        """
        if self._pool is None:
            function()
        else:
            self._pool.submit(function).add_done_callback(_report)

    def flush(self) -> None:
        """Wait until all functions passed to `call` so far have returned."""
        if self._pool is not None:
            self._pool.submit(lambda: None).result()

    def close(self) -> None:
        """Wait until all queued functions have returned, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _report(future: Future[None]) -> None:
    error = future.exception()
    if error is not None:
        _log.error("internal error; please report this", exc_info=error)


# --- Version stores: in memory, or in files that outlive the process ---
#
# A **version store** is the memory of one version, a writable memoryview. A store allocates it,
# counts it against one limit, and frees it. The weights plane writes, verifies and sends its
# chunks.
# A dropped version store may still be read: libzmq sends slices of it without a copy, long after
# the plane has forgotten the version. So no code unmaps pages explicitly. Each view is lent by a
# small exporter object. Only the view and its slices keep the exporter alive. While it lives, the
# bytes can be read. When it has died, no reference to the bytes exists, and reference counting
# frees the pages.
# The same test makes reuse safe. The first write to fresh memory costs a page fault, which takes
# longer than the write itself. So a dropped version store of the same size is reused once its
# exporter has died. On a virtual machine with two cores, 1 GiB was written in chunks of 1 MiB. It
# took 0.05 s in a reused version store of any kind. Fresh memory took 0.12 s with pages of 2 MiB,
# 0.4 s with pages of 4 KiB, and more than 2 s if the host had to allocate the memory first. A fresh
# file took 0.2 to 1.6 s on ext4 and 0.6 s on tmpfs, 0.2 s of these in `create`. At most MAX_SPARES
# wait to be reused. They count against the limit, and are released when their space is needed.
#
# torch.frombuffer keeps the view alive, but does not notice `release()` on it: never release a view
# that was lent.
#
# Not thread-safe, except `write`, and `verify_held`, which takes long and belongs into a thread.


MAX_SPARES = 2
"""Largest number of dropped images that are kept for reuse.

One image can then be filled again while the other is still being sent.
"""


@dataclass(frozen=True, slots=True)
class Saved:
    """An unverified version that an earlier process stored."""

    version: PolicyVersion
    signed_manifest: bytes
    """The manifest with the learner's signature. The caller must verify the signature."""
    storage: memoryview
    """The writable bytes of the image. `verify_held` determines which chunks are valid."""


@dataclass(slots=True, eq=False)
class Pages:
    """The memory mapping that holds one version's image."""

    mapping: mmap.mmap
    path: Path | None = None
    """Path of the mapped file; None if the pages are only in memory."""
    _exporter: weakref.ref[npt.NDArray[np.uint8]] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.mapping)

    def lend(self) -> memoryview:
        """Return a view of all bytes. While the view is alive, `is_lent` is true."""
        exporter = np.frombuffer(self.mapping, dtype=np.uint8)
        self._exporter = weakref.ref(exporter)
        return exporter.data

    @property
    def is_lent(self) -> bool:
        """Whether a view that `lend` returned is still alive."""
        return self._exporter is not None and self._exporter() is not None


def map_memory(num_bytes: int) -> Pages:
    """Return memory whose pages the kernel allocates at their first write.

    Raises:
        OSError: if address space or memory is exhausted.
    """
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(mapping)
    return Pages(mapping)


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask the kernel for pages of 2 MiB, which cause fewer page faults.

    If the kernel refuses, the mapping keeps its usual pages.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)


class MemoryStore(VersionStore):
    """Keeps versions in memory; all versions together take at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes is {limit_bytes}, must be at least 1")
        self.limit_bytes = limit_bytes
        self._live: dict[PolicyVersion, Pages] = {}
        self.spares: list[Pages] = []
        """Pages of dropped versions, largest first, kept for new versions of the same size."""

    # --- for the protocol's shell ----------------------------------------------------------------

    @property
    def bytes_held(self) -> int:
        """Total bytes of the versions in the store."""
        return sum(map(len, self._live.values()))

    def create(
        self, version: PolicyVersion, signed_manifest: bytes | None, num_bytes: int
    ) -> memoryview:
        """Allocate and return the memory for a version's image, with undefined contents.

        The signed manifest is stored with the image. If `signed_manifest` is None, `sealed` stores
        the manifest later.

        Raises:
            StorageError: if the limit, the disk or the memory has too little space for the version.
        """
        if version in self._live or num_bytes < 1:
            raise ValueError(f"{version}: {num_bytes} bytes asked for, or asked for twice")
        pages = self._take_spare(num_bytes)
        if pages is None:
            self._make_space(version, num_bytes)
            pages = self._allocate(version, num_bytes)
        self._enter(version, pages)
        self._live[version] = pages
        if signed_manifest is not None:
            self.sealed(version, signed_manifest)
        return pages.lend()

    def drop(self, version: PolicyVersion) -> None:
        """Drop a version; do nothing if it is not stored.

        Views of the version's memory stay valid. This includes views in frames that libzmq has not
        sent yet.
        """
        pages = self._live.pop(version, None)
        if pages is None:
            return
        if not self._leave(version, pages):
            self._free(pages)
            return
        self.spares.append(pages)
        # Keep the largest spares: small ones are cheap to make again.
        self.spares.sort(key=len, reverse=True)
        for spare in self.spares[MAX_SPARES:]:
            self._free(spare)
        del self.spares[MAX_SPARES:]

    def recover(self, run_id: str) -> list[Saved]:
        """Return the versions of this run that an earlier process stored, newest first.

        Call this method after the node has joined. The caller verifies each manifest
        (echo.weights.manifest.verify), then the chunks (`verify_held`), and drops the versions that
        the node does not need. This method drops the versions of other runs.
        """
        for version in list(self._live):
            self.drop(version)
        return []

    def advance(self, base: PolicyVersion, version: PolicyVersion) -> None:
        """Record that the memory which held the version `base` holds `version` now."""
        pages = self._live.pop(base, None)
        if pages is not None:
            self._live[version] = pages

    def verify_held(self, manifest: Manifest, storage: memoryview) -> bytearray:
        """Return one byte per chunk: 1 if the chunk matches its hash, else 0.

        Raises:
            StorageError: if `storage` does not have the manifest's size.
        """
        if len(storage) != manifest.num_bytes:
            raise StorageError(
                f"the image of {manifest.version} has {len(storage)} bytes, its manifest says "
                f"{manifest.num_bytes}; drop it and fetch the version again"
            )
        return held_chunks(manifest, storage)

    def close(self) -> None:
        """Drop all versions, but keep their files for a later process.

        Views of the images stay valid.
        """
        self._drop_spares()
        self._live.clear()

    # --- memory of a version ---------------------------------------------------------------------

    @property
    def where(self) -> str:
        """The store's name in messages, for example "network.store_dir = /dev/shm/echo"."""
        return "memory for versions of the weights"

    def _allocate(self, version: PolicyVersion, num_bytes: int) -> Pages:
        try:
            return map_memory(num_bytes)
        except OSError as error:
            raise StorageError(
                f"{self.where}: no {format_bytes(num_bytes)} for {version}: {error.strerror}; "
                "use a machine with more, or set network.store_dir to a directory on a disk"
            ) from error

    def _enter(self, version: PolicyVersion, pages: Pages) -> None:
        """Name the mapped file after a version; do nothing for pages in memory."""

    def _leave(self, version: PolicyVersion, pages: Pages) -> bool:
        """Remove a dropped version's name from its file, if the version has a file.

        Return whether the version's pages may be reused for another version.
        """
        return True

    def _free(self, pages: Pages) -> None:
        """Release pages, which are unmapped once no view of them is alive."""

    def _drop_spares(self) -> None:
        for spare in self.spares:
            self._free(spare)
        self.spares.clear()

    def _take_spare(self, num_bytes: int) -> Pages | None:
        for index, spare in enumerate(self.spares):
            if len(spare) == num_bytes and not spare.is_lent:
                return self.spares.pop(index)
        return None

    def _make_space(self, version: PolicyVersion, num_bytes: int) -> None:
        space = self.limit_bytes - self.bytes_held
        if num_bytes > space:
            raise StorageError(
                f"{self.where}: {version} needs {format_bytes(num_bytes)}, but "
                f"{format_bytes(self.bytes_held)} of {format_bytes(self.limit_bytes)} are taken by "
                f"{_names(list(self._live))}; raise network.store_bytes"
            )
        while self.spares and sum(map(len, self.spares)) + num_bytes > space:
            self._free(self.spares.pop())


def _names(versions: Sequence[PolicyVersion]) -> str:
    return ", ".join(map(str, sorted(versions))) or "no version"


STORE_SHARE = 0.9
"""Largest share of the free memory or disk that versions may take, if network.store_bytes is not
set. The node and its system need the rest. A node also refuses a version that is larger than this
share of its memory."""
FORMAT = 2
"""Format number of the directory's files, which is part of the lock file's name."""
_LOCK = f"echo-store-{FORMAT}.lock"
_LOCKS = re.compile(r"echo-store-(\d+)\.lock")
_OWN = re.compile(
    r"v(?P<step>\d{1,18})-L(?P<lineage>\d{1,18})-(?P<run>[0-9a-f]{16})\.(image|manifest)"
    r"|echo-image-\d+\.tmp"
)


def open_store(directory: str | None, limit_bytes: int | None) -> MemoryStore:
    """Return the store that network.store_dir and network.store_bytes describe.

    If `directory` is None, the store is in memory.

    Raises:
        StorageError: if the directory cannot be used.
    """
    if directory is not None:
        return DiskStore(Path(directory), limit_bytes)
    if limit_bytes is None:
        limit_bytes = max(1, int(STORE_SHARE * read_machine().host_bytes))
    return MemoryStore(limit_bytes)


def _refuse_other_format(directory: Path) -> None:
    formats = {match[1] for path in directory.glob("*.lock") if (match := _LOCKS.match(path.name))}
    if other := ", ".join(sorted(formats - {str(FORMAT)})):
        raise StorageError(
            f"network.store_dir = {directory} holds versions in format {other}, this release has "
            f"format {FORMAT}; delete it, or name another directory: versions are fetched again"
        )


class DiskStore(MemoryStore):
    """Keeps versions in files that are mapped into memory.

    The directory is created if it does not exist, and locked until `close`. All versions together
    take at most `limit_bytes`. If `limit_bytes` is None, the limit is STORE_SHARE of the free
    disk space.

    Raises:
        StorageError: if the directory cannot be used, or another process uses it.
    """

    may_block = True

    def __init__(self, directory: Path, limit_bytes: int | None = None) -> None:
        self.directory = directory
        _refuse_other_format(directory)
        self._lock: int | None = lock_directory(
            directory,
            _LOCK,
            called=f"network.store_dir = {directory}",
            in_use="is in use by process {}; give each node on a machine a directory of its own",
        )
        if limit_bytes is None:
            limit_bytes = max(1, int(STORE_SHARE * self._available_bytes()))
        super().__init__(limit_bytes)
        self._run: str | None = None
        self._thread = DiskThread()
        self._ids = itertools.count(1)
        self._has_warned = False

    @property
    def where(self) -> str:
        return f"network.store_dir = {self.directory}"

    def sealed(self, version: PolicyVersion, signed_manifest: bytes) -> None:
        """Write a version's manifest beside its image, in the disk's thread.

        If this fails, a later process does not recover the version.
        """
        pages = self._live.get(version)
        if pages is None or pages.path is None:
            return  # patched to a newer version, or in memory
        temporary = self._temporary()
        self._thread.call(lambda: self._write_manifest(version, temporary, signed_manifest))

    def _write_manifest(
        self, version: PolicyVersion, temporary: Path, signed_manifest: bytes
    ) -> None:
        try:
            # Not synced, like the version store: a manifest torn by a power failure is refused.
            _write(temporary, signed_manifest)  # private: contains the chunks' key
            temporary.rename(self._path(version, "manifest"))
        except OSError as error:
            self._warn(f"the manifest of {version} cannot be written: {error.strerror}")
            _remove(temporary)

    # --- in place --------------------------------------------------------------------------------

    def begin_patch(self, patch: Patch) -> None:
        """Give the image's file the name of the version that a patch will write."""
        self._rename(patch.base, patch.base, patch.version)

    def cancel_patch(self, patch: Patch) -> None:
        """Give the image's file the name of the patch's base version again."""
        try:
            self._rename(patch.base, patch.version, patch.base)
        except OSError as error:
            self._warn(f"{patch.base} cannot be named: {error.strerror}")

    def _rename(self, held: PolicyVersion, old: PolicyVersion, new: PolicyVersion) -> None:
        pages = self._live.get(held)
        if pages is not None and pages.path is not None:  # a version in memory has no name
            pages.path = self._path(old, "image").rename(self._path(new, "image"))

    def advance(self, base: PolicyVersion, version: PolicyVersion) -> None:
        """Record that the file of `base` now holds `version`, and remove the base's manifest."""
        super().advance(base, version)
        self._remove_later(self._path(base, "manifest"))

    def recover(self, run_id: str) -> list[Saved]:
        """Return the versions of this run that an earlier process stored, newest first.

        Call this method before the first `create`. Call it in a thread, because it may take long.
        All other files of the store that an earlier process left are removed. If this process has
        stored versions of another run, these versions are dropped.
        """
        run = blake3(run_id.encode()).hexdigest()[:16]
        if run != self._run:
            for version in list(self._live):
                self.drop(version)
        self._run = run
        self.flush()
        saved = []
        known = {spare.path for spare in self.spares} | {p.path for p in self._live.values()}
        for version in self._sift(known):
            found = self._reopen(version)
            if found is not None:
                saved.append(found)
        return saved

    def close(self) -> None:
        """Release the directory; its versions remain for a later process.

        The method waits for queued disk work. Threads of this process may still write verified
        chunks into the images, so start a later process only after this process has ended.
        """
        super().close()
        self._thread.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def flush(self) -> None:
        """Wait until all manifests are written and all files of dropped versions are removed."""
        self._thread.flush()

    # --- allocation and release ------------------------------------------------------------------

    def _allocate(self, version: PolicyVersion, num_bytes: int) -> Pages:
        """Allocate a temporary file, and return its pages.

        If this fails, return pages of memory.
        """
        assert self._run_hash
        try:
            try:
                return self._map_new(num_bytes)
            except OSError:
                self._drop_spares()
                self.flush()
                return self._map_new(num_bytes)
        except OSError as error:
            fault = (
                f"no {format_bytes(num_bytes)} for {version}: {error.strerror} "
                f"({format_bytes(self._free_bytes())} free)"
            )
            remedy = "free some, or point network.store_dir to a larger disk"
            if num_bytes > STORE_SHARE * read_machine().host_bytes:
                raise StorageError(f"{self.where}: {fault}; {remedy}") from error
            self._warn(f"{fault}; it is kept in memory and lost with this process: {remedy}")
            return self._map_memory(version, num_bytes, error)

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
            pages.path = pages.path.rename(self._path(version, "image"))
        except OSError as error:
            _remove(pages.path)
            raise StorageError(
                f"{self.where}: a file for {version} cannot be named: {error.strerror}; does the "
                "directory still exist?"
            ) from error

    def _leave(self, version: PolicyVersion, pages: Pages) -> bool:
        """Rename a dropped version's file for reuse, and remove its manifest.

        If the version has no file, its pages in memory must not be reused, because the next version
        may fit on disk. The result is then False.
        """
        if pages.path is None:
            return False
        self._remove_later(self._path(version, "manifest"))
        try:
            pages.path = pages.path.rename(self._temporary())
        except OSError:
            return False
        return True

    def _free(self, pages: Pages) -> None:
        if pages.path is not None:
            self._remove_later(pages.path)

    def _remove_later(self, path: Path) -> None:
        self._thread.call(lambda: _remove(path))

    # --- files of an earlier process -------------------------------------------------------------

    def _sift(self, known: set[Path | None]) -> list[PolicyVersion]:
        """Return the versions on disk, newest first; remove all other files of the store."""
        versions: set[PolicyVersion] = set()
        foreign = []
        for entry in os.scandir(self.directory):
            path, match = Path(entry.path), _OWN.fullmatch(entry.name)
            if entry.name == _LOCK or path in known or path.with_suffix(".image") in known:
                continue
            if match is None or not entry.is_file(follow_symlinks=False):
                foreign.append(entry.name)
            elif match["run"] != self._run:
                _remove(path)
            else:
                versions.add(PolicyVersion(int(match["lineage"]), int(match["step"])))
        if foreign:
            names = listed(sorted(foreign))
            _log.info("%s: left alone %d foreign files: %s", self.where, len(foreign), names)
        return sorted(versions, reverse=True)

    def _reopen(self, version: PolicyVersion) -> Saved | None:
        """Map a stored version and return it.

        If the version is incomplete, remove its files and return None.
        """
        path, manifest = self._path(version, "image"), self._path(version, "manifest")
        try:
            signed_manifest = manifest.read_bytes()
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                num_bytes = os.fstat(descriptor).st_size
                self._make_space(version, num_bytes)
                pages = Pages(_map_file(descriptor, num_bytes), path)
            finally:
                os.close(descriptor)
        except (OSError, ValueError, StorageError) as error:
            # An image without a manifest was being decoded or patched, or had no seal yet. A
            # manifest without an image belongs to a dropped or patched version.
            if not isinstance(error, FileNotFoundError):
                _log.warning("%s: removed what was left of %s: %s", self.where, version, error)
            _remove(path)
            _remove(manifest)
            return None
        self._live[version] = pages
        return Saved(version, signed_manifest, pages.lend())

    # --- names and numbers -----------------------------------------------------------------------

    @property
    def _run_hash(self) -> str:
        if self._run is None:
            raise LocalProtocolError("DiskStore: `recover` names the run, and must come first")
        return self._run

    def _path(self, version: PolicyVersion, kind: str) -> Path:
        return self.directory / f"v{version.step}-L{version.lineage}-{self._run}.{kind}"

    def _temporary(self) -> Path:
        return self.directory / f"echo-image-{next(self._ids)}.tmp"

    def _free_bytes(self) -> int:
        stat = os.statvfs(self.directory)
        return stat.f_bavail * stat.f_frsize

    def _available_bytes(self) -> int:
        """Return the free bytes of the disk plus the bytes of an earlier process's files."""
        taken = (
            entry.stat(follow_symlinks=False).st_size
            for entry in os.scandir(self.directory)
            if _OWN.fullmatch(entry.name)
        )
        return self._free_bytes() + sum(taken)

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s: %s", self.where, text)


def _map_file(descriptor: int, num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(descriptor, num_bytes)
    advise_huge_pages(mapping)
    return mapping


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
