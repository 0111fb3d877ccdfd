"""Live view on a terminal, log lines elsewhere.

The learner hands over snapshots and never waits for the terminal: a thread of its own draws the
newest one, so that a paused terminal (Ctrl-S), a slow connection or one that was cut costs the
learner nothing. Nothing that goes wrong with the output reaches it either: the view falls silent
and keeps the reason.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal, TextIO

import numpy as np
from rich.bar import Bar
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.errors import ConsoleError, LiveError
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from echo.core.metrics import CostView, NodeView, Snapshot, SpeedView, WorkerView, held_out
from echo.core.units import format_bytes

# --- curves in braille ----------------------------------------------------------------------------
#
# Pure functions from numbers to rich `Text` rows of an exact size; rich has no curves. Values
# that are not finite are left out, so that a diverged run can still be looked at.


Point = tuple[float, float]

_BRAILLE_BASE = 0x2800
_BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille cell, [row from the top][column]."""
_LARGEST = 1e100
"""Sums and differences of what is below are finite."""
_ASCII = {"│": "|", "●": "o", "◆": "x", "◂": "<", "·": "-", "…": "~"}
_ASCII |= dict.fromkeys("█▉▊▋▌▍▎▏", "#") | {chr(_BRAILLE_BASE + i): "*" for i in range(1, 256)}
"""For each character that we, or rich's bars, draw with: one as wide."""


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


def clean(text: str) -> str:
    """Return `text` on one line with nothing in it that a terminal would obey.

    Names and notices come from remote nodes: an escape sequence in one must not reach the terminal.
    """
    return "".join(char if char.isprintable() else " " for char in text)


def to_ascii(text: str) -> str:
    """Return `text` in ASCII and as wide; what has no likeness there becomes question marks."""
    return re.sub(
        r"[^\x00-\x7f]", lambda match: _ASCII.get(match[0]) or "?" * cell_len(match[0]), text
    )


@dataclass(frozen=True, slots=True)
class InAscii:
    """Something to draw on a terminal that shows nothing but ASCII."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it as everywhere, and replace the characters."""
        for segment in console.render(self.content, options):
            yield segment if segment.control else Segment(to_ascii(segment.text), segment.style)


def fit(text: Text, width: int) -> Text:
    """Return `text` cut or padded to exactly `width` cells."""
    fitted = text.copy()
    fitted.truncate(max(width, 0), pad=True)
    return fitted


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the vertical range to show: whole tenths for rates, else a little around the data."""
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
    """Return a chart of exactly `height` rows of `width` cells, axes with labels included.

    Args:
        curves: drawn in order, later ones on top.
        marks: drawn over the curves.
        width: cells in all; below 12 there is no space for a plot and the rows are blank.
        height: rows in all, the last of them the horizontal axis.
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
) -> None:
    """Draw `curve` into `cells` [rows][columns] of (character, style)."""
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


# --- remaining time -------------------------------------------------------------------------------


_STEPS_REMEMBERED = 20
"""Enough to even out single slow steps, few enough to follow a change of the number of workers."""


