"""Compare Echo's two modes with a co-located on-policy loop.

Each seed is trained three times from the same model: pull (four processes, on-policy), push_pull
(four processes, within the bound) and co-located (learning/colocated.py). The differences of the
final pass rates are paired by seed; pull and co-located agree if the 95 % interval of their mean
difference lies inside +-0.05. A run adds its row to the rows file as it ends, so seeds can
be added later.

    python bench/bench_modes.py --set eval.num_prompts=2048 --set eval.interval_steps=100
    ... --resume --seeds 5 6 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import harness
from harness import add_row, read_rows
from learning.quickstart import make_model, read_evaluations, train
from learning.report import interval

from echo.ui.summary import summarise_run

MODES = ("colocated", "pull", "push_pull")
KINDS = ("sampled", "greedy")
AGREEMENT = 0.05
"""Largest difference of final pass rates that counts as none."""


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--task", default="addition", choices=("addition", "countdown"))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--timeout-s", type=float, default=600, help="for one run")
    parser.add_argument("--rows", type=Path, help="results/modes_rows.jsonl if left out")
    parser.add_argument("--resume", action="store_true", help="skip runs whose rows are there")
    parser.add_argument("--report", action="store_true", help="run nothing; compare what is there")
    quick = {"seeds": [0], "set": ["run.max_steps=4", "eval.num_prompts=32"]}
    arguments = harness.parse(parser, **quick)
    arguments.rows = arguments.rows or harness.RESULTS / "modes_rows.jsonl"
    if arguments.rows.exists() and not (arguments.resume or arguments.report):
        sys.exit(f"{arguments.rows} exists; --resume goes on with it, --rows names another")
    same = {"task": arguments.task, "set": arguments.set}
    rows = [row for row in read_rows(arguments.rows) if same.items() <= row.items()]
    with tempfile.TemporaryDirectory() as scratch:
        for seed in () if arguments.report else arguments.seeds:
            for mode in MODES:
                if any((row["mode"], row["seed"]) == (mode, seed) for row in rows):
                    continue
                row = {**same, "mode": mode, "seed": seed}
                row |= run(mode, seed, Path(scratch), arguments)
                add_row(arguments.rows, row)
                rows.append(row)
                print(f"{mode:>9} seed {seed}: {row['evaluations'][-1]}", flush=True)
    report(rows, same)


def report(rows: Sequence[dict[str, Any]], same: dict[str, Any]) -> None:
    """Compare the seeds that were trained in every mode, and write the result."""
    by_run = {(row["mode"], row["seed"]): row for row in rows}
    seeds = sorted(
        {seed for _, seed in by_run if all((mode, seed) in by_run for mode in MODES)},
    )
    if not seeds:
        sys.exit("no seed was trained in every mode yet")
    finals = {mode: [by_run[mode, seed]["evaluations"][-1] for seed in seeds] for mode in MODES}
    staleness = {mode: shares(by_run[mode, seed] for seed in seeds) for mode in MODES}
    result = {**same, "seeds": seeds, "finals": finals, "staleness": staleness}
    result["differences"] = compare(finals)
    what = "modes_" + same["task"]
    print(f"wrote {plot(finals, staleness, harness.result_path(what, '.png'))}")
    print(f"wrote {harness.save(what, result)}")


def plot(
    finals: dict[str, list[dict[str, float]]], staleness: dict[str, dict[str, float]], path: Path
) -> Path:
    """Draw the final pass rates of each mode, mean and deviation over the seeds, and the lags."""
    figure = harness.new_figure((9, 3.2), dpi=110)
    scores, lags = figure.subplots(1, 2)
    for row, mode in enumerate(MODES):
        for kind, marker, offset in zip(KINDS, "os", (-0.15, 0.15), strict=True):
            values = [one[kind] for one in finals[mode]]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            mean, color = statistics.fmean(values), f"C{row}"
            scores.errorbar(mean, row + offset, xerr=spread, fmt=marker, color=color, capsize=2)
            scores.plot(values, [row + offset] * len(values), "|", color=color, alpha=0.5)
        at = [int(lag) + 0.25 * (row - 1) for lag in staleness[mode]]
        lags.bar(at, [*staleness[mode].values()], width=0.25, color=f"C{row}", label=mode)
    scores.set_yticks(range(len(MODES)), MODES)
    scores.invert_yaxis()
    scores.set_title("final pass rate: circle sampled, square greedy, | each seed", fontsize=9)
    lags.set_title("realised staleness, share of what was trained on", fontsize=9)
    lags.set_xlabel("versions")
    lags.xaxis.get_major_locator().set_params(integer=True)
    lags.legend(fontsize=8, frameon=False)
    for axes in (scores, lags):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path)
    return path


def shares(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return how old what was trained on was, over several runs."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update(row["staleness"])
    total = found.total()
    return {lag: round(found[lag] / total, 4) for lag in sorted(found, key=int)}


def run(mode: str, seed: int, where: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train once; return the evaluations, and tokens (co-located: groups) by staleness."""
    name = f"{mode}-{seed}"
    settings = [f"run.dir={where}", f"run.name={name}", *arguments.set]
    if mode != "colocated":
        # The modes differ by their own settings, not by the quickstart's bound.
        settings += [f"sync.mode={mode}"]
        settings += ["sync.max_staleness=0", "sync.publish_period=1"] * (mode == "pull")
        train(arguments.task, seed, settings, timeout_s=arguments.timeout_s)
        staleness = summarise_run(where / name).staleness_tokens
        return {
            "evaluations": read_evaluations(where / name / "metrics.jsonl"),
            "staleness": {str(lag): staleness[lag] for lag in sorted(staleness)},
        }
    model = make_model(arguments.task)
    config = {"addition": "quickstart", "countdown": "countdown"}[arguments.task]
    path = harness.ROOT / "configs" / f"{config}.toml"
    command = [sys.executable, "-m", "learning.colocated", str(path)]
    for setting in (*settings, f"model.name={model.resolve()}", f"run.seed={seed}"):
        command += ["--set", setting]
    output = subprocess.run(
        command, check=True, timeout=arguments.timeout_s, stdout=subprocess.PIPE, text=True,
        cwd=harness.ROOT / "bench",
    ).stdout  # fmt: skip
    found = [json.loads(line) for line in output.splitlines()]
    staleness = found[-1]["staleness"]
    return {
        "evaluations": [{name: row[name] for name in ("step", *KINDS)} for row in found],
        "staleness": staleness,
    }


def compare(finals: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return each mode's final pass rates minus the co-located loop's, and print them."""
    found: dict[str, Any] = {}
    for mode in MODES[1:]:
        for kind in KINDS:
            differences = [
                one[kind] - other[kind]
                for one, other in zip(finals[mode], finals["colocated"], strict=True)
            ]
            mean, half_width = interval(differences)
            agrees = abs(mean) + half_width < AGREEMENT
            found[f"{mode}/{kind}"] = {
                "differences": [round(value, 4) for value in differences],
                "mean": round(mean, 4),
                "half_width_95": round(half_width, 4),
                "agrees": agrees,
            }
            verdict = "agrees" if agrees else "does not show agreement"
            print(f"{mode:>9} - colocated, {kind}: {mean:+.3f} +- {half_width:.3f}, {verdict}")
    return found


if __name__ == "__main__":
    main()
