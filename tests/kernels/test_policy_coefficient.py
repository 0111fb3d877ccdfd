"""The policy loss of single tokens: by hand, against autograd, and against the learner's loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from echo.algo.loss import LossInputs
from echo.algo.losses import make_loss
from echo.kernels.contract import PolicyRows, PolicyTerms, RatioClip
from echo.kernels.torch_kernels import policy_terms


def terms_at(ratios: list[float], advantages: list[float], clip: RatioClip) -> PolicyTerms:
    logprobs = torch.tensor(ratios, dtype=torch.float64).log()
    advantage = torch.tensor(advantages, dtype=torch.float64)
    return policy_terms(logprobs, PolicyRows(torch.zeros_like(logprobs), advantage, clip))


def test_every_branch_worked_out_by_hand() -> None:
    ratios = [1.0, 0.5, 2.0, 1.0, 0.5, 2.0, 4.0]
    advantages = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
    terms = terms_at(ratios, advantages, RatioClip())
    assert terms.losses.tolist() == pytest.approx([-1.0, -0.5, -1.28, 1.0, 0.8, 2.0, 3.0])
    assert terms.coefficients.tolist() == pytest.approx([-1.0, -0.5, 0.0, 1.0, 0.0, 2.0, 0.0])
    assert terms.ratios.tolist() == pytest.approx(ratios)


def test_without_dual_clip_a_large_ratio_keeps_its_gradient() -> None:
    terms = terms_at([4.0], [-1.0], RatioClip(dual_clip=None))
    assert (terms.losses.item(), terms.coefficients.item()) == pytest.approx((4.0, 4.0))


def test_the_log_ratio_is_bounded() -> None:
    clip = RatioClip(dual_clip=None)
    terms = terms_at([math.exp(30.0), math.exp(-30.0)], [-1.0, 1.0], clip)
    assert terms.ratios.tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0)])
    assert terms.coefficients.tolist() == [0.0, 0.0]


def test_advantages_of_zero_have_no_gradient() -> None:
    terms = terms_at([0.1, 1.0, 10.0], [0.0, 0.0, 0.0], RatioClip())
    assert not terms.losses.any()
    assert not terms.coefficients.any()


def token_case() -> tuple[Tensor, Tensor, Tensor]:
    """[8, 50] log-probabilities of learner and sampler and [8] advantages, every branch in them."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    learner = -2.0 * torch.rand(8, 50, **options)  # type: ignore[call-overload]
    sampler = learner - 0.7 * torch.randn(8, 50, **options)  # type: ignore[call-overload]
    sampler[:, 0] = learner[:, 0]
    sampler[:, 1] = learner[:, 1] - 25.0
    advantages = torch.randn(8, **options)  # type: ignore[call-overload]
    advantages[0] = 0.0
    return learner, sampler, advantages


@pytest.mark.parametrize("dual_clip", [3.0, 1.5, None])
def test_it_is_the_gradient_of_grpo_in_float64(dual_clip: float | None) -> None:
    learner, sampler, advantages = token_case()
    learner.requires_grad_()
    mask = torch.rand(8, 50, generator=torch.Generator().manual_seed(1)) < 0.8
    num_tokens = 1000  # of a batch of which this is a part
    loss = make_loss("grpo", clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    output = loss(
        LossInputs(
            learner_logprobs=learner,
            sampler_logprobs=sampler,
            advantages=advantages,
            completion_mask=mask,
            num_tokens=num_tokens,
            num_rollouts=20,
        )
    )
    (gradient,) = torch.autograd.grad(output.loss, learner)
    rows = PolicyRows(
        sampler[mask],
        advantages[:, None].expand_as(mask)[mask],
        RatioClip(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip),
    )
    terms = policy_terms(learner.detach()[mask], rows)
    assert float(abs(terms.losses.sum() / num_tokens - output.loss.detach())) < 1e-14
    assert float((terms.coefficients / num_tokens - gradient[mask]).abs().max()) < 1e-15
    assert torch.equal(terms.coefficients == 0, gradient[mask] == 0)
    assert 0.1 < float((terms.coefficients == 0).double().mean()) < 0.9
