"""Packing under a token budget, and the layout of a padded micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo.algo.batching import TrainingRow, collate, pack_micro_batches
from echo.core.rollout import Rollout


def make_sample(
    prompt: list[int], completion: list[int], mask: list[bool] | None = None, advantage: float = 1.0
) -> TrainingRow:
    num_tokens = len(completion)
    rollout = Rollout(
        token_ids=np.array(completion, dtype=np.int32),
        sampler_logprobs=-np.arange(1, num_tokens + 1, dtype=np.float32),
        policy_versions=np.ones((num_tokens, 2), dtype=np.int32),
        completion_mask=np.array(mask or [True] * num_tokens),
        reward=0.0,
        finish_reason="stop",
    )
    return TrainingRow(
        prompt_ids=np.array(prompt, dtype=np.int32), rollout=rollout, advantage=advantage
    )


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        ([], 8, []),
        ([4, 4, 4], 8, [[0, 1], [2]]),
        ([1, 4, 2, 4], 8, [[1, 3], [2, 0]]),  # longest first; 2 + 1 pads to 4
        ([3, 3, 1, 1], 8, [[0, 1], [2, 3]]),  # a third row would make 9 padded tokens
        ([9, 2], 8, [[0], [1]]),  # too long for the budget: alone
        ([5, 5], 10, [[0, 1]]),  # the bound is inclusive
    ],
)
def test_packing(lengths: list[int], max_tokens: int, expected: list[list[int]]) -> None:
    assert pack_micro_batches(lengths, max_tokens=max_tokens) == expected


@given(lengths=st.lists(st.integers(1, 50), max_size=40), max_tokens=st.integers(1, 200))
def test_every_row_once_and_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    batches = pack_micro_batches(lengths, max_tokens=max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= max_tokens or len(batch) == 1


@pytest.mark.parametrize(
    ("lengths", "groups", "max_tokens", "expected"),
    [
        ([4, 1, 3, 3], [0, 0, 1, 1], 16, [[0, 1, 2, 3]]),
        ([4, 1, 3, 3], [0, 0, 1, 1], 15, [[0, 1], [2, 3]]),
        ([3, 4, 3, 1], [0, 1, 0, 1], 8, [[1, 3], [0, 2]]),
        ([4, 4, 4, 1], [0, 0, 0, 1], 4, [[0, 1, 2], [3]]),  # too large for the budget: alone
    ],
)
def test_groups_stay_whole(
    lengths: list[int], groups: list[int], max_tokens: int, expected: list[list[int]]
) -> None:
    packed = pack_micro_batches(lengths, max_tokens=max_tokens, group_index=groups)
    assert packed == expected


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens = 0"):
        pack_micro_batches([1], max_tokens=0)


def test_layout_of_a_micro_batch() -> None:
    batch = collate(
        [
            make_sample([11, 12], [21, 22, 23], [True, False, True], advantage=0.5),
            make_sample([13, 14, 15, 16], [24], advantage=-0.5),
        ]
    )
    # The last completion token predicts nothing that is scored and is not an input.
    assert batch.input_ids.tolist() == [[11, 12, 21, 22], [13, 14, 15, 16]]
    assert batch.token_ids.tolist() == [[21, 22, 23], [24, 0, 0]]
    assert batch.completion_mask.tolist() == [[True, False, True], [True, False, False]]
    assert batch.sampler_logprobs.tolist() == [[-1.0, -2.0, -3.0], [-1.0, 0.0, 0.0]]
    assert batch.advantages.tolist() == [0.5, -0.5]
    assert batch.version_steps.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.group_index.tolist() == [0, 0]
    assert batch.log_expectations.tolist() == [0.0, 0.0]
    # Token 21 is predicted at input 12, 22 at 21, 23 at 22; token 24 at input 16 of the second row.
    assert batch.predictors.tolist() == [[1, 2, 3], [7, 0, 0]]


def test_scoring_everything_keeps_padding_out() -> None:
    samples = [make_sample([1], [2, 3], [False, False]), make_sample([1], [2], [False])]
    assert not collate(samples).completion_mask.any()
    everything = collate(samples, score_all=True).completion_mask
    assert everything.tolist() == [[True, True], [True, False]]


def test_counts_of_a_sample() -> None:
    sample = make_sample([1, 2, 3], [4, 5], [True, False])
    assert (sample.num_inputs, sample.num_trained) == (4, 1)


def test_moving_keeps_every_field() -> None:
    batch = collate([make_sample([1], [2, 3])])
    moved = batch.to(torch.device("meta"))
    assert moved.input_ids.device.type == "meta"
    assert moved.predictors.shape == batch.predictors.shape
