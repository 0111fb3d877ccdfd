"""When a plan is made, what of the nodes goes into it, and how it is numbered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from echo.core.rollout import PolicyVersion
from echo.roles.learner import Learner
from echo.roles.members import Member, Presence
from echo.weights.topology import plan as planning_module
from echo.weights.topology.plan import (
    BUSY_GAIN,
    MIN_GAIN,
    REPLAN_S,
    WORTHWHILE_S,
    Planner,
    Topology,
    plan_topology,
)
from echo.weights.topology.sites import PlannedNode, Site
from echo.wire.actions import Action, Note
from echo.wire.messages import LEARNER_ID, Hello, NodeStats, TopologyPlan
from tests.roles.harness import CHUNK_BYTES, Run
from tests.weights.encoded_versions import v

MB = 1e6
LEARNER = Site(LEARNER_ID, "learner", "tcp://l:1", region="here")


def make(payload_bytes: int = 1 << 30) -> Planner:
    planning = Planner(learner=LEARNER, chunk_bytes=1 << 20)
    planning.payload_bytes = payload_bytes
    return planning


def member(
    name: str, *, role: str = "worker", is_listening: bool = True, region: str = "", **stats: Any
) -> PlannedNode:
    address = f"tcp://{name}:1" if is_listening else None
    given = {"uplink_bytes_per_s": 100 * MB} | stats
    return PlannedNode(name, role, address, region, stats=NodeStats(**given))


def plan(
    planning: Planner,
    *members: PlannedNode,
    now: float = 0.0,
    uplink: float | None = 100 * MB,
    is_between: bool = False,
) -> dict[str, TopologyPlan]:
    return planning.plan(members, uplink_bytes_per_s=uplink, now=now, is_between=is_between)


def first_parents(plans: dict[str, TopologyPlan]) -> dict[str, set[str]]:
    return {name: {stripe[0][0] for stripe in each.stripes} for name, each in plans.items()}


def test_a_plan_is_numbered_anew_only_if_somebody_moves() -> None:
    planning = make()
    members = [member(f"w{number}") for number in range(4)]
    first = plan(planning, *members)
    assert plan(planning, *members, now=10.0) == first
    more = plan(planning, *members, member("w4"), now=20.0)
    assert {each.epoch for each in more.values()} == {2}


def test_another_plan_is_due_only_where_versions_take_long() -> None:
    planning = make(payload_bytes=1 << 40)
    plan(planning, member("w0"), now=5.0)
    assert planning.topology is not None
    assert planning.topology.predicted_s >= WORTHWHILE_S
    assert not planning.is_due(now=5.0 + REPLAN_S - 0.1)
    assert planning.is_due(now=5.0 + REPLAN_S)
    small = make(payload_bytes=1000)
    plan(small, member("w0"), now=5.0)
    assert not small.is_due(now=1e6)


def test_between_versions_another_plan_is_due_where_none_was_made_at_rest() -> None:
    planning = make(payload_bytes=1 << 40)
    busy = member("w0", fetching=v(2))
    busy.installed = v(1)
    plan(planning, busy, now=5.0, is_between=True)
    plan(planning, busy, now=10.0)
    now = 5.0 + REPLAN_S
    assert not planning.is_due(now=now)
    assert not planning.is_due(now=now - 0.1, is_between=True)
    assert planning.is_due(now=now, is_between=True)
    plan(planning, busy, now=now, is_between=True)
    assert not planning.is_due(now=now + REPLAN_S - 0.1, is_between=True)


@pytest.mark.parametrize(
    ("fetching", "installed", "is_between", "gain"),
    [
        (None, v(1), False, MIN_GAIN),
        (v(2), v(1), False, BUSY_GAIN),
        (v(2), v(1), True, MIN_GAIN),
        (v(1), None, False, MIN_GAIN),
    ],
    ids=["at rest", "in mid-transfer", "between versions", "in the first version"],
)
def test_in_mid_transfer_another_plan_must_save_more(
    fetching: PolicyVersion | None,
    installed: PolicyVersion | None,
    is_between: bool,
    gain: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def noting(*args: Any, min_gain: float, **kwargs: Any) -> Topology:
        asked.append(min_gain)
        return plan_topology(*args, min_gain=min_gain, **kwargs)

    monkeypatch.setattr(planning_module, "plan_topology", noting)
    members = [member("w0"), member("w1", fetching=fetching)]
    for each in members:
        each.installed = installed
    plan(make(), *members, is_between=is_between)
    assert asked == [gain]


def test_a_version_goes_out_under_a_plan_of_what_the_ones_before_have_shown(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    session = run.start_learner().session
    assert isinstance(session, Learner)
    for name in ("w0", "w1", "w2"):
        run.start_relay(name)
    run.world.run(3.0)
    planning, now = session.planning, run.world.now
    assert planning.topology is not None
    calls: list[bool] = []
    made = planning.plan

    def noting(*args: Any, is_between: bool = False, **kwargs: Any) -> dict[str, TopologyPlan]:
        calls.append(is_between)
        return made(*args, is_between=is_between, **kwargs)

    planning.plan = noting  # type: ignore[method-assign]
    assert session.make_way(now=now + 2 * REPLAN_S) == []
    assert calls == [], "versions are small, and fast under any plan"
    planning.topology = dataclasses.replace(planning.topology, predicted_s=WORTHWHILE_S)
    session.make_way(now=now + 2 * REPLAN_S)
    assert calls == [True]


def test_many_who_fall_silent_at_once_make_one_plan_and_one_round_of_grants(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.is_training = False
    process = run.start_learner()
    session = process.session
    assert isinstance(session, Learner)
    first = run.start_worker("w0")
    run.world.run_until(lambda: session.leases.num_running > 0, within_s=10.0)
    run.world.kill(first, is_silent=True)
    now = session.roster.nodes["w0"].heard_at
    num_leases = session.leases.num_leases("w0")
    for number in range(1, 200):
        hello = Hello(
            node_id=f"w{number}",
            role="worker",
            incarnation="i",
            echo_version="",
            advertise=None,
            digests={},
        )
        member = Member.of(hello, now=now if number < 140 else now + 1.0)
        session.roster.move(member, Presence.ADMITTED)
    calls: list[int] = []
    made, grants = session.planning.plan, session.grant

    def noting(members: Sequence[PlannedNode], **kwargs: Any) -> dict[str, TopologyPlan]:
        calls.append(len(members))
        return made(members, **kwargs)

    num_grants = 0

    def counting(*, now: float) -> list[Action]:
        nonlocal num_grants
        num_grants += 1
        return grants(now=now)

    session.planning.plan = noting  # type: ignore[method-assign]
    session.grant = counting  # type: ignore[method-assign]
    actions = session.expire(now=now + session.settings.admission.dead_after_s + 0.5)
    notes = [action.text for action in actions if isinstance(action, Note)]
    [told] = [text for text in notes if "silent for" in text]
    assert told.startswith("w0, w1, w2, 137 others are silent for ")
    assert any(f"{num_leases} groups are granted again" in text for text in notes)
    assert calls == [60]
    assert num_grants == 1
    assert session.leases.num_leases("w0") == 0


def test_a_run_plans_for_the_versions_that_it_has_published(tmp_path: Path) -> None:
    run = Run(tmp_path)
    learner = run.start_learner()
    run.start_relay("r")
    run.world.run(3.0)
    session = learner.session
    assert isinstance(session, Learner)
    payload = session.broadcast.payload
    assert payload is not None
    assert session.planning.payload_bytes == payload.num_bytes
    assert session.planning.chunk_bytes == payload.chunk_size(0) == CHUNK_BYTES


@pytest.mark.parametrize("payload_bytes", [1, 1000, 1 << 20, 1 << 44])
@pytest.mark.parametrize("uplink", [None, 1.0, 1e12])
def test_any_payload_and_any_uplink_can_be_planned(
    payload_bytes: int, uplink: float | None
) -> None:
    plans = plan(make(payload_bytes), member("w0"), member("w1"), uplink=uplink)
    assert sorted(plans) == ["w0", "w1"]


def test_whom_anybody_suspects_serves_nobody() -> None:
    members = [member(f"w{number}") for number in range(4)]
    honest = first_parents(plan(make(), *members))
    assert "w0" in set().union(*honest.values())
    members[3] = member("w3", suspects=("w0",))
    plans = plan(make(), *members)
    served_by = {node for each in plans.values() for stripe in each.stripes for node, _ in stripe}
    assert "w0" not in served_by


def test_relays_come_first_where_nothing_else_is_known() -> None:
    members = [member(f"w{number}", uplink_bytes_per_s=None) for number in range(3)]
    members.append(member("r", role="relay", uplink_bytes_per_s=None))
    plans = plan(make(), *members, uplink=None)
    assert first_parents(plans)["r"] == {LEARNER_ID}
    assert any("r" in parents for name, parents in first_parents(plans).items() if name != "r")


def test_a_new_host_has_a_small_fleet_planned_afresh() -> None:
    planning = make()
    slow = [member(f"w{number}", uplink_bytes_per_s=MB) for number in range(4)]
    plan(planning, *slow)
    fast = member("z", uplink_bytes_per_s=1000 * MB)
    parents = first_parents(plan(planning, *slow, fast, now=1.0))
    assert any("z" in of for name, of in parents.items() if name != "z")


def test_where_nobody_is_told_the_learners_address_relays_come_first() -> None:
    """Who reaches the learner through a relay cannot take weights from it."""
    planning = Planner(learner=Site(LEARNER_ID, "learner", ""), chunk_bytes=1 << 20)
    slow = {"uplink_bytes_per_s": MB}
    plans = plan(planning, member("w1"), member("r1", role="relay", **slow))
    assert first_parents(plans) == {"r1": {LEARNER_ID}, "w1": {"r1"}}
