"""Score centering against enumeration of small vocabularies: expectation, gradient, the tail."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from echo.algo.corrections import MaskedLoss, RolloutMasks
from echo.algo.loss import LikelyIds, Loss, LossInputs, needs_of
from echo.algo.losses import (
    CispoLoss,
    GspoLoss,
    centering_of_rollouts,
    centering_of_tokens,
    make_loss,
    tail_ratio,
)
from tests.algo.batches import counts, doubles

VOCAB = 6
NONE = CispoLoss(clip_low=1e-9, clip_high=1e-9)
"""Weights of 1: the plain policy gradient."""


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(*shape, VOCAB, dtype=torch.float64, generator=generator)


def likely_of(logits: Tensor, sampler: Tensor, ids: Tensor) -> LikelyIds:
    """The [B, T, k] ids of every token, with log-probabilities from [B, T, V]."""
    num_tokens, k = ids.shape[0] * ids.shape[1], ids.shape[2]
    return LikelyIds(
        places=torch.arange(num_tokens).repeat_interleave(k),
        learner_logprobs=logits.log_softmax(-1).gather(-1, ids).flatten(),
        sampler_logprobs=sampler.gather(-1, ids).flatten(),
    )


def inputs_of(
    logits: Tensor, sampler: Tensor, tokens: Tensor, k: int, mask: Tensor | None = None
) -> LossInputs:
    """A batch of [B, T] tokens whose likely ids are the sampler's k most likely ones."""
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    ids = sampler.topk(k, dim=-1).indices.sort(-1).values
    return LossInputs(
        learner_logprobs=logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1),
        sampler_logprobs=sampler.gather(-1, tokens[..., None]).squeeze(-1),
        advantages=torch.linspace(-1.0, 2.0, len(tokens), dtype=torch.float64),
        completion_mask=mask,
        num_tokens=int(mask.sum()),
        num_rollouts=int(mask.any(1).sum()),
        likely=likely_of(logits, sampler, ids),
    )


def score_sum(logits: Tensor, weights: Tensor) -> Tensor:
    """The gradient by the logits of sum_v weights_v log pi(v), with weights held fixed."""
    leaf = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((weights.detach() * leaf.log_softmax(-1)).sum(), leaf)
    return gradient


# ------------------------------------------------------------------------------- the expectation


@pytest.mark.parametrize(
    "loss",
    [NONE, CispoLoss(), CispoLoss(clip_low=0.5, clip_high=0.3), CispoLoss(clip_high=None)],
    ids=["no weight", "cispo", "narrow", "without a bound"],
)
def test_the_expected_gradient_of_a_constant_advantage_is_0(loss: CispoLoss) -> None:
    """One token each, all of the vocabulary, weighted by the sampler's probability of each."""
    logits = random_logits().requires_grad_()
    sampler = random_logits(seed=1).log_softmax(-1)
    centered = replace(loss, score_centering=VOCAB)
    total = {True: torch.zeros(VOCAB), False: torch.zeros(VOCAB)}
    for token in range(VOCAB):
        inputs = inputs_of(
            logits.expand(1, 1, -1), sampler.expand(1, 1, -1), torch.tensor([[token]]), VOCAB
        )
        inputs = replace(inputs, advantages=doubles([0.7]))
        for is_centered, each in ((True, centered), (False, loss)):
            (gradient,) = torch.autograd.grad(each(inputs).loss, logits, retain_graph=True)
            total[is_centered] = total[is_centered] + sampler[token].exp() * gradient
    assert float(total[True].abs().max()) < 1e-14
    if loss.clip_high is not None and loss.clip_high < 1:  # where weights are bounded at all
        assert float(total[False].abs().max()) > 0.01


def test_with_rewards_it_is_their_covariance_with_the_score() -> None:
    """E_q[A w (score - E_q[score])] by enumeration, with w = 1 and with GSPO's weight."""
    logits = random_logits().requires_grad_()
    sampler = random_logits(seed=1).log_softmax(-1)
    rewards = random_logits(seed=2)
    q, p = sampler.exp(), logits.detach().softmax(-1)
    scores = torch.eye(VOCAB, dtype=torch.float64) - p  # of each token, by the logits
    wide = GspoLoss(clip_low=None, clip_high=None, score_centering=VOCAB)
    for loss, weights in ((replace(NONE, score_centering=VOCAB), torch.ones(VOCAB)), (wide, p / q)):
        expected = -((q * rewards * weights)[:, None] * (scores - q @ scores)).sum(0)
        found = torch.zeros(VOCAB)
        for token in range(VOCAB):
            inputs = inputs_of(
                logits.expand(1, 1, -1), sampler.expand(1, 1, -1), torch.tensor([[token]]), VOCAB
            )
            inputs = replace(inputs, advantages=rewards[token : token + 1])
            (gradient,) = torch.autograd.grad(loss(inputs).loss, logits, retain_graph=True)
            found = found + q[token] * gradient
        assert torch.allclose(found, expected, rtol=1e-9)


