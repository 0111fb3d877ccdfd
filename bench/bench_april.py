"""Measure active partial rollouts (APRIL) on heavy-tailed lengths.

The setting is the paper's as far as it is known: batches of 32 groups of 8, 64 groups submitted
where rollouts are stopped early, responses of at most 16384 tokens. What is not known is stated:
8 engines, each of which takes as long for a token as an H100 that reads the weights of a 4B model
and the caches of all rows that sample (april/engine.py), with 64 rows; lognormal lengths of sigma
1, half of its square between prompts, and a range of medians. Compared are

    paper       a synchronous learner whose rollout phase waits for every rollout, without Echo,
                and the same with the paper's early stop (april/paper.py): what the paper's
                algorithm gains in this setting, beside what is published of it
    synchronous Echo with max_staleness = 0, where each batch waits for every one of its rollouts
                (its workers have rows for just their share of a batch, 4 groups, so that none of
                them gets more than that and is slower for it)
    f = 1       Echo with max_staleness = 5, without over-submission
    f = 2       the same with over-submission

on an engine that takes requests at any time (vLLM) and on one that samples batches (transformers).
The engine is timed; worker and learner roles, leases, admission, parking and continuing are the
real ones (april/lab.py). Time is virtual, so the figures do not depend on the machine. The paper
compares the throughput of rollout phases, in which no step is made: `rollout` below. `whole` counts
the 20 s of a step, too, in which a synchronous learner's engines stand still.

    python bench/bench_april.py [--seeds 0 1 2 3 4] [--steps 12] [--medians 6000 12000]
"""

from __future__ import annotations

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
from april import paper
from april.engine import Setting
from april.lab import measure

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"max_staleness": 0, "over_submission": 1.0, "groups_per_worker": 4},
    "f = 1": {"over_submission": 1.0},
    "f = 2": {"over_submission": 2.0},
}
ENGINES = {"continuous": True, "batches": False}
COMPARED = [("continuous", mode) for mode in MODES] + [
    ("batches", mode) for mode in ("f = 1", "f = 2")
]
"""Without staleness all rollouts of a batch have rows at once, in either engine."""
PUBLISHED = {"DAPO-Math-17k": 0.17, "DeepScaleR": 0.21, "DeepMath-103K": 0.35, "mean": 0.225,
             "max": 0.44}  # fmt: skip
"""The paper's gains with Qwen3-4B, and over all of its runs."""

NAMES = ("rollout_tokens_per_s", "tokens_per_s", "rollout_s_per_batch", "seconds_per_batch",
         "rows_idle", "learner_idle", "mean_staleness", "masked_share", "prefilled_per_sampled",
         "mean_length")  # fmt: skip

Runs = dict[tuple[float, str, str], list[dict[str, Any]]]
"""By median, engine and mode; one for each seed."""


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--medians", type=float, nargs="+", default=[6000, 12000])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = harness.parse(parser, seeds=[0], steps=4, medians=[6000])
    runs: Runs = {}
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        for median in arguments.medians:
            base = Setting(num_steps=arguments.steps, median_tokens=median)
            seeds = [replace(base, seed=seed) for seed in arguments.seeds]
            submitted = base.groups_per_step
            for mode, number in {"synchronous": submitted, "f = 2": 2 * submitted}.items():
                long = [replace(setting, num_steps=4 * base.num_steps) for setting in seeds]
                found = [paper.play(setting, num_submitted=number) for setting in long]
                runs[median, "paper", mode] = found
            for engine, mode in COMPARED:
                changes: dict[str, Any] = {"is_continuous": ENGINES[engine], **MODES[mode]}
                settings = [replace(setting, **changes) for setting in seeds]
                runs[median, engine, mode] = list(pool.map(measure, settings))
                show(median, engine, mode, runs)
            report(runs)


def show(median: float, engine: str, mode: str, runs: Runs) -> None:
    own = runs[median, engine, mode]
    figures = {name: statistics.mean(run[name] for run in own) for name in NAMES if name in own[0]}
    text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    print(f"median {median:g}, {engine:10} {mode:11}: {text}", flush=True)


