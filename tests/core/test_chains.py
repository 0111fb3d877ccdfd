"""Trees of tokens: their pieces, chains, and what no rollout may say."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.chains import Branches, Tree, find_branch_fault, num_tokens_of, predecessors
from echo.core.rollout import Group, Rollout

# A prompt of 3 tokens, then 0 1 2 3 | 4 5 after 1 | 6 after 5 | 7 8 in the prompt | 9 anew
BRANCHES = np.array([[4, 1], [6, 5], [7, -2], [9, -4]], np.int32)


def rollout_of(branches: Branches = BRANCHES, *, num_tokens: int = 10, **changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "sampler_logprobs": np.full(num_tokens, -1.0, np.float32),
        "policy_versions": np.ones((num_tokens, 2), np.int32),
        "completion_mask": np.arange(num_tokens) < 9,
        "reward": 1.0,
        "finish_reason": "stop",
        "branches": branches,
    }
    return Rollout(**(fields | changes))


def group_of(rollout: Rollout) -> Group:
    return Group(
        group_id=7,
        attempt=0,
        worker_id="w",
        prompt_ids=np.array([20, 21, 22], np.int32),
        rollouts=(rollout, rollout_of()),
    )


@st.composite
def trees(draw: st.DrawFn) -> tuple[Branches, int, int]:
    """Branches, tokens of the completion, and tokens of the prompt, which may be in them."""
    num_tokens, num_prompt = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    starts = sorted(draw(st.sets(st.integers(1, max(1, num_tokens - 1)), max_size=5)))
    starts = [start for start in starts if start < num_tokens]
    pairs = [(start, draw(st.integers(-1 - num_prompt, start - 1))) for start in starts]
    return np.array(pairs, np.int32).reshape(-1, 2), num_tokens, num_prompt


def test_the_chains_of_a_tree() -> None:
    tree = Tree(BRANCHES, num_tokens=10, num_prompt=3)
    assert [tree.is_continued(piece) for piece in tree.pieces] == [False, True, False, False, False]
    assert tree.chains == [
        [(-3, 0), (0, 4)],
        [(-3, 0), (0, 2), (4, 6), (6, 7)],
        [(-3, -1), (7, 9)],
        [(9, 10)],
    ]
    assert list(map(num_tokens_of, tree.chains)) == [7, 8, 4, 1]
    before = predecessors(BRANCHES, num_tokens=10)
    assert before.tolist() == [-1, 0, 1, 2, 1, 4, 5, -2, 7, -4]
    group_of(rollout_of())


@given(trees())
def test_each_chain_goes_from_token_to_token(drawn: tuple[Branches, int, int]) -> None:
    branches, num_tokens, num_prompt = drawn
    assert find_branch_fault(branches, num_tokens=num_tokens) is None
    before = predecessors(branches, num_tokens=num_tokens)
    seen = set()
    for chain in Tree(branches, num_tokens=num_tokens, num_prompt=num_prompt).chains:
        places = [place for run in chain for place in range(*run)]
        assert places[0] == -num_prompt or before[places[0]] == -num_prompt - 1
        for one, other in pairwise(places):
            assert (before[other] if other >= 0 else other - 1) == one
        seen.update(places)
    assert seen >= set(range(num_tokens))


@pytest.mark.parametrize(
    ("branches", "text"),
    [
        ([[0, -1]], "start at"),
        ([[10, 3]], "start at"),
        ([[3, 1], [3, 2]], "start at"),
        ([[5, 1], [3, 2]], "start at"),
        ([[3, 3]], "a later token"),
        ([[3, 9]], "a later token"),
        ([[3, 1, 0]], "expected int32"),
    ],
)
def test_branches_that_no_rollout_can_have(branches: list[list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rollout_of(np.array(branches, np.int32))


def test_branches_that_do_not_fit_a_group() -> None:
    with pytest.raises(ValueError, match="follows place -5 of a prompt of 3 tokens"):
        group_of(rollout_of(np.array([[4, -5]], np.int32)))
    with pytest.raises(ValueError, match="a trained token follows nothing"):
        group_of(rollout_of(completion_mask=np.ones(10, np.bool_)))
