"""No token older than S optimizer steps is trained, and honest workers lose nothing to age."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from tests.promises.conftest import MakeWorld

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("bound", [0, pytest.param(3, marks=pytest.mark.matrix), 6])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_01_no_token_older_than_the_bound_is_trained(
    make_world: MakeWorld, bound: int, seed: int
) -> None:
    world = make_world(
        seed=seed,
        delay_s=0.02,
        jitter_s=1.5,
        sample_s=0.8,
        train_s=0.2,
        sync={"max_staleness": bound},
    )
    world.learner()
    for name in ("w1", "w2", "w3"):
        world.worker(name)
    world.run(40.0)
    # Results that are sent again later are older when they arrive.
    world.drop("Deliver", times=world.chance.randrange(5, 10))
    world.run(60.0)
    ages = world.ages()
    assert min(ages) >= 0
    assert max(ages) <= bound
    assert len(ages) > 15
    assert bound == 0 or max(ages) > 0, "nothing was ever old: this proves nothing"
    world.audit()


def test_01b_a_group_held_by_a_frozen_worker_is_not_trained_beyond_the_bound(
    make_world: MakeWorld,
) -> None:
    world = make_world(sample_s=0.5, train_s=0.1, sync={"max_staleness": 1})
    world.learner()
    world.worker("w1")
    world.worker("w2")
    world.run(5.0)
    world.freeze("w1")
    before = world.step
    world.run_until(lambda: world.step > before + 5)
    world.thaw("w1")
    world.run(10.0)
    assert max(world.ages()) <= 1
    world.audit()


@pytest.mark.parametrize("bound", [0, pytest.param(1, marks=pytest.mark.matrix), 4])
def test_02_honest_workers_lose_nothing_to_age(make_world: MakeWorld, bound: int) -> None:
    # Weights take a while, so that workers hold older ones than the learner's.
    world = make_world(
        train_s=0.7,
        bytes_per_s=32_000,
        image_bytes=6 * 4096,
        sync={"max_staleness": bound},
        batch={"groups_per_step": 4},
    )
    world.learner()
    world.relay()
    for name in ("w1", "w2", "w3", "w4"):
        world.worker(name, via=["r1", "learner"])
    world.run(20.0)
    assert len(world.trained()) >= 30
    assert [record["reason"] for record in world.records("discarded")] == []
    counts = [
        world.count("learner", f"tokens/{name}") for name in ("sampled", "trained", "too_old")
    ]
    assert counts[0] >= counts[1] > counts[2] == 0
    world.audit()


def test_03_a_group_that_ages_before_its_step_ends_with_its_reason(make_world: MakeWorld) -> None:
    world = make_world(
        sample_s=0.5,
        sync={"max_staleness": 1},
        batch={"groups_per_step": 4},
        network={"lease_timeout_s": 1000.0},
        leases={"hedge_factor": False},
    )
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 3)
    world.hang_engine("w1")
    world.run(1.0)
    held = max(world.leased("w1"))
    assert world.step >= 3
    outcome, reason = world.deliver(held, version=(1, 1))  # before somebody else samples it
    assert (outcome, reason) == ("refused", "stale")
    assert world.count("learner", "tokens/too_old") > 0
    world.run(20.0)
    assert max(world.ages()) <= 1
    world.audit()


def test_05_with_a_bound_of_zero_only_the_newest_version_samples(make_world: MakeWorld) -> None:
    # What sync.mode = "pull" comes to; weights take as long as a step here.
    world = make_world(
        sample_s=0.2,
        train_s=0.5,
        bytes_per_s=32_000,
        image_bytes=6 * 4096,
        sync={"max_staleness": 0},
    )
    world.learner()
    for name in ("w1", "w2", "w3"):
        world.worker(name)
    world.run_until(lambda: world.step >= 15, within_s=120.0)
    for record in world.records("trained"):
        for group in record["groups"]:
            assert world.versions_of(group) == [(1, record["consumed_at"])]
    assert [record["reason"] for record in world.records("discarded")] == []
    world.audit()


def test_06_rollouts_of_an_abandoned_lineage_are_refused_with_that_reason(
    make_world: MakeWorld,
) -> None:
    world = make_world(sample_s=0.5, sync={"max_staleness": 4}, checkpoint={"interval_steps": 100})
    world.learner()
    world.worker("w1")
    world.worker("w2")
    world.run(8.0)
    assert world.step >= 3
    world.kill("learner")
    world.run(4.0)
    world.learner()
    world.run(12.0)
    assert world.count("learner", "refused/abandoned_version") >= 1
    assert world.installed("w1") is not None
    assert world.installed("w1")[0] == 2  # type: ignore[index]
    world.audit()


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [100, pytest.param(300, marks=pytest.mark.matrix)])
def test_04_no_two_versions_are_further_apart_than_a_moving_bound_allows(
    make_world: MakeWorld, num_steps: int
) -> None:
    world = make_world(
        noise=0.2,
        jitter_s=0.05,
        sync={"max_staleness": 3, "publish_period": "auto", "adaptive": True},
        checkpoint={"interval_steps": 100},
        network={"chunk_bytes": 65536},  # a version is one chunk
    )
    # By turns the learner finds itself too far off what was sampled, and near enough.
    world.metrics_of = lambda step: {"mismatch_kl": 10.0 if step // 25 % 2 else 0.0}
    world.learner()
    world.worker("w1")

    def has_reached(step: int) -> bool:
        return world.step >= step

    for bytes_per_s in (1e6, 6e4, 1.5e5, 4e4, 1e6):
        world.link("learner", "w1", bytes_per_s=bytes_per_s)
        until = world.step + num_steps // 5
        world.run_until(partial(has_reached, until), within_s=600.0)
    decisions = world.records("bound")
    assert {record["bound"] > record["before"] for record in decisions} == {True, False}
    told = {row["staleness/bound"] for row in world.rows}
    assert told == {3, *(record["bound"] for record in decisions)}
    bound, steps = 3, [step for _, step in world.published()]
    gaps = set()
    for before, after in itertools.pairwise(steps):
        known = [record["bound"] for record in decisions if record["step"] < after]
        bound = known[-1] if known else 3
        assert after - before <= bound + 1, f"v{before} and v{after} under the bound {bound}"
        gaps.add(after - before)
    assert len(gaps) > 1, "the period never moved"
    world.audit()
