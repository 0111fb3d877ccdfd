"""Losses and the effective sample size against a sum over all rollouts of a tiny vocabulary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from echo.algo.diagnostics import rollout_ess, rollout_ratio_sums
from echo.algo.loss import LikelyIds, Loss, LossInputs
from echo.algo.losses import DppoTvLoss, GspoLoss, SapoLoss
from tests.algo.batches import counts, doubles, make_inputs

SAMPLER = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
"""Probability of each next id, by the last id, which is 0 at first."""
LEARNER = [[0.3, 0.6, 0.1], [0.2, 0.3, 0.5], [0.45, 0.05, 0.5]]
ROLLOUTS = list(itertools.product(range(3), repeat=3))
GAP, KL = 0.12, 0.1


def probability(rollout: tuple[int, ...], policy: list[list[float]]) -> float:
    return math.prod(policy[last][token] for last, token in itertools.pairwise((0, *rollout)))


def trained_part(rollout: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens up to the first 0; the others are padding."""
    return rollout[: rollout.index(0) + 1] if 0 in rollout else rollout


def advantage(rollout: tuple[int, ...]) -> float:
    return sum(rollout) - 2.5


BATCH = [each for each in ROLLOUTS for _ in range(round(4**3 * probability(each, SAMPLER)))]
"""Each rollout as often as the sampler draws it: a mean over this batch is an expectation."""


def inputs_of(logits: Tensor) -> LossInputs:
    tokens = torch.tensor(BATCH)
    last = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
    lengths = torch.tensor([len(trained_part(each)) for each in BATCH])
    return make_inputs(
        logits.log_softmax(1)[last, tokens],
        doubles(SAMPLER).log()[last, tokens],
        doubles([advantage(each) for each in BATCH]),
        torch.arange(3) < lengths[:, None],
    )


def dppo_token(p: float, mu: float, a: float) -> tuple[float, float]:
    """The loss of one token, and its derivative by log p."""
    is_dropped = (a > 0 and p - mu > GAP) or (a < 0 and mu - p > GAP)
    policy = 0.0 if is_dropped else -p / mu * a
    return policy + KL * math.log(p / mu) ** 2, policy + 2 * KL * math.log(p / mu)


