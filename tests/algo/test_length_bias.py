"""Whether a bias towards short completions shows, and goes away when nothing is put off."""

from __future__ import annotations

import numpy as np
import pytest

from echo.algo.diagnostics import MIN_GROUPS, LengthBias
from echo.core.rollout import Group, Rollout


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
