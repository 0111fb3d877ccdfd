"""A dead or slow node delays nobody else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.promises.conftest import MakeWorld
from tests.promises.world import Rated, World

pytestmark = pytest.mark.slow


def fleet(make_world: MakeWorld) -> World:
    """Return a learner, a relay, and three workers behind it, at work."""
    world = make_world(sample_s=0.6, train_s=0.6)
    world.learner()
    world.relay()
    for name in ("w1", "w2", "w3"):
        world.worker(name, via=["r1", "learner"], serves=True)
    world.run(10.0)
    return world


@pytest.mark.parametrize("victim", ["w1", pytest.param("w3", marks=pytest.mark.matrix), "r1"])
def test_25_a_frozen_node_delays_nobody_else(make_world: MakeWorld, victim: str) -> None:
    world = fleet(make_world)
    before = world.step
    world.run(10.0)
    usual = world.step - before
    world.freeze(victim)
    world.run(15.0)  # until it counts as dead, and its children have left it
    before = world.step
    world.run(10.0)
    assert world.step - before > usual / 2
    for name in {"w1", "w2", "w3"} - {victim}:
        version = world.installed(name)
        assert version is not None
        assert version[1] >= world.step - 3
    world.thaw(victim)
    world.run(12.0)
    assert world.is_admitted(victim)
    world.audit()


@pytest.mark.parametrize("places", [4, 16])
@pytest.mark.parametrize(
    ("max_staleness", "groups_per_step"),
    [(2, 4), pytest.param(0, 13, marks=pytest.mark.matrix)],
)
def test_25b_equal_workers_that_join_one_after_the_other_share_the_first_groups(
    make_world: MakeWorld, places: int, max_staleness: int, groups_per_step: int
) -> None:
    world = make_world(
        sync={"max_staleness": max_staleness},
        batch={"groups_per_step": groups_per_step},
        sampling={"max_completion_tokens": 100},
    )
    world.learner()
    for number in range(2):  # a group takes 10 s
        rated = Rated(tokens_per_s=10.0, places=places)
        world.worker(f"w{number}", rated=rated, build_s=4.0 * number)
    first = set(range((max_staleness + 1) * groups_per_step))
    world.run_until(lambda: first <= set(world.stored()))
    made = [world.num_stored(f"w{number}", of=first) for number in range(2)]
    assert abs(made[0] - made[1]) <= 1, made
    world.audit()


@pytest.mark.parametrize("hedge_factor", [2.0, False])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("num_tokens", [10, pytest.param(1, marks=pytest.mark.matrix)])
def test_25c_made_up_progress_holds_no_step_up(
    make_world: MakeWorld, hedge_factor: float | bool, is_first: bool, num_tokens: int
) -> None:
    world = make_world(
        sampling={"max_completion_tokens": 10},
        sync={"max_staleness": 0},
        batch={"groups_per_step": 4},
        leases={"hedge_factor": hedge_factor},
    )
    world.learner()
    honest = Rated(tokens_per_s=10.0)  # a group takes a second
    liar = Rated(tokens_per_s=10.0, places=64, slowdown_of=lambda key: 1e9)
    if not is_first:
        world.worker("honest", rated=honest)
        world.run_until(lambda: world.step >= 2)
    world.worker("liar", rated=liar)
    world.run_until(lambda: world.sampling("liar"))
    world.make_up_progress("liar", num_tokens=num_tokens)
    if is_first:
        world.worker("honest", rated=honest)
    for _ in range(3):
        step = world.step
        world.run_until(lambda step=step: world.step > step, within_s=14.0)  # type: ignore[misc]
    world.audit()


def test_26_a_silent_parent_is_left_and_no_held_chunk_is_asked_for_again(
    make_world: MakeWorld,
) -> None:
    world = make_world(image_bytes=40 * 4096)
    for source in ("learner", "r1"):
        world.link(source, "w1", bytes_per_s=80_000)
    world.link("learner", "r1", bytes_per_s=80_000)
    world.learner()
    world.relay()
    world.run(4.0)
    world.worker("w1", via=["r1", "learner"])
    world.run_until(lambda: world.parent("w1") == "r1" and world.installed("w1") is not None)
    held = world.installed("w1")
    world.run_until(lambda: 5 < world.chunks_held("w1")[0] < 35 and world.parent("w1") == "r1")
    world.freeze("r1")
    seconds = world.run_until(lambda: world.parent("w1") != "r1", within_s=30.0)
    assert seconds < 8.0
    world.run_until(lambda: world.installed("w1") != held, within_s=60.0)
    assert world.is_bit_exact("w1")
    assert world.requested_though_held("w1") == 0


def test_27_a_parent_that_announces_and_never_delivers_is_left(make_world: MakeWorld) -> None:
    world = make_world(image_bytes=12 * 4096)
    world.learner()
    world.relay()
    world.run(3.0)
    world.worker("w1", via=["r1", "learner"])
    world.run_until(lambda: world.parent("w1") == "r1")
    held = world.installed("w1")
    world.drop("Chunk", source="r1")
    world.run_until(lambda: world.parent("w1") != "r1", within_s=30.0)
    world.run_until(lambda: world.installed("w1") != held, within_s=30.0)
    assert world.is_bit_exact("w1")
    world.audit()


def test_28_a_slow_disk_delays_its_own_node_only(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world(image_bytes=2 * 4096, sample_s=0.5, train_s=0.5)
    world.learner()
    world.worker("w1", network={"store_dir": str(tmp_path / "versions")})
    world.worker("w2")
    world.run_until(lambda: world.step >= 4)
    before = world.step
    world.run(5.0)
    usual = world.step - before
    world.slow_disk("w1", 15.0)
    world.run(5.0)  # until what it can still sample with is too old
    held, before = world.installed("w1"), world.step
    for _ in range(10):
        world.run(0.5)
        assert world.heard_ago_s("w1") < 2.0, "its heartbeats wait for its disk"
    assert world.installed("w1") == held, "its disk is not slow enough to tell"
    assert world.step - before >= 0.7 * usual
    version = world.installed("w2")
    assert version is not None
    assert version[1] >= world.step - 1
    world.slow_disk("w1", 0.0)
    world.run_until(lambda: (world.installed("w1") or (0, 0))[1] >= world.step - 1)
    world.audit()


def test_29_the_learner_names_node_version_chunk_and_rate_that_it_waits_for(
    make_world: MakeWorld,
) -> None:
    world = make_world(image_bytes=30 * 4096)
    world.link("learner", "w1", bytes_per_s=20_000)
    world.learner()
    world.run_until(lambda: world.published())
    world.worker("w1")
    expected = (
        r"2 of 2 groups; w1 has 0 and fetches v0 \((\d+)/30 chunks from learner at (\S+) KiB/s\)"
    )
    world.run_until(lambda: re.fullmatch(expected, world.waiting_for()))
    match = re.fullmatch(expected, world.waiting_for())
    assert match is not None
    assert 0 < int(match[1]) < 30
    assert 10 < float(match[2]) < 30
