"""Draws the figures of a report, and a run's learning curve, as PNG images.

A figure of one run also shows details such as a curve's spread, parts or bound. A figure of several
runs has one line per run. Figures without data are left out.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from echo.core.monitoring.metrics import held_out
from echo.records.run_files import MetricsRow
from echo.ui.drawing import clean
from echo.ui.plots import FAINT, new_figure, save_figure, smoothed, tidy
from echo.ui.report.run import ReportedRun
from echo.ui.stalls import WAIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#4c72b0", "#dd8452", "#2a9d5c", "#b5479b", "#8172b3", "#937860", "#c44e52", "#64b5cd")
"""Colours of lines, in the order in which they are used."""
WIDTH, HEIGHT = 6.6, 3.1
"""Size of a figure, inches."""
DPI = 130
"""Dots per inch of a figure: 858 pixels for its width. With far fewer, the labels would be hard to
read. With far more, the report would be large."""
MAX_BARS = 20
"""Largest number of bars in a figure. If there are more, only the longest bars are drawn."""
MAX_STALENESS_SHOWN = 8
"""Tokens with at least this staleness are drawn together as one part."""
MAX_COLUMNS = 200
"""Largest number of columns in a figure that shows steps. If a run has more steps, several steps
share a column."""
RESUMED = ":"
"""Style of the vertical line that marks a resume of the run."""
LEGEND_CHARACTERS = 84
"""Number of characters that fit into a line of a legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure that a report shows."""

    name: str
    """Name of the PNG file, without its suffix."""
    section: str
    """Heading of the part of the report that contains the figure."""
    title: str
    note: str
    """A sentence that explains how to read the figure; may be empty."""
    png: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """A figure that shows metrics over the optimizer steps."""

    name: str
    section: str
    title: str
    unit: str
    metrics: Mapping[str, str]
    """For the name of each metric, its label. A comparison of runs draws only the first metric."""
    note: str = ""
    is_log: bool = False
    is_share: bool = False
    """Whether the values are shares. Shares are shown in percent."""
    is_whole: bool = True
    """Whether the axis of shares ends at 100 %. Otherwise it ends at the largest value."""


LEARNING, OFF_POLICY, TIME = "Learning", "Staleness and off-policy", "The learner's time"
NETWORK, COST = "Network", "Cost"

CURVES = (
    StepCurve(
        name="useful_groups",
        section=LEARNING,
        title="Groups by their rewards",
        unit="share of groups",
        metrics={
            "groups/useful": "rewards differ",
            "groups/all_right": "all equal, above 0",
            "groups/all_wrong": "all equal, 0 or less",
        },
        note="Only groups whose rewards differ teach anything.",
        is_share=True,
    ),
    StepCurve(
        name="lengths",
        section=LEARNING,
        title="Length of completions",
        unit="tokens",
        metrics={"completions/mean_length": "mean"},
    ),
    StepCurve(
        name="entropy",
        section=LEARNING,
        title="Entropy of the policy",
        unit="nats per token",
        metrics={"entropy/mean": "mean"},
        note="A fall to 0 means that the policy has collapsed to single answers.",
    ),
    StepCurve(
        name="grad_norm",
        section=LEARNING,
        title="Norm of the gradient, before it is clipped",
        unit="norm",
        metrics={"grad_norm": "norm"},
    ),
    StepCurve(
        name="ess",
        section=OFF_POLICY,
        title="Effective sample size",
        unit="share of the samples",
        metrics={"ess": "of tokens", "ess/rollouts": "of whole rollouts"},
        note="100 % is on-policy.",
        is_share=True,
    ),
    StepCurve(
        name="is_ratio",
        section=OFF_POLICY,
        title="Importance ratio, learner over sampler",
        unit="ratio",
        metrics={"is_ratio/max": "largest of a token", "is_ratio/mean": "mean"},
        note="1 is on-policy.",
        is_log=True,
    ),
    StepCurve(
        name="clipped",
        section=OFF_POLICY,
        title="Clipped tokens",
        unit="share of tokens",
        metrics={
            "clip_ratio/mean": "all",
            "clip_ratio/low": "at the lower end",
            "clip_ratio/high": "at the upper end",
        },
        is_share=True,
        is_whole=False,
    ),
    StepCurve(
        name="mismatch",
        section=OFF_POLICY,
        title="Mismatch between sampler and learner",
        unit="KL, nats per token",
        metrics={"mismatch_kl": "mean"},
    ),
    StepCurve(
        name="tokens_per_s",
        section=TIME,
        title="Accepted completion tokens",
        unit="tokens per second",
        metrics={"perf/accepted_tokens_per_s": "accepted"},
    ),
    StepCurve(
        name="cost_per_million_tokens",
        section=COST,
        title="Cost per accepted token, since the start of the run",
        unit="$ per million accepted tokens",
        metrics={"cost/per_million_tokens": "since the start"},
    ),
    StepCurve(
        name="cost_total",
        section=COST,
        title="Money spent",
        unit="$",
        metrics={"cost/total": "spent"},
    ),
)

SECTIONS = (LEARNING, OFF_POLICY, TIME, NETWORK, COST)
Draw = Callable[["Axes", Sequence[ReportedRun]], bool]
"""The type of a function that draws runs. The function returns whether there was data to draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure that needs a drawing function of its own."""

    name: str
    section: str
    title: str
    note: str = ""
    draw: Draw
    compares: bool = True
    """Whether the function can also draw several runs together."""


def draw_all(runs: Sequence[ReportedRun]) -> list[Plot]:
    """Return the figures of one run or of a comparison, in the order of the report.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    wanted = [*(each for each in DRAWINGS if len(runs) == 1 or each.compares)]
    wanted += [_drawing_of(curve) for curve in CURVES]
    plots = [plot for each in wanted if (plot := _plot(each, runs)) is not None]
    return sorted(plots, key=lambda plot: SECTIONS.index(plot.section))


