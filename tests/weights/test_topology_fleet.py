from __future__ import annotations

import math

from echo.weights.topology.sites import ASSUMED_BYTES_PER_S
from tests.weights.fleets import MBIT, fleet_of, learner, site


def test_unknown_uplinks_are_the_median_of_the_known_ones() -> None:
    nodes = [site("a", 10), site("b", 30), site("c", None)]
    assert fleet_of(nodes, learner(None)).uplinks == (
        10 * MBIT,
        10 * MBIT,
        30 * MBIT,
        10 * MBIT,
    )
    assert fleet_of([site("a", None)], learner(None)).uplinks == (ASSUMED_BYTES_PER_S,) * 2


def test_an_unknown_downlink_is_no_limit() -> None:
    fleet = fleet_of([site("a"), site("b", downlink_bytes_per_s=80 * MBIT)], learner(100))
    assert fleet.downlinks[1:] == (math.inf, 80 * MBIT)
    assert fleet.best_rate == 80 * MBIT


def test_only_known_regions_are_crossed() -> None:
    nodes = [site("a", region="eu"), site("b", region="eu"), site("c")]
    fleet = fleet_of(nodes, learner(region="us"))
    assert [fleet.is_crossing(0, i) for i in (1, 2, 3)] == [True, True, False]
    assert not fleet.is_crossing(1, 2)
