"""Versions in coded form for tests: images that differ in a few bytes, real codings, signed tables.

Blocks and chunks are as small as the protocol allows, so that an encoded version has several of
each.
"""

from __future__ import annotations

import functools
import random

from blake3 import blake3

from echo.core.rollout import PolicyVersion
from echo.weights.cipher import crypt, hash_key
from echo.weights.delta import CodedBlock, encode_block, encode_delta, split_blocks
from echo.weights.manifest import (
    HASH_BYTES,
    Manifest,
    SegmentTable,
    SignedManifest,
    TensorSpec,
    build_manifest,
    encode_signed,
    sign,
)
from echo.weights.store.encoded import EncodedVersion
from echo.wire.messages import FULL, Form
from tests.roles.harness import CHUNK_BYTES, KEY

IMAGE_BYTES = 40 * CHUNK_BYTES + 100
BLOCK_BYTES = 4 * CHUNK_BYTES
Piece = tuple[SegmentTable, bytes, memoryview]
"""A segment's table, the same signed and encoded, and its payload."""


def v(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


@functools.cache
def weights(step: int, num_bytes: int = IMAGE_BYTES) -> bytes:
    """Return the image of v(step): that of the step before, but for some of its bytes."""
    chance = random.Random(step)
    if step == 0:
        return chance.randbytes(num_bytes)
    image = bytearray(weights(step - 1, num_bytes))
    for start in range(0, num_bytes, BLOCK_BYTES):
        if chance.random() < 0.7:
            for _ in range(chance.choice([1, 400, 2000])):
                place = min(start + chance.randrange(BLOCK_BYTES), num_bytes - 1)
                image[place] ^= chance.randrange(1, 256)
    return bytes(image)


def key_of(step: int, form: Form) -> bytes:
    """Return the key with which v(step) is encrypted in one form."""
    return blake3(f"{step} {form}".encode()).digest()


def sent_chunks(step: int, image: bytes) -> list[bytes]:
    """Return the chunks of v(step) in full as they travel."""
    sent = bytearray(image)
    for index, start in enumerate(range(0, len(sent), CHUNK_BYTES)):
        chunk = memoryview(sent)[start : start + CHUNK_BYTES]
        crypt(key_of(step, FULL), index, chunk, chunk)
    return [bytes(sent[start : start + CHUNK_BYTES]) for start in range(0, len(sent), CHUNK_BYTES)]


@functools.cache
def described(step: int, num_bytes: int = IMAGE_BYTES) -> tuple[SignedManifest, Manifest]:
    """Return the signed manifest of v(step)."""
    manifest = build_manifest(
        run_id="run",
        version=v(step),
        tensors=[TensorSpec("w", "uint8", (num_bytes,), 0, num_bytes)],
        image=weights(step, num_bytes),
        chunk_bytes=CHUNK_BYTES,
        key=key_of(step, FULL),
    )
    return sign(manifest, KEY, key_of(step, FULL)), manifest


def published(
    step: int, num_bytes: int = IMAGE_BYTES
) -> tuple[SignedManifest, Manifest, memoryview]:
    """Return what `Broadcast.publish` takes."""
    return *described(step, num_bytes), memoryview(weights(step, num_bytes))


def signed_frame(table: SegmentTable) -> bytes:
    """Return a table as it travels."""
    key = key_of(table.version.step, form_on(None if table.base is None else table.base.step))
    return encode_signed(sign(table, KEY, key if table.key_hash else b""))


@functools.cache
def coded(
    step: int,
    base: int | None,
    *,
    blocks_per_segment: int = 4,
    num_bytes: int = IMAGE_BYTES,
    is_on_base: bool = False,
) -> tuple[Piece, ...]:
    """Return the segments of v(step) against v(base), or on its own.

    With `is_on_base` they say what they replace, and leave what comes out to the seal.
    """
    new = memoryview(weights(step, num_bytes))
    old = None if base is None else memoryview(weights(base, num_bytes))
    signed, manifest = described(step, num_bytes)
    blocks = split_blocks(num_bytes, BLOCK_BYTES)
    pieces, num_chunks, key = [], 0, key_of(step, form_on(base))
    for index, first in enumerate(range(0, len(blocks), blocks_per_segment)):
        mine = blocks[first : first + blocks_per_segment]
        found = [
            CodedBlock(encode_block(None, new[a:b], word_bytes=2), b"")
            if old is None
            else encode_delta(old[a:b], new[a:b], word_bytes=2)
            for a, b in mine
        ]
        payload = memoryview(bytearray().join(block.coded for block in found))
        chunks = [payload[at : at + CHUNK_BYTES] for at in range(0, len(payload), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks, num_chunks):
            crypt(key, number, chunk, chunk)
        num_chunks += len(chunks)
        stop = mine[-1][1]
        hashes = slice(mine[0][0] // CHUNK_BYTES * HASH_BYTES, -(-stop // CHUNK_BYTES) * HASH_BYTES)
        table = SegmentTable(
            run_id="run",
            version=v(step),
            base=None if base is None else v(base),
            index=index,
            image_bytes=num_bytes,
            image_chunk_bytes=CHUNK_BYTES,
            block_bytes=BLOCK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            first_block=first,
            block_sizes=tuple(len(block.coded) for block in found),
            chunk_hashes=b"".join(blake3(chunk).digest() for chunk in chunks),
            result_hashes=b"" if is_on_base else manifest.chunk_hashes[hashes],
            manifest=None if is_on_base or stop < num_bytes else encode_signed(signed),
            old_hashes=b"".join(block.old_hash for block in found) if is_on_base else b"",
            key_hash=hash_key(key),
        )
        pieces.append((table, signed_frame(table), payload.toreadonly()))
    return tuple(pieces)


def form_on(base: int | None) -> Form:
    """Return the form of an encoded version."""
    return Form("keyframe") if base is None else Form("delta", v(base))


def encoded_of(
    step: int, base: int | None, *, num_pieces: int | None = None, **how: int
) -> EncodedVersion:
    """Return the learner's encoded version, with its first segments or all of them."""
    encoded = EncodedVersion(v(step), form_on(base))
    for table, frame, payload in coded(step, base, **how)[:num_pieces]:
        encoded.add(table, frame, payload)
    return encoded
