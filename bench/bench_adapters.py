"""Time from the publication of an adapter until all workers sample from it.

    python bench/bench_adapters.py [--versions 30] [--before COMMIT --rounds 3]

A learner that trains an adapter and three workers with vLLM are real processes that talk over
sockets on loopback, encrypted, journalled, acknowledged; the model is tiny and its weights random.
The clock starts when the optimizer's step is done and ends with the first token under the new
version at the last of the workers, which sample groups all the time (adapter_node.py). `--before`
has the nodes of another commit do the same in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

from echo.engine.model import VLLM_HEAD_DIM, build_model, save_tiny_model

HERE = Path(__file__).resolve().parent
GROUPS, SIZE, TOKENS, RANK = 24, 4, 96, 8
MAX_STALENESS = 3
WARM_UP = 3
"""Versions that do not count."""

Run = dict[str, Any]

CONFIG = f"""
[run]
max_steps = {{steps}}
dir = "{{directory}}"
[model]
name = "{{directory}}/model"
[lora]
rank = {RANK}
[sampling]
max_completion_tokens = {TOKENS}
[sync]
max_staleness = {MAX_STALENESS}
publish_period = 1
[batch]
group_size = {SIZE}
groups_per_step = {GROUPS}
keep_zero_variance = true
[learner]
listen = "tcp://127.0.0.1:0"
num_threads = 1
[worker]
num_threads = 1
max_concurrent_rollouts = 32
[engine]
kind = "vllm"
options = {{{{ kv_cache_memory_bytes = 67108864 }}}}
[checkpoint]
interval_steps = 100000
[eval]
interval_steps = 0
[network]
heartbeat_s = 1
dead_after_s = 60
[limits]
min_free_disk_bytes = 0
[activation]
mode = "off"
[ui]
live = "off"
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--versions", type=int, default=30, help="that count, of each round")
    parser.add_argument("--step-s", type=float, default=3.0, help="between two versions, at least")
    parser.add_argument("--before", metavar="COMMIT", help="measure this one beside ours")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = harness.parse(parser, versions=6)
    rounds: dict[str, list[Run]] = {}
    with trees(arguments.before) as sides:
        for _ in range(arguments.rounds):
            for side, tree in sides.items():
                with tempfile.TemporaryDirectory() as scratch:
                    found = run(tree, Path(scratch), arguments)
                rounds.setdefault(side, []).append({**found, "load_average": os.getloadavg()[0]})
                print(side, json.dumps(summary(rounds[side][-1:])), flush=True)
    rows = [{"side": side, **summary(runs)} for side, runs in rounds.items()]
    result = {"before": arguments.before, "options": vars(arguments), "rows": rows}
    print(f"wrote {harness.save('adapters', {**result, 'settings': rounds})}")


@contextmanager
def trees(before: str | None) -> Iterator[dict[str, Path]]:
    """Yield the trees whose nodes are measured, by side."""
    root = HERE.parent
    if before is None:
        yield {"now": root}
        return
    with tempfile.TemporaryDirectory() as scratch:
        tree, git = Path(scratch) / "before", ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), before], check=True)
        try:
            yield {"before": tree, "now": root}
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def run(tree: Path, where: Path, arguments: argparse.Namespace) -> Run:
    """Return what became of versions and groups, in one run of the nodes of a tree."""
    steps = WARM_UP + arguments.versions
    save_tiny_model(where / "model", build_model(seed=0, head_dim=VLLM_HEAD_DIM))
    config = where / "run.toml"
    config.write_text(CONFIG.format(steps=steps, directory=where))
    program = [sys.executable, str(HERE / "adapter_node.py")]
    common = ["--config", str(config), "--step-s", str(arguments.step_s)]
    names = [f"w{number}" for number in range(arguments.workers)]
    paths = {name: where / f"{name}.jsonl" for name in ("learner", *names)}
    environment = os.environ | {"PYTHONPATH": str(tree)}
    processes: list[subprocess.Popen[bytes]] = []

    def start(role: str, name: str, *extra: str) -> None:
        command = [*program, role, *common, "--events", str(paths[name]), *extra]
        processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    with (where / "output.txt").open("wb") as log:
        try:
            start("learner", "learner")
            join = where / "run" / "keys" / "join"
            while not join.exists():
                if processes[0].poll() is not None:
                    raise SystemExit((where / "output.txt").read_text()[-3000:])
            for name in names:
                start("worker", name, "--set", f"worker.name={name}",
                      "--set", f"security.join={join}")  # fmt: skip
            processes[0].wait(timeout=300 + 10 * steps * arguments.step_s)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
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
