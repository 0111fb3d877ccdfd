"""Delays as the configuration describes them, the same on learner and workers."""

from __future__ import annotations

import pytest

from echo.config.inherit import apply_inherited, inherited_settings
from echo.config.load import parse_config
from echo.runtime.delays import WeightDelays, make_delays

HETERO = ["delays.law=weibull", "delays.lower_s=60", "delays.upper_s=1800", "run.seed=7"]


def test_none_are_injected_unless_asked_for() -> None:
    config, _ = parse_config({})
    assert make_delays(config, "weights") is None
    assert make_delays(config, "rollouts") is None


@pytest.mark.parametrize(
    ("directions", "weights", "rollouts"),
    [("both", True, True), ("weights", True, False), ("rollouts", False, True)],
)
def test_directions(directions: str, weights: bool, rollouts: bool) -> None:
    config, _ = parse_config({}, [*HETERO, f"delays.directions={directions}"])
    assert (make_delays(config, "weights") is not None) == weights
    assert (make_delays(config, "rollouts") is not None) == rollouts


def test_a_worker_inherits_them() -> None:
    learner, _ = parse_config({}, [*HETERO, "delays.speedup=600"])
    worker = apply_inherited(parse_config({})[0], inherited_settings(learner))
    own, theirs = make_delays(worker, "weights"), make_delays(learner, "weights")
    assert own is not None
    assert theirs is not None
    assert own.settings == theirs.settings
    assert [own.draw("w1") for _ in range(5)] == [theirs.draw("w1") for _ in range(5)]


def test_delays_of_weights_are_added_up_over_workers() -> None:
    delays = WeightDelays()
    assert delays.metrics({"w1": {"env/calls": 7}}) == {}
    name = "delays/weights"
    first = {f"{name}/hist/64": 1, f"{name}/milliseconds": 60_000}
    assert delays.metrics({"w1": first}) == {f"{name}/mean": 60.0, f"{name}/hist": {"64": 1.0}}
    more = {f"{name}/hist/64": 1, f"{name}/hist/2048": 2, f"{name}/milliseconds": 3_660_000}
    expected = {f"{name}/mean": 1220.0, f"{name}/hist": {"64": 1.0, "2048": 2.0}}
    assert delays.metrics({"w1": more}) == expected
    # One that leaves takes nothing back, one that starts anew counts from 0 again.
    assert delays.metrics({}) == expected
    again = delays.metrics({"w1": first, "w2": first})
    assert again[f"{name}/hist"] == {"64": 3.0, "2048": 2.0}
