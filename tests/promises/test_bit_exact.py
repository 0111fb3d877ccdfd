"""A version is installed whole and as it was published, or not at all."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.promises.conftest import MakeWorld

pytestmark = pytest.mark.slow


def test_19_a_version_has_the_same_bytes_on_the_third_hop(make_world: MakeWorld) -> None:
    world = make_world(image_bytes=12 * 4096, train_s=0.6)
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


def test_19b_a_version_that_is_written_in_place_has_the_same_bytes_on_every_node(
    make_world: MakeWorld,
) -> None:
    image_bytes = 8 * 4096
    world = make_world(image_bytes=image_bytes, network={"codec": "delta"})
    world.learner()
    world.relay("r1")
    world.run(2.0)
    world.worker("w1", via=["r1"], in_place=True)
    world.worker("w2", via=["r1"])
    world.run_until(lambda: world.step >= 10)
    # The first version as a keyframe, ten deltas behind it, each once.
    assert world.bytes_received("r1") < 2 * image_bytes
    for node in ("r1", "w1", "w2"):
        assert world.is_bit_exact(node)
        assert (world.installed(node) or (0, 0))[1] >= world.step - 2
    assert world.num_in_place("w1") >= 5
    world.run(10.0)
    published = {tuple(r["version"]): r["image_hash"] for r in world.records("sealed")}
    for worker in ("w1", "w2"):
        audited = world.audited(worker)
        assert len(audited) >= 3
        assert audited.items() <= published.items()
    world.audit()


def test_20_a_wrong_chunk_is_neither_installed_nor_forwarded_and_its_sender_is_left(
    make_world: MakeWorld,
) -> None:
    world = make_world(image_bytes=12 * 4096)
    world.learner()
    world.relay()
    world.run(2.0)
    world.worker("w1", via=["r1", "learner"])
    world.run_until(lambda: world.parent("w1") == "r1")
    world.damage_chunks("r1", number=1_000_000)
    before = world.installed("w1")
    world.run_until(lambda: world.parent("w1") != "r1", within_s=30.0)
    world.run_until(lambda: world.installed("w1") != before, within_s=30.0)
    assert world.is_bit_exact("w1")
    assert any("r1" in note for note in world.notes("w1"))
    world.audit()


def test_20b_damaged_memory_is_found_and_what_lay_in_it_is_fetched_anew(
    make_world: MakeWorld,
) -> None:
    world = make_world(network={"codec": "delta"})
    world.learner()
    world.worker("w1", in_place=True)
    world.run_until(lambda: world.num_in_place("w1") >= 3)
    world.flip_bit("w1")
    assert not world.is_bit_exact("w1")
    signs = ("is not what the learner signed", "are not those that the learner had")
    world.run_until(lambda: any(sign in note for note in world.notes("w1") for sign in signs))
    before = world.installed("w1"), world.num_in_place("w1")
    world.run_until(lambda: world.is_bit_exact("w1"))
    world.run_until(lambda: world.num_in_place("w1") > before[1] + 2)
    assert world.is_bit_exact("w1")
    published = {tuple(r["version"]): r["image_hash"] for r in world.records("sealed")}
    assert world.audited("w1").items() <= published.items()
    assert world.is_alive("w1")
    world.audit()


@pytest.mark.parametrize(("run", "is_foreign"), [(None, True), ("another", False)])
def test_21_a_version_of_another_key_or_run_is_never_installed(
    make_world: MakeWorld, run: str | None, is_foreign: bool
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 2)
    world.train_s = math.inf
    world.run(5.0)
    held = world.installed("w1")
    world.publish_forged(run=run, is_foreign=is_foreign)
    world.run(20.0)
    assert world.installed("w1") == held
    assert world.is_bit_exact("w1")


def test_22_an_engine_that_refuses_a_version_keeps_the_one_before_and_says_so(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.worker("w2")
    world.refuse_version("w1", 2)
    seen = set()

    def look() -> bool:
        seen.add(world.installed("w1"))
        return world.step >= 6

    world.run_until(look)
    assert (1, 2) not in seen
    assert {(1, 1), (1, 3), (1, 4)} <= seen
    assert world.count("w1", "engine/installs_failed") == 1
    why = "the probe found other weights"
    assert f"cannot install v2, keeping v1: {why}" in world.notes("w1")
    # Its operator sees it at the learner: once in the log, in the view as long as it lasts, and in
    # the metrics.
    assert world.notes("learner").count(f"w1 cannot install v2 and keeps v1: {why}") == 1
    states = [n.state for shown in world.snapshots for n in shown.nodes if n.node_id == "w1"]
    assert any(state.startswith("refused v2, ") for state in states)
    assert not states[-1].startswith("refused")
    assert sum(row.get("engine/installs_failed", 0) for row in world.rows) == 1
    accepted = [record for record in world.records("accepted") if record["worker"] == "w1"]
    assert [1, 2] not in [version for record in accepted for version in record["versions"]]
    world.audit()


def test_22_a_worker_whose_engine_takes_no_version_is_told_of_and_counted_when_it_has_left(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.worker("w2")
    world.refuse_version("w2", 0)
    world.run_until(lambda: world.step >= 2)
    told = "\n".join(world.notes("learner"))
    assert "w2 cannot install v0 and has none: the probe found other weights" in told
    assert "w2 left: " in told
    assert world.rows[0]["engine/installs_failed"] == 1


def test_22b_an_engine_that_refuses_a_version_in_place_goes_on_with_the_next_ones(
    make_world: MakeWorld,
) -> None:
    world = make_world(network={"codec": "delta"})
    world.learner()
    world.worker("w1", in_place=True)
    world.worker("w2")
    world.refuse_version("w1", 2)
    seen = set()

    def look() -> bool:
        seen.add(world.installed("w1"))
        return world.step >= 10

    world.run_until(look)
    assert (1, 2) not in seen
    assert len([version for version in seen if version is not None and version[1] > 2]) >= 4
    refused = "cannot install v2, keeping v1: the probe found other weights"
    assert any(refused in note for note in world.notes("w1"))
    assert world.is_bit_exact("w1")
    world.audit()


def test_23_a_node_killed_in_the_middle_of_a_version_asks_only_for_what_is_missing(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    chunk_bytes = 4096
    store = {"store_dir": str(tmp_path / "versions")}
    world = make_world(image_bytes=60 * chunk_bytes, network={"codec": "full"})
    world.learner()
    world.run_until(lambda: world.published())
    world.link("learner", "r1", bytes_per_s=50_000)
    world.relay("r1", network=store)
    world.run_until(lambda: world.chunks_held("r1")[0] >= 15)
    world.kill("r1")
    held, of = world.chunks_held("r1")
    assert 15 <= held < of - 5
    world.relay("r1", network=store)
    world.run_until(lambda: world.installed("r1") == (1, 0))
    assert world.requested_though_held("r1") == 0
    assert world.bytes_received("r1") <= (of - held + 1) * chunk_bytes
    assert f"found v0: {held} of {of} chunks are right" in world.notes("r1")


def test_23b_a_node_killed_while_it_writes_a_version_in_place_fetches_a_whole_one(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    image_bytes = 8 * 4096
    at_kill = tmp_path / "at-kill"
    world = make_world(image_bytes=image_bytes, network={"codec": "delta"})
    world.learner()
    world.worker("w1", in_place=True, network={"store_dir": str(tmp_path / "versions")})
    world.keep_half_written("w1", at_kill)
    world.run_until(at_kill.exists)
    world.kill("w1")
    world.train_s = math.inf
    world.worker("w1", in_place=True, network={"store_dir": str(at_kill)})
    world.run_until(lambda: world.installed("w1") == world.published()[-1])
    assert world.is_bit_exact("w1")
    assert not any("chunks are right" in note for note in world.notes("w1"))
    assert world.bytes_received("w1") > image_bytes / 2, "as a keyframe or in full"
