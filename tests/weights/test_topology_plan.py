"""Plans: which one is made, when, of what, how it is numbered, and who keeps its place."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.rollout import PolicyVersion
from echo.leases.scheduler import Scheduler
from echo.roles.learner import Learner
from echo.roles.members import Member, Presence
from echo.roles.plans import Publishing
from echo.weights.topology import plan as planning_module
from echo.weights.topology.plan import (
    BUSY_GAIN,
    MAX_PARENTS,
    MIN_GAIN,
    NEWS_S,
    REPLAN_S,
    WORTHWHILE_S,
    Parents,
    Planner,
    Topology,
    patched,
    plan_parents,
    plan_topology,
    with_backups,
)
from echo.weights.topology.sites import PlannedNode, Site
from echo.weights.topology.throughput import fluid_rate
from echo.wire.actions import Action, Note
from echo.wire.messages import LEARNER_ID, NodeStats, TopologyPlan
from tests.promises.conftest import MakeWorld, make_world  # noqa: F401 -- a fixture
from tests.promises.world import CHUNK_BYTES
from tests.roles.harness import make_hello
from tests.weights.encoded_versions import v
from tests.weights.fleets import MBIT, check, draw, flat, fleet_of, learner, site, tree_of

LEARNER = ("learner", "")


def planned(
    sites: list[Site],
    *,
    root: Site | None = None,
    payload_bytes: int = 16 * 10**9,
    previous: Topology | None = None,
) -> Topology:
    found = plan_topology(
        sites,
        learner=root or learner(100),
        payload_bytes=payload_bytes,
        chunk_bytes=1 << 20,
        rtt_s=flat,
        previous=previous,
    )
    check(found, sites)
    return found


def equal(num_nodes: int) -> list[Site]:
    return [site(f"n{i}") for i in range(num_nodes)]


# --- which plan ----------------------------------------------------------------------------------


def test_nobody_to_serve_is_a_plan() -> None:
    found = planned([])
    assert (found.parents, found.predicted_s) == ({}, 0.0)


def test_a_few_equal_nodes_form_a_chain_for_a_full_snapshot() -> None:
    found = planned(equal(16))
    assert found.kind == "chain"
    assert found.rate_bytes_per_s == pytest.approx(100 * MBIT)
    star = next(c for c in found.candidates if c.kind == "star")
    assert star.predicted_s / found.predicted_s > 14


def test_many_equal_nodes_take_a_flatter_tree_for_a_small_delta() -> None:
    found = planned(equal(200), payload_bytes=10**6)
    assert found.kind == "tree"
    line = next(c for c in found.candidates if c.kind == "chain")
    assert line.predicted_s > 1.5 * found.predicted_s
    assert list(tree_of(found).values()).count("learner") == 1


def test_a_star_where_the_learners_uplink_is_all_there_is() -> None:
    nodes = [site(f"n{i}", 0) for i in range(5)]
    assert planned(nodes).kind == "star"


def test_a_second_copy_leaves_the_learner_only_where_it_saves_time() -> None:
    thrifty = planned(equal(16), root=learner(105))
    assert list(tree_of(thrifty).values()).count("learner") == 1
    rich = planned(equal(8), root=learner(1000))
    assert rich.rate_bytes_per_s > 1.2 * thrifty.rate_bytes_per_s


def test_a_node_with_a_thin_downlink_is_a_leaf_and_holds_up_nobody() -> None:
    thin = site("thin", 100, downlink_bytes_per_s=1 * MBIT)
    found = planned([thin, *equal(8)])
    assert found.rate_bytes_per_s > 50 * MBIT
    assert "thin" not in tree_of(found).values()


def crossings(found: Topology, sites: list[Site], home: str) -> list[tuple[str, str]]:
    """Return (from, to) for every link between regions."""
    regions = {"learner": home} | {each.node_id: each.region for each in sites}
    ways = [(regions[parent], regions[name]) for name, parent in tree_of(found).items()]
    return [(first, second) for first, second in ways if first != second]


@pytest.mark.parametrize("num_mbit", [100, 400])
@pytest.mark.parametrize("payload_bytes", [16 * 10**9, 143 * 10**6])
@pytest.mark.parametrize("seed", range(3))
def test_no_region_is_entered_twice_though_the_learner_could_send_more(
    seed: int, payload_bytes: int, num_mbit: int
) -> None:
    """Nor is the learner's own region entered, and a node behind NAT hangs from its neighbours."""
    rng = random.Random(seed)
    names = rng.choices(("us", "eu", "ap"), k=18)
    sites = [site(f"n{i}", region=region) for i, region in enumerate(names)]
    if num_mbit > 100:  # else the nodes' own uplinks would not suffice
        sites += [Site(f"nat-{region}", "worker", None, region=region) for region in {*names}]
    sites = rng.sample(sites, len(sites))
    found = planned(sites, root=learner(num_mbit, region="us"), payload_bytes=payload_bytes)
    ways = crossings(found, sites, "us")
    entered = sorted({*names} - {"us"})
    assert sorted(second for _, second in ways) == entered
    assert found.predicted_s <= 1.6 * found.candidates[0].predicted_s


