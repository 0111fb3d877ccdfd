"""Trees are those of the rate they were built for, and the forecast that of closed formulas."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.weights.topology.sites import Sites
from echo.weights.topology.throughput import (
    HOP_WORK_S,
    Trees,
    fluid_rate,
    num_children,
    order,
    throughput_of,
)
from echo.weights.topology.trees import chain, dealt_slots, star, stripe_trees
from tests.weights.fleets import MBIT, draw, fleet_of, learner, site


def test_slots_are_those_of_the_largest_rate_that_can_be_built() -> None:
    fleet = fleet_of([site("a", 100), site("b", 100), site("c", 50)], learner(100))
    # At 100 the learner, a and b feed one each.
    assert dealt_slots(fleet, 1, does_spare_learner=True) == [1, 1, 1, 0]
    assert dealt_slots(fleet, 2, does_spare_learner=True) == [2, 2, 2, 1]


def test_where_nobody_can_serve_the_learner_cannot_be_spared() -> None:
    fleet = fleet_of([site("a", 0), site("b", 0)])
    assert stripe_trees(fleet, 2, does_spare_learner=True) is None
    assert chain(fleet) is None
    assert stripe_trees(fleet, 1, does_spare_learner=False) == [[-1, 0, 0]]


def test_a_chain_is_a_line_and_slow_nodes_are_its_leaves() -> None:
    fleet = fleet_of([site("slow", 1), *(site(f"n{i}") for i in range(5))], learner(100))
    line = chain(fleet)
    assert line is not None
    assert num_children(line) == [1, 0, 1, 1, 1, 1, 1]
    assert order(line[0])[-1] == 1


@pytest.mark.parametrize("num_stripes", [2, 4])
def test_equal_nodes_are_interior_in_one_stripe(num_stripes: int) -> None:
    fleet = fleet_of([site(f"n{i}") for i in range(60)], learner(100))
    trees = stripe_trees(fleet, num_stripes, does_spare_learner=True)
    assert trees is not None
    interior = [set(tree) - {-1, 0} for tree in trees]
    assert sum(map(len, interior)) == len(set.union(*interior))
    assert num_children(trees)[0] == num_stripes
    found = throughput_of(fleet, trees, payload_bytes=1 << 30, chunk_bytes=1 << 20)
    assert found.rate_bytes_per_s == pytest.approx(100 * MBIT)


@pytest.mark.parametrize("num_stripes", [1, 2, 4])
def test_what_is_built_has_the_rate_that_the_slots_were_for(num_stripes: int) -> None:
    rng = random.Random(num_stripes)
    for _ in range(20):
        fleet = fleet_of(draw("log-normal", 30, rng))
        slots = dealt_slots(fleet, num_stripes, does_spare_learner=False)
        trees = stripe_trees(fleet, num_stripes, does_spare_learner=False)
        assert trees is not None
        assert slots is not None
        counts = num_children(trees)
        assert all(count <= slot for count, slot in zip(counts, slots, strict=True))
        assert all(len(order(tree)) == 31 for tree in trees)


def test_a_smaller_share_of_the_rate_gives_flatter_trees() -> None:
    fleet = fleet_of([site(f"n{i}") for i in range(100)], learner(100))
    depths = []
    for share in (1.0, 0.25):
        trees = stripe_trees(fleet, 1, does_spare_learner=True, share=share)
        assert trees is not None
        node, hops = order(trees[0])[-1], 0
        while node:
            node, hops = trees[0][node], hops + 1
        depths.append(hops)
    assert depths[0] == 100
    assert depths[1] <= 6


SIZE, CHUNK = 128 << 20, 1 << 20
UPLINK = 100 * MBIT
LATENCY_S = 0.02 + HOP_WORK_S


def rate_of(fleet: Sites, trees: Trees) -> float:
    """Return what the slowest receiver gets, be it a straggler."""
    everybody = dataclasses.replace(fleet, stragglers=frozenset())
    found = throughput_of(everybody, trees, payload_bytes=SIZE, chunk_bytes=CHUNK)
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


@pytest.mark.parametrize("num_stripes", [2, 4])
def test_stripes_need_the_time_of_one_copy_and_a_logarithm_of_hops(num_stripes: int) -> None:
    fleet = fleet_of([site(f"n{i}") for i in range(64)], learner(100))
    trees = stripe_trees(fleet, num_stripes, does_spare_learner=True)
    assert trees is not None
    found = throughput_of(fleet, trees, payload_bytes=SIZE, chunk_bytes=CHUNK)
    hops = 1 + math.ceil(math.log(64, num_stripes))
    formula = SIZE / UPLINK + hops * (num_stripes * CHUNK / UPLINK + LATENCY_S)
    assert SIZE / UPLINK < found.predicted_s <= formula * 1.01


def test_an_uplink_is_shared_by_all_stripes_that_it_serves() -> None:
    fleet = fleet_of([site("a", 90), site("b"), site("c")])
    trees = [[-1, 0, 1, 1], [-1, 0, 1, 0]]
    # Node 1 has three children; node 3 is served by the learner in the second stripe.
    assert rate_of(fleet, trees) == 60 * MBIT


def test_a_receiver_gets_no_more_than_its_downlink() -> None:
    fleet = fleet_of([site("a", downlink_bytes_per_s=40 * MBIT)], learner(50))
    assert rate_of(fleet, [[-1, 0]]) == 40 * MBIT


def test_links_between_regions_are_counted_and_priced() -> None:
    nodes = [site("a", region="eu", price_per_gb=0.1), site("b", region="us")]
    fleet = fleet_of(nodes, learner(region="us"))
    found = throughput_of(fleet, [[-1, 0, 1]], payload_bytes=SIZE, chunk_bytes=CHUNK)
    assert (found.crossings, found.egress_gb_price) == (2.0, 0.1)


@pytest.mark.slow
@given(st.integers(0, 1000), st.sampled_from(["log-normal", "80/20", "half NAT"]))
def test_no_plan_beats_the_bound(seed: int, kind: str) -> None:
    nodes = draw(kind, 12, random.Random(seed))
    fleet = fleet_of(nodes)
    best = fluid_rate(fleet.uplinks[0], fleet.uplinks[1:], fleet.downlinks[1:])
    for num_stripes in (1, 2, 4, 8):
        trees = stripe_trees(fleet, num_stripes, does_spare_learner=False)
        assert trees is not None
        assert rate_of(fleet, trees) <= best * (1 + 1e-9)