class RemainingTime:
    """Follow the steps of a run and estimate its end by their median.

    So a time without workers, which is not expected again, counts as one step. Only steps seen by
    this object count, without the first of its process: workers join before it.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_STEPS_REMEMBERED + 1)

    def observe(self, snapshot: Snapshot) -> None:
        """Note the instant at which a new step was first seen."""
        if self._seen and snapshot.step < self._seen[-1][0]:
            self._seen.clear()
        if snapshot.step > (self._seen[-1][0] if self._seen else snapshot.resumed_at):
            self._seen.append((snapshot.step, snapshot.elapsed_s))

    def eta_s(self, snapshot: Snapshot) -> float | None:
        """Return the seconds to `max_steps`, None before two steps have been seen."""
        if len(self._seen) < 2:
            return None
        per_step_s = median(
            (at - since) / (step - before) for (before, since), (step, at) in pairwise(self._seen)
        )
        under_way_s = min(snapshot.elapsed_s - self._seen[-1][1], per_step_s)
        return max((snapshot.max_steps - snapshot.step) * per_step_s - under_way_s, 0.0)


def clock(seconds: float) -> str:
    """Return `seconds` as a clock shows them: 0:07, 12:34, 1:02:03, 2d 03:04."""
    if not math.isfinite(seconds):
        return "-"
    minutes, secs = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


# --- rows of a snapshot ---------------------------------------------------------------------------
#
# Every function returns rows for rich no wider than asked for; the view decides which of them, and
# how many rows of each, a terminal has room for. Text from other nodes is cleaned before it is
# shown.


_LABEL_WIDTH = 9
_WRAPPER = Console(file=io.StringIO())
"""Width that rich needs for wrapping; nothing is printed on it."""
_ROLE_ORDER = {"learner": 0, "relay": 1, "worker": 2}
_STATE_STYLES = {"lost": "bold red", "waiting": "yellow", "refused": "bold red"}
_NUMBER_COLUMNS = frozenset({"stale", "tok/s", "bytes/s", "mismatch", "reward", "leases", "seen"})
_DISPENSABLE_COLUMNS = (
    "seen", "parent", "leases", "role", "reward", "bytes/s", "mismatch", "tok/s", "stale",
)  # fmt: skip
"""Left out where the width does not suffice, in this order."""
_MAX_CELL_WIDTHS = {"node": 12, "parent": 12, "state": 16}
"""Width to which these columns are cut while others lack space."""


def header(snapshot: Snapshot, width: int, *, eta_s: float | None) -> list[RenderableType]:
    """Return two rows: run name, step and times; then the bar of steps done."""
    name = Text.assemble(("echo ", "bold cyan"), (clean(snapshot.run_name), "bold"))
    right = Text(f"step {snapshot.step}/{snapshot.max_steps}", "bold")
    for part in (
        f"{clock(snapshot.elapsed_s)} elapsed",
        f"ETA {'-' if eta_s is None else clock(eta_s)}",
    ):
        if right.cell_len + len(part) + 3 <= width - 8:
            right.append(f"   {part}", "default not bold")
    name.truncate(max(width - right.cell_len - 2, 0), overflow="ellipsis")
    gap = max(width - name.cell_len - right.cell_len, 1)
    title = Text.assemble(name, " " * gap, right)
    return [fit(title, width), _row(_progress(snapshot.step, snapshot.max_steps, width))]


def reward_chart(snapshot: Snapshot, width: int, height: int) -> list[Text]:
    """Return `height` rows: the newest numbers, then the curves against the step.

    Below 4 rows there is no space for a curve, and the numbers are all.
    """
    rewards = snapshot.reward_history
    sampled_glyph, greedy_glyph = "●", "◆"
    title = Text.assemble(
        ("reward ", "bold"), (f"{rewards[-1]:.3g}" if rewards else "-", "bold cyan")
    )
    if snapshot.eval_history:
        step, sampled, greedy = snapshot.eval_history[-1]
        num_errors = snapshot.eval_errors.get(step, 0)
        if num_errors:
            title.append(f"   {num_errors} rewards failed", "bold red")
        parts = (
            (f"   {held_out(snapshot.evals_are_rates)}", "bold"),
            (f" {sampled_glyph} {sampled:.2f}", "green"),
            (" sampled", "green"),
            (f" {greedy_glyph} {greedy:.2f}", "magenta"),
            (" greedy", "magenta"),
            (f" at step {step}", "dim"),
        )
        # The longest of these that fits: everything, less and less, the bare numbers.
        short = ("   held-out", "bold")
        for wanted in (
            parts,
            parts[:-1],
            (parts[0], parts[1], parts[3]),
            (short, parts[1], parts[3]),
            (parts[1], parts[3]),
        ):
            if title.cell_len + sum(len(text) for text, _ in wanted) <= width:
                title.append_text(Text.assemble(*wanted))
                break
    if height < 4:
        return [fit(title, width)][:height]
    last = snapshot.resumed_at if snapshot.last_step is None else snapshot.last_step.step
    first_step = last - len(rewards) + 1
    values = [*rewards, *(v for _, *pair in snapshot.eval_history for v in pair)]
    plot = line_chart(
        [Curve([(first_step + i, reward) for i, reward in enumerate(rewards)], "cyan")],
        [
            Marks(
                [(step, sampled) for step, sampled, _ in snapshot.eval_history],
                "green",
                sampled_glyph,
            ),
            Marks(
                [(step, greedy) for step, _, greedy in snapshot.eval_history],
                "magenta",
                greedy_glyph,
            ),
        ],
        width=width,
        height=height - 1,
        x_range=(0, max(snapshot.step, 1)),
        y_range=value_range(values),
    )
    return [fit(title, width), *plot]


def staleness_bins(
    tokens: Mapping[int, int], max_staleness: int, max_bins: int
) -> list[tuple[str, int, bool]]:
    """Group trained tokens by staleness into at most `max_bins` bins.

    Returns:
        (label, tokens, whether it holds the bound S) per bin, from staleness 0 up to S, and beyond
        S only if tokens lie there, which the learner never lets happen.
    """
    beyond = sum(count for staleness, count in tokens.items() if staleness > max_staleness)
    room = max(max_bins - (beyond > 0), 1)
    per_bin = -(-(max_staleness + 1) // room)
    bins = []
    for low in range(0, max_staleness + 1, per_bin):
        high = min(low + per_bin - 1, max_staleness)
        count = sum(tokens.get(staleness, 0) for staleness in range(low, high + 1))
        bins.append((str(low) if low == high else f"{low}-{high}", count, high == max_staleness))
    if beyond:
        bins.append((f">{max_staleness}", beyond, False))
    return bins


def staleness_histogram(snapshot: Snapshot, width: int, height: int) -> list[RenderableType]:
    """Return at most `height` rows: mean staleness of the trained tokens, a bar per staleness."""
    tokens = snapshot.staleness_tokens
    total = sum(tokens.values())
    mean = sum(staleness * count for staleness, count in tokens.items()) / total if total else 0.0
    title = Text.assemble(("staleness", "bold"), f" mean {mean:.2f}" if total else " -")
    bins = staleness_bins(tokens, snapshot.max_staleness, max(height - 2, 1))
    marked = [(label, count, "◂ bound" if is_bound else "") for label, count, is_bound in bins]
    return [fit(title, width), staleness_bars(marked, width)]


def staleness_bars(bins: Sequence[tuple[str, int, str]], width: int) -> Table:
    """Return a row per bin: its label, a bar, its share of all tokens, and a note."""
    counts = [count for _, count, _ in bins]
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.width = width
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    table.add_column(style="bold yellow", no_wrap=True)
    for label, count, note in bins:
        color = "red" if label.startswith(">") else "blue"
        filled = Bar(max(counts) or 1, 0, count, color=color)
        table.add_row(label, filled, _percent(count / (sum(counts) or 1)), note)
    return table


def status(snapshot: Snapshot, width: int, *, num_wait_rows: int) -> list[RenderableType]:
    """Return 2 + `num_wait_rows` rows: flow, weights, and what the learner waits for.

    A row more once a step was timed. Where anything has a price, a row or two more: what it costs,
    and who was put on standby last.
    """
    flow = [
        f"{snapshot.num_buffered} buffered, {snapshot.groups_per_step} needed",
        f"{snapshot.num_leased} leased",
    ]
    if (last := snapshot.last_step) is not None:
        flow.append(f"{short_count(last.accepted_tokens_per_s)} tokens/s in the last step")
    groups = _labelled("groups", "   ".join(flow))
    version = _labelled("weights", f"{clean(snapshot.broadcast_version)} ")
    done = f" {snapshot.broadcast_done:4.0%}   {format_bytes(snapshot.broadcast_bytes)} sent"
    room = width - version.cell_len - len(done)
    bar_width = max(min(room - 1, 40), 4)
    per_version = snapshot.publish_period
    cadence = "   a version per " + ("step" if per_version == 1 else f"{per_version} steps")
    if bar_width + len(cadence) <= room:
        done += cadence
    weights = _row(version, _progress(snapshot.broadcast_done, 1, bar_width), done)
    waiting = _waiting(snapshot, width, num_wait_rows)
    costs = [] if snapshot.cost is None else cost_rows(snapshot.cost, width)
    speed = [] if snapshot.speed is None else [fit(speed_row(snapshot.speed), width)]
    return [fit(groups, width), *speed, weights, *(fit(row, width) for row in waiting), *costs]


def speed_row(speed: SpeedView) -> Text:
    """Return a row with how fast the learner trains, and what takes its time."""
    parts = [f"{short_count(speed.tokens_per_s)} tokens/s"]
    if speed.mfu is not None:
        parts.append(f"{speed.mfu:.0%} MFU")
    parts.append(f"peak {format_bytes(int(speed.peak_memory_bytes))}")
    parts.append(f"{speed.forward_backward_s:.2g} s passes, {speed.optimizer_s:.2g} s update")
    return _labelled("trainer", "   ".join(parts))


def cost_rows(cost: CostView, width: int) -> list[Text]:
    """Return a row with what the run costs, and one with the last change of who generates."""
    parts = [f"${cost.per_h:.2f}/h"]
    total = f"${cost.total:.2f} so far"
    if cost.budget_per_run is not None:
        total += f" of ${cost.budget_per_run:.2f}"
    parts.append(total)
    if cost.per_million_tokens is not None:
        parts.append(f"${cost.per_million_tokens:.3g} per million tokens")
    parts.append(f"{cost.num_active} active, {cost.num_standby} on standby")
    for amount, what in (
        (cost.standby_per_h, "for machines on standby"),
        (cost.unconfirmed_per_h, "for machines not known to be given back"),
    ):
        if amount:
            parts.append(f"${amount:.2f}/h {what}")
    # The first ones that fit: what it costs goes before where it goes to.
    while len(parts) > 1 and len("   ".join(parts)) > width - _LABEL_WIDTH:
        parts.pop()
    rows = [_labelled("cost", "   ".join(parts))]
    if cost.decision:
        rows.append(_labelled("", clean(cost.decision), style="dim"))
    return [fit(row, width) for row in rows]


def node_table(nodes: Sequence[NodeView], width: int, height: int) -> list[Text]:
    """Return at most `height` rows: a heading and a row per node, the rest summed up in the last.

    Columns that do not fit are left out, the least telling first. Where there is no space for all
    nodes, those in trouble and those that are not workers are shown first.
    """
    if not nodes or height < min(len(nodes) + 1, 3):
        return []
    ordered = sorted(nodes, key=_node_order)
    hidden: list[NodeView] = []
    if len(ordered) + 1 > height:
        urgent = sorted(ordered, key=lambda node: (node.role == "worker", not _is_in_trouble(node)))
        kept = {id(node) for node in urgent[: height - 2]}
        hidden = [node for node in ordered if id(node) not in kept]
        ordered = [node for node in ordered if id(node) in kept]
    columns, gap = _fitting_columns(ordered, width)
    heading = gap.join(_align(column.name, column) for column in columns)
    rows = [fit(Text(heading, "dim"), width)]
    for index, node in enumerate(ordered):
        styles = {"state": _state_style(node), "node": "bold"}
        cells = [(_align(c.cells[index], c) + gap, styles.get(c.name, "")) for c in columns]
        rows.append(fit(Text.assemble(*cells), width))
    if hidden:
        words = [(clean(node.state).split() or ["-"])[0] for node in hidden]
        states = Counter(words)
        summary = ", ".join(f"{count} {state}" for state, count in states.most_common())
        rows.append(fit(Text(f"and {len(hidden)} more: {summary}", "dim"), width))
    return rows


def refusals(refused: Mapping[str, int], width: int) -> list[Text]:
    """Return a row with the groups refused or dropped by reason, most first, if there are any."""
    counts = sorted(((n, reason) for reason, n in refused.items() if n), reverse=True)
    if not counts:
        return []
    text = "   ".join(f"{clean(reason)} {n}" for n, reason in counts)
    return [fit(_labelled("refused", text, style="yellow"), width)]


def notices(lines: Sequence[str], width: int) -> list[list[Text]]:
    """Return each notice, the oldest first, as the rows that it needs.

    Nothing is cut: a notice may be a command or a path for the reader to copy. For the same reason
    the rows after the first are not indented.
    """
    found = []
    for line in lines:
        text = Text("· " + clean(line), "dim")
        rows = text.wrap(_WRAPPER, width, overflow="fold", no_wrap=False)
        found.append([fit(row, width) for row in rows])
    return found


def idle_shares(snapshot: Snapshot) -> str:
    """Return how much the learner waits, recently and since it started."""
    return f"{snapshot.recent_idle_ratio:.0%} recently, {snapshot.idle_ratio:.0%} in all"


def short_count(value: float) -> str:
    """Return a count in at most five characters: 950, 12.3k, 4.56M."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit * 0.9995:
            return f"{value / divisor:.0f}" if not unit else f"{value / divisor:.3g}{unit}"
    return f"{value / 1e9:.3g}G"


