"""Plot what fleets cost against how long the learner waits with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echo.ui.figures import new_figure, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FRONT, _CHOSEN = "#4c72b0", "#b5479b"
_Point = tuple[float, float]
"""Share of waiting and cost."""


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
    figure = new_figure((10, 4.2), dpi=144, extra="planner", wanted_by="the plot of the plan")
    hourly, per_token = figure.subplots(1, 2)
    _draw(
        hourly,
        [(point.idle_share, point.cost_per_h) for point in front],
        (chosen.idle_share, chosen.cost_per_h),
        "$ per hour, learner and traffic included",
    )
    _draw(
        per_token,
        [(point.idle_share, point.cost_per_million_tokens) for point in front],
        (chosen.idle_share, chosen.cost_per_million_tokens),
        "$ per million trained tokens",
    )
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
    return save_figure(figure, out_png)


def _draw(axes: Axes, front: Sequence[_Point], chosen: _Point, label: str) -> None:
    """Draw a cost of all fleets and of the plan against their share of waiting."""
    from matplotlib.ticker import PercentFormatter

    idle, costs = [point[0] for point in front], [point[1] for point in front]
    axes.plot(idle, costs, color=_FRONT, marker="o", markersize=5, label="cheapest fleets")
    axes.scatter(*chosen, color=_CHOSEN, marker="D", s=70, zorder=3, label="the plan")
    axes.set_xlabel("share of the time in which the learner waits")
    axes.set_ylabel(label)
    # Room for the label of the last point.
    axes.set_xlim(-0.015, max(0.1, 1.2 * max([*idle, chosen[0]])))
    axes.set_ylim(0, 1.1 * max([*costs, chosen[1]]))
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    tidy(axes)
