"""Every loss: its paper's formula, finite differences, invariances, refusals.

"Every loss" means each loss of the registry with each option that changes its formula, behind each
mask, and with each KL term to a reference.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from echo.algo.advantages import group_advantages, overlong_penalties
from echo.algo.corrections import MaskedLoss, RolloutMasks, importance_weights
from echo.algo.loss import Loss, needs_of
from echo.algo.losses import LOSSES, KlEstimator, OaplLoss, ReferenceKlLoss, make_loss
from tests.algo import slow_losses as slow
from tests.algo.batches import (
    GROUP_SIZE,
    LENGTHS,
    counts,
    doubles,
    gradient,
    make_inputs,
    random_inputs,
    rows_of,
)

Slow = Callable[[Sequence[slow.SlowRollout]], float]

CASES: dict[str, tuple[Loss, Slow]] = {
    "grpo": (make_loss("grpo"), slow.grpo),
    "grpo without dual clip": (make_loss("grpo", dual_clip=None), slow.dapo),
    "grpo by rollout": (
        make_loss("grpo", aggregation="sequence_mean"),
        slow.grpo_sequence_mean,
    ),
    "dapo": (make_loss("dapo"), slow.dapo),
    "dr_grpo": (
        make_loss("dr_grpo", max_completion_tokens=7),
        lambda rollouts: slow.dr_grpo(rollouts, 7),
    ),
    "cispo": (make_loss("cispo"), slow.cispo),
    "sapo": (make_loss("sapo"), slow.sapo),
    "dppo_tv": (make_loss("dppo_tv"), slow.dppo_tv),
    "dppo_tv with its term": (
        make_loss("dppo_tv", sampler_kl_coef=0.1),
        lambda rollouts: slow.dppo_tv(rollouts, kl=0.1),
    ),
    "m2po": (make_loss("m2po"), slow.m2po),
    "m2po wide": (
        make_loss("m2po", max_second_moment=0.5),
        lambda rollouts: slow.m2po(rollouts, 0.5),
    ),
    "decoupled_ppo": (make_loss("decoupled_ppo"), slow.decoupled_ppo),
    "decoupled_ppo loglinear": (
        make_loss("decoupled_ppo", proximal="loglinear"),
        lambda rollouts: slow.decoupled_ppo(rollouts, loglinear=True),
    ),
    "gspo": (make_loss("gspo"), slow.gspo),
    "gspo wide": (
        make_loss("gspo", clip_low=0.2, clip_high=0.28),
        lambda rollouts: slow.gspo(rollouts, 0.2, 0.28),
    ),
    "oapl": (make_loss("oapl"), slow.oapl),
    "oapl held": (make_loss("oapl", beta=0.3), lambda rollouts: slow.oapl(rollouts, 0.3)),
    "gepo": (make_loss("gepo"), slow.gepo),
    "gepo without clip": (
        make_loss("gepo", clip_low=None, clip_high=None),
        lambda rollouts: slow.gepo(rollouts, None),
    ),
    "gepo+": (make_loss("gepo", gate_kl=0.1), lambda rollouts: slow.gepo(rollouts, gate=0.1)),
    "gepo with kl": (
        make_loss("gepo", sampler_kl_coef=0.3),
        lambda rollouts: slow.gepo(rollouts, kl=0.3),
    ),
}
for _kind in ("token_tis", "sequence_tis", "token_mis", "sequence_mis"):
    CASES[f"decoupled_ppo {_kind}"] = (
        make_loss("decoupled_ppo", importance_weight=_kind, importance_cap=5.0),
        partial(slow.decoupled_ppo, kind=_kind, cap=5.0),
    )

CASES |= {
    "grpo behind a geometric mask": (
        MaskedLoss(
            loss=make_loss("grpo"), masks=RolloutMasks(geometric_low=0.8, geometric_high=1.1)
        ),
        partial(slow.grpo, keep=slow.keep_geometric(0.8, 1.1)),
    ),
    "grpo behind a veto": (
        MaskedLoss(loss=make_loss("grpo"), masks=RolloutMasks(veto=0.5)),
        partial(slow.grpo, keep=slow.keep_unvetoed(0.5)),
    ),
    "gspo behind opsm": (
        MaskedLoss(loss=make_loss("gspo"), masks=RolloutMasks(opsm=0.1)),
        partial(slow.gspo, keep=slow.keep_opsm(0.1)),
    ),
}


def _pulled(estimator: KlEstimator) -> tuple[Loss, Slow]:
    loss = ReferenceKlLoss(loss=make_loss("grpo"), coef=0.1, estimator=estimator)
    return loss, partial(slow.pulled_grpo, estimator=estimator, coef=0.1)


PULLED = {
    "grpo pulled by k1": _pulled("k1"),
    "grpo pulled by k2": _pulled("k2"),
    "grpo pulled by k3": _pulled("k3"),
}
CASES |= PULLED

PENALISED = {name for name in CASES if "term" in name or "kl" in name} | PULLED.keys()
STOPPED = {"cispo", "decoupled_ppo loglinear", "grpo pulled by k2"}
"""Losses with a stop-gradient, whose stopped part finite differences have to hold fixed."""
EXPECTATION = {name for name in CASES if name.startswith("gepo") and name != "gepo+"}
"""Losses whose ratio is not 1 on-policy, and may be clipped."""
EACH_LOSS = pytest.mark.parametrize("name", CASES)


def loss_of(name: str) -> Loss:
    return CASES[name][0]


def test_every_registered_loss_is_tried() -> None:
    assert {name.split(maxsplit=1)[0].rstrip("+") for name in CASES} == set(LOSSES)


# ---------------------------------------------------------------------------------- the formula


@EACH_LOSS
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5, 2.0])
def test_agrees_with_the_paper_token_by_token(name: str, spread: float) -> None:
    loss, slow_loss = CASES[name]
    inputs = random_inputs(3, spread=spread)
    expected = slow_loss(slow.rollouts_of(inputs))
    assert loss(inputs).loss.item() == pytest.approx(expected, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("name", sorted(CASES.keys() - STOPPED))
@pytest.mark.parametrize("spread", [0.05, 1.0])
@pytest.mark.slow
def test_gradcheck_in_float64(name: str, spread: float) -> None:
    inputs = random_inputs(5, spread=spread)
    loss = loss_of(name)

    def function(learner: Tensor) -> Tensor:
        return loss(replace(inputs, learner_logprobs=learner)).loss

    assert torch.autograd.gradcheck(function, inputs.learner_logprobs)


@pytest.mark.parametrize("name", sorted(STOPPED))
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_where_a_gradient_stops_it_is_that_of_the_rest(name: str, spread: float) -> None:
    loss, slow_loss = CASES[name]
    inputs = random_inputs(5, spread=spread)
    still = slow.rollouts_of(inputs)
    # A partial of the case's slow function, whatever options it is bound to.
    slow_losses: dict[str, Callable[..., float]] = {
        "cispo": slow.cispo,
        "decoupled_ppo loglinear": partial(slow.decoupled_ppo, loglinear=True),
        "grpo pulled by k2": slow_loss,
    }
    held = slow_losses[name]
    grad = gradient(loss, inputs)
    for row, token in inputs.completion_mask.nonzero().tolist():
        values = []
        for step in (1e-6, -1e-6):
            moved = inputs.learner_logprobs.detach().clone()
            moved[row, token] += step
            rollouts = slow.rollouts_of(replace(inputs, learner_logprobs=moved))
            values.append(held(rollouts, still=still))
        assert grad[row, token].item() == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-8)


# ----------------------------------------------------------------------------------- invariances


@EACH_LOSS
def test_padding_changes_nothing_whatever_it_holds(name: str) -> None:
    loss, inputs = loss_of(name), random_inputs()

    def pad(tensor: Tensor | None, value: float) -> Tensor:
        assert tensor is not None
        return torch.nn.functional.pad(tensor, (0, 3), value=value)

    def spoil(tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return torch.where(inputs.completion_mask, tensor.detach(), math.nan)

    assert inputs.staleness is not None
    padded = replace(
        inputs,
        learner_logprobs=pad(spoil(inputs.learner_logprobs), math.nan),
        sampler_logprobs=pad(spoil(inputs.sampler_logprobs), -math.inf),
        proximal_logprobs=pad(spoil(inputs.proximal_logprobs), math.inf),
        reference_logprobs=pad(spoil(inputs.reference_logprobs), math.nan),
        completion_mask=torch.nn.functional.pad(inputs.completion_mask, (0, 3)),
        staleness=torch.nn.functional.pad(inputs.staleness, (0, 3)),
    )
    # Sums over wider rows round differently in the last place, nothing else may change.
    assert torch.allclose(loss(padded).loss, loss(inputs).loss, rtol=1e-14, atol=0)
    assert counts(loss(padded)) == counts(loss(inputs))
    expected = gradient(loss, inputs)
    assert torch.allclose(gradient(loss, padded)[:, :5], expected, rtol=1e-14, atol=0)
    assert not gradient(loss, padded)[:, 5:].any()
    assert not expected[~inputs.completion_mask].any()


@EACH_LOSS
def test_the_order_of_rollouts_does_not_matter(name: str) -> None:
    loss, inputs = loss_of(name), random_inputs()
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(1))
    shuffled = rows_of(inputs, order)
    assert torch.allclose(loss(shuffled).loss, loss(inputs).loss, rtol=1e-12)
    assert torch.allclose(gradient(loss, shuffled), gradient(loss, inputs)[order], rtol=1e-12)


@EACH_LOSS
def test_parts_of_a_batch_add_up_to_the_whole(name: str) -> None:
    loss, inputs = loss_of(name), random_inputs()
    parts = [rows_of(inputs, rows) for rows in torch.arange(len(LENGTHS)).split([1, 3, 6, 2])]
    if name == "gepo over the micro-batch":
        assert sum(loss(part).loss.item() for part in parts) != pytest.approx(
            loss(inputs).loss.item()
        )
        return
    total = sum(loss(part).loss.item() for part in parts)
    assert total == pytest.approx(loss(inputs).loss.item(), abs=1e-13)
    together = torch.cat([gradient(loss, part) for part in parts])
    assert torch.allclose(together, gradient(loss, inputs), rtol=1e-13, atol=0)
    for metric, count in loss(inputs).token_counts.items():
        found = sum(loss(part).token_counts[metric].item() for part in parts)
        assert found == pytest.approx(count.item(), rel=1e-12)


@EACH_LOSS
def test_equal_rewards_give_exactly_no_gradient(name: str) -> None:
    loss, inputs = loss_of(name), random_inputs()
    zero = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    grad = gradient(loss, zero)
    if name in PENALISED:
        assert needs_of(loss).every_rollout
        assert grad.any()
        return
    assert not grad.any()
    assert loss(zero).loss == 0


@pytest.mark.parametrize("name", sorted(CASES.keys() - EXPECTATION - PULLED.keys()))
def test_without_staleness_it_is_the_policy_gradient(name: str) -> None:
    """Each token's share of A differs only by how the loss averages."""
    loss, inputs = loss_of(name), random_inputs(spread=0.0)
    shares = torch.full((len(LENGTHS), 1), 1 / inputs.num_tokens, dtype=torch.float64)
    if name == "dr_grpo":
        shares = torch.full_like(shares, 1 / (len(LENGTHS) * 7))
    if name in ("sapo", "grpo by rollout", "gepo+") or name.startswith("gspo"):
        shares = 1 / (len(LENGTHS) * doubles(LENGTHS)[:, None])
    if isinstance(loss, OaplLoss):  # the square's derivative, in units of reward
        shares = torch.full_like(shares, 2 * loss.beta / len(LENGTHS))
    expected = torch.where(inputs.completion_mask, -shares * inputs.advantages[:, None], 0.0)
    assert torch.allclose(gradient(loss, inputs), expected, rtol=1e-13, atol=0)
    found = counts(loss(inputs))
    assert all(found[metric] == 0 for metric in found if metric != "gepo/gated")


