from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.ui.drawing import (
    Curve,
    Marks,
    clock,
    line_chart,
    short_count,
    to_ascii,
    value_range,
)


def test_marks_lie_over_the_curve() -> None:
    curve = Curve([(0, 1.0), (10, 1.0)], "cyan")
    marks = Marks([(0, 0.0), (10, 1.0), (5, math.nan)], "green", "●")
    size = {"width": 30, "height": 4}
    rows = line_chart([curve], [marks], **size, x_range=(0, 10), y_range=(0, 1))
    assert rows[0].plain.endswith("●")
    assert rows[2].plain.split("│")[1].startswith("●")
    assert sum(row.plain.count("●") for row in rows) == 2


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats()), max_size=50),
    st.integers(0, 120),
    st.integers(0, 20),
)
def test_chart_always_has_the_size_asked_for(
    points: list[tuple[float, float]], width: int, height: int
) -> None:
    rows = line_chart(
        [Curve(points, "cyan")],
        [Marks(points, "green", "o")],
        width=width,
        height=height,
        x_range=(0, 100),
        y_range=value_range([y for _, y in points]),
    )
    assert [row.cell_len for row in rows] == [width] * height


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0.0, 1.0)),
        ([0.34, 0.76], (0.3, 0.8)),
        ([0.0, 1.0], (0.0, 1.0)),
        ([0.5], (0.4, 0.5)),
        ([math.inf, 0.15], (0.1, 0.2)),
        ([-10.0, 10.0], (-11.0, 11.0)),
    ],
)
def test_value_range(values: list[float], expected: tuple[float, float]) -> None:
    assert value_range(values) == pytest.approx(expected)


def test_what_is_drawn_in_ascii_is_as_wide() -> None:
    assert to_ascii("ab│⠉⣿ ● ◆ █▌ ◂ S …") == "ab|** o x ## < S ~"
    assert to_ascii("wörker 中文 ✓") == "w?rker ???? ?"


@pytest.mark.parametrize(
    ("short", "value", "text"),
    [
        (short_count, 0, "0"), (short_count, 999, "999"), (short_count, 999.9, "1k"),
        (short_count, 12345, "12.3k"), (short_count, 4.56e6, "4.56M"),
        (short_count, 2e10, "20G"),
        (clock, 0, "0:00"), (clock, 7.4, "0:07"), (clock, 59.6, "1:00"),
        (clock, 754, "12:34"), (clock, 3723, "1:02:03"), (clock, 183840, "2d 03:04"),
        (clock, -1, "0:00"), (clock, math.inf, "-"),
    ],
)  # fmt: skip
def test_numbers_and_times_are_short(short: Any, value: float, text: str) -> None:
    assert short(value) == text
