"""Laws of delays against the published numbers and their own quantiles; lags by hand."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from learning.delays import (
    DelayInjector,
    DelayLags,
    DelayLaw,
    DelaySettings,
    Direction,
    FixedLag,
    UniformLag,
    lognormal_parameters,
    weibull_parameters,
)

CLASS_DEFAULTS: dict[str, Any] = {"lower_s": 60.0, "upper_s": 1920.0, "paid_s": 60.0}


def draws(settings: DelaySettings, count: int = 50_000, seed: int = 42) -> np.ndarray:
    chance = random.Random(seed)
    return np.array([settings.draw(chance) for _ in range(count)])


def test_weibull_parameters_are_the_published_ones() -> None:
    shape, scale = weibull_parameters(60, 1920, 0.0025)
    assert shape == pytest.approx(2.245, abs=5e-4)
    assert scale == pytest.approx(864.9, abs=0.05)
    for quantile, probability in ((60, 0.0025), (1920, 0.9975)):
        assert 1 - math.exp(-((quantile / scale) ** shape)) == pytest.approx(probability)


def test_lognormal_parameters_have_the_quantiles() -> None:
    mu, sigma = lognormal_parameters(60, 1920, 0.0025)
    assert mu == pytest.approx(math.log(math.sqrt(60 * 1920)))
    assert math.exp(mu + 2.8070337683 * sigma) == pytest.approx(1920)


@pytest.mark.parametrize(
    ("law", "changes", "mean", "median", "p95"),
    [
        ("lognormal", {}, 351, 279, 877),
        ("weibull", {}, 706, 673, 1352),
        ("lognormal", {"paid_s": 400.0}, 142, 60, 537),
        ("lognormal", {"lower_s": 400.0, "upper_s": 3600.0, "paid_s": 400.0}, 916, None, 1884),
    ],
)
def test_delays_are_those_of_the_published_experiments(
    law: DelayLaw, changes: dict[str, float], mean: float, median: float | None, p95: float
) -> None:
    found = draws(DelaySettings(law=law, **(CLASS_DEFAULTS | changes)))
    assert found.mean() == pytest.approx(mean, rel=0.02)
    assert np.quantile(found, 0.95) == pytest.approx(p95, rel=0.03)
    if median is not None:
        assert np.median(found) == pytest.approx(median, rel=0.02)
    if changes == {"paid_s": 400.0}:
        assert (found == 60).mean() == pytest.approx(0.688, abs=0.01)


@pytest.mark.parametrize("law", ["constant", "lognormal", "weibull", "exponential"])
def test_every_delay_lies_between_the_bounds(law: DelayLaw) -> None:
    found = draws(DelaySettings(law=law, lower_s=60, upper_s=1800, confidence=0.5), 5000)
    assert found.min() >= 60
    assert found.max() == 1800
    assert (len(set(found)) == 1) == (law == "constant")


def test_the_exponential_law_has_the_upper_quantile() -> None:
    settings = DelaySettings(law="exponential", lower_s=1, upper_s=1000, confidence=0.9)
    found = draws(settings)
    assert (found == 1000).mean() == pytest.approx(0.05, abs=0.004)
    assert np.median(found) == pytest.approx(1000 * math.log(2) / math.log(20), rel=0.03)


def injector(law: DelayLaw = "lognormal", seed: int = 0, **changes: float) -> DelayInjector:
    settings = DelaySettings(law=law, **(CLASS_DEFAULTS | changes))
    return DelayInjector(settings, direction="rollouts", seed=seed)


def test_workers_are_late_independently_and_reproducibly() -> None:
    first, again = injector(), injector()
    ones = [first.draw("w1") for _ in range(2000)]
    others = [first.draw("w2") for _ in range(2000)]
    # Whoever else draws in between changes nothing.
    assert [again.draw("w2") for _ in range(2000)] == others
    assert [again.draw("w1") for _ in range(2000)] == ones
    assert abs(float(np.corrcoef(ones, others)[0, 1])) < 0.1
    assert injector(seed=1).draw("w1") != ones[0]
    weights = DelayInjector(first.settings, direction="weights", seed=0)
    assert weights.draw("w1") != ones[0]


def test_emulated_time_passes_faster() -> None:
    real, fast = injector(), injector(speedup=600.0)
    assert fast.draw("w1") == pytest.approx(real.draw("w1") / 600)
    assert fast.metrics() == real.metrics()


def test_what_was_drawn_is_told() -> None:
    found = injector("constant", upper_s=1800.0)
    assert found.metrics() == {}
    for _ in range(3):
        found.draw("w1")
    assert found.metrics() == {
        "delays/rollouts/mean": 1800.0,
        "delays/rollouts/max": 1800.0,
        "delays/rollouts/hist": {"2048": 3.0},
    }
    assert injector().metrics() == {}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lower_s": 0.0}, "above 0"),
        ({"lower_s": 2000.0}, "in order"),
        ({"lower_s": 1920.0}, "a lognormal law needs a range"),
        ({"confidence": 1.0}, "confidence"),
        ({"paid_s": -1.0}, "paid_s"),
        ({"speedup": 0.0}, "speedup"),
    ],
)
def test_unusable_settings_are_refused(changes: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DelaySettings(law="lognormal", **(CLASS_DEFAULTS | changes))


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
