"""Memory-mapped version stores on disk, which a restarted node resumes from.

Layout of the directory (network.store_dir), all names this module's own:

    v12-L1-<run>.image       the bytes of version 12, lineage 1; <run> is a hash of the run's id
    v12-L1-<run>.manifest    the learner's signed manifest, as it travelled
    v12-L1-<run>.undo        what became version 12 in place: the words that it overwrote
    *.keyframe               what has come of keyframes
    echo-image-<n>.tmp       what is being made, and spares that wait for recycling
    echo-store-2.lock        flock held by the process that owns the directory, with its pid; 2 is
                             the format of all this, and a directory of another one is refused

What happens when
* **Killed in mid-write** (kill -9, out of memory): written pages are the kernel's and stay. The
  next process finds version store and manifest, and `verify_held` finds the chunks. Nothing is
  synced to the disk on purpose: after a power failure a lost or torn page fails its hash and is
  fetched again, and a torn manifest fails its signature. A version store gets its name only with
  all its room, a version store without a manifest is worthless: both are removed.
* **Killed while a version is written in place**: what it overwrites is on record before the first
  word changes (`pack_undo`), and the image is named after the new version behind the last. The
  next process takes back what has no manifest yet, newest first, and so comes to a version whose
  every chunk it can verify. It fetches the deltas since then again.
* **Disk full**: room is preallocated before the file is mapped, because a mapped file without room
  kills the process (SIGBUS) at some later write. Where the disk has too little, spares go first;
  then the version is kept in memory if that has room for it, with one warning: the node works as
  without network.store_dir, and only its restart costs a transfer. If memory has no space either,
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
import errno
import itertools
import logging
import mmap
import os
import re
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from echo.config.memory import read_machine
from echo.core.errors import LocalProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.core.units import format_bytes
from echo.records.files import lock_directory
from echo.weights.delta import BlockPatch
from echo.weights.manifest import HASH_BYTES, Manifest
from echo.weights.store import Patch, SavedItem, VersionStore

# --- Verification of held chunks: hash every one ---


BATCH_BYTES = 1 << 20
"""Bytes hashed per task of the pool: below, handing out the task costs more than the hash."""


def held_chunks(manifest: Manifest, storage: memoryview) -> bytearray:
    """Return one byte per chunk: 1 if its bytes match their hash.

    Both are of one size. Where a file was never written its bytes read as zeros.
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


# --- The one thread in which small files beside the version stores are written and removed, in
# order ---
#
# Even a small write waits where the kernel holds back whoever dirties more pages, or commits the
# journal of its file system; the loop must not. What is done here is of use to a later process
# only, so nobody waits for it either, but `flush`: before the directory is read, or its room
# counted.


_log = logging.getLogger(__name__)


