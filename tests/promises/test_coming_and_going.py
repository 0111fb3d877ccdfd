"""Nodes come, leave, die and return, and nothing of their work is lost."""

from __future__ import annotations

import pytest

from tests.promises.conftest import MakeWorld

pytestmark = pytest.mark.slow

KINDS = {
    "greeting": ["Greet", "Greeted", "Hello", "Welcome"],
    "joining": ["AssetRequest", "Asset", "Ready", "Admitted", "TopologyPlan"],
    "weights": ["Subscribe", "Announce", "Fetch", "Chunk", "Credit"],
    "groups": ["Grant", "Deliver", "Ack", "Heartbeat", "Pulse"],
}
ONE_BY_ONE = [
    pytest.param([kind], id=kind, marks=pytest.mark.matrix)
    for kinds in KINDS.values()
    for kind in kinds
]


@pytest.mark.parametrize(
    "kinds", [*(pytest.param(kinds, id=name) for name, kinds in KINDS.items()), *ONE_BY_ONE]
)
def test_33_a_lost_message_of_any_kind_is_made_good(
    make_world: MakeWorld, kinds: list[str]
) -> None:
    world = make_world(sample_s=0.6, train_s=0.6)
    lost = [world.drop(kind, times=3) for kind in kinds]
    world.learner()
    world.relay()
    for name in ("w1", "w2"):
        world.worker(name, via=["r1", "learner"])
    world.run(20.0)
    assert [len(each) for each in lost] == [3] * len(kinds)
    for name in ("r1", "w1", "w2"):
        assert world.is_admitted(name), world.notes(name)
    for name in ("w1", "w2"):
        version = world.installed(name)
        assert version is not None
        assert version[1] >= world.step - 1
    assert len(world.trained()) > 25
    world.audit()


def test_34_a_late_joiner_is_granted_nothing_before_it_is_admitted_and_has_weights(
    make_world: MakeWorld,
) -> None:
    world = make_world(image_bytes=12 * 4096)
    world.learner()
    world.worker("w1", serves=True)
    world.run_until(lambda: world.step >= 5)
    world.worker("late", build_s=8.0)
    world.run(7.0)
    assert not world.is_admitted("late")
    assert world.leased("late") == set()
    world.run_until(lambda: world.leased("late"))
    assert world.is_admitted("late")
    assert world.installed("late") is not None
    assert world.is_bit_exact("late")
    world.audit()


@pytest.mark.parametrize("silently", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_35_workers_of_a_dead_relay_find_the_learner_and_return(
    make_world: MakeWorld, silently: bool
) -> None:
    world = make_world(sample_s=0.6, train_s=0.6)
    world.learner()
    world.relay()
    for name in ("w1", "w2"):  # the learner's address they have from its plan
        world.worker(name, via=["r1"])
    world.run(5.0)
    world.kill("r1", silently=silently)
    world.run(10.0)
    before = len(world.trained())
    world.run(10.0)
    assert len(world.trained()) > before + 15
    assert [world.parent(name) for name in ("w1", "w2")] == ["learner", "learner"]
    world.relay()
    world.run(15.0)
    assert [world.parent(name) for name in ("w1", "w2")] == ["r1", "r1"]
    world.audit()


def test_35b_a_worker_that_reaches_only_its_relay_fetches_there_when_the_plan_drops_it(
    make_world: MakeWorld,
) -> None:
    world = make_world(image_bytes=16 * 4096, sample_s=2.0, train_s=2.0)
    for child in ("r1", "w2"):
        world.link("learner", child, bytes_per_s=200_000)
    world.link("r1", "w1", bytes_per_s=20_000)
    world.learner()
    world.relay()
    for other in ("learner", "w2"):  # a firewall, of which the learner knows nothing
        world.cut("w1", other)
    world.run_until(lambda: world.installed("r1") is not None)
    world.worker("w1", via=["r1"])
    world.run_until(lambda: world.uplink("r1") is not None)  # how slow it is has been measured
    world.worker("w2")
    world.run_until(lambda: world.planned_parents("w1") == ["learner"])
    world.kill("w1")  # otherwise it would keep the link that it has
    world.restart("w1", via=["r1"])
    world.run_until(lambda: world.is_admitted("w1"))
    assert world.planned_parents("w1") == ["learner"]
    world.run_until(lambda: world.installed("w1") is not None, within_s=30.0)
    assert world.parent("w1") == "r1"
    assert world.is_bit_exact("w1")
    world.audit()


def test_36_unfinished_rollouts_of_a_leaving_worker_are_continued_token_by_token(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1", sample_s=10.0)
    world.run_until(lambda: 0 in world.sampling("w1"))
    world.interrupt("w1")
    world.run_until(lambda: world.end("w1"))
    world.worker("w2")
    world.hang_engine("w2")
    world.run_until(lambda: 0 in world.leased("w2"))
    world.run(1.0)
    assert world.partial_tokens("w2", 0) == [[3], [3, 4, 5]]


def test_37_standby_gets_neither_leases_nor_weights_and_is_back_within_one_message(
    make_world: MakeWorld,
) -> None:
    world = make_world(sample_s=0.6, train_s=0.6)
    world.learner()
    world.worker("w1")
    world.worker("w2")
    world.run(10.0)
    world.stand_by("w2")
    world.run(5.0)
    held, granted = world.installed("w2"), world.num_granted("w2")
    world.run(20.0)
    assert world.is_on_standby("w2")
    assert world.is_admitted("w2")
    assert world.installed("w2") == held
    assert world.num_granted("w2") == granted
    world.stand_by()
    world.run_until(lambda: not world.is_on_standby("w2"), within_s=1.0)
    world.run_until(lambda: world.num_granted("w2") > granted, within_s=15.0)
    assert world.installed("w2") != held
    world.audit()
