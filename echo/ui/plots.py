"""Plot the learning curve of one or several runs beside the staleness they trained at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from echo.core.errors import DataError
from echo.records.ledger import staleness_of_group
from echo.records.run_files import MetricsHistory, read_config, read_metrics
from echo.ui.figures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_REWARD, _SAMPLED, _GREEDY = "#4c72b0", "#2a9d5c", "#b5479b"
_INK, _FAINT = "#333333", "#bbbbbb"
_SMOOTHED_STEPS = 5
"""Steps in the running mean of the reward: of a batch's noise it leaves less than half."""

_Array = npt.NDArray[np.float64]
Series = Mapping[int, float]
"""One number per step."""


def learning_curve(run_dirs: Path | Sequence[Path], out_png: Path) -> Path:
    """Plot reward and held-out pass rates against the step, and realised staleness, as a PNG.

    Several runs are drawn as their mean, with their range as a band.

    Args:
        run_dirs: directory of one run, or of several (seeds of one configuration).
        out_png: file to write; its directory is made if missing.

    Returns:
        `out_png`.

    Raises:
        ConfigError: if matplotlib is not installed.
        DataError: if a run has no metrics, or none of steps.
        StorageError: if metrics are damaged or the PNG cannot be written.
    """
    directories = [run_dirs] if isinstance(run_dirs, Path) else list(run_dirs)
    if not directories:
        raise DataError("the learning curve needs the directory of at least one run, got none")
    histories = [_read(directory) for directory in directories]
    figure = new_figure((10, 4.2), dpi=144, extra="learner", wanted_by="the learning curve")
    curves, histogram = figure.subplots(1, 2, width_ratios=(2.4, 1))
    _draw_curves(curves, histories)
    _draw_staleness(histogram, histories, _bound(directories))
    figure.suptitle(_title(directories), fontsize=11, color=_INK)
    return save_figure(figure, out_png)


def _read(run_dir: Path) -> MetricsHistory:
    history = read_metrics(run_dir)
    if not history.train and not history.evaluations:
        raise DataError(
            f"{run_dir / 'metrics.jsonl'}: no optimizer step yet, nothing to plot; try again later"
        )
    return history


def _draw_curves(axes: Axes, histories: Sequence[MetricsHistory]) -> None:
    """Draw reward and pass rates; a reward that is no rate gets an axis of its own."""
    rewards = [_present({r["step"]: r["reward/mean"] for r in h.train}) for h in histories]
    values = [value for series in rewards for value in series.values()]
    is_rate = not values or (min(values) >= 0 and max(values) <= 1)
    reward_axes = axes if is_rate else axes.twinx()
    if len(histories) == 1 and rewards[0]:
        steps = sorted(rewards[0])
        raw = [rewards[0][step] for step in steps]
        reward_axes.plot(steps, raw, color=_REWARD, alpha=0.3, linewidth=1)
    smooth = [_smoothed(series) for series in rewards]
    lines = [_draw_mean(reward_axes, smooth, _REWARD, f"reward, mean of {_SMOOTHED_STEPS} steps")]
    for label, color, marker, style, runs in (
        ("held-out, sampled", _SAMPLED, "o", "-", [_rates(h, greedy=False) for h in histories]),
        ("held-out, greedy", _GREEDY, "D", "--", [_rates(h, greedy=True) for h in histories]),
    ):
        lines.append(_draw_mean(axes, runs, color, label, marker=marker, linestyle=style))
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward, pass rate" if is_rate else "held-out pass rate")
    if not is_rate:
        reward_axes.set_ylabel("mean reward", color=_REWARD)
    _tidy(axes)
    drawn = [line for line in lines if line is not None]
    axes.legend(drawn, [str(line.get_label()) for line in drawn], loc="best", frameon=False)


