"""Sizes that rows are filled to: few of them, and little filling."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.algo.row_sizes import MAX_FILLED, RowSizes, filled_size


@given(st.integers(1, 40_000), st.integers(1, 40_000))
def test_a_row_is_filled_to_one_of_a_few_sizes(num_tokens: int, max_tokens: int) -> None:
    size = filled_size(num_tokens, max_tokens=max_tokens)
    assert num_tokens <= size <= max(num_tokens, max_tokens)
    assert size - num_tokens < max(1, num_tokens / 16)
    if num_tokens <= max_tokens:
        assert filled_size(size, max_tokens=max_tokens) == size


def test_there_are_few_sizes() -> None:
    assert len({filled_size(number, max_tokens=10_000) for number in range(2048, 4097)}) == 17


def steady(rng: random.Random) -> Iterator[int]:
    """Steps of about as many tokens."""
    while True:
        yield rng.randrange(9_700, 11_100)


def growing(rng: random.Random) -> Iterator[int]:
    size = 2000.0
    while True:
        size *= 1.005
        yield round(size * rng.uniform(0.8, 1.2))


def beside_a_power_of_two(rng: random.Random) -> Iterator[int]:
    """16 sizes per octave would fill each of them by 6 %."""
    while True:
        yield rng.randrange(1025, 1040)


def unlike(rng: random.Random) -> Iterator[int]:
    while True:
        yield rng.choice((300, 1025, 4100)) + rng.randrange(30)


@pytest.mark.parametrize(
    ("rows", "most"), [(steady, 4), (growing, 40), (beside_a_power_of_two, 3), (unlike, 16)]
)
def test_the_sizes_of_a_run_are_few_and_filling_costs_less_than_3_percent(
    rows: object, most: int
) -> None:
    assert callable(rows)
    draw, sizes = rows(random.Random(0)), RowSizes(fills="rows")
    drawn = [next(draw) for _ in range(200)]
    found = [sizes.packed(number, max_tokens=16384) for number in drawn]
    assert all(size >= number for size, number in zip(found, drawn, strict=True))
    assert sum(found) < 1.03 * sum(drawn)
    assert len(set(found)) <= most
    assert len(set(drawn)) > len(set(found))


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(100, 2000)), max_size=40))
def test_filling_keeps_to_the_limit_of_a_micro_batch(rows: list[tuple[int, int]]) -> None:
    """Also if the limit has fallen since a size was taken."""
    sizes = RowSizes(fills="rows")
    filled = total = 0
    for number, limit in rows:
        size = sizes.packed(number, max_tokens=limit)
        assert number <= size <= max(number, limit)
        filled, total = filled + size - number, total + number
    largest = max((number for number, _ in rows), default=0)
    assert filled <= MAX_FILLED * (total + 4 * largest) + largest / 64 + 1


def test_only_rows_of_a_cpu_and_widths_of_a_gpu_are_filled() -> None:
    nothing, rows, widths = (RowSizes(fills=kind) for kind in ("nothing", "rows", "widths"))
    for sizes, packed, width, number in (
        (nothing, 1025, 1025, 3), (rows, 1088, 1088, 4), (widths, 1025, 1025, 3)
    ):  # fmt: skip
        assert sizes.packed(1025, max_tokens=9000) == packed
        assert sizes.width(1025, max_tokens=9000) == width
        assert sizes.number(3, 1025, max_tokens=9000) == number


@pytest.mark.parametrize(
    ("length", "width"),
    [
        (9, 9),
        (128, 128),
        (500, 512),
        (1024, 1024),
        (1150, 1152),
        (1153, 1153),  # 127 more would be more than a tenth
        (1280, 1280),
        (1290, 1408),
        (4095, 4096),
        (4096, 4096),
        (4097, 4608),
        (16384, 16384),
        (16385, 16385),  # the limit of a micro-batch
        (20000, 20000),
    ],
)
def test_a_gpu_has_few_lengths_of_padded_rows(length: int, width: int) -> None:
    assert RowSizes(fills="widths").width(length, max_tokens=16384) == width


def test_rows_are_no_longer_than_the_model_has_positions() -> None:
    for fills in ("rows", "widths"):
        sizes = RowSizes(fills=fills, window=5000)
        assert sizes.width(4990, max_tokens=16384) == 5000
        assert sizes.width(5003, max_tokens=16384) == 5003