def _row(*parts: RenderableType) -> Table:
    """All of `parts` on one line, which it ends: a bar of rich does not."""
    row = Table.grid()
    for _ in parts:
        row.add_column(no_wrap=True)
    row.add_row(*parts)
    return row


def _progress(done: float, total: float, width: int) -> ProgressBar:
    return ProgressBar(total or 1, done, width, complete_style="cyan", finished_style="green")


def _percent(share: float) -> str:
    """A share in five characters; what exists never shows as zero."""
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:5.1%}" if share < 0.9995 else " 100%"


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((label.ljust(_LABEL_WIDTH), "dim"), (text, style))


def _waiting(snapshot: Snapshot, width: int, num_rows: int) -> list[Text]:
    state = f"waits for {clean(snapshot.waiting_for)}"
    if not snapshot.waiting_for:
        state = snapshot.activity or "training"
    wrapped = textwrap.wrap(
        f"idle {idle_shares(snapshot)}   {state}",
        max(width - _LABEL_WIDTH, 20),
        max_lines=num_rows,
        placeholder=" ...",
    )
    style = "yellow" if snapshot.waiting_for else "green"
    rows = [_labelled("" if i else "learner", line, style) for i, line in enumerate(wrapped)]
    return rows + [Text()] * (num_rows - len(rows))