def test_the_weight_of_a_rollout_leaves_a_bias_that_falls_with_its_length() -> None:
    """All rollouts of three ids, each drawn alike, with an advantage of 1."""
    q, p = doubles([0.5, 0.25, 0.25]), doubles([0.3, 0.6, 0.1])
    logits = p.log().requires_grad_()
    scores = torch.eye(3, dtype=torch.float64) - p  # of each token, by the logits
    plain = GspoLoss(clip_low=None, clip_high=None)
    found = {}
    for length in (1, 2, 4, 8):
        tokens = torch.cartesian_prod(*[torch.arange(3)] * length).view(-1, length)
        shape = (*tokens.shape, 3)
        inputs = inputs_of(logits.expand(shape), q.log().expand(shape), tokens, 3)
        chances = q[tokens].prod(1)
        inputs = replace(inputs, advantages=chances, num_rollouts=1)  # the loss's expectation
        for k in (0, 3):
            loss = replace(plain, score_centering=k)(inputs).loss
            (found[length, k],) = torch.autograd.grad(loss, logits, retain_graph=True)
        weights = (p / q)[tokens].log().mean(1).exp()
        bias = ((chances * weights)[:, None] * (scores[tokens] - q @ scores).mean(1)).sum(0)
        assert torch.allclose(found[length, 3], -bias, atol=1e-15)
    assert torch.allclose(found[1, 0], torch.zeros(3, dtype=torch.float64), atol=1e-15)
    assert torch.allclose(found[1, 3], doubles([0.2, -0.35, 0.15]))
    sizes = [float(found[length, 3].norm()) for length in (1, 2, 4, 8)]
    assert all(0.4 < late / early < 0.55 for early, late in itertools.pairwise(sizes))


# ---------------------------------------------------------------------------------- the tail


@pytest.mark.parametrize("k", [1, 3, VOCAB])
@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (0.0, 5.0), (0.5, 1.3), (0.9, math.inf)])
def test_the_tail_counts_as_proportional_to_the_learner(k: int, low: float, high: float) -> None:
    """C has the gradient of sum_v mu'(v) w(v) log pi(v) over the whole vocabulary."""
    logits = random_logits(1, 2).requires_grad_()
    sampler = random_logits(1, 2, seed=1).log_softmax(-1)
    ids = sampler.topk(k, dim=-1).indices.sort(-1).values
    likely = likely_of(logits, sampler, ids)
    found = centering_of_tokens(likely, torch.Size([1, 2]), low=low, high=high)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    is_likely = torch.zeros_like(sampler).scatter(-1, ids, 1.0).bool()
    p, q = logits.detach().softmax(-1), sampler.exp()
    tails = [each.where(~is_likely, 0.0).sum(-1, keepdim=True) for each in (p, q)]
    rho = tails[1] / tails[0]
    reconstructed = torch.where(is_likely, q, (rho * p).where(tails[0] > 0, 0.0))
    assert torch.allclose(reconstructed.sum(-1), torch.ones_like(rho).squeeze(-1))
    weights = reconstructed * (p / reconstructed).clamp(low, high).where(reconstructed > 0, 0.0)
    assert torch.allclose(gradient, score_sum(logits, weights), atol=1e-13)
    if k < VOCAB:
        assert torch.allclose(tail_ratio(likely, torch.Size([1, 2])), rho.squeeze(-1))


def test_an_empty_tail_of_the_learner_has_no_ratio() -> None:
    """The sampler's log-probabilities are rounded, so that its tail is whatever is left."""
    learner = doubles([[0.6, 0.4 - 1e-9]]).log().flatten()
    likely = LikelyIds(
        places=torch.tensor([0, 0]),
        learner_logprobs=learner,
        sampler_logprobs=doubles([0.5, 0.49]).log(),
    )
    assert tail_ratio(likely, torch.Size([1, 1])).item() == 1.0
    more = replace(likely, sampler_logprobs=doubles([0.5, 0.51]).log())
    assert tail_ratio(more, torch.Size([1, 1])).item() == 1.0
    small = replace(likely, learner_logprobs=doubles([0.6, 0.4 - 1e-5]).log())
    assert tail_ratio(small, torch.Size([1, 1])).item() == 100.0


