"""Makes simulated versions of the weights. Their bytes are noise, but their size is right.

One byte of an image represents `scale` bytes of a sent version. A version is always sent as one
whole image with a given number of chunks. A real run might send a delta instead.
"""

from __future__ import annotations

import random
from typing import Any
from weakref import WeakValueDictionary

from echo.core.rollout import PolicyVersion
from echo.runtime.identity import Identity
from echo.runtime.learner.versions.publish import Publication
from echo.weights.manifest import MIN_CHUNK_BYTES, Manifest, TensorSpec, hash_chunks
from echo.weights.store.memory import VersionStore

CHUNK_BYTES = MIN_CHUNK_BYTES
"""Size of a chunk in bytes, as small as possible, because a run has many images."""


class Versions:
    """Takes the place of the learner's publisher. It makes the versions of a simulated run."""

    def __init__(self, *, identity: Identity, num_chunks: int, version_bytes: float) -> None:
        """Compute the size of an image, and the scale between real and simulated bytes.

        Args:
            identity: the learner's identity, which signs versions.
            num_chunks: number of chunks of a version.
            version_bytes: number of bytes of a version in a real run.
        """
        self._identity = identity
        self.num_bytes = num_chunks * CHUNK_BYTES
        """Number of bytes of an image."""
        self.scale = version_bytes / self.num_bytes
        """How many real bytes each byte of an image represents."""

    # --- as publisher and coder of a learner -------------------------------------------------

    @property
    def coder(self) -> Versions:
        return self

    def prepare(self) -> bool:
        """Return True, because a simulated version can be made at any time."""
        return True

    def make(self, weights: Any, version: PolicyVersion) -> Publication:
        """Return a publication of `version`. Its image is noise that depends only on `version`."""
        image = bytearray(random.Random(f"{version}").randbytes(self.num_bytes))
        manifest = Manifest(
            run_id=self._identity.run_id,
            version=version,
            tensors=(TensorSpec("w", "uint8", (self.num_bytes,), 0, self.num_bytes),),
            num_bytes=self.num_bytes,
            chunk_bytes=CHUNK_BYTES,
            chunk_hashes=b"",
        )
        return Publication(None, manifest, image)

    def seal(self, publication: Publication) -> Publication:
        """Hash the chunks of a version and sign it."""
        made = publication.manifest
        hashes = hash_chunks(publication.image, made.chunk_bytes, made.chunks)
        return publication.sealed([hashes], self._identity.key)

    def close(self) -> None:
        """Do nothing, because no file is open."""


# --- store ----------------------------------------------------------------------------------------


class SharedStore(VersionStore):
    """A store of images that all nodes share.

    The store keeps one copy of each version while any node holds it.
    """

    def __init__(self) -> None:
        self._images: WeakValueDictionary[PolicyVersion, memoryview] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._images)

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        """Return the memory for a version's image, which all nodes share."""
        storage = self._images.get(version)
        if storage is None:
            storage = self._images[version] = memoryview(bytearray(num_bytes))
        return storage