def report(runs: Runs) -> None:
    """Print the gains, and write all."""
    gains = []
    for (median, engine, mode), own in runs.items():
        row: dict[str, Any] = {"median": median, "engine": engine, "mode": mode}
        # The paper's rollouts of a group are spread over the engines, so its phases are shorter.
        bases = {"paper_synchronous": ("paper", "synchronous"), "f1": (engine, "f = 1")}
        for over, (base_engine, base_mode) in bases.items():
            base = runs.get((median, base_engine, base_mode))
            if base is not None and (engine, mode) != (base_engine, base_mode):
                name = "rollout_tokens_per_s"
                row[f"{name}/over_{over}"] = compare(own, base, name)
        waiting = runs[median, "continuous", "synchronous"]
        if engine != "paper" and mode != "synchronous" and waiting:
            row["tokens_per_s/over_synchronous"] = compare(own, waiting, "tokens_per_s")
        gains.append(row)
        parts = [f"{key} {g['mean']:+.1%}" for key, g in row.items() if isinstance(g, dict)]
        if parts:
            print(f"median {median:g}, {engine:10} {mode:8}: " + ", ".join(parts))
    result = {
        "what": "timed engine, real roles, virtual time; the rows of `paper` without roles",
        "published_gains": PUBLISHED,
        "gains": gains,
        "runs": [
            {"median": median, "engine": engine, "mode": mode, "figures": without_steps(own)}
            for (median, engine, mode), own in runs.items()
        ],
    }
    print(f"wrote {harness.save('april', result)}")
    print(f"wrote {draw(runs, gains, harness.result_path('april', '.png'))}")


def compare(own: list[dict[str, Any]], base: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the gain in a figure over the base's runs with the same seeds."""
    ratios = [run[name] / other[name] - 1 for run, other in zip(own, base, strict=True)]
    return {
        "mean": round(statistics.mean(ratios), 4),
        "seeds": [round(ratio, 4) for ratio in ratios],
    }


def without_steps(own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in run.items() if key != "steps"} for run in own]


def draw(runs: Runs, gains: list[dict[str, Any]], path: Path) -> Path:
    """Draw the gains by median, the batches made against time, and what lengths they have."""
    figure = harness.new_figure((12, 3.8), dpi=110)
    bars, made, lengths = figure.subplots(1, 3)
    shown = [
        ("paper", "f = 2", "paper's algorithm"), ("continuous", "f = 1", "Echo, f = 1, continuous"),
        ("batches", "f = 2", "Echo, f = 2, batches"),
    ]  # fmt: skip
    medians = sorted({median for median, _, _ in runs})
    for place, (engine, mode, label) in enumerate(shown):
        key = "rollout_tokens_per_s/over_paper_synchronous"
        chosen = [row for row in gains if (row["engine"], row["mode"]) == (engine, mode)]
        own = {row["median"]: row for row in chosen}
        if own:
            heights = [100 * own[median][key]["mean"] for median in medians]
            bars.bar([n + 0.26 * place for n in range(len(medians))], heights, 0.25, label=label)
    bars.axhline(22.5, color="black", linestyle="--", linewidth=1, label="published mean, max")
    bars.axhline(44, color="black", linestyle=":", linewidth=1)
    places = [n + 0.26 for n in range(len(medians))]
    bars.set_xticks(places, [f"median {median:g}" for median in medians])
    bars.set(ylabel="% more tokens/s of rollout phases", title="over the synchronous phase")
    bars.legend(fontsize=8, loc="lower right")
    middle = medians[len(medians) // 2]
    for (median, engine, mode), measured in runs.items():
        if median == middle and engine == "continuous":
            steps = measured[0]["steps"]
            numbers = range(1, len(steps) + 1)
            made.plot([step["at"] / 60 for step in steps], numbers, label=mode)
            lengths.plot(numbers, [step["mean_length"] for step in steps], label=mode)
    made.set(xlabel="minutes (virtual)", ylabel="optimizer steps", title=f"median {middle:g}")
    made.legend(fontsize=8, title="continuous")
    lengths.set(xlabel="step", ylabel="mean tokens per trained completion", ylim=(0, None))
    figure.savefig(path)
    return path


if __name__ == "__main__":
    main()
