"""Results and plots of bench_staleness.py, from its rows, and the interval of paired seeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import harness
from scipy.stats import t as student

LAST = 3
"""Evaluations at the end of a run whose mean is its last value: one alone is noisy."""
KINDS = ("sampled", "greedy")
LABELS = {
    "fixed": "{loss}",
    "delays": "{loss}",
    "addition": "{lag}",
    "countdown": "{lag}",
    "chosen": "{lag} {loss}",
    "corrections": "{lag} {loss}",
    "corrections_countdown": "{lag} {loss}",
    "pretrained": "{lag} {loss}",
}
"""What tells the cases of an experiment apart."""
REFERENCES = {
    "fixed": "grpo",
    "delays": "grpo",
    "addition": "fixed:0",
    "countdown": "fixed:0",
    "chosen": "{lag} grpo",
    "corrections": "{lag} gspo .02/.03",
    "corrections_countdown": "{lag} gspo .02/.03",
    "pretrained": "{lag} gspo .02/.03",
}
"""The case that each is compared with, seed by seed."""
COLORS = (
    "#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#333333",
    "#17becf", "#bcbd22", "#7f7f7f",
)  # fmt: skip
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


def report(
    rows: Sequence[dict[str, Any]], experiments: Mapping[str, Any], same: Mapping[str, Any]
) -> None:
    """Write one JSON file, and a PNG for each experiment that has a row.

    Args:
        rows: of the runs, which share their settings.
        experiments: cases by name.
        same: those settings.
    """
    result: dict[str, Any] = {
        **same,
        "last_is_mean_of_evaluations": LAST,
        "models": sorted({(row["task"], row["model"]) for row in rows}),
        "cpu_min": round(sum(row["cpu_s"] for row in rows) / 60, 1),
    }
    # Files of runs with other settings have their names: "_learning_rate4e-4".
    changed = "".join(f"_{each.rpartition('.')[2].replace('=', '')}" for each in same["set"])
    for name, cases in experiments.items():
        found: dict[str, Any] = {}
        references: dict[str, str] = {}
        for case in cases:
            label = LABELS[name].format(**asdict(case))
            summary = summarise([row for row in rows if asdict(case).items() <= row.items()])
            if summary["seeds"]:
                found[label] = summary
                references[label] = REFERENCES[name].format(**asdict(case))
        if not found:
            continue
        add_differences(found, references)
        print_table(name, found)
        result[name] = found
        draw = plot_by_lag if name.startswith("corrections") else plot
        print(f"wrote {draw(name, found, same['steps'], changed)}")
    what = f"staleness_{'_'.join(name for name in experiments if name in result)}{changed}"
    print(f"wrote {harness.save(what, result)}")


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return curves, last and best values over the seeds of one case, and the lag that it had."""
    rows = sorted(rows, key=lambda row: row["seed"])
    found: dict[str, Any] = {"seeds": [row["seed"] for row in rows]}
    if not rows:
        return found
    found["at"] = [one["step"] for one in rows[0]["evaluations"]]
    for kind in KINDS:
        curves = [[one[kind] for one in row["evaluations"]] for row in rows]
        points = list(zip(*curves, strict=True))
        found[kind] = {
            "mean": [_round(statistics.fmean(values)) for values in points],
            "stdev": [_round(_stdev(values)) for values in points],
            "last": _spread([statistics.fmean(curve[-LAST:]) for curve in curves]),
            "best": _spread([max(curve) for curve in curves]),
        }
    staleness: Counter[str] = Counter()
    for row in rows:
        staleness.update(row["staleness"])
    total = staleness.total()
    found["staleness"] = {lag: _round(staleness[lag] / total) for lag in sorted(staleness, key=int)}
    found["staleness_mean"] = _round(sum(int(lag) * n for lag, n in staleness.items()) / total)
    found["lost_groups_share"] = _round(_lost_share(rows, total))
    names = sorted({name for row in rows for part in row["metrics"] for name in part})
    parts = [part for row in rows for part in row["metrics"]]
    found["metrics"] = {
        name: _round(statistics.fmean(part[name] for part in parts if name in part))
        for name in names
    }
    return found


