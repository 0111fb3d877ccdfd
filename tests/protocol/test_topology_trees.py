from __future__ import annotations

import random

import pytest

from echo.weights.topology.throughput import num_children, order, throughput_of
from echo.weights.topology.trees import chain, dealt_slots, stripe_trees
from tests.protocol.fleets import MBIT, draw, fleet_of, learner, site


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