def test_a_region_is_let_have_more_where_one_entry_would_take_much_longer() -> None:
    hidden = [Site(f"eu{i}", "worker", None, region="eu") for i in range(6)]
    sites = [*hidden, *(site(f"us{i}", region="us") for i in range(6))]
    found = planned(sites, root=learner(100, region="us"))
    assert all(way == ("us", "eu") for way in crossings(found, sites, "us"))
    rich = learner(10_000, region="us")
    sites = [site(f"n{i}", 10, region="us" if i % 2 else "eu") for i in range(12)]
    found = planned(sites, root=rich)
    assert len(crossings(found, sites, "us")) > 1
    assert found.predicted_s < 2 * found.candidates[0].predicted_s


def test_a_region_that_cannot_feed_itself_does_not_slow_the_others() -> None:
    nodes = [site(f"us{i}", 200, region="us") for i in range(8)]
    nodes += [site(f"eu{i}", 1, region="eu") for i in range(4)]
    found = planned(nodes, root=learner(200, region="us"))
    assert found.rate_bytes_per_s > 90 * MBIT


def test_of_equally_fast_plans_the_one_with_less_paid_egress_is_taken() -> None:
    nodes = [site("dear", region="us", price_per_gb=0.1), site("free", region="us")]
    nodes += [site("far", region="eu")]
    found = planned(nodes, root=learner(100, region="us"))
    assert tree_of(found)["far"] != "dear"


@pytest.mark.parametrize("payload_bytes", [16 * 10**9, 143 * 10**6])
@pytest.mark.parametrize("place", [0, 5])
def test_a_region_is_left_where_traffic_costs_least(place: int, payload_bytes: int) -> None:
    prices = [0.09] * 8
    prices[place] = 0.01
    sites = [site(f"us{i}", region="us", price_per_gb=price) for i, price in enumerate(prices)]
    sites += [site(f"eu{i}", region="eu") for i in range(8)]
    root = dataclasses.replace(learner(100, region="us"), price_per_gb=0.12)
    found = planned(sites, root=root, payload_bytes=payload_bytes)
    assert crossings(found, sites, "us") == [("us", "eu")]
    leaving = [parent for name, parent in tree_of(found).items() if name.startswith("eu")]
    assert {name for name in leaving if not name.startswith("eu")} == {f"us{place}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "median", "worst"),
    [("log-normal", 0.68, 0.62), ("80/20", 0.98, 0.72), ("half NAT", 0.98, 0.8)],
)
@pytest.mark.parametrize("num_nodes", [16, pytest.param(64, marks=pytest.mark.matrix)])
def test_with_unequal_uplinks_one_tree_comes_near_the_fluid_optimum(
    kind: str, num_nodes: int, median: float, worst: float
) -> None:
    rng = random.Random(num_nodes)
    shares = []
    for _ in range(20):
        nodes = draw(kind, num_nodes, rng)
        ups = [s.uplink_bytes_per_s or 0.0 for s in nodes]
        best = fluid_rate(1000 * MBIT, ups, [s.downlink_bytes_per_s or 0.0 for s in nodes])
        shares.append(planned(nodes, root=learner(1000)).rate_bytes_per_s / best)
    assert statistics.median(shares) >= median
    assert min(shares) >= worst


