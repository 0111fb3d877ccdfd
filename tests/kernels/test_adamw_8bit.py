"""Moments of 8 bits: their codes, and an update beside torchao's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo.kernels.adamw_8bit import BLOCK, CodedMoment, Update, code_values, update_weights

CPU = torch.device("cpu")
SHAPE = (33, 3 * BLOCK)
SMALL = (6, BLOCK)
"""Few enough numbers for torchao_updates.json."""
BETAS = [(0.9, 0.95), (0.4, 0.999)]
RATE, DECAY, EPSILON = 1e-2, 0.1, 1e-8


def first_weights(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def new_moments(
    device: str = "cpu", shape: tuple[int, int] = SHAPE
) -> tuple[CodedMoment, CodedMoment]:
    first, second = (
        CodedMoment(
            torch.zeros(shape, dtype=torch.uint8, device=device),
            torch.zeros(shape[0], shape[1] // BLOCK, device=device),
            is_signed,
        )
        for is_signed in (True, False)
    )
    return first, second


def gradients(step: int, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Return gradients of several magnitudes, with rows of zeros."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randn(shape, generator=generator) * 10.0**-step
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


def check_numbers_of_torchao(betas: tuple[float, float], backend: str) -> None:
    """Assert that five updates on a CPU give what torchao itself has computed."""
    file = json.loads(Path(__file__).with_name("torchao_updates.json").read_text())
    wanted = file["updates"][str(betas)]
    weights, moments = first_weights(SMALL), new_moments(shape=SMALL)
    for step, update in enumerate(updates(betas), 1):
        update_weights(weights, gradients(step, SMALL), *moments, update, backend=backend)
    assert torch.allclose(weights.flatten(), torch.tensor(wanted["weights"]), rtol=1e-6, atol=1e-8)
    for moment, codes, scales in zip(moments, wanted["codes"], wanted["scales"], strict=True):
        assert bytes(moment.codes.flatten().tolist()).hex() == codes
        assert torch.allclose(moment.scales.flatten(), torch.tensor(scales), rtol=1e-6, atol=0)


@pytest.mark.parametrize("betas", BETAS)
def test_five_updates_are_those_of_torchao(betas: tuple[float, float]) -> None:
    check_numbers_of_torchao(betas, "torch")
