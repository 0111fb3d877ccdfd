"""Scenarios: prices at an instant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo.config.fleet_schema import PriceRow
from tests.sim.scenarios import make_offer, make_scenario


@pytest.mark.parametrize(
    ("at_s", "price_per_h"), [(0.0, 1.0), (29.9, 1.0), (30.0, 2.0), (59.9, 2.0), (60.0, 0.5)]
)
def test_the_newest_price_counts(at_s: float, price_per_h: float) -> None:
    later = PriceRow(offer="gpu", at_s=60.0, price_per_h=0.5)
    sooner = PriceRow(offer="gpu", at_s=30.0, price_per_h=2.0)
    other = PriceRow(offer="other", at_s=0.0, price_per_h=9.0)
    scenario = replace(make_scenario(), prices=[later, sooner, other])
    assert scenario.price_per_h(make_offer(), at_s) == price_per_h
