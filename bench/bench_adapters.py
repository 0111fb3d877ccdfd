"""Time from the publication of an adapter until all workers sample from it.

    python bench/bench_adapters.py [--versions 30] [--before COMMIT --rounds 3]

A learner that trains an adapter and three workers with vLLM are real processes that talk over
sockets on loopback, encrypted, recorded, acknowledged; the model is tiny and its weights random.
The clock starts when the optimizer's step is done and ends with the first token under the new
version at the last of the workers, which sample groups all the time (nodes/adapter_node.py).
`--before` has the nodes of another commit do the same in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
from nodes.processes import run_nodes

from echo.engine.model import VLLM_HEAD_DIM, build_model, save_tiny_model

GROUPS, SIZE, TOKENS = 24, 4, 96
MAX_STALENESS = 3
WARM_UP = 3
"""Versions that do not count."""

Run = dict[str, Any]

ENGINE = """
[lora]
rank = 8
[engine]
kind = "vllm"
options = { kv_cache_memory_bytes = 67108864 }
"""


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--versions", type=int, default=30, help="that count, of each round")
    parser.add_argument("--step-s", type=float, default=3.0, help="between two versions, at least")
    parser.add_argument("--before", metavar="COMMIT", help="measure this one beside ours")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = harness.parse(parser, workers=1, versions=3, step_s=1.0)
    rounds: dict[str, list[Run]] = {}
    with harness.trees(arguments.before) as sides:
        for _ in range(arguments.rounds):
            for side, tree in sides.items():
                with tempfile.TemporaryDirectory() as scratch:
                    found = run(tree, Path(scratch), arguments)
                rounds.setdefault(side, []).append({**found, "load_average": os.getloadavg()[0]})
                print(side, json.dumps(summary(rounds[side][-1:])), flush=True)
    rows = [{"side": side, **summary(runs)} for side, runs in rounds.items()]
    result = {"before": arguments.before, "options": vars(arguments), "rows": rows}
    print(f"wrote {harness.save('adapters', {**result, 'settings': rounds})}")


def run(tree: Path, where: Path, arguments: argparse.Namespace) -> Run:
    """Return what became of versions and groups, in one run of the nodes of a tree."""
    steps = WARM_UP + arguments.versions
    save_tiny_model(where / "model", build_model(seed=0, head_dim=VLLM_HEAD_DIM))
    names = [f"w{number}" for number in range(arguments.workers)]
    paths = {name: where / f"{name}.jsonl" for name in ("learner", *names)}
    run_nodes(
        "nodes.adapter_node",
        where,
        names,
        lambda name: [f"--step-s={arguments.step_s}", f"--events={paths[name]}"],
        within_s=300 + 10 * steps * arguments.step_s,
        tree=tree,
        more=ENGINE,
        steps=steps,
        tokens=TOKENS,
        max_staleness=MAX_STALENESS,
        group_size=SIZE,
        groups_per_step=GROUPS,
        max_concurrent_rollouts=32,
        dead_after_s=60,
    )
    events = {name: harness.read_rows(path) for name, path in paths.items()}
    if not events["learner"]:
        raise SystemExit((where / "output.txt").read_text()[-3000:])
    steps_rows = [
        row for row in harness.read_rows(where / "run" / "metrics.jsonl") if "groups/mixed" in row
    ]
    return {
        "versions": list(follow(events)),
        "mixed_groups": statistics.fmean(row["groups/mixed"] for row in steps_rows[WARM_UP:]),
        "staleness": statistics.fmean(row["staleness/mean"] for row in steps_rows[WARM_UP:]),
    }


def follow(events: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, float]]:
    """Yield how long each version took that all workers have sampled from."""
    published = {row["step"]: row["at"] for row in events.pop("learner")}
    told = [
        {(row["event"], row["step"]): row for row in rows if row["step"] > WARM_UP}
        for rows in events.values()
    ]
    for step, at in published.items():
        rows = [(own.get(("loaded", step)), own.get(("sampled", step))) for own in told]
        found = [(loaded, sampled) for loaded, sampled in rows if loaded and sampled]
        if len(found) == len(told):
            yield {
                "sampled_s": max(sampled["at"] for _, sampled in found) - at,
                "first_sampled_s": min(sampled["at"] for _, sampled in found) - at,
                **{
                    name: max(loaded[name] for loaded, _ in found)
                    for name in ("load_s", "gap_s", "gap_cpu_s", "usual_gap_cpu_s")
                },
            }


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return quantiles over all versions of all rounds, and the medians of the rounds."""
    versions = [version for each in runs for version in each["versions"]]
    found: dict[str, Any] = {"versions": len(versions)}
    for name in versions[0]:
        values = sorted(version[name] for version in versions)
        found[name] = {
            "p50": round(statistics.median(values), 4),
            "p90": round(values[int(0.9 * (len(values) - 1))], 4),
            "max": round(values[-1], 4),
        }
    found["sampled_s"]["p50_of_rounds"] = [
        round(statistics.median(version["sampled_s"] for version in each["versions"]), 4)
        for each in runs
    ]
    for name in ("mixed_groups", "staleness", "load_average"):
        found[name] = [round(each[name], 3) for each in runs]
    return found


if __name__ == "__main__":
    main()