def test_oapl_is_0_at_the_policy_that_trades_reward_for_kl() -> None:
    """By enumeration: a group of all 3^2 rollouts, which the sampler draws equally often.

    pi = mu exp((r - V) / beta) is normalised by the V of the group, so it is a policy; both the
    loss and its gradient are 0 there, and nowhere near it.
    """
    beta, generator = 0.3, torch.Generator().manual_seed(0)
    rewards = torch.rand((1, 9), dtype=torch.float64, generator=generator)
    advantages = torch.from_numpy(
        group_advantages(rewards.numpy(), normalize_by_std=False, value_beta=beta)[0]
    )
    best = (advantages / beta).exp().view(3, 3) / 9  # by first and second token
    assert best.sum().item() == pytest.approx(1.0)
    first = best.sum(1)
    learner = torch.stack([first.repeat_interleave(3), (best / first[:, None]).flatten()], 1).log()
    sampler = torch.full_like(learner, -math.log(3))
    inputs = make_inputs(learner, sampler, advantages)
    loss = make_loss("oapl", beta=beta)
    assert loss(inputs).loss.item() == pytest.approx(0.0, abs=1e-28)
    assert torch.allclose(gradient(loss, inputs), torch.zeros_like(learner), atol=1e-15)
    # From the sampler's own policy, the expected gradient is the policy gradient of r - V.
    on_policy = gradient(loss, replace(inputs, learner_logprobs=sampler))
    assert torch.allclose(on_policy, (-2 * beta * advantages / 9)[:, None].expand(9, 2))


