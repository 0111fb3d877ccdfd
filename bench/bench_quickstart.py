"""Run the quickstart with several seeds, and report what it learned.

Every run is the real one: four processes over sockets. The seeds share the warmed-up model; they
differ in prompts and sampling.

    python bench/bench_quickstart.py --name lora --set lora.rank=8 --set run.max_steps=60
    python bench/bench_quickstart.py --model smollm2 --timeout-s 3600
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from learning.quickstart import read_evaluations, train

from echo.records.run_files import MetricsHistory, read_metrics
from echo.ui.plots import save_figure
from echo.ui.summary import summarise_run


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", default="addition")
    parser.add_argument("--model", help="a pretrained one in place of the task's small model")
    parser.add_argument("--name", help="of the result; the model's or the task's if none is given")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for the quickstart"
    )
    parser.add_argument("--timeout-s", type=float, default=300, help="for one run")
    parser.add_argument("--keep", type=Path, help="directory for the runs, kept afterwards")
    quick = {"seeds": [0], "set": ["run.max_steps=10", "eval.num_prompts=64"]}
    arguments = harness.parse(parser, **quick)
    with tempfile.TemporaryDirectory() as scratch:
        where = arguments.keep or Path(scratch)
        runs = [run(where, seed, arguments) for seed in arguments.seeds]
        run_dirs = [where / f"seed-{seed}" for seed in arguments.seeds]
        name = arguments.name or Path(arguments.model or arguments.task).name
        report(f"quickstart_{name}", arguments, runs, run_dirs)


def run(where: Path, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one seed and return its figures."""
    started_at = time.monotonic()
    own = [f"run.dir={where}", f"run.name=seed-{seed}"]
    train(
        arguments.task,
        seed,
        [*arguments.set, *own],
        timeout_s=arguments.timeout_s,
        model=arguments.model,
    )
    wall_s = time.monotonic() - started_at
    summary = summarise_run(where / f"seed-{seed}")
    rows = read_evaluations(where / f"seed-{seed}" / "metrics.jsonl")
    staleness = {str(lag): count for lag, count in sorted(summary.staleness_tokens.items())}
    return {
        "seed": seed,
        "wall_s_with_start": round(wall_s, 1),
        "run_s": round(summary.wall_time_s, 1),
        "tokens_per_s": round(summary.tokens_per_s),
        "evaluations": rows,
        "staleness_tokens": staleness,
        "staleness_mean": round(summary.mean_staleness, 3),
        "weights_sent_bytes": round(summary.broadcast_bytes),
        "version_bytes": sum(
            path.stat().st_size for path in (where / f"seed-{seed}" / "final").glob("*.safetensors")
        ),
    }


def report(
    name: str, arguments: argparse.Namespace, runs: list[dict[str, Any]], run_dirs: list[Path]
) -> None:
    """Print the table and write JSON and PNG."""
    print(f"{'seed':>4} {'before':>14} {'after':>14} {'staleness':>9} {'tokens/s':>8} {'run s':>6}")
    for one in runs:
        first, last = one["evaluations"][0], one["evaluations"][-1]
        before = f"{first['sampled']:.3f} / {first['greedy']:.3f}"
        after = f"{last['sampled']:.3f} / {last['greedy']:.3f}"
        print(
            f"{one['seed']:>4} {before:>14} {after:>14} {one['staleness_mean']:>9.2f} "
            f"{one['tokens_per_s']:>8} {one['run_s']:>6}"
        )
    finals = [one["evaluations"][-1]["sampled"] for one in runs]
    result = {
        "task": arguments.task if arguments.model is None else None,
        "model": arguments.model,
        "settings": arguments.set,
        "runs": runs,
        "final_sampled_mean": round(statistics.mean(finals), 4),
        "final_sampled_stdev": round(statistics.stdev(finals), 4) if len(finals) > 1 else None,
    }
    print(f"wrote {harness.save(name, result)}")
    print(f"wrote {plot(run_dirs, harness.result_path(name, '.png'))}")


def rewards(history: MetricsHistory) -> dict[int, float]:
    """Return the mean reward by step; one that was not finite was written as null."""
    rows = [row for row in history.train if row["reward/mean"] is not None]
    return {row["step"]: row["reward/mean"] for row in rows}


def plot(run_dirs: list[Path], out_png: Path) -> Path:
    """Draw reward and held-out pass rates of the runs: their mean, and their range as a band."""
    histories = [read_metrics(run_dir) for run_dir in run_dirs]
    evaluations = [history.evaluations for history in histories]
    figure = harness.new_figure((10, 4.2), dpi=144)
    axes = figure.subplots()
    for label, style, runs in (
        ("mean reward", "-", [rewards(history) for history in histories]),
        ("held-out, sampled", "o-", [{e.step: e.sampled for e in run} for run in evaluations]),
        ("held-out, greedy", "D--", [{e.step: e.greedy for e in run} for run in evaluations]),
    ):
        steps = sorted(set.intersection(*({*series} for series in runs)))
        values = [[series[step] for series in runs] for step in steps]
        (line,) = axes.plot(steps, [statistics.mean(of) for of in values], style, label=label)
        color = line.get_color()
        axes.fill_between(steps, [*map(min, values)], [*map(max, values)], color=color, alpha=0.15)
    axes.set(xlabel="optimizer step", ylim=(0, 1), title=f"mean and range of {len(runs)} runs")
    axes.legend(loc="best", frameon=False)
    return save_figure(figure, out_png)


if __name__ == "__main__":
    main()
