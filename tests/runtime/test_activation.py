"""A learner that puts on standby whom it can do without, says so, and counts what it costs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from echo.core.price import Price
from echo.core.rollout import PolicyVersion
from echo.fleet.market import Offer
from echo.records.ledger import read_records, totals_of
from echo.roles.learner import HoldChosen, Learner
from echo.roles.members import Member, Presence, Roster
from echo.roles.worker.engine_facts import EngineFacts
from echo.runtime.learner.costs import control as cost_control
from echo.runtime.learner.costs.activation import Activation, ActivationSettings, StepTimes
from echo.runtime.learner.costs.measurements import Measurements
from echo.runtime.learner.costs.meter import CostMeter, spent_before
from echo.runtime.learner.costs.throughput import Throughput
from echo.wire.messages import NodeStats
from tests.fleet.fleets import JOB
from tests.promises.conftest import MakeWorld
from tests.promises.world import World
from tests.records.rows import write_ledger
from tests.roles.harness import make_hello

PRICE = {"price_per_h": 1200.0}


@pytest.mark.slow
def test_at_the_budget_of_the_run_it_ends_with_a_checkpoint_and_goes_on_with_more(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    for budget in (1.0, 2.0):
        world.learner(learner=PRICE, activation={"budget_per_run": budget})
        world.worker("w1")
        world.run_until(lambda: world.end("learner"), within_s=12.0)
        assert (world.end("learner"), world.end("w1")) == (
            ("finished", ""), ("the run is finished", ""),
        )  # fmt: skip
        steps = world.records("trained")[-1]["step"]
        assert world.records("checkpoint")[-1]["step"] == steps >= 4 * budget
        totals = [record["total"] for record in world.records("cost")]
        assert totals == sorted(totals), "what was spent before counts"
        assert totals[-1] == pytest.approx(budget, rel=0.5)
        world.audit(is_finished=True)


def test_a_run_that_waits_for_groups_ends_at_its_budget_too(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner(learner=PRICE, activation={"budget_per_run": 1.0})
    world.run_until(lambda: world.end("learner") == ("finished", ""), within_s=12.0)


def test_what_was_spent_before_a_resume_is_read_from_the_ledger(tmp_path: Path) -> None:
    write_ledger(tmp_path, [])
    assert spent_before(totals_of(read_records(tmp_path)), now=1.0) == 0.0
    write_ledger(
        tmp_path,
        [
            {"kind": "cost", "step": 1, "total": 1.0, "per_h": 3.6, "at": 500.0},
            {"kind": "cost", "step": 2, "total": 2.0, "per_h": 3.6, "at": 1000.0},
            {"kind": "published", "version": [1, 2], "root": ""},
        ],
    )
    # Machines billed on while the learner was away, for an hour at most as far as is known.
    totals = totals_of(read_records(tmp_path))
    assert spent_before(totals, now=1100.0) == pytest.approx(2.1)
    assert spent_before(totals, now=9000.0) == pytest.approx(5.6)


@pytest.mark.slow
def test_a_token_costs_all_the_money_over_all_accepted_tokens(make_world: MakeWorld) -> None:
    world = make_world()
    world.useless_workers.add("w2")
    world.worker("w1")
    world.worker("w2")
    for _ in range(2):
        world.learner(learner=PRICE)
        begins_at = world.step
        world.run(4.0)
        assert world.step > begins_at
        cost = world.node("learner").costs.view()
        num_tokens = sum(record["tokens"] for record in world.records("accepted"))
        assert cost.per_million_tokens == pytest.approx(cost.total / num_tokens * 1e6)
        world.kill("learner")
    assert "zero_variance" in {record["reason"] for record in world.records("discarded")}
    assert len(world.records("lineage")) == 2


def test_a_batch_without_a_signal_says_nothing_of_the_time_of_a_step() -> None:
    settings = ActivationSettings(
        groups_per_step=4, group_size=8, max_completion_tokens=16, margin=0.1, budget_per_h=math.inf
    )
    activation = Activation(settings, now=0.0)

    def step(step_s: float, waited_s: float, useful_share: float) -> None:
        activation.stepped(
            StepTimes(
                step_s=step_s,
                waited_s=waited_s,
                completion_tokens=8.0,
                useful_share=useful_share,
            )
        )

    # Most batches of a hard task: rewards that are all 0, which are trained on in no time.
    for _ in range(6):
        step(20.01, 20.0, 0.0)
    assert activation.train_s is None
    for seconds in (5.0, 6.0, 7.0):
        step(20.0 + seconds, 20.0, 0.25)
        step(20.01, 20.0, 0.0)
    assert activation.train_s == pytest.approx(6.0)


# --- who stands by, and for how long --------------------------------------------------------------


def crowd(make_world: MakeWorld, *prices: float, **activation: float) -> World:
    """Return a learner whose steps take 5 s, and workers w1, w2, ... at these prices.

    The learner costs $2 an hour where anybody has a price.
    """
    world = make_world(train_s=5.0, sample_s=0.5, sync={"max_staleness": 6})
    world.learner(activation=activation, learner={"price_per_h": 2.0} if any(prices) else {})
    control = world.node("learner").costs.activation
    control.settings = replace(control.settings, min_dwell_s=20.0)
    for number, price in enumerate(prices, start=1):
        world.worker(f"w{number}", worker={"price_per_h": price} if price else {})
    return world


def standby(world: World) -> list[str]:
    roster = world.node("learner").role.roster
    return sorted(member.node_id for member in roster.nodes.values() if member.is_standby)


@pytest.mark.slow
def test_a_decision_counts_a_draining_worker_as_active(make_world: MakeWorld) -> None:
    world = crowd(make_world, 0.3, 0.1, 0.2, 0.4)
    world.hang_engine("w4")
    world.run(10.0)
    world.report("learner", HoldChosen("w4", "drain"))
    world.run_until(lambda: world.records("activation"))
    [decision] = world.records("activation")
    assert standby(world) == ["w1", "w3", "w4"]
    assert (decision["numbers"]["num_active"], decision["numbers"]["num_standby"]) == (2, 2)


@pytest.mark.slow
def test_the_dearest_stand_by_after_a_dwell_and_the_costs_are_told(
    make_world: MakeWorld,
) -> None:
    world = crowd(make_world, 0.3, 0.1, 0.2)
    assert world.run_until(lambda: standby(world)) >= 20.0
    world.run(30.0)
    [decision] = world.records("activation")
    assert decision["deactivated"] == ["w1", "w3"] == standby(world)
    numbers = decision["numbers"]
    before, after = numbers["before"], numbers["after"]
    assert before["cost_per_h"] == pytest.approx(0.6, abs=0.01)
    assert after["cost_per_h"] == pytest.approx(0.1, abs=0.01)
    assert after["rate"] > after["required"] > 0
    assert (numbers["num_active"], numbers["num_standby"]) == (1, 2)
    [told] = [note for note in world.notes("learner") if "put on standby" in note]
    assert "put on standby w1, w3" in told
    assert "$0.10/h in place of $0.60/h" in told
    # They bill on, on standby or not.
    row, snapshot = world.rows[-1], world.snapshots[-1]
    assert row["cost/per_hour"] == pytest.approx(2.6, abs=0.01)
    assert row["cost/standby_per_hour"] == pytest.approx(0.5)
    assert (row["workers/active"], row["workers/standby"]) == (1, 2)
    assert 0 < row["cost/per_step"] < row["cost/total"]
    assert row["cost/per_million_tokens"] > 0
    assert snapshot.cost is not None
    assert snapshot.cost.per_h == pytest.approx(2.6, abs=0.01)
    assert snapshot.cost.num_standby == 2
    assert "put on standby w1, w3" in snapshot.cost.decision
    assert world.node("learner")._stalls._fleet.num_enough == 1
    assert "standby" in {node.node_id: node.state for node in snapshot.nodes}["w3"]


@pytest.mark.slow
def test_a_learner_that_waits_or_loses_a_worker_gets_the_others_back(make_world: MakeWorld) -> None:
    world = crowd(make_world, 0.3, 0.1)
    world.run_until(lambda: standby(world) == ["w1"])
    # The learner has become much faster: one worker is not enough any more.
    world.train_s = 0.1
    world.run_until(lambda: not standby(world))
    world.train_s = 5.0
    assert world.run_until(lambda: standby(world) == ["w1"], within_s=120.0) >= 20.0
    # Where an active one is gone, the next question does not wait for the end of a dwell.
    control = world.node("learner").costs.activation
    control.settings = replace(control.settings, min_dwell_s=3600.0)
    world.kill("w2")
    world.run_until(lambda: not standby(world), within_s=30.0)


@pytest.mark.parametrize("why", ["set aside", "no prices"])
@pytest.mark.slow
def test_where_nothing_is_gained_everybody_works(make_world: MakeWorld, why: str) -> None:
    world = crowd(make_world, *((0.3, 0.1) if why == "set aside" else (0.0, 0.0)))
    nodes = world.node("learner").role.roster.nodes
    world.run_until(lambda: "w2" in nodes)
    nodes["w2"].worker.is_set_aside = why == "set aside"  # and w1 would stand by, as above
    world.run(40.0)
    assert standby(world) == []
    assert world.records("activation") == []


@pytest.mark.slow
def test_one_who_would_pass_the_budget_stands_by_from_the_beginning(make_world: MakeWorld) -> None:
    world = crowd(make_world, 0.3, 0.3, budget_per_h=0.7)
    world.run(5.0)
    world.worker("late", worker={"price_per_h": 0.3})
    world.worker("unknown")
    world.run(5.0)
    assert standby(world) == ["late"]
    notes = "\n".join(world.notes("learner"))
    assert "late stands by: with it the active workers would cost $0.90/h" in notes
    assert "activation.budget_per_h is $0.70" in notes
    assert "unknown states no price" in notes
    assert "worker.price_per_h" in notes


@pytest.mark.slow
def test_who_was_not_looked_at_yet_takes_no_part_in_a_question_and_its_answer(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = crowd(make_world, 0.3, 0.1)
    role, activation = world.node("learner").role, world.node("learner").costs.activation
    world.run_until(lambda: len(role.roster.active("worker")) == 2)
    # Nobody leaves by an answer that was found while w1 was away.
    activation.measured.workers.pop("w1", None)  # gone at the last look
    offers = [Offer(name=name, tokens_per_s=10.0, concurrency=8) for name in ("w1", "w2")]
    question: Any = SimpleNamespace(workers=offers, job=JOB, untried=frozenset())
    answer: Any = SimpleNamespace(active=frozenset({"w2"}), after=None)
    assert activation.decide(role, question, answer, now=world.now) == ([], None)
    # As in large fleets, where nobody is looked at ten times a second.
    world.run_until(lambda: world.step >= 4)
    monkeypatch.setattr(cost_control, "POLLS_PER_S", 0.05)
    world.worker("late", worker={"price_per_h": 0.2})
    world.run(20.0)
    assert world.is_alive("learner")
    assert "late" in role.roster.nodes


@pytest.mark.slow
def test_a_worker_that_stood_by_for_the_budget_is_tried_and_then_compared(
    make_world: MakeWorld,
) -> None:
    world = crowd(make_world, 0.3, 0.3, budget_per_h=0.7)
    world.run(5.0)
    world.worker("cheap", worker={"price_per_h": 0.2})
    world.run(1.0)
    assert standby(world) == ["cheap"]
    world.run_until(lambda: "cheap" not in standby(world), within_s=60.0)
    tried = world.records("activation")[-1]
    assert tried["cause"] == "workers without a measured rate are tried"
    assert tried["activated"] == ["cheap"]
    assert tried["numbers"]["after"]["cost_per_h"] <= 0.7
    world.run_until(lambda: standby(world) == ["w1", "w2"], within_s=60.0)


@pytest.mark.slow
def test_a_question_is_asked_once_in_a_dwell(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, asked = crowd(make_world, 0.3), list[float]()
    world.train_s, world.sample_s = 0.5, 10.0  # it waits, and there is nobody to be activated
    ask = Activation.question

    def count(*args: Any, **kwargs: Any) -> Any:
        question = ask(*args, **kwargs)
        asked.extend([kwargs["now"]] if question is not None else [])
        return question

    monkeypatch.setattr(Activation, "question", count)
    world.run(150.0)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert 2 <= len(gaps) <= 6
    assert min(gaps) >= 20.0


def test_what_a_worker_was_late_counts_for_the_sets_with_it_and_while_it_stands_by(
    make_world: MakeWorld,
) -> None:
    world = crowd(make_world, 0.3, 0.1)
    node = world.node("learner")
    control, role = node.costs.activation, node.role
    measured = control.measured
    world.run_until(lambda: all(s.took_s for s in measured.workers.values()) and measured.workers)
    members = role.roster.members("worker")

    def forecast_s(*names: str) -> float:
        return float(measured.links(role, members).broadcast_s(names))

    measured.shown_bytes_per_s = 1e9
    measured.workers["w1"].took_s = measured.workers["w2"].took_s = 0.0
    both_s, second_s = forecast_s("w1", "w2"), forecast_s("w2")
    measured.workers["w1"].took_s = both_s + 7.0
    assert forecast_s("w1", "w2") == pytest.approx(both_s + 7.0)
    assert forecast_s("w2") == pytest.approx(second_s)
    [first] = [member for member in members if member.node_id == "w1"]
    first.node.is_standby, measured.workers["w1"].took_s = True, None
    assert forecast_s("w1", "w2") == pytest.approx(both_s + 7.0)
    assert forecast_s("w2") == pytest.approx(second_s)


def test_what_is_known_of_the_links_bounds_the_forecast_and_is_kept_on_standby(
    make_world: MakeWorld,
) -> None:
    world = crowd(make_world, 0.3, 0.1)
    node = world.node("learner")
    control, role = node.costs.activation, node.role
    measured = control.measured
    world.run_until(lambda: measured.workers and all(s.took_s for s in measured.workers.values()))
    # The first version may have been kept from another run: it shows nothing of the uplink.
    assert measured.shown_bytes_per_s == 0
    world.run_until(lambda: world.step >= 2)
    assert measured.shown_bytes_per_s > role.plans.version_bytes / 2.0
    members = role.roster.members("worker")

    def forecast_s(*names: str) -> float:
        return float(measured.links(role, members).broadcast_s(names))

    # What was sent bounds the uplink: a second copy of what takes 5 s is not there after 6 s.
    measured.shown_bytes_per_s = role.plans.planner.payload_bytes / 5.0
    for state in measured.workers.values():
        state.took_s = 6.0
    assert forecast_s("w1") == pytest.approx(5.0, rel=0.1)
    assert forecast_s("w1", "w2") == pytest.approx(10.0, rel=0.1)
    [first] = [member for member in members if member.node_id == "w1"]
    first.node.is_standby, measured.workers["w1"].took_s = True, None
    measured.shown_bytes_per_s, measured.workers["w2"].took_s = 1e9, 0.1
    assert forecast_s("w2") < 1.0
    assert forecast_s("w1", "w2") == pytest.approx(5.0, rel=0.2)


def test_the_time_of_a_version_runs_from_when_the_worker_could_fetch_it(
    make_world: MakeWorld,
) -> None:
    world = crowd(make_world, 0.3)
    node = world.node("learner")
    control = node.costs.activation
    measured = control.measured
    published_at = measured.published_at
    world.run_until(lambda: world.step >= 2)
    world.run_until(lambda: world.now > max(published_at.values()) + 3.0)
    assert 0 < measured.workers["w1"].took_s < 1.0
    newest = node.role.broadcast.newest_complete
    world.worker("late", worker={"price_per_h": 0.3})
    world.run_until(lambda: "late" in measured.workers and measured.workers["late"].took_s)
    assert measured.workers["late"].installed == newest, "which went out long before it came"
    assert measured.workers["late"].took_s < 1.5
    # So it is with one that was on standby when the version went out.
    offers = [Offer(name=name, tokens_per_s=10.0, concurrency=8) for name in ("w1", "late")]
    question: Any = SimpleNamespace(workers=offers, job=JOB, untried=frozenset(), idle_share=0.0)
    choice = SimpleNamespace(slowdown=1.0)

    def activate(*names: str) -> None:
        answer: Any = SimpleNamespace(
            active=frozenset(names), cause="", before=None, after=None, choice=choice
        )
        actions, _ = control.decide(node.role, question, answer, now=world.now)
        world.perform("learner", actions)

    activate("w1")
    before = world.step
    world.run_until(lambda: world.step >= before + 2)
    world.train_s = 60.0
    world.run_until(lambda: world.now > max(published_at.values()) + 6.0)
    activate("w1", "late")
    world.run_until(lambda: measured.workers["late"].took_s)
    assert measured.workers["late"].installed == node.role.broadcast.newest_complete
    assert measured.workers["late"].took_s < 1.5
    # And with one that was still busy with the version before.
    state, at = measured.workers["w1"], world.now
    for number, published_s, installed_s in ((101, 0.0, 7.0), (102, 5.0, 14.0)):
        version = PolicyVersion(1, number)
        measured.published_at[version] = at + published_s
        measured.note_installed(node.role, state, version, now=at + installed_s)
        assert state.took_s == pytest.approx(7.0)


def test_a_worker_without_a_rate_is_untried_for_a_dwell_and_then_as_slow_as_it_seems(
    make_world: MakeWorld,
) -> None:
    world = crowd(make_world, 0.3, 0.1)
    world.run_until(lambda: world.step >= 3)
    node = world.node("learner")
    control, role = node.costs.activation, node.role
    measured = control.measured
    begun, began_at = Throughput(tokens_sampled=0, now=world.now), world.now
    state = replace(measured.workers["w1"], throughput=begun, active_s=19.0, loaded_s=0.0)
    measured.workers["w1"] = state

    def ask(later_s: float) -> tuple[frozenset[str], float]:
        question = control.question(role, node.pace, waiting_s=0.0, now=world.now + later_s)
        assert question is not None
        rates = {worker.name: worker.tokens_per_s for worker in question.workers}
        return question.untried, rates["w1"] / rates["w2"]

    assert ask(100.0) == (frozenset({"w1"}), 1.0)
    state.active_s = 21.0
    assert ask(200.0) == (frozenset(), 1.0)
    # Three groups of two rollouts were not made in a minute of full load.
    state.loaded_s = 60.0
    untried, share = ask(300.0)
    assert not untried
    assert share < 0.1
    # A report counts, though there are too few for a rate.
    rates = measured.workers["w2"].throughput.tokens_per_s
    begun.update(load=1.0, tokens_sampled=round(30 * rates), now=began_at + 60.0)
    untried, share = ask(400.0)
    assert not untried
    assert share == pytest.approx(0.5, rel=0.1)


def test_an_engine_that_does_not_scale_is_no_faster_than_it_was_seen_to_be(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines with leases for 6 of 120 places were taken for twenty times as fast."""
    measured = {scaling: Measurements() for scaling in (None, 1.0, 0.5, 0.0)}
    update = Measurements.update

    def update_all(own: Measurements, role: Learner, *, now: float) -> list[Member]:
        for told["scaling"], each in measured.items():
            update(each, role, now=now)
        return update(own, role, now=now)

    told: dict[str, float | None] = {"scaling": None}
    stats = property(lambda member: msgspec.structs.replace(member.node.stats, **told))
    monkeypatch.setattr(Member, "stats", stats)
    monkeypatch.setattr(Measurements, "update", update_all)
    monkeypatch.setattr(EngineFacts, "max_groups", 64)
    world = crowd(make_world, 0.3, 0.1)
    world.run_until(lambda: world.step >= 6)
    node = world.node("learner")
    control, offers = node.costs.activation, {}
    for number, (scaling, control.measured) in enumerate(measured.items(), start=1):
        later = world.now + 100.0 * number
        question = control.question(node.role, node.pace, waiting_s=0.0, now=later)
        assert question is not None
        [offers[scaling]] = [worker for worker in question.workers if worker.name == "w2"]
    load = measured[0.0].workers["w2"].load
    assert 0 < load < 0.5
    rates = {scaling: offer.tokens_per_s for scaling, offer in offers.items()}
    assert rates[None] == rates[1.0]
    # Its tokens by its busy seconds, in which the load varied.
    assert rates[0.0] / rates[1.0] == pytest.approx(load, rel=0.3)
    assert rates[0.0] < rates[0.5] < rates[1.0]
    # Whatever the engine is taken for, a group takes as long as it did.
    latencies = [offer.group_latency_s(JOB) for offer in offers.values()]
    assert max(latencies) / min(latencies) < 1.3


