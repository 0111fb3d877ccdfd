from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from echo.ui.live import Curve, InAscii, Marks, clean, fit, line_chart, to_ascii, value_range

any_float = st.floats(allow_nan=True, allow_infinity=True)


def chart(points: list[tuple[float, float]]) -> list[str]:
    rows = line_chart(
        [Curve(points, "cyan")],
        [],
        width=30,
        height=5,
        x_range=(0, 10),
        y_range=(0, 1),
    )
    return [row.plain for row in rows]


def test_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    rows = chart([(0, 0.0), (10, 1.0)])
    plots = [row.split("│")[1] for row in rows[:-1]]
    assert plots[-1].strip("⠀ ")
    assert plots[-1][0] != " "
    assert plots[0][-1] != " "
    assert plots[0][0] == plots[-1][-1] == " "
    assert rows[0].startswith("1 │")
    assert rows[-2].startswith("0 │")
    assert rows[-1].split() == ["0", "step", "10"]


def test_line_is_drawn_without_gaps() -> None:
    rows = chart([(0, 0.0), (5, 1.0), (10, 0.0)])
    plots = [row.split("│")[1] for row in rows[:-1]]
    assert all(any(row[column] != " " for row in plots) for column in range(len(plots[0])))


def test_marks_lie_over_the_curve() -> None:
    rows = line_chart(
        [Curve([(0, 1.0), (10, 1.0)], "cyan")],
        [Marks([(0, 0.0), (10, 1.0), (5, math.nan)], "green", "●")],
        width=30,
        height=4,
        x_range=(0, 10),
        y_range=(0, 1),
    )
    assert rows[0].plain.endswith("●")
    assert rows[2].plain.split("│")[1].startswith("●")
    assert sum(row.plain.count("●") for row in rows) == 2


@given(
    st.lists(st.tuples(st.floats(0, 100), any_float), max_size=50),
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


def test_clean_leaves_nothing_that_a_terminal_obeys() -> None:
    assert clean("a\x1b[31mb\nc\x07") == "a [31mb c "


def test_what_is_drawn_in_ascii_is_as_wide() -> None:
    assert to_ascii("ab│⠉⣿ ● ◆ █▌ ◂ S …") == "ab|** o x ## < S ~"
    assert to_ascii("wörker 中文 ✓") == "w?rker ???? ?"


def test_in_ascii_escapes_and_styles_stay() -> None:
    console = Console(file=io.StringIO(), width=20, color_system="standard", force_terminal=True)
    with console.capture() as capture:
        console.print(InAscii(Text("●", "red")))
    assert capture.get() == "\x1b[31mo\x1b[0m\n"


def test_fit_counts_wide_characters_as_two() -> None:
    assert fit(Text("中文"), 3).cell_len == 3
    assert fit(Text("ab"), 4).plain == "ab  "
    assert fit(Text("ab"), 0).plain == ""


@pytest.mark.parametrize("height", range(4, 20))
def test_the_axis_begins_at_its_lowest_value(height: int) -> None:
    rows = line_chart([], [], width=40, height=height, x_range=(0, 1), y_range=(0.0, 0.1))
    labels = [row.plain.split("│")[0].strip() for row in rows if "│" in row.plain]
    assert (labels[0], labels[-1]) == ("0.1", "0")