def _node_order(node: NodeView) -> tuple[int, list[tuple[int, str]]]:
    """By role, then by name with numbers in it counted: w2 before w10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", node.node_id)
    # The length of a run of digits goes first; leading zeros then sort as text, which will do.
    return _ROLE_ORDER.get(node.role, 3), [(len(p) if p[0].isdigit() else 0, p) for p in parts]


def _is_in_trouble(node: NodeView) -> bool:
    return node.state.startswith(("lost", "refused", "waiting"))


def _state_style(node: NodeView) -> str:
    first_word = node.state.split(" ", 1)[0]
    return _STATE_STYLES.get(first_word, "green")


@dataclass(slots=True)
class _Column:
    """A column of the table of nodes."""

    name: str
    cells: list[str]
    width: int
    is_number: bool


def _align(cell: str, column: _Column) -> str:
    """`cell` at exactly the width of `column`: words to the left, numbers to the right."""
    missing = " " * max(column.width - cell_len(cell), 0)
    text = missing + cell if column.is_number else cell + missing
    return set_cell_size(text, column.width)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _fitting_columns(nodes: Sequence[NodeView], width: int) -> tuple[list[_Column], str]:
    """The columns that fit into `width`, and the gap between them."""
    content: dict[str, list[str]] = {
        "node": [node.node_id for node in nodes],
        "role": [node.role for node in nodes],
        "version": [node.version for node in nodes],
        "stale": ["-" if node.staleness is None else str(node.staleness) for node in nodes],
        "tok/s": [short_count(node.tokens_per_s) if node.tokens_per_s else "-" for node in nodes],
        "bytes/s": [format_bytes(node.bytes_per_s) if node.bytes_per_s else "-" for node in nodes],
        "mismatch": [_number(node.mismatch_kl, ".2g") for node in nodes],
        "reward": [_number(node.reward, ".3f") for node in nodes],
        "leases": [str(node.num_leases) if node.num_leases else "-" for node in nodes],
        "state": [node.state for node in nodes],
        "parent": [node.parent for node in nodes],
        "seen": ["-" if node.role == "learner" else f"{clock(node.seen_s)}" for node in nodes],
    }
    columns = []
    for name, raw in content.items():
        if name in ("mismatch", "reward") and set(raw) <= {"-"}:
            continue  # nothing was trained yet
        cells = [clean(cell) for cell in raw]
        natural = max(map(cell_len, [name, *cells]))
        limit = _MAX_CELL_WIDTHS.get(name, natural)
        columns.append(_Column(name, cells, min(natural, limit), name in _NUMBER_COLUMNS))
    gap = "  "
    for dropped in ("", "", *_DISPENSABLE_COLUMNS):
        columns = [column for column in columns if column.name != dropped]
        if sum(column.width for column in columns) + len(gap) * (len(columns) - 1) <= width:
            break
        gap = " "
    # The remaining width goes to the columns that were cut, the state before the names.
    spare = width - sum(column.width for column in columns) - len(gap) * (len(columns) - 1)
    for name in ("state", "node", "parent"):
        for column in columns:
            if column.name == name and spare > 0:
                extra = min(max(map(cell_len, column.cells)) - column.width, spare)
                column.width += max(extra, 0)
                spare -= max(extra, 0)
    return columns, gap


# --- plain log ------------------------------------------------------------------------------------
#
# At most one line per step and one per interval; the first and last step, evaluations and notices
# always show. A learner that waits says so, less and less often while nothing changes.


_STEP_LINE_S = 5.0
"""Seconds between two lines of steps, at least."""
_MAX_NOTICES_PER_UPDATE = 5
_WAIT_GROWTH = 2
_MAX_WAIT_INTERVAL_S = 300.0


class PlainLog:
    """Write the lines that `lines_for` finds worth writing to a console."""

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        """Write to `console` by the clock `now`."""
        self._console = console
        self._now = now
        self._pace = RemainingTime()
        self._step_shown = -1
        self._step_seen = -1
        self._shown_at = float("-inf")
        self._step_at = now()
        self._wait_interval_s = 2 * _STEP_LINE_S
        self._evals: set[tuple[int, float, float]] | None = None
        self._notices: Sequence[str] = ()

    def paint(self, snapshot: Snapshot) -> None:
        """Write whatever is new in `snapshot`."""
        self._write(self.lines_for(snapshot))

    def finish(self, snapshot: Snapshot) -> None:
        """Write what is left to say, the last step in any case."""
        lines = self.lines_for(snapshot)
        if self._is_news(snapshot):
            lines.append(self._step_line(snapshot))
        self._write(lines)

    def lines_for(self, snapshot: Snapshot) -> list[str]:
        """Return the lines to write now: notices, evaluations, the step or the wait."""
        now = self._now()
        self._pace.observe(snapshot)
        stamp = f"[{clock(snapshot.elapsed_s)}]"
        lines = [f"{stamp} {line}" for line in self._new_notices(snapshot.notices)]
        if self._evals is None:  # what was evaluated before a resume is no news
            earlier = snapshot.eval_history if snapshot.resumed_at else ()
            self._evals = {point for point in earlier if point[0] <= snapshot.resumed_at}
        for point in snapshot.eval_history:
            if point not in self._evals:
                self._evals.add(point)
                step, sampled, greedy = point
                rates = f"{sampled:.3f} sampled, {greedy:.3f} greedy"
                if num_errors := snapshot.eval_errors.get(step):
                    rates += f"; {num_errors} rewards failed and count as 0"
                name = held_out(snapshot.evals_are_rates)
                lines.append(f"{stamp} eval at step {step}: {name} {rates}")
        if snapshot.step != self._step_seen:
            self._step_seen, self._step_at = snapshot.step, now
            self._wait_interval_s = 2 * _STEP_LINE_S
        is_due = now - self._shown_at >= _STEP_LINE_S or snapshot.step >= snapshot.max_steps
        if self._is_news(snapshot) and is_due:
            self._shown_at = now
            lines.append(self._step_line(snapshot))
        elif (
            snapshot.waiting_for
            and now - max(self._shown_at, self._step_at) >= self._wait_interval_s
        ):
            self._shown_at = now
            self._wait_interval_s = min(self._wait_interval_s * _WAIT_GROWTH, _MAX_WAIT_INTERVAL_S)
            lines.append(
                f"{stamp} step {snapshot.step}/{snapshot.max_steps}  no step for "
                f"{clock(now - self._step_at)}, the learner waits for {clean(snapshot.waiting_for)}"
            )
        return lines

    def _is_news(self, snapshot: Snapshot) -> bool:
        """Return whether a step's row was written that no line has shown yet."""
        return snapshot.last_step is not None and snapshot.last_step.step != self._step_shown

    def _step_line(self, snapshot: Snapshot) -> str:
        """Return a line with the newest step's own row, then with the state of the run."""
        last = snapshot.last_step
        assert last is not None
        self._step_shown = last.step
        parts = [f"[{clock(snapshot.elapsed_s)}] step {last.step}/{snapshot.max_steps}"]
        parts.append(f"reward {last.reward:.3f}")
        if last.mean_staleness is not None:
            bound = f"max {last.max_staleness} of {snapshot.max_staleness}"
            parts.append(f"staleness {last.mean_staleness:.2f} ({bound})")
        parts.append(f"{short_count(last.accepted_tokens_per_s)} tokens/s")
        parts.append(f"{last.seconds:.3g} s")
        return f"{'  '.join(parts)}  | {'  '.join(self._run_parts(snapshot))}"

    def _run_parts(self, snapshot: Snapshot) -> list[str]:
        """Return what is of the run, not of one step."""
        parts = []
        workers = [node for node in snapshot.nodes if node.role == "worker"]
        num_lost = sum(node.state.startswith("lost") for node in workers)
        lost = f" ({num_lost} lost)" if num_lost else ""
        num_alive = len(workers) - num_lost
        parts.append(f"{num_alive} worker{'' if num_alive == 1 else 's'}{lost}")
        parts.append(f"idle {idle_shares(snapshot)}")
        if (cost := snapshot.cost) is not None:
            standby = f", {cost.num_standby} on standby" if cost.num_standby else ""
            parts.append(f"${cost.per_h:.2f}/h (${cost.total:.2f} so far{standby})")
        refused = [
            f"{clean(reason)} {count}" for reason, count in snapshot.refused.items() if count
        ]
        if refused:
            parts.append(f"refused {', '.join(refused)}")
        eta_s = self._pace.eta_s(snapshot)
        if eta_s is not None and snapshot.step < snapshot.max_steps:
            parts.append(f"ETA {clock(eta_s)}")
        return parts

    def _new_notices(self, notices: Sequence[str]) -> list[str]:
        """The notices that were not in the last snapshot; only the newest few of a flood."""
        known, self._notices = list(self._notices), notices
        # The window slides: what is known is the longest end of the old that starts the new one.
        num_known = min(len(known), len(notices))
        while num_known and known[-num_known:] != list(notices[:num_known]):
            num_known -= 1
        new = [clean(line) for line in notices[num_known:]]
        num_hidden = len(new) - _MAX_NOTICES_PER_UPDATE
        if num_hidden <= 0:
            return new
        return [f"({num_hidden} earlier notices not shown)", *new[num_hidden:]]

    def _write(self, lines: Sequence[str]) -> None:
        """Write each line whole; what the console's encoding lacks becomes a question mark."""
        encoding = self._console.encoding
        for line in lines:
            encodable = line.encode(encoding, "replace").decode(encoding)
            self._console.print(
                encodable, markup=False, highlight=False, emoji=False, soft_wrap=True
            )


