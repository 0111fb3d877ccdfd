"""The pull towards a reference: by hand, and in expectation against the divergence itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from echo.algo.losses import (
    KL_ESTIMATORS,
    GrpoLoss,
    KlEstimator,
    ReferenceKlLoss,
    kl_k1,
    kl_k2,
    kl_k3,
    make_loss,
)
from tests.algo.batches import doubles, gradient, make_inputs, random_inputs

LEARNER = doubles([0.5, 0.3, 0.2])
SAMPLER = doubles([0.4, 0.35, 0.25])
REFERENCE = doubles([0.3, 0.3, 0.4])


def pulled(estimator: KlEstimator = "k3") -> ReferenceKlLoss:
    return ReferenceKlLoss(loss=GrpoLoss(), coef=0.1, estimator=estimator)


def test_by_hand() -> None:
    """log pi = -1, log mu = -1.2, log ref = -1.5: w = e^.2, log r = -.5."""
    inputs = make_inputs(
        doubles([[-1.0]]), doubles([[-1.2]]), doubles([0.0]), reference_logprobs=doubles([[-1.5]])
    )
    expected = {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 1 + 0.5}
    for estimator, value in expected.items():
        output = pulled(estimator)(inputs)  # type: ignore[arg-type]
        assert output.loss.item() == pytest.approx(0.1 * math.exp(0.2) * value)
        assert output.token_counts["kl/reference"].item() == pytest.approx(math.exp(0.2) * value)


def test_the_weight_is_capped() -> None:
    inputs = make_inputs(
        doubles([[-1.0]]), doubles([[-4.0]]), doubles([0.0]), reference_logprobs=doubles([[-1.5]])
    )
    assert pulled("k1")(inputs).loss.item() == pytest.approx(0.1 * 2.0 * 0.5)


def expected_gradient(estimator: KlEstimator, sampler: Tensor) -> Tensor:
    """The gradient by the learner's logits, averaged over tokens of the sampler."""
    logits = LEARNER.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    total = doubles(0.0)
    for token in range(3):
        inputs = make_inputs(
            logprobs[token].view(1, 1),
            sampler[token].log().view(1, 1),
            doubles([0.0]),
            reference_logprobs=REFERENCE[token].log().view(1, 1),
            proximal_logprobs=None,
            batch_scores=None,
        )
        total = total + sampler[token] * pulled(estimator)(inputs).loss
    return torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_on_tokens_of_another_policy_it_is_the_gradient_of_the_divergence(
    estimator: KlEstimator,
) -> None:
    logits = LEARNER.log().requires_grad_()
    probs = logits.softmax(0)
    divergence = (probs * (probs / REFERENCE).log()).sum()
    exact = 0.1 * torch.autograd.grad(divergence, logits)[0]
    assert torch.allclose(expected_gradient(estimator, SAMPLER), exact)


def test_the_loss_inside_is_untouched_and_rollouts_without_advantage_are_pulled() -> None:
    inputs = random_inputs(reference_logprobs=None)
    at_learner = replace(inputs, reference_logprobs=inputs.learner_logprobs.detach())
    inner = gradient(GrpoLoss(), inputs)
    assert torch.allclose(gradient(pulled("k2"), at_learner), inner)
    away = replace(
        inputs,
        advantages=torch.zeros_like(inputs.advantages),
        reference_logprobs=inputs.learner_logprobs.detach() - 0.5,
    )
    grad = gradient(pulled("k2"), away)
    assert bool((grad[inputs.completion_mask] > 0).all())
    assert bool((grad[~inputs.completion_mask] == 0).all())


def test_padding_leaves_no_trace() -> None:
    inputs = random_inputs()
    reference = inputs.sampler_logprobs - 0.3
    clean = gradient(pulled(), replace(inputs, reference_logprobs=reference))
    dirty = reference.where(inputs.completion_mask, torch.nan)
    assert torch.equal(gradient(pulled(), replace(inputs, reference_logprobs=dirty)), clean)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_gradcheck(estimator: KlEstimator) -> None:
    inputs = random_inputs(1, spread=0.2)
    inputs = replace(inputs, reference_logprobs=inputs.sampler_logprobs - 0.3)

    def loss(logprobs: Tensor) -> Tensor:
        return pulled(estimator)(replace(inputs, learner_logprobs=logprobs)).loss

    assert torch.autograd.gradcheck(loss, inputs.learner_logprobs)


def test_what_it_asks_for_is_more_than_the_loss_inside() -> None:
    needs = ReferenceKlLoss(loss=make_loss("gepo"), coef=0.1).needs
    assert needs.reference_logprobs
    assert needs.every_rollout
    assert needs.group_expectation
    with pytest.raises(ValueError, match="reference_logprobs is missing, and ReferenceKlLoss"):
        pulled()(random_inputs(reference_logprobs=None))


# --- estimates of a divergence --------------------------------------------------------------------

P = doubles([0.5, 0.3, 0.2])
OTHER = doubles([0.4, 0.4, 0.2])


def test_by_hand_kl() -> None:
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
def test_gradcheck_kl(estimate: object) -> None:
    logprobs = P.log().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: estimate(x, OTHER.log()), logprobs)  # type: ignore[operator]