# --- what holds of every plan --------------------------------------------------------------------

RATES = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 20.0, 100.0, 100.0, 1000.0]))
THIN = 1e5


@st.composite
def fleets(draw: st.DrawFn) -> list[Site]:
    num_nodes = draw(st.integers(1, 24))
    return [
        site(
            f"n{i}",
            draw(RATES),
            downlink_bytes_per_s=draw(st.sampled_from([None, None, THIN, 3e7])),
            region=draw(st.sampled_from(["", "us", "eu"])),
            price_per_gb=draw(st.sampled_from([0.0, 0.09])),
            is_suspect=draw(st.integers(0, 9)) == 0,
        )
        if draw(st.integers(0, 4))
        else Site(f"n{i}", "worker", None, draw(RATES))
        for i in range(num_nodes)
    ]


PAYLOADS = st.sampled_from([1, 3 << 20, 143 * 10**6, 16 * 10**9])


@pytest.mark.slow
@given(fleets(), st.sampled_from([None, 20.0, 1000.0]), PAYLOADS)
def test_every_plan_hangs_from_the_learner(
    nodes: list[Site], mbit: float | None, payload_bytes: int
) -> None:
    root = learner(mbit, region="us")
    found = planned(nodes, root=root, payload_bytes=payload_bytes)
    # Nobody is given more links than its uplink can feed at the rate that was promised.
    link = found.rate_bytes_per_s
    known = {s.node_id: s.uplink_bytes_per_s for s in nodes} | {"learner": root.uplink_bytes_per_s}
    served: dict[str, list[str]] = {}
    for name, parent in tree_of(found).items():
        served.setdefault(parent, []).append(name)
    fleet = fleet_of(nodes, root)
    thin = {fleet.names[i] for i in fleet.stragglers}
    for name, children in served.items():
        uplink = known[name]
        # Who can take next to nothing was promised nothing.
        if uplink is not None and not thin.issuperset(children):
            assert len(children) * link <= uplink * (1 + 1e-6)
    again = planned(nodes, root=root, payload_bytes=payload_bytes)
    assert again == found


@pytest.mark.slow
@given(fleets(), fleets(), st.sets(st.integers(0, 23)), PAYLOADS)
def test_every_plan_that_follows_another_hangs_from_the_learner(
    before: list[Site], after: list[Site], moved: set[int], payload_bytes: int
) -> None:
    old = planned(before, payload_bytes=payload_bytes)
    # Some nodes stay as they were, some come, go or become suspects.
    nodes = [before[i] if i < len(before) and i not in moved else s for i, s in enumerate(after)]
    planned(nodes, payload_bytes=payload_bytes, previous=old)


# --- staying with a plan -------------------------------------------------------------------------


def noisy(nodes: list[Site], rng: random.Random) -> list[Site]:
    return [
        dataclasses.replace(s, uplink_bytes_per_s=s.uplink_bytes_per_s * rng.uniform(0.96, 1.04))
        for s in nodes
        if s.uplink_bytes_per_s is not None
    ]


def test_rates_that_are_measured_again_move_nobody() -> None:
    rng = random.Random(3)
    nodes = draw("log-normal", 40, rng)
    found = planned(nodes, root=learner(1000))
    for _ in range(5):
        again = planned(noisy(nodes, rng), root=learner(1000), previous=found)
        assert again.parents == found.parents


def test_a_newcomer_moves_nobody() -> None:
    found = planned(equal(30), payload_bytes=143 * 10**6)
    grown = planned([*equal(30), site("new")], payload_bytes=143 * 10**6, previous=found)
    assert {name: grown.parents[name] for name in found.parents} == found.parents


def test_who_leaves_moves_only_its_own_children() -> None:
    found = planned(equal(30), payload_bytes=143 * 10**6)
    left = planned(
        [s for s in equal(30) if s.node_id != "n7"], payload_bytes=143 * 10**6, previous=found
    )
    old, new = tree_of(found), tree_of(left)
    assert {name for name in new if new[name] != old[name]} == {
        name for name in old if old[name] == "n7"
    }


