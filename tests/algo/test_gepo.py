"""GEPO against the design's vectors, its group expectation, its variants and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo.algo.losses import GepoLoss, GspoLoss, group_log_expectation
from tests.algo.batches import counts, doubles, gradient, make_inputs, random_inputs

torch.set_num_threads(1)

SAMPLER = doubles([[-0.10], [-0.25], [-0.40], [-0.80]])
LEARNER = doubles([[-0.12], [-0.20], [-0.60], [-0.50]])
VECTOR = make_inputs(LEARNER, SAMPLER, doubles([0.5, -0.5, -0.5, 0.5]))
WEIGHTS = [1.1973553620, 1.1052983071, 0.7409036121, 0.8188251252]
NO_CLIP = {"clip_low": None, "clip_high": None}


def weights_of(loss: GepoLoss) -> list[float]:
    """d loss / d log p_i = -w_i A_i / 4 where nothing is clipped."""
    inputs = replace(VECTOR, advantages=torch.ones(4, dtype=torch.float64))
    return (-4 * gradient(loss, inputs)).flatten().tolist()


def test_published_expectation_and_weights() -> None:
    """ALGORITHMS.md 1.9."""
    found = group_log_expectation(SAMPLER[:, 0], torch.zeros(4, dtype=torch.int64))
    assert found.tolist() == pytest.approx([-0.3001152597] * 4, abs=1e-10)
    assert weights_of(GepoLoss(**NO_CLIP)) == pytest.approx(WEIGHTS, abs=1e-10)


def test_published_losses() -> None:
    clipped = GepoLoss()(VECTOR)
    assert clipped.loss.item() == pytest.approx(-0.0138602725, abs=1e-10)
    assert counts(clipped)["clip_ratio/low"] == 1
    assert GepoLoss(**NO_CLIP)(VECTOR).loss.item() == pytest.approx(-0.0212473210, abs=1e-10)


def test_published_gates_of_gepo_plus() -> None:
    loss = GepoLoss(gate_kl=0.002, **NO_CLIP)
    own = [0.9801986733, 1.0512710964]
    assert weights_of(loss) == pytest.approx(own + WEIGHTS[2:], abs=1e-10)
    assert counts(loss(VECTOR))["gepo/gated"] == 2


def test_gepo_plus_on_policy_is_the_policy_gradient() -> None:
    inputs = random_inputs(spread=0.0)
    lengths = inputs.completion_mask.sum(1, keepdim=True)
    expected = -inputs.advantages[:, None] / (len(lengths) * lengths)
    expected = torch.where(inputs.completion_mask, expected, 0.0)
    assert torch.allclose(gradient(GepoLoss(gate_kl=0.002), inputs), expected, rtol=1e-13)


def test_with_every_rollout_gated_it_is_gspo() -> None:
    inputs = random_inputs()
    gated = GepoLoss(gate_kl=1e9)
    gspo = GspoLoss(clip_low=0.2, clip_high=0.2)
    assert torch.allclose(gradient(gated, inputs), gradient(gspo, inputs), rtol=1e-12)


def test_the_kl_term_by_hand_and_its_limit() -> None:
    """d = log q - log p: k3 = e^d - d - 1, with d at most 5."""
    far = make_inputs(doubles([[-9.0], [-0.5]]), doubles([[-0.5], [-0.5]]), doubles([0.0, 0.0]))
    assert GepoLoss(sampler_kl_coef=0.01)(far).loss.item() == pytest.approx(
        0.01 * (math.exp(5) - 6) / 2
    )
    near = make_inputs(doubles([[-0.7], [-0.5]]), doubles([[-0.5], [-0.5]]), doubles([0.0, 0.0]))
    assert GepoLoss(sampler_kl_coef=1.0)(near).loss.item() == pytest.approx(
        (math.exp(0.2) - 1.2) / 2
    )


def test_one_unlikely_member_does_not_blow_up() -> None:
    """GSPO's ratio of the first rollout is e^15; its group keeps GEPO's near 1."""
    learner, sampler = doubles([[-1.0], [-1.0]]), doubles([[-16.0], [-1.0]])
    inputs = make_inputs(learner, sampler, doubles([1.0, -1.0]))
    wide = GspoLoss(clip_low=None, clip_high=None)
    assert abs(gradient(wide, inputs)[0].item()) > 1e6
    assert gradient(GepoLoss(**NO_CLIP), inputs)[0].item() == pytest.approx(-0.5, rel=1e-5)


def test_groups_do_not_mix() -> None:
    inputs = random_inputs()
    loss = GepoLoss(**NO_CLIP)
    other = inputs.sampler_logprobs.clone()
    other[:4] -= 1.0
    assert inputs.group_index is not None
    means = other.where(inputs.completion_mask, 0.0).sum(1) / inputs.completion_mask.sum(1)
    changed = replace(
        inputs,
        sampler_logprobs=other,
        log_expectation=group_log_expectation(means, inputs.group_index),
    )
    assert torch.equal(gradient(loss, changed)[4:], gradient(loss, inputs)[4:])
    assert not torch.allclose(gradient(loss, changed)[:4], gradient(loss, inputs)[:4])


def test_what_it_asks_for() -> None:
    assert GepoLoss().needs.group_expectation
    assert not GepoLoss().needs.every_rollout
    assert GepoLoss(sampler_kl_coef=0.005).needs.every_rollout


@given(st.lists(st.floats(-30, 0), min_size=2, max_size=12))
def test_the_expectation_lies_within_its_group(values: list[float]) -> None:
    group = torch.zeros(len(values), dtype=torch.int64)
    (found,) = set(group_log_expectation(doubles(values), group).tolist())
    assert min(values) - 1e-9 <= found <= max(values) + 1e-9
    naive = sum(math.exp(2 * value) for value in values) / sum(math.exp(v) for v in values)
    assert found == pytest.approx(math.log(naive), abs=1e-9)


def test_the_expectation_carries_no_gradient() -> None:
    values = doubles([-1.0, -2.0]).requires_grad_()
    assert not group_log_expectation(values, torch.zeros(2, dtype=torch.int64)).requires_grad


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="group 1 has one member"):
        group_log_expectation(doubles([-1.0, -1.0, -2.0]), torch.tensor([0, 0, 1]))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_logprob_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"mean log-prob of rollout 1 is .* expected finite"):
        group_log_expectation(doubles([-1.0, value]), torch.tensor([0, 0]))