def test_the_next_question_waits_for_a_group_of_the_slowest_active_worker(
    make_world: MakeWorld,
) -> None:
    world = crowd(make_world, 0.3, 0.1)
    world.run_until(lambda: world.step >= 3)
    node = world.node("learner")
    control, before_s = node.costs.activation, node.costs.activation.dwell_s
    workers = [
        Offer(name=name, price_per_h=0.1, tokens_per_s=10.0, concurrency=concurrency)
        for name, concurrency in (("w1", 8), ("w2", 40), ("w3", 200))
    ]
    question: Any = SimpleNamespace(workers=workers, job=JOB, untried=frozenset({"w3"}))
    answer: Any = SimpleNamespace(active=frozenset({"w1", "w2", "w3"}), after=None)
    assert control.decide(node.role, question, answer, now=world.now) == ([], None)
    # 100 tokens at one of 40 places take 400 s; what the worker needs that is tried is a guess.
    assert before_s < control.dwell_s == pytest.approx(400.0)


# --- the cost meter -------------------------------------------------------------------------------


HOUR = 3600.0


def make(*, learner_per_h: float = 0.0, per_gb: float = 0.0, spent: float = 0.0) -> CostMeter:
    return CostMeter(learner_per_h=learner_per_h, learner_per_gb=per_gb, spent=spent, now=0.0)


