"""Lags against timelines drawn by hand, and against their own bounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from echo.sim.delays import DelayInjector, DelayLaw, DelaySettings, Direction
from echo.sim.lags import DelayLags, FixedLag, UniformLag


def delays(law: DelayLaw, direction: Direction, **changes: float) -> DelayInjector:
    settings: dict[str, Any] = {"lower_s": 1.0, "upper_s": 3.0, **changes}
    return DelayInjector(DelaySettings(law=law, **settings), direction=direction, seed=0)


def make_lags(**changes: Any) -> DelayLags:
    settings: dict[str, Any] = {
        "weights": None,
        "rollouts": None,
        "num_workers": 1,
        "step_s": 1.0,
        "max_lag": 64,
        "seed": 0,
    }
    return DelayLags(**(settings | changes))


def test_a_fixed_lag_begins_as_soon_as_it_can() -> None:
    assert [FixedLag(3).draw(step) for step in range(6)] == [0, 1, 2, 3, 3, 3]


def test_a_uniform_lag_has_every_value_equally_often() -> None:
    lags = UniformLag(3, seed=0)
    counts = Counter(lags.draw(10) for _ in range(4000))
    assert sorted(counts) == [0, 1, 2, 3]
    assert min(counts.values()) > 900
    assert {lags.draw(1) for _ in range(50)} == {0, 1}


def test_without_delays_there_is_no_lag() -> None:
    assert {make_lags().draw(step) for step in range(20)} == {0}


def test_old_weights_are_kept_for_their_delay() -> None:
    """New weights at 0, 3, 6, ...: at step 5 it is version 3 that samples."""
    lags = make_lags(weights=delays("constant", "weights", upper_s=3.0))
    assert [lags.draw(step) for step in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_group_was_sampled_its_delay_ago() -> None:
    lags = make_lags(rollouts=delays("constant", "rollouts", upper_s=3.0))
    assert [lags.draw(step) for step in range(6)] == [0, 1, 2, 3, 3, 3]
    # Sampled 3 s ago by weights that were taken at 0, 3, 6, ...: step 8 is made of version 3.
    both = make_lags(
        weights=delays("constant", "weights", upper_s=3.0),
        rollouts=delays("constant", "rollouts", upper_s=3.0),
    )
    assert [both.draw(step) for step in range(10)] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3]


def test_half_an_hour_of_delay_is_many_versions_and_none_beyond_the_bound() -> None:
    hetero = {"lower_s": 60.0, "upper_s": 1800.0}
    lags = make_lags(
        weights=delays("lognormal", "weights", **hetero),
        rollouts=delays("lognormal", "rollouts", **hetero),
        num_workers=4,
        step_s=30.0,
        max_lag=40,
    )
    drawn = [lags.draw(step) for step in range(300) for _ in range(8)]
    assert max(drawn[800:]) <= 40
    assert lags.num_lost > 0
    assert 10 < sum(drawn[800:]) / len(drawn[800:]) < 30
    assert len(set(drawn)) > 25


def test_workers_hold_different_versions_at_one_instant() -> None:
    weights = delays("lognormal", "weights", lower_s=60.0, upper_s=1800.0)
    lags = make_lags(weights=weights, num_workers=4, step_s=30.0, max_lag=1000)
    for step in range(100):
        lags.draw(step)
    assert len({lags.draw(100) for _ in range(50)}) > 1


def test_delays_too_long_for_the_bound_are_named() -> None:
    lags = make_lags(rollouts=delays("constant", "rollouts", upper_s=9.0), max_lag=3)
    assert [lags.draw(step) for step in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="more than 3 versions old at step 4"):
        lags.draw(4)
