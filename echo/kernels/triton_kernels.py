"""Triton kernels: logits are used where they are computed, and never stored.

Forward. One program scores a tile of rows against one part (split) of the vocabulary. From the
accumulator of the product, the program computes the running maximum, the sum of exponentials, the
weighted sum for the entropy, and the target's logit. A second kernel combines the splits into
log-probability, ratio, clip and policy coefficient of each token. A third kernel computes the
logits of the few further ids.

Backward. For each chunk of the vocabulary, one kernel computes the gradient of the logits in the
dtype of the states. cuBLAS computes the gradients of states and weight from the gradient of the
logits.

The kernels for pairs of a row and an id read only the rows of these pairs. There are no atomics,
and every sum has a fixed order, so the same input always gives the same bits.

Exponentials are powers of 2, so `Scores.peak` is in units of log 2. Operands are loaded through
tensor descriptors (TMA on Hopper). Loads outside the matrix read zeros, so columns beyond the
vocabulary are masked in the accumulator.

Shapes: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from echo.kernels.contract import (
    MAX_LOG_RATIO,
    FurtherIds,
    LiveRows,
    Pairs,
    PolicyRows,
    PolicyTerms,
    RatioClip,
    Scores,
    aligned,
)

# --- launch configurations ------------------------------------------------------------------------
# Configurations are fixed: a search at run time would take minutes at the start, and might choose
# differently in every process, which changes bits. Whether a tile spills registers depends on the
# version of Triton. These entries compile for sm_90a with hardly any spilling, which
# tests/kernels/test_launch_configs.py checks; others have not been tried.


KernelName = Literal["scores", "grad_logits"]

MAX_SPLITS = 32
"""Largest number of parts of the vocabulary that are scored in parallel. The number of parts is
independent of the number of rows, so that no row's result depends on other rows. 32 parts fill a
GPU even with 512 rows.
"""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Launch parameters of a kernel that multiplies tiles."""

    rows: int
    """Number of rows (tokens) of a tile, a power of two."""
    columns: int
    """Number of columns (vocabulary entries) of a tile, a power of two."""
    depth: int
    """Part of the model width that one step of the product reads, a power of two."""
    num_warps: int
    num_stages: int
    """Number of steps of the product to load ahead, each with (rows + columns) * depth elements."""
    group_rows: int = 8
    """Number of row tiles that run together on the same columns. The tiles share the columns in the
    cache.
    """


_WIDE = LaunchConfig(128, 256, 64, num_warps=8, num_stages=4)
_TALL = LaunchConfig(256, 128, 64, num_warps=8, num_stages=4)

HOPPER: dict[tuple[int, int], dict[KernelName, LaunchConfig]] = {
    (3, 6): {"scores": _WIDE, "grad_logits": _WIDE},
    # From this version on the statistics of the wide tile spill (25 stores); those of the tall tile
    # do not.
    (3, 9): {"scores": _TALL, "grad_logits": _WIDE},
}
"""Launch configurations of Hopper GPUs: version of Triton -> kernel -> configuration. A version
without an entry uses the entry of the next older version.
"""

PORTABLE = LaunchConfig(128, 64, 32, num_warps=8, num_stages=3)
"""Configuration of all GPUs except Hopper GPUs. Its tiles are small enough for the registers of
GPUs before Hopper, and for the 36 KiB of shared memory that every GPU has.
"""

FLOAT32 = LaunchConfig(64, 64, 32, num_warps=8, num_stages=2)
"""Configuration for float32 inputs, for comparisons and not for speed."""


def launch_config(
    kernel: KernelName,
    *,
    triton_version: str,
    capability: tuple[int, int],
    element_bytes: int,
) -> LaunchConfig:
    """Return the configuration of `kernel` on a GPU of this compute capability."""
    if element_bytes > 2:
        return FLOAT32
    if capability != (9, 0):
        return PORTABLE
    major, minor = (int(part) for part in triton_version.split(".")[:2])
    known = [version for version in sorted(HOPPER) if version <= (major, minor)]
    return HOPPER[known[-1] if known else min(HOPPER)][kernel]


IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET=1 was set at import, for tests on the CPU."""

_ROWS_PER_PROGRAM = 32
"""Number of rows in a tile of the kernel that combines the splits. With MAX_SPLITS splits, the tile
has 1 024 numbers.
"""
_IDS_PER_PROGRAM, _ID_DEPTH = 32, 128
"""Tile sizes of the kernel that scores further ids: number of ids, and model width per step."""
_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)
# Finite, so that 0 * (masked - peak) stays 0; -inf would make it NaN.
_MASKED = tl.constexpr(-1.0e30)


# --- kernels --------------------------------------------------------------------------------------


@triton.jit
def _grouped_tile(program, num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """Return which (row tile, column tile) a program computes.

    GROUP consecutive row tiles use the same columns, which then stay in the cache.
    """
    group_size = GROUP * num_column_tiles
    first = (program // group_size) * GROUP
    num_rows = tl.minimum(num_row_tiles - first, GROUP)
    within = program % group_size
    return first + within % num_rows, within // num_rows


@triton.jit
def _logits_tile(
    states_desc, weight_desc, row, column,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return the [ROWS, COLUMNS] float32 tile of states @ weight.T."""
    logits = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, WIDTH, DEPTH):
        states = states_desc.load([row, k])
        weight = weight_desc.load([column, k])
        if UPCAST:
            states = states.to(tl.float32)
            weight = weight.to(tl.float32)
        logits = tl.dot(states, weight.T, logits, input_precision="ieee")
    return logits


