"""Memory for images that is touched beforehand and used again.

A page that is touched for the first time costs more than anything that a plane does with the bytes
in it (some 13 us on small virtual machines), so a benchmark of planes that allocates an image for
every version measures the machine's memory.
"""

from __future__ import annotations

import numpy as np

from echo.core.rollout import PolicyVersion
from echo.weights.store.memory import VersionStore


class KeptStore(VersionStore):
    """A version store of a few images of one size, whose owner is done with what it drops."""

    def __init__(self, num_bytes: int, count: int = 4) -> None:
        """Touch memory for so many images."""
        self._num_bytes = num_bytes
        self._free = [np.zeros(num_bytes, np.uint8) for _ in range(count)]
        for each in self._free:
            each.fill(1)
        self._lent: dict[PolicyVersion, np.ndarray] = {}

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        """Return room for an image; beyond what is kept, new memory."""
        if num_bytes != self._num_bytes or not self._free:
            return super().create(version, signed, num_bytes)
        image = self._lent[version] = self._free.pop(0)
        return image.data

    def drop(self, version: PolicyVersion) -> None:
        """Take an image's memory back, to be used last."""
        image = self._lent.pop(version, None)
        if image is not None:
            self._free.append(image)