# --- full-screen view -----------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_MIN_SIDE_BY_SIDE = 56
"""Below this width a curve and a histogram beside each other are both unreadable."""
_MAX_CHART_ROWS = 14
_MAX_NOTICES = 6
REDRAW_S = 0.25
"""Seconds between two states of the screen, at least."""
_CLOSE_TIMEOUT_S = 2.0
"""How long a terminal that takes no output may hold up the end of the run."""

OUTPUT_ERRORS = (OSError, ValueError, ConsoleError, LiveError, SystemExit)
"""Errors that writing to a terminal can raise: gone (EIO), not ready, closed, not encodable.

rich reports a pipe without a reader as SystemExit."""


def render_live(
    snapshot: Snapshot,
    width: int,
    *,
    height: int | None = None,
    eta_s: float | None = None,
) -> Group:
    """Draw `snapshot` as rows of text that fill `width` and fit into `height`."""
    width = max(width, 1)
    rows_left = height if height is not None else 2 + _MAX_CHART_ROWS + len(snapshot.nodes) + 20
    title = header(snapshot, width, eta_s=eta_s)
    num_wait_rows = 2 if width < 100 and rows_left >= 22 else 1
    state = status(snapshot, width, num_wait_rows=num_wait_rows)
    refused = refusals(snapshot.refused, width)
    told = notices(snapshot.notices[-_MAX_NOTICES:], width)
    rows_of_newest, rows_of_notices = len(told[-1]) if told else 0, sum(map(len, told))
    # Height of each part, the most important first; then air between the parts; then larger parts.
    rows_left -= len(title) + len(state)
    num_nodes = len(snapshot.nodes)
    wanted = {
        "chart": (6, _MAX_CHART_ROWS),
        "table": (min(num_nodes, 5) + 1, num_nodes + 1),
        "refused": (len(refused), len(refused)),
        "notices": (rows_of_newest, rows_of_notices),
        "gaps": (4 if refused or told else 3,) * 2,
    }
    granted = _share_out(wanted, rows_left)
    table = node_table(snapshot.nodes, width, granted["table"])
    charts = _charts(snapshot, width, granted["chart"])
    foot = refused[: granted["refused"]] + _newest_whole(told, granted["notices"])
    rows = _join([title, charts, state, table, foot], granted["gaps"])
    return Group(*(rows if height is None else rows[:height]))


