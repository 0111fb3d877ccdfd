"""CISPO, DPPO, SAPO and M2PO against the design's vectors and numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo.algo.losses import (
    CispoLoss,
    DapoLoss,
    DecoupledPpoLoss,
    DppoTvLoss,
    DrGrpoLoss,
    GepoLoss,
    GrpoLoss,
    GspoLoss,
    M2poLoss,
    SapoLoss,
    group_log_expectation,
    loglinear_logprobs,
    second_moment_limit,
)
from tests.algo.batches import counts, doubles, gradient, make_inputs, random_inputs

LEARNER = doubles([[-1.0, -0.5, -2.0, -0.1]])
SAMPLER = doubles([[-1.3, -0.6, -3.4, -0.9]])
VECTOR = make_inputs(LEARNER, SAMPLER, doubles([1.0]))


def test_published_vector_of_cispo() -> None:
    """ALGORITHMS.md 4.4: weights in [0, 5], all ratios below 5."""
    assert CispoLoss()(VECTOR).loss.item() == pytest.approx(2.5588495733, abs=1e-10)


def test_cispo_keeps_every_tokens_gradient() -> None:
    loss = CispoLoss(clip_low=0.2, clip_high=1.0)
    ratios = [0.5, 1.5, 4.0]
    inputs = make_inputs(doubles([ratios]).log(), torch.zeros(1, 3), doubles([-2.0]))
    assert (3 * gradient(loss, inputs)).flatten().tolist() == pytest.approx([1.6, 3.0, 4.0])
    assert counts(loss(inputs)) == {
        "clip_ratio/low": 1,
        "clip_ratio/high": 1,
        "clip_ratio/mean": 2,
    }
    unbounded = CispoLoss(clip_low=None, clip_high=None)
    assert (3 * gradient(unbounded, inputs)).flatten().tolist() == pytest.approx([1.0, 3.0, 8.0])


def test_published_vector_of_dppo() -> None:
    """ALGORITHMS.md 4.4: the last token's probability rose from .407 to .905 and is dropped."""
    output = DppoTvLoss(sampler_kl_coef=1e-3)(VECTOR)
    assert output.loss.item() == pytest.approx(-1.6268824231, abs=1e-10)
    assert counts(output) == {"dropped/tv": 1}


@pytest.mark.parametrize(
    ("learner", "sampler", "advantage", "is_dropped"),
    [
        (0.5, 0.29, 1.0, True),
        (0.5, 0.29, -1.0, False),  # further away, but the advantage pulls it back
        (0.29, 0.5, -1.0, True),
        (0.29, 0.5, 1.0, False),
        (0.5, 0.31, 1.0, False),
        (0.02, 0.0001, 1.0, False),  # a ratio of 200 that changes the distribution by .02
    ],
)
def test_dppo_looks_at_probabilities(
    learner: float, sampler: float, advantage: float, is_dropped: bool
) -> None:
    inputs = make_inputs(
        doubles([[math.log(learner)]]), doubles([[math.log(sampler)]]), doubles([advantage])
    )
    assert counts(DppoTvLoss()(inputs)) == {"dropped/tv": int(is_dropped)}
    expected = 0.0 if is_dropped else -advantage * learner / sampler
    assert gradient(DppoTvLoss(), inputs).item() == pytest.approx(expected)


def test_sapo_by_hand() -> None:
    """f(2) = 4 sigmoid(1), f'(2) = 4 sigmoid(1) sigmoid(-1); times r for the log-prob."""
    inputs = make_inputs(doubles([[math.log(2.0)]]), doubles([[0.0]]), doubles([1.0]))
    sigmoid = 1 / (1 + math.exp(-1))
    assert SapoLoss()(inputs).loss.item() == pytest.approx(-4 * sigmoid)
    assert gradient(SapoLoss(), inputs).item() == pytest.approx(-8 * sigmoid * (1 - sigmoid))


def test_sapo_closes_faster_for_bad_tokens() -> None:
    good = make_inputs(doubles([[1.0]]), doubles([[0.0]]), doubles([1.0]))
    bad = make_inputs(doubles([[1.0]]), doubles([[0.0]]), doubles([-1.0]))
    assert abs(gradient(SapoLoss(), bad).item()) < abs(gradient(SapoLoss(), good).item())
    by_token = SapoLoss(aggregation="token_mean")
    assert torch.allclose(gradient(by_token, good), gradient(SapoLoss(), good))


def test_published_vector_of_m2po() -> None:
    """ALGORITHMS.md 4.4: of [.04, .01, 3.61, .64] the two largest go."""
    limit = second_moment_limit(doubles([0.04, 0.01, 3.61, 0.64]), 0.04).item()
    assert limit == pytest.approx((0.04 + 0.64) / 2)


@pytest.mark.parametrize(
    ("moments", "bound", "expected"),
    [
        ([], 0.04, math.inf),
        ([0.01, 0.02], 0.04, math.inf),
        ([0.5, 0.5], 0.04, 0.0),
        ([0.0, 1.0, 1.0], 0.4, 0.5),  # [0, 1, 1] has mean .67; equal values go together
        ([0.0, 1.0], 0.5, math.inf),  # the bound is inclusive
        ([0.0, 0.0], 0.0, math.inf),
    ],
)
def test_limits_by_hand(moments: list[float], bound: float, expected: float) -> None:
    assert second_moment_limit(doubles(moments), bound).item() == expected


