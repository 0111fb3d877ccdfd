"""Laws of delays against the published numbers and their own quantiles."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from echo.sim.delays import (
    DelayedInstalls,
    DelayInjector,
    DelayLaw,
    DelaySettings,
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


def test_counts_of_a_worker_are_of_emulated_time() -> None:
    fast = injector("constant", upper_s=1024.0, speedup=600.0)
    counts = DelayedInstalls(fast, "w1").installed(now=0.0)
    assert counts == {"delays/rollouts/hist/1024": 1, "delays/rollouts/milliseconds": 1_024_000}


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


def test_old_weights_are_kept_until_the_delay_has_passed() -> None:
    installs = DelayedInstalls(injector("constant", upper_s=100.0), "w1")
    assert installs.may_install(now=0.0)
    assert installs.installed(now=5.0) == {
        "delays/rollouts/hist/128": 1,
        "delays/rollouts/milliseconds": 100_000,
    }
    assert installs.next_at == 105.0
    assert not installs.may_install(now=104.9)
    assert installs.wait_s(now=100.0) == 5.0
    assert installs.may_install(now=105.0)
    installs.installed(now=300.0)
    assert installs.next_at == 400.0


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
