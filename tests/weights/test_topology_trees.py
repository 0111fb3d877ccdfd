"""Trees are those of the rate they were built for, and the forecast that of closed formulas."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.weights.topology.sites import Sites
from echo.weights.topology.throughput import (
    HOP_WORK_S,
    Tree,
    fluid_rate,
    num_children,
    order,
    throughput_of,
)
from echo.weights.topology.trees import bounded_tree, chain, slots_of, star
from tests.weights.fleets import MBIT, draw, fleet_of, learner, site


def test_slots_are_those_of_the_largest_rate_that_can_be_built() -> None:
    fleet = fleet_of([site("a", 100), site("b", 100), site("c", 50)], learner(100))
    # At 100 the learner, a and b feed one each.
    assert slots_of(fleet, does_spare_learner=True) == [1, 1, 1, 0]


def test_where_nobody_can_serve_the_learner_cannot_be_spared() -> None:
    fleet = fleet_of([site("a", 0), site("b", 0)])
    assert bounded_tree(fleet, does_spare_learner=True) is None
    assert chain(fleet) is None
    assert bounded_tree(fleet, does_spare_learner=False) == [-1, 0, 0]


def test_a_chain_is_a_line_and_slow_nodes_are_its_leaves() -> None:
    fleet = fleet_of([site("slow", 1), *(site(f"n{i}") for i in range(5))], learner(100))
    line = chain(fleet)
    assert line is not None
    assert num_children(line) == [1, 0, 1, 1, 1, 1, 1]
    assert order(line)[-1] == 1


def test_what_is_built_has_the_rate_that_the_slots_were_for() -> None:
    rng = random.Random(1)
    for _ in range(20):
        fleet = fleet_of(draw("log-normal", 30, rng))
        slots = slots_of(fleet, does_spare_learner=False)
        tree = bounded_tree(fleet, does_spare_learner=False)
        assert tree is not None
        assert slots is not None
        assert all(count <= slot for count, slot in zip(num_children(tree), slots, strict=True))
        assert len(order(tree)) == 31


def test_a_smaller_share_of_the_rate_gives_flatter_trees() -> None:
    fleet = fleet_of([site(f"n{i}") for i in range(100)], learner(100))
    depths = []
    for share in (1.0, 0.25):
        tree = bounded_tree(fleet, does_spare_learner=True, share=share)
        assert tree is not None
        node, hops = order(tree)[-1], 0
        while node:
            node, hops = tree[node], hops + 1
        depths.append(hops)
    assert depths[0] == 100
    assert depths[1] <= 6


SIZE, CHUNK = 128 << 20, 1 << 20
UPLINK = 100 * MBIT
LATENCY_S = 0.02 + HOP_WORK_S


def rate_of(fleet: Sites, tree: Tree) -> float:
    """Return what the slowest receiver gets, be it a straggler."""
    everybody = dataclasses.replace(fleet, stragglers=frozenset())
    found = throughput_of(everybody, tree, payload_bytes=SIZE, chunk_bytes=CHUNK)
    return found.rate_bytes_per_s


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 30])
def test_star_and_chain_follow_their_formulas(num_nodes: int) -> None:
    fleet = fleet_of([site(f"n{i}") for i in range(num_nodes)], learner(100))
    found = throughput_of(fleet, star(fleet), payload_bytes=SIZE, chunk_bytes=CHUNK)
    assert found.predicted_s == pytest.approx(num_nodes * SIZE / UPLINK + LATENCY_S)
    assert (found.learner_copies, found.rate_bytes_per_s) == (num_nodes, UPLINK / num_nodes)
    line = chain(fleet)
    assert line is not None
    found = throughput_of(fleet, line, payload_bytes=SIZE, chunk_bytes=CHUNK)
    expected = SIZE / UPLINK + (num_nodes - 1) * (CHUNK / UPLINK + LATENCY_S) + LATENCY_S
    assert found.predicted_s == pytest.approx(expected)
    assert (found.learner_copies, found.rate_bytes_per_s) == (1, UPLINK)


def test_an_uplink_is_shared_by_all_children() -> None:
    fleet = fleet_of([site("a", 90), site("b"), site("c"), site("d")])
    assert rate_of(fleet, [-1, 0, 1, 1, 1]) == 30 * MBIT


def test_a_receiver_gets_no_more_than_its_downlink() -> None:
    fleet = fleet_of([site("a", downlink_bytes_per_s=40 * MBIT)], learner(50))
    assert rate_of(fleet, [-1, 0]) == 40 * MBIT


def test_links_between_regions_are_counted_and_priced() -> None:
    nodes = [site("a", region="eu", price_per_gb=0.1), site("b", region="us")]
    fleet = fleet_of(nodes, learner(region="us"))
    found = throughput_of(fleet, [-1, 0, 1], payload_bytes=SIZE, chunk_bytes=CHUNK)
    assert (found.crossings, found.egress_gb_price) == (2.0, 0.1)


@pytest.mark.slow
@given(st.integers(0, 1000), st.sampled_from(["log-normal", "80/20", "half NAT"]))
def test_no_plan_beats_the_bound(seed: int, kind: str) -> None:
    nodes = draw(kind, 12, random.Random(seed))
    fleet = fleet_of(nodes)
    best = fluid_rate(fleet.uplinks[0], fleet.uplinks[1:], fleet.downlinks[1:])
    tree = bounded_tree(fleet, does_spare_learner=False)
    assert tree is not None
    assert rate_of(fleet, tree) <= best * (1 + 1e-9)
