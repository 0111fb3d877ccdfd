"""Draws texts and curves that fill an exact number of terminal cells.

The functions are pure and convert numbers to rows of rich `Text`. Curves consist of braille
characters. Values that are not finite are left out, so a diverged run can still be drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

Point = tuple[float, float]

UNWRAPPED = 10_000
"""Width of a console, in cells, at which no line wraps: wider than any line."""
_BRAILLE_BASE = 0x2800  # the braille character without dots
_BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit that stands for each dot in a braille character, [row from the top][column]."""
_LARGEST = 1e100
"""Largest absolute value that is drawn. The limit keeps sums and differences finite."""
_ASCII = {"│": "|", "●": "o", "◆": "x", "◂": "<", "·": "-", "…": "~"}
_ASCII |= dict.fromkeys("█▉▊▋▌▍▎▏", "#") | {chr(_BRAILLE_BASE + i): "*" for i in range(1, 256)}
"""ASCII replacements of the same width for all characters that this package and rich's bars draw.
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points, drawn in one style."""

    points: Sequence[Point]
    style: str


@dataclass(frozen=True, slots=True)
class Marks:
    """Points that are drawn over the curves. Each point is one character."""

    points: Sequence[Point]
    style: str
    glyph: str


def clean(text: str) -> str:
    """Return text on one line. Spaces replace the unprintable characters.

    Names and notices come from remote nodes, and may contain escape sequences, which must not reach
    the terminal.
    """
    return "".join(char if char.isprintable() else " " for char in text)


def to_ascii(text: str) -> str:
    """Convert text to ASCII. The result fills the same number of terminal cells.

    Question marks replace characters without an ASCII equivalent.
    """
    return re.sub(
        r"[^\x00-\x7f]", lambda match: _ASCII.get(match[0]) or "?" * cell_len(match[0]), text
    )


@dataclass(frozen=True, slots=True)
class InAscii:
    """Shows a rich renderable on a terminal that can show only ASCII."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the content as ASCII."""
        for segment in console.render(self.content, options):
            yield segment if segment.control else Segment(to_ascii(segment.text), segment.style)


