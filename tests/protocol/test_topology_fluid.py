"""The forecast is that of the closed formulas where there are any."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.weights.topology.sites import Sites
from echo.weights.topology.throughput import HOP_WORK_S, Trees, fluid_rate, throughput_of
from echo.weights.topology.trees import chain, star, stripe_trees
from tests.protocol.fleets import MBIT, draw, fleet_of, learner, site

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
