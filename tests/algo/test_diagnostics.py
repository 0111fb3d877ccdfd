"""Sums over groups against numpy on the groups themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo.algo.diagnostics import (
    MIN_GROUPS,
    GroupStats,
    LengthBias,
    Mismatch,
    mismatch_by_group,
    mismatch_metrics,
    mismatch_sums,
    rollout_ess,
    rollout_ratio_sums,
)
from echo.core.reward_parts import PartedReward
from echo.core.rollout import Group, Rollout


def make_group(
    rewards: Sequence[float],
    *,
    num_tokens: int = 3,
    cut_off: int = 0,
    versions: Sequence[int] = (0,),
) -> Group:
    return Group(
        group_id=0,
        attempt=0,
        worker_id="w",
        prompt_ids=np.array([1], dtype=np.int32),
        rollouts=tuple(
            Rollout(
                token_ids=np.zeros(num_tokens, dtype=np.int32),
                sampler_logprobs=np.zeros(num_tokens, dtype=np.float32),
                policy_versions=np.array(
                    [[1, versions[index % len(versions)]]] * num_tokens, dtype=np.int32
                ),
                completion_mask=np.ones(num_tokens, dtype=np.bool_),
                reward=reward,
                finish_reason="length" if index < cut_off else "stop",
            )
            for index, reward in enumerate(rewards)
        ),
    )


def test_by_hand() -> None:
    groups = [
        make_group([1, 1], num_tokens=2),
        make_group([0, 0], cut_off=1),
        make_group([-1, -1]),
        make_group([1, 0], num_tokens=4, versions=(0, 1)),
    ]
    metrics = GroupStats.of(groups).metrics()
    rewards = [1, 1, 0, 0, -1, -1, 1, 0]
    assert metrics == {
        "reward/mean": pytest.approx(np.mean(rewards)),
        "reward/std": pytest.approx(np.std(rewards)),
        "completions/mean_length": 3.0,
        "completions/clipped_ratio": 0.125,
        "groups/all_right": 0.25,
        "groups/all_wrong": 0.5,
        "groups/useful": 0.25,
        "groups/mixed": 0.25,
    }


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    groups = [make_group([n % 3, 1.0, 0.1], num_tokens=n + 1) for n in range(7)]
    parts = GroupStats.of(groups[:3]) + GroupStats.of(groups[3:])
    assert parts.metrics() == pytest.approx(GroupStats.of(groups).metrics())


def test_parts_of_rewards_are_means_over_the_rewards_that_have_them() -> None:
    """In whatever groups they come; negative parts count, too."""
    rewards = [{"right": 1.0, "length": -0.5}, {"right": 0.0, "length": 0.0}, {"right": 1.0}]
    groups = [make_group([PartedReward(parts)] * 2) for parts in rewards]
    stats = sum((GroupStats.of([group]) for group in groups), GroupStats())
    metrics = stats.metrics()
    assert metrics["reward/right/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/length/mean"] == -0.25
    assert metrics["reward/mean"] == pytest.approx(0.5)


def test_nothing_has_no_metrics() -> None:
    assert GroupStats().metrics() == {}


def test_equal_rewards_have_no_spread_however_they_round() -> None:
    assert GroupStats.of([make_group([0.1] * 3)] * 3).metrics()["reward/std"] < 1e-7


# --- bias in lengths ------------------------------------------------------------------------------


def group(group_id: int, *lengths: int) -> Group:
    return Group(
        group_id=group_id, attempt=0, worker_id="w", prompt_ids=np.array([1], np.int32),
        rollouts=tuple(
            Rollout(
                token_ids=np.zeros(n, np.int32), sampler_logprobs=np.zeros(n, np.float32),
                policy_versions=np.ones((n, 2), np.int32), completion_mask=np.ones(n, np.bool_),
                reward=0.0, finish_reason="stop",
            )
            for n in lengths
        ),
    )  # fmt: skip


def test_long_completions_that_are_put_off_show_as_a_bias() -> None:
    bias = LengthBias()
    groups = [group(i, 10, 100 if i % 2 else 10) for i in range(40)]
    for each in groups:
        bias.delivered(each)
    bias.trained(groups[::2])  # the short ones
    found = bias.metrics(oldest_open=None)
    assert found["lengths/trained/mean"] == 10
    assert found["lengths/sampled/mean"] == 32.5
    assert found["lengths/sampled/p90"] == 100
    assert found["lengths/bias"] == pytest.approx(10 / 32.5 - 1)
    assert found["lengths/ks"] == pytest.approx(0.25)
    bias.trained(groups[1::2])
    assert bias.metrics(oldest_open=None)["lengths/bias"] == 0


def test_the_cohort_ends_where_a_group_is_still_open() -> None:
    bias = LengthBias(window=10)
    for i in range(30):
        bias.delivered(group(i, i + 1))
    bias.trained(group(i, 5) for i in range(10))
    assert bias.metrics(oldest_open=20)["lengths/sampled/mean"] == pytest.approx(15.5)
    assert bias.metrics(oldest_open=None)["lengths/sampled/mean"] == pytest.approx(25.5)


def test_nothing_is_said_of_too_little() -> None:
    bias = LengthBias()
    for i in range(MIN_GROUPS):
        bias.delivered(group(i, 5))
    assert bias.metrics(oldest_open=None) == {}
    bias.trained(group(i, 5) for i in range(MIN_GROUPS))
    assert bias.metrics(oldest_open=MIN_GROUPS - 1) == {}
    assert bias.metrics(oldest_open=None)["lengths/bias"] == 0


# --- mismatch -------------------------------------------------------------------------------------


def mismatch(learner: torch.Tensor, sampler: torch.Tensor) -> dict[str, float]:
    sums = {name: float(value) for name, value in mismatch_sums(learner, sampler).items()}
    return mismatch_metrics(sums, len(learner))


def test_numbers_worked_out_by_hand() -> None:
    # Ratios 2 and 1/2: mean 5/4, ess = (5/2)^2 / (2 * 17/4), k3 = mean(1 - ln 2, -1/2 + ln 2).
    metrics = mismatch(torch.tensor([0.0, -math.log(2)]), torch.tensor([-math.log(2), 0.0]))
    assert metrics == pytest.approx(
        {"is_ratio/mean": 1.25, "is_ratio/max": 2.0, "ess": 25 / 34, "mismatch_kl": 0.25}
    )


def test_ess_of_rollouts_by_hand() -> None:
    # The rollouts' ratios are 2 * 3 and 1/2; the third has no trained token.
    log_ratios = torch.tensor([[2.0, 3.0], [0.5, 7.0], [5.0, 5.0]]).log()
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    sums = {name: float(value) for name, value in rollout_ratio_sums(log_ratios, mask).items()}
    assert rollout_ess(sums) == pytest.approx(6.5**2 / (2 * (36 + 0.25)), rel=1e-6)
    assert math.isnan(rollout_ess(dict.fromkeys(sums, 0.0)))


def test_the_same_policy() -> None:
    logprobs = torch.tensor([-0.1, -3.0, -20.0])
    assert mismatch(logprobs.requires_grad_(), logprobs.detach()) == {
        "is_ratio/mean": 1.0,
        "is_ratio/max": 1.0,
        "ess": 1.0,
        "mismatch_kl": 0.0,
    }


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20))
def test_bounds(pairs: list[tuple[float, float]]) -> None:
    learner, sampler = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    metrics = mismatch(learner, sampler)
    assert metrics["mismatch_kl"] >= 0.0
    assert 1.0 / len(pairs) <= metrics["ess"] * (1 + 1e-12)
    assert metrics["ess"] <= 1.0 + 1e-12
    assert metrics["is_ratio/mean"] <= metrics["is_ratio/max"] * (1 + 1e-12)


# --- mismatch by group ----------------------------------------------------------------------------


def worker_metrics(*, temperature: float = 1.0, lie: float = 0.0) -> dict[str, float]:
    """Return the metrics of a worker that samples at a temperature and reports log-probs of 1."""
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(4000, 16, generator=generator, dtype=torch.float64).mul(2).log_softmax(1)
    sampled = torch.multinomial((logprobs / temperature).exp(), 1, generator=generator)
    learner = logprobs.gather(1, sampled)[:, 0]
    entropies = -(logprobs.exp() * logprobs).sum(1)
    group_of = torch.arange(4000) % 3
    sums = mismatch_by_group(learner, learner - lie, entropies, group_of=group_of, num_groups=3)
    return sum((Mismatch(*row) for row in sums.tolist()), Mismatch()).metrics()


def test_what_a_worker_states_shows_in_the_mismatch_and_what_it_samples_in_the_surprise() -> None:
    honest = worker_metrics()
    assert honest == pytest.approx(
        {"logprob_difference": 0.0, "mismatch_kl": 0.0, "ess": 1.0, "surprise": 0.0}, abs=0.06
    )
    hot = worker_metrics(temperature=2.0)
    assert hot["mismatch_kl"] == 0.0
    assert hot["surprise"] > 0.5
    assert worker_metrics(temperature=0.5)["surprise"] < -0.3
    lying = worker_metrics(lie=3.0)
    assert lying["logprob_difference"] == pytest.approx(3.0)
    assert lying["mismatch_kl"] == pytest.approx(math.exp(3) - 4)
    assert lying["surprise"] == pytest.approx(honest["surprise"])


def test_a_group_has_the_sums_of_its_own_tokens_and_stays_finite() -> None:
    learner, sampler = (
        torch.tensor([-1.0, -2.0, -1.0, -1e4]),
        torch.tensor([-1.0, -1.0, -1.0, -0.1]),
    )
    sums = mismatch_by_group(
        learner, sampler, torch.zeros(4), group_of=torch.tensor([2, 0, 2, 1]), num_groups=4
    )
    rows = [Mismatch(*row) for row in sums.tolist()]
    assert [row.num_tokens for row in rows] == [1, 1, 2, 0]
    assert rows[0].mean_kl == pytest.approx(math.exp(-1))
    assert rows[2].metrics()["mismatch_kl"] == 0.0
    assert rows[3].metrics() == {}
    assert all(math.isfinite(value) for row in rows for value in row.metrics().values())