def test_without_staleness_gepo_weighs_by_the_group() -> None:
    """w = q / E, whose mean under q / sum(q) is 1 in every group."""
    loss, inputs = loss_of("gepo without clip"), random_inputs(spread=0.0)
    lengths = doubles(LENGTHS)
    means = torch.where(inputs.completion_mask, inputs.sampler_logprobs, 0.0).sum(1) / lengths
    q = means.exp().view(3, GROUP_SIZE)
    ratio = q * q.sum(1, keepdim=True) / q.square().sum(1, keepdim=True)
    assert torch.allclose((q * ratio).sum(1) / q.sum(1), doubles([1.0, 1.0, 1.0]))
    shares = (ratio.flatten() / (len(LENGTHS) * lengths))[:, None]
    expected = torch.where(inputs.completion_mask, -shares * inputs.advantages[:, None], 0.0)
    assert torch.allclose(gradient(loss, inputs), expected, rtol=1e-13, atol=0)


def test_without_staleness_the_pull_to_the_sampler_and_to_a_reference_rest() -> None:
    """Neither KL term has a gradient if the policies are equal."""
    inputs = random_inputs(spread=0.0)
    expected = gradient(loss_of("gepo"), inputs)
    assert torch.equal(gradient(loss_of("gepo with kl"), inputs), expected)
    at_learner = replace(inputs, reference_logprobs=inputs.learner_logprobs.detach())
    expected = gradient(loss_of("grpo"), inputs)
    for name in PULLED.keys() - {"grpo pulled by k1"}:
        assert torch.equal(gradient(loss_of(name), at_learner), expected)
    # k1 is 0 there, but its gradient is 1 per token: only in the mean it pulls nowhere.
    inputs = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    found = gradient(
        loss_of("grpo pulled by k1"), replace(at_learner, advantages=inputs.advantages)
    )
    assert torch.allclose(found[inputs.completion_mask] * inputs.num_tokens, doubles(0.1))