class DiskThread:
    """Calls functions, one after the other, in the order in which they were handed over."""

    def __init__(self) -> None:
        """Start; the thread begins with the first call."""
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(
            1, thread_name_prefix="version_store"
        )

    def call(self, function: Callable[[], None]) -> None:
        """Call a function that handles its own faults; at once after `close`."""
        if self._pool is None:
            function()
        else:
            self._pool.submit(function).add_done_callback(_report)

    def flush(self) -> None:
        """Wait until everything handed over so far was called."""
        if self._pool is not None:
            self._pool.submit(lambda: None).result()

    def close(self) -> None:
        """Wait for everything, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _report(future: Future[None]) -> None:
    error = future.exception()
    if error is not None:
        _log.error("internal error; please report this", exc_info=error)


# --- Journals of keyframes, which a restarted node reads again ---
#
# An image is fetched into a version store that is a file itself. A keyframe is not: its size is not
# known before its last table, and what comes out of its chunks lies elsewhere. So each has a
# journal, to which tables and chunks are appended as they have been verified:
#
#     v12-L1-<run>.keyframe             of version 12, lineage 1
#
#     record: magic (4 bytes), index of the chunk or 2^32 - 1 for a table, length, then the bytes
#
# * **Killed in mid-write**: the last record is torn, and cut off before more is appended. Nothing
#   is synced; after a power failure a lost page fails its hash or its signature
#   (`echo/weights/store.py`), and what follows a lost header is not read.
# * **Limit and full disk**: a journal only spares a later process a transfer. So all of them
#   together take what versions leave of network.store_bytes, the oldest give way first, and one
#   that cannot be written is removed. Chunks are in memory besides, so nothing else changes.
# * **Slow disk**: files are made, added to and removed in a thread of their own, and what is queued
#   for it are views of chunks that are held in memory anyway. A journal that has MAX_BEHIND_BYTES
#   queued is given up: what it would spare a later process, it costs this one.
# * A journal is removed with its keyframe, which may long outlive the fetch: children take it.
#
# Deltas have none: one is some hundredth of an image, and is fetched again after a restart.


_HEADER = struct.Struct("<4sII")
_MAGIC = b"echo"
_TABLE = 2**32 - 1
MAX_BEHIND_BYTES = 256 << 20
"""What may wait to be written to all journals; `close` waits for that."""
_NAME = re.compile(r"v(?P<step>\d{1,18})-L(?P<lineage>\d{1,18})-(?P<run>[0-9a-f]{16})\.keyframe")


def is_keyframe_file(name: str) -> bool:
    """Return whether a file bears the name of a journal."""
    return _NAME.fullmatch(name) is not None


class KeyframeFile:
    """The journal of one keyframe.

    Its descriptor belongs to the thread; everything else to the loop.
    """

    def __init__(self, files: KeyframeFiles, path: Path, num_bytes: int = 0) -> None:
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
        if not self._files.make_space(size, keep=self):
            fault = "no space under the limit"
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
        self._files.store.warn(f"{self.path.name} cannot be written: {fault}")
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
            self._files.store.warn(f"{self.path.name} cannot be removed: {error.strerror}")

    def close(self) -> None:
        """Write no more; what is there, or queued, stays."""
        self._is_closed = True
        self._files.thread.call(self._close)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@dataclass(frozen=True, slots=True)
class SavedKeyframe:
    """What a former process has written down of a keyframe; nothing about it has been verified."""

    version: PolicyVersion
    journal: KeyframeFile


class KeyframeFiles:
    """All journals in a directory."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self.directory = store.directory
        self.thread = store.thread
        self.behind_bytes = 0
        """What is queued for all journals."""
        self._guard = threading.Lock()
        self._open: list[KeyframeFile] = []
        """Oldest first."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all journals."""
        return sum(file.num_bytes for file in self._open)

    def add_behind(self, num_bytes: int) -> None:
        """Count bytes that are queued, or no more."""
        with self._guard:
            self.behind_bytes += num_bytes

    def begin(self, version: PolicyVersion, run: str) -> KeyframeFile:
        """Return a new journal."""
        path = self.directory / f"v{version.step}-L{version.lineage}-{run}.keyframe"
        file = KeyframeFile(self, path)
        file.open()
        self._open.append(file)
        return file

    def forget(self, file: KeyframeFile) -> None:
        """Count a journal no more."""
        if file in self._open:
            self._open.remove(file)

    def make_space(self, num_bytes: int, *, keep: KeyframeFile | None = None) -> bool:
        """Remove the oldest until `num_bytes` more fit; tell whether they do."""
        while not self.store.has_space(num_bytes):
            file = next((file for file in self._open if file is not keep), None)
            if file is None:
                return False
            file.remove()
        return True

    def remove_all(self) -> None:
        """Remove every journal: their room is wanted for a version."""
        for file in self._open[:]:
            file.remove()

    def recover(self, run: str) -> list[SavedKeyframe]:
        """Return what a former process left of a run, newest first, and remove the rest."""
        known = {file.path for file in self._open}
        saved = []
        for entry in os.scandir(self.directory):
            path, match = Path(entry.path), _NAME.fullmatch(entry.name)
            if match is None or path in known or not entry.is_file(follow_symlinks=False):
                continue
            journal = KeyframeFile(self, path, entry.stat(follow_symlinks=False).st_size)
            if match["run"] != run:
                journal.remove()
                continue
            version = PolicyVersion(int(match["lineage"]), int(match["step"]))
            saved.append(SavedKeyframe(version, journal))
        saved.sort(key=lambda each: each.version, reverse=True)
        for each in saved[:]:
            if not self.store.has_space(each.journal.num_bytes):
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


