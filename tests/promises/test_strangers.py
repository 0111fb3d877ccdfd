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
        ({"change": {"reward": float("inf")}}, "malformed"),
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


@pytest.mark.slow
def test_39d_a_worker_that_states_other_log_probabilities_is_set_aside_by_name(
    make_world: MakeWorld,
) -> None:
    world = make_world(batch={"groups_per_step": 12}, sync={"max_staleness": 1})
    world.learner()
    for name, noise in (("w1", 0.02), ("w2", 0.03), ("liar", 0.02)):
        world.worker(name, sample_s=0.1)
        world.state_logprobs(name, noise=noise, lie=3.0 if name == "liar" else 0.0)
    world.run_until(lambda: world.notes_of("is set aside"))
    [note] = world.notes_of("is set aside")
    assert note.startswith("liar is set aside for 10min: the log-probabilities that it states")
    row = world.rows[-1]
    assert row["workers/mismatch_kl"]["liar"] > 1 > 0.1 > row["workers/mismatch_kl"]["w1"]
    assert row["workers/logprob_difference"]["liar"] == pytest.approx(3.0, abs=0.05)
    assert {*row["workers/reward"]} == {"w1", "w2", "liar"}
    world.run(1.0)
    before, step = world.num_granted("liar"), world.step
    world.run(10.0)
    assert world.num_granted("liar") == before
    assert world.step > step + 3
    world.audit()


@pytest.mark.slow
def test_39e_honest_workers_of_other_data_types_and_ages_are_not_set_aside(
    make_world: MakeWorld,
) -> None:
    """One alone of its data type, and one whose weights come late."""
    world = make_world(batch={"groups_per_step": 12}, sync={"max_staleness": 4})
    world.learner()
    for name in ("w1", "w2", "w3"):
        world.worker(name, sample_s=0.1)
        world.state_logprobs(name, noise=0.02)
    world.link("learner", "w3", bytes_per_s=20_000)
    world.worker("coarse", sample_s=0.1, engine="transformers bfloat16")
    world.state_logprobs("coarse", noise=0.5)
    told = "is set aside"
    world.run_until(lambda: world.num_granted("coarse") > 80 or world.notes_of(told))
    assert world.notes_of(told) == []
    assert world.rows[-1]["workers/mismatch_kl"]["coarse"] > 0.01
