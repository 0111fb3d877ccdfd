"""Where versions of the weights lie: in memory, or in files that outlive the process.

An **arena** is the room for one version, handed out as a writable memoryview. Who fills it, which
of its chunks are right and whom they are sent to is the protocol's business; a store finds the
room, counts it against one limit, and takes it back.

* `MemoryArenas` is the default. What it holds is gone with the process.
* `FileArenas` (arenas_files.py, network.store_dir) maps files, so that a relay or worker that was
  killed in mid-transfer finds its chunks again and asks for the missing ones only.

A dropped arena may still be on its way out: libzmq sends slices of it without a copy, long after
the protocol has forgotten the version. So nothing is ever unmapped by hand. Each view is lent by a
small exporter object whose only owners are the view and what was sliced or made from it. While the
exporter lives, somebody can read the bytes; when it has died, nobody can. The pages themselves
follow by reference counting.

That same test makes recycling safe. The first touch of fresh memory costs a page fault, more than
writing the bytes does, so a dropped arena of the same size is handed out again once its exporter
has died. 1 GiB written in chunks of 1 MiB, on a virtual machine with two cores, took 0.05 s in a
recycled arena of any kind; in fresh memory 0.12 s with pages of 2 MiB, 0.4 s with pages of 4 KiB,
and more than 2 s where the host had yet to find the memory; in a fresh file 0.2 to 1.6 s on ext4,
0.6 s on tmpfs, 0.2 s of these in `create`. At most MAX_SPARES wait to be recycled; they count
against the limit, and go at once where their room is wanted.

torch.frombuffer keeps the view alive as it should, but does not notice `release()` on it: never
release a view that was lent.

Not thread-safe, but for `write`, and for `verify_held`, which takes long and belongs into a thread.
"""

from __future__ import annotations

import abc
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from echo.core.errors import StorageError
from echo.core.rollout import PolicyVersion
from echo.core.units import format_bytes
from echo.runtime.arenas_parcels import SavedParcel
from echo.runtime.arenas_scan import held_chunks
from echo.weights.delta import fill
from echo.weights.manifest import Manifest
from echo.weights.store import SavedItem
from echo.wire.codec import Frame

MAX_SPARES = 2
"""Dropped arenas kept for recycling: one is still being sent while the other is filled anew."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A version that a former process left behind; nothing about it has been verified."""

    version: PolicyVersion
    signed_manifest: bytes
    """As it was given to `create` or `sealed`; whether the learner signed it is to be checked."""
    arena: memoryview
    """Its bytes so far, writable; which chunks are there, `verify_held` tells."""


@dataclass(slots=True, eq=False)
class Pages:
    """The mapping under one arena."""

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