def test_a_token_without_ids_is_not_centered() -> None:
    logits = random_logits(1, 2).requires_grad_()
    sampler = random_logits(1, 2, seed=1).log_softmax(-1)
    whole = likely_of(logits, sampler, torch.arange(VOCAB).expand(1, 2, -1))
    second = LikelyIds(
        places=whole.places[VOCAB:],
        learner_logprobs=whole.learner_logprobs[VOCAB:],
        sampler_logprobs=whole.sampler_logprobs[VOCAB:],
    )
    shape = torch.Size([1, 2])
    expected = centering_of_tokens(whole, shape, low=1.0, high=1.0)
    found = centering_of_tokens(second, shape, low=1.0, high=1.0)
    assert found[0, 0] == 0
    assert torch.equal(found[0, 1], expected[0, 1])


# --------------------------------------------------------------------------------- around a loss


def test_gspo_centers_by_the_weight_of_the_rollout_and_not_where_it_is_clipped() -> None:
    logits = random_logits(3, 4).requires_grad_()
    # Rollout 1 is near the learner, the others are not: 0 (A < 0) and 2 (A > 0) may be clipped.
    sampler = random_logits(3, 4, seed=1)
    sampler[1] = logits.detach()[1] + 0.01 * sampler[1]
    sampler = sampler.log_softmax(-1)
    tokens = torch.tensor([[0, 1, 2, 3], [5, 4, 3, 2], [1, 1, 0, 2]])
    mask = torch.tensor([[True] * 4, [True, True, True, False], [True, False, True, True]])
    inputs = replace(
        inputs_of(logits, sampler, tokens, 3, mask), advantages=doubles([-1.0, 0.5, 2])
    )
    plain, loss = GspoLoss(), GspoLoss(score_centering=3)
    ratio = (inputs.learner_logprobs - inputs.sampler_logprobs).where(mask, 0.0).sum(1).detach()
    ratio = (ratio / mask.sum(1)).exp()
    is_clipped = [bool(ratio[0] < 0.98), False, bool(ratio[2] > 1.03)]
    assert any(is_clipped)
    found = loss(inputs)
    assert counts(found) == counts(plain(inputs))
    (difference,) = torch.autograd.grad(found.loss - plain(inputs).loss, logits, retain_graph=True)
    assert inputs.likely is not None
    each = centering_of_rollouts(inputs.likely, mask, torch.ones(3, dtype=torch.float64))
    for row in range(3):
        (own,) = torch.autograd.grad(
            each[row].where(mask[row], 0.0).sum(), logits, retain_graph=True
        )
        factor = inputs.advantages[row] * ratio[row] / int(mask[row].sum()) / 3
        expected = torch.zeros_like(own[row]) if is_clipped[row] else factor * own[row]
        assert torch.allclose(difference[row], expected, atol=1e-14)


@pytest.mark.parametrize("loss", [replace(NONE, score_centering=3), GspoLoss(score_centering=3)])
def test_masked_tokens_have_no_part_in_it(loss: Loss) -> None:
    logits = random_logits(2, 3).requires_grad_()
    sampler = random_logits(2, 3, seed=1).log_softmax(-1)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    inputs = inputs_of(logits, sampler, tokens, 3, mask)
    vetoed = MaskedLoss(loss=loss, masks=RolloutMasks(veto=1.0 - 1e-12))
    assert needs_of(vetoed).likely_ids == 3
    (gradient,) = torch.autograd.grad(loss(inputs).loss, logits, retain_graph=True)
    assert not gradient[0, 1].any()
    (gradient,) = torch.autograd.grad(vetoed(inputs).loss, logits)
    ratios = (inputs.learner_logprobs - inputs.sampler_logprobs).detach().where(mask, 0.0)
    for row in range(2):
        assert bool(gradient[row].any()) == bool(ratios[row].min() > -1e-12)


def test_the_ids_are_asked_for_only_where_they_are_used() -> None:
    assert needs_of(make_loss("gspo")).likely_ids == 0
    assert needs_of(make_loss("cispo", score_centering=32)).likely_ids == 32
    logits = random_logits(1, 1).requires_grad_()
    inputs = inputs_of(logits, logits.detach().log_softmax(-1), torch.tensor([[0]]), 3)
    with pytest.raises(ValueError, match=r"LossInputs\.likely is missing, and GspoLoss needs it"):
        GspoLoss(score_centering=3)(replace(inputs, likely=None))
