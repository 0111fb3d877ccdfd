"""Every queue, buffer, retry and wait has a bound, refuses there, counts, and recovers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.promises.conftest import MakeWorld

pytestmark = pytest.mark.slow


def test_30_a_full_outbox_stops_leases_and_recovers(make_world: MakeWorld) -> None:
    world = make_world(
        sample_s=0.1,
        sync={"max_staleness": 6},
        batch={"groups_per_step": 4},
        checkpoint={"interval_steps": 100},
    )
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 2)
    lost = world.drop("Ack")
    world.run(15.0)
    assert world.undelivered("w1") == world.outbox_bound("w1")
    assert world.capacity("w1") == 0
    before = world.step
    world.stop_dropping()
    world.run_until(lambda: world.undelivered("w1") == 0)
    world.run_until(lambda: world.step > before + 3)
    assert lost
    world.audit()


def test_30b_what_waits_at_the_learner_is_bounded_where_it_does_not_train(
    make_world: MakeWorld,
) -> None:
    world = make_world(sample_s=0.05, sync={"max_staleness": 2}, batch={"groups_per_step": 4})
    world.learner()
    for name in ("w1", "w2", "w3", "w4"):
        world.worker(name)
    world.run_until(lambda: world.step >= 2)
    world.train_s = math.inf
    world.run(15.0)
    assert 0 < world.num_waiting() <= (2 + 1) * 4
    assert world.count("learner", "discarded/buffer_full") == 0
    world.audit()


def test_30c_a_node_without_space_keeps_what_it_has_and_its_child_finds_another_parent(
    make_world: MakeWorld,
) -> None:
    image_bytes = 8 * 4096
    world = make_world(image_bytes=image_bytes)
    world.learner()
    world.relay("r1", network={"store_bytes": 3 * image_bytes // 2})
    world.run(1.0)
    world.worker("w1", via=["r1"])
    world.worker("w2")
    world.run_until(lambda: world.step >= 6)
    assert any(
        "keeping the versions" in note and "network.store_bytes" in note
        for note in world.notes("r1")
    )
    assert world.installed("r1") == (1, 0)
    assert world.is_bit_exact("r1")
    world.run_until(lambda: (world.installed("w1") or (0, 0))[1] >= world.step - 1)
    world.enlarge_store("r1", 4 * image_bytes)
    world.run_until(lambda: (world.installed("r1") or (0, 0))[1] >= world.step - 1)
    assert world.is_bit_exact("r1")
    world.audit()


@pytest.mark.parametrize("lacking", ["store", "disk"])
def test_30d_a_node_that_lacked_space_goes_on_by_its_own_timer(
    make_world: MakeWorld, lacking: str, tmp_path: Path
) -> None:
    image_bytes = 8 * 4096
    # Nothing else happens for half a minute: no version, no heartbeat.
    world = make_world(
        image_bytes=image_bytes,
        train_s=math.inf,
        network={"heartbeat_s": 30.0, "dead_after_s": 100.0, "lease_timeout_s": 1000.0},
    )
    world.learner()
    world.run_until(world.published)
    store_bytes = image_bytes // 2 if lacking == "store" else 4 * image_bytes
    world.relay(network={"store_bytes": store_bytes, "store_dir": str(tmp_path / "versions")})
    world.fill_disk("r1", of="versions" if lacking == "disk" else "")
    world.run_until(lambda: any("trying again later" in note for note in world.notes("r1")))
    began = world.now
    world.run(4.0)
    assert world.installed("r1") is None
    world.enlarge_store("r1", 4 * image_bytes)
    world.fill_disk("r1", of="")
    world.run_until(lambda: world.installed("r1") == (1, 0))
    assert world.now - began < 20.0, "it has waited for a heartbeat"
    assert world.is_bit_exact("r1")


def test_31_a_node_without_a_learner_says_so_and_ends_after_the_bound(
    make_world: MakeWorld,
) -> None:
    world = make_world(network={"reconnect_for_s": 20.0})
    world.worker("w1", via=["r1", "learner"])
    world.run(19.0)
    assert world.end("w1") is None
    assert any("giving up in" in note for note in world.notes("w1"))
    world.run(2.0)
    assert world.has_failed("w1")
    _, message = world.end("w1") or ("", "")
    assert "tcp://learner:7700" in message
    assert "20 s" in message
