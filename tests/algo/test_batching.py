"""Packing under a token budget, and the layout of a padded micro-batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo.algo.batching import (
    MicroBatch,
    TrainingRow,
    collate,
    pack_micro_batches,
    share_prompts,
)
from echo.algo.row_sizes import RowSizes
from echo.core.chains import Branches, predecessors
from echo.core.rollout import Rollout
from tests.core.test_chains import trees


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


def test_rollouts_of_a_prompt_share_it_in_a_packed_row() -> None:
    first, second = make_sample([11, 12, 13], [21, 22, 23]), make_sample([14], [25, 26])
    rows = [
        first,
        dataclasses.replace(make_sample([], [24]), prompt_ids=first.prompt_ids),
        dataclasses.replace(make_sample([], [27, 28]), prompt_ids=first.prompt_ids),
        second,
    ]
    lengths, units = share_prompts(rows, max_tokens=100)
    assert (lengths, units) == ([5, 0, 1, 2], [0, 0, 0, 3])
    batch = collate(rows, is_packed=True, units=units)
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 27, 14, 25]]
    segments = batch.segments
    assert segments is not None
    assert segments.lengths == (3, 2, 1, 2)  # a single token has no input of its own
    assert segments.prefixes == ((), ((0, 3),), ((0, 3),), ())
    assert segments.ends.tolist() == [0, 3, 5, 6, 8]
    assert segments.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert segments.keys is not None
    assert segments.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert segments.key_ends.tolist() == [0, 3, 8, 12, 14]
    # Tokens 21, 24 and 27 are predicted at input 13.
    assert batch.predictors.tolist() == [[2, 3, 4], [2, 0, 0], [2, 5, 0], [6, 7, 0]]
    assert batch.spans(rows) == [(3, 0), (2, 3), (1, 3), (2, 0)]
    alone = collate(rows, is_packed=True)
    assert alone.segments is not None
    assert (alone.segments.lengths, alone.segments.keys) == ((5, 3, 4, 2), None)
    whole = share_prompts(rows, max_tokens=1, whole=[0, 0, 1, 1])
    assert whole == ([5, 0, 4, 2], [0, 0, 2, 3])  # another group's row has the prompt itself


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=20),
    st.integers(1, 800),
)
def test_those_share_that_save_a_fifth_and_leave_room_for_others(
    num_prompt: int, drawn: list[tuple[int, int]], max_tokens: int
) -> None:
    prompts = [np.arange(1, 1 + num_prompt, dtype=np.int32) for _ in range(4)]
    rows = [
        dataclasses.replace(make_sample([], [3] * size), prompt_ids=prompts[prompt])
        for prompt, size in drawn
    ]
    lengths, units = share_prompts(rows, max_tokens=max_tokens)
    for unit in set(units):
        members = [index for index, each in enumerate(units) if each == unit]
        assert len({drawn[index][0] for index in members}) == 1
        together = sum(lengths[index] for index in members)
        assert together == num_prompt + sum(drawn[index][1] - 1 for index in members)
        if len(members) > 1:
            assert together <= max(max_tokens // 2, num_prompt)
            assert together <= 0.8 * sum(rows[index].num_inputs for index in members)
    # Where nothing bounds them, each prompt is shared by all or by none.
    shared, kept = share_prompts(rows, max_tokens=1, whole=[prompt for prompt, _ in drawn])
    for prompt in {prompt for prompt, _ in drawn}:
        members = [index for index, (own, _) in enumerate(drawn) if own == prompt]
        apart = sum(rows[index].num_inputs for index in members)
        together = apart - (len(members) - 1) * num_prompt
        is_shared = together <= 0.8 * apart
        assert sum(shared[index] for index in members) == (together if is_shared else apart)
        assert len({kept[index] for index in members}) == (1 if is_shared else len(members))


def test_a_filled_row_is_the_same_but_for_its_end() -> None:
    prompt = np.arange(100, dtype=np.int32)
    rows = [
        dataclasses.replace(make_sample([], [3] * size), prompt_ids=prompt) for size in (20, 5, 9)
    ]
    plain = collate(rows, is_packed=True, units=[0, 0, 0])
    sizes = RowSizes(fills="rows")
    filled = collate(rows, is_packed=True, units=[0, 0, 0], row_sizes=sizes, max_tokens=1000)
    assert (plain.num_filled, filled.num_filled) == (0, 5)
    assert filled.input_ids.shape == (1, 136)
    assert plain.segments is not None
    assert filled.segments is not None
    assert filled.segments.lengths == (*plain.segments.lengths, *[1] * 5)
    assert filled.segments.prefixes == (*plain.segments.prefixes, *[()] * 5)
    assert int(filled.segments.position_ids[0, -5:].max()) == 0
    assert filled.spans(rows) == plain.spans(rows)
    for name in ("token_ids", "predictors", "scored", "completion_mask", "advantages"):
        assert torch.equal(getattr(filled, name), getattr(plain, name)), name


def test_counts_of_a_sample() -> None:
    sample = make_sample([1, 2, 3], [4, 5], [True, False])
    assert (sample.num_inputs, sample.num_trained) == (4, 1)


def test_moving_keeps_every_field() -> None:
    batch = collate([make_sample([1], [2, 3])])
    moved = batch.to(torch.device("meta"))
    assert moved.input_ids.device.type == "meta"
    assert moved.predictors.shape == batch.predictors.shape


def contexts_in(batch: MicroBatch, row: TrainingRow, index: int) -> list[list[int]]:
    """The ids that the input of each completion token attends to, in the order of positions."""
    ids, found = batch.input_ids.flatten().tolist(), []
    for place in batch.predictors[index, : row.rollout.num_tokens].tolist():
        if batch.segments is None:
            first = place - place % batch.input_ids.shape[1]
            found.append(ids[first : place + 1])
            continue
        segment = int(np.searchsorted(batch.segments.ends.numpy(), place, side="right")) - 1
        first = int(batch.segments.ends[segment])
        runs = batch.segments.prefixes[segment]
        seen = [place for start, size in runs for place in range(start, start + size)]
        assert int(batch.segments.position_ids[0, place]) == len(seen) + place - first
        found.append([ids[each] for each in [*seen, *range(first, place + 1)]])
    return found


@pytest.mark.parametrize("how", ["together", "apart", "padded"])
@given(drawn=st.lists(trees(), min_size=1, max_size=4), has_one_prompt=st.booleans())
def test_each_token_of_a_chain_is_predicted_from_the_tokens_before_it(
    drawn: list[tuple[Branches, int, int]], has_one_prompt: bool, how: str
) -> None:
    rows = []
    prompts = [np.arange(100, 100 + size, dtype=np.int32) for *_, size in drawn]
    for number, (branches, num_tokens, _) in enumerate(drawn):
        prompt = prompts[0 if has_one_prompt else number]
        branches = np.maximum(branches, -1 - len(prompt))
        row = make_sample([], list(range(num_tokens)))
        rollout = dataclasses.replace(row.rollout, branches=branches)
        rows.append(dataclasses.replace(row, prompt_ids=prompt, rollout=rollout))
    units = [0] * len(rows) if has_one_prompt else range(len(rows))
    batch = collate(
        rows,
        is_packed=how != "padded",
        shares_tokens=how == "together",
        units=units,
        score_all=True,
    )
    for index, row in enumerate(rows):
        before = predecessors(row.rollout.branches, num_tokens=row.rollout.num_tokens)
        for token, context in enumerate(contexts_in(batch, row, index)):
            expected, place = [], int(before[token])
            while place >= -len(row.prompt_ids):
                expected.append(place if place >= 0 else int(row.prompt_ids[place]))
                place = int(before[place]) if place >= 0 else place - 1
            assert bool(batch.completion_mask[index, token]) is bool(expected)
            assert not expected or context == expected[::-1]
    if how == "together" and not has_one_prompt:
        assert batch.input_ids.numel() == sum(row.num_inputs for row in rows)
        spans = [span for row in rows for span in row.spans]
        assert batch.spans(rows) == [span for span in spans if span[0]]
    if how == "apart":
        assert batch.input_ids.numel() == sum(sum(row.chain_inputs) for row in rows)


def test_chains_of_padded_rows_count_for_the_limit() -> None:
    assert pack_micro_batches([4, 4, 4], max_tokens=12, counts=[2, 1, 1]) == [[0, 1], [2]]