@triton.jit
def scores_kernel(
    states_desc, weight_desc, ids_ptr, scale_ptr,
    peak_ptr, total_ptr, weighted_ptr, target_ptr,
    num_rows, num_columns, columns_per_split, num_splits,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, ENTROPY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute a row tile's statistics over one split of the vocabulary, and its target logits."""
    row_tile, split = _grouped_tile(tl.program_id(0), tl.cdiv(num_rows, ROWS), num_splits, GROUP)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    ids = tl.load(ids_ptr + rows, mask=is_row, other=-1)
    scale = tl.load(scale_ptr + rows, mask=is_row, other=1.0) * _LOG2E
    first = split * columns_per_split
    end = tl.minimum(first + columns_per_split, num_columns)

    peak = tl.full((ROWS,), _MASKED, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    weighted = tl.zeros((ROWS,), dtype=tl.float32)
    target = tl.zeros((ROWS,), dtype=tl.float32)
    for column in range(first, end, COLUMNS):
        logits = _logits_tile(
            states_desc, weight_desc, row_tile * ROWS, column, WIDTH, ROWS, COLUMNS, DEPTH, UPCAST
        )
        columns = column + tl.arange(0, COLUMNS)
        logits = tl.where((columns < end)[None, :], logits * scale[:, None], _MASKED)
        target += tl.sum(tl.where(columns[None, :] == ids[:, None], logits, 0.0), axis=1)
        # All values are relative to the peak, so a shift common to all logits cancels exactly.
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        drop = peak - new_peak
        keep = tl.exp2(drop)
        logits -= new_peak[:, None]
        exponentials = tl.exp2(logits)
        if ENTROPY:
            weighted = (weighted + total * drop) * keep + tl.sum(exponentials * logits, axis=1)
        total = total * keep + tl.sum(exponentials, axis=1)
        peak = new_peak

    at = split.to(tl.int64) * num_rows + rows
    tl.store(peak_ptr + at, peak, mask=is_row)
    tl.store(total_ptr + at, total, mask=is_row)
    if ENTROPY:
        tl.store(weighted_ptr + at, weighted, mask=is_row)
    # Every id is in exactly one split, which writes its logit.
    tl.store(target_ptr + rows, target, mask=is_row & (ids >= first) & (ids < end))


@triton.jit
def _store_policy_terms(
    logprobs, rows, is_row, sampler_ptr, advantage_ptr, loss_ptr, coefficient_ptr, ratio_ptr,
    LOW: tl.constexpr, HIGH: tl.constexpr, DUAL: tl.constexpr, MAX_LOG: tl.constexpr,
):  # fmt: skip
    """Store the loss, coefficient and ratio of each row. A NaN ratio stays NaN."""
    sampler_logprobs = tl.load(sampler_ptr + rows, mask=is_row, other=0.0)
    advantages = tl.load(advantage_ptr + rows, mask=is_row, other=0.0)
    log_ratio = logprobs - sampler_logprobs
    is_flat = tl.abs(log_ratio) > MAX_LOG
    log_ratio = tl.where(log_ratio > MAX_LOG, MAX_LOG, log_ratio)
    log_ratio = tl.where(log_ratio < -MAX_LOG, -MAX_LOG, log_ratio)
    ratios = tl.exp(log_ratio)
    surrogate = ratios * advantages
    is_low = (advantages < 0.0) & (ratios < LOW)
    is_high = (advantages > 0.0) & (ratios > HIGH)
    losses = tl.where(is_low, -LOW * advantages, tl.where(is_high, -HIGH * advantages, -surrogate))
    is_flat = is_flat | is_low | is_high
    if DUAL is not None:
        is_dual = (advantages < 0.0) & (ratios > DUAL)
        losses = tl.where(is_dual, -DUAL * advantages, losses)
        is_flat = is_flat | is_dual
    tl.store(loss_ptr + rows, losses, mask=is_row)
    tl.store(coefficient_ptr + rows, tl.where(is_flat, 0.0, -surrogate), mask=is_row)
    tl.store(ratio_ptr + rows, ratios, mask=is_row)


@triton.jit
def combine_kernel(
    peak_ptr, total_ptr, weighted_ptr, target_ptr, sampler_ptr, advantage_ptr,
    row_peak_ptr, row_total_ptr, logprob_ptr, entropy_ptr, loss_ptr, coefficient_ptr, ratio_ptr,
    num_rows, num_splits,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, ENTROPY: tl.constexpr, POLICY: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, DUAL: tl.constexpr, MAX_LOG: tl.constexpr,
):  # fmt: skip
    """Combine the statistics of all splits.

    Store log-probabilities, entropies and terms of the loss.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    splits = tl.arange(0, SPLITS)
    is_split = (splits < num_splits)[:, None] & is_row[None, :]
    at = splits.to(tl.int64)[:, None] * num_rows + rows[None, :]
    peaks = tl.load(peak_ptr + at, mask=is_split, other=_MASKED)
    totals = tl.load(total_ptr + at, mask=is_split, other=0.0)
    peak = tl.max(peaks, axis=0)
    drop = peaks - peak[None, :]
    keep = tl.exp2(drop)
    total = tl.where(is_row, tl.sum(totals * keep, axis=0), 1.0)
    log_total = tl.log2(total)
    target = tl.load(target_ptr + rows, mask=is_row, other=0.0)
    logprobs = ((target - peak) - log_total) * _LN2
    tl.store(row_peak_ptr + rows, peak, mask=is_row)
    tl.store(row_total_ptr + rows, total, mask=is_row)
    tl.store(logprob_ptr + rows, logprobs, mask=is_row)
    if ENTROPY:
        weighted = tl.load(weighted_ptr + at, mask=is_split, other=0.0)
        weighted = tl.sum((weighted + totals * drop) * keep, axis=0)
        tl.store(entropy_ptr + rows, (log_total - weighted / total) * _LN2, mask=is_row)
    if POLICY:
        _store_policy_terms(
            logprobs, rows, is_row, sampler_ptr, advantage_ptr, loss_ptr, coefficient_ptr,
            ratio_ptr, LOW, HIGH, DUAL, MAX_LOG,
        )  # fmt: skip


@triton.jit
def grad_logits_kernel(
    states_desc, weight_desc, grad_desc, ids_ptr, rate_ptr, peak_ptr, base_ptr, slope_ptr, hit_ptr,
    num_rows, num_columns,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, ENTROPY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store the gradient of one tile of a chunk's logits.

    `_row_factors` has the equation. Ids count from the chunk's first column. Columns outside the
    chunk are not stored, because the output's descriptor ends with the chunk.
    """
    row_tile, column_tile = _grouped_tile(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS), GROUP
    )
    row, column = row_tile * ROWS, column_tile * COLUMNS
    logits = _logits_tile(
        states_desc, weight_desc, row, column, WIDTH, ROWS, COLUMNS, DEPTH, UPCAST
    )
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    ids = tl.load(ids_ptr + rows, mask=is_row, other=-1)
    rate = tl.load(rate_ptr + rows, mask=is_row, other=0.0)
    peak = tl.load(peak_ptr + rows, mask=is_row, other=0.0)
    base = tl.load(base_ptr + rows, mask=is_row, other=0.0)
    hit = tl.load(hit_ptr + rows, mask=is_row, other=0.0)
    logits = logits * rate[:, None] - peak[:, None]
    exponentials = tl.exp2(logits)
    if ENTROPY:
        slope = tl.load(slope_ptr + rows, mask=is_row, other=0.0)
        grad = exponentials * (slope[:, None] * logits + base[:, None])
    else:
        grad = exponentials * base[:, None]
    grad = tl.where(columns[None, :] == ids[:, None], hit[:, None], 0.0) - grad
    grad_desc.store([row, column], grad.to(grad_desc.dtype))


@triton.jit
def set_logits_kernel(
    states_ptr, weight_ptr, rows_ptr, ids_ptr, logit_ptr,
    num_ids, row_stride, column_stride, weight_stride,
    WIDTH: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Store the logit of each further id."""
    at = tl.program_id(0) * IDS + tl.arange(0, IDS)
    is_id = at < num_ids
    rows = tl.load(rows_ptr + at, mask=is_id, other=0).to(tl.int64)
    ids = tl.load(ids_ptr + at, mask=is_id, other=0).to(tl.int64)
    logits = tl.zeros((IDS,), dtype=tl.float32)
    for first in range(0, WIDTH, DEPTH):
        k = first + tl.arange(0, DEPTH)
        is_loaded = is_id[:, None] & (k < WIDTH)[None, :]
        states = tl.load(
            states_ptr + rows[:, None] * row_stride + k[None, :] * column_stride,
            mask=is_loaded, other=0.0,
        )  # fmt: skip
        weight = tl.load(
            weight_ptr + ids[:, None] * weight_stride + k[None, :], mask=is_loaded, other=0.0
        )
        logits += tl.sum(states.to(tl.float32) * weight.to(tl.float32), axis=1)
    tl.store(logit_ptr + at, logits, mask=is_id)


@triton.jit
def pair_logits_kernel(
    states_ptr, weight_ptr, rows_ptr, ids_ptr, scale_ptr, logits_ptr,
    num_pairs, states_stride, weight_stride,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Store the logits of PAIRS pairs, divided by the temperature."""
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pairs < num_pairs
    rows = tl.load(rows_ptr + pairs, mask=is_pair, other=0)
    states_ptrs = states_ptr + rows * states_stride
    weight_ptrs = weight_ptr + tl.load(ids_ptr + pairs, mask=is_pair, other=0) * weight_stride
    logits = tl.zeros((PAIRS,), dtype=tl.float32)
    for start in range(0, WIDTH, DEPTH):
        depths = start + tl.arange(0, DEPTH)
        is_number = is_pair[:, None] & (depths < WIDTH)[None, :]
        states = tl.load(states_ptrs[:, None] + depths[None, :], mask=is_number, other=0.0)
        weights = tl.load(weight_ptrs[:, None] + depths[None, :], mask=is_number, other=0.0)
        logits += tl.sum(states.to(tl.float32) * weights.to(tl.float32), axis=1)
    scale = tl.load(scale_ptr + rows, mask=is_pair, other=0.0)
    tl.store(logits_ptr + pairs, logits * scale, mask=is_pair)


@triton.jit
def pair_sums_kernel(
    matrix_ptr, places_ptr, factors_ptr, ends_ptr, sums_ptr,
    matrix_stride, sums_stride,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Store DEPTH columns of one row of sums, for `_sum_pairs`."""
    row = tl.program_id(0).to(tl.int64)
    depths = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    first = tl.load(ends_ptr + row)
    end = tl.load(ends_ptr + row + 1)
    sums = tl.zeros((DEPTH,), dtype=tl.float32)
    for start in range(first, end, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        is_pair = pairs < end
        places = tl.load(places_ptr + pairs, mask=is_pair, other=0)
        factors = tl.load(factors_ptr + pairs, mask=is_pair, other=0.0)
        is_number = is_pair[:, None] & (depths < WIDTH)[None, :]
        numbers = tl.load(
            matrix_ptr + places[:, None] * matrix_stride + depths[None, :],
            mask=is_number,
            other=0.0,
        )
        sums += tl.sum(numbers.to(tl.float32) * factors[:, None], axis=0)
    tl.store(
        sums_ptr + row * sums_stride + depths, sums.to(sums_ptr.dtype.element_ty),
        mask=depths < WIDTH,
    )  # fmt: skip


# --- launchers ------------------------------------------------------------------------------------

_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])


def _on_its_device(launch: _Launcher) -> _Launcher:
    """Return a function that calls `launch` on the GPU of the first argument."""

    @wraps(launch)
    def launch_on_device(first: Tensor | LiveRows, *rest: Any, **options: Any) -> Any:
        tensor = first if isinstance(first, Tensor) else first.states
        # This has no effect for a tensor on the CPU.
        with torch.cuda.device_of(tensor):
            return launch(first, *rest, **options)

    return cast("_Launcher", launch_on_device)


@_on_its_device
def forward(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    scale: Tensor,
    *,
    with_entropy: bool,
    policy: PolicyRows | None,
    sets: FurtherIds | None = None,
    vocab_chunk: int,
) -> Scores:
    """Return the scores of the ids, using 12 bytes of memory per row and split."""
    num_rows, num_columns = len(hidden), len(weight)
    config = _config("scores", hidden)
    num_tiles = triton.cdiv(num_columns, config.columns)
    columns_per_split = triton.cdiv(num_tiles, MAX_SPLITS) * config.columns
    num_splits = triton.cdiv(num_columns, columns_per_split)
    peaks, totals, weighted = scale.new_empty(3, num_splits, num_rows)
    # Each output has its own memory: views of one tensor could not be changed in place.
    logprobs, peak, total, target, entropies = (torch.empty_like(scale) for _ in range(5))
    losses, coefficients, ratios = (scale.new_empty(num_rows if policy else 0) for _ in range(3))
    if num_rows:
        scores_kernel[triton.cdiv(num_rows, config.rows) * num_splits,](
            _descriptor(aligned(hidden), config.rows, config.depth),
            _descriptor(weight, config.columns, config.depth),
            ids.to(torch.int32), scale, peaks, totals, weighted, target,
            num_rows, num_columns, columns_per_split, num_splits,
            **_tile_options(config, hidden, with_entropy=with_entropy),
        )  # fmt: skip
        combine_kernel[triton.cdiv(num_rows, _ROWS_PER_PROGRAM),](
            peaks, totals, weighted, target,
            policy.sampler_logprobs if policy else logprobs,
            policy.advantages if policy else logprobs,
            peak, total, logprobs, entropies, losses, coefficients, ratios,
            num_rows, num_splits,
            SPLITS=triton.next_power_of_2(num_splits),
            ENTROPY=with_entropy, POLICY=policy is not None,
            **_policy_options(policy),
        )  # fmt: skip
    terms = PolicyTerms(losses, coefficients, ratios) if policy else None
    further = None
    if sets is not None:
        logits = _set_logits(hidden, weight, sets) * (scale * _LOG2E.value)[sets.rows]
        further = ((logits - peak[sets.rows]) - total.log2()[sets.rows]) * _LN2.value
    return Scores(logprobs, entropies if with_entropy else None, peak, total, terms, further)


def _set_logits(hidden: Tensor, weight: Tensor, sets: FurtherIds) -> Tensor:
    """Return the [M] float32 logits of the sets' ids, not divided by the temperature."""
    logits = torch.empty(len(sets.ids), dtype=torch.float32, device=hidden.device)
    if len(logits):
        set_logits_kernel[triton.cdiv(len(logits), _IDS_PER_PROGRAM),](
            hidden, weight, sets.rows, sets.ids, logits,
            len(logits), hidden.stride(0), hidden.stride(1), weight.stride(0),
            WIDTH=hidden.shape[1], IDS=_IDS_PER_PROGRAM, DEPTH=_ID_DEPTH,
        )  # fmt: skip
    return logits


@_on_its_device
def backward(
    rows: LiveRows, weight: Tensor, *, needs_states: bool, needs_weight: bool, vocab_chunk: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of states and weight. A gradient is None if it is not needed.

    Each row of the weight's gradient is written once, by one product.

    Outputs are float32, because cuBLAS may sum parts of a 16-bit output in 16 bits.
    """
    num_rows, width = rows.states.shape
    states = aligned(rows.states)
    grad_states = states.new_zeros(states.shape, dtype=torch.float32) if needs_states else None
    grad_weight = torch.empty_like(weight) if needs_weight else None
    if not num_rows:
        return grad_states, None if grad_weight is None else grad_weight.zero_()
    vocab_chunk = min(vocab_chunk, len(weight))
    factors = _row_factors(rows)
    grad_sets = None
    if rows.sets is not None and rows.grad_sets is not None:
        grad_sets = rows.grad_sets * rows.scale[rows.sets.rows]
    with_entropy = rows.grad_entropy is not None
    config = _config("grad_logits", states)
    # Rows of the buffer begin at multiples of 16 bytes, as a descriptor requires.
    buffer = states.new_empty(num_rows, triton.cdiv(vocab_chunk, 8) * 8)
    product = states.new_empty(vocab_chunk, width, dtype=torch.float32) if needs_weight else None
    for start in range(0, len(weight), vocab_chunk):
        chunk = weight[start : start + vocab_chunk]
        grad_logits = buffer[:, : len(chunk)]
        num_tiles = triton.cdiv(num_rows, config.rows) * triton.cdiv(len(chunk), config.columns)
        grad_logits_kernel[num_tiles,](
            _descriptor(states, config.rows, config.depth),
            _descriptor(chunk, config.columns, config.depth),
            _descriptor(grad_logits, config.rows, config.columns),
            (rows.ids - start).to(torch.int32), *factors, num_rows, len(chunk),
            **_tile_options(config, states, with_entropy=with_entropy),
        )  # fmt: skip
        if rows.sets is not None and grad_sets is not None:
            rows.sets.add_at(grad_logits, grad_sets, start=start)
        if grad_states is not None:
            _multiply(grad_logits, chunk, grad_states, keep=1.0)
        if grad_weight is not None and product is not None:
            rows_of_weight = product[: len(chunk)]
            _multiply(grad_logits.T, states, rows_of_weight, keep=0.0)
            grad_weight[start : start + len(chunk)] = rows_of_weight
    return grad_states, grad_weight


_PAIRS = 32
"""Number of pairs whose products are summed at a time."""


@_on_its_device
def pair_logits(hidden: Tensor, weight: Tensor, pairs: Pairs, scale: Tensor) -> Tensor:
    """Return the [M] logits of the pairs, divided by the temperature."""
    hidden = hidden.contiguous()
    logits = scale.new_empty(len(pairs.rows))
    if len(logits):
        pair_logits_kernel[triton.cdiv(len(logits), _PAIRS),](
            hidden, weight, pairs.rows, pairs.ids, scale, logits,
            len(logits), hidden.stride(0), weight.stride(0),
            WIDTH=hidden.shape[1], PAIRS=_PAIRS, DEPTH=64,
        )  # fmt: skip
    return logits


@_on_its_device
def pair_gradients(
    hidden: Tensor,
    weight: Tensor,
    pairs: Pairs,
    grad: Tensor,
    *,
    needs_states: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of states and weight. A gradient is None if it is not needed.

    Each row of a gradient is written once, from one float32 sum.
    """
    grad_states = grad_weight = None
    if needs_states:
        grad_states = hidden.new_empty(hidden.shape, dtype=torch.float32)
        _sum_pairs(weight, pairs.rows, pairs.ids, grad, grad_states)
    if needs_weight:
        grad_weight = torch.empty_like(weight)
        ids, order = pairs.ids.sort(stable=True)
        _sum_pairs(hidden.contiguous(), ids, pairs.rows[order], grad[order], grad_weight)
    return grad_states, grad_weight


def _sum_pairs(matrix: Tensor, rows: Tensor, places: Tensor, factors: Tensor, out: Tensor) -> None:
    """Write, for each row of `out`, the sum over the row's pairs.

    Each pair contributes its factor times its row of `matrix`.

    Args:
        matrix: [R, D] the rows to be summed.
        rows: [M] each pair's row in `out`, ascending.
        places: [M] each pair's row in `matrix`.
        factors: [M] float32 factor of each pair.
        out: [N, D], overwritten.
    """
    if not out.numel():
        return
    ends = torch.searchsorted(rows, torch.arange(len(out) + 1, device=rows.device))
    depth = 128
    pair_sums_kernel[len(out), triton.cdiv(out.shape[1], depth)](
        matrix, places.contiguous(), factors.contiguous(), ends, out,
        matrix.stride(0), out.stride(0),
        WIDTH=out.shape[1], PAIRS=_PAIRS, DEPTH=depth,
    )  # fmt: skip


def _row_factors(rows: LiveRows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return five factors of each row's logit gradient: rate, peak, base, slope, hit; [n] each.

    With x = logit * rate - peak and e = 2^x, the gradient is hit * 1[column = id] - e * (base +
    slope * x). This is the sum of the gradients of log-probability and entropy
    (`torch_kernels._logit_gradient`).
    """
    hit, whole = rows.grad * rows.scale, rows.grad_all * rows.scale
    rate = rows.scale * _LOG2E.value
    if rows.grad_entropy is None or rows.entropies is None:
        base = whole / rows.total
        return rate, rows.peak, base, base, hit
    grad_entropy = rows.grad_entropy * rows.scale
    base = (whole + grad_entropy * (rows.entropies - rows.total.log())) / rows.total
    return rate, rows.peak, base, grad_entropy * _LN2.value / rows.total, hit


def _multiply(left: Tensor, right: Tensor, out: Tensor, *, keep: float) -> None:
    """Write left @ right + keep * out into `out`. Both `out` and the sums are float32."""
    if out.is_cuda:
        torch.addmm(out, left, right, out_dtype=torch.float32, beta=keep, out=out)
    else:  # the interpreter's tensors
        torch.addmm(out, left.float(), right.float(), beta=keep, out=out)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def _config(kernel: KernelName, states: Tensor) -> LaunchConfig:
    return launch_config(
        kernel,
        triton_version=triton.__version__,
        capability=torch.cuda.get_device_capability(states.device) if states.is_cuda else (9, 0),
        element_bytes=states.element_size(),
    )


def _tile_options(config: LaunchConfig, states: Tensor, *, with_entropy: bool) -> dict[str, Any]:
    return {
        "WIDTH": states.shape[1],
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "GROUP": config.group_rows,
        "ENTROPY": with_entropy,
        # The interpreter holds bfloat16 as integers of its bits, and would multiply these.
        "UPCAST": IS_INTERPRETED and states.dtype == torch.bfloat16,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }


def _policy_options(policy: PolicyRows | None) -> dict[str, Any]:
    clip = policy.clip if policy else RatioClip()
    return {
        "ROWS": _ROWS_PER_PROGRAM,
        "LOW": 1.0 - clip.clip_low,
        "HIGH": 1.0 + clip.clip_high,
        "DUAL": clip.dual_clip,
        "MAX_LOG": MAX_LOG_RATIO,
        "enable_fp_fusion": True,
    }
