"""Each group is trained at most once, and an acknowledged group comes to exactly one end."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.promises.conftest import MakeWorld
from tests.promises.world import Rated, World


def finish(world: World) -> None:
    """Let a learner go on for four steps, and find that every group has come to one end."""
    world.kill("learner")
    world.learner(run={"max_steps": world.step + 4})
    world.run_until(lambda: world.end("learner"))
    assert world.end("learner") == ("finished", "")
    world.audit(is_finished=True)


def test_07_a_grant_is_on_record_before_it_is_sent(make_world: MakeWorld) -> None:
    """So is a version before it is announced."""
    world = make_world(checkpoint={"interval_steps": 1})
    world.learner()
    seen: list[int] = []
    announced: set[tuple[int, int]] = set()

    def look(sender: str, receiver: str, message: Any) -> None:
        if type(message).__name__ == "Grant":
            known = {(r["group"], r["attempt"]) for r in world.records("granted")}
            for lease in message.leases:
                assert (lease.group_id, lease.attempt) in known
                seen.append(lease.group_id)
        if type(message).__name__ == "Announce" and sender == "learner":
            version = message.version.lineage, message.version.step
            assert version in world.published(), "announced before it was on record"
            announced.add(version)

    with world.watch(look):
        world.worker("w1")
        world.run(5.0)
    assert seen
    assert len(announced) > 1
    # Killed after the record and before anything came of it: its result is an honest one, and
    # where the group was granted again meanwhile, a benign duplicate.
    world.hang_engine("w1")
    world.run(1.0)
    held, version = max(world.leased("w1")), world.installed("w1")
    world.kill("learner")
    world.learner()
    world.run(3.0)
    assert version is not None
    assert world.deliver(held, version=version) == ("stored", "")
    world.run(1.0)
    assert world.deliver(held, attempt=1, version=version) == ("duplicate", "")
    world.audit()


@pytest.mark.slow
def test_08_a_group_is_acknowledged_only_when_it_is_durable_and_once(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.learner()
    acks: dict[tuple[str, int], list[str]] = {}

    def look(sender: str, receiver: str, message: Any) -> None:
        if type(message).__name__ == "Ack" and message.outcome == "accepted":
            assert message.group_id in world.durable, "acknowledged before it was stored"
            acks.setdefault((receiver, message.group_id), []).append(message.outcome)

    with world.watch(look):
        world.worker("w1")
        world.worker("w2")
        world.run(6.0)
    assert len(acks) > 20
    assert [key for key, found in acks.items() if len(found) > 1] == []
    world.audit()


def test_09_the_first_valid_result_of_a_group_wins_whatever_its_attempt(
    make_world: MakeWorld,
) -> None:
    world = make_world(network={"lease_timeout_s": 2.0})
    world.learner()
    world.worker("w1", sample_s=math.inf)
    world.run_until(lambda: 0 in world.leased("w1"))
    world.run_until(lambda: 0 not in world.leased("w1"))
    world.worker("w2", sample_s=math.inf)
    world.run_until(lambda: 0 in world.leased("w2"))
    assert world.deliver(0, worker="w1", attempt=0, size=3) == ("refused", "group_size")
    assert world.deliver(0, worker="w1", attempt=0)[0] == "stored"
    world.run(0.1)
    assert world.deliver(0, worker="w2", attempt=1) == ("duplicate", "")
    assert world.deliver(0, worker="w1", attempt=0) == ("duplicate", "")
    world.run(5.0)
    assert world.trained().count(0) <= 1
    world.audit()


def test_10_a_hedged_group_counts_once_and_its_loser_is_told(make_world: MakeWorld) -> None:
    world = make_world(
        sync={"max_staleness": 0},
        batch={"groups_per_step": 12},
        network={"lease_timeout_s": 200.0},
    )
    world.learner()
    world.worker("fast")
    world.worker("slow", sample_s=30.0)
    world.run_until(lambda: world.count("learner", "leases_cancelled"), within_s=100.0)
    world.run(0.1)
    cancelled = world.records("cancelled")[-1]
    [first] = [r for r in world.records("accepted") if r["group"] == cancelled["group"]]
    assert first["worker"] != cancelled["worker"]
    loser = cancelled["worker"]
    world.run_until(lambda: cancelled["group"] not in world.sampling(loser))
    world.run_until(lambda: world.step >= 3, within_s=200.0)
    assert world.count(loser, "cancelled") >= 1
    trained = world.trained()
    assert len(trained) == len(set(trained))
    assert cancelled["group"] in trained
    world.audit()


@pytest.mark.parametrize(
    "kind",
    [
        "Reclaim",
        "Partial",
        *(pytest.param(k, marks=pytest.mark.matrix) for k in ("Heartbeat", "Grant")),
    ],
)
def test_10b_a_group_that_moves_is_trained_once_whatever_is_lost(
    make_world: MakeWorld, kind: str
) -> None:
    world = make_world(
        sampling={"max_completion_tokens": 40},
        sync={"max_staleness": 0},
        batch={"groups_per_step": 8},
    )
    world.learner()
    world.worker("w1", rated=Rated(tokens_per_s=10.0, places=8))
    world.run_until(lambda: len(world.sampling("w1")) == 8)
    world.run(0.6)  # they are listed
    lost = world.drop(
        kind,
        times=1 if kind == "Reclaim" else 3,
        source="learner" if kind in ("Reclaim", "Grant") else "w1",
    )
    world.worker("w2", rated=Rated(tokens_per_s=10.0, places=8))
    world.run_until(lambda: world.step >= 3)
    assert len(lost) == (1 if kind == "Reclaim" else 3)
    assert world.count("learner", "leases_moved") >= 4
    trained = world.trained()
    assert len(trained) == len(set(trained)) == 8 * world.step
    world.audit()


def test_11_leases_of_a_silent_worker_expire_and_its_late_result_is_judged(
    make_world: MakeWorld,
) -> None:
    world = make_world(sample_s=1.0, sync={"max_staleness": 2}, network={"lease_timeout_s": 6.0})
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.leased("w1"))
    held = world.leased("w1")
    world.freeze("w1")
    world.worker("w2")
    world.run_until(lambda: held <= {r["group"] for r in world.records("accepted")})
    again = {r["group"] for r in world.records("granted") if r["attempt"] > 0}
    assert held & again, "none was granted again"
    world.thaw("w1")
    world.run(10.0)
    trained = world.trained()
    assert len(trained) == len(set(trained))
    assert world.is_admitted("w1")
    world.audit()


POINTS = ["stored", "stepped", "trained", "published", "checkpoint", "checkpointed"]


@pytest.mark.slow
def test_12_a_learner_killed_at_every_point_goes_on_each_time(make_world: MakeWorld) -> None:
    world = make_world()
    world.worker("w1")
    world.worker("w2")
    for point in POINTS:
        world.learner(kill_at=point, times=2)
        world.run_until(lambda: not world.is_alive("learner"))
        assert world.end("learner") is None, "it ended by itself"
        world.audit()
    world.learner(run={"max_steps": world.step + 4})
    world.run_until(lambda: world.end("learner"))
    assert world.end("learner") == ("finished", "")
    assert [record["lineage"] for record in world.records("lineage")] == [*range(1, 8)]
    world.audit(is_finished=True)


@pytest.mark.slow
def test_13_after_an_older_checkpoint_later_steps_are_void_and_their_groups_end_or_return(
    make_world: MakeWorld,
) -> None:
    world = make_world(sync={"max_staleness": 6}, checkpoint={"interval_steps": 4})
    world.learner()
    world.worker("w1")
    world.worker("w2")
    world.run_until(lambda: world.step >= 7)
    lost = [r for r in world.records("trained") if r["step"] > 4]
    assert lost
    world.kill("learner")
    world.learner()
    assert world.step == 4
    world.run_until(lambda: world.step >= 9)
    finish(world)


SEEDS = [5, *(pytest.param(n, marks=pytest.mark.matrix) for n in range(100) if n != 5)]
"""With 5 results come a second time."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_14_nothing_is_trained_twice_or_lost_whoever_dies_whenever(
    make_world: MakeWorld, seed: int
) -> None:
    world = make_world(
        seed=seed,
        delay_s=0.02,
        jitter_s=0.03,
        loss=0.02 * (seed % 3),
        sample_s=0.5,
        train_s=0.6,
        image_bytes=3 * 4096,
        sync={"max_staleness": 1 + seed % 4},
    )
    nodes = ["learner", "r1", "w1", "w2", "w3"]
    via = ["r1", "learner"]
    world.learner()
    world.relay()
    for name in nodes[2:]:
        world.worker(name, via=via)
    for _ in range(8):
        world.run(world.chance.uniform(0.3, 6.0))
        victim = world.chance.choice(nodes)
        world.kill(victim, silently=world.chance.random() < 0.3)
        world.run(world.chance.uniform(0.0, 6.0))
        world.audit()
        world.restart(victim, via=via)
    before = world.step
    world.run(20.0)
    assert world.step > before + 5, "the run does not go on"
    finish(world)


