"""Reward against time with heavy-tailed rollouts: synchronous, asynchronous, and with APRIL.

The quickstart's model is sampled and trained for real; only time is computed, as if each rollout
were as long as a heavy tail says (april_learning.py), on the fleet and the lengths of
bench_april.py. All three runs of a seed see the same prompts and lengths.

    python bench/bench_april_reward.py MODEL [--seeds 0 1 2] [--steps 60] [--median 6000]

MODEL is the directory that the quickstart has made, build/models/addition-*; a quick run without
one takes random weights.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import harness
from april.engine import Setting
from april.lab import measure
from april.learning import Addition
from bench_april import MODES

SHOWN = ("synchronous", "f = 1", "f = 2")


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-steps", type=int, default=5)
    parser.add_argument("--median", type=float, default=6000.0, help="tokens of a rollout")
    parser.add_argument("--workers", type=int, default=8, help="a step has 4 groups of each")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    quick = {"seeds": [0], "steps": 4, "eval_steps": 4, "workers": 1, "jobs": 1}
    arguments = harness.parse(parser, **quick, set=["eval.num_prompts=16"])
    if arguments.model is None:
        if not arguments.quick:
            parser.error("name MODEL, the directory that the quickstart has made")
        arguments.model = harness.tiny_model()
    tasks = [(mode, seed) for mode in SHOWN for seed in arguments.seeds]
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(run, mode, seed, arguments) for mode, seed in tasks]
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in SHOWN}
        for (mode, seed), job in zip(tasks, jobs, strict=True):
            own = job.result()
            runs[mode].append(own)
            text = f"{own['minutes']:.1f} min, sampled {own['curve'][-1]['sampled']:.3f}"
            print(f"seed {seed}, {mode:11}: {text}", flush=True)
        report(runs)


def report(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print the means over the seeds, and write all."""
    table = {mode: summarise(own, [0.45, 0.5, 0.6, 0.7]) for mode, own in runs.items()}
    for mode, row in table.items():
        print(f"{mode:11}: {row}")
    result = {
        "what": "real model, rollouts and steps; time is computed (april_learning.py)",
        "summary": table,
        "runs": runs,
    }
    print(f"wrote {harness.save('april_reward', result)}")
    print(f"wrote {draw(runs, harness.result_path('april_reward', '.png'))}", flush=True)


def run(mode: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train once; return the curve, the held-out pass rates against minutes first."""
    setting = Setting(
        seed=seed,
        num_steps=arguments.steps,
        num_workers=arguments.workers,
        groups_per_step=4 * arguments.workers,
        median_tokens=arguments.median,
        **MODES[mode],
    )
    contents: list[Addition] = []

    def make_content(setting: Setting) -> Addition:
        overrides = [f"model.name={arguments.model}", *arguments.set]
        contents.append(Addition(setting, overrides, eval_steps=arguments.eval_steps))
        return contents[-1]

    found = measure(setting, make_content)
    steps = found.pop("steps")
    evaluated = [(number, step) for number, step in enumerate(steps, 1) if "sampled" in step]
    return {
        **found,
        "minutes": steps[-1]["at"] / 60,
        "curve": [
            {"step": 0, "minutes": 0.0, **contents[0].first_rewards},
            *({"step": number, **point(step)} for number, step in evaluated),
        ],
        "rewards": [[round(step["at"] / 60, 3), round(step["reward"], 4)] for step in steps],
    }


def point(step: dict[str, Any]) -> dict[str, float]:
    return {"minutes": step["at"] / 60, "sampled": step["sampled"], "greedy": step["greedy"]}


def summarise(own: list[dict[str, Any]], levels: list[float]) -> dict[str, Any]:
    """Return means over the seeds: minutes, final pass rate, minutes until each level."""
    mean = partial(_mean_of, own)
    return {
        "minutes": mean(lambda run: run["minutes"]),
        "final_sampled": mean(lambda run: run["curve"][-1]["sampled"]),
        "mean_staleness": mean(lambda run: run["mean_staleness"]),
        "minutes_to": {f"{level:g}": mean(partial(minutes_to, level)) for level in levels},
    }


def _mean_of(own: list[dict[str, Any]], of: Any) -> float | None:
    values = [of(run) for run in own]
    return None if None in values else round(statistics.mean(values), 3)


def minutes_to(level: float, run: dict[str, Any]) -> float | None:
    """Return when the pass rate first was at a level, between two evaluations; None for never."""
    curve = run["curve"]
    for before, after in itertools.pairwise(curve):
        if after["sampled"] >= level:
            part = (level - before["sampled"]) / (after["sampled"] - before["sampled"])
            minutes: float = before["minutes"] + part * (after["minutes"] - before["minutes"])
            return minutes
    return None


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> Path:
    """Draw the held-out pass rates against time and against steps."""
    figure = harness.new_figure((10, 3.8), dpi=110)
    by_time, by_step = figure.subplots(1, 2, sharey=True)
    for number, (mode, own) in enumerate(runs.items()):
        for place, run in enumerate(own):
            label = f"{mode} ({run['minutes']:.0f} min)" if not place else None
            minutes = [point["minutes"] for point in run["curve"]]
            rates = [point["sampled"] for point in run["curve"]]
            color = f"C{number}"
            by_time.plot(minutes, rates, color=color, alpha=0.8, linewidth=1.2, label=label)
            steps = [point["step"] for point in run["curve"]]
            by_step.plot(steps, rates, color=color, alpha=0.8, linewidth=1.2)
    by_time.set(xlabel="minutes (virtual)", ylabel="held-out pass rate, sampled")
    by_step.set(xlabel="optimizer steps")
    by_time.legend(fontsize=8, loc="lower right")
    figure.savefig(path)
    return path


if __name__ == "__main__":
    main()