# --- Undo records: what versions that were written in place have overwritten ---
#
#     v13-L1-<run>.undo        how to come from version 13 back to the one before
#
#     head: magic, step and lineage before, bytes of a block, number of blocks
#     block: number, bytes of a word (0: the whole block), how many words, bytes of the tail;
#            indices (u32), old words, old tail
#     end: BLAKE3 of all that
#
# * It is written whole, beside, and renamed before the first word changes; words, not differences,
#   so that taking back twice, or what was never written, changes nothing.
# * Nothing is synced: what was renamed is the kernel's when the process is killed. After a power
#   failure the chunks tell, as for everything here.
# * Records are removed when a manifest of their version, or of a newer one, has been written.
#
# A version that was written in place and has no manifest yet is taken back at the next start.

_UNDO_HEAD = struct.Struct("<4sQQII")
_UNDO_BLOCK = struct.Struct("<IBII")
_UNDO_MAGIC = b"undo"


def pack_undo(patch: Patch) -> bytes:
    """Return the record of what a patch overwrites."""
    base = patch.base
    parts: list[bytes] = [
        _UNDO_HEAD.pack(_UNDO_MAGIC, base.step, base.lineage, patch.block_bytes, len(patch.blocks))
    ]
    for number, block in patch.blocks.items():
        is_whole = block.where is None
        word_bytes = 0 if is_whole else block.old.itemsize
        tail = block.old_tail
        parts.append(_UNDO_BLOCK.pack(number, word_bytes, block.old.size, len(tail)))
        if block.where is not None:
            parts.append(block.where.astype("<u4").tobytes())
        parts += [block.old.tobytes(), tail]
    record = b"".join(parts)
    return record + blake3(record).digest()


def unpack_undo(record: bytes, version: PolicyVersion) -> Patch:
    """Return a patch that can be taken back, from its record.

    Raises:
        StorageError: if it is torn or damaged.
    """
    body, digest = memoryview(record)[:-HASH_BYTES], record[-HASH_BYTES:]
    if len(record) < _UNDO_HEAD.size + HASH_BYTES or blake3(body).digest() != digest:
        raise StorageError(f"the undo record of {version} is damaged")
    _, step, lineage, block_bytes, num_blocks = _UNDO_HEAD.unpack_from(body)
    patch, at = Patch(PolicyVersion(lineage, step), version, block_bytes), _UNDO_HEAD.size

    def take(dtype: str, count: int) -> npt.NDArray[Any]:
        nonlocal at
        array: npt.NDArray[Any] = np.frombuffer(body, dtype, count, at)
        at += array.nbytes
        return array

    for _ in range(num_blocks):
        number, word_bytes, count, tail_bytes = _UNDO_BLOCK.unpack_from(body, at)
        at += _UNDO_BLOCK.size
        where = take("<u4", count).astype(np.int64) if word_bytes else None
        old = take(f"<u{word_bytes or 1}", count)
        tail = take("u1", tail_bytes).tobytes()
        patch.blocks[number] = BlockPatch(where, old, old, tail, tail)
    return patch


# --- Version stores: in memory, or in files that outlive the process ---
#
# A **version store** is the space for one version, handed out as a writable memoryview. Who fills
# it, which of its chunks are right and whom they are sent to is the protocol's business; a store
# finds the room, counts it against one limit, and takes it back.
#
# A dropped version store may still be on its way out: libzmq sends slices of it without a copy,
# long after the protocol has forgotten the version. So nothing is ever unmapped by hand. Each view
# is lent by a small exporter object whose only owners are the view and what was sliced or made from
# it. While the exporter lives, somebody can read the bytes; when it has died, nobody can. The pages
# themselves follow by reference counting.
#
# That same test makes recycling safe. The first touch of fresh memory costs a page fault, more than
# writing the bytes does, so a dropped version store of the same size is handed out again once its
# exporter has died. 1 GiB written in chunks of 1 MiB, on a virtual machine with two cores, took
# 0.05 s in a recycled version store of any kind; in fresh memory 0.12 s with pages of 2 MiB, 0.4 s
# with pages of 4 KiB, and more than 2 s where the host had yet to find the memory; in a fresh file
# 0.2 to 1.6 s on ext4, 0.6 s on tmpfs, 0.2 s of these in `create`. At most MAX_SPARES wait to be
# recycled; they count against the limit, and go at once where their room is wanted.
#
# torch.frombuffer keeps the view alive as it should, but does not notice `release()` on it: never
# release a view that was lent.
#
# Not thread-safe, but for `write`, and for `verify_held`, which takes long and belongs into a
# thread.


