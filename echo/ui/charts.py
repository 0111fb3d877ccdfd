"""Draw curves and bars with characters: braille and blocks, or ASCII where those cannot be shown.

Everything here is a pure function from numbers to rich `Text` rows of an exact size. Values that
are not finite are left out, so that a diverged run can still be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.text import Text

Point = tuple[float, float]

_BRAILLE_BASE = 0x2800
_BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille cell, [row from the top][column]."""
_LARGEST = 1e100
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*#"
_ASCII_HEIGHTS = "'-."
"""A third of a text row each, top to bottom, so that ASCII curves have three times the rows."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points, drawn in one style."""

    points: Sequence[Point]
    style: str


@dataclass(frozen=True, slots=True)
class Marks:
    """Single points, drawn as one character each, over the curves."""

    points: Sequence[Point]
    style: str
    glyph: str


def clean(text: str, *, ascii_only: bool = False) -> str:
    """Return `text` on one line with nothing in it that a terminal would obey.

    Names and notices come from remote nodes: an escape sequence in one must not reach the terminal.
    """
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown.encode("ascii", "replace").decode("ascii") if ascii_only else shown


def fit(text: Text, width: int) -> Text:
    """Return `text` cut or padded to exactly `width` cells."""
    fitted = text.copy()
    missing = width - fitted.cell_len
    if missing >= 0:
        fitted.pad_right(missing)
    else:
        fitted.truncate(max(width, 0))
    return fitted


def bar(share: float, width: int, *, ascii_only: bool) -> str:
    """Return a horizontal bar that fills `share` (0..1) of `width` cells, unpadded.

    A share above zero always shows, however small.
    """
    share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    if share == 0 or width < 1:
        return ""
    if ascii_only:
        return "#" * max(round(share * width), 1)
    eighths = max(round(share * width * 8), 1)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def progress(share: float, width: int, *, ascii_only: bool) -> Text:
    """Return a progress bar of exactly `width` cells, `share` (0..1) of it done."""
    share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    width = max(width, 0)
    done = int(share * width)
    left = width - done
    if ascii_only:
        return Text("#" * done + "." * left)
    style = "green" if share >= 1 else "cyan"
    return Text.assemble(("━" * done, style), ("╌" * left, "dim"))


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool) -> str:
    """Return `values` as one row of at most `width` characters, scaled to their own range."""
    levels = _ASCII_LEVELS if ascii_only else _LEVELS
    points = [(float(i), v) for i, v in enumerate(values) if _can_draw(v)]
    if not points or width < 1:
        return ""
    columns = _resample(points, min(width, len(points)), points[0][0], points[-1][0])
    low, high = min(v for _, v in points), max(v for _, v in points)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((v - low) * scale)] for v in columns if v is not None)


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the vertical range to show: whole tenths for rates, else a little around the data."""
    finite = [v for v in values if _can_draw(v)]
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
    ascii_only: bool,
) -> list[Text]:
    """Return a chart of exactly `height` rows of `width` cells, axes with labels included.

    Args:
        curves: drawn in order, later ones on top.
        marks: drawn over the curves.
        width: cells in all; below 12 there is no room for a plot and the rows are blank.
        height: rows in all, the last of them the horizontal axis.
        x_range: values at the left and right edge.
        y_range: values at the bottom and top edge.
        ascii_only: whether to do without braille and box characters.
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
        _draw_curve(cells, curve, x_range, y_range, ascii_only=ascii_only)
    for series in marks:
        for x, y in series.points:
            if _can_draw(y):
                column = round(_place(x, x_range) * (columns - 1))
                row = round((1 - _place(y, y_range)) * (rows - 1))
                cells[row][column] = (series.glyph, series.style)
    edge = "|" if ascii_only else "│"
    lines = []
    for row, line in enumerate(cells):
        head = (labels.get(row, "").rjust(gutter - 1) + " " + edge, "dim")
        lines.append(Text.assemble(head, *line))
    left, right = f"{x_range[0]:g}", f"step {x_range[1]:g}"
    axis = " " * (gutter + 1) + left + right.rjust(columns - len(left))
    lines.append(Text(set_cell_size(axis, width), "dim"))
    return lines


def _can_draw(value: float) -> bool:
    """False for what is not finite, or so large that sums and differences would not be."""
    return math.isfinite(value) and abs(value) < _LARGEST


def _place(value: float, bounds: tuple[float, float]) -> float:
    """Where `value` lies within `bounds`, 0..1, clipped."""
    low, high = bounds
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0


def _resample(
    points: Sequence[Point], columns: int, left: float, right: float
) -> list[float | None]:
    """One value per column: the mean of the points in it, interpolated where there is none."""
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
    *,
    ascii_only: bool,
) -> None:
    """Draw `curve` into `cells` [rows][columns] of (character, style)."""
    points = [(x, y) for x, y in curve.points if _can_draw(y)]
    if not points:
        return
    rows, columns = len(cells), len(cells[0])
    dots_across, dots_down = (1, len(_ASCII_HEIGHTS)) if ascii_only else (2, 4)
    values = _resample(points, columns * dots_across, *x_range)
    bits: dict[tuple[int, int], int] = {}
    previous: int | None = None
    for x, value in enumerate(values):
        if value is None:
            continue
        y = round((1 - _place(value, y_range)) * (rows * dots_down - 1))
        row, column = y // dots_down, x // dots_across
        if ascii_only:
            cells[row][column] = (_ASCII_HEIGHTS[y % dots_down], curve.style)
            continue
        # Braille: join to the previous column with a vertical stroke, half of it in each.
        start = y if previous is None else previous + (y > previous) - (y < previous)
        for dot in range(min(start, y), max(start, y) + 1):
            place = (dot // dots_down, column)
            bits[place] = bits.get(place, 0) | _BRAILLE_DOTS[dot % dots_down][x % dots_across]
        previous = y
    for (row, column), pattern in bits.items():
        cells[row][column] = (chr(_BRAILLE_BASE + pattern), curve.style)


def pad(text: str, width: int) -> str:
    """Return `text` padded with spaces to `width` cells; wide characters count as two."""
    return text + " " * max(width - cell_len(text), 0)