@pytest.mark.parametrize("reason", ["reward_error", "prompt_too_long"])
def test_15_a_group_that_cannot_be_made_ends_once_and_another_is_granted(
    make_world: MakeWorld, reason: str
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.fail_rewards("w1", reason)
    world.run_until(lambda: world.records("discarded"))
    world.fail_rewards("w1", "")
    world.run(10.0)
    failed = [r["group"] for r in world.records("discarded") if r["reason"] == reason]
    assert failed
    assert len(failed) == len(set(failed))
    assert world.is_admitted("w1")
    assert not set(failed) & set(world.trained())
    assert len(world.trained()) > 10
    world.audit()


def test_16_a_group_that_makes_the_step_raise_ends_and_the_others_are_trained(
    make_world: MakeWorld,
) -> None:
    world = make_world(sync={"max_staleness": 0})  # room for one batch: what ended gives its back
    world.poison(3)
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 4)
    assert world.ends_of(3) == ["step_error"]
    assert not {3} & set(world.trained())
    assert {0, 1, 2, 4, 5} <= set(world.trained())
    assert any("ended without training: group 3 of w1" in note for note in world.notes("learner"))
    world.audit()


@pytest.mark.slow
def test_16b_a_group_handed_back_at_resume_that_no_step_can_bear_ends(
    make_world: MakeWorld,
) -> None:
    world = make_world(train_s=5.0)
    world.learner()
    world.worker("w1")
    world.run_until(lambda: len(set(world.stored())) >= 6)
    world.kill("learner")
    first, second = sorted(set(world.stored()) - set(world.trained()))[-2:]
    world.refuse_group(first)
    world.poison(second)
    world.learner(run={"max_steps": 5})
    world.run_until(lambda: world.end("learner"))
    assert world.end("learner") == ("finished", "")
    assert world.ends_of(first) == ["reward_too_large"]
    assert world.ends_of(second) == ["step_error"]
    assert not {first, second} & set(world.trained())
    world.audit(is_finished=True)