def _lost_share(rows: Sequence[Mapping[str, Any]], num_trained: int) -> float:
    lost = sum(row["lost_groups"] for row in rows)
    return float(lost / (lost + num_trained))


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": _round(statistics.fmean(values)),
        "stdev": _round(_stdev(values)),
        "by_seed": [_round(value) for value in values],
    }


def _stdev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval (Student); infinite for one value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, math.inf
    quantile = float(student.ppf(0.975, len(values) - 1))
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))


def add_differences(found: dict[str, Any], references: Mapping[str, str]) -> None:
    """Add each case's last value minus its reference's, paired by seed, with its 95 % interval."""
    for label, summary in found.items():
        reference = references[label]
        if label == reference or reference not in found:
            continue
        for kind in KINDS:
            own, base = _by_seed(summary, kind), _by_seed(found[reference], kind)
            paired = [own[seed] - base[seed] for seed in own if seed in base]
            if len(paired) > 1:
                mean, half_width = interval(paired)
                summary[kind]["minus_reference"] = {
                    "reference": reference,
                    "mean": _round(mean),
                    "half_width_95": _round(half_width),
                }


def _by_seed(summary: Mapping[str, Any], kind: str) -> dict[int, float]:
    return dict(zip(summary["seeds"], summary[kind]["last"]["by_seed"], strict=True))


def print_table(name: str, found: Mapping[str, Any]) -> None:
    """Print last and best values, and how far the policies were apart."""
    heads = "seeds   last sampled    greedy   best sampled  greedy   lag   ess  clipped"
    print(f"\n{name:<20} {heads}")
    for label, summary in found.items():
        sampled, greedy, metrics = summary["sampled"], summary["greedy"], summary["metrics"]
        print(
            f"{label:<20} {len(summary['seeds']):>5}  "
            f"{sampled['last']['mean']:.3f} +- {sampled['last']['stdev']:.3f}  "
            f"{greedy['last']['mean']:.3f}  {sampled['best']['mean']:>12.3f}  "
            f"{greedy['best']['mean']:.3f}  {summary['staleness_mean']:>5.2f}  "
            f"{metrics.get('ess', 1):.3f}  {metrics.get('clip_ratio/mean', 0):.4f}"
        )


def plot(name: str, found: Mapping[str, Any], steps: int, changed: str) -> Any:
    """Plot curves, last and best values, and the realised staleness; return the file."""
    figure = harness.new_figure((14, 8.6), dpi=110)
    (sampled, greedy), (scores, lags) = figure.subplots(2, 2)
    styles = style_of([*found])
    for axes, kind in ((sampled, "sampled"), (greedy, "greedy")):
        for label, summary in found.items():
            mean, stdev = summary[kind]["mean"], summary[kind]["stdev"]
            axes.plot(summary["at"], mean, label=label, linewidth=1.6, **styles[label])
            low = [m - s for m, s in zip(mean, stdev, strict=True)]
            high = [m + s for m, s in zip(mean, stdev, strict=True)]
            color = styles[label]["color"]
            axes.fill_between(summary["at"], low, high, color=color, alpha=0.12, linewidth=0)
        axes.set_title(f"held-out pass rate, {kind}", fontsize=10)
        axes.set_xlabel("optimizer step")
        axes.set_ylim(0, 1)
    names = figure.legend(*sampled.get_legend_handles_labels(), loc="outside right", fontsize=8)
    names.set_frame_on(False)
    draw_scores(scores, found, styles)
    for label, summary in found.items():
        at, shares = [int(lag) for lag in summary["staleness"]], [*summary["staleness"].values()]
        lags.plot(at, shares, marker=".", linewidth=1, **styles[label])
        if LABELS[name] == "{loss}":
            break  # every correction has the same lags
    lags.set_title("realised staleness, share of trained groups", fontsize=10)
    lags.set_xlabel("versions")
    for axes in (sampled, greedy, scores, lags):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#bbbbbb", alpha=0.4, linewidth=0.6)
        axes.set_axisbelow(True)
    counts = sorted({len(summary["seeds"]) for summary in found.values()})
    seeds = " or ".join(map(str, counts)) + (" seed" if counts == [1] else " seeds")
    figure.suptitle(f"{TITLES[name]}; {steps} steps, {seeds}, mean and deviation")
    path = harness.result_path(f"staleness_{name}{changed}", ".png")
    figure.savefig(path)
    return path


