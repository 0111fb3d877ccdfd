"""Grants just in time beside eager ones, in whole fleets on virtual time."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from tests.sim.scenarios import make_job, make_offer, make_scenario, simulate

BOUND = 6


def least_staleness(broadcast: float, window: float) -> float:
    """The staleness that is forced, if a version is published after every step.

    A token that is sampled u steps before its batch is trained has a staleness of ceil(broadcast +
    u). The tokens of a batch are sampled within `window`. Both are in steps.
    """
    return fmean(math.ceil(broadcast + window * (part + 0.5) / 50) for part in range(50))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_rollouts_are_as_fresh_as_they_can_be_and_nobody_waits_for_it(seed: int) -> None:
    """Four workers that are twice as fast as the learner needs."""
    offer = make_offer(tokens_per_s=80.0, concurrency=4, can_listen=True)
    job = make_job(max_staleness=BOUND)
    found = {}
    for is_eager in (True, False):
        scenario = make_scenario(
            offer, job=job, num_steps=24, seed=seed, is_eager=is_eager, alone_speedup=100.0
        )
        found[is_eager], _ = simulate(scenario)
    eager, late = found[True], found[False]
    per_s = scenario.fleet.rate(job, scenario.counts)
    assert per_s == pytest.approx(2 * job.rollouts_per_step / job.train_s)
    group_s = offer.count * job.group_size / per_s
    window_s = max(job.rollouts_per_step / per_s, group_s) + job.completion_spread * group_s
    least = least_staleness(late.broadcast_s / job.train_s, window_s / job.train_s)
    assert late.is_complete
    assert eager.mean_staleness > BOUND - 1
    assert late.mean_staleness <= least + 0.3
    assert late.idle_share <= eager.idle_share + 0.01
    assert late.discarded.get("stale", 0) <= eager.discarded.get("stale", 0)