class ArenaStore(abc.ABC):
    """Finds room for versions and takes it back.

    Args:
        limit_bytes: what all arenas that were not dropped may take together.
    """

    may_block = False
    """Whether `write` may take long, so that it belongs into a thread."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes is {limit_bytes}, must be at least 1")
        self.limit_bytes = limit_bytes
        self._live: dict[PolicyVersion, Pages] = {}
        self._spares: list[Pages] = []

    # --- for the protocol's shell ----------------------------------------------------------------

    @property
    def bytes_held(self) -> int:
        """Bytes of the arenas that were not dropped."""
        return sum(map(len, self._live.values()))

    def create(
        self, version: PolicyVersion, signed_manifest: bytes | None, num_bytes: int
    ) -> memoryview:
        """Return room for a version; its bytes mean nothing until they are written.

        Args:
            version: its name, not in this store yet.
            signed_manifest: the learner's signed manifest as it travels, kept beside the arena;
                None if it is known later (`sealed`).
            num_bytes: size of the arena, at least 1.

        Raises:
            StorageError: if the limit, the disk or the memory does not allow it.
        """
        if version in self._live or num_bytes < 1:
            raise ValueError(f"{version}: {num_bytes} bytes asked for, or asked for twice")
        pages = self._take_spare(num_bytes)
        if pages is None:
            self._make_room(version, num_bytes)
            pages = self._allocate(version, num_bytes)
        self._enter(version, pages)
        self._live[version] = pages
        if signed_manifest is not None:
            self.sealed(version, signed_manifest)
        return pages.lend()

    @abc.abstractmethod
    def sealed(self, version: PolicyVersion, signed_manifest: bytes) -> None:
        """Keep a manifest that has become known; without one a version is not recovered."""

    def drop(self, version: PolicyVersion) -> None:
        """Give a version's room back; one that has no arena here is no error.

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

    @abc.abstractmethod
    def recover(self, run_id: str) -> list[Saved]:
        """Return what a former process left of this run, newest first; to be called once joined.

        The caller verifies the manifest (echo.weights.manifest.verify), then the chunks
        (`verify_held`), and drops what it does not want. Versions of other runs are dropped.
        """

    def write(self, place: memoryview, data: Frame) -> None:
        """Copy a chunk to its place in an arena, from any thread and without the GIL."""
        fill(place, data)

    def journal(self, version: PolicyVersion) -> SavedItem | None:
        """Return where to write down what comes of an anchor; None where nothing is kept."""
        return None

    def recover_parcels(self) -> list[SavedParcel]:
        """Return what a former process left of the run's anchors, newest first, after `recover`."""
        return []

    def verify_held(self, manifest: Manifest, arena: memoryview) -> bytearray:
        """Return one byte per chunk: 1 if its bytes in `arena` match their hash.

        Raises:
            StorageError: if the arena does not have the manifest's size.
        """
        if len(arena) != manifest.num_bytes:
            raise StorageError(
                f"the arena of {manifest.version} has {len(arena)} bytes, its manifest says "
                f"{manifest.num_bytes}; drop it and fetch the version anew"
            )
        pages = self._live.get(manifest.version)
        return held_chunks(manifest, arena, None if pages is None else pages.path)

    def close(self) -> None:
        """Let go of everything but what a later process may recover; views stay valid."""
        self._drop_spares()
        self._live.clear()

    # --- for the kinds of stores -----------------------------------------------------------------

    @property
    @abc.abstractmethod
    def where(self) -> str:
        """The place, for messages."""

    @abc.abstractmethod
    def _allocate(self, version: PolicyVersion, num_bytes: int) -> Pages:
        """Find fresh pages, or raise StorageError."""

    @abc.abstractmethod
    def _enter(self, version: PolicyVersion, pages: Pages) -> None:
        """Give pages the name of a version, or raise StorageError."""

    @abc.abstractmethod
    def _leave(self, pages: Pages) -> bool:
        """Take the name from the pages of a dropped version; tell whether they may be recycled."""

    @abc.abstractmethod
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

    def _make_room(self, version: PolicyVersion, num_bytes: int) -> None:
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


class MemoryArenas(ArenaStore):
    """Keeps versions in memory; see ArenaStore for the arguments."""

    @property
    def where(self) -> str:
        """The place, for messages."""
        return "memory for versions of the weights"

    def sealed(self, version: PolicyVersion, signed_manifest: bytes) -> None:
        """Do nothing: there is no later process that could read it."""

    def recover(self, run_id: str) -> list[Saved]:
        """Return nothing, and drop what is held of an earlier run."""
        for version in list(self._live):
            self.drop(version)
        return []

    def _allocate(self, version: PolicyVersion, num_bytes: int) -> Pages:
        try:
            return map_memory(num_bytes)
        except OSError as error:
            raise StorageError(
                f"{self.where}: no {format_bytes(num_bytes)} for {version}: {error.strerror}; "
                "use a machine with more, or set network.store_dir to a directory on a disk"
            ) from error

    def _enter(self, version: PolicyVersion, pages: Pages) -> None:
        """Do nothing: memory has no name."""

    def _leave(self, pages: Pages) -> bool:
        return True

    def _free(self, pages: Pages) -> None:
        """Do nothing: the last reference is the caller's."""


def _names(versions: Sequence[PolicyVersion]) -> str:
    return ", ".join(map(str, sorted(versions))) or "no version"
