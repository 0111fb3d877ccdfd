"""The clipped surrogate and what is made of it, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from echo.algo.losses import DapoLoss, DecoupledPpoLoss, DrGrpoLoss, GrpoLoss, loglinear_logprobs
from tests.algo.batches import counts, doubles, gradient, make_inputs

torch.set_num_threads(1)

# The vector of the design: one rollout, A = 1; r = prox / behav = [1.221, .905, 6.686, 2.226],
# u = learner / prox = [1.105, 1.221, .607, 1].
LEARNER = doubles([[-1.0, -0.5, -2.0, -0.1]])
PROXIMAL = doubles([[-1.1, -0.7, -1.5, -0.1]])
SAMPLER = doubles([[-1.3, -0.6, -3.4, -0.9]])
ONE = doubles([1.0])


def test_each_branch_by_hand() -> None:
    # Ratios per row: inside, below, above the range, and above the dual clip.
    ratios = doubles([[1.1, 0.5, 2.0, 4.0], [1.1, 0.5, 2.0, 4.0]])
    inputs = make_inputs(ratios.log(), torch.zeros_like(ratios), doubles([2.0, -1.0]))
    output = GrpoLoss()(inputs)
    #        A = 2: -min(2 r, 2 clip(r))        A = -1: -min(-r, -clip(r)), at most 3
    losses = [-2.2, -1.0, -2.56, -2.56, 1.1, 0.8, 2.0, 3.0]
    assert output.loss.item() == pytest.approx(sum(losses) / 8)
    assert counts(output) == {
        "clip_ratio/low": 1,
        "clip_ratio/high": 2,
        "clip_ratio/dual": 1,
        "clip_ratio/mean": 4,
    }
    # -A r / 8 where the ratio still counts, nothing where it is clipped.
    assert (8 * gradient(GrpoLoss(), inputs)).flatten().tolist() == pytest.approx(
        [-2.2, -1.0, 0.0, 0.0, 1.1, 0.0, 2.0, 0.0]
    )


def test_without_dual_clip_a_bad_token_pulls_without_bound() -> None:
    inputs = make_inputs(doubles([[math.log(50.0)]]), doubles([[0.0]]), -ONE)
    assert GrpoLoss(dual_clip=None)(inputs).loss.item() == pytest.approx(50.0)
    assert GrpoLoss(dual_clip=10.0)(inputs).loss.item() == pytest.approx(10.0)
    assert DapoLoss()(inputs).loss.item() == pytest.approx(50.0)


def test_without_clip_the_ratio_counts_in_full() -> None:
    inputs = make_inputs(doubles([[2.0, 0.5]]).log(), torch.zeros(1, 2), ONE)
    loss = GrpoLoss(clip_low=None, clip_high=None, dual_clip=None)
    assert loss(inputs).loss.item() == pytest.approx(-1.25)
    assert not any(counts(loss(inputs)).values())


def test_the_means_by_hand() -> None:
    """Two rollouts of 1 and 3 tokens, on-policy, A = 1 and -2: token losses -1; 2, 2, 2."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    inputs = make_inputs(torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([1.0, -2.0]), mask)
    assert GrpoLoss()(inputs).loss.item() == pytest.approx((-1 + 6) / 4)
    assert GrpoLoss(aggregation="sequence_mean")(inputs).loss.item() == pytest.approx((-1 + 2) / 2)
    assert DrGrpoLoss(max_completion_tokens=10)(inputs).loss.item() == pytest.approx(5 / (2 * 10))


def test_published_vector_uncorrected() -> None:
    """ALGORITHMS.md 4.4 with the proximal policy as sampler."""
    inputs = make_inputs(LEARNER, PROXIMAL, ONE)
    assert GrpoLoss()(inputs).loss.item() == pytest.approx(-0.9832760840, abs=1e-10)


@pytest.mark.parametrize(
    ("options", "expected", "num_dropped"),
    [
        ({"importance_weight": "token_mis", "importance_cap": 5.0}, -1.1701426635, 1),
        ({"importance_weight": "token_tis", "importance_cap": 2.0}, -1.4170227613, 0),
        # The whole rollout's ratio is exp(2.8): 2 times the uncorrected loss, or nothing.
        ({"importance_weight": "sequence_tis", "importance_cap": 2.0}, 2 * -0.9832760840, 0),
        ({"importance_weight": "sequence_mis", "importance_cap": 2.0}, 0.0, 4),
    ],
)
def test_published_vector_decoupled(
    options: dict[str, object], expected: float, num_dropped: int
) -> None:
    inputs = make_inputs(LEARNER, SAMPLER, ONE, proximal_logprobs=PROXIMAL)
    output = DecoupledPpoLoss(**options)(inputs)  # type: ignore[arg-type]
    assert output.loss.item() == pytest.approx(expected, abs=2e-10)
    assert counts(output)["dropped/importance"] == num_dropped


def test_published_vector_interpolated() -> None:
    """v = 7 and v_b = [6, 5, 3, 7], so the staleness is [1, 2, 4, 0] and a = [0, .5, .75, 0]."""
    staleness = torch.tensor([[1, 2, 4, 0]])
    found = loglinear_logprobs(LEARNER, SAMPLER, staleness)
    assert found.flatten().tolist() == pytest.approx([-1.3, -0.55, -2.35, -0.9])
    # From the future, as a clock may claim after a restart: taken as current.
    assert torch.equal(loglinear_logprobs(LEARNER, SAMPLER, torch.full((1, 4), -1)), SAMPLER)


def test_the_weight_and_the_ratio_make_up_the_whole_ratio_once() -> None:
    wide = {"clip_low": None, "clip_high": None, "importance_cap": 1e6}
    inputs = make_inputs(LEARNER, SAMPLER, ONE, proximal_logprobs=PROXIMAL)
    expected = -(LEARNER - SAMPLER).exp() / 4
    for proximal in ("recompute", "loglinear"):
        loss = DecoupledPpoLoss(proximal=proximal, **wide)  # type: ignore[arg-type]
        assert torch.allclose(gradient(loss, inputs), expected)


def test_at_the_start_of_a_step_it_is_the_weighted_policy_gradient() -> None:
    inputs = make_inputs(LEARNER, SAMPLER, ONE, proximal_logprobs=LEARNER)
    weights = (LEARNER - SAMPLER).exp().clamp(max=2.0)
    assert torch.allclose(gradient(DecoupledPpoLoss(), inputs), -weights / 4)
    assert not any(counts(DecoupledPpoLoss()(inputs)).values())
