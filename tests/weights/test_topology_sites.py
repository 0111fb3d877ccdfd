"""Sites: assumptions about unknown ones, and who is limited by its own downlink."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from echo.weights.topology.sites import ASSUMED_BYTES_PER_S, downlink_limits
from tests.weights.fleets import MBIT, fleet_of, learner, site


def test_an_unknown_uplink_is_the_median_of_the_known_ones_the_learners_the_largest() -> None:
    nodes = [site("a", 10), site("b", 30), site("c", None)]
    assert fleet_of(nodes, learner(None)).uplinks == (
        30 * MBIT,
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


CHAIN = {"a": "learner", "b": "a", "c": "b"}


def limits(
    received: Mapping[str, float],
    uplinks: Mapping[str, float],
    parents: Mapping[str, str] = CHAIN,
) -> dict[str, float]:
    return downlink_limits(parents, received, uplinks, root="learner")


def test_one_that_takes_less_than_its_parent_has_and_can_send() -> None:
    uplinks = {"learner": 100.0, "a": 100.0, "b": 100.0}
    assert limits({"a": 90.0, "b": 20.0, "c": 20.0}, uplinks) == {"b": 20.0}
    assert limits({"a": 90.0, "b": 80.0, "c": 80.0}, uplinks) == {}


@pytest.mark.parametrize("uplink", [None, 21.0])
def test_a_parent_that_is_slow_or_unknown_is_no_fault_of_the_child(uplink: float | None) -> None:
    uplinks = {"learner": 100.0, **({} if uplink is None else {"a": uplink})}
    assert limits({"a": 90.0, "b": 20.0}, uplinks) == {}


def test_siblings_share_what_their_parent_can_send() -> None:
    received = {f"n{index}": 10.0 for index in range(9)}
    parents = dict.fromkeys(received, "learner")
    assert limits(received, {"learner": 100.0}, parents) == {}
    assert limits(received, {"learner": 200.0}, parents) == received
