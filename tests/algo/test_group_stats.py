"""Sums over groups against numpy on the groups themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from echo.algo.diagnostics import GroupStats
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


def test_nothing_has_no_metrics() -> None:
    assert GroupStats().metrics() == {}


def test_equal_rewards_have_no_spread_however_they_round() -> None:
    assert GroupStats.of([make_group([0.1] * 3)] * 3).metrics()["reward/std"] < 1e-7