def test_a_clearly_better_plan_replaces_the_old_one() -> None:
    slow = [site(f"n{i}", 10 if i < 8 else 100) for i in range(16)]
    found = planned(slow)
    fast = planned(equal(16), previous=found)
    assert fast.predicted_s < 1.1 * planned(equal(16)).predicted_s


# --- the chain of before -------------------------------------------------------------------------


def plan(*sites: Site) -> dict[str, list[str]]:
    parents = plan_parents(sites)
    return {name: [node_id for node_id, _ in chosen] for name, chosen in parents.items()}


def relay(name: str) -> Site:
    return Site(name, "relay", f"tcp://{name}:1")


def worker(name: str, *, listens: bool = False) -> Site:
    return Site(name, "worker", f"tcp://{name}:1" if listens else None)


def test_leaves_are_dealt_round_robin_from_the_end() -> None:
    found = plan(relay("r1"), relay("r2"), worker("w1"), worker("w2"), worker("w3"))
    assert [found[name][0] for name in ("w1", "w2", "w3")] == ["r2", "r1", "r2"]


@given(st.lists(st.tuples(st.sampled_from(["relay", "worker"]), st.booleans()), max_size=12))
def test_every_plan_is_a_tree_that_hangs_from_the_learner(kinds: list[tuple[str, bool]]) -> None:
    sites = [
        Site(f"n{i}", role, f"tcp://n{i}:1" if listens else None)
        for i, (role, listens) in enumerate(kinds)
    ]
    address_of = {site.node_id: site.address for site in sites} | {LEARNER[0]: LEARNER[1]}
    parents = plan_parents(sites)
    assert parents.keys() == {site.node_id for site in sites}
    for name, chosen in parents.items():
        assert chosen[-1] == LEARNER
        assert len({node_id for node_id, _ in chosen}) == len(chosen)
        assert all(address_of[node_id] == address for node_id, address in chosen)
        # Whichever parents are chosen, no circle can arise.
        for node_id, _ in chosen[:-1]:
            assert name not in {above for above, _ in parents[node_id]}
            assert len(parents[node_id]) < len(chosen)
    at_the_root = [name for name, chosen in parents.items() if chosen[0] == LEARNER]
    if any(site.address for site in sites):
        assert len(at_the_root) == 1


MB = 1e6
# --- the planner ----------------------------------------------------------------------------------

ROOT = Site(LEARNER_ID, "learner", "tcp://l:1", region="here")


def make_planner(payload_bytes: int = 1 << 30) -> Planner:
    planning = Planner(learner=ROOT, chunk_bytes=1 << 20)
    planning.payload_bytes = payload_bytes
    return planning


def member(
    name: str, *, role: str = "worker", is_listening: bool = True, region: str = "", **stats: Any
) -> PlannedNode:
    address = f"tcp://{name}:1" if is_listening else None
    given = {"uplink_bytes_per_s": 100 * MB} | stats
    return PlannedNode(name, role, address, region, stats=NodeStats(**given))


def plans_of(
    planning: Planner,
    *members: PlannedNode,
    now: float = 0.0,
    uplink: float | None = 100 * MB,
    is_between: bool = False,
) -> dict[str, TopologyPlan]:
    return planning.plan(members, uplink_bytes_per_s=uplink, now=now, is_between=is_between)


def first_parents(plans: dict[str, TopologyPlan]) -> dict[str, str]:
    return {name: each.first_parent for name, each in plans.items()}


def test_a_plan_is_numbered_anew_only_if_somebody_moves() -> None:
    planning = make_planner()
    members = [member(f"w{number}") for number in range(4)]
    first = plans_of(planning, *members)
    assert plans_of(planning, *members, now=10.0) == first
    more = plans_of(planning, *members, member("w4"), now=20.0)
    assert {each.epoch for each in more.values()} == {2}


