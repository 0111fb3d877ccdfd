"""Patches of images for tests of engines, through the wire's form of them."""

from __future__ import annotations

from collections.abc import Sequence

from echo.core.rollout import PolicyVersion
from echo.weights.delta import encode_delta, open_block, split_blocks, word_bytes_of
from echo.weights.manifest import TensorSpec
from echo.weights.store import Patch

BLOCK_BYTES = 4 << 10
"""Shorter than the tensors of a tiny model, which so lie in several blocks."""


def patch_between(
    specs: Sequence[TensorSpec],
    old: bytes | bytearray,
    new: bytes | bytearray,
    *,
    base: PolicyVersion,
    version: PolicyVersion,
) -> Patch:
    """Return what leads from one image to another."""
    patch = Patch(base, version, BLOCK_BYTES)
    for number, (start, stop) in enumerate(split_blocks(len(old), BLOCK_BYTES)):
        before, after = memoryview(old)[start:stop], memoryview(new)[start:stop]
        coded = encode_delta(before, after, word_bytes=word_bytes_of(specs, start, stop))
        patch.blocks[number] = open_block(memoryview(coded.coded), before, coded.old_hash)
    return patch
