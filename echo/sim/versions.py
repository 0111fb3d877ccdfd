"""Simulated versions: noise of the right size, in full or as a delta.

One byte of an image stands for `scale` bytes of a version. Without deltas a version is one image of
so many chunks. With them it goes out as in a run: an encoded version coded against the version
before, which consists of so many chunks, and behind it the image for those who do not hold that
one. So many words change from one version to the next that the coded encoded version has the size
that was asked for.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.weights.broadcast import Broadcast
from echo.weights.delta import encode_block
from echo.weights.manifest import (
    Manifest,
    SegmentTable,
    SignedManifest,
    TensorSpec,
    build_manifest,
    encode_signed,
    sign,
)
from echo.weights.store import Transfer
from echo.wire.actions import Action

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
        run_id: str,
        key: Ed25519PrivateKey,
        num_chunks: int,
        version_bytes: float,
        image_bytes: float | None,
    ) -> None:
        """Find the sizes.

        Args:
            run_id: of the run.
            key: signs versions.
            num_chunks: of a version as it is sent as a rule.
            version_bytes: true bytes of the same.
            image_bytes: true bytes of a version in full, if the others are deltas; None if each
                is sent in full.
        """
        self._run_id = run_id
        self._key = key
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

    def publish(self, broadcast: Broadcast, version: PolicyVersion, *, now: float) -> list[Action]:
        """Hand a version to the learner's broadcast, the delta first where there is one."""
        newest = broadcast.newest_complete
        base = None
        if self._changed_share is not None and newest is not None:
            base = broadcast.store[newest]
        image = self._image(version, base)
        manifest = build_manifest(
            run_id=self._run_id,
            version=version,
            model_digest="",
            tensors=[TensorSpec("w", "uint8", (self.num_bytes,), 0, self.num_bytes)],
            image=image,
            chunk_bytes=self.chunk_bytes,
        )
        signed = sign(manifest, self._key)
        actions: list[Action] = []
        if base is not None:
            table, payload = self._segment(signed, manifest, image, base)
            frame = msgspec.msgpack.encode(sign(table, self._key))
            actions += broadcast.publish_segment(
                table, frame, memoryview(payload), expected_bytes=len(payload), now=now
            )
        return [*actions, *broadcast.publish(signed, manifest, image, now=now)]

    def _image(self, version: PolicyVersion, base: Transfer | None) -> bytearray:
        """Return noise that depends on nothing but its name, or the base with some of it new."""
        if base is None:
            return bytearray(random.Random(f"{version}").randbytes(self.num_bytes))
        assert self._changed_share is not None
        words = np.frombuffer(bytes(base.storage), dtype=np.uint16)
        seed = random.Random(f"{version}").getrandbits(64)
        return bytearray(_changed(words, self._changed_share, seed=seed).tobytes())

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

    def _segment(
        self, signed: SignedManifest, manifest: Manifest, image: bytearray, base: Transfer
    ) -> tuple[SegmentTable, bytes]:
        """Return the one segment of a delta, which is one block, and its payload."""
        new, old = memoryview(image), memoryview(base.storage)
        payload = encode_block(old, new, word_bytes=WORD_BYTES)
        table = SegmentTable(
            run_id=self._run_id,
            version=manifest.version,
            base=base.manifest.version,
            index=0,
            image_bytes=manifest.num_bytes,
            image_chunk_bytes=manifest.chunk_bytes,
            block_bytes=manifest.num_chunks * manifest.chunk_bytes,
            chunk_bytes=CHUNK_BYTES,
            first_block=0,
            block_sizes=(len(payload),),
            chunk_hashes=b"".join(
                blake3(payload[start : start + CHUNK_BYTES]).digest()
                for start in range(0, len(payload), CHUNK_BYTES)
            ),
            result_hashes=manifest.chunk_hashes,
            manifest=encode_signed(signed),
        )
        return table, payload


def _changed(words: npt.NDArray[np.uint16], share: float, *, seed: int) -> npt.NDArray[np.uint16]:
    """Return the words with noise in place of a share of them."""
    chance = np.random.default_rng(seed)
    noise = chance.integers(0, 1 << 16, len(words), dtype=np.uint16)
    return np.where(chance.random(len(words)) < share, noise, words)
