"""Count which of two equal workers makes the first groups, and time the first step.

    python bench/bench_shares.py [--runs 5] [--before COMMIT] [--max-staleness 0]
    python bench/bench_shares.py --quick                 one run, writes nothing

A learner and two workers talk over loopback (nodes/timed_node.py): only the groups of the workers
take a given time. The first leases are those of all batches that the bound on staleness allows.
The worker that joins first has places for them all. Both start together, so the other joins before
the first group is done: all of them at once take a worker several times --group-s. With a bound of
0 all of the first leases are the first batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import harness
from nodes.processes import run_nodes

from echo.core.records import Granted
from echo.engine.model import build_model, save_tiny_model
from echo.records.ledger import Accepted, Trained, read_records

FIRST = range(12)
"""The groups that are leased before anything is accepted."""
SIZE, TOKENS, SLOTS = 4, 16, 2
"""Rollouts of a group, tokens of each, and groups that a worker samples at full speed."""
WORKERS = ("w1", "w2")


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--group-s", type=float, default=10.0, help="that a worker needs for one")
    parser.add_argument("--max-staleness", type=int, default=2, choices=[0, 1, 2, 3, 5])
    parser.add_argument("--before", metavar="COMMIT", help="measure this one beside ours, in turns")
    arguments = harness.parse(parser, runs=1, group_s=3.0)
    runs: dict[str, list[dict[str, Any]]] = {}
    with harness.trees(arguments.before) as sides:
        for _ in range(arguments.runs):
            for side, tree in sides.items():
                with tempfile.TemporaryDirectory() as scratch:
                    runs.setdefault(side, []).append(run(tree, Path(scratch), arguments))
                print(side, json.dumps(runs[side][-1]), flush=True)
    rows = [{"side": side, **summary(found)} for side, found in runs.items()]
    for row in rows:
        print(json.dumps(row), flush=True)
    options = {"first_leases": len(FIRST), "group_size": SIZE, "slots": SLOTS}
    result = {"options": options | vars(arguments), "rows": rows, "settings": runs}
    name = f"shares_s{arguments.max_staleness}"
    print(f"wrote {harness.save(name, result)}")


def run(tree: Path, where: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the records of one run say."""
    save_tiny_model(where / "model", build_model(seed=0))
    timed = ["--step-s=0", f"--group-s={arguments.group_s}", "--spread=0.1", f"--slots={SLOTS}"]
    run_dir = run_nodes(
        "nodes.timed_node",
        where,
        WORKERS,
        lambda _: timed,
        within_s=300 + 4 * len(FIRST) * arguments.group_s,
        tree=tree,
        steps=arguments.max_staleness + 1,
        tokens=TOKENS,
        max_staleness=arguments.max_staleness,
        group_size=SIZE,
        groups_per_step=len(FIRST) // (arguments.max_staleness + 1),
        max_concurrent_rollouts=len(FIRST) * SIZE,
        dead_after_s=20,
    )
    return shares(run_dir)


def shares(run_dir: Path) -> dict[str, Any]:
    """Return how many of the first groups each worker was given first, and how many it made.

    Seconds count from the first grant.
    """
    granted, made = Counter[str](), dict[int, str]()
    began_at = first_step_at = 0.0
    granted_at = dict[str, float]()
    first_step: tuple[int, ...] = ()
    for record in read_records(run_dir):
        match record:
            case Granted():
                began_at = began_at or record.at
                granted_at.setdefault(record.worker, record.at)
                if record.group in FIRST and record.attempt == 0:
                    granted[record.worker] += 1
            case Accepted():
                made[record.group] = record.worker
            case Trained(step=1):
                first_step, first_step_at = record.groups, record.at
    by_first = Counter(made[group] for group in FIRST if group in made)
    by_step = Counter(made[group] for group in first_step)
    return {
        "granted": sorted((granted[name] for name in WORKERS), reverse=True),
        "first_leases": sorted((by_first[name] for name in WORKERS), reverse=True),
        "first_step": sorted((by_step[name] for name in WORKERS), reverse=True),
        "first_step_s": round(first_step_at - began_at, 2),
        "second_granted_s": round(max(granted_at.values()) - began_at, 2),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median time to the first step, and the largest difference of the shares."""
    return {
        "runs": len(runs),
        "first_step_s": statistics.median(each["first_step_s"] for each in runs),
        **{
            f"{name}_difference": max(high - low for high, low in (run[name] for run in runs))
            for name in ("granted", "first_leases", "first_step")
        },
    }


if __name__ == "__main__":
    main()
