"""What counts while nobody counts."""

from __future__ import annotations

import pytest

from echo.runtime.learner.cost import CostMeter
from echo.sim.activating import spent_before


@pytest.mark.parametrize(("away_s", "expected"), [(1800.0, 12.0), (7200.0, 14.0)])
def test_machines_bill_while_the_learner_is_away_as_long_as_lost_ones_count(
    away_s: float, expected: float
) -> None:
    meter = CostMeter(learner_per_h=4.0, learner_per_gb=0.0, spent=10.0, now=0.0)
    assert spent_before(meter, away_s=away_s) == pytest.approx(expected)
