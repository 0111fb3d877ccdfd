"""The memory of images: allocation and reuse."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from echo.core.rollout import PolicyVersion
from echo.weights.delta import fill
from echo.weights.store.patches import Patch
from echo.wire.codec import Frame


def allocate(num_bytes: int) -> memoryview:
    """Return memory for an image, with undefined bytes.

    The system allocates each page at the first write to it. Python would fill a bytearray with
    zeros at once, and this would block the node for 0.6 s per GB.
    """
    return np.empty(num_bytes, dtype=np.uint8).data


def touched_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return an array of zeros whose memory pages are already allocated."""
    piece = np.empty(num_bytes, np.uint8)
    piece.fill(0)
    return piece


class RecycledMemory:
    """Memory for images. A piece is reused when its earlier image is no longer used.

    `take` lends a piece of memory through an exporter, an array over the piece. Views keep the
    exporter alive: slices, tensors and arrays over the memory, and frames that libzmq has not sent
    yet. When the exporter is garbage-collected, the piece is free.
    """

    def __init__(
        self,
        num_pieces: int = 1,
        make: Callable[[int], npt.NDArray[np.uint8]] = touched_memory,
        *,
        max_pieces: int = 1,
    ) -> None:
        """Start with no memory; the first `take` allocates all pieces.

        Args:
            num_pieces: smallest number of pieces to allocate. The first `take` allocates these
                pieces, so that no later image waits for the allocation of pages.
            make: a function that returns a piece of zeros with the given number of bytes.
            max_pieces: largest number of pieces after calls of `grow`.
        """
        self._num_pieces, self._max_pieces = num_pieces, max_pieces
        self._make = make
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lent: list[tuple[npt.NDArray[np.uint8], weakref.ref[npt.NDArray[np.uint8]]]] = []

    @property
    def has_free(self) -> bool:
        """Whether a piece is free, or `take` has never been called."""
        are_read = [exporter() is not None for _, exporter in self._lent]
        return bool(self._free) or not are_read or not all(are_read)

    @property
    def can_grow(self) -> bool:
        """Whether `grow` may be called.

        A piece must be in use, and fewer than `max_pieces` must exist.
        """
        return bool(self._lent) and self._num_pieces < self._max_pieces

    def grow(self) -> None:
        """Allocate one more piece of memory, as large as the last image.

        Any thread may call this method while no thread calls `take`.
        """
        self._free.append(self._make(self._lent[-1][0].nbytes))
        self._num_pieces += 1

    def take(self, num_bytes: int) -> memoryview:
        """Return memory of `num_bytes` that contains zeros or the bytes of an earlier image."""
        self._free += [piece for piece, exporter in self._lent if exporter() is None]
        self._lent = [each for each in self._lent if each[1]() is not None]
        num_kept = max(1, self._num_pieces - len(self._lent))
        # Free pieces of another size are dropped, and free pieces beyond the number in use.
        self._free = [piece for piece in self._free if piece.nbytes == num_bytes][:num_kept]
        while len(self._free) < num_kept:
            self._free.append(self._make(num_bytes))
        piece = self._free.pop(0)
        exporter = np.frombuffer(piece, np.uint8)
        self._lent.append((piece, weakref.ref(exporter)))
        return exporter.data


Write: TypeAlias = Callable[[memoryview, Frame], None]
"""The type of a version store's method `write`."""


class VersionStore:
    """Keeps images in this process's memory, without a limit on their size.

    `runtime/disk_store.py` has a store with a limit, and a store that survives the process.
    """

    may_block = False
    """Whether `write` may block, so that a thread must call `write`."""

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        """Return memory for the image of a version.

        Raises:
            StorageError: if there is no space.
        """
        return allocate(num_bytes)

    def sealed(self, version: PolicyVersion, signed: bytes) -> None:
        """Store the signed manifest of an image that was created without a manifest."""

    def drop(self, version: PolicyVersion) -> None:
        """Drop the image of a version. Readers may continue to use the image's memory."""

    def write(self, place: memoryview, data: Frame) -> None:
        """Copy a chunk to its place in an image. Called once for each chunk; thread-safe.

        Raises:
            OSError: if the disk refuses the write.
        """
        fill(place, data)

    def begin_patch(self, patch: Patch) -> None:
        """Mark an image before a patch is written over it; thread-safe.

        Raises:
            OSError: if the disk refuses the mark.
        """

    def cancel_patch(self, patch: Patch) -> None:
        """Remove the mark of `begin_patch`, after the old words were restored.

        Call this method in the thread that called `begin_patch`.
        """

    def advance(self, base: PolicyVersion, version: PolicyVersion) -> None:
        """Record that the memory of `base` holds `version` from now on."""
