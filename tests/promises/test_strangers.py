"""Strangers are refused, counted and logged, nonsense too; others are served."""

from __future__ import annotations

import pytest

from tests.promises.conftest import MakeWorld


def test_38_hashes_that_differ_are_refused_with_both_values_and_counted(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1", model="cccc")
    world.worker("w2")
    world.run(5.0)
    reason, message = world.end("w1") or ("", "")
    assert reason == "digest_mismatch"
    assert "cccc" in message
    assert "the learner m." in message
    assert world.has_failed("w1")
    assert world.count("learner", "refused/digest_mismatch") == 1, "it is not asked again and again"
    world.run(10.0)
    assert world.trained()


def test_38b_another_run_at_the_learners_address_ends_the_node(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run(3.0)
    world.kill("learner")
    world.learner(run={"name": "another"})
    world.run(10.0)
    reason, _ = world.end("w1") or ("", "")
    assert reason == "another_run"


def test_39_garbage_is_counted_and_the_others_are_served(make_world: MakeWorld) -> None:
    world = make_world(seed=1)
    world.learner()
    world.relay()
    world.worker("w1", via=["r1", "learner"])
    world.run(5.0)
    for node in ("learner", "r1", "w1"):
        assert world.say_garbage(node, times=60) == 0
        assert world.count(node, "protocol_errors") == 60
    before = len(world.trained())
    world.run(10.0)
    assert len(world.trained()) > before + 10
    world.audit()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": 3}, "group_size"),
        ({"version": (1, 3)}, "version_from_the_future"),
        ({"version": (2, 0)}, "abandoned_version"),
        ({"change": {"reward": float("nan")}}, "malformed"),
    ],
)
def test_39b_results_that_cannot_be_true_are_refused_with_their_reason(
    make_world: MakeWorld, change: dict[str, object], reason: str
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.hang_engine("w1")
    world.run_until(lambda: 0 in world.leased("w1"))
    assert world.deliver(0, **change) == ("refused", reason)  # type: ignore[arg-type]
    assert world.deliver(0)[0] == "stored"


def test_39c_nobody_delivers_under_the_lease_or_the_name_of_another(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.hang_engine("w1")
    world.run_until(lambda: 0 in world.leased("w1"))
    world.worker("w2")
    world.hang_engine("w2")
    world.run_until(lambda: world.is_admitted("w2"))
    links = world.peer_of("w1"), world.peer_of("w2")
    assert world.deliver(0, worker="w2") == ("refused", "not_leased")
    assert world.deliver(0, worker="w1", over="w2") == ("ignored", "")
    world.claim("w1", over="w2")
    world.leave("w1", over="w2")
    assert (world.peer_of("w1"), world.peer_of("w2")) == links
    assert 0 in world.leased("w1")
    assert world.deliver(0)[0] == "stored"