def join(roster: Roster, name: str, per_h: float | None, *, per_gb: float = 0.0) -> Member:
    price = Price(per_h=per_h, per_gb=per_gb)
    hello = make_hello(name, incarnation=f"{name}-1", price=price)
    roster.nodes[name] = Member.of(hello, now=0.0)
    return roster.nodes[name]


@pytest.fixture
def roster() -> Roster:
    return Roster(heartbeat_s=1.0, dead_after_s=10.0)


def test_machines_count_from_joining_and_on_standby_too(roster: Roster) -> None:
    meter = make(learner_per_h=2.0)
    meter.update(roster, bytes_sent=0, now=HOUR)
    assert meter.total == pytest.approx(2.0)
    join(roster, "w1", 0.5)
    join(roster, "w2", 0.3).node.is_standby = True
    join(roster, "free", None)
    meter.update(roster, bytes_sent=0, now=HOUR)
    meter.update(roster, bytes_sent=0, now=2 * HOUR)
    assert meter.total == pytest.approx(2.0 + 2.8)
    assert (meter.machines_per_h, meter.standby_per_h) == pytest.approx((2.8, 0.3))
    assert meter.take_by_node() == pytest.approx({"learner": 4.0, "w1": 0.5, "w2": 0.3})
    assert not meter.take_by_node()


