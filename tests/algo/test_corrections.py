"""Weights and masks on their own, and masks around a loss."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from echo.algo.corrections import (
    BoundDecision,
    ControlSettings,
    MaskedLoss,
    RolloutMasks,
    Signals,
    StalenessController,
    importance_weights,
)
from echo.algo.losses import GepoLoss, GrpoLoss, M2poLoss
from echo.core.errors import ConfigError
from tests.algo.batches import counts, doubles, gradient, make_inputs, random_inputs

torch.set_num_threads(1)

EVERYTHING = torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_tis", [0.5, 2.0, 2.0]),
        ("sequence_tis", [2.0, 2.0, 2.0]),
        ("token_mis", [0.5, 2.0, 0.0]),
        ("sequence_mis", [0.0, 0.0, 0.0]),
    ],
)
def test_weights_by_hand(kind: Any, expected: list[float]) -> None:
    """Ratios 1/2, 2 and 8, in all 8; in range are those up to 2."""
    log_ratio = doubles([[0.5, 2.0, 8.0]]).log()
    found = importance_weights(log_ratio, EVERYTHING, kind, cap=2.0 + 1e-9)
    assert found.flatten().tolist() == pytest.approx(expected)


def test_a_rollout_in_range_keeps_its_product() -> None:
    log_ratio = doubles([[0.5, 4.0, 1.0]]).log()
    found = importance_weights(log_ratio, EVERYTHING, "sequence_mis", cap=3.0)
    assert found.flatten().tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_weights_are_data_and_ignore_padding() -> None:
    log_ratio = torch.tensor([[0.5, math.nan, math.inf]], requires_grad=True)
    mask = torch.tensor([[True, False, False]])
    found = importance_weights(log_ratio, mask, "sequence_tis", cap=9.0)
    assert not found.requires_grad
    assert found.tolist()[0] == pytest.approx([math.exp(0.5), 1.0, 1.0])


# Rollouts: on-policy; one token at 1e-5; every token 2 % up; every token 2 % down.
RATIOS = doubles([[1.0, 1.0], [1e-5, 1.0], [1.02, 1.02], [0.98, 0.98]])


@pytest.mark.parametrize(
    ("options", "advantages", "reason", "expected"),
    [
        ({"veto": 1e-4}, [1, 1, 1, 1], "veto", [0, 1, 0, 0]),
        ({"geometric_low": 0.99}, [1, 1, 1, 1], "geometric", [0, 1, 0, 1]),
        ({"geometric_high": 1.01}, [1, 1, 1, 1], "geometric", [0, 0, 1, 0]),
        (
            {"geometric_low": 0.99, "geometric_high": 1.01},
            [1, 1, 1, 1],
            "geometric",
            [0, 1, 1, 1],
        ),
        ({"opsm": 1e-4}, [-1, -1, -1, -1], "opsm", [0, 1, 0, 1]),
        ({"opsm": 1e-4}, [1, 1, 1, -1], "opsm", [0, 0, 0, 1]),
        ({"opsm": 0.03}, [-1, -1, -1, -1], "opsm", [0, 1, 0, 0]),
    ],
)
def test_masks_by_hand(
    options: dict[str, float], advantages: list[float], reason: str, expected: list[int]
) -> None:
    inputs = make_inputs(RATIOS.log(), torch.zeros(4, 2), doubles(advantages))
    masks = RolloutMasks(**options)
    assert {name: rows.int().tolist() for name, rows in masks.dropped(inputs).items()} == {
        reason: expected
    }
    loss = MaskedLoss(loss=GrpoLoss(), masks=masks)
    assert counts(loss(inputs))[f"dropped/{reason}"] == 2 * sum(expected)
    kept = ~torch.tensor(expected, dtype=torch.bool)
    assert torch.equal(gradient(loss, inputs)[kept], gradient(GrpoLoss(), inputs)[kept])
    assert not gradient(loss, inputs)[~kept].any()


def test_masks_add_up() -> None:
    inputs = make_inputs(RATIOS.log(), torch.zeros(4, 2), doubles([1, 1, 1, -1]))
    masks = RolloutMasks(veto=1e-4, geometric_high=1.01, opsm=1e-4)
    grad = gradient(MaskedLoss(loss=GrpoLoss(), masks=masks), inputs)
    assert grad.any(1).tolist() == [True, False, False, False]


def test_what_is_dropped_stays_in_the_normaliser() -> None:
    inputs = make_inputs(RATIOS.log(), torch.zeros(4, 2), doubles([1, 1, 1, 1]))
    loss = MaskedLoss(loss=GrpoLoss(), masks=RolloutMasks(veto=1e-4))
    assert loss(inputs).loss.item() == pytest.approx(-(2 + 2.04 + 1.96) / 8)


def test_masks_that_let_everything_through_change_nothing() -> None:
    inputs = random_inputs()
    loss = MaskedLoss(loss=GrpoLoss(), masks=RolloutMasks(veto=0.0, opsm=100.0))
    assert torch.equal(gradient(loss, inputs), gradient(GrpoLoss(), inputs))


def test_a_batch_that_is_dropped_whole_has_no_gradient() -> None:
    inputs = random_inputs()
    loss = MaskedLoss(loss=GrpoLoss(), masks=RolloutMasks(geometric_low=1.0, geometric_high=1.0))
    assert not gradient(loss, inputs).any()
    output = loss(inputs)
    assert counts(output)["dropped/geometric"] == inputs.num_tokens
    assert counts(output)["clip_ratio/mean"] == 0


def test_masks_look_at_trained_tokens_only() -> None:
    inputs = random_inputs()
    spoilt = torch.where(inputs.completion_mask, inputs.sampler_logprobs, math.nan)
    masks = RolloutMasks(geometric_low=0.7, veto=0.3, opsm=0.1)
    clean, dirty = masks.dropped(inputs), masks.dropped(replace(inputs, sampler_logprobs=spoilt))
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)
    assert all(rows.any() for rows in clean.values())


def test_needs_pass_through() -> None:
    assert MaskedLoss(loss=M2poLoss(), masks=RolloutMasks(veto=0.1)).needs == M2poLoss.needs


def test_a_loss_over_groups_takes_no_masks() -> None:
    with pytest.raises(ConfigError, match="defined over complete groups; remove them"):
        MaskedLoss(loss=GepoLoss(), masks=RolloutMasks(veto=1e-4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("geometric_low", 1.1),
        ("geometric_high", 0.9),
        ("geometric_high", math.inf),
        ("veto", -0.1),
        ("opsm", math.nan),
    ],
)
def test_unusable_bounds_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"loss\.{name} = {value}: must be finite and lie in"):
        RolloutMasks(**{name: value})


# --- the bound on staleness -----------------------------------------------------------------------


GOOD = {"ess": 0.99, "mismatch_kl": 0.001, "clip_ratio": 0.01}


def make_controller(**changes: Any) -> StalenessController:
    settings: dict[str, Any] = {"least": 1, "most": 8, "patience": 3, "smoothing": 0.0}
    return StalenessController(ControlSettings(**(settings | changes)))


def drive(
    controller: StalenessController, num_steps: int, start: int = 1, **signals: float | None
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


def test_room_in_all_signals_raises_it_by_one_after_a_while() -> None:
    controller = make_controller()
    drive(controller, 1, ess=0.75)
    decisions = drive(controller, 12, start=2)
    assert [(d.before, d.bound) for d in decisions] == [(7, 8)]
    assert decisions[0].cause == "room: ess 0.99, mismatch_kl 0.001, clip_ratio 0.01"
    assert controller.bound == 8


@pytest.mark.parametrize(
    "signals", [{"ess": 0.85}, {"mismatch_kl": 0.03}, {"clip_ratio": 0.06}, {"staleness": 3}]
)
def test_no_room_in_one_or_a_bound_that_is_not_used_leaves_it(signals: dict[str, float]) -> None:
    controller = make_controller()
    drive(controller, 1, ess=0.75)
    assert drive(controller, 12, start=2, **signals) == []


def test_one_bad_step_is_smoothed_away() -> None:
    controller = make_controller(smoothing=0.9)
    drive(controller, 5)
    assert drive(controller, 1, start=6, mismatch_kl=0.3) == []
    assert drive(controller, 20, start=7, mismatch_kl=0.3) != []


def test_missing_signals_say_nothing() -> None:
    controller = make_controller()
    nothing = {"ess": None, "mismatch_kl": None, "clip_ratio": None}
    assert drive(controller, 10, **nothing) == []
    assert drive(controller, 1, start=11, ess=math.nan, mismatch_kl=None, clip_ratio=None) == []
    assert len(drive(controller, 1, start=12, **(nothing | {"ess": 0.5}))) == 1


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
