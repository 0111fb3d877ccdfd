"""Plot a simulated run: what the learner does, how old its tokens are, traffic, money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echo.ui.figures import FAINT, new_figure, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BUSY, _IDLE = "#4c72b0", "#dd8452"
_KINDS = {"weights": "#4c72b0", "rollouts": "#55a868", "control": "#bbbbbb"}
MAX_LINKS = 12
"""Links that are drawn, those with the most bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One optimizer step."""

    begins_s: float
    """When its training began."""
    ends_s: float
    waited_s: float
    staleness: Mapping[int, float]
    """Trained tokens by staleness."""
    cost: float
    """$ spent so far."""
    cost_per_h: float
    """$ per hour for machines and traffic, of late."""
    standby_per_h: float
    """The part of it for workers on standby."""


def simulation_plot(
    steps: Sequence[StepPoint],
    links: Mapping[tuple[str, str, str], float],
    out_png: Path,
    *,
    title: str,
    waits: str,
) -> Path:
    """Plot a run as a PNG.

    Args:
        steps: in order, at least one.
        links: (from, to, kind) -> bytes.
        out_png: file to write; its directory is made if missing.
        title: heading.
        waits: how much the learner waits, in words.

    Returns:
        `out_png`.

    Raises:
        ConfigError: if matplotlib is not installed.
        StorageError: if the PNG cannot be written.
    """
    figure = new_figure((12, 7.5), dpi=120, extra="planner", wanted_by="the plot of the simulation")
    (timeline, staleness), (traffic, cost) = figure.subplots(2, 2)
    _timeline(timeline, steps, waits)
    _staleness(staleness, steps)
    _traffic(traffic, links)
    _cost(cost, steps)
    for axes in (timeline, staleness, traffic, cost):
        tidy(axes)
    figure.suptitle(title, fontsize=11)
    return save_figure(figure, out_png)


def _cost(axes: Axes, steps: Sequence[StepPoint]) -> None:
    """Draw what was spent, and beside it what machines cost per hour and on standby."""
    hours = [step.ends_s / 3600 for step in steps]
    axes.plot(hours, [step.cost for step in steps], color=_BUSY, label="$ spent")
    axes.set_xlabel("hours")
    axes.set_ylabel("$ spent", color=_BUSY)
    axes.set_ylim(bottom=0)
    rates = axes.twinx()
    rates.plot(hours, [step.cost_per_h for step in steps], color=_IDLE, drawstyle="steps-pre")
    standby = [step.standby_per_h for step in steps]
    if any(standby):
        rates.fill_between(hours, standby, color=FAINT, alpha=0.5, linewidth=0, step="pre")
    rates.set_ylabel("$ per hour (grey: on standby)", color=_IDLE)
    rates.set_ylim(bottom=0)


def _timeline(axes: Axes, steps: Sequence[StepPoint], waits: str) -> None:
    """Draw when the learner trains and when it waits, one bar per step."""
    hours = 3600.0
    busy = [(s.begins_s / hours, (s.ends_s - s.begins_s) / hours) for s in steps]
    idle = [((s.begins_s - s.waited_s) / hours, s.waited_s / hours) for s in steps]
    axes.broken_barh(busy, (0.55, 0.35), color=_BUSY, linewidth=0)
    axes.broken_barh(idle, (0.1, 0.35), color=_IDLE, linewidth=0)
    axes.set_yticks([0.275, 0.725], ["waits", "trains"])
    axes.set_ylim(0, 1)
    axes.set_xlabel("hours")
    axes.set_title(f"the learner waits {waits}", fontsize=10)


def _staleness(axes: Axes, steps: Sequence[StepPoint]) -> None:
    """Draw the shares of the tokens of each step by staleness, one upon the other."""
    lags = sorted({lag for step in steps for lag in step.staleness})
    numbers = range(1, len(steps) + 1)
    shares = [
        [step.staleness.get(lag, 0.0) / max(1e-9, sum(step.staleness.values())) for step in steps]
        for lag in lags
    ]
    axes.stackplot(numbers, shares, labels=[str(lag) for lag in lags], step="mid")
    axes.set_xlabel("step")
    axes.set_ylabel("share of the trained tokens")
    axes.set_ylim(0, 1)
    axes.legend(title="staleness", fontsize=7, title_fontsize=7, loc="upper right", ncols=2)


def _traffic(axes: Axes, links: Mapping[tuple[str, str, str], float]) -> None:
    """Draw the bytes of each link between regions by kind."""
    totals: dict[str, dict[str, float]] = {}
    for (source, target, kind), num_bytes in links.items():
        totals.setdefault(f"{source} > {target}", {})[kind] = num_bytes / 1e9
    names = sorted(totals, key=lambda name: -sum(totals[name].values()))[:MAX_LINKS][::-1]
    left = [0.0] * len(names)
    for kind, color in _KINDS.items():
        sizes = [totals[name].get(kind, 0.0) for name in names]
        axes.barh(names, sizes, left=left, color=color, label=kind)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_xlabel("GB by link")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def sweep_plot(
    values: Sequence[str],
    rows: Mapping[str, Sequence[Sequence[float]]],
    out_png: Path,
    *,
    key: str,
    title: str,
) -> Path:
    """Plot what a parameter does: one panel per figure, a point per seed, a line through the means.

    Args:
        values: of the parameter, in order.
        rows: name of a figure -> for each value what the seeds gave.
        out_png: file to write.
        key: name of the parameter.
        title: heading.

    Raises:
        ConfigError: if matplotlib is not installed.
        StorageError: if the PNG cannot be written.
    """
    size = (3.6 * len(rows), 3.6)
    figure = new_figure(size, dpi=120, extra="planner", wanted_by="the plot of the sweep")
    panels = figure.subplots(1, len(rows), squeeze=False)[0]
    for axes, (name, found) in zip(panels, rows.items(), strict=True):
        for place, numbers in enumerate(found):
            axes.scatter([place] * len(numbers), numbers, color=FAINT, s=12)
        means = [sum(numbers) / max(1, len(numbers)) for numbers in found]
        axes.plot(range(len(values)), means, color=_BUSY, marker="o", markersize=4)
        axes.set_xticks(range(len(values)), values)
        axes.set_xlabel(key)
        axes.set_title(name, fontsize=10)
        axes.set_ylim(bottom=0)
        tidy(axes)
    figure.suptitle(title, fontsize=11)
    return save_figure(figure, out_png)
