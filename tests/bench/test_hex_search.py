"""AReaL-Hex's search: equal to trying all on small clusters, fast on 56 GPUs."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hex_search import (
    MAX_DIVISIONS,
    HexScheduler,
    Schedule,
    StagePlan,
    search_training,
    step_seconds,
)
from hypothesis import given
from hypothesis import strategies as st

from echo.fleet.gpus import GPUS, MODELS, TRAIN_EFFICIENCY, train_flops
from echo.fleet.hetero import Cluster, SiteJob


def cluster(**counts: int) -> Cluster:
    return Cluster(gpus={name: GPUS[name] for name in counts}, counts=counts)


def try_all(scheduler: HexScheduler) -> Schedule:
    """Return the best schedule of all divisions."""
    return min(map(scheduler.price, scheduler.divisions()), key=lambda s: s.rank)


@pytest.mark.slow
@pytest.mark.parametrize("num_clusters", [16, pytest.param(80, marks=pytest.mark.matrix)])
def test_small_clusters_equal_brute_force(num_clusters: int) -> None:
    rng = random.Random(0)
    for _ in range(num_clusters):
        counts = {"H20": rng.randint(0, 8), "H800": rng.randint(0, 8)}
        job = SiteJob(
            model=MODELS[rng.choice(["Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B"])],
            rollouts_per_step=rng.choice([64, 512]),
            prompt_tokens=200,
            completion_tokens=rng.choice([500, 8000]),
            max_tokens=16000,
        )
        if sum(counts.values()) == 0:
            continue
        scheduler = HexScheduler(cluster(**counts), job)
        assert scheduler.find().step_s == try_all(scheduler).step_s, (counts, job)


@pytest.mark.slow
def test_three_types_equal_brute_force() -> None:
    scheduler = HexScheduler(
        Cluster(
            gpus={name: GPUS[name] for name in ("A100-80GB", "H20", "H800")},
            counts={"A100-80GB": 3, "H20": 4, "H800": 3},
        ),
        JOB,
    )
    assert scheduler.find().step_s == try_all(scheduler).step_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "Qwen2.5-1.5B",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("Qwen2.5-7B", "Qwen2.5-14B")),
    ],
)
def test_56_gpus_take_few_tries(model: str) -> None:
    job = replace(JOB, model=MODELS[model], rollouts_per_step=8192, completion_tokens=8000)
    scheduler = HexScheduler(cluster(H800=24, H20=32), job)
    tried, price = [], scheduler.price

    def note(train_counts: tuple[int, ...]) -> Schedule:
        tried.append(train_counts)
        return price(train_counts)

    scheduler.price = note  # type: ignore[method-assign]
    schedule = scheduler.find()
    assert len(tried) < 2000, "each takes some milliseconds"
    # H800s train at a third of the price, H20s generate at a third.
    assert schedule.train_counts["H800"] >= 20
    assert schedule.train_counts["H20"] == 0


def test_a_large_cluster_is_divided_by_more_than_one_gpu_at_a_time() -> None:
    names = ("A100-80GB", "H100-SXM", "H20", "H800", "L40S")
    scheduler = HexScheduler(cluster(**dict.fromkeys(names, 64)), JOB)
    looked_at = list(itertools.islice(scheduler.divisions(), MAX_DIVISIONS + 1))
    assert MAX_DIVISIONS / 32 < len(looked_at) <= MAX_DIVISIONS
    assert {0, 64} <= {count for division in looked_at for count in division}


def test_every_gpu_is_used_once_and_the_sides_overlap() -> None:
    schedule = HexScheduler(cluster(H800=4, H20=4), JOB).find()
    assert schedule.step_s == max(schedule.train_s, schedule.rollout_s)
    training = sum(stage.num_gpus for stage in schedule.training.stages)
    generating = sum(
        need * number for replica, number in schedule.rollouts.replicas for _, need in replica.gpus
    )
    assert training <= sum(schedule.train_counts.values())
    assert generating <= 8 - sum(schedule.train_counts.values())
    assert sum(schedule.rollouts.rollouts) == JOB.rollouts_per_step


def test_the_update_crosses_the_slowest_link_or_takes_what_was_measured() -> None:
    # 7.62e9 x 2 bytes at 1.5 GB/s between types, 5 GB/s within one.
    across = HexScheduler(cluster(H800=4, H20=4), JOB).price((0, 4))
    assert across.update_s == pytest.approx(15.24 / 1.5)
    within = HexScheduler(cluster(H800=8), JOB).price((4,))
    assert within.update_s == pytest.approx(15.24 / 5)
    assert HexScheduler(cluster(H800=8), JOB, update_s=7.0).price((4,)).update_s == 7.0


def test_a_cluster_too_small_has_no_schedule() -> None:
    assert math.isinf(HexScheduler(cluster(H800=1), JOB).find().step_s)


def test_bisection_alone_is_no_better_than_the_search() -> None:
    scheduler = HexScheduler(cluster(H800=8, H20=8), JOB)
    assert scheduler.find().step_s <= scheduler.bisect().step_s


# --- training -------------------------------------------------------------------------------------


CLUSTER = Cluster(gpus={name: GPUS[name] for name in ("H20", "H800")}, counts={"H20": 8, "H800": 8})
JOB = SiteJob(
    model=MODELS["Qwen2.5-7B"],
    rollouts_per_step=512,
    prompt_tokens=200,
    completion_tokens=1000,
    max_tokens=8192,
)


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
