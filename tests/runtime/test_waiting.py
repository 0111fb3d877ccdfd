"""A learner without a batch acts by time, on a virtual clock."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import pytest

from echo.algo.staleness import ControlSettings
from echo.core.buffer import StalenessBuffer
from echo.core.errors import TransportError
from echo.fleet.explain import Tally, describe_wait, explain_wait
from echo.roles.learner import Learner, StepTaken
from echo.runtime.learner.batches.waiting import FIRST_WORKER_S, BatchWait
from echo.runtime.learner.node import LearnerNode
from tests.promises.conftest import MakeWorld
from tests.promises.world import World

ADDRESS = "tcp://learner:7700"


def make_waiting(role: Learner, *, reconnect_for_s: float = 300.0) -> BatchWait:
    log = logging.getLogger("test.waiting")
    return BatchWait(role, address=ADDRESS, reconnect_for_s=reconnect_for_s, log=log)


def alone(make_world: MakeWorld, **sections: Any) -> tuple[World, Learner]:
    """Return a world without workers, whose learner makes no step, and what it decides."""
    world = make_world(train_s=math.inf)
    world.learner(**sections)
    return world, world.node("learner").role


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was told by this file's waiting, and not by the learner's own."""
    return [r.getMessage() for r in caplog.records if r.name == "test.waiting"]


@pytest.mark.parametrize("reconnect_for_s", [300.0, 2 * FIRST_WORKER_S])
def test_the_first_worker_is_waited_for_longest(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture, reconnect_for_s: float
) -> None:
    _, role = alone(make_world)
    waiting = make_waiting(role, reconnect_for_s=reconnect_for_s)
    waiting.begin(now=100.0)
    for second in range(100, 281):
        assert waiting.check(now=float(second)) == "no_worker"
    assert len(told(caplog)) == 3  # one a minute
    text = f"waiting for workers at {ADDRESS} for 2min, since this learner began"
    assert told(caplog)[1].startswith(text)
    limit_s = max(FIRST_WORKER_S, reconnect_for_s)
    waiting.check(now=99.0 + limit_s)
    with pytest.raises(TransportError, match=f"no worker at {ADDRESS} for .*h.*--resume"):
        waiting.check(now=100.0 + limit_s)


