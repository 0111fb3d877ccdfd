"""Plots the costs of fleets and simulated runs. Defines the style of all plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from echo.core.errors import StorageError
from echo.core.extras import import_extra
from echo.ui.summary import REWARD_STEPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from echo.fleet.provisioning import Forecast


# --- figures --------------------------------------------------------------------------------------


FAINT = "#bbbbbb"


def new_figure(size: tuple[float, float], *, dpi: int, extra: str, wanted_by: str) -> Figure:
    """Return an empty figure of matplotlib. `size` is its width and height in inches.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    import_extra("matplotlib", extra=extra, wanted_by=wanted_by)
    # Without pyplot there is no global state, and the user's backend needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, *, lines: Literal["both", "y"] = "both") -> None:
    """Remove the top edge and the right edge of the axes, and add a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=lines, color=FAINT, alpha=0.4, linewidth=0.6)
    axes.set_axisbelow(True)


def save_figure(figure: Figure, out_png: Path) -> Path:
    """Write a figure to a PNG file, and return the path of the file.

    Raises:
        StorageError: if the file cannot be written.
    """
    try:
        out_png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out_png)
    except OSError as error:
        raise StorageError(f"{out_png}: cannot be written: {error.strerror}") from error
    return out_png


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the running mean of the values over REWARD_STEPS steps."""
    windows = [values[max(i - REWARD_STEPS + 1, 0) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


# --- cost of fleets -------------------------------------------------------------------------------


_FRONT, _CHOSEN = "#4c72b0", "#b5479b"


def cost_plot(
    front: Mapping[str, Forecast], chosen: Forecast, out_png: Path, *, title: str
) -> Path:
    """Plot the costs of fleets over the learner's idle share. Return the file's path.

    The two panels show the cost per hour and the cost per token. Both panels show the Pareto front
    `front` and mark the `chosen` plan.

    Raises:
        ConfigError: if matplotlib is not installed.
        StorageError: if the PNG cannot be written.
    """
    figure = new_figure((10, 4.2), dpi=144, extra="planner", wanted_by="the plot of the plan")
    hourly, per_token = figure.subplots(1, 2)
    fleets = [*front.values(), chosen]
    costs = [fleet.cost_per_h for fleet in fleets]
    _draw(hourly, fleets, costs, "$ per hour, learner and traffic included")
    costs = [fleet.cost_per_million_tokens for fleet in fleets]
    _draw(per_token, fleets, costs, "$ per million trained tokens")
    for label, fleet in front.items():
        place = (fleet.prediction.idle_share, fleet.cost_per_h)
        hourly.annotate(label, place, xytext=(4, 6), textcoords="offset points", fontsize=7)
    hourly.legend(frameon=False, loc="lower left")
    figure.suptitle(title, fontsize=11)
    return save_figure(figure, out_png)


def _draw(axes: Axes, fleets: Sequence[Forecast], costs: Sequence[float], label: str) -> None:
    from matplotlib.ticker import PercentFormatter

    idle = [fleet.prediction.idle_share for fleet in fleets]
    front = (idle[:-1], costs[:-1])
    axes.plot(*front, color=_FRONT, marker="o", markersize=5, label="cheapest fleets")
    chosen = (idle[-1], costs[-1])
    axes.scatter(*chosen, color=_CHOSEN, marker="D", s=70, zorder=3, label="the plan")
    axes.set_xlabel("share of the time in which the learner waits")
    axes.set_ylabel(label)
    # Space for the label of the last point.
    axes.set_xlim(-0.015, max(0.1, 1.2 * max(idle)))
    axes.set_ylim(0, 1.1 * max(costs))
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    tidy(axes)


# --- simulated run --------------------------------------------------------------------------------


_BUSY, _IDLE = "#4c72b0", "#dd8452"
_KINDS = {"weights": "#4c72b0", "rollouts": "#55a868", "control": "#bbbbbb"}
MAX_LINKS = 12
"""Largest number of links that are drawn. Links with more bytes come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """An optimizer step of a simulated run, for the plot."""

    begins_s: float
    """Seconds from the start of the run to the start of the step's training."""
    ends_s: float
    waited_s: float
    staleness: Mapping[int, float]
    """For each staleness, the number of tokens that the step trained on."""
    cost: float
    """$ spent from the start of the run to the end of the step."""
    cost_per_h: float
    """$ per hour for machines and traffic during the step."""
    standby_per_h: float
    """The part of `cost_per_h` that workers on standby cost."""


def simulation_plot(
    steps: Sequence[StepPoint],
    links: Mapping[tuple[str, str, str], float],
    out_png: Path,
    *,
    title: str,
    waits: str,
) -> Path:
    """Plot a simulated run to a PNG file. Return the path of the file.

    The panels show costs, the learner's times, staleness and traffic.

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
    """Plot the results of a sweep to a PNG file. Return the path of the file.

    Each quantity in `rows` has a panel. The panel has a point for each value of the swept key and
    each seed, and shows the mean over the seeds for each value.

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