def test_another_plan_is_due_only_where_versions_take_long() -> None:
    planning = make_planner(payload_bytes=1 << 40)
    plans_of(planning, member("w0"), now=5.0)
    assert planning.topology is not None
    assert planning.topology.predicted_s >= WORTHWHILE_S
    assert not planning.is_due(now=5.0 + REPLAN_S - 0.1)
    assert planning.is_due(now=5.0 + REPLAN_S)
    small = make_planner(payload_bytes=1000)
    plans_of(small, member("w0", uplink_bytes_per_s=None), now=5.0)
    assert not small.is_due(now=1e6)
    # The forecast was made without this uplink, which may be slow.
    small.learn(NodeStats(uplink_bytes_per_s=100.0), former=NodeStats())
    assert small.is_due(now=5.0 + NEWS_S)
    plans_of(small, member("w0", uplink_bytes_per_s=1 * MB), now=7.0)
    assert not small.is_due(now=1e6)


def test_between_versions_another_plan_is_due_where_none_was_made_at_rest() -> None:
    planning = make_planner(payload_bytes=1 << 40)
    busy = member("w0", fetching=v(2))
    busy.installed = v(1)
    plans_of(planning, busy, now=5.0, is_between=True)
    plans_of(planning, busy, now=10.0)
    now = 5.0 + REPLAN_S
    assert not planning.is_due(now=now)
    assert not planning.is_due(now=now - 0.1, is_between=True)
    assert planning.is_due(now=now, is_between=True)
    plans_of(planning, busy, now=now, is_between=True)
    assert not planning.is_due(now=now + REPLAN_S - 0.1, is_between=True)


def test_an_uplink_that_has_become_known_makes_another_plan_due_soon() -> None:
    planning = make_planner(payload_bytes=1 << 40)
    unknown, known = NodeStats(), NodeStats(uplink_bytes_per_s=1 * MB)
    plans_of(planning, member("w0", uplink_bytes_per_s=None), now=5.0, is_between=True)
    planning.learn(unknown, former=unknown)
    assert not planning.is_due(now=5.0 + NEWS_S)
    planning.learn(known, former=unknown)
    planning.learn(known, former=known)
    assert not planning.is_due(now=5.0 + NEWS_S - 0.1)
    assert planning.is_due(now=5.0 + NEWS_S)
    assert planning.is_due(now=5.1, is_between=True)
    plans_of(planning, member("w0"), now=7.0)
    planning.learn(known, former=known)
    assert not planning.is_due(now=7.0 + NEWS_S)


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
    plans_of(make_planner(), *members, is_between=is_between)
    assert asked == [gain]


def test_a_version_goes_out_under_a_plan_of_what_the_ones_before_have_shown(
    make_world: MakeWorld,  # noqa: F811
) -> None:
    world = make_world()
    world.learner()
    for name in ("r0", "r1", "r2"):
        world.relay(name)
    world.run(3.0)
    role: Learner = world.node("learner").role
    planning, now = role.plans.planner, world.now
    assert planning.topology is not None
    calls: list[bool] = []
    made = planning.plan

    def noting(*args: Any, is_between: bool = False, **kwargs: Any) -> dict[str, TopologyPlan]:
        calls.append(is_between)
        return made(*args, is_between=is_between, **kwargs)

    planning.plan = noting  # type: ignore[method-assign]
    assert role.handle(Publishing(), now=now + 2 * REPLAN_S) == []
    assert calls == [], "versions are small, and fast under any plan"
    planning.topology = dataclasses.replace(planning.topology, predicted_s=WORTHWHILE_S)
    role.handle(Publishing(), now=now + 2 * REPLAN_S)
    assert calls == [True]


