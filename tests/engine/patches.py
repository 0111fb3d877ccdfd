"""Patches of images for tests of engines, through the wire's form of them; tensors compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from echo.core.rollout import PolicyVersion
from echo.weights.delta import encode_delta, open_block, split_blocks, word_bytes_of
from echo.weights.manifest import TensorSpec
from echo.weights.store.patches import Patch

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


def assert_identical(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Check that tensors are the same, bit for bit."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        other = second[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other)]
        assert torch.equal(*bits), name
