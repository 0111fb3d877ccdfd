"""The update of `adamw_8bit` as one Triton kernel.

A program reads BLOCKS_PER_PROGRAM blocks of weights, gradients, codes and scales, and writes the
new weights, codes and scales. So each byte is read and written at most once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS_PER_PROGRAM = 16
"""Number of blocks of a program: 1 024 weights, eight for each of its 128 threads. The number must
be a power of two.
"""


@triton.jit
def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """Interpolate from the nearer end, so that the result is rounded as torch.lerp rounds it."""
    near_start = start + weight * (end - start)
    near_end = end - (end - start) * (1.0 - weight)
    return tl.where(weight < 0.5, near_start, near_end)


@triton.jit
def _encode(values: Any, table: Any, min_scale: Any) -> Any:
    """Return the nearest codes of `values`, int32 [blocks, block], and the scales [blocks]."""
    scales = tl.maximum(tl.max(tl.abs(values), axis=1), min_scale)
    values = tl.div_rn(values, scales[:, None] + tl.zeros_like(values))
    codes = tl.zeros_like(values).to(tl.int32)
    for power in tl.static_range(8):
        further = codes + (128 >> power)
        codes = tl.where(values >= tl.load(table + further), further, codes)
    above = tl.minimum(codes + 1, 255)
    low, high = tl.load(table + codes), tl.load(table + above)
    return tl.where(values - low >= (high - low) * 0.5, above, codes), scales


@triton.jit
def _update(
    weights: Any,
    gradients: Any,
    mean_codes: Any,
    mean_scales: Any,
    square_codes: Any,
    square_scales: Any,
    signed_table: Any,
    unsigned_table: Any,
    num_blocks: Any,
    learning_rate: Any,
    weight1: Any,
    weight2: Any,
    decay: Any,
    epsilon: Any,
    correction1: Any,
    root_correction2: Any,
    min_scale: Any,
    block: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)
    is_there = rows < num_blocks
    at = rows[:, None] * block + tl.arange(0, block)[None, :]
    inside = is_there[:, None] & (at >= 0)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    weight -= decay * weight

    codes = tl.load(mean_codes + at, mask=inside, other=0).to(tl.int32)
    scales = tl.load(mean_scales + rows, mask=is_there, other=0.0)
    mean = _lerp(tl.load(signed_table + codes) * scales[:, None], gradient, weight1)
    codes, scales = _encode(mean, signed_table, min_scale)
    tl.store(mean_codes + at, codes.to(tl.uint8), mask=inside)
    tl.store(mean_scales + rows, scales, mask=is_there)

    codes = tl.load(square_codes + at, mask=inside, other=0).to(tl.int32)
    scales = tl.load(square_scales + rows, mask=is_there, other=0.0)
    square = _lerp(tl.load(unsigned_table + codes) * scales[:, None], gradient * gradient, weight2)
    codes, scales = _encode(square, unsigned_table, min_scale)
    tl.store(square_codes + at, codes.to(tl.uint8), mask=inside)
    tl.store(square_scales + rows, scales, mask=is_there)

    zeros = tl.zeros_like(weight)
    divisor = tl.div_rn(tl.sqrt_rn(square), root_correction2 + zeros) + epsilon
    step = learning_rate * tl.div_rn(mean, correction1 + zeros)
    tl.store(weights + at, weight - tl.div_rn(step, divisor), mask=inside)


def launch_update(
    weights: Tensor,
    gradients: Tensor,
    mean: tuple[Tensor, Tensor],
    mean_square: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    numbers: tuple[float, ...],
    *,
    block: int,
) -> None:
    """Make one AdamW update of a tensor and both moments, in place.

    Args:
        weights: float32, n * block numbers, contiguous.
        gradients: gradients in the same shape.
        mean: codes and scales of the running mean of gradients.
        mean_square: codes and scales of the running mean of squared gradients.
        tables: code values of `mean` and of `mean_square`, float32 [256] each.
        numbers: the kernel's arguments `learning_rate` to `min_scale`, in order.
        block: number of values that share a scale; the number is a power of two.
    """
    num_blocks = weights.numel() // block
    with torch.cuda.device(weights.device if weights.is_cuda else -1):
        _update[(triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM),)](
            weights,
            gradients,
            *mean,
            *mean_square,
            *tables,
            num_blocks,
            *numbers,
            block=block,
            blocks=BLOCKS_PER_PROGRAM,
            num_warps=4,
        )
