"""Shared version store of all simulated nodes: equal images lie once."""

from __future__ import annotations

from weakref import WeakValueDictionary

from echo.core.rollout import PolicyVersion
from echo.wire.codec import Frame


class SharedStore:
    """Images by version, as long as any node holds them."""

    may_block = False

    def __init__(self) -> None:
        """Start empty."""
        self._images: WeakValueDictionary[PolicyVersion, memoryview] = WeakValueDictionary()

    def __len__(self) -> int:
        """Return how many images there are."""
        return len(self._images)

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        """Return room for an image, the same for every node."""
        storage = self._images.get(version)
        if storage is None:
            storage = self._images[version] = memoryview(bytearray(num_bytes))
        return storage

    def sealed(self, version: PolicyVersion, signed: bytes) -> None:
        """Need nothing."""

    def journal(self, version: PolicyVersion) -> None:
        """Write nothing down: a simulated node that comes back has nothing."""

    def drop(self, version: PolicyVersion) -> None:
        """Need nothing: what nobody holds is forgotten."""

    def write(self, place: memoryview, data: Frame) -> None:
        """Copy a chunk to its place."""
        place[:] = data
