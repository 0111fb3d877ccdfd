"""Group-relative advantages against numbers worked out by hand, and their invariances."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.algo.advantages import group_advantages, overlong_penalties


def test_numbers_worked_out_by_hand() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
    centred = group_advantages(rewards, normalize_by_std=False)
    assert centred.tolist() == [[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]]
    # Unbiased standard deviations: sqrt(1 / 3) and sqrt(3 / 3).
    scaled = group_advantages(rewards, normalize_by_std=True)
    assert scaled[0].tolist() == pytest.approx(
        [sign * 0.5 / (math.sqrt(1 / 3) + 1e-4) for sign in (1, -1, -1, 1)]
    )
    assert scaled[1].tolist() == pytest.approx([1.5 / 1.0001] + [-0.5 / 1.0001] * 3)


@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 17), normalize=st.booleans())
def test_equal_rewards_have_exactly_no_advantage(reward: float, size: int, normalize: bool) -> None:
    # The mean of 0.1, ten times, is not 0.1: without the special case a gradient would remain.
    rewards = np.full((1, size), reward)
    assert not group_advantages(rewards, normalize_by_std=normalize).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, -2.3])
def test_the_mean_of_equal_rewards_may_be_rounded_and_their_advantage_is_0(
    reward: float, dtype: npt.DTypeLike
) -> None:
    for size in range(2, 33):
        rewards = np.full((1, size), reward, dtype)
        for normalize in (False, True):
            assert not group_advantages(rewards, normalize_by_std=normalize).any()
            found = group_advantages(rewards, normalize_by_std=normalize, leave_one_out=True)
            assert not found.any()


@given(
    rewards=st.lists(st.floats(-100, 100), min_size=2, max_size=9),
    shift=st.floats(-100, 100),
    normalize=st.booleans(),
)
def test_sum_is_zero_and_a_common_shift_changes_nothing(
    rewards: list[float], shift: float, normalize: bool
) -> None:
    values = np.array([rewards])
    advantages = group_advantages(values, normalize_by_std=normalize)
    shifted = group_advantages(values + shift, normalize_by_std=normalize)
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-8)
    assert np.allclose(shifted, advantages, atol=1e-7)


def test_each_group_stands_alone_and_order_follows_the_rewards() -> None:
    rewards = np.array([[1.0, 0.0, 2.0], [5.0, 5.0, 8.0]])
    both = group_advantages(rewards, normalize_by_std=True)
    flipped = group_advantages(np.flip(rewards), normalize_by_std=True)
    assert np.array_equal(np.flip(flipped), both)
    assert np.array_equal(group_advantages(rewards[:1], normalize_by_std=True), both[:1])


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 0), (2, 2, 2)])
def test_groups_of_one_or_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="group_size >= 2"):
        group_advantages(np.zeros(shape), normalize_by_std=False)


def test_integer_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards are int64"):
        group_advantages(np.array([[1, 0]]), normalize_by_std=False)


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match=r"rewards of row 1 .*\[1\.0, nan\]"):
        group_advantages(np.array([[0.0, 1.0], [1.0, math.nan]]), normalize_by_std=True)


def test_leave_one_out_by_hand() -> None:
    """The others' means are 0, .5 and .5."""
    rewards = np.array([[1.0, 0.0, 0.0]])
    found = group_advantages(rewards, normalize_by_std=False, leave_one_out=True)
    assert found.tolist()[0] == pytest.approx([1.0, -0.5, -0.5])
    plain = group_advantages(rewards, normalize_by_std=True)
    scaled = group_advantages(rewards, normalize_by_std=True, leave_one_out=True)
    assert np.allclose(scaled, 1.5 * plain)


def test_leave_one_out_of_equal_rewards_is_exactly_zero() -> None:
    rewards = np.full((1, 7), 0.1)
    assert not group_advantages(rewards, normalize_by_std=False, leave_one_out=True).any()


def test_overlong_penalties_by_hand() -> None:
    """A limit of 100 with a buffer of 20: nothing up to 80, half at 90, all of it at 100."""
    lengths = np.array([1, 80, 85, 90, 100])
    found = overlong_penalties(lengths, max_tokens=100, buffer_tokens=20)
    assert found.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0]


@pytest.mark.parametrize("buffer_tokens", [0, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer_tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"buffer_tokens = {buffer_tokens}: must lie in 1\.\.max"):
        overlong_penalties(np.array([1]), max_tokens=100, buffer_tokens=buffer_tokens)


def test_the_value_is_the_log_mean_exp_and_lies_between_mean_and_maximum() -> None:
    rewards = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
    found = group_advantages(rewards, normalize_by_std=False, value_beta=0.5)
    value = 0.5 * math.log((math.exp(2) + 2) / 3)
    assert found[0].tolist() == pytest.approx([1 - value, -value, -value])
    assert found[1].tolist() == [0.0, 0.0, 0.0]
    for beta, baseline in ((1e-6, 1.0), (1e6, 1 / 3)):
        found = group_advantages(1e5 + rewards[:1], normalize_by_std=False, value_beta=beta)
        assert found.tolist()[0] == pytest.approx([1 - baseline, -baseline, -baseline], abs=1e-4)