def _newest_whole(notices: list[list[Text]], num_rows: int) -> list[Text]:
    """Return the rows of the newest notices that fit as a whole, and of the newest in any case."""
    rows: list[Text] = []
    for notice in reversed(notices):
        if rows and len(rows) + len(notice) > num_rows:
            break
        rows = notice + rows
    return rows[:num_rows]


def _share_out(wanted: Mapping[str, tuple[int, int]], num_rows: int) -> dict[str, int]:
    """Grant each part its least rows while there are any, then the growing ones their most.

    Args:
        wanted: (least, most) rows per part, the most telling part first.
        num_rows: rows to share out.
    """
    granted = dict.fromkeys(wanted, 0)
    for name, limit in [
        *((name, least) for name, (least, _) in wanted.items()),
        *((name, wanted[name][1]) for name in ("table", "notices", "chart")),
    ]:
        extra = max(min(limit - granted[name], num_rows), 0)
        granted[name] += extra
        num_rows -= extra
    return granted


def _charts(snapshot: Snapshot, width: int, height: int) -> list[RenderableType]:
    """The reward curve, and beside it the histogram of staleness where both have room."""
    if width < _MIN_SIDE_BY_SIDE or height < 4:
        return [*reward_chart(snapshot, width, height)]
    right_width = min(max(width * 3 // 10, 21), 44)
    left_width = width - right_width - 3
    beside = Table.grid(padding=(0, 3, 0, 0))
    for column_width in (left_width, right_width):
        beside.add_column(width=column_width)
    beside.add_row(
        Group(*reward_chart(snapshot, left_width, height)),
        Group(*staleness_histogram(snapshot, right_width, height)),
    )
    return [beside]


def _join(blocks: Iterable[Sequence[RenderableType]], num_gaps: int) -> list[RenderableType]:
    """All rows of `blocks` with a blank row before each block but the first, `num_gaps` at most."""
    rows: list[RenderableType] = []
    for block in blocks:
        if block and rows and num_gaps > 0:
            rows.append(Text())
            num_gaps -= 1
        rows += block
    return rows


class _Frame:
    """A snapshot that takes the size of the terminal at the moment it is drawn."""

    def __init__(self, snapshot: Snapshot, eta_s: float | None) -> None:
        self._snapshot = snapshot
        self._eta_s = eta_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the console's present size and encoding."""
        # The last row stays free: a line end written there would scroll the first one away.
        height = console.size.height - 1
        view = render_live(self._snapshot, options.max_width, height=height, eta_s=self._eta_s)
        yield InAscii(view) if options.ascii_only else view


class _ScreenPainter:
    """Draw on the terminal's alternate screen, which a resize cannot smear."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = RemainingTime()
        self._live: Live | None = None

    def paint(self, snapshot: Snapshot) -> None:
        """Draw `snapshot` over the one before."""
        self._pace.observe(snapshot)
        frame = _Frame(snapshot, self._pace.eta_s(snapshot))
        if self._live is None:
            self._live = Live(
                frame,
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)
        else:
            self._live.update(frame, refresh=True)

    def finish(self, snapshot: Snapshot) -> None:
        """Leave the alternate screen and print the last frame where the user will look."""
        if self._live is not None:
            self._live.stop()
        self._console.print(_Frame(snapshot, self._pace.eta_s(snapshot)))


class LiveView:
    """Show the newest snapshot on a console, at most once in `REDRAW_S`.

    Use as a context manager or call `close`. No method raises because of the terminal: resized,
    paused, gone, or of an encoding without block characters.
    """

    def __init__(self, console: Console, *, mode: Literal["auto", "on", "off"] = "auto") -> None:
        """Start the drawing thread; nothing is shown before the first update.

        Args:
            console: where to draw.
            mode: "auto" draws on a terminal and logs lines elsewhere; "on" and "off" insist.
        """
        can_draw = console.is_terminal and not console.is_dumb_terminal
        is_drawn = mode == "on" or (mode == "auto" and can_draw)
        self.failure: str | None = None
        """Why the view fell silent; None while it works."""
        self._painter = _ScreenPainter(console) if is_drawn else PlainLog(console)
        self._newest: Snapshot | None = None
        self._has_news = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-view", daemon=True)
        self._thread.start()

    def update(self, snapshot: Snapshot) -> None:
        """Hand over the newest state; returns at once."""
        self._newest = snapshot
        self._has_news.set()

    def close(self) -> None:
        """Show the last state and give the terminal back; bounded, and harmless when repeated."""
        self._is_closing.set()
        self._has_news.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        """Draw until closed, in the drawing thread."""
        while not self._is_closing.is_set():
            self._has_news.wait()
            self._has_news.clear()
            if self._newest is not None and self.failure is None and not self._is_closing.is_set():
                with self._surviving():
                    self._painter.paint(self._newest)
            self._is_closing.wait(REDRAW_S)
        # Also after a failure: whatever can still be restored of the terminal is.
        if self._newest is not None:
            with self._surviving():
                self._painter.finish(self._newest)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Note a failure of the body's output; the run goes on."""
        try:
            yield
        except OUTPUT_ERRORS as error:
            if self.failure is None:
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("The live view stopped, the run goes on: %s", self.failure)


# --- status of a worker ---------------------------------------------------------------------------
#
# Where standard error is no terminal the same text is a line of the log now and then.


LOG_S = 60.0
"""Seconds between two lines of a log."""
RATE_WINDOW_S = 10.0
"""Seconds over which tokens per second are averaged, at least."""

_ERASE = "\r\x1b[K"


class StatusLine(logging.StreamHandler[TextIO]):
    """Writes log lines to a stream, and below them a status line if the stream is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        """Begin without a status."""
        super().__init__(stream)
        self.is_live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        """Whether `show` shows anything."""
        self._status = ""

    def show(self, status: str) -> None:
        """Show a status in place of the one before; an empty one erases it."""
        if not self.is_live:
            return
        self.acquire()
        try:
            # A line that wraps could not be erased.
            self._status = status[: shutil.get_terminal_size().columns - 1]
            self.stream.write(_ERASE + self._status)
            self.flush()
        except OSError:  # the terminal is gone
            self.is_live = False
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log line above the status; the caller holds the handler's lock."""
        status = self._status
        if status:
            self.show("")
        super().emit(record)
        if status:
            self.show(status)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- logging's name
        """Say nothing of a terminal that is gone: there is nowhere to."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class WorkerStatus:
    """Tells tokens per second, groups and version of a worker on its terminal, or in its log."""

    def __init__(self, line: StatusLine, log: logging.Logger) -> None:
        """Begin without a measurement."""
        self._line, self._log = line, log
        self._told_at: float | None = None
        self._sampled: deque[tuple[float, int]] = deque()

    def tell(self, view: WorkerView, *, now: float) -> None:
        """Show a state, seconds on any clock; without a terminal one in LOG_S is logged."""
        text = self.text(view, now=now)
        if self._line.is_live:
            self._line.show(text)
        elif self._told_at is None:
            self._told_at = now  # the log has just said that it starts
        elif now >= self._told_at + LOG_S:
            self._told_at = now
            self._log.info("%s", text)

    def text(self, view: WorkerView, *, now: float) -> str:
        """Return the status at an instant, seconds on any clock."""
        self._sampled.append((now, view.num_tokens))
        while len(self._sampled) > 2 and self._sampled[1][0] <= now - RATE_WINDOW_S:
            self._sampled.popleft()
        (since, before), (_, newest) = self._sampled[0], self._sampled[-1]
        rate = (newest - before) / (now - since) if now > since else 0.0
        groups = "group" if view.num_groups == 1 else "groups"
        return (
            f"{view.version}  {rate:,.0f} tokens/s  {view.num_groups} {groups} delivered  "
            f"{view.activity}"
        )