def plot_by_lag(name: str, found: Mapping[str, Any], steps: int, changed: str) -> Any:
    """Plot each loss's last values over the lags that were measured; return the file."""
    by_loss: dict[str, dict[str, Any]] = {}
    for label, summary in found.items():
        lag, _, loss = label.partition(" ")
        by_loss.setdefault(loss, {})[lag] = summary
    # Fixed lags come first, by their number.
    lags = sorted({label.partition(" ")[0] for label in found}, key=_lag_order)
    figure = harness.new_figure((13, 5.6), dpi=110)
    styles = style_of([*by_loss])
    panels = figure.subplots(1, len(KINDS))
    for axes, kind in zip(panels, KINDS, strict=True):
        for loss, summaries in by_loss.items():
            at = [place for place, lag in enumerate(lags) if lag in summaries]
            last = [summaries[lags[place]][kind]["last"] for place in at]
            axes.errorbar(
                at, [each["mean"] for each in last], yerr=[each["stdev"] for each in last],
                label=loss, marker=".", capsize=2, linewidth=1.4, **styles[loss],
            )  # fmt: skip
        axes.set_xticks(range(len(lags)), lags)
        axes.set_ylim(0, 1)
        axes.set_title(f"held-out pass rate, {kind}, mean of {LAST} evaluations", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#bbbbbb", alpha=0.4, linewidth=0.6)
    names = figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", fontsize=8)
    names.set_frame_on(False)
    figure.suptitle(f"{TITLES[name]}; {steps} steps, mean and deviation over seeds")
    path = harness.result_path(f"staleness_{name}{changed}", ".png")
    figure.savefig(path)
    return path


def _lag_order(lag: str) -> tuple[bool, int]:
    law, _, number = lag.partition(":")
    return law != "fixed", int(number)


TITLES = {
    "fixed": "addition, every group 11 versions old",
    "delays": "addition, HeteroRL's delays (lognormal, 60 to 1800 s, steps of 60 s)",
    "addition": "addition, GRPO, by staleness",
    "countdown": "countdown, GRPO, by staleness",
    "chosen": "addition, GSPO with a range of .02/.03 beside GRPO, by staleness",
    "corrections": "addition, corrections by staleness",
    "corrections_countdown": "countdown, corrections by staleness",
    "pretrained": "dates, SmolLM2-135M with an adapter, losses by staleness",
}


def draw_scores(axes: Any, found: Mapping[str, Any], styles: Mapping[str, Any]) -> None:
    """Draw the last value of each case with its deviation, and the best beside it."""
    for row, (label, summary) in enumerate(found.items()):
        for kind, offset, marker in (("sampled", -0.15, "o"), ("greedy", 0.15, "s")):
            last, best = summary[kind]["last"], summary[kind]["best"]
            color = styles[label]["color"]
            axes.errorbar(
                last["mean"], row + offset, xerr=last["stdev"], fmt=marker, color=color,
                markersize=5, capsize=2,
            )  # fmt: skip
            axes.plot(best["mean"], row + offset, marker="|", color=color, markersize=9)
    axes.set_yticks(range(len(found)), [*found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_title(
        f"last value (mean of {LAST} evaluations): circle sampled, square greedy; | best",
        fontsize=10,
    )


def style_of(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the colour of each family of labels, and a dash for each of its members."""
    found: dict[str, dict[str, Any]] = {}
    families: dict[str, int] = {}
    members: Counter[str] = Counter()
    for label in labels:
        # A lag has a colour, its laws and losses have dashes; a loss's ranges share the colour.
        _, _, number = label.partition(":")
        family = (number or label).split()[0].rstrip("+")
        color = COLORS[families.setdefault(family, len(families)) % len(COLORS)]
        dash = DASHES[members[family] % len(DASHES)]
        members[family] += 1
        found[label] = {"color": color, "linestyle": dash}
    return found