MAX_SPARES = 2
"""Dropped images kept for recycling: one is still being sent while the other is filled anew."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A version that a former process left behind; nothing about it has been verified."""

    version: PolicyVersion
    signed_manifest: bytes
    """As it was given to `create` or `sealed`; whether the learner signed it is to be checked."""
    storage: memoryview
    """Its bytes so far, writable; which chunks are there, `verify_held` tells."""


@dataclass(slots=True, eq=False)
class Pages:
    """The mapping under one version store."""

    mapping: mmap.mmap
    path: Path | None = None
    """The file that is mapped; None for memory."""
    _exporter: weakref.ref[npt.NDArray[np.uint8]] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.mapping)

    def lend(self) -> memoryview:
        """Return a view of all bytes."""
        exporter = np.frombuffer(self.mapping, dtype=np.uint8)
        self._exporter = weakref.ref(exporter)
        return exporter.data

    @property
    def is_lent(self) -> bool:
        """Whether anybody can still reach the bytes."""
        return self._exporter is not None and self._exporter() is not None


def map_memory(num_bytes: int) -> Pages:
    """Return pages of memory, found one by one as they are touched.

    Raises:
        OSError: if there is no address space or memory for them.
    """
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(mapping)
    return Pages(mapping)


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for pages of 2 MiB, each of which saves 511 faults; a wish that needs no answer."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)


