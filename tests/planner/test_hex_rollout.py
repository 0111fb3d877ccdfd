"""The knapsack of replicas against brute force over the bilinear programme as printed."""

from __future__ import annotations

import itertools
import random

import pytest

from echo.fleet.hetero import Replica, RolloutPlan, choose_replicas, possible_replicas
from tests.planner.test_hex_train import CLUSTER, JOB


def least_theta(replicas: list[Replica], counts: dict[str, int], num_rollouts: int) -> float:
    """Eq. 2 by trying every number of replicas; for fixed numbers theta = B / sum(h y)."""
    limits = [min(counts[name] // need for name, need in replica.gpus) for replica in replicas]
    best = float("inf")
    for numbers in itertools.product(*(range(limit + 1) for limit in limits)):
        used = {
            name: sum(dict(r.gpus).get(name, 0) * n for r, n in zip(replicas, numbers, strict=True))
            for name in counts
        }
        rate = sum(r.tokens_per_s * n for r, n in zip(replicas, numbers, strict=True))
        if rate and all(used[name] <= counts[name] for name in counts):
            best = min(best, num_rollouts / rate)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_knapsack_is_the_programme(seed: int) -> None:
    rng = random.Random(seed)
    counts = {"A": rng.randint(0, 6), "B": rng.randint(0, 6)}
    replicas = [
        Replica(
            gpus=tuple(
                (name, rng.randint(1, 4)) for name in rng.sample(["A", "B"], rng.randint(1, 2))
            ),
            tensor_parallel=1,
            tokens_per_s=rng.uniform(10, 100),
        )
        for _ in range(4)
    ]
    plan = choose_replicas(replicas, counts, 100)
    best = least_theta(replicas, counts, 100)
    if best == float("inf"):
        assert plan == RolloutPlan()
    else:
        assert 100 / plan.tokens_per_s == pytest.approx(best)
        assert sum(plan.rollouts) == 100


def test_a_slow_pair_loses_against_two_singles() -> None:
    single = Replica(gpus=(("A", 1),), tensor_parallel=1, tokens_per_s=10)
    double = Replica(gpus=(("A", 2),), tensor_parallel=2, tokens_per_s=19)
    plan = choose_replicas([single, double], {"A": 3}, 30)
    assert plan.replicas == ((single, 3),)
    assert plan.rollouts == (30,)
    assert choose_replicas([double], {"A": 1}, 30) == RolloutPlan()


def test_possible_replicas_stay_on_one_type() -> None:
    found = possible_replicas(CLUSTER, JOB)
    assert {len(replica.gpus) for replica in found} == {1}
    assert {replica.tensor_parallel for replica in found} == {1, 2, 4, 8}