def _plot(drawing: Drawing, runs: Sequence[ReportedRun]) -> Plot | None:
    figure = new_figure((WIDTH, HEIGHT), dpi=DPI, extra="learner", wanted_by="a report")
    axes = figure.subplots()
    if not drawing.draw(axes, runs):
        return None
    axes.set_title(drawing.title, fontsize=12, loc="left")
    return Plot(
        name=drawing.name,
        section=drawing.section,
        title=drawing.title,
        note=drawing.note,
        png=_png(figure),
    )


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def learning_curve(run: ReportedRun, out_png: Path) -> Path:
    """Draw a run's rewards and staleness to a PNG file. Return the path of the file.

    Raises:
        ConfigError: if matplotlib is not installed.
        StorageError: if the PNG cannot be written.
    """
    figure = new_figure((10, 4.2), dpi=144, extra="learner", wanted_by="the learning curve")
    figure.suptitle(run.name)
    grid = figure.add_gridspec(1, 2)
    for place, draw in enumerate((_reward, _staleness)):
        axes = figure.add_subfigure(grid[place]).subplots()
        if not draw(axes, [run]):
            axes.set_axis_off()
    return save_figure(figure, out_png)


# --- metrics by step ------------------------------------------------------------------------------


def _drawing_of(curve: StepCurve) -> Drawing:
    return Drawing(
        name=curve.name,
        section=curve.section,
        title=curve.title,
        note=curve.note,
        draw=lambda axes, runs: _draw_curve(curve, axes, runs),
    )


