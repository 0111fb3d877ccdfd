"""Tests of the acts of operators, on learners and workers on virtual time."""

from __future__ import annotations

import pytest

from echo.records.ledger import BoundChanged, Operated, read_records
from echo.roles.viewers import Operate
from echo.wire.actions import Action
from echo.wire.messages import Act, Operation, Outcome
from tests.promises.conftest import MakeWorld
from tests.promises.world import World

pytestmark = pytest.mark.slow


def operation(world: World, act: Act, subject: str = "", value: str = "") -> Outcome:
    """Have the learner carry out an operation; return the outcome that the operator gets."""
    told: list[Outcome] = []

    def note(peer: str, outcome: Outcome) -> list[Action]:
        told.append(outcome)
        return []

    world.node("learner").role.viewers.operation_done = note
    asked = Operation(number=7, act=act, subject=subject, value=value, by="ann@desk")
    world.perform("learner", [Operate("viewer", asked)])
    [outcome] = told
    assert outcome.number == 7
    return outcome


def states(world: World) -> set[str]:
    """The state of the run in the newest statuses."""
    return {status.state for status in world.snapshots[-2:]}


@pytest.fixture
def fleet(make_world: MakeWorld) -> World:
    world = make_world(sample_s=0.5)
    world.learner(run={"max_steps": 50}, sync={"max_staleness": 2})
    for name in ("w1", "w2"):
        world.worker(name)
    world.run_until(lambda: world.step >= 2)
    return world


def test_a_paused_run_grants_nothing_loses_nothing_and_goes_on(fleet: World) -> None:
    role = fleet.node("learner").role
    assert operation(fleet, "pause").is_done
    fleet.run(10.0)
    step, num_running = fleet.step, role.leases.num_running
    assert num_running == 0, "what was granted is finished"
    stalls = fleet.node("learner")._stalls
    counted_s = sum(stalls._activities.values())
    fleet.run(20.0)
    assert sum(stalls._activities.values()) == counted_s, "the operator's time is part of no step"
    assert (fleet.step, fleet.end("learner")) == (step, None)
    assert states(fleet) == {"paused"}
    assert fleet.waiting_for().startswith("the operator: paused")
    assert operation(fleet, "resume").is_done
    fleet.run_until(lambda: fleet.step >= step + 3)
    assert "running" in states(fleet)
    waits = [note for note in fleet.notes("learner") if "the learner waits" in note]
    assert not waits, "a wait begins anew after a pause"
    role.validate()


def test_the_time_of_a_pause_counts_as_no_wait(fleet: World) -> None:
    operation(fleet, "pause")
    fleet.run(60.0)
    num_rows, step = len(fleet.rows), fleet.step
    assert fleet.snapshots[-1].recent_idle_ratio < 0.9
    assert fleet.node("learner").costs._waiting_since is None, "no reason to activate workers"
    operation(fleet, "resume")
    fleet.run_until(lambda: fleet.step > step)
    [row] = fleet.rows[num_rows : num_rows + 1]
    assert row["time/wait_for_batch"] <= row["time/step"] < 5.0


def test_workers_without_groups_in_a_pause_are_not_idle(make_world: MakeWorld) -> None:
    world = make_world(sample_s=0.5, train_s=60.0)
    world.learner(run={"max_steps": 50})
    world.worker("w1")
    world.run_until(lambda: world.node("learner").progress.activity == "training")
    operation(world, "pause")
    world.run(5.0)
    counted = dict(world.node("learner")._stalls._tally.seconds)
    world.run(30.0)
    assert world.node("learner").progress.activity == "training"
    assert world.node("learner")._stalls._tally.seconds == counted


def test_a_paused_run_outlives_its_workers(make_world: MakeWorld) -> None:
    world = make_world(sample_s=0.5, network={"reconnect_for_s": 4.0})
    world.learner(run={"max_steps": 50})
    world.worker("w1")
    world.run_until(lambda: world.step >= 1)
    operation(world, "pause")
    world.kill("w1")
    world.run(30.0)
    assert world.end("learner") is None
    operation(world, "resume")
    world.worker("w2")
    step = world.step
    world.run_until(lambda: world.step > step)


def test_a_drained_worker_finishes_its_groups_and_leaves(fleet: World) -> None:
    outcome = operation(fleet, "drain", "w1")
    assert outcome.is_done
    assert outcome.text.startswith("w1 is given no more leases, and leaves after its ")
    fleet.run_until(lambda: fleet.end("w1"))
    assert fleet.end("w1") == ("drained by the operator", "")
    role = fleet.node("learner").role
    fleet.run(1.0)
    assert role.roster.nodes.keys() == {"w2"}
    assert not role.counters["leases_expired"]
    step = fleet.step
    fleet.worker("w1")  # who starts it again wants it
    fleet.run_until(lambda: fleet.step >= step + 2 and role.leases.num_leases("w1"))


