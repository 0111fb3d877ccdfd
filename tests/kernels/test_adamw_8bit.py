"""Moments of 8 bits: their codes, and an update beside torchao's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echo.kernels.adamw_8bit import BLOCK, CodedMoment, Update, code_values, update_weights

CPU = torch.device("cpu")
SHAPE = (33, 3 * BLOCK)
RATE, DECAY, EPSILON = 1e-2, 0.1, 1e-8


def new_moments(device: str = "cpu") -> tuple[CodedMoment, CodedMoment]:
    first, second = (
        CodedMoment(
            torch.zeros(SHAPE, dtype=torch.uint8, device=device),
            torch.zeros(SHAPE[0], SHAPE[1] // BLOCK, device=device),
            is_signed,
        )
        for is_signed in (True, False)
    )
    return first, second


def gradients(step: int) -> Tensor:
    """Return gradients of several magnitudes, with rows of zeros."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randn(SHAPE, generator=generator) * 10.0**-step
    found[step] = 0
    return found


def updates(betas: tuple[float, float]) -> list[Update]:
    options: Any = {"learning_rate": RATE, "weight_decay": DECAY, "epsilon": EPSILON}
    return [Update.of(step, betas=betas, **options) for step in range(1, 6)]


@pytest.mark.parametrize("is_signed", [True, False])
def test_each_code_is_the_nearest_value(is_signed: bool) -> None:
    table = code_values(is_signed=is_signed, device=CPU)
    assert len(table) == 256
    assert table.max() == 1
    assert 0 in table
    assert bool(table.min() < -0.9) == is_signed
    assert bool((table.diff() > 0).all())
    values = torch.randn(4, BLOCK, generator=torch.Generator().manual_seed(0)) ** 3
    values[3] = 0
    values = values if is_signed else values.abs()
    moment = CodedMoment(torch.empty(4, BLOCK, dtype=torch.uint8), torch.empty(4, 1), is_signed)
    moment.encode(values)
    nearest = (values / moment.scales).unsqueeze(-1).sub(table).abs().argmin(-1)
    assert torch.equal(moment.codes.long()[:3], nearest[:3])
    assert torch.equal(moment.decoded()[3], values[3])
    assert torch.allclose(moment.decoded()[:3], values[:3], rtol=0.4, atol=1e-5)
    again = CodedMoment(torch.empty_like(moment.codes), torch.empty_like(moment.scales), is_signed)
    again.encode(moment.decoded())
    assert torch.equal(again.codes[:3], moment.codes[:3])


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.4, 0.999)])
def test_an_update_is_that_of_torchao(betas: tuple[float, float]) -> None:
    subclass = pytest.importorskip("torchao.optim.subclass_8bit", reason="torchao is not installed")
    adam = pytest.importorskip("torchao.optim.adam")
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))
    theirs, ours = weights.clone(), new_moments()
    moments = [
        subclass.OptimState8bit(
            torch.zeros(SHAPE, dtype=torch.uint8),
            torch.zeros(SHAPE[0] * SHAPE[1] // BLOCK),
            subclass.OptimState8bit.zeros((BLOCK,), is_signed, BLOCK, CPU).qmap,
            is_signed,
            dtype=torch.float32,
        )
        for is_signed in (True, False)
    ]
    for step, update in enumerate(updates(betas), 1):
        adam.single_param_adam(
            theirs, gradients(step), torch.tensor(float(step)), *moments, None, torch.tensor(RATE),
            *betas, DECAY, EPSILON, IS_ADAMW=True, BF16_STOCHASTIC_ROUND=False,
        )  # fmt: skip
        update_weights(weights, gradients(step), *ours, update)
    assert torch.equal(weights, theirs)
    for own, other in zip(ours, moments, strict=True):
        assert torch.equal(own.codes, other.codes)
        assert torch.equal(own.scales.view(-1), other.scale)