def test_many_who_fall_silent_at_once_make_one_plan_and_one_round_of_grants(
    make_world: MakeWorld,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world()
    world.learner()
    world.worker("w0", sample_s=math.inf)
    role: Learner = world.node("learner").role
    world.run_until(lambda: role.leases.num_running > 0)
    world.kill("w0", silently=True)
    now = role.roster.nodes["w0"].last_seen_at
    num_leases = role.leases.num_leases("w0")
    for number in range(1, 200):
        member = Member.of(make_hello(f"w{number}"), now=now if number < 140 else now + 1.0)
        role.roster.move(member, Presence.ADMITTED)
    calls: list[int] = []
    made, grants = role.plans.planner.plan, Scheduler.grant

    def noting(nodes: Sequence[PlannedNode], **kwargs: Any) -> dict[str, TopologyPlan]:
        calls.append(len(nodes))
        return made(nodes, **kwargs)

    num_grants = 0

    def counting(scheduler: Scheduler, *args: Any, **kwargs: Any) -> list[Action]:
        nonlocal num_grants
        num_grants += 1
        return grants(scheduler, *args, **kwargs)

    role.plans.planner.plan = noting  # type: ignore[method-assign]
    monkeypatch.setattr(Scheduler, "grant", counting)
    actions = role.expire(now=now + role.settings.admission.dead_after_s + 0.5)
    notes = [action.text for action in actions if isinstance(action, Note)]
    [told] = [text for text in notes if "silent for" in text]
    assert told.startswith("w0, w1, w2, w3, w4 and 135 more are silent for ")
    assert any(f"{num_leases} groups are granted again" in text for text in notes)
    assert calls == [60]
    assert num_grants == 1
    assert role.leases.num_leases("w0") == 0


def test_a_run_plans_for_the_versions_that_it_has_published(
    make_world: MakeWorld,  # noqa: F811
) -> None:
    world = make_world()
    world.learner()
    world.relay()
    world.run(3.0)
    role: Learner = world.node("learner").role
    payload = role.broadcast.payload
    assert payload is not None
    assert role.plans.planner.payload_bytes == payload.num_bytes
    assert role.plans.planner.chunk_bytes == payload.chunk_size(0) == CHUNK_BYTES
    role.plans.planner.expect(None)
    assert role.plans.planner.chunk_bytes == CHUNK_BYTES, "nothing is known before the first one"


@pytest.mark.parametrize("payload_bytes", [1, 1000, 1 << 20, 1 << 44])
@pytest.mark.parametrize("uplink", [None, 1.0, 1e12])
def test_any_payload_and_any_uplink_can_be_planned(
    payload_bytes: int, uplink: float | None
) -> None:
    plans = plans_of(make_planner(payload_bytes), member("w0"), member("w1"), uplink=uplink)
    assert sorted(plans) == ["w0", "w1"]


def test_whom_anybody_suspects_serves_nobody() -> None:
    members = [member(f"w{number}") for number in range(4)]
    honest = first_parents(plans_of(make_planner(), *members))
    assert "w0" in honest.values()
    members[3] = member("w3", suspects=("w0",))
    plans = plans_of(make_planner(), *members)
    served_by = {node for each in plans.values() for node, _ in each.parents}
    assert "w0" not in served_by


def test_relays_come_first_where_nothing_else_is_known() -> None:
    members = [member(f"w{number}", uplink_bytes_per_s=None) for number in range(3)]
    members.append(member("r", role="relay", uplink_bytes_per_s=None))
    plans = plans_of(make_planner(), *members, uplink=None)
    assert first_parents(plans)["r"] == LEARNER_ID
    assert any(parent == "r" for name, parent in first_parents(plans).items() if name != "r")


def test_a_new_host_has_a_small_fleet_planned_afresh() -> None:
    planning = make_planner()
    slow = [member(f"w{number}", uplink_bytes_per_s=MB) for number in range(4)]
    plans_of(planning, *slow)
    fast = member("z", uplink_bytes_per_s=1000 * MB)
    parents = first_parents(plans_of(planning, *slow, fast, now=1.0))
    assert any(parent == "z" for name, parent in parents.items() if name != "z")


def test_where_nobody_is_told_the_learners_address_relays_come_first() -> None:
    """Who reaches the learner through a relay cannot take weights from it."""
    planning = Planner(learner=Site(LEARNER_ID, "learner", ""), chunk_bytes=1 << 20)
    relay = member("r1", role="relay", uplink_bytes_per_s=MB)
    plans = plans_of(planning, member("w1"), relay)
    assert first_parents(plans) == {"r1": LEARNER_ID, "w1": "r1"}


def test_behind_relays_a_suspect_serves_only_who_has_nobody_else() -> None:
    planning = Planner(learner=Site(LEARNER_ID, "learner", ""), chunk_bytes=1 << 20)
    relays = [member("r1", role="relay"), member("r2", role="relay"), member("r3", role="relay")]
    workers = [member(f"w{number}", is_listening=False) for number in range(3)]
    workers[0] = member("w0", is_listening=False, suspects=("r2",))
    plans = plans_of(planning, *relays, *workers)
    names = {name: [node for node, _ in plan.parents] for name, plan in plans.items()}
    assert names["r3"] == ["r1", "learner"]
    for number in range(3):
        assert names[f"w{number}"][0] in ("r1", "r3")
        assert names[f"w{number}"][-2:] == ["r2", "learner"]
    alone = plans_of(planning, relays[1], workers[0])
    assert [node for node, _ in alone["w0"].parents] == ["r2", "learner"]


NODES = [site(f"n{i}", 200) for i in range(1, 8)]
#        1 .. 7 in a line, two of them as leaves of n5
TREE = [-1, 0, 1, 2, 3, 4, 5, 5]


def parents_of(nodes: list[Site], tree: list[int]) -> Parents:
    return with_backups(fleet_of(nodes), tree, previous={})


def patch(nodes: list[Site], rate: float = 100 * MBIT) -> list[str] | None:
    fleet = fleet_of(nodes)
    tree = patched(fleet, parents_of(NODES, TREE), rate_bytes_per_s=rate)
    return None if tree is None else [fleet.names[i] if i >= 0 else "-" for i in tree]


def test_a_newcomer_goes_where_there_is_room_nearest_to_the_learner() -> None:
    found = patch([*NODES, site("new")])
    assert found is not None
    assert found[-1] == "n1"


def test_without_room_it_goes_where_most_is_left() -> None:
    found = patch([*NODES, site("new")], rate=1000 * MBIT)
    assert found is not None
    assert found[-1] == "learner"


def test_the_place_of_the_first_node_is_taken_over() -> None:
    found = patch([s for s in NODES if s.node_id != "n1"])
    assert found is not None
    assert found[1] == "learner"


def test_too_many_changes_are_not_patched() -> None:
    assert patch([*NODES, *(site(f"x{i}") for i in range(4))]) is None


#            learner
#            1     2
#          3   4   5
#        6   7
SMALL_TREE = [-1, 0, 0, 1, 1, 2, 3, 3]


def parents_by_name(num_nodes: int, tree: list[int]) -> dict[str, list[str]]:
    fleet = fleet_of([site(f"n{i}") for i in range(1, num_nodes + 1)])
    found = with_backups(fleet, tree, previous={})
    return {name: [node_id for node_id, _ in hops] for name, hops in found.items()}


def test_parent_first_then_a_stand_in_that_differs_between_siblings() -> None:
    found = parents_by_name(7, SMALL_TREE)
    assert found["n1"] == ["learner"]
    assert found["n3"] == ["n1", "n2", "learner"]
    assert found["n6"][0] == found["n7"][0] == "n3"
    assert found["n6"][1] == "n1"
    assert found["n7"][1] in ("n4", "n5")
    assert found["n7"][-2:] == ["n1", "learner"]


def test_lists_are_bounded() -> None:
    found = parents_by_name(20, [-1, *range(20)])
    assert max(map(len, found.values())) == MAX_PARENTS
    assert found["n20"] == ["n19", "n18", "n17", "n16", "n15", "learner"]


def test_a_list_that_still_serves_is_kept() -> None:
    nodes = [site(f"n{i}") for i in range(1, 8)]
    fleet = fleet_of(nodes)
    other = with_backups(fleet, SMALL_TREE, previous={})
    hop = {name: (name, f"tcp://{name}:1") for name in fleet.names}
    learner = ("learner", "tcp://l:1")
    mine = (hop["n3"], hop["n5"], learner)
    assert with_backups(fleet, SMALL_TREE, previous={**other, "n6": mine})["n6"] == mine
    # Not one that names a node as far from the learner as itself, or at an old address.
    for bad in ((hop["n3"], hop["n7"], learner), (hop["n3"], ("n5", "tcp://old:1"), learner)):
        assert with_backups(fleet, SMALL_TREE, previous={**other, "n6": bad}) == other