def test_a_draining_worker_is_counted_as_active_while_it_works(make_world: MakeWorld) -> None:
    world = make_world(sample_s=30.0)
    world.learner(run={"max_steps": 50}, learner={"price_per_h": 1.0})
    for name in ("w1", "w2", "w3"):
        world.worker(name, worker={"price_per_h": 0.5})
    role = world.node("learner").role
    world.run_until(lambda: role.leases.num_leases("w1") and role.leases.num_leases("w2"))
    operation(world, "drain", "w1")
    operation(world, "standby", "w2")
    world.run(5.0)
    cost = world.snapshots[-1].cost
    assert cost is not None
    assert (cost.num_active, cost.num_standby) == (2, 1)
    [node] = [node for node in world.snapshots[-1].nodes if node.node_id == "w1"]
    assert node.state.startswith("draining")


def test_a_drained_relay_leaves_once_no_node_needs_it(make_world: MakeWorld) -> None:
    world = make_world(sample_s=0.5)
    world.learner(run={"max_steps": 50})
    world.relay("r1")
    world.worker("w1", via=["r1", "learner"])
    world.run_until(lambda: world.step >= 2)
    assert operation(world, "drain", "r1").is_done
    world.run_until(lambda: world.end("r1"))
    assert world.end("r1") == ("drained by the operator", "")
    step = world.step
    world.run_until(lambda: world.step >= step + 2)


def test_a_worker_on_standby_gets_nothing_until_it_is_resumed(fleet: World) -> None:
    role = fleet.node("learner").role
    assert operation(fleet, "standby", "w1").is_done
    fleet.run_until(lambda: not role.leases.num_leases("w1"))
    step = fleet.step
    fleet.run_until(lambda: fleet.step >= step + 3)
    assert not role.leases.num_leases("w1")
    [node] = [node for node in fleet.snapshots[-1].nodes if node.node_id == "w1"]
    assert (node.hold, node.state) == ("standby", "standby")
    assert operation(fleet, "resume", "w1").is_done
    fleet.run_until(lambda: role.leases.num_leases("w1"))


def test_the_bound_moves_within_the_hard_bound_and_is_recorded(fleet: World) -> None:
    outcome = operation(fleet, "set", "sync.max_staleness", "1")
    assert outcome == Outcome(number=7, is_done=True, text="staleness bound for new leases: 2 -> 1")
    fleet.run(1.0)
    assert fleet.snapshots[-1].bound == 1
    outcome = operation(fleet, "set", "sync.max_staleness", "1")
    assert (outcome.is_done, outcome.text) == (True, "staleness bound for new leases: 1 already")
    outcome = operation(fleet, "set", "sync.max_staleness", "3")
    assert not outcome.is_done
    assert "must be from 0 to 2" in outcome.text
    fleet.run(1.0)
    records = list(read_records(fleet.run_dir))
    [moved] = [record for record in records if isinstance(record, BoundChanged)]
    assert (moved.before, moved.bound, moved.cause) == (2, 1, "operator: ann@desk")
    operated, _ = [record for record in records if isinstance(record, Operated)]
    assert (operated.by, operated.act, operated.subject, operated.value) == (
        "ann@desk", "set", "sync.max_staleness", "1",
    )  # fmt: skip


def test_a_stopped_run_is_saved(fleet: World) -> None:
    assert operation(fleet, "stop").is_done
    fleet.run_until(lambda: fleet.end("learner"))
    assert fleet.end("learner") == ("interrupted", "")
    assert fleet.saved.state == "stopped"


IMPOSSIBLE: list[tuple[Act, str, str, str]] = [
    ("drain", "w33", "", "no node is called 'w33'; connected: w1, w2"),
    ("drain", "", "", "no node is called ''; connected: w1, w2"),
    ("standby", "learner", "", "no node is called 'learner'"),
    ("pause", "w1", "", "pause is for the whole run"),
    ("set", "sync.max_stalenes", "1", "did you mean sync.max_staleness?"),
    ("set", "sync.max_staleness", "-1", "expected a number of steps"),
    ("set", "activation.budget_per_run", "nan", "expected $, above 0"),
    ("set", "activation.budget_per_run", "9", "no machine states a price"),
]


def test_a_command_that_cannot_be_carried_out_says_why(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    for name in ("w1", "w2"):
        world.worker(name)
    world.run_until(lambda: len(world.node("learner").role.roster.nodes) == 2)
    for act, subject, value, why in IMPOSSIBLE:
        outcome = operation(world, act, subject, value)
        assert not outcome.is_done
        assert why in outcome.text
    assert not world.records("operated")