@pytest.mark.slow
def test_17_a_run_at_rest_leaves_no_accepted_group_without_an_end(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner(run={"max_steps": 20})
    for name in ("w1", "w2", "w3"):
        world.worker(name)
    world.run_until(lambda: world.end("learner"))
    assert len(world.acknowledged()) > 40, "none came too late for the last step"
    world.audit(is_finished=True)


@pytest.mark.slow
def test_18_a_full_disk_is_named_and_nothing_is_lost(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 3)
    world.fill_disk(of="checkpoints")
    world.run_until(lambda: world.step >= 6)
    assert any("the checkpoint before stays the newest" in note for note in world.notes("learner"))
    world.fill_disk(of="records")
    world.run_until(lambda: world.end("learner"))
    reason, text = world.end("learner") or ("", "")
    assert reason == "failed"
    assert "free disk space, then continue the run with --resume" in text
    world.audit()
    world.learner()
    assert world.step == 2
    world.run_until(lambda: world.step >= 5)
    world.audit()


@pytest.mark.slow
def test_18b_a_torn_or_damaged_record_is_named(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 5)
    world.kill("learner")
    world.tear_records()
    world.learner()
    world.run_until(lambda: world.step >= 8)
    world.audit()
    world.kill("learner")
    mend = world.damage_record(7)
    assert "record 7 has not the bytes of its hash" in world.start_error(world.learner)
    mend()
    world.learner()
    world.run_until(lambda: world.step >= 10)
    world.audit()


def test_18c_a_second_learner_in_the_directory_is_refused(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 1)
    text = world.start_error(lambda: world.learner(address="other"))
    assert "is in use by another learner; stop it first" in text
    world.run_until(lambda: world.step >= 4)
    world.audit()


@pytest.mark.slow
def test_18d_a_damaged_checkpoint_makes_its_steps_void(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: len(world.records("checkpoint")) >= 3)
    world.kill("learner")
    world.damage_checkpoint(6)
    world.learner()
    assert world.step == 4
    notes = " ".join(world.notes("learner"))
    assert "weights is damaged" in notes
    assert "the steps after 4 are void" in notes
    world.run_until(lambda: world.step >= 9)
    world.audit()