def _draw_curve(curve: StepCurve, axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    lines = list(_lines(curve, runs))
    if not lines:
        return False
    for color, (label, points) in zip(_colors(len(lines)), lines, strict=True):
        _line(axes, points, color, label)
    values = [y for _, points in lines for _, y in points]
    first = next(iter(curve.metrics.values()))
    is_part = len(runs) > 1 and len(curve.metrics) > 1
    axes.set_ylabel(f"{curve.unit}: {first}" if is_part else curve.unit)
    if curve.is_log and min(values) > 0:
        _set_limits_around_one(axes, values)
    elif curve.is_share:
        _percent(axes)
        axes.set_ylim(0, max(1.0, *values) * 1.02 if curve.is_whole else None)
    else:
        axes.set_ylim(min(0.0, *values), 1.05 * max(1e-9, *values))
    _by_step(axes, runs)
    if len(lines) > 1 or len(runs) > 1:
        _legend(axes)
    return True


def _lines(
    curve: StepCurve, runs: Sequence[ReportedRun]
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield the label and the points of each line to draw.

    For a single run, each metric has a line. For several runs, each run has a line. Lines without
    points are left out.
    """
    for run in runs:
        for metric, label in list(curve.metrics.items())[: 1 if len(runs) > 1 else None]:
            points = _points(run.history.train, metric)
            if points:
                yield (short(run.name) if len(runs) > 1 else label), points


def _points(rows: Sequence[MetricsRow], metric: str) -> list[tuple[float, float]]:
    return [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]


def _line(axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str) -> None:
    """Draw a line through the values of successive steps.

    A step without a value interrupts the line. A value with none beside it is a dot.
    """
    steps = {step for step, _ in points}
    alone = [step - 1 not in steps and step + 1 not in steps for step, _ in points]
    xs, ys = _interrupted(points)
    axes.plot(xs, ys, color=color, linewidth=1.6, label=label)
    dots = [point for point, is_alone in zip(points, alone, strict=True) if is_alone]
    if dots:
        axes.plot(*zip(*dots, strict=True), "o", color=color, markersize=3)


def _interrupted(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the steps and the values of the points, with NaN where steps have no value."""
    found = list(points[:1])
    for before, point in pairwise(points):
        if point[0] > before[0] + 1:
            found.append((before[0] + 1, math.nan))
        found.append(point)
    return [x for x, _ in found], [y for _, y in found]


def _smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points, with the running mean in place of each value."""
    return list(zip((x for x, _ in points), smoothed([y for _, y in points]), strict=True))


def _line_of_each(
    axes: Axes,
    runs: Sequence[ReportedRun],
    points_of: Callable[[ReportedRun], Sequence[tuple[float, float]]],
) -> bool:
    """Draw a line for each run that has points. Return whether any line was drawn."""
    lines = [(run.name, points_of(run)) for run in runs]
    for color, (name, points) in zip(_colors(len(lines)), lines, strict=True):
        if points:
            _line(axes, points, color, short(name))
    return any(points for _, points in lines)


def _set_limits_around_one(axes: Axes, values: Sequence[float]) -> None:
    """Show all values and 1 on a logarithmic axis.

    If the values are close to each other, the axis is linear, because a logarithmic one would have
    one tick or two.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(*values, 1.0), max(*values, 1.0)
    axes.set_ylim(low / 1.1, high * 1.1)
    if high / low < 5:
        return
    axes.set_yscale("log")
    subs = (1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _by_step(axes: Axes, runs: Sequence[ReportedRun]) -> None:
    """Label the axis of steps. For a single run, mark where the run was resumed."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step")
    axes.set_xlim(0, max(1, *(run.step for run in runs)) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes, lines="y")
    if len(runs) == 1:
        for began in runs[0].lineages[1:]:
            axes.axvline(began.fork_step, color="#888888", linestyle=RESUMED, linewidth=1)
            axes.annotate(
                "resumed", (began.fork_step, 1), xycoords=("data", "axes fraction"),
                xytext=(2, -2), textcoords="offset points", fontsize=7, va="top", color="#666666",
            )  # fmt: skip


def _legend(axes: Axes, *, title: str | None = None) -> None:
    handles, labels = axes.get_legend_handles_labels()
    longest = max(len(label) for label in labels)
    num_columns = max(1, min(len(labels), LEGEND_CHARACTERS // (longest + 6)))
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(
        handles, labels, title=title, frameon=False, fontsize=9, title_fontsize=9,
        loc="outside lower center", ncols=num_columns,
    )  # fmt: skip


def _percent(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _colors(number: int) -> list[str]:
    return [COLORS[place % len(COLORS)] for place in range(number)]


def _reward(axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    """Draw the mean rewards of steps and of evaluations.

    For a single run, also draw the spread.
    """
    drawn = False
    values: list[float] = []
    for color, run in zip(_colors(len(runs)), runs, strict=True):
        rows = [row for row in run.history.train if row["reward/mean"] is not None]
        points = _points(rows, "reward/mean")
        means = [mean for _, mean in points]
        name = "mean of the steps, smoothed" if len(runs) == 1 else short(run.name)
        if rows and len(runs) == 1:
            spreads = [(row["step"], row.get("reward/std") or 0.0) for row in rows]
            (steps, middle), (_, spread) = _interrupted(points), _interrupted(spreads)
            low = [mean - std for mean, std in zip(middle, spread, strict=True)]
            high = [mean + std for mean, std in zip(middle, spread, strict=True)]
            label = "± standard deviation"
            axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0, label=label)
            axes.plot(steps, middle, color=color, alpha=0.35, linewidth=0.8)
        if rows:
            _line(axes, _smooth(points), color, name)
        drawn |= bool(rows)
        values += means
        drawn |= _evaluations(axes, run, None if len(runs) == 1 else color, values)
    if not drawn:
        return False
    if all(0 <= value <= 1 for value in values):
        axes.set_ylim(0, 1)
    axes.set_ylabel("reward")
    _by_step(axes, runs)
    _legend(axes)
    return True


PART = re.compile(r"reward/(.+)/mean")
"""Matches the name of a metric that is the mean of one part of the reward."""


def _reward_parts(axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    rows = runs[0].history.train
    parts = {name: part[1] for row in rows for name in row if (part := PART.fullmatch(name))}
    names = sorted(parts)[: len(COLORS)]
    for color, name in zip(_colors(len(names)), names, strict=True):
        points = _points(rows, name)
        if points:
            _line(axes, _smooth(points), color, short(parts[name]))
    if not names:
        return False
    axes.set_ylabel("mean")
    _by_step(axes, runs)
    _legend(axes)
    return True


def _evaluations(axes: Axes, run: ReportedRun, color: str | None, values: list[float]) -> bool:
    """Draw the held-out scores of a run, and add them to `values`.

    In a comparison of runs, `color` is the colour of the run, and greedy scores are left out.
    """
    evaluations = run.history.evaluations
    name = held_out(run.history.evals_are_rates)
    steps = [each.step for each in evaluations]
    sampled, greedy = [e.sampled for e in evaluations], [e.greedy for e in evaluations]
    lines = [(f"{name}, sampled", sampled, "o-", color or COLORS[2])]
    if color is None:
        lines.append((f"{name}, greedy", greedy, "D--", COLORS[3]))
    for label, scores, style, shade in lines if evaluations else ():
        shown = label if color is None else f"{short(run.name)}, {label}"
        [line] = axes.plot(
            steps, scores, style, color=shade, label=shown, markersize=4, linewidth=1
        )
        line.set_clip_on(False)
        values += scores
    return bool(evaluations)


def _staleness(axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    """Draw which share of the trained tokens has each staleness.

    For several runs, draw the mean staleness.
    """
    if len(runs) > 1:
        if not _line_of_each(axes, runs, lambda r: _points(r.history.train, "staleness/mean")):
            return False
        axes.set_ylabel("mean, optimizer steps")
        axes.set_ylim(bottom=0)
        _by_step(axes, runs)
        _legend(axes)
        return True
    rows = [row for row in runs[0].history.train if row.get("staleness/hist")]
    if not rows:
        return False
    tokens = [
        {int(lag): count for lag, count in row["staleness/hist"].items() if count} for row in rows
    ]
    top = min(max(max(each, default=0) for each in tokens), MAX_STALENESS_SHOWN)
    labels = [str(lag) for lag in range(top)] + [f"{top} or more" if top else "0"]
    if max(max(each, default=0) for each in tokens) == top:
        labels[-1] = str(top)
    shares = [[_share(each, lag, is_last=lag == top) for each in tokens] for lag in range(top + 1)]
    _stack(axes, [row["step"] for row in rows], shares, labels, _shades(top + 1))
    axes.set_ylabel("share of trained tokens")
    axes.set_ylim(0, 1)
    _percent(axes)
    _by_step(axes, runs)
    summary = runs[0].summary
    title = "staleness, steps" + ("" if summary is None else f" (bound {summary.bound})")
    _legend(axes, title=title)
    return True


def _share(tokens: Mapping[int, float], lag: int, *, is_last: bool) -> float:
    count = sum(n for at, n in tokens.items() if at == lag or (is_last and at > lag))
    return count / max(sum(tokens.values()), 1e-9)


def _shades(number: int) -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    cmap = colormaps["Blues"]
    return [to_hex(cmap(0.25 + 0.7 * place / max(1, number - 1))) for place in range(number)]


def _stack(
    axes: Axes,
    steps: Sequence[float],
    parts: Sequence[Sequence[float]],
    labels: Sequence[str],
    colors: Sequence[str],
) -> None:
    """Draw a stack of bars for each step.

    If there are many steps, several steps share a stack, which shows their means.
    """
    size = -(-len(steps) // MAX_COLUMNS)
    starts = range(0, len(steps), size)
    places = [sum(steps[at : at + size]) / len(steps[at : at + size]) for at in starts]
    bottom = [0.0] * len(places)
    for part, label, color in zip(parts, labels, colors, strict=True):
        heights = [sum(part[at : at + size]) / len(part[at : at + size]) for at in starts]
        axes.bar(places, heights, size, bottom=bottom, color=color, label=label, linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


# --- the learner's time ---------------------------------------------------------------------------


_TRAINS, _WAITS, _PUBLISHES, _OTHER = COLORS[0], COLORS[1], COLORS[2], FAINT
_STAGE_COLORS = ("#dd8452", "#8172b3", "#c44e52", "#d9b23c", "#e377c2", "#8c564b", "#64b5cd")


def _timeline(axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    run = runs[0]
    steps = [row for row in run.steps if row.get("time/step") is not None]
    if not steps:
        return False
    start = min(row["time"] - row["time/step"] for row in steps)
    start = min([start, *(began.at for began in run.lineages if began.at)])
    end = max(row["time"] for row in run.rows)
    unit, seconds = _time_unit(end - start)
    bands: dict[str, tuple[str, list[tuple[float, float]]]] = {
        "trains": (_TRAINS, [(r["time"] - (s := r.get("time/train") or 0), s) for r in steps]),
        "waits": (_WAITS, [_wait_span(row) for row in steps]),
        "makes versions": (
            _PUBLISHES,
            [(r["time"] - r["time/step"], r.get("time/publish") or 0.0) for r in steps],
        ),
        "evaluates": (
            COLORS[3],
            [(r["time"] - r["eval/seconds"], r["eval/seconds"]) for r in run.rows
             if r.get("eval/seconds")],
        ),
    }  # fmt: skip
    names = [name for name, (_, spans) in bands.items() if any(length for _, length in spans)]
    for place, name in enumerate(reversed(names)):
        color, spans = bands[name]
        shown = [((at - start) / seconds, length / seconds) for at, length in spans if length]
        axes.broken_barh(shown, (place + 0.15, 0.7), color=color, linewidth=0)
    axes.set_yticks([place + 0.5 for place in range(len(names))], names[::-1])
    axes.set_ylim(0, len(names))
    axes.set_xlim(0, max(end - start, 1e-9) / seconds)
    axes.set_xlabel(f"{unit} since the start")
    for began in run.lineages[1:]:
        axes.axvline((began.at - start) / seconds, color="#666666", linestyle=RESUMED, linewidth=1)
    tidy(axes)
    return True


def _wait_span(row: MetricsRow) -> tuple[float, float]:
    """Return when a step's wait starts and how long it lasts.

    The wait ends when training begins.
    """
    waited_s = min(row.get("time/wait_for_batch") or 0.0, row["time/step"])
    return row["time"] - (row.get("time/train") or 0.0) - waited_s, waited_s


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _step_times(axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    rows = [row for row in runs[0].history.train if row.get("time/step") is not None]
    if not rows:
        return False
    parts: dict[str, tuple[str, list[float]]] = {
        "trains": (_TRAINS, [row.get("time/train") or 0.0 for row in rows]),
        "makes versions": (_PUBLISHES, [row.get("time/publish") or 0.0 for row in rows]),
    }
    stages = sorted({name for row in rows for name in row if name.startswith(WAIT)})
    for place, name in enumerate(stages):
        color = _STAGE_COLORS[place % len(_STAGE_COLORS)]
        label = f"waits: {name.removeprefix(WAIT)}"
        parts[label] = (color, [row.get(name) or 0.0 for row in rows])
    known = [sum(values[at] for _, values in parts.values()) for at in range(len(rows))]
    if not stages:
        waits = [row.get("time/wait_for_batch") or 0.0 for row in rows]
        parts["waits for groups"] = (_WAITS, waits)
        known = [done + waited for done, waited in zip(known, waits, strict=True)]
    rest = [max(0.0, row["time/step"] - done) for row, done in zip(rows, known, strict=True)]
    parts["other"] = (_OTHER, rest)
    parts = {name: part for name, part in parts.items() if any(part[1])}
    colors, values = [color for color, _ in parts.values()], [each for _, each in parts.values()]
    _stack(axes, [row["step"] for row in rows], values, list(parts), colors)
    _limit_height(axes, [row["time/step"] for row in rows])
    axes.set_ylabel("seconds per step")
    _by_step(axes, runs)
    _legend(axes)
    return True


def _limit_height(axes: Axes, heights: Sequence[float]) -> None:
    """If a few high bars would make all other bars too small, cut off the tops of the high bars."""
    usual, highest = median(heights), max(heights)
    if highest <= 6 * usual:
        axes.set_ylim(0, 1.05 * highest)
        return
    limit = 6 * usual
    axes.set_ylim(0, limit)
    num_cut = sum(height > limit for height in heights)
    axes.annotate(
        f"{num_cut} longer, up to {highest:.3g} s", (1, 1), xycoords="axes fraction",
        ha="right", va="bottom", fontsize=8, color="#666666",
    )  # fmt: skip


def _waiting(axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    def shares(run: ReportedRun) -> list[tuple[float, float]]:
        return _smooth(
            [
                (row["step"], min(1.0, (row.get("time/wait_for_batch") or 0) / row["time/step"]))
                for row in run.history.train
                if row.get("time/step")
            ]
        )

    if not _line_of_each(axes, runs, shares):
        return False
    axes.set_ylabel("share of the time")
    axes.set_ylim(0, 1)
    _percent(axes)
    _by_step(axes, runs)
    if len(runs) > 1:
        _legend(axes)
    return True


# --- network and cost -----------------------------------------------------------------------------


def _link_bytes(axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    totals = runs[0].totals("links/bytes")
    if not totals:
        return False
    factor, unit = _byte_unit(max(totals.values()))
    _bars(axes, {name: total / factor for name, total in totals.items()}, COLORS[0])
    axes.set_xlabel(f"{unit} of weights, parent > receiver")
    return True


def _goodput(axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    rates: dict[str, list[float]] = {}
    for row in runs[0].rows:
        for name, rate in (row.get("links/goodput") or {}).items():
            rates.setdefault(name, []).append(rate)
    if not rates:
        return False
    factor, unit = _byte_unit(max(max(each) for each in rates.values()))
    slowest = sorted(rates, key=lambda name: median(rates[name]))[:MAX_BARS]
    middles = {name: median(rates[name]) / factor for name in reversed(slowest)}
    ends = {name: max(rates[name]) / factor for name in middles}
    _bars(axes, middles, COLORS[2], ends=ends)
    for place, name in enumerate(sorted(middles, key=lambda name: middles[name])):
        axes.plot(
            [min(rates[name]) / factor, ends[name]], [place, place], color="#333333", linewidth=1.2
        )
    axes.set_xlim(0, 1.1 * max(ends.values()))
    axes.set_xlabel(f"{unit}/s: median, and the range over the steps")
    return True


def _byte_unit(num_bytes: float) -> tuple[float, str]:
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((each for each in units if num_bytes >= each[0]), (1.0, "bytes"))


def _node_costs(axes: Axes, runs: Sequence[ReportedRun]) -> bool:
    totals = {name: cost for name, cost in runs[0].totals("cost/by_node").items() if cost > 0}
    if not totals:
        return False
    _bars(axes, totals, COLORS[3])
    axes.set_xlabel("$, machine and traffic")
    return True


def _bars(
    axes: Axes,
    values: Mapping[str, float],
    color: str,
    *,
    ends: Mapping[str, float] | None = None,
) -> None:
    """Draw a bar for each of the largest values. The largest value is on top.

    Each value is written to the right of its bar. If `ends` is given, each value is written to the
    right of its position in `ends`.
    """
    names = sorted(values, key=lambda name: values[name])[-MAX_BARS:]
    places, least = range(len(names)), max(values.values()) / 1000
    axes.barh(places, [values[name] for name in names], 0.7, color=color)
    for place, name in zip(places, names, strict=True):
        text = f"{values[name]:.3g}" if values[name] > least else "~0"
        axes.annotate(
            text, ((ends or values)[name], place), xytext=(3, 0), fontsize=7,
            va="center", textcoords="offset points", color="#555555",
        )  # fmt: skip
    axes.set_yticks(places, [short(name) for name in names], fontsize=8)
    spare = max(4 - len(names), 0) / 2  # above and below, so that few bars are not thick
    axes.set_ylim(-0.6 - spare, len(names) - 0.4 + spare)
    axes.margins(x=0.1)
    tidy(axes)


def short(name: str) -> str:
    """Return a name as short, printable text that matplotlib draws as it is.

    A leading underscore is removed, because a legend leaves out labels with a leading underscore.
    """
    text = clean(name).replace("$", r"\$").removeprefix("_")
    return text if len(text) <= 40 else f"{text[:38]}..."


DRAWINGS = (
    Drawing(name="reward", section=LEARNING, title="Reward", draw=_reward),
    Drawing(
        name="reward_parts",
        section=LEARNING,
        title="Parts of the reward",
        note="Running means; the sum of the parts is trained.",
        draw=_reward_parts,
        compares=False,
    ),
    Drawing(
        name="staleness",
        section=OFF_POLICY,
        title="Staleness of trained tokens",
        note="The number of optimizer steps between the version that sampled a token and the step "
        "that trains it.",
        draw=_staleness,
    ),
    Drawing(
        name="timeline",
        section=TIME,
        title="What the learner did when",
        note="Steps that a resume has abandoned are included.",
        draw=_timeline,
        compares=False,
    ),
    Drawing(
        name="step_times",
        section=TIME,
        title="What the time of each step went into",
        draw=_step_times,
        compares=False,
    ),
    Drawing(
        name="waiting",
        section=TIME,
        title="Time that the learner waited for groups",
        note="Running mean of a few steps.",
        draw=_waiting,
    ),
    Drawing(
        name="link_bytes",
        section=NETWORK,
        title="Weights sent, by link",
        draw=_link_bytes,
        compares=False,
    ),
    Drawing(
        name="link_goodput",
        section=NETWORK,
        title="Goodput of transfers, by link",
        note="Loopback and short transfers show more than a long one would.",
        draw=_goodput,
        compares=False,
    ),
    Drawing(
        name="cost_by_node",
        section=COST,
        title="Cost by node",
        draw=_node_costs,
        compares=False,
    ),
)
"""The figures that need a drawing function of their own."""
