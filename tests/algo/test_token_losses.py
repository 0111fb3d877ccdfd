"""CISPO, DPPO, SAPO and M2PO against the design's vectors and numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo.algo.losses import CispoLoss, DppoTvLoss, M2poLoss, SapoLoss, second_moment_limit
from tests.algo.batches import counts, doubles, gradient, make_inputs

torch.set_num_threads(1)

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