class MemoryStore(VersionStore):
    """Finds room for versions, `limit_bytes` for all that were not dropped, and takes it back."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes is {limit_bytes}, must be at least 1")
        self.limit_bytes = limit_bytes
        self._live: dict[PolicyVersion, Pages] = {}
        self._spares: list[Pages] = []

    # --- for the protocol's shell ----------------------------------------------------------------

    @property
    def bytes_held(self) -> int:
        """Bytes of the version stores that were not dropped."""
        return sum(map(len, self._live.values()))

    def create(
        self, version: PolicyVersion, signed_manifest: bytes | None, num_bytes: int
    ) -> memoryview:
        """Return room for a version; its bytes mean nothing until they are written.

        The signed manifest is kept beside them as it travels; None if it is known later (`sealed`).

        Raises:
            StorageError: if the limit, the disk or the memory does not allow it.
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
        """Give a version's room back; one that has no version store here is no error.

        Views of it, and what libzmq has yet to send of it, stay valid.
        """
        pages = self._live.pop(version, None)
        if pages is None:
            return
        if not self._leave(pages):
            self._free(pages)
            return
        self._spares.append(pages)
        # The largest stay: small ones are cheap to make anew.
        self._spares.sort(key=len, reverse=True)
        for spare in self._spares[MAX_SPARES:]:
            self._free(spare)
        del self._spares[MAX_SPARES:]

    def recover(self, run_id: str) -> list[Saved]:
        """Return what a former process left of this run, newest first; to be called once joined.

        The caller verifies the manifest (echo.weights.manifest.verify), then the chunks
        (`verify_held`), and drops what it does not want. Versions of other runs are dropped.
        """
        for version in list(self._live):
            self.drop(version)
        return []

    def advance(self, base: PolicyVersion, version: PolicyVersion) -> None:
        """Count the memory of a version as that of the one which it has become."""
        pages = self._live.pop(base, None)
        if pages is not None:
            self._live[version] = pages

    def recover_encoded(self) -> list[SavedKeyframe]:
        """Return what a former process left of keyframes, newest first; needs `recover`."""
        return []

    def verify_held(self, manifest: Manifest, storage: memoryview) -> bytearray:
        """Return one byte per chunk: 1 if its bytes in `storage` match their hash.

        Raises:
            StorageError: if the version store does not have the manifest's size.
        """
        if len(storage) != manifest.num_bytes:
            raise StorageError(
                f"the image of {manifest.version} has {len(storage)} bytes, its manifest says "
                f"{manifest.num_bytes}; drop it and fetch the version anew"
            )
        return held_chunks(manifest, storage)

    def close(self) -> None:
        """Let go of everything but what a later process may recover; views stay valid."""
        self._drop_spares()
        self._live.clear()

    # --- where a version lies --------------------------------------------------------------------

    @property
    def where(self) -> str:
        """The place, for messages."""
        return "memory for versions of the weights"

    def _allocate(self, version: PolicyVersion, num_bytes: int) -> Pages:
        """Find fresh pages, or raise StorageError."""
        try:
            return map_memory(num_bytes)
        except OSError as error:
            raise StorageError(
                f"{self.where}: no {format_bytes(num_bytes)} for {version}: {error.strerror}; "
                "use a machine with more, or set network.store_dir to a directory on a disk"
            ) from error

    def _enter(self, version: PolicyVersion, pages: Pages) -> None:
        """Give pages the name of a version, or raise StorageError."""

    def _leave(self, pages: Pages) -> bool:
        """Take the name from the pages of a dropped version; tell whether they may be recycled."""
        return True

    def _free(self, pages: Pages) -> None:
        """Let go of pages for good; they are unmapped when the last view of them has gone."""

    def _drop_spares(self) -> None:
        for spare in self._spares:
            self._free(spare)
        self._spares.clear()

    def _take_spare(self, num_bytes: int) -> Pages | None:
        for index, spare in enumerate(self._spares):
            if len(spare) == num_bytes and not spare.is_lent:
                return self._spares.pop(index)
        return None

    def _make_space(self, version: PolicyVersion, num_bytes: int) -> None:
        """Let spares go until `num_bytes` fit under the limit."""
        room = self.limit_bytes - self.bytes_held
        if num_bytes > room:
            raise StorageError(
                f"{self.where}: {version} needs {format_bytes(num_bytes)}, but "
                f"{format_bytes(self.bytes_held)} of {format_bytes(self.limit_bytes)} are taken by "
                f"{_names(list(self._live))}; raise network.store_bytes"
            )
        while self._spares and sum(map(len, self._spares)) + num_bytes > room:
            self._free(self._spares.pop())


def _names(versions: Sequence[PolicyVersion]) -> str:
    return ", ".join(map(str, sorted(versions))) or "no version"


DEFAULT_SHARE = 0.9
"""Share of the free memory or disk that versions may take, where network.store_bytes is unset."""
FORMAT = 2
"""Of names and files in the directory, told by the lock."""
_LOCK = f"echo-store-{FORMAT}.lock"
_LOCKS = re.compile(r"echo-store-(\d+)\.lock")
_OWN = re.compile(
    r"v(?P<step>\d{1,18})-L(?P<lineage>\d{1,18})-(?P<run>[0-9a-f]{16})\.(?P<kind>image|manifest|undo)"
    r"|echo-image-\d+\.tmp"
)


def open_store(directory: str | None, limit_bytes: int | None) -> MemoryStore:
    """Return the store for network.store_dir, memory without it, and network.store_bytes.

    Raises:
        StorageError: if the directory cannot be used.
    """
    if directory is not None:
        return DiskStore(Path(directory), limit_bytes)
    if limit_bytes is None:
        limit_bytes = max(1, int(DEFAULT_SHARE * read_machine().host_bytes))
    return MemoryStore(limit_bytes)


def _refuse_other_format(directory: Path) -> None:
    """Refuse a directory that was begun with another format.

    Raises:
        StorageError: with both formats and the remedy.
    """
    formats = {match[1] for path in directory.glob("*.lock") if (match := _LOCKS.match(path.name))}
    if other := ", ".join(sorted(formats - {str(FORMAT)})):
        raise StorageError(
            f"network.store_dir = {directory} holds versions in format {other}, this release has "
            f"format {FORMAT}; delete it, or name another directory: versions are fetched anew"
        )


