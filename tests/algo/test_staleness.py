"""Decisions of the bound on staleness."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from echo.algo.staleness import BoundDecision, ControlSettings, Signals, StalenessController

GOOD = {"ess": 0.99, "mismatch_kl": 0.001, "clip_ratio": 0.01}


def make_controller(**changes: Any) -> StalenessController:
    settings: dict[str, Any] = {"least": 1, "most": 8, "patience": 3, "smoothing": 0.0}
    return StalenessController(ControlSettings(**(settings | changes)))


def drive(
    controller: StalenessController, num_steps: int, start: int = 1, /, **signals: float | None
) -> list[BoundDecision]:
    """Feed the same signals; rollouts as old as the bound lets them be."""
    found = []
    for step in range(start, start + num_steps):
        values: dict[str, Any] = {"staleness": controller.bound, **GOOD, **signals}
        decision = controller.observe(step, Signals(**values))
        if decision is not None:
            found.append(decision)
    return found


@pytest.mark.parametrize(
    ("signals", "cause"),
    [
        ({"ess": 0.75}, "ess 0.75 below 0.8"),
        ({"mismatch_kl": 0.06}, "mismatch_kl 0.06 above 0.05"),
        ({"clip_ratio": 0.15}, "clip_ratio 0.15 above 0.1"),
    ],
)
def test_any_signal_lowers_it_and_is_named(signals: dict[str, float], cause: str) -> None:
    controller = make_controller()
    assert drive(controller, 1, **signals) == [BoundDecision(1, 8, 7, cause)]
    assert controller.bound == 7


def test_it_waits_for_a_decision_to_act() -> None:
    decisions = drive(make_controller(), 10, ess=0.75)
    assert [(d.step, d.bound) for d in decisions] == [(1, 7), (4, 6), (7, 5), (10, 4)]


def test_far_past_a_limit_it_is_halved() -> None:
    decisions = drive(make_controller(), 10, mismatch_kl=0.2)
    assert [d.bound for d in decisions] == [4, 2, 1]


def test_at_a_limit_it_stays_and_at_twice_that_it_is_lowered_by_one() -> None:
    assert drive(make_controller(kl_high=0.25), 10, mismatch_kl=0.25) == []
    assert [d.bound for d in drive(make_controller(kl_high=0.25), 1, mismatch_kl=0.5)] == [7]


def test_room_in_all_signals_raises_it_by_one_after_a_while() -> None:
    controller = make_controller()
    drive(controller, 1, ess=0.75)
    decisions = drive(controller, 12, 2)
    assert [(d.before, d.bound) for d in decisions] == [(7, 8)]
    assert decisions[0].cause == "room: ess 0.99, mismatch_kl 0.001, clip_ratio 0.01"
    assert controller.bound == 8


@pytest.mark.parametrize(
    "signals", [{"ess": 0.85}, {"mismatch_kl": 0.03}, {"clip_ratio": 0.06}, {"staleness": 3}]
)
def test_no_room_in_one_or_a_bound_that_is_not_used_leaves_it(signals: dict[str, float]) -> None:
    controller = make_controller()
    drive(controller, 1, ess=0.75)
    assert drive(controller, 12, 2, **signals) == []


def test_one_bad_step_is_smoothed_away() -> None:
    controller = make_controller(smoothing=0.9)
    drive(controller, 5)
    assert drive(controller, 1, 6, mismatch_kl=0.3) == []
    assert drive(controller, 20, 7, mismatch_kl=0.3) != []


def test_missing_signals_say_nothing() -> None:
    controller = make_controller()
    nothing = {"ess": None, "mismatch_kl": None, "clip_ratio": None}
    assert drive(controller, 10, **nothing) == []
    assert drive(controller, 1, 11, ess=math.nan, mismatch_kl=None, clip_ratio=None) == []
    assert len(drive(controller, 1, 12, **(nothing | {"ess": 0.5}))) == 1


@pytest.mark.parametrize("seed", range(20))
def test_it_stays_between_its_limits_whatever_comes(seed: int) -> None:
    chance = random.Random(seed)
    controller = make_controller(least=2, most=5)
    bounds = {controller.bound}
    is_bad = False
    for step in range(400):
        is_bad ^= chance.random() < 0.1
        signals = Signals(
            chance.random() if is_bad else 0.99,
            chance.expovariate(10) if is_bad else 0.0,
            chance.random() if is_bad else 0.0,
            chance.randrange(4, 9),
        )
        decision = controller.observe(step, signals)
        if decision is not None:
            assert decision.bound != decision.before
        bounds.add(controller.bound)
    assert bounds <= {2, 3, 4, 5}
    assert {2, 3, 5} <= bounds


def test_limits_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="in order"):
        make_controller(least=3, most=2)
    with pytest.raises(ValueError, match="patience"):
        make_controller(patience=0)
