"""The publish period left to `auto`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.config.schema import preset_publish_period
from echo.fleet.overlap import auto_publish_period


@pytest.mark.parametrize(("max_staleness", "period"), [(0, 1), (1, 1), (2, 1), (3, 2), (6, 5)])
def test_the_preset(max_staleness: int, period: int) -> None:
    assert preset_publish_period(max_staleness) == period


@pytest.mark.parametrize(
    ("t_bcast_s", "period"),
    [(0.0, 1), (9.9, 1), (10.0, 2), (19.9, 2), (25.0, 3), (1e9, 7), (float("inf"), 7)],
)
def test_the_smallest_that_hides_the_broadcast(t_bcast_s: float, period: int) -> None:
    assert auto_publish_period(10.0, t_bcast_s, 6) == period


@given(st.floats(1e-3, 1e4), st.floats(0, 1e6), st.integers(0, 100))
def test_it_never_deadlocks_and_is_smallest(t_train: float, t_bcast: float, bound: int) -> None:
    period = auto_publish_period(t_train, t_bcast, bound)
    assert 1 <= period <= bound + 1
    if period <= bound:
        assert period * t_train > t_bcast * (1 - 1e-12)
    if period > 1:
        assert (period - 1) * t_train <= t_bcast * (1 + 1e-12)


@pytest.mark.parametrize("arguments", [(0.0, 1.0, 1), (1.0, -1.0, 1), (1.0, 1.0, -1)])
def test_refuses_what_cannot_be(arguments: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="t_train_s must be above 0"):
        auto_publish_period(*arguments)


def test_refuses_what_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="t_train_s=nan"):
        auto_publish_period(float("nan"), 1.0, 1)
