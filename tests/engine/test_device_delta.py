"""Deltas made on a device are byte for byte those made on the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import EngineError
from echo.engine.weights import DeviceDelta
from echo.weights.delta import (
    CodedBlock,
    encode_delta,
    word_bytes_of,
)
from echo.weights.manifest import TensorSpec

torch.set_num_threads(1)

Image = npt.NDArray[np.uint8]
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "int64": 8}


def on_host(
    old: Image, new: Image, tensors: Sequence[TensorSpec], block_bytes: int
) -> list[CodedBlock]:
    return [
        encode_delta(
            old[start : start + block_bytes].data,
            new[start : start + block_bytes].data,
            word_bytes=word_bytes_of(tensors, start, min(start + block_bytes, new.size)),
        )
        for start in range(0, new.size, block_bytes)
    ]


@st.composite
def images(draw: st.DrawFn) -> tuple[list[Image], list[TensorSpec]]:
    """Draw tensors of several dtypes, and three images of them that differ more or less."""
    tensors, end = [], 0
    for name in "abc"[: draw(st.integers(1, 3))]:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        numel = draw(st.integers(0, 20_000))
        offset = -(-end // 16) * 16
        tensors.append(TensorSpec(name, dtype, (numel,), offset, numel * DTYPES[dtype]))
        end = offset + numel * DTYPES[dtype]
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    versions = [generator.integers(0, 256, end, dtype=np.uint8)]
    for _ in range(2):
        share = draw(st.sampled_from([0, 0.001, 0.01, 0.19, 0.21, 0.6]))
        largest = draw(st.sampled_from([1, 5, 100]))
        new = versions[-1].copy()
        words = new[: end // 4 * 4].view(draw(st.sampled_from(["<u2", "<u4"])))
        is_changed = generator.random(words.size) < share
        words[is_changed] += generator.integers(1, largest + 1, words.size)[is_changed].astype(
            words.dtype
        )
        versions.append(new)
    return versions, tensors


@pytest.mark.slow
@given(images(), st.sampled_from([1 << 12, 1 << 14, 3 << 12]))
def test_blocks_are_those_of_the_host(
    drawn: tuple[list[Image], list[TensorSpec]], block_bytes: int
) -> None:
    versions, tensors = drawn
    delta = DeviceDelta(torch.from_numpy(versions[0]), block_bytes=block_bytes)
    for old, new in itertools.pairwise(versions):
        made = list(delta.encode(torch.from_numpy(new), tensors))
        assert made == on_host(old, new, tensors, block_bytes)


def bf16_steps(num_weights: int, *scales: float) -> list[Image]:
    """Return images of bf16 weights, each a step of such a scale behind the one before."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(num_weights, generator=generator) * 0.02
    versions = [master]
    for scale in scales:
        versions.append(versions[-1] + scale * torch.randn(num_weights, generator=generator))
    return [version.bfloat16().view(torch.uint8).numpy() for version in versions]


@pytest.mark.parametrize("num_bytes", [20, 4095, 8101])
def test_blocks_that_are_short_or_end_within_a_word_are_those_of_the_host(num_bytes: int) -> None:
    old = np.zeros(num_bytes, np.uint8)
    new = old.copy()
    new[7] = 1
    tensors = [TensorSpec("a", "bfloat16", (num_bytes // 2,), 0, num_bytes // 2 * 2)]
    delta = DeviceDelta(torch.from_numpy(old))
    assert list(delta.encode(torch.from_numpy(new), tensors)) == on_host(old, new, tensors, 1 << 16)
    with pytest.raises(EngineError, match=rf"uint8\[9\] on cpu cannot follow .*uint8\[{num_bytes}"):
        list(delta.encode(torch.zeros(9, dtype=torch.uint8), []))


def test_an_abandoned_iteration_leaves_the_last_image() -> None:
    first, second, third = bf16_steps(1 << 14, 1e-6, 1e-6)
    tensors = [TensorSpec("a", "bfloat16", (1 << 14,), 0, 1 << 15)]
    delta = DeviceDelta(torch.from_numpy(first), block_bytes=1 << 13)
    next(delta.encode(torch.from_numpy(second), tensors))
    made = list(delta.encode(torch.from_numpy(third), tensors))
    assert made == on_host(first, third, tensors, 1 << 13)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_blocks_made_on_a_gpu_are_those_of_the_host() -> None:
    versions = bf16_steps((1 << 22) + 5, 1e-7, 1e-6, 1e-5, 1e-3)
    tensors = [TensorSpec("a", "bfloat16", ((1 << 22) + 5,), 0, versions[0].size)]
    delta = DeviceDelta(torch.from_numpy(versions[0]).cuda())
    for old, new in itertools.pairwise(versions):
        made = list(delta.encode(torch.from_numpy(new).cuda(), tensors))
        assert made == on_host(old, new, tensors, 4 << 20)
