"""Simulated versions: noise of the right size, in full or as a delta.

One byte of an image stands for `scale` bytes of a version. Without deltas a version is one image of
so many chunks. With them it goes out as in a run: an encoded version coded against the version
before, which consists of so many chunks, and behind it the image for those who do not hold that
one. So many words change from one version to the next that the coded encoded version has the size
that was asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from echo.core.errors import LocalProtocolError
from echo.core.rollout import PolicyVersion
from echo.runtime.identity import Identity
from echo.runtime.learner.publish import CodedSegment, Publication
from echo.weights.delta import CodedBlock, encode_block, encode_delta
from echo.weights.manifest import (
    Manifest,
    SegmentTable,
    TensorSpec,
    encode_signed,
    hash_chunks,
    sign,
)
from echo.weights.store import Patch, Transfer, VersionStore

CHUNK_BYTES = 1 << 10
"""Of what is sent as a rule: the least that a manifest allows."""
WORD_BYTES: Literal[2] = 2
HALVINGS = 12
"""Of the interval that contains the share of changed words."""


class Versions:
    """All versions of a run."""

    def __init__(
        self,
        *,
        identity: Identity,
        num_chunks: int,
        version_bytes: float,
        image_bytes: float | None,
    ) -> None:
        """Find the sizes.

        Args:
            identity: of the run.
            num_chunks: of a version as it is sent as a rule.
            version_bytes: true bytes of the same.
            image_bytes: true bytes of a version in full, if the others are deltas; None if each
                is sent in full.
        """
        self._identity = identity
        self._image: bytearray | None = None
        self.scale = version_bytes / (num_chunks * CHUNK_BYTES)
        """True bytes that one byte of an image or an encoded version stands for."""
        self.num_bytes = num_chunks * CHUNK_BYTES
        """Of an image."""
        self.chunk_bytes = CHUNK_BYTES
        """Of an image; an encoded version has chunks of CHUNK_BYTES."""
        self._changed_share: float | None = None
        if image_bytes is not None:
            delta_bytes = self.num_bytes
            words = round(image_bytes / self.scale) // WORD_BYTES
            self.num_bytes = words * WORD_BYTES
            self.chunk_bytes = -(-words // num_chunks) * WORD_BYTES
            self._changed_share = self._find_share(delta_bytes)

    # --- as publisher and coder of a learner -------------------------------------------------

    @property
    def coder(self) -> Versions:
        """What codes them."""
        return self

    def make(self, weights: Any, version: PolicyVersion) -> Publication:
        """Return a version: noise, or where there are deltas the one before with some of it new."""
        if self._changed_share is None or self._image is None:
            image = bytearray(random.Random(f"{version}").randbytes(self.num_bytes))
        else:
            words = np.frombuffer(bytes(self._image), dtype=np.uint16)
            seed = random.Random(f"{version}").getrandbits(64)
            image = bytearray(_changed(words, self._changed_share, seed=seed).tobytes())
        if self._changed_share is not None:
            self._image = image
        manifest = Manifest(
            run_id=self._identity.run_id,
            version=version,
            model_digest="",
            tensors=(TensorSpec("w", "uint8", (self.num_bytes,), 0, self.num_bytes),),
            num_bytes=self.num_bytes,
            chunk_bytes=self.chunk_bytes,
            chunk_hashes=b"",
        )
        return Publication(None, manifest, image)

    def seal(self, publication: Publication) -> Publication:
        """Hash and sign a version."""
        made = publication.manifest
        hashes = hash_chunks(publication.image, made.chunk_bytes, made.chunks)
        return publication.sealed([hashes], self._identity.key)

    def segments(self, publication: Publication, base: Transfer | None) -> Iterator[CodedSegment]:
        """Yield the one segment of an encoded version, which is one block."""
        manifest = publication.manifest
        new = memoryview(publication.image)
        old = None if base is None else memoryview(base.storage)
        signed = publication.signed
        if old is None:
            block = CodedBlock(encode_block(None, new, word_bytes=WORD_BYTES), b"")
        else:
            block = encode_delta(old, new, word_bytes=WORD_BYTES)
        payload = block.coded
        table = SegmentTable(
            run_id=manifest.run_id,
            version=manifest.version,
            base=None if base is None else base.manifest.version,
            index=0,
            image_bytes=manifest.num_bytes,
            image_chunk_bytes=manifest.chunk_bytes,
            block_bytes=-(-manifest.num_bytes // manifest.chunk_bytes) * manifest.chunk_bytes,
            chunk_bytes=CHUNK_BYTES,
            first_block=0,
            block_sizes=(len(payload),),
            chunk_hashes=b"".join(
                blake3(payload[start : start + CHUNK_BYTES]).digest()
                for start in range(0, len(payload), CHUNK_BYTES)
            ),
            result_hashes=manifest.chunk_hashes,
            manifest=None if signed is None else encode_signed(signed),
            old_hashes=block.old_hash if signed is None else b"",
        )
        frame = msgspec.msgpack.encode(sign(table, self._identity.key))
        yield CodedSegment(table, frame, memoryview(payload))

    def close(self) -> None:
        """Need nothing."""

    # --- sizes ---------------------------------------------------------------------------------

    def _find_share(self, delta_bytes: int) -> float:
        """Return the share of the words that changes, so that a delta has so many bytes."""
        noise = random.Random("delta").randbytes(self.num_bytes)
        words = np.frombuffer(noise, dtype=np.uint16)
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            share = (low + high) / 2
            new = memoryview(_changed(words, share, seed=0).tobytes())
            coded = encode_block(memoryview(noise), new, word_bytes=WORD_BYTES)
            low, high = (share, high) if len(coded) < delta_bytes else (low, share)
        return low


def _changed(words: npt.NDArray[np.uint16], share: float, *, seed: int) -> npt.NDArray[np.uint16]:
    """Return the words with noise in place of a share of them."""
    chance = np.random.default_rng(seed)
    noise = chance.integers(0, 1 << 16, len(words), dtype=np.uint16)
    return np.where(chance.random(len(words)) < share, noise, words)


# --- store ----------------------------------------------------------------------------------------


class SharedStore(VersionStore):
    """Images of all simulated nodes by version, each once, as long as any of them holds it."""

    may_block = False
    may_patch = False

    def __init__(self) -> None:
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

    def begin_patch(self, patch: Patch) -> None:
        """Never be asked: an image here is every node's."""
        raise LocalProtocolError(f"{patch.version}: a shared image cannot be patched in place")

    end_patch = cancel_patch = begin_patch
