"""Means, pass@k and their intervals, against draws and known values."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.monitoring.scores import Estimate, PromptScores


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(rewards: list[bool], k: int) -> None:
    draws = [any(draw) for draw in itertools.combinations(rewards, k)]
    found = PromptScores((tuple(map(float, rewards)),), len(rewards)).pass_at(k)
    if draws:
        assert found.mean == pytest.approx(statistics.fmean(draws))
    else:
        assert math.isnan(found.mean)


def test_each_prompt_counts_once_whatever_the_number_of_its_scored_answers() -> None:
    scores = PromptScores(((1.0,), (0.0, 0.0, 0.0), ()), 3)
    assert scores.mean.mean == 0.5
    assert scores.pass_at(1).mean == 0.5
    assert scores.pass_at(2).mean == 0.0, "only the prompt with two answers counts"
    assert (scores.is_rate, scores.ks) == (True, [1, 2, 3])
    assert not PromptScores(((0.5,),), 1).is_rate


def test_a_rate_has_wilsons_interval_also_at_its_ends() -> None:
    """Known values of Wilson's interval for 1 of 10, and for 0 of 10."""
    none = Estimate.of([0.0] * 10)
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.2775, abs=1e-4)
    half = Estimate.of([0.0, 1.0] * 50)
    assert (half.low, half.high) == pytest.approx((0.4032, 0.5968), abs=2e-3)
    assert Estimate.of([1.0] * 10).high == 1.0
    assert str(Estimate.of([1.0] * 10)) == "1.000 [0.722, 1.000]"


def test_answers_to_one_prompt_are_not_independent_of_each_other() -> None:
    """A hundred equal answers to each of ten prompts tell no more than one."""
    one = PromptScores(tuple((float(n % 2),) for n in range(10)), 1).mean
    many = PromptScores(tuple((float(n % 2),) * 100 for n in range(10)), 100).mean
    assert (one.low, one.high) == pytest.approx((many.low, many.high))


def test_other_rewards_have_an_interval_of_standard_errors() -> None:
    found = Estimate.of([-1.0, 3.0])
    assert (found.mean, found.low, found.high) == pytest.approx((1.0, 1 - 3.92, 1 + 3.92), abs=1e-3)
    alone = Estimate.of([7.0])
    assert math.isnan(alone.low)
    assert str(alone) == "7.000"
    assert math.isnan(Estimate.of([]).mean)
