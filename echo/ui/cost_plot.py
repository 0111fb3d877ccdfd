"""Plot what fleets cost against how long the learner waits with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echo.errors import StorageError
from echo.ui.extras import import_extra

_FRONT, _CHOSEN, _FAINT = "#4c72b0", "#b5479b", "#bbbbbb"


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One fleet."""

    label: str
    idle_share: float
    """Share of the time in which the learner waits, 0..1."""
    cost_per_h: float
    """$ per hour."""
    cost_per_million_tokens: float
    """$ per 10^6 trained tokens."""


def cost_plot(front: Sequence[CostPoint], chosen: CostPoint, out_png: Path, *, title: str) -> Path:
    """Plot the Pareto front of cost against idle share, and what each token then costs, as a PNG.

    Args:
        front: the cheapest fleets, fastest first.
        chosen: the plan's own.
        out_png: file to write; its directory is made if missing.
        title: heading.

    Returns:
        `out_png`.

    Raises:
        ConfigError: if matplotlib is not installed.
        StorageError: if the PNG cannot be written.
    """
    import_extra("matplotlib", extra="planner", wanted_by="the plot of the plan")
    # Figure without pyplot: no global state and no display, whatever the user's backend is.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(10, 4.2), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    hourly, per_token = figure.subplots(1, 2)
    idle = [point.idle_share for point in front]
    for axes, costs, own_cost, label in (
        (
            hourly,
            [point.cost_per_h for point in front],
            chosen.cost_per_h,
            "$ per hour, learner and traffic included",
        ),
        (
            per_token,
            [point.cost_per_million_tokens for point in front],
            chosen.cost_per_million_tokens,
            "$ per million trained tokens",
        ),
    ):
        axes.plot(idle, costs, color=_FRONT, marker="o", markersize=5, label="cheapest fleets")
        axes.scatter(
            [chosen.idle_share],
            [own_cost],
            color=_CHOSEN,
            marker="D",
            s=70,
            zorder=3,
            label="the plan",
        )
        axes.set_xlabel("share of the time in which the learner waits")
        axes.set_ylabel(label)
        # Room for the label of the last point.
        axes.set_xlim(-0.015, max(0.1, 1.2 * max([*idle, chosen.idle_share])))
        axes.set_ylim(0, 1.1 * max([*costs, own_cost]))
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=_FAINT, alpha=0.4, linewidth=0.6)
        axes.set_axisbelow(True)
    for point in front:
        hourly.annotate(
            point.label,
            (point.idle_share, point.cost_per_h),
            xytext=(4, 6),
            textcoords="offset points",
            fontsize=7,
        )
    hourly.legend(frameon=False, loc="lower left")
    figure.suptitle(title, fontsize=11)
    try:
        out_png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out_png)
    except OSError as error:
        raise StorageError(f"{out_png}: cannot be written: {error.strerror}") from error
    return out_png
