"""Losses by import path: found, bound to their options, refused with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo.algo.loss import LossNeeds, needs_of
from echo.algo.losses import GrpoLoss
from echo.core.errors import ConfigError
from echo.train.custom_loss import load_loss
from tests.algo.batches import doubles, gradient, make_inputs

SOURCE = """
from echo.algo.loss import LossInputs, LossNeeds, LossOutput, aggregate

def reinforce(inputs: LossInputs, *, strength: float = 1.0) -> LossOutput:
    losses = -strength * inputs.advantages[:, None] * inputs.learner_logprobs
    return LossOutput(loss=aggregate(losses, inputs, "token_mean"), token_counts={})

def grouped(inputs):
    return reinforce(inputs)

grouped.needs = LossNeeds(whole_groups=True)

def wrong(inputs):
    return inputs.learner_logprobs.sum()

def odd(inputs):
    return reinforce(inputs)

odd.needs = "groups"
constant = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_losses.py").write_text(SOURCE)
    (tmp_path / "broken_losses.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_losses", None)


def test_a_function_of_the_users_trains() -> None:
    loss = load_loss("own_losses:reinforce", {"strength": 2.0})
    inputs = make_inputs(doubles([[-1.0, -2.0]]), doubles([[-1.0, -1.0]]), doubles([3.0]))
    assert gradient(loss, inputs).tolist() == [[-3.0, -3.0]]
    assert needs_of(loss) == LossNeeds()


def test_it_may_declare_needs() -> None:
    assert needs_of(load_loss("own_losses:grouped", {})).whole_groups


def test_a_registered_name_still_works() -> None:
    assert load_loss("grpo", {"clip_low": 0.1}) == GrpoLoss(clip_low=0.1)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("nowhere:loss", {}, "importing 'nowhere' failed .* No module named"),
        ("broken_losses:loss", {}, "importing 'broken_losses' failed .* division by zero"),
        ("own_losses:nothing", {}, "own_losses has no function 'nothing'"),
        ("own_losses:constant", {}, "own_losses has no function 'constant'"),
        ("builtins:min", {}, r"called as function\(inputs, \*\*options\).*no signature"),
        ("own_losses:reinforce", {"weight": 1}, r"options \['weight'\] .* 'weight'"),
        ("own_losses:odd", {}, "its attribute needs is 'groups'"),
    ],
)
def test_what_cannot_be_used_is_refused(kind: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_loss(kind, options)
    assert repr(kind) in str(caught.value)


def test_a_result_of_another_type_is_refused() -> None:
    inputs = make_inputs(doubles([[-1.0]]), doubles([[-1.0]]), doubles([3.0]))
    with pytest.raises(ConfigError, match=r"returned Tensor, expected echo\.algo\.loss\."):
        load_loss("own_losses:wrong", {})(inputs)
