"""Weights and masks on their own, and masks around a loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from echo.algo.corrections import (
    MaskedLoss,
    RolloutMasks,
    importance_weights,
)
from echo.algo.losses import GepoLoss, GrpoLoss, M2poLoss
from echo.core.errors import ConfigError
from tests.algo.batches import counts, doubles, gradient, make_inputs, random_inputs

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
