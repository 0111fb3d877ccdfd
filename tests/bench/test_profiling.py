"""Parts of a step's time: each instant counts once, for the part that a step waits for."""

from __future__ import annotations

import pytest
from learner.profiling import KERNELS, OPERATIONS, Span, seconds_of

MS = 1e3
STEP, OTHER = 7, 20
"""Streams."""


def test_kernels_count_once_and_a_publication_beside_them_for_nothing() -> None:
    spans = [
        Span("flash_fwd_kernel<bf16>", 0, 10 * MS, STEP),
        Span("nvjet_tst_128x256", 10 * MS, 30 * MS, STEP),
        Span("triton_poi_fused__to_copy_cat_mul_silu_3", 30 * MS, 34 * MS, STEP),
        Span("vectorized_elementwise_kernel", 34 * MS, 36 * MS, STEP),
        Span("head and loss", 40 * MS, 50 * MS, STEP),
        Span("scores_kernel", 40 * MS, 44 * MS, STEP),
        Span("nvjet_tst_64x64", 46 * MS, 50 * MS, STEP),
        Span("multi_tensor_apply_kernel<FusedAdam>", 50 * MS, 53 * MS, STEP),
        # A version comes down: beside the step, and 5 ms of it where nothing else runs.
        Span("DeviceSelectSweepKernel", 20 * MS, 36 * MS, OTHER),
        Span("Memcpy DtoH (Device -> Pinned)", 53 * MS, 58 * MS, OTHER),
        # The part of it that the step's own stream has.
        Span("publication", 60 * MS, 64 * MS, STEP),
        Span("multi_tensor_apply_kernel<Copy>", 60 * MS, 64 * MS, STEP),
    ]
    seconds = seconds_of(spans, KERNELS, on_gpu=True)
    assert seconds == pytest.approx(
        {
            "attention": 0.010,
            "products": 0.020,
            "elementwise": 0.006,
            "head and loss": 0.008,  # without the gap in the mark
            "optimizer": 0.003,
            "publication": 0.009,
        }
    )


def test_operations_within_others_count_once() -> None:
    spans = [
        Span("aten::linear", 0, 10 * MS, 1),
        Span("aten::addmm", 1 * MS, 9 * MS, 1),
        Span("aten::scaled_dot_product_attention", 10 * MS, 20 * MS, 1),
        Span("aten::bmm", 12 * MS, 15 * MS, 1),
        Span("autograd::engine::evaluate_function: MulBackward0", 20 * MS, 30 * MS, 1),
        Span("aten::mul", 24 * MS, 28 * MS, 1),
        Span("optimizer", 30 * MS, 40 * MS, 1),
        Span("aten::_fused_adamw_", 31 * MS, 39 * MS, 1),
    ]
    found = seconds_of(spans, OPERATIONS, on_gpu=False)
    assert {part: seconds for part, seconds in found.items() if seconds} == pytest.approx(
        {"products": 0.010, "attention": 0.010, "elementwise": 0.004, "optimizer": 0.010}
    )