@EACH_LOSS
def test_a_rollout_masked_throughout_contributes_nothing(name: str) -> None:
    loss, inputs = loss_of(name), random_inputs()
    mask = inputs.completion_mask.clone()
    mask[0] = False
    grad = gradient(loss, replace(inputs, completion_mask=mask))
    assert grad.isfinite().all()
    assert not grad[0].any()
    assert grad[1:].any()


@EACH_LOSS
def test_an_extreme_ratio_stays_finite(name: str) -> None:
    learner = torch.tensor([[-0.1, -500.0], [-500.0, -500.0]])
    sampler = torch.tensor([[-500.0, -0.1], [-0.1, -0.2]])
    for sign in (1.0, -1.0):
        inputs = make_inputs(learner, sampler, torch.tensor([sign, -sign]))
        assert loss_of(name)(inputs).loss.isfinite()
        assert gradient(loss_of(name), inputs).isfinite().all()


@EACH_LOSS
def test_float32_stays_float32(name: str) -> None:
    inputs = random_inputs()
    changed = {
        field: getattr(inputs, field).detach().float()
        for field in (
            "learner_logprobs",
            "sampler_logprobs",
            "proximal_logprobs",
            "reference_logprobs",
            "advantages",
        )
    }
    assert inputs.log_expectation is not None
    single = replace(inputs, log_expectation=inputs.log_expectation.float(), **changed)
    output = loss_of(name)(single)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(loss_of(name)(inputs).loss.item(), rel=1e-4)


# ----------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    "loss", [*LOSSES.values(), ReferenceKlLoss], ids=lambda loss: loss.__name__
)
def test_a_docstring_gives_equation_source_difference_and_limits(loss: type[Loss]) -> None:
    text = inspect.getdoc(loss) or ""
    for part in ("loss = ", "Source: ", "Differs from the paper: ", "Limits: "):
        assert part in text, part
    assert "Shapes: " in (sys.modules[loss.__module__].__doc__ or "")


@pytest.mark.parametrize(
    "part",
    [RolloutMasks, importance_weights, group_advantages, overlong_penalties],
    ids=lambda part: part.__name__,
)
def test_so_does_one_of_what_stands_around_a_loss(part: Callable[..., object]) -> None:
    text = inspect.getdoc(part) or ""
    for word in ("Source: ", "Differs from the paper: ", "Limits: "):
        assert word in text, word
    assert "Shapes: " in (sys.modules[part.__module__].__doc__ or "")


# -------------------------------------------------------------------------------------- registry


@pytest.mark.parametrize(
    ("kind", "options", "missing"),
    [
        ("gepo", {}, "log_expectation"),
        ("m2po", {}, "batch_scores"),
        ("decoupled_ppo", {}, "proximal_logprobs"),
        ("decoupled_ppo", {"proximal": "loglinear"}, "staleness"),
    ],
)
def test_a_missing_input_is_named(kind: str, options: dict[str, Any], missing: str) -> None:
    taken_away: dict[str, Any] = {missing: None}
    inputs = replace(random_inputs(), **taken_away)
    with pytest.raises(
        ValueError, match=rf"LossInputs\.{missing} is missing, and \w+Loss needs it"
    ):
        make_loss(kind, **options)(inputs)
