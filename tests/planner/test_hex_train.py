"""The search over (dp, tp, pp): one plan by hand, layers, memory, monotonicity."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.fleet.gpus import GPUS, MODELS, TRAIN_EFFICIENCY, train_flops
from echo.fleet.hetero import (
    Cluster,
    HexJob,
    StagePlan,
    largest_remainder,
    search_training,
    step_seconds,
)

CLUSTER = Cluster(gpus={name: GPUS[name] for name in ("H20", "H800")}, counts={"H20": 8, "H800": 8})
JOB = HexJob(
    model=MODELS["Qwen2.5-7B"],
    rollouts_per_step=512,
    prompt_tokens=200,
    completion_tokens=1000,
    max_tokens=8192,
)


def test_whole_things_are_shared_by_largest_remainder() -> None:
    # 10 x 2/3 = 6.67 and 3.33: the sixth remainder goes to the first.
    assert largest_remainder(10, [2, 1]) == [7, 3]
    assert largest_remainder(28, [1, 1, 1]) == [10, 9, 9]


def test_a_step_by_hand() -> None:
    # 8 H800, dp 8: the arithmetic at 40 % of 8 x 756e12, no bubble, no tensor parallelism; the
    # gradients, 7.62e9 x 2 bytes, go round once and a bit (2 x 7/8) at 200 GB/s.
    stage = StagePlan(
        gpu="H800", data_parallel=8, tensor_parallel=1, pipeline_parallel=1, num_layers=28
    )
    flops = train_flops(JOB.model, num_tokens=512 * 1200, mean_tokens=1200)
    by_hand = flops / (8 * 756e12 * TRAIN_EFFICIENCY) + 1.75 * 7.62e9 * 2 / 200e9
    assert step_seconds(CLUSTER, JOB, [stage]) == pytest.approx(by_hand)
    # Two stages of 14 layers on the same GPUs, dp 4: a bubble of (2 - 1) / 9.375 micro-batches.
    halves = replace(stage, data_parallel=4, pipeline_parallel=2)
    bubble = 1 + 1 / (512 * 1200 / 4 / 16384)
    gradients = 2 * 3 / 4 * 7.62e9 / 2 * 2 / 200e9
    by_hand = flops / (8 * 756e12 * TRAIN_EFFICIENCY) * bubble + gradients
    assert step_seconds(CLUSTER, JOB, [halves]) == pytest.approx(by_hand)


def test_a_model_that_does_not_fit_is_split_and_one_that_never_fits_refused() -> None:
    alone = search_training(CLUSTER, JOB, {"H800": 1})
    assert math.isinf(alone.step_s)  # 7.62e9 x 16 bytes are 122 GB
    two = search_training(CLUSTER, JOB, {"H800": 4})
    assert two.step_s < math.inf
    [stage] = two.stages
    assert stage.num_gpus <= 4


def test_a_pipeline_may_cross_types_with_layers_by_arithmetic() -> None:
    slow_links = replace(CLUSTER, cross_bytes_per_s=1e12)
    plan = search_training(slow_links, JOB, {"H20": 8, "H800": 8})
    assert {stage.gpu for stage in plan.stages} == {"H20", "H800"}
    layers = {stage.gpu: stage.num_layers for stage in plan.stages}
    # 28 x 148 / (148 + 756) = 4.6
    assert layers == {"H20": 5, "H800": 23}


@given(small=st.integers(0, 8), large=st.integers(0, 8), extra=st.integers(1, 4))
def test_more_gpus_never_train_much_slower(small: int, large: int, extra: int) -> None:
    # Degrees are powers of two, so that five GPUs may have to do what four do; never worse.
    before = search_training(CLUSTER, JOB, {"H20": small, "H800": large}).step_s
    after = search_training(CLUSTER, JOB, {"H20": small, "H800": large + extra}).step_s
    assert after <= before * 1.05 or math.isinf(before)
