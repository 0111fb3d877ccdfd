"""Version memory: where the bytes of an image lie, and when memory is reused."""

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

    The system allocates its pages at the first write, chunk by chunk. A bytearray would be filled
    with zeros at once, which blocks the node for 0.6 s per GB.
    """
    return np.empty(num_bytes, dtype=np.uint8).data


def touched_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros whose pages the system has already allocated."""
    piece = np.empty(num_bytes, np.uint8)
    piece.fill(0)
    return piece


class RecycledMemory:
    """Memory for images, reused once no view of the last image is left.

    An exporter lends the memory, and only its views keep the exporter alive: slices, tensors and
    arrays over it, and frames that libzmq has yet to send.
    """

    def __init__(
        self,
        num_pieces: int = 1,
        make: Callable[[int], npt.NDArray[np.uint8]] = touched_memory,
    ) -> None:
        """Start without memory.

        Args:
            num_pieces: least number of pieces that will be in use at the same time; all of them are
                made with the first image, so that no later version waits for its pages.
            make: returns a piece of zeros, given its bytes.
        """
        self._num_pieces = num_pieces
        self._make = make
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lent: list[tuple[npt.NDArray[np.uint8], weakref.ref[npt.NDArray[np.uint8]]]] = []

    def take(self, num_bytes: int) -> memoryview:
        """Return memory of this size: zeros, or the bytes of an earlier image."""
        self._free += [piece for piece, exporter in self._lent if exporter() is None]
        self._lent = [each for each in self._lent if each[1]() is not None]
        room = max(1, self._num_pieces - len(self._lent))
        # Free pieces of another size are dropped, and those beyond the number in use.
        self._free = [piece for piece in self._free if piece.nbytes == num_bytes][:room]
        while len(self._free) < room:
            self._free.append(self._make(num_bytes))
        piece = self._free.pop(0)
        exporter = np.frombuffer(piece, np.uint8)
        self._lent.append((piece, weakref.ref(exporter)))
        return exporter.data


Write: TypeAlias = Callable[[memoryview, Frame], None]
"""A version store's `write`."""


class VersionStore:
    """Keeps images in this process's memory, without a bound.

    `runtime/disk_store.py` has a bounded store, and one that survives the process.
    """

    may_block = False
    """Whether `write` may take long, so that a thread must call it."""

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        """Return memory for an image.

        Raises:
            StorageError: if there is no space.
        """
        return allocate(num_bytes)

    def sealed(self, version: PolicyVersion, signed: bytes) -> None:
        """Keep the manifest of an image that was created without one."""

    def drop(self, version: PolicyVersion) -> None:
        """Drop an image; its readers keep it."""

    def write(self, place: memoryview, data: Frame) -> None:
        """Copy a chunk to its place in an image; from any thread, once.

        Raises:
            OSError: if the disk refuses it.
        """
        fill(place, data)

    def begin_patch(self, patch: Patch) -> None:
        """Mark an image that is about to be written in place; from any thread.

        Raises:
            OSError: if the disk refuses it.
        """

    def cancel_patch(self, patch: Patch) -> None:
        """Remove the mark, as the image is the base again; from the thread of `begin_patch`."""

    def advance(self, base: PolicyVersion, version: PolicyVersion) -> None:
        """Record that the memory which held `base` holds `version` now."""
