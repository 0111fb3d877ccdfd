"""Version memory: where the bytes of images lie."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from echo.core.rollout import PolicyVersion
from echo.weights.delta import fill
from echo.weights.patches import Patch
from echo.wire.codec import Frame


def allocate(num_bytes: int) -> memoryview:
    """Return room for an image; its bytes mean nothing until they are written.

    The system finds the memory chunk by chunk, as they come. A bytearray would be filled with zeros
    here and now, 0.6 s for each GB in which the node does nothing else.
    """
    return np.empty(num_bytes, dtype=np.uint8).data


def touched_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros whose pages have been found."""
    piece = np.empty(num_bytes, np.uint8)
    piece.fill(0)
    return piece


class RecycledMemory:
    """Memory for images, handed out again once its last image can no longer be reached.

    An exporter lends the memory, and only views of it keep the exporter alive: slices of them, what
    torch or numpy make of them, and what libzmq has yet to send.
    """

    def __init__(
        self,
        num_pieces: int = 1,
        make: Callable[[int], npt.NDArray[np.uint8]] = touched_memory,
    ) -> None:
        """Start without any.

        Args:
            num_pieces: how many of a size will be in use at a time, at least; all of them are made
                with the first image. Their pages are found then, and not when a version is waited
                for.
            make: makes a piece of this number of zeros.
        """
        self._num_pieces = num_pieces
        self._make = make
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lent: list[tuple[npt.NDArray[np.uint8], weakref.ref[npt.NDArray[np.uint8]]]] = []

    def take(self, num_bytes: int) -> memoryview:
        """Return memory of a size; zeros, or what was in it before."""
        self._free += [piece for piece, exporter in self._lent if exporter() is None]
        self._lent = [each for each in self._lent if each[1]() is not None]
        room = max(1, self._num_pieces - len(self._lent))
        # Of another size, or more than are in use at a time: no longer of use.
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
    """Where images lie: in this process's memory, without a bound.

    `runtime/disk_store.py` has those that have one, and those that survive the process.
    """

    may_block = False
    """Whether `write` may take long, so that it belongs into a thread."""

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        """Return room for an image.

        Raises:
            StorageError: if there is none.
        """
        return allocate(num_bytes)

    def sealed(self, version: PolicyVersion, signed: bytes) -> None:
        """Note the manifest of an image that was created without it."""

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
        """Take the mark back: the image is the base again; from the thread of `begin_patch`."""

    def advance(self, base: PolicyVersion, version: PolicyVersion) -> None:
        """Count the memory of a version as that of the one which it has become."""
