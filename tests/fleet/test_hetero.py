"""Divisions of unequal GPUs between training and generation, as Echo runs them."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from echo.fleet.gpus import GPUS, MODELS, TRAIN_EFFICIENCY, train_flops
from echo.fleet.hetero import (
    Cluster,
    Replica,
    RolloutPlan,
    SiteJob,
    choose_replicas,
    find_division,
    largest_remainder,
    possible_replicas,
    price,
    train_step_s,
    training_sizes,
)

JOB = SiteJob(
    model=MODELS["Qwen2.5-7B"],
    rollouts_per_step=512,
    prompt_tokens=200,
    completion_tokens=1000,
    max_tokens=8192,
)


def cluster(**counts: int) -> Cluster:
    return Cluster(gpus={name: GPUS[name] for name in counts}, counts=counts)


CLUSTER = cluster(H20=8, H800=8)


# --- division -------------------------------------------------------------------------------------


def test_the_gpus_that_do_better_at_it_train_and_all_others_generate() -> None:
    division = find_division(cluster(H20=32, H800=8), JOB)
    assert division is not None
    # An H800 has five times the arithmetic of an H20, and less memory bandwidth.
    assert division.train_gpu == "H800"
    generating = {
        name: sum(size * number for r, number in division.rollouts.replicas for n, size in r.gpus
                  if n == name)
        for name in ("H20", "H800")
    }  # fmt: skip
    assert generating["H20"] == 32
    assert generating["H800"] <= 8 - division.num_train_gpus
    assert sum(division.rollouts.rollouts) == JOB.rollouts_per_step
    assert division.step_s == max(division.train_s, division.rollout_s)


def test_no_other_division_that_echo_runs_is_faster() -> None:
    site = cluster(H20=4, H800=10)
    best = find_division(site, JOB)
    assert best is not None
    replicas = possible_replicas(site, JOB)
    others = [
        price(site, JOB, replicas, name, number)
        for name, count in site.counts.items()
        for number in range(1, count + 1)
        if number <= GPUS[name].num_per_node
    ]
    assert best.step_s == min(other.step_s for other in others)


def test_training_takes_some_of_one_machine_or_whole_ones() -> None:
    assert list(training_sizes(GPUS["H800"], 5)) == [1, 2, 3, 4, 5]
    assert list(training_sizes(GPUS["H800"], 26)) == [*range(1, 9), 16, 24]
    assert list(training_sizes(GPUS["H800"], 0)) == []


@pytest.mark.parametrize("counts", [{"H800": 1}, {"H800": 2}, {"H20": 0, "H800": 0}])
def test_a_cluster_too_small_has_no_division(counts: dict[str, int]) -> None:
    # Two of 80 GB must train, for 7.62e9 x 16 bytes are 122 GB, and one more must generate.
    assert find_division(cluster(**counts), JOB) is None


def test_the_update_crosses_the_slowest_link() -> None:
    # 7.62e9 x 2 bytes at 1.5 GB/s between types, 5 GB/s within one.
    replicas = possible_replicas(CLUSTER, JOB)
    across = price(CLUSTER, JOB, replicas, "H800", 4)
    assert across.update_s == pytest.approx(15.24 / 1.5)
    alone = cluster(H800=8)
    within = price(alone, JOB, possible_replicas(alone, JOB), "H800", 4)
    assert within.update_s == pytest.approx(15.24 / 5)


# --- training -------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    # 8 H800 compute at 40 % of 8 x 756e12; the weights of a micro-batch pass faster at 200 GB/s.
    flops = train_flops(JOB.model, num_tokens=512 * 1200, mean_tokens=1200)
    by_hand = flops / (8 * 756e12 * TRAIN_EFFICIENCY)
    assert train_step_s(CLUSTER, JOB, "H800", 8) == pytest.approx(by_hand)
    # 16 in two machines: 2.34 micro-batches pass the weights three times, 15/16 each, at 5 GB/s.
    by_hand = 512 * 1200 / 16 / 16384 * 3 * 7.62e9 * 2 * 15 / 16 / 5e9
    assert train_step_s(CLUSTER, JOB, "H800", 16) == pytest.approx(by_hand)


def test_a_model_that_does_not_fit_is_sharded() -> None:
    assert math.isinf(train_step_s(CLUSTER, JOB, "H800", 1))  # 7.62e9 x 16 bytes are 122 GB
    assert math.isinf(train_step_s(CLUSTER, JOB, "H800", 2))  # 61 of 80 GB leave too little
    assert train_step_s(CLUSTER, JOB, "H800", 3) < math.inf
    larger = replace(JOB, model=MODELS["Qwen2.5-14B"])
    assert math.isinf(train_step_s(CLUSTER, larger, "H800", 3))


def test_whole_things_are_shared_by_largest_remainder() -> None:
    # 10 x 2/3 = 6.67 and 3.33: the sixth remainder goes to the first.
    assert largest_remainder(10, [2, 1]) == [7, 3]
    assert largest_remainder(28, [1, 1, 1]) == [10, 9, 9]


# --- rollouts -------------------------------------------------------------------------------------


def least_theta(replicas: list[Replica], count: int, num_rollouts: int) -> float:
    """Eq. 2 by trying every number of replicas; for fixed numbers theta = B / sum(h y)."""
    sizes = [replica.gpus[0][1] for replica in replicas]
    best = float("inf")
    for numbers in itertools.product(*(range(count // size + 1) for size in sizes)):
        rate = sum(r.tokens_per_s * n for r, n in zip(replicas, numbers, strict=True))
        if rate and sum(size * n for size, n in zip(sizes, numbers, strict=True)) <= count:
            best = min(best, num_rollouts / rate)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_knapsack_is_the_programme(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(0, 12)
    replicas = [
        Replica(
            gpus=(("A", rng.randint(1, 4)),), tensor_parallel=1, tokens_per_s=rng.uniform(10, 100)
        )
        for _ in range(4)
    ]
    plan = choose_replicas(replicas, count, 100)
    best = least_theta(replicas, count, 100)
    if best == float("inf"):
        assert plan == RolloutPlan()
    else:
        assert 100 / plan.tokens_per_s == pytest.approx(best)
        assert sum(plan.rollouts) == 100
        assert sum(replica.gpus[0][1] * n for replica, n in plan.replicas) <= count


def test_a_slow_pair_loses_against_two_singles() -> None:
    single = Replica(gpus=(("A", 1),), tensor_parallel=1, tokens_per_s=10)
    double = Replica(gpus=(("A", 2),), tensor_parallel=2, tokens_per_s=19)
    plan = choose_replicas([single, double], 3, 30)
    assert plan.replicas == ((single, 3),)
    assert plan.rollouts == (30,)
    assert choose_replicas([double], 1, 30) == RolloutPlan()


def test_possible_replicas_stay_on_one_type() -> None:
    found = possible_replicas(CLUSTER, JOB)
    assert {len(replica.gpus) for replica in found} == {1}
    assert {replica.tensor_parallel for replica in found} == {1, 2, 4, 8}
