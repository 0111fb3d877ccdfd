"""Rounds of grants to real nodes, on virtual time: what speeds and copies save."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from echo.leases.grants.dispatch import Load
from echo.leases.worker.held import GroupState
from tests.promises.world import Rated, World

FAST, BOTH = {"fast": 100.0}, {"fast": 100.0, "slow": 10.0}
MEDIAN_TOKENS, MAX_TOKENS = 60, 1200
WARM_UP, NUM_STEPS, LIMIT_S = 4, 12, 300.0


def equal_shares(loads: Sequence[Load], *, num_promised: int) -> list[str]:
    """Give each group to the worker with the smallest share of its places in use: what to beat."""
    given_to: list[str] = []
    while True:
        able = [w for w in loads if w.has_space and w.most_promised > num_promised + len(given_to)]
        if not able:
            return given_to
        chosen = min(able, key=lambda each: (each.share, each.node_id))
        chosen.add()
        given_to.append(chosen.node_id)


def play(
    speeds: dict[str, float],
    *,
    max_staleness: int = 0,
    seed: int,
    by_speed: bool = True,
    hedge_factor: float | bool = 2.0,
    hiccups: float = 0.0,
    apart_s: float = 0.0,
    **pace: Any,
) -> tuple[World, float]:
    """Train with workers of these speeds, on groups whose lengths have a heavy tail.

    Args:
        speeds: of a group in a full engine, tokens per second.
        max_staleness: the bound.
        seed: of lengths and hiccups.
        by_speed: whether the faster get more groups, as they do.
        hedge_factor: as in the configuration.
        hiccups: share of the leases with which their workers are 20 times slower than usual.
        apart_s: how much later each worker installs a version than the one before it.
        pace: see `Rated`.

    Returns:
        the world; the mean seconds of a step after the first ones, infinite if there is none.
    """

    def slowdown_of(worker: str, key: tuple[int, int]) -> float:
        return 20.0 if random.Random(f"{seed}/{worker}/{key}").random() < hiccups else 1.0

    def length_of(group: int) -> int:
        drawn = random.Random(f"{seed}/{group}").lognormvariate(0.0, 1.0)
        return min(MAX_TOKENS, max(1, round(MEDIAN_TOKENS * drawn)))

    with (
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as patch,
        closing(
            World(
                Path(directory),
                seed=seed,
                train_s=0.5,
                image_bytes=4096,
                sampling={"max_completion_tokens": MAX_TOKENS},
                sync={"max_staleness": max_staleness},
                batch={"groups_per_step": 16},
                leases={"hedge_factor": hedge_factor},
                network={"lease_timeout_s": 60.0, "heartbeat_s": 1.0},
                checkpoint={"interval_steps": 1000},
            )
        ) as world,
    ):
        if not by_speed:
            patch.setattr("echo.leases.grants.rounds.by_finish", equal_shares)
        world.length_of = length_of
        world.learner()
        for place, (name, tokens_per_s) in enumerate(speeds.items()):
            rated = Rated(
                tokens_per_s=tokens_per_s,
                install_s=apart_s * place,
                slowdown_of=partial(slowdown_of, name),
                **pace,
            )
            world.worker(name, rated=rated)
        world.run_until(lambda: world.step >= WARM_UP or world.now > LIMIT_S, within_s=1e6)
        before, began = world.step, world.now
        world.run_until(lambda: world.step >= NUM_STEPS or world.now > LIMIT_S, within_s=1e6)
        world.audit()
    num_steps = world.step - before
    return world, (world.now - began) / num_steps if num_steps else math.inf


def mean_step(speeds: dict[str, float], *, by_speed: bool = True, **numbers: Any) -> float:
    hedge_factor = 2.0 if by_speed else False
    return play(speeds, by_speed=by_speed, hedge_factor=hedge_factor, **numbers)[1]


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_worker_ten_times_slower_delays_no_batch(max_staleness: int) -> None:
    alone = mean_step(FAST, max_staleness=max_staleness, seed=3)
    both = mean_step(BOTH, max_staleness=max_staleness, seed=3)
    assert both <= 1.08 * alone, "the slow worker makes it worse than none"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("places", "alone", "at_most"),
    [
        # Engines with places for a whole batch, slower the more is in them: a full one by 4 or 2.
        (16, 4.0, 0.95),
        pytest.param(16, 2.0, 0.98, marks=pytest.mark.matrix),
        # One that is not: using the others costs no more than the instants until they are ready.
        pytest.param(16, 1.0, 1.02, marks=pytest.mark.matrix),
        # Engines that a batch fills all.
        pytest.param(4, 2.0, 1.01, marks=pytest.mark.matrix),
    ],
)
def test_equal_workers_share_a_batch_though_they_install_it_one_after_the_other(
    places: int, alone: float, at_most: float, seed: int
) -> None:
    def seconds(*, by_speed: bool) -> float:
        return mean_step(
            {f"w{number}": 100.0 for number in range(4)},
            by_speed=by_speed,
            max_staleness=0,
            seed=seed,
            places=places,
            alone=alone,
            apart_s=0.1,
        )

    assert seconds(by_speed=True) <= at_most * seconds(by_speed=False)


@pytest.mark.matrix
@pytest.mark.parametrize(("speed", "at_most"), [(10.0, 1.05), (50.0, 1.15)])
def test_a_slower_worker_delays_no_batch_that_the_other_has_room_for(
    speed: float, at_most: float
) -> None:
    def seconds(speeds: dict[str, float]) -> float:
        return mean_step(speeds, max_staleness=0, seed=3, places=16, alone=2.0, apart_s=0.1)

    assert seconds({"fast": 100.0, "slow": speed}) <= at_most * seconds({"fast": 100.0})


@pytest.mark.matrix
def test_with_equal_shares_it_does() -> None:
    alone = mean_step(FAST, by_speed=False, max_staleness=0, seed=3)
    both = mean_step(BOTH, by_speed=False, max_staleness=0, seed=3)
    # Moves and copies for their age, which remain, spare it some of that.
    assert both > 1.5 * alone, "there is nothing to improve on: the test above shows nothing"


@pytest.mark.slow
def test_copies_save_a_batch_from_a_worker_that_is_suddenly_slow() -> None:
    fleet = {"a": 100.0, "b": 100.0, "slow": 10.0}
    _, without_s = play(fleet, seed=4, hiccups=0.03, hedge_factor=False)
    world, hedged_s = play(fleet, seed=4, hiccups=0.03)
    assert hedged_s < min(0.75 * without_s, 10.0)
    num_issued, num_won, num_cancelled = (
        world.count("learner", f"{name}")
        for name in ("hedges/issued", "hedges/won", "leases_cancelled")
    )
    assert 0 < num_won <= num_issued
    # Every copy makes one of its group's leases a loser; all of them were told, and stopped.
    held = [group for name in fleet for group in world.leased(name)]
    assert num_cancelled >= num_issued - (len(held) - len(set(held)))
    for name in fleet:
        assert not world.node(name).role.held.of(GroupState.UNWANTED)
