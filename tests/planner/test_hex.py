"""Divisions of unequal GPUs: equal to trying all on small clusters, fast on 56 GPUs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from echo.fleet.gpus import GPUS, MODELS
from echo.fleet.hetero import Cluster, HexJob, HexScheduler, Schedule
from tests.planner.test_hex_train import JOB


def cluster(**counts: int) -> Cluster:
    return Cluster(gpus={name: GPUS[name] for name in counts}, counts=counts)


def try_all(scheduler: HexScheduler) -> Schedule:
    """Return the best schedule of all divisions."""
    return min(map(scheduler.price, scheduler._divisions()), key=lambda s: s.rank)


@pytest.mark.slow
@pytest.mark.parametrize("num_clusters", [16, pytest.param(80, marks=pytest.mark.matrix)])
def test_small_clusters_equal_brute_force(num_clusters: int) -> None:
    rng = random.Random(0)
    for _ in range(num_clusters):
        counts = {"H20": rng.randint(0, 8), "H800": rng.randint(0, 8)}
        job = HexJob(
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

    def note(counts: tuple[int, ...]) -> Schedule:
        tried.append(counts)
        return price(counts)

    scheduler.price = note  # type: ignore[method-assign]
    schedule = scheduler.find()
    assert len(tried) < 2000, "each takes some milliseconds"
    # H800s train at a third of the price, H20s generate at a third.
    assert schedule.train_counts["H800"] >= 20
    assert schedule.train_counts["H20"] == 0


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