@given(
    moments=st.lists(st.floats(0, 10), min_size=1, max_size=30, unique=True),
    bound=st.floats(0, 5),
)
def test_what_stays_is_within_the_bound_and_no_more_could(
    moments: list[float], bound: float
) -> None:
    limit = second_moment_limit(doubles(moments), bound).item()
    kept = sorted(value for value in moments if value < limit)
    dropped = sorted(value for value in moments if value >= limit)
    assert not kept or sum(kept) / len(kept) <= bound * (1 + 1e-9) + 1e-12
    if dropped and dropped[0] - max(kept, default=0.0) > 1e-9:
        assert (sum(kept) + dropped[0]) / (len(kept) + 1) > bound * (1 - 1e-9)


def test_m2po_by_hand() -> None:
    """log r = .1, 1, -2 with A = 1: only the rising tokens count, their mean is .505; 1 goes."""
    inputs = make_inputs(doubles([[0.1, 1.0, -2.0]]), torch.zeros(1, 3), doubles([1.0]))
    output = M2poLoss()(inputs)
    assert output.loss.item() == pytest.approx(-(math.exp(0.1) + math.exp(-2.0)) / 3)
    assert counts(output) == {"dropped/m2": 1}
    # The falling token is far off-policy, and A > 0 pulls it back: PPO would not clip it either.
    assert gradient(M2poLoss(), inputs)[0, 2] != 0


# --- gSPO -----------------------------------------------------------------------------------------


def test_published_vector() -> None:
    """ALGORITHMS.md 1.9: s = [.980, 1.051, .819, 1.350], A = r - mean of [1, 0, 0, 1]."""
    learner = doubles([[-0.12], [-0.20], [-0.60], [-0.50]])
    sampler = doubles([[-0.10], [-0.25], [-0.40], [-0.80]])
    inputs = make_inputs(learner, sampler, doubles([0.5, -0.5, -0.5, 0.5]))
    output = GspoLoss(clip_low=0.2, clip_high=0.2)(inputs)
    assert output.loss.item() == pytest.approx(-0.0387746030, abs=1e-10)
    assert counts(output)["clip_ratio/high"] == 1


def test_the_ratio_is_the_rollouts_geometric_mean() -> None:
    """Ratios 4 and 1/2 and 1: s = 2^(1/3); each token has a third of its gradient."""
    inputs = make_inputs(doubles([[4.0, 0.5, 1.0]]).log(), torch.zeros(1, 3), doubles([1.0]))
    loss = GspoLoss(clip_low=0.5, clip_high=0.5)
    ratio = 2 ** (1 / 3)
    assert loss(inputs).loss.item() == pytest.approx(-ratio)
    assert gradient(loss, inputs).flatten().tolist() == pytest.approx([-ratio / 3] * 3)


def test_clips_count_the_tokens_of_their_rollouts() -> None:
    shift = math.log(1.1)
    learner = doubles([[shift, shift, 0.0], [-shift, 0.0, 0.0], [shift, shift, shift]])
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    inputs = make_inputs(learner, torch.zeros(3, 3), doubles([1.0, -1.0, -1.0]), mask)
    assert counts(GspoLoss()(inputs)) == {
        "clip_ratio/low": 1,
        "clip_ratio/high": 2,
        "clip_ratio/dual": 0,
        "clip_ratio/mean": 3,
    }
    assert not gradient(GspoLoss(), inputs)[:2].any()
    assert gradient(GspoLoss(), inputs)[2].any()


# --- gEPO -----------------------------------------------------------------------------------------

SAMPLER_GEPO = doubles([[-0.10], [-0.25], [-0.40], [-0.80]])
LEARNER_GEPO = doubles([[-0.12], [-0.20], [-0.60], [-0.50]])
VECTOR_GEPO = make_inputs(LEARNER_GEPO, SAMPLER_GEPO, doubles([0.5, -0.5, -0.5, 0.5]))
WEIGHTS = [1.1973553620, 1.1052983071, 0.7409036121, 0.8188251252]
NO_CLIP: dict[str, Any] = {"clip_low": None, "clip_high": None}


def weights_of(loss: GepoLoss) -> list[float]:
    """d loss / d log p_i = -w_i A_i / 4 where nothing is clipped."""
    inputs = replace(VECTOR_GEPO, advantages=torch.ones(4, dtype=torch.float64))
    return (-4 * gradient(loss, inputs)).flatten().tolist()


def test_published_expectation_and_weights() -> None:
    """ALGORITHMS.md 1.9."""
    found = group_log_expectation(SAMPLER_GEPO[:, 0], torch.zeros(4, dtype=torch.int64))
    assert found.tolist() == pytest.approx([-0.3001152597] * 4, abs=1e-10)
    assert weights_of(GepoLoss(**NO_CLIP)) == pytest.approx(WEIGHTS, abs=1e-10)


def test_published_losses() -> None:
    clipped = GepoLoss()(VECTOR_GEPO)
    assert clipped.loss.item() == pytest.approx(-0.0138602725, abs=1e-10)
    assert counts(clipped)["clip_ratio/low"] == 1
    assert GepoLoss(**NO_CLIP)(VECTOR_GEPO).loss.item() == pytest.approx(-0.0212473210, abs=1e-10)


def test_published_gates_of_gepo_plus() -> None:
    loss = GepoLoss(gate_kl=0.002, **NO_CLIP)
    own = [0.9801986733, 1.0512710964]
    assert weights_of(loss) == pytest.approx(own + WEIGHTS[2:], abs=1e-10)
    assert counts(loss(VECTOR_GEPO))["gepo/gated"] == 2


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


# --- gRPO and PPO ---------------------------------------------------------------------------------

# The vector of the design: one rollout, A = 1; r = prox / behav = [1.221, .905, 6.686, 2.226],
# u = learner / prox = [1.105, 1.221, .607, 1].
PROXIMAL = doubles([[-1.1, -0.7, -1.5, -0.1]])
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