def test_a_draining_node_is_not_on_standby(roster: Roster) -> None:
    meter = make()
    join(roster, "leaves", 0.5)
    join(roster, "stays", 0.3)
    roster.hold("leaves", "drain")
    roster.hold("stays", "standby")
    meter.update(roster, bytes_sent=0, now=HOUR)
    assert meter.standby_per_h == pytest.approx(0.3)


def test_a_machine_counts_until_its_release_is_confirmed(roster: Roster) -> None:
    meter = make()
    released, left = join(roster, "released", 1.0), join(roster, "left", 1.0)
    meter.update(roster, bytes_sent=0, now=0.0)
    roster.move(released, Presence.UNKNOWN)
    roster.release(released)
    roster.move(left, Presence.UNKNOWN)
    meter.update(roster, bytes_sent=0, now=60.0)
    assert meter.machines_per_h == pytest.approx(1.0)
    assert meter.unconfirmed_per_h == pytest.approx(1.0)
    meter.update(roster, bytes_sent=0, now=60.0 + HOUR - 1)
    assert meter.machines_per_h == pytest.approx(1.0)
    meter.update(roster, bytes_sent=0, now=60.0 + HOUR)
    assert meter.machines_per_h == 0.0
    assert meter.total == pytest.approx(2 / 60 + 1.0)


