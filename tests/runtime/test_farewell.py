"""The end of a run reaches nodes that are away just then, and the end of a node its learner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from echo.core.errors import ConfigError
from echo.core.monitoring.status import RunStatus
from tests.promises.conftest import MakeWorld
from tests.promises.world import World

STEPS = {"max_steps": 3}
OVER = "the run is finished", ""


def before_the_end(world: World, act: Callable[[], None]) -> None:
    """Have something happen at the moment when the end of the run is about to be told."""
    show = world.show

    def show_and_act(status: RunStatus) -> None:
        show(status)
        if status.activity == "done":
            act()

    world.show = show_and_act  # type: ignore[method-assign]


def finish(world: World) -> None:
    world.run_until(lambda: world.end("learner"))
    assert world.end("learner") == ("finished", "")


def test_a_worker_that_comes_back_after_the_end_of_a_resumed_run_hears_of_it(
    make_world: MakeWorld,
) -> None:
    """The first learner did all the work; what is left for the second is over in no time."""
    world = make_world()
    world.learner(run=STEPS)
    world.worker("w1")
    finish(world)
    world.learner(run=STEPS)
    world.run(2.0)
    assert world.end("learner") is None, "a node that fails to connect once may dial again"
    world.worker("w2")
    world.run_until(lambda: world.end("w2"))
    assert world.end("w2") == OVER
    finish(world)


@pytest.mark.parametrize("via", ["learner", "r1"])
@pytest.mark.slow
def test_a_worker_that_is_cut_off_at_the_end_hears_of_it_when_it_is_back(
    make_world: MakeWorld, via: str
) -> None:
    world = make_world()
    world.learner(run=STEPS)
    if via == "r1":
        world.relay(via)
    world.worker("w1", via=[via])
    transport = world.node("learner").transport
    transport.options = dataclasses.replace(transport.options, max_redial_s=20.0)
    before_the_end(world, lambda: world.cut("w1", via))
    world.run_until(lambda: world.node("learner").role.shutdown.reason)
    world.run(1.0)
    nodes = ["learner", via, "w1"]
    assert [world.end(name) for name in nodes] == [None] * 3
    world.mend("w1", via)
    world.run_until(lambda: all(map(world.end, nodes)))
    ends = dict.fromkeys(nodes, OVER) | {"learner": ("finished", "")}
    assert {name: world.end(name) for name in nodes} == ends


@pytest.mark.slow
def test_who_died_long_ago_is_not_waited_for_and_relays_are_told(make_world: MakeWorld) -> None:
    world = make_world(network={"dead_after_s": 600.0})
    world.learner(run=STEPS)
    world.relay("r1")
    world.relay("r2")
    world.worker("w1")
    world.worker("w2")
    learner = world.node("learner")
    roster = learner.role.roster
    world.run_until(lambda: {"r1", "r2", "w1", "w2"} <= roster.nodes.keys())
    began: list[float] = []
    for name in ("r2", "w2"):
        world.kill(name)

    def forget() -> None:
        for name in ("r2", "w2"):
            roster.nodes[name].last_seen_at -= 300.0
        began.append(world.now)

    before_the_end(world, forget)
    finish(world)
    heartbeat_s = learner.role.settings.leases.heartbeat_s
    two_dials_s = 2 * (learner.transport.options.max_redial_s + heartbeat_s)
    assert world.now - began[0] < two_dials_s
    assert world.end("r1") == OVER


# --- a node that ends by itself -------------------------------------------------------------------


@pytest.mark.parametrize("has_engine", [False, True])
def test_a_worker_that_fails_tells_the_learner_why_and_is_not_missed(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture, has_engine: bool
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    if has_engine:
        world.refuse_version("w1", 0)
    else:
        world.node("w1").build = fail
    world.run_until(lambda: world.end("w1"))
    world.run(0.1)
    assert not world.node("learner").role.roster.nodes
    why = "the probe found other weights" if has_engine else "settings differ:"
    [record] = [each for each in caplog.records if each.getMessage().startswith("w1 left: ")]
    assert record.levelname == "WARNING"
    assert why in record.getMessage()
    assert "\n" not in record.getMessage()


def fail(*_: object) -> None:
    raise ConfigError("the learner's settings differ:\n  sync.max_staleness = 5")


def test_a_newcomer_that_is_refused_for_its_name_takes_nobody_with_it(
    make_world: MakeWorld,
) -> None:
    """Even where both are heard over one link."""
    world = make_world()
    world.learner()
    world.relay("r1")
    world.worker("w1", via=["r1"])
    learner = world.node("learner")
    roster = learner.role.roster
    world.run_until(lambda: "w1" in roster.nodes)
    former = roster.nodes["w1"].incarnation
    world.worker("w1", via=["r1"])
    world.run_until(lambda: world.end("w1"))
    world.run(1.0)
    assert roster.nodes["w1"].incarnation == former
    assert not [note for note in world.notes("learner") if "left" in note]