class DiskStore(MemoryStore):
    """Keeps versions in files that are mapped into memory.

    The directory is made if it does not exist, and locked until `close`. All versions together may
    take `limit_bytes`; None for DEFAULT_SHARE of the free disk.

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
            limit_bytes = max(1, int(DEFAULT_SHARE * self._available_bytes()))
        super().__init__(limit_bytes)
        self._run: str | None = None
        self.thread = DiskThread()
        """Where files are written and removed."""
        self._encoded_versions = KeyframeFiles(self)
        self._ids = itertools.count(1)
        self._has_warned = False
        self._patched: list[PolicyVersion] = []
        """Versions with an undo record, or with a manifest whose image has become another."""

    @property
    def where(self) -> str:
        """The place, for messages."""
        return f"network.store_dir = {self.directory}"

    def sealed(self, version: PolicyVersion, signed_manifest: bytes) -> None:
        """Write a manifest beside its image; if that fails the version is just not recovered."""
        pages = self._live.get(version)  # None if it has become a newer one in place
        if pages is not None and pages.path is None:
            return
        temporary = self._temporary()
        self.thread.call(lambda: self._write_manifest(version, temporary, signed_manifest))

    def _write_manifest(
        self, version: PolicyVersion, temporary: Path, signed_manifest: bytes
    ) -> None:
        try:
            # Not synced, as the version store is not: after a power failure the signature tells.
            _write(temporary, signed_manifest)  # with the key of its chunks
            temporary.rename(self._path(version, "manifest"))
        except OSError as error:
            self.warn(f"the manifest of {version} cannot be written: {error.strerror}")
            _remove(temporary)
            return
        for older in [each for each in self._patched if each <= version]:
            _remove(self._path(older, "undo"))
            if older != version:
                _remove(self._path(older, "manifest"))
            self._patched.remove(older)

    # --- in place --------------------------------------------------------------------------------

    def begin_patch(self, patch: Patch) -> None:
        """Write down what a patch is about to overwrite."""
        pages = self._live.get(patch.base)
        if pages is None or pages.path is None:
            return  # in memory, and lost with it
        temporary = self._temporary()
        self._patched.append(patch.version)
        try:
            _write(temporary, pack_undo(patch))
            temporary.rename(self._path(patch.version, "undo"))
        except OSError:
            _remove(temporary)
            raise

    def end_patch(self, patch: Patch) -> None:
        """Rename an image that has become a newer version."""
        pages = self._live.get(patch.base)
        if pages is None or pages.path is None:
            return
        try:
            pages.path = pages.path.rename(self._path(patch.version, "image"))
        except OSError as error:
            self.warn(f"{patch.version} cannot be named: {error.strerror}")
        self._patched.append(patch.base)

    def cancel_patch(self, patch: Patch) -> None:
        """Remove the record of a patch that was taken back."""
        if patch.version in self._patched:
            self._patched.remove(patch.version)
        _remove(self._path(patch.version, "undo"))

    def _take_back_patches(self) -> None:
        """Take back what a former process wrote in place and has no manifest, newest first."""
        found = {}
        for entry in os.scandir(self.directory):
            match = _OWN.fullmatch(entry.name)
            if match is not None and match["kind"] == "undo" and match["run"] == self._run:
                version = PolicyVersion(int(match["lineage"]), int(match["step"]))
                if version not in self._patched:
                    found[version] = Path(entry.path)
        for version, path in sorted(found.items(), reverse=True):
            image = self._path(version, "image")
            if not (image.exists() and image.with_suffix(".manifest").exists()):
                self._take_back(version, path)
            _remove(path)

    def _take_back(self, version: PolicyVersion, undo: Path) -> None:
        image = self._path(version, "image")
        try:
            patch = unpack_undo(undo.read_bytes(), version)
            base = self._path(patch.base, "image")
            if not image.exists():
                image = base  # killed before it was renamed
            descriptor = os.open(image, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                mapping = _map_file(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
            patch.take_back(np.frombuffer(mapping, np.uint8).data)
            image.rename(base)
        except (OSError, ValueError, IndexError, StorageError) as error:
            _log.warning("%s: removed what was left of %s: %s", self.where, version, error)
            _remove(image)

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
        self._take_back_patches()
        saved = []
        known = {spare.path for spare in self._spares} | {p.path for p in self._live.values()}
        for version in self._sift(known):
            found = self._reopen(version)
            if found is not None:
                saved.append(found)
        return saved

    def journal(self, version: PolicyVersion) -> SavedItem | None:
        """Return a file for what comes of a keyframe."""
        return self._encoded_versions.begin(version, self._run_hash)

    def recover_encoded(self) -> list[SavedKeyframe]:
        """Return what a former process left of keyframes, newest first; needs `recover`."""
        self.flush()
        return self._encoded_versions.recover(self._run_hash)

    def close(self) -> None:
        """Release the directory; the versions in it stay for a later process.

        Waits for what is queued for the disk. A later process should begin when this one has ended:
        until then its threads may still write chunks, verified ones, into the version stores.
        """
        super().close()
        self._encoded_versions.close()
        self.thread.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def flush(self) -> None:
        """Wait until manifests and journals are written, and dropped files removed."""
        self.thread.flush()

    # --- making and taking back ------------------------------------------------------------------

    def _allocate(self, version: PolicyVersion, num_bytes: int) -> Pages:
        """Preallocate and map a file, still under a temporary name; fall back on memory."""
        assert self._run_hash
        try:
            try:
                return self._map_new(num_bytes)
            except OSError:
                self._drop_spares()
                self._encoded_versions.remove_all()
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
            self.warn(f"{fault}; it is kept in memory and lost with this process: {remedy}")
            return self._map_memory(version, num_bytes, error)

    def _make_space(self, version: PolicyVersion, num_bytes: int) -> None:
        """Let spares go, and then journals, until `num_bytes` fit under the limit."""
        super()._make_space(version, num_bytes)
        self._encoded_versions.make_space(num_bytes)

    def has_space(self, num_bytes: int) -> bool:
        """Let spares go until so much fits beside versions and journals; tell whether it does."""
        room = self.limit_bytes - self.bytes_held - self._encoded_versions.num_bytes - num_bytes
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
            pages.path = pages.path.rename(self._path(version, "image"))
        except OSError as error:
            _remove(pages.path)
            raise StorageError(
                f"{self.where}: a file for {version} cannot be named: {error.strerror}; does the "
                "directory still exist?"
            ) from error

    def _leave(self, pages: Pages) -> bool:
        """Make a spare of a file, and remove its manifest, which says nothing without it.

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
        self.thread.call(lambda: _remove(path))

    # --- what a former process left --------------------------------------------------------------

    def _sift(self, known: set[Path | None]) -> list[PolicyVersion]:
        """Return the versions in the directory, newest first; remove what belongs to none."""
        kinds: dict[PolicyVersion, set[str]] = {}
        foreign = []
        for entry in os.scandir(self.directory):
            path, match = Path(entry.path), _OWN.fullmatch(entry.name)
            if entry.name == _LOCK or path in known or path.with_suffix(".image") in known:
                continue
            if is_keyframe_file(entry.name):
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
        return sorted(set(kinds).difference(self._patched), reverse=True)

    def _reopen(self, version: PolicyVersion) -> Saved | None:
        """Map a version again, or remove its files if they are of no use."""
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
            # Without one of the two it was being decoded (from what it comes, its journal tells),
            # or had been dropped.
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
        """Return what is free and what a former process of ours has taken."""
        taken = (
            entry.stat(follow_symlinks=False).st_size
            for entry in os.scandir(self.directory)
            if _OWN.fullmatch(entry.name) or is_keyframe_file(entry.name)
        )
        return self._free_bytes() + sum(taken)

    def warn(self, text: str) -> None:
        """Warn once: whoever has read it need not read it again with every version."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s: %s", self.where, text)


def _map_file(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a file that has all its room; ValueError if it is empty."""
    mapping = mmap.mmap(descriptor, num_bytes)
    advise_huge_pages(mapping)
    return mapping


def _write(path: Path, data: bytes) -> None:
    """Write a new file that only its owner reads."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _remove(path: Path) -> None:
    """Remove a file if it is there; one that cannot be removed stays."""
    with contextlib.suppress(OSError):
        path.unlink()