def sapo_token(p: float, mu: float, a: float) -> tuple[float, float]:
    tau = 1.05 if a < 0 else 1.0
    gate = 1 / (1 + math.exp(-tau * (p / mu - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * p / mu * a


@pytest.mark.parametrize(
    ("loss", "of_token", "is_rollout_mean"),
    [
        (DppoTvLoss(max_probability_gap=GAP, sampler_kl_coef=KL), dppo_token, False),
        (SapoLoss(), sapo_token, True),
    ],
)
def test_the_expected_loss_and_its_gradient_are_those_of_the_formula(
    loss: Loss,
    of_token: Callable[[float, float, float], tuple[float, float]],
    is_rollout_mean: bool,
) -> None:
    """The gradient is by the logits: that of log p(token) is [id = token] - p(id)."""
    value, gradient, num_tokens = 0.0, torch.zeros(3, 3, dtype=torch.float64), 0.0
    for rollout in ROLLOUTS:
        tokens, q = trained_part(rollout), probability(rollout, SAMPLER)
        num_tokens += q * len(tokens)
        share = q / len(tokens) if is_rollout_mean else q
        for last, token in itertools.pairwise((0, *tokens)):
            p, mu = LEARNER[last][token], SAMPLER[last][token]
            token_loss, slope = of_token(p, mu, advantage(rollout))
            value += share * token_loss
            for other in range(3):
                gradient[last, other] += share * slope * ((other == token) - LEARNER[last][other])
    divisor = 1.0 if is_rollout_mean else num_tokens
    logits = doubles(LEARNER).log().requires_grad_()
    inputs = inputs_of(logits)
    output = loss(inputs)
    (found,) = torch.autograd.grad(output.loss, logits)
    assert output.loss.item() == pytest.approx(value / divisor, rel=1e-12)
    assert torch.allclose(found, gradient / divisor, rtol=1e-12, atol=1e-15)
    if not is_rollout_mean:
        assert 0 < counts(output)["dropped/tv"] < inputs.num_tokens


def gspo_rollout(tokens: tuple[int, ...], a: float) -> tuple[float, list[list[float]], bool]:
    """The loss of a rollout that is centered by its one likeliest id, and whether it is clipped.

    Also returned is the loss's derivative by log p of each id, [3] for each token.
    """
    pairs = list(itertools.pairwise((0, *tokens)))
    s = math.exp(sum(math.log(LEARNER[x][y] / SAMPLER[x][y]) for x, y in pairs) / len(pairs))
    is_clipped = s > 1.2 if a > 0 else s < 0.9
    value = -a * (s if not is_clipped else 1.2 if a > 0 else 0.9)
    slopes = []
    for last, token in pairs:
        likely = SAMPLER[last].index(max(SAMPLER[last]))
        p, q = LEARNER[last][likely], SAMPLER[last][likely]
        m, alpha = (0.0, 0.0) if is_clipped else (s * q, s * (1 - q) / (1 - p))
        value += a * (m - alpha * p) * math.log(p) / len(pairs)
        own = [a * (m - alpha * p) * (other == likely) for other in range(3)]
        own[token] -= 0.0 if is_clipped else a * s
        slopes.append([each / len(pairs) for each in own])
    return value, slopes, is_clipped


def test_gspo_with_score_centering_is_that_of_the_formula() -> None:
    value, gradient, num_clipped = 0.0, torch.zeros(3, 3, dtype=torch.float64), 0.0
    for rollout in ROLLOUTS:
        tokens, q = trained_part(rollout), probability(rollout, SAMPLER)
        own, slopes, is_clipped = gspo_rollout(tokens, advantage(rollout))
        value += q * own
        num_clipped += q * len(tokens) * is_clipped
        for last, slope in zip((0, *tokens), slopes, strict=False):
            for token, other in itertools.product(range(3), repeat=2):
                part = (other == token) - LEARNER[last][other]
                gradient[last, other] += q * slope[token] * part
    logits = doubles(LEARNER).log().requires_grad_()
    inputs = inputs_of(logits)
    before = torch.nn.functional.pad(torch.tensor(BATCH)[:, :-1], (1, 0))[inputs.completion_mask]
    places = inputs.completion_mask.flatten().nonzero().squeeze(1)
    likely = doubles(SAMPLER).argmax(1)[before]
    of_ids = LikelyIds(
        places=places,
        learner_logprobs=logits.log_softmax(1)[before, likely],
        sampler_logprobs=doubles(SAMPLER).log()[before, likely],
    )
    loss = GspoLoss(clip_low=0.1, clip_high=0.2, score_centering=1)
    output = loss(replace(inputs, likely=of_ids))
    (found,) = torch.autograd.grad(output.loss, logits)
    assert output.loss.item() == pytest.approx(value, rel=1e-12)
    assert torch.allclose(found, gradient, rtol=1e-12, atol=1e-15)
    clipped = counts(output)["clip_ratio/mean"]
    assert clipped == pytest.approx(num_clipped * len(BATCH))
    assert 0 < clipped < inputs.num_tokens


def test_the_effective_sample_size_of_rollouts_is_that_of_the_expectation() -> None:
    mean = square = 0.0
    for rollout in ROLLOUTS:
        tokens, q = trained_part(rollout), probability(rollout, SAMPLER)
        weight = probability(tokens, LEARNER) / probability(tokens, SAMPLER)
        mean, square = mean + q * weight, square + q * weight**2
    assert mean == pytest.approx(1.0)
    inputs = inputs_of(doubles(LEARNER).log())
    log_ratios = inputs.learner_logprobs - inputs.sampler_logprobs
    sums = rollout_ratio_sums(log_ratios, inputs.completion_mask)
    found = rollout_ess({name: float(each) for name, each in sums.items()})
    assert found == pytest.approx(1 / square, rel=1e-12)
