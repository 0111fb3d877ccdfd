"""Deltas made on a device are byte for byte those made on the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echo.core.errors import EngineError
from echo.engine import weights
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


def on_device(
    old: Image, new: Image, tensors: Sequence[TensorSpec], block_bytes: int, device: str = "cpu"
) -> list[CodedBlock]:
    before, after = (torch.from_numpy(image).to(device) for image in (old, new))
    delta = DeviceDelta(before, after, tensors, block_bytes=block_bytes)
    return list(delta.encode(old.data))


@pytest.mark.slow
@given(
    images(),
    st.sampled_from([1 << 12, 1 << 14, 3 << 12]),
    st.sampled_from([1, 1 << 15, 1 << 27]),
    st.sampled_from([0, 1 << 12, 1 << 28]),
)
def test_blocks_are_those_of_the_host(
    drawn: tuple[list[Image], list[TensorSpec]],
    block_bytes: int,
    piece_bytes: int,
    batch_bytes: int,
) -> None:
    versions, tensors = drawn
    with (
        mock.patch.object(weights, "PIECE_BYTES", piece_bytes),
        mock.patch.object(weights, "BATCH_BYTES", batch_bytes),
    ):
        for old, new in itertools.pairwise(versions):
            made = on_device(old, new, tensors, block_bytes)
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
    assert on_device(old, new, tensors, 1 << 16) == on_host(old, new, tensors, 1 << 16)
    with pytest.raises(EngineError, match=rf"uint8\[9\] on cpu cannot follow .*uint8\[{num_bytes}"):
        on_device(old, np.zeros(9, np.uint8), [], 1 << 16)


class Operations(TorchDispatchMode):
    """Counts what a device would launch: all but views."""

    number = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(operation).split(".")[1]
        self.number += name not in ("detach", "lift_fresh", "slice", "view")
        return operation(*args, **(kwargs or {}))


def test_the_host_waits_twice_and_the_device_launches_little() -> None:
    block_bytes, num_blocks = 1 << 14, 64 * 3
    old, new = bf16_steps(num_blocks * block_bytes // 2, 1e-6)
    new[5 * block_bytes : 6 * block_bytes] = old[5 * block_bytes : 6 * block_bytes]
    new[9 * block_bytes : 10 * block_bytes] ^= 255
    tensors = [TensorSpec("a", "bfloat16", (old.size // 2,), 0, old.size)]
    waits: list[int] = []
    bring = weights.copy_to_host

    def counted(found: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        waits.append(sum(each.numel() * each.element_size() for each in found))
        return bring(found)

    with (
        mock.patch.object(weights, "copy_to_host", counted),
        mock.patch.object(weights, "PIECE_BYTES", 32 * block_bytes),
        Operations() as operations,  # type: ignore[no-untyped-call]
    ):
        made = on_device(old, new, tensors, block_bytes)
    assert made == on_host(old, new, tensors, block_bytes)
    assert len(waits) == 2
    assert sum(waits) < 0.2 * old.size
    # As many for 32 blocks as for one, and one for each that crosses whole.
    assert operations.number <= 10 * num_blocks // 32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_blocks_made_on_a_gpu_are_those_of_the_host() -> None:
    versions = bf16_steps((1 << 22) + 5, 1e-7, 1e-6, 1e-5, 1e-3)
    tensors = [TensorSpec("a", "bfloat16", ((1 << 22) + 5,), 0, versions[0].size)]
    for old, new in itertools.pairwise(versions):
        made = on_device(old, new, tensors, 4 << 20, "cuda")
        assert made == on_host(old, new, tensors, 4 << 20)