def fit(text: Text, width: int) -> Text:
    """Return `text` padded to exactly `width` cells, or cut, with an ellipsis at its end."""
    fitted = text.copy()
    fitted.rstrip()  # spaces that do not fit are no loss
    fitted.truncate(max(width, 0), overflow="ellipsis" if width > 0 else "crop", pad=True)
    return fitted


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return both ends of a vertical axis on which `values` are drawn.

    If all values are between 0 and 1, as for rates, the ends are multiples of 0.1. Otherwise there
    is a margin of 5 %.
    """
    finite = [v for v in values if abs(v) < _LARGEST]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if low >= 0 and high <= 1:
        low, high = math.floor(low * 10) / 10, math.ceil(high * 10) / 10
        return (low, high) if high > low else (max(low - 0.1, 0.0), max(high, 0.1))
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def line_chart(
    curves: Sequence[Curve],
    marks: Sequence[Marks],
    *,
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> list[Text]:
    """Return a chart with axes and labels: exactly `height` rows of `width` cells.

    Args:
        curves: the curves. Later curves are drawn on top of earlier curves.
        marks: the marks, drawn over the curves.
        width: number of cells per row. Below 12, the rows are blank.
        height: number of rows; the last row is the horizontal axis.
        x_range: values at the left and right edge.
        y_range: values at the bottom and top edge.
    """
    rows = height - 1
    labelled = {0, rows // 2, rows - 1} if rows >= 5 and rows % 2 else {0, rows - 1}
    top, bottom = y_range[1], y_range[0]
    shares = {row: row / max(rows - 1, 1) for row in labelled}
    # Not top - (top - bottom) * share, which is not the bottom exactly: -1.39e-17 in place of 0.
    labels = {row: f"{top * (1 - share) + bottom * share:.3g}" for row, share in shares.items()}
    gutter = max(map(len, labels.values())) + 1
    columns = width - gutter - 1
    if columns < 6 or rows < 1:
        return [Text(" " * max(width, 0)) for _ in range(max(height, 0))]
    cells: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in range(rows)]
    for curve in curves:
        _draw_curve(cells, curve, x_range, y_range)
    for series in marks:
        for x, y in series.points:
            if abs(y) < _LARGEST:
                column = round(_place(x, x_range) * (columns - 1))
                row = round((1 - _place(y, y_range)) * (rows - 1))
                cells[row][column] = (series.glyph, series.style)
    lines = []
    for row, line in enumerate(cells):
        head = (labels.get(row, "").rjust(gutter - 1) + " │", "dim")
        lines.append(Text.assemble(head, *line))
    left, right = f"{x_range[0]:g}", f"step {x_range[1]:g}"
    axis = " " * (gutter + 1) + left + right.rjust(columns - len(left))
    lines.append(Text(set_cell_size(axis, width), "dim"))
    return lines


def _place(value: float, bounds: tuple[float, float]) -> float:
    """Return where a value lies between two bounds, as a number from 0 to 1."""
    low, high = bounds
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0


def _resample(
    points: Sequence[Point], columns: int, left: float, right: float
) -> list[float | None]:
    """Return one value for each column, computed from the points between `left` and `right`.

    If a column has points, the value is their mean. Otherwise the value is interpolated from the
    nearest columns with points. Before the first point and after the last point, the value is None.
    """
    xs = np.array([x for x, _ in points], dtype=np.float64)
    ys = np.array([y for _, y in points], dtype=np.float64)
    width = max(right - left, 1e-9)
    index = np.clip(((xs - left) / width * (columns - 1)).round().astype(np.int64), 0, columns - 1)
    totals = np.bincount(index, weights=ys, minlength=columns)
    counts = np.bincount(index, minlength=columns)
    filled = np.flatnonzero(counts)
    means = np.interp(np.arange(columns), filled, totals[filled] / counts[filled])
    first, last = int(filled[0]), int(filled[-1])
    return [float(means[i]) if first <= i <= last else None for i in range(columns)]


def _draw_curve(
    cells: list[list[tuple[str, str]]],
    curve: Curve,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> None:
    """Draw `curve` into `cells`, where cells[row][column] is (character, style)."""
    points = [(x, y) for x, y in curve.points if abs(y) < _LARGEST]
    if not points:
        return
    rows, columns = len(cells), len(cells[0])
    dots_across, dots_down = 2, 4
    values = _resample(points, columns * dots_across, *x_range)
    bits: dict[tuple[int, int], int] = {}
    previous: int | None = None
    for x, value in enumerate(values):
        if value is None:
            continue
        y = round((1 - _place(value, y_range)) * (rows * dots_down - 1))
        # Join to the previous column with a vertical stroke, half of it in each.
        start = y if previous is None else previous + (y > previous) - (y < previous)
        for dot in range(min(start, y), max(start, y) + 1):
            place = (dot // dots_down, x // dots_across)
            bits[place] = bits.get(place, 0) | _BRAILLE_DOTS[dot % dots_down][x % dots_across]
        previous = y
    for (row, column), pattern in bits.items():
        cells[row][column] = (chr(_BRAILLE_BASE + pattern), curve.style)


def clock(seconds: float) -> str:
    """Return a duration in seconds as clock time: 0:07, 12:34, 1:02:03, 2d 03:04."""
    if not math.isfinite(seconds):
        return "-"
    minutes, secs = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def short_count(value: float) -> str:
    """Return a count in at most five characters: 950, 12.3k, 4.56M."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit * 0.9995:
            return f"{value / divisor:.0f}" if not unit else f"{value / divisor:.3g}{unit}"
    return f"{value / 1e9:.3g}G"
