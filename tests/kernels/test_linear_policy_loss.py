"""The fused policy loss of the PyTorch path: the learner's GRPO on obvious logits, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from echo.algo.loss import LossInputs
from echo.algo.losses import make_loss
from echo.kernels.contract import RatioClip
from echo.kernels.logprob import TokenLosses, linear_logprob, linear_policy_loss
from tests.kernels.reference import linear_logprob_reference
from tests.kernels.test_linear_logprob import Case, make_case

ROWS = 37


def policy_of(case: Case, *, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    """[N] sampler log-probs that clip a good part of the tokens, and [N] advantages."""
    generator = torch.Generator().manual_seed(3)
    learner = linear_logprob_reference(*case)[0].detach()
    sampler = learner - spread * torch.randn(len(learner), generator=generator).to(learner)
    return sampler, torch.randn(len(learner), generator=generator).to(learner)


def fused(case: Case, sampler: Tensor, advantages: Tensor) -> TokenLosses:
    return linear_policy_loss(
        case.hidden,
        case.weight,
        case.ids,
        sampler,
        advantages,
        case.inv_temperature,
        clip=RatioClip(),
        vocab_chunk=64,
    )


def fused_loss(case: Case, sampler: Tensor, advantages: Tensor) -> Tensor:
    return fused(case, sampler, advantages).losses.sum() / ROWS


def obvious_loss(case: Case, sampler: Tensor, advantages: Tensor) -> Tensor:
    """All logits at once, and the loss that the learner would take without a kernel."""
    logprobs, _ = linear_logprob_reference(*case)
    inputs = LossInputs(
        learner_logprobs=logprobs[:, None],
        sampler_logprobs=sampler[:, None],
        advantages=advantages,
        completion_mask=torch.ones(ROWS, 1, dtype=torch.bool),
        num_tokens=ROWS,
        num_rollouts=ROWS,
    )
    return make_loss("grpo")(inputs).loss


def gradients(
    loss: Callable[[Case, Tensor, Tensor], Tensor], case: Case, policy: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    leaves = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    value = loss(case._replace(hidden=leaves[0], weight=leaves[1]), *policy)
    return value.detach(), *torch.autograd.grad(value, leaves)


def test_it_is_grpo_on_obvious_logits() -> None:
    case = make_case(gain=2.0, dtype=torch.float64)
    policy = policy_of(case)
    found = gradients(fused_loss, case, policy)
    expected = gradients(obvious_loss, case, policy)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


def test_gradcheck_in_float64() -> None:
    case = make_case(rows=6, width=3, vocab=11, dtype=torch.float64)
    policy = policy_of(case)

    assert torch.autograd.gradcheck(
        lambda hidden, weight: fused(case._replace(hidden=hidden, weight=weight), *policy).losses,
        (case.hidden.requires_grad_(), case.weight.requires_grad_()),
    )


def test_clipped_tokens_have_no_gradient_at_all() -> None:
    case = make_case()
    policy = policy_of(case)
    hidden = case.hidden.clone().requires_grad_()
    tokens = fused(case._replace(hidden=hidden), *policy)
    tokens.losses.sum().backward()
    sampler, advantages = policy
    ratios = (tokens.logprobs.detach() - sampler).exp()
    is_clipped = (advantages < 0) & ((ratios < 0.8) | (ratios > 3.0))
    is_clipped |= (advantages > 0) & (ratios > 1.28)
    assert 0.2 < is_clipped.double().mean() < 0.8
    assert hidden.grad is not None
    assert torch.equal(~hidden.grad.any(1), is_clipped)
    assert torch.allclose(tokens.ratios, ratios)
    assert torch.allclose(tokens.entropies, linear_logprob_reference(*case)[1], rtol=1e-5)
    assert not tokens.ratios.requires_grad
    assert not tokens.entropies.requires_grad


def test_shapes_that_disagree_are_named() -> None:
    case = make_case(rows=3)
    with pytest.raises(ValueError, match=r"advantages has shape \[2\], expected \[3\]"):
        fused(case, torch.ones(3), torch.ones(2))


def test_the_same_input_gives_the_same_bits() -> None:
    case = make_case(vocab=700, dtype=torch.bfloat16)
    policy = policy_of(make_case(vocab=700))
    first, again = (gradients(fused_loss, case, policy) for _ in range(2))
    assert all(map(torch.equal, first, again))


def test_a_tied_head_gets_the_gradient_of_both_its_uses() -> None:
    case = make_case(dtype=torch.float64)
    sampler, advantages = policy_of(case._replace(hidden=case.weight[:ROWS]))
    table = case.weight.clone().requires_grad_()
    tied = case._replace(hidden=table[:ROWS], weight=table)
    (found,) = torch.autograd.grad(fused_loss(tied, sampler, advantages), table)
    apart = gradients(fused_loss, case._replace(hidden=case.weight[:ROWS]), (sampler, advantages))
    expected = apart[2].clone()
    expected[:ROWS] += apart[1]
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-16)


def test_a_frozen_head_costs_no_gradient_and_changes_no_bit() -> None:
    case = make_case()
    policy = policy_of(case)
    hidden = case.hidden.clone().requires_grad_()
    fused_loss(case._replace(hidden=hidden), *policy).backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, gradients(fused_loss, case, policy)[1])
    assert case.weight.grad is None


def test_each_token_has_its_own_temperature() -> None:
    case = make_case(dtype=torch.float64)
    together, _ = linear_logprob(*case)
    alone = [
        linear_logprob(
            case.hidden[row : row + 1],
            case.weight,
            case.ids[row : row + 1],
            float(case.inv_temperature[row]),
        )[0]
        for row in range(ROWS)
    ]
    assert len(set(case.inv_temperature.tolist())) == ROWS
    assert torch.allclose(together, torch.cat(alone), rtol=1e-7)
