"""The three estimates of a divergence, against the divergence itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from echo.algo.losses import kl_k1, kl_k2, kl_k3
from tests.algo.batches import doubles

torch.set_num_threads(1)

P = doubles([0.5, 0.3, 0.2])
OTHER = doubles([0.4, 0.4, 0.2])


def test_by_hand() -> None:
    """p = .5, other = .25: log r = -log 2."""
    logprobs, other = doubles([math.log(0.5)]), doubles([math.log(0.25)])
    assert kl_k1(logprobs, other).item() == pytest.approx(math.log(2))
    assert kl_k2(logprobs, other).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_k3(logprobs, other).item() == pytest.approx(0.5 - 1 + math.log(2))


def test_k1_and_k3_are_unbiased() -> None:
    divergence = float((P * (P / OTHER).log()).sum())
    for estimate in (kl_k1, kl_k3):
        assert float((P * estimate(P.log(), OTHER.log())).sum()) == pytest.approx(divergence)


def test_gradients_are_those_the_docstring_says() -> None:
    """Expected over tokens sampled from p, by the logits of p."""

    def expected_gradient(logits: Tensor, penalty: object) -> Tensor:
        logprobs = logits.log_softmax(0)
        value = (logprobs.exp().detach() * penalty(logprobs, OTHER.log())).sum()  # type: ignore[operator]
        return torch.autograd.grad(value, logits)[0]

    logits = P.log().requires_grad_()
    probs = logits.softmax(0)
    forward = torch.autograd.grad((probs * (probs / OTHER).log()).sum(), logits)[0]
    reverse = torch.autograd.grad(-(OTHER * logits.log_softmax(0)).sum(), logits)[0]
    assert torch.allclose(expected_gradient(logits, kl_k1), doubles([0.0, 0.0, 0.0]), atol=1e-15)
    assert torch.allclose(expected_gradient(logits, kl_k2), forward)
    assert torch.allclose(expected_gradient(logits, kl_k3), reverse)


def test_k3_is_limited() -> None:
    assert kl_k3(doubles([-100.0]), doubles([0.0])).item() == pytest.approx(math.exp(5) - 6)
    assert kl_k3(doubles([0.0]), doubles([-1e30])).item() == pytest.approx(19.0)


@pytest.mark.parametrize("estimate", [kl_k1, kl_k2, kl_k3])
def test_gradcheck(estimate: object) -> None:
    logprobs = P.log().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: estimate(x, OTHER.log()), logprobs)  # type: ignore[operator]