def test_a_machine_that_returns_goes_on_counting_and_one_that_was_released_counts_again(
    roster: Roster,
) -> None:
    meter = make()
    member = join(roster, "w", 1.0)
    meter.update(roster, bytes_sent=0, now=0.0)
    del roster.nodes["w"]
    meter.update(roster, bytes_sent=0, now=600.0)
    roster.nodes["w"] = member
    for now in (1200.0, HOUR):
        meter.update(roster, bytes_sent=0, now=now)
    assert meter.total == pytest.approx(1.0)
    assert meter.unconfirmed_per_h == 0.0
    roster.move(member, Presence.UNKNOWN)
    roster.release(member)
    join(roster, "w", 1.0).incarnation = "w-2"
    meter.update(roster, bytes_sent=0, now=HOUR)
    del roster.nodes["w"]
    meter.update(roster, bytes_sent=0, now=HOUR + 60.0)
    assert meter.machines_per_h == 1.0


def test_traffic_counts_by_what_nodes_report(roster: Roster) -> None:
    meter = make(per_gb=0.1)
    member = join(roster, "w", 0.0, per_gb=0.02)
    member.node.stats = NodeStats(bytes_received=10**9, bytes_sent=10**9, tokens_sampled=10**9)
    meter.update(roster, bytes_sent=2 * 10**9, now=60.0)
    # 2 GB of weights and 17 GB of rollouts at the worker, 2 GB at the learner.
    assert meter.total == pytest.approx(0.02 * 19 + 0.1 * 2)
    meter.update(roster, bytes_sent=2 * 10**9, now=120.0)
    assert meter.total == pytest.approx(0.02 * 19 + 0.1 * 2)
    member.incarnation, member.node.stats = "w-2", NodeStats(bytes_received=5 * 10**8)
    meter.update(roster, bytes_sent=2 * 10**9, now=180.0)
    assert meter.total == pytest.approx(0.02 * 19.5 + 0.1 * 2)
    assert meter.take_by_node() == pytest.approx({"learner": 0.1 * 2, "w": 0.02 * 19.5})
    assert meter.traffic_per_h > 0


def test_traffic_from_before_a_resume_is_not_counted_again(roster: Roster) -> None:
    meter = make(spent=7.5)
    assert meter.has_prices
    assert meter.total == 7.5
    member = join(roster, "w", 0.0, per_gb=0.02)
    meter.update(roster, bytes_sent=0, now=1.0)
    for gigabytes in (400, 401):
        member.node.stats = NodeStats(bytes_received=gigabytes * 10**9)
        member.tokens_sampled = 0
        meter.update(roster, bytes_sent=0, now=float(gigabytes))
    assert meter.total == pytest.approx(7.5 + 0.02)


def test_without_a_price_there_is_nothing_to_show(roster: Roster) -> None:
    meter = make()
    join(roster, "w", None)
    meter.update(roster, bytes_sent=10**9, now=HOUR)
    assert not meter.has_prices
    assert meter.total == 0.0


@pytest.mark.parametrize("field", ["per_h", "per_gb", "losses_per_h"])
def test_a_price_that_is_none_is_refused(field: str) -> None:
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"price.{field}"):
            Price(**{field: value})
