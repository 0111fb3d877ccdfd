"""A version is installed whole and as it was published, or not at all."""

from __future__ import annotations

import pytest

from tests.promises.conftest import MakeWorld

pytestmark = pytest.mark.slow


def test_19_a_version_has_the_same_bytes_on_the_third_hop(make_world: MakeWorld) -> None:
    world = make_world(num_chunks=12)
    world.learner()
    world.relay()
    world.run(2.0)
    world.worker("w1", via=["r1"], serves=True)
    world.run(3.0)
    world.worker("w2", via=["r1"])
    world.run(12.0)
    assert max(world.num_hops(node) for node in ("r1", "w1", "w2")) == 3
    for node in ("r1", "w1", "w2"):
        assert world.is_bit_exact(node)
    newest = world.installed("w2")
    assert newest is not None
    assert newest[1] >= world.step - 2
    world.audit()


def test_20_a_wrong_chunk_is_neither_installed_nor_forwarded_and_its_sender_is_left(
    make_world: MakeWorld,
) -> None:
    world = make_world(num_chunks=12)
    world.learner()
    world.relay()
    world.run(2.0)
    world.worker("w1", via=["r1", "learner"])
    world.run_until(lambda: world.parent("w1") == "r1")
    world.corrupt_chunks("r1")
    before = world.installed("w1")
    world.run_until(lambda: world.parent("w1") != "r1", within_s=30.0)
    world.run_until(lambda: world.installed("w1") != before, within_s=30.0)
    assert world.is_bit_exact("w1")
    assert any("r1" in note for note in world.notes("w1"))
    world.audit()


def test_21_a_version_of_another_key_or_run_is_never_installed(make_world: MakeWorld) -> None:
    for name, run, is_foreign in (("w1", "run", True), ("w2", "another", False)):
        world = make_world()
        world.learner()
        world.worker(name)
        world.run_until(lambda: world.installed(name) is not None)  # noqa: B023
        world.stop_training()
        world.run(5.0)
        held = world.installed(name)
        world.publish_forged(run=run, is_foreign=is_foreign)
        world.run(20.0)
        assert world.installed(name) == held
        assert world.is_bit_exact(name)