def _draw_mean(
    axes: Axes,
    runs: Sequence[Series],
    color: str,
    label: str,
    *,
    marker: str = "",
    linestyle: str = "-",
) -> Line2D | None:
    """Draw the mean of `runs`, with their range as a band; None if they are empty."""
    steps, low, mean, high = _spread(runs)
    if not len(steps):
        return None
    if len(runs) > 1:
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    (line,) = axes.plot(
        steps,
        mean,
        color=color,
        label=label,
        marker=marker,
        markersize=4,
        linestyle=linestyle,
        linewidth=1.8,
    )
    return line


def _draw_staleness(
    axes: Axes, histories: Sequence[MetricsHistory], max_staleness: int | None
) -> None:
    """Draw the share of trained tokens by staleness; with several runs, mean and range."""
    from matplotlib.ticker import MaxNLocator

    shares = []
    for history in histories:
        tokens = staleness_of_group(history.train)
        total = sum(tokens.values())
        if total:
            shares.append({staleness: count / total for staleness, count in tokens.items()})
    axes.set_xlabel("staleness of trained tokens, steps")
    axes.set_ylabel("share of tokens")
    _tidy(axes)
    if not shares:
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes)
        return
    largest = max(max_staleness or 0, *(max(share) for share in shares))
    levels = np.arange(largest + 1)
    table = np.array([[share.get(int(level), 0.0) for level in levels] for share in shares])
    mean = table.mean(axis=0)
    axes.bar(levels, mean, width=0.8, color=_REWARD, alpha=0.85)
    if len(shares) > 1:
        spread = np.stack([mean - table.min(axis=0), table.max(axis=0) - mean])
        axes.errorbar(levels, mean, yerr=spread, fmt="none", ecolor=_INK, capsize=2, linewidth=1)
    average = float((table @ levels).mean())
    axes.set_title(f"mean {average:.2f}", fontsize=9, color=_INK)
    if max_staleness is not None:
        axes.axvline(max_staleness + 0.5, color="#c44e52", linestyle=":", linewidth=1.5)
        axes.annotate(
            f"bound S = {max_staleness}",
            (max_staleness + 0.45, 0.97),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
            va="top",
            fontsize=8,
            color="#c44e52",
        )
    axes.set_xlim(-0.6, largest + 0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_FAINT, alpha=0.4, linewidth=0.6)
    axes.set_axisbelow(True)


def _spread(
    runs: Sequence[Series],
) -> tuple[list[int], _Array, _Array, _Array]:
    """Steps that every run has, and over the runs at each: least, mean, most."""
    common = sorted(set(runs[0]).intersection(*runs[1:]))
    table = np.array([[series[step] for step in common] for series in runs], dtype=np.float64)
    if not common:
        return [], table, table, table
    return common, table.min(axis=0), table.mean(axis=0), table.max(axis=0)


def _smoothed(series: Series) -> dict[int, float]:
    """The mean of each step and those shortly before it."""
    steps = sorted(series)
    values = [series[step] for step in steps]
    windows = (values[max(i - _SMOOTHED_STEPS + 1, 0) : i + 1] for i in range(len(steps)))
    return {step: sum(window) / len(window) for step, window in zip(steps, windows, strict=True)}


def _present(series: Mapping[int, float | None]) -> dict[int, float]:
    """Without the values that were not finite and so were written as null."""
    return {step: value for step, value in series.items() if value is not None}


def _rates(history: MetricsHistory, *, greedy: bool) -> dict[int, float]:
    return {e.step: e.greedy if greedy else e.sampled for e in history.evaluations}


def _bound(directories: Sequence[Path]) -> int | None:
    """The staleness bound of the runs; None where they differ or their configuration is gone."""
    try:
        bounds = {read_config(path).get("sync", {}).get("max_staleness") for path in directories}
    except DataError:
        return None
    bound = bounds.pop()
    return bound if isinstance(bound, int) and not bounds else None


def _title(directories: Sequence[Path]) -> str:
    names = [directory.resolve().name for directory in directories]
    if len(names) == 1:
        return names[0]
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{shown}: mean and range of {len(names)} runs"
