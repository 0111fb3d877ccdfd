"""Balanced rounds: every row once, within the budget, and short waits of ranks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.algo import balance
from echo.algo.balance import _fill, balanced_rounds
from echo.algo.batching import pack_micro_batches


def flops(length: int) -> float:
    return 1000.0 * length + length * length


def test_by_hand() -> None:
    # 12 tokens in bins of 4: three of them, the heaviest alone, then one of each end.
    assert balanced_rounds([1, 4, 3, 2, 2], [1, 4, 3, 2, 2], max_tokens=4) == [
        [[1]],
        [[2, 0]],
        [[3, 4]],
    ]
    assert balanced_rounds([2, 2], [2, 2], max_tokens=9, num_ranks=3) == [[[0], [1], []]]
    assert balanced_rounds([], [], max_tokens=4) == []


@given(
    rows=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 5)), max_size=40),
    max_tokens=st.integers(1, 200),
    num_ranks=st.integers(1, 5),
    is_grouped=st.booleans(),
)
def test_every_row_is_once_in_a_bin_that_holds_it(
    rows: list[tuple[int, int]], max_tokens: int, num_ranks: int, *, is_grouped: bool
) -> None:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    rounds = balanced_rounds(
        lengths,
        [flops(length) for length in lengths],
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        group_index=groups if is_grouped else None,
    )
    assert all(len(bins) == num_ranks for bins in rounds)
    bins = [rows_ for round_ in rounds for rows_ in round_]
    assert sorted(index for rows_ in bins for index in rows_) == list(range(len(rows)))
    for rows_ in bins:
        units = {groups[index] if is_grouped else index for index in rows_}
        assert sum(lengths[index] for index in rows_) <= max_tokens or len(units) == 1
        assert [lengths[i] for i in rows_] == sorted((lengths[i] for i in rows_), reverse=True)
    for group in set(groups) if is_grouped else ():
        assert sum(group in {groups[index] for index in rows_} for rows_ in bins) == 1
    work = [sum(flops(lengths[index]) for index in rows_) for rows_ in bins]
    assert work == sorted(work, reverse=True)
    num_units = len(set(groups)) if is_grouped else len(rows)
    assert sum(not rows_ for rows_ in bins) == max(0, len(bins) - num_units) < num_ranks


def use_of(rounds: list[list[float]]) -> float:
    """The share of all ranks' time in which they compute; a round lasts as long as its heaviest."""
    return sum(map(sum, rounds)) / sum(len(works) * max(works) for works in rounds)


@pytest.mark.parametrize(("num_rows", "max_tokens"), [(128, 16384), (512, 16384)])
def test_eight_ranks_are_used(num_rows: int, max_tokens: int) -> None:
    """On log-normal lengths ranks compute .95 of their time; sorted padded rows reach less."""
    shares, padded_shares = [], []
    for seed in range(5):
        rng = random.Random(seed)
        lengths = [
            200 + min(7992, round(900 * math.exp(rng.gauss(0, 0.9)))) for _ in range(num_rows)
        ]
        # Linear and quadratic part as of a model with 4e9 parameters.
        work = [6 * 3.6e9 * n + 6 * 36 * 32 * 128 * n * n for n in lengths]
        rounds = balanced_rounds(lengths, work, max_tokens=max_tokens, num_ranks=8)
        shares.append(use_of([[sum(work[i] for i in rows) for rows in bins] for bins in rounds]))
        padded = [
            len(rows) * work[rows[0]] for rows in pack_micro_batches(lengths, max_tokens=max_tokens)
        ]
        padded += [0.0] * (-len(padded) % 8)
        spent = sum(8 * padded[first] for first in range(0, len(padded), 8))
        padded_shares.append(sum(work) / spent)
    assert sum(shares) / 5 >= 0.95
    assert sum(shares) > sum(padded_shares) + 5 * 0.05


@pytest.mark.parametrize("length", [34, 60, 200])
def test_a_number_of_bins_is_not_looked_for_one_by_one(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def fill(units: Any, num_bins: int, max_tokens: int) -> Any:
        tried.append(num_bins)
        return _fill(units, num_bins, max_tokens)

    monkeypatch.setattr(balance, "_fill", fill)
    rounds = balanced_rounds([length] * 999 + [1], [1.0] * 1000, max_tokens=100, num_ranks=2)
    assert len(rounds) == (250 if length == 34 else 500)
    assert len(tried) < 20


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens = 0"):
        balanced_rounds([1], [1.0], max_tokens=0)