def test_workers_that_are_gone_are_waited_for_as_long_as_they_try(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world, role = alone(make_world)
    waiting = make_waiting(role)
    waiting.begin(now=0.0)
    world.worker("w1")
    world.run_until(lambda: "w1" in role.roster.nodes)
    waiting.check(now=1000.0)
    world.kill("w1")
    world.run_until(lambda: not role.roster.nodes)
    waiting.check(now=1299.0)
    text = f"waiting for workers at {ADDRESS} for 4.98min, since w1 left"
    assert told(caplog)[-1].startswith(text)
    with pytest.raises(TransportError, match=f"no worker at {ADDRESS} for 5min, since w1 left"):
        waiting.check(now=1300.0)
    # Nobody looks during a step: the time of a wait counts from its beginning.
    waiting.begin(now=5000.0)
    waiting.check(now=5299.0)
    # A worker whose engine is still being built is here.
    world.worker("w2", build_s=math.inf)
    world.run_until(lambda: "w2" in role.roster.nodes)
    waiting.check(now=5300.0)
    waiting.check(now=5599.0)


def test_what_keeps_groups_from_workers_is_found(make_world: MakeWorld) -> None:
    world, role = alone(make_world)
    world.worker("w1", sample_s=math.inf)
    world.run_until(lambda: role.leases.num_running > 0)
    waiting = make_waiting(role)
    waiting.begin(now=0.0)
    assert waiting.check(now=100.0) == ""  # something runs
    [member] = role.roster.members("worker")
    role.leases.drop_worker("w1")
    member.worker.is_stuck = True
    for second in range(101, 200):
        assert waiting.check(now=float(second)) == "busy"
    found = explain_wait(Tally(), role.fleet.observe())
    assert str(found).startswith("2 of 2 groups: no worker is given one: w1 takes none; look at")
    member.worker.installed = None
    assert waiting.check(now=200.0) == "no_weights"
    role.handle(StepTaken(100), now=200.5)
    assert waiting.check(now=201.0) == "outdated"
    found = explain_wait(Tally(), role.fleet.observe())
    assert "the newest version is too old for the next step; lower" in str(found)


def test_before_an_agent_has_asked_no_worker_is_said_to_take_no_group(
    make_world: MakeWorld,
) -> None:
    world, role = alone(make_world, agent={"listen": "tcp://127.0.0.1:0"})
    world.worker("w1")
    world.run_until(lambda: any(each.installed for each in role.roster.members("worker")))
    [member] = role.roster.members("worker")
    member.worker.capacity = 0  # as many as agents ask for
    for record in role.leases.worker_leases("w1"):
        role.leases.revoke(record)
    waiting = make_waiting(role)
    waiting.begin(now=0.0)
    assert waiting.check(now=1.0) == waiting.check(now=10.0) == "no_agent"
    found = explain_wait(Tally(), role.fleet.observe())
    assert str(found) == (
        "2 of 2 groups: no agent has asked for a group; have agents call a worker's endpoint"
    )
    member.worker.capacity, member.worker.is_stuck = 1, True
    assert waiting.check(now=11.0) == "busy"


def test_nobody_who_has_leases_is_said_to_wait_for_some(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.worker("w1")
    role = world.node("learner").role
    said = set[tuple[bool, str]]()

    def look() -> bool:
        nodes = role.fleet.nodes(step=role.step, now=world.now)
        said.update((node.num_leases > 0, node.state) for node in nodes)
        wait = describe_wait(role.fleet.observe())
        said.add(("has 0 " not in wait, wait.partition("(")[2]))
        return world.step >= 4

    world.run_until(look)
    assert (True, "sampling") in said
    assert (True, "leases under way") in said
    assert not [told for has_some, told in said if has_some and "waiting for leases" in told]


def test_a_learner_that_nobody_asks_publishes_by_time(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo.weights.schedule.PublishPace.is_due", lambda self, step: False)
    world = make_world(sync={"max_staleness": 1})
    world.learner(run={"max_steps": 4})
    world.worker("w1")
    world.run_until(lambda: world.published() and world.published()[-1][1] == 2)
    num_before = len(world.snapshots)
    world.run_until(lambda: world.end("learner"))
    activities = [snapshot.activity for snapshot in world.snapshots[num_before:]]
    until_training = activities[: activities.index("training")]
    assert until_training[-1] == "", "a learner that has published waits again"
    assert [step for _, step in world.published()] == [0, 2, 4]


@pytest.mark.slow
def test_a_learner_without_workers_saves_and_ends(make_world: MakeWorld) -> None:
    world = make_world(network={"reconnect_for_s": 30.0})
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 3)
    world.kill("w1")
    world.run_until(lambda: world.end("learner"))
    reason, text = world.end("learner") or ("", "")
    assert reason == "failed"
    assert text.startswith("no worker at tcp://learner:7700 for 30")
    step = world.step
    assert world.records("checkpoint")[-1]["step"] == step
    world.learner(run={"max_steps": step + 1})
    world.worker("w2")
    world.run_until(lambda: world.end("learner") == ("finished", ""))


# --- a bound that moves ---------------------------------------------------------------------------


GOOD = {"ess": 0.99, "mismatch_kl": 0.0, "clip_ratio/mean": 0.0}


def quick(patch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Let the controller decide within the steps of a test."""
    settings = partial(ControlSettings, **limits)
    patch.setattr("echo.runtime.learner.batches.bound.ControlSettings", settings)


def adapting(
    make_world: MakeWorld, *, train_s: float = math.inf, **sync: Any
) -> tuple[World, LearnerNode]:
    """Return a world whose learner makes no step by itself, and its node."""
    sync = {"max_staleness": 6, "publish_period": 5, "adaptive": True, **sync}
    world = make_world(train_s=train_s, sync=sync)
    world.learner()
    return world, world.node("learner")


def adapt(node: LearnerNode, step: int, **changes: float) -> bool:
    return node.bound.adapt(step, GOOD | changes, {6: 10, 2: 3})


def bounds(world: World) -> list[dict[str, Any]]:
    world.run(1.0)
    return world.records("bound")


def test_a_decision_is_noted_with_its_cause(make_world: MakeWorld) -> None:
    world, node = adapting(make_world)
    assert adapt(node, 1, ess=0.1)
    [record] = bounds(world)
    assert {name: record[name] for name in ("step", "before", "bound", "cause")} == {
        "step": 1,
        "before": 6,
        "bound": 3,
        "cause": "ess 0.1 below 0.8",
    }


def test_it_gates_leases_and_publishes_at_once_and_more_often(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch, patience=1)
    world, node = adapting(make_world)
    buffer, pace = node.role.buffer, node.pace
    assert adapt(node, 1, ess=0.1)
    assert (buffer.admission_staleness, pace.period) == (3, 4)
    assert isinstance(buffer, StalenessBuffer)
    assert buffer.max_staleness == 6
    published = [step for step in range(2, 40) if adapt(node, step)]
    # Smoothed signals take a while to recover; then the bound rises, and the period with it. Only
    # a lower bound needs a version at once.
    records = bounds(world)
    assert published == [r["step"] for r in records[1:] if r["bound"] < r["before"]]
    assert (buffer.admission_staleness, pace.period) == (6, 5)
    assert [r["bound"] for r in records][-4:] == [3, 4, 5, 6]


def test_it_stays_above_the_least_bound(make_world: MakeWorld) -> None:
    _, node = adapting(make_world, min_staleness=3)
    for step in range(40):
        adapt(node, step, ess=0.1)
    assert node.role.buffer.admission_staleness == 3


@pytest.mark.parametrize("sync", [{"adaptive": False}, {"min_staleness": 6}])
def test_nothing_happens_where_there_is_nothing_to_choose(
    sync: dict[str, Any], make_world: MakeWorld
) -> None:
    world, node = adapting(make_world, train_s=0.1, **sync)
    world.worker("w1")
    world.run_until(lambda: world.step >= 1)
    assert not adapt(node, 1, ess=0.1)
    assert bounds(world) == []
    assert {row["staleness/bound"] for row in world.rows} == {6}
