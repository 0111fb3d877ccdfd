"""Memory of real processes: of a whole run step by step, and of a trainer's step beside --dry-run.

    python bench/bench_memory.py run --model DIRECTORY --steps 300
    python bench/bench_memory.py step
    python bench/bench_memory.py lengths --model DIRECTORY

`run` starts a learner, a relay and two workers, as a user would, on prompts and completions of
ever-new lengths, and notes the resident bytes of each process when a step's row has come.
Its verdict: the learner is flat from step 20 on, the others once as many versions have come as a
node keeps deltas of. A step has 8 rollouts of up to 24 tokens, so that 300 steps of a model of 135M
parameters end within an hour on two cores: what a process keeps follows from the number of versions
and of lengths, which do not become fewer by that. Evaluations and checkpoints happen as in any run.

`step` makes steps with the most tokens that the settings allow, in a process of its own for each
vocabulary and case, and compares the peak with what the memory budget says. Cases: prompts that are
shared in a row and prompts that are not, gradient checkpointing, an adapter, a reference policy.

`lengths` fills rows in several ways, each in a process of its own: it counts the lengths of the
rows of 100 steps and the tokens that fill them, for small and large steps, and measures how the
process grows over --measured small steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import harness
import psutil
from learner.lengths import WAYS, watch
from learner.peak import CASES, measure
from learner.uneven import UnevenTask

from echo.cli.commands.quickstart import (
    NodeProcess,
    free_settings,
    join_environment,
    start_node,
    stop,
)
from echo.config.load import load_config
from echo.core.extras import find_config

FLAT = 0.03
"""Growth that counts as none."""
FROM_STEP = {"learner": 20, "relay": 64, "worker": 64}
"""Where a process of each role is to be as large as it gets."""
LOOK_S = 0.25
BENCH = Path(__file__).resolve().parent


# --- a run ----------------------------------------------------------------------------------------


def watch_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run four processes for so many steps; return the bytes of each by step, and the verdicts."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as held:
        path = find_config("quickstart.toml")
        settings = [
            f"model.name={arguments.model}",
            f"task.kind={UnevenTask.__module__}:{UnevenTask.__name__}",
            f"run.dir={arguments.keep or scratch}",
            "run.name=memory",
            f"run.max_steps={arguments.steps}",
            "batch.groups_per_step=2",
            "batch.group_size=4",
            "sampling.max_completion_tokens=24",
            "optimizer.learning_rate=1e-6",
            "eval.num_prompts=4",
            "network.chunk_bytes=1MiB",
            "network.lease_timeout_s=5min",
            "network.reconnect_for_s=15min",
            "network.dead_after_s=20s",
            "ui.live=off",
            *arguments.set,
        ]
        settings += free_settings(load_config(path, settings, "learner"), held)
        config = load_config(path, settings, "learner")
        os.environ |= harness.finding(BENCH, harness.ROOT)
        environment = join_environment(config)
        nodes = [start_node("learner", "learner", path, settings, extra=["--no-report"])]
        for name, role in (("relay", "relay"), ("w1", "worker"), ("w2", "worker")):
            own = [*settings, f"{role}.name={name}"]
            output = config.run_dir / "logs" / f"{name}.stderr"
            nodes.append(start_node(name, role, path, own, environment=environment, output=output))
        try:
            rows = look(nodes, config.run_dir / "metrics.jsonl", arguments.timeout_s)
        finally:
            stop(nodes, grace_s=10.0)
    roles = {node.name: node.role for node in nodes}
    return {"rows": rows, "verdicts": {name: verdict(rows, name, roles[name]) for name in roles}}


def look(nodes: list[NodeProcess], metrics: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Return MB of each process after each step and the most within it, until the learner ends."""
    processes = {node.name: psutil.Process(node.process.pid) for node in nodes}
    rows: list[dict[str, Any]] = []
    peaks = dict.fromkeys(processes, 0)
    num_steps, give_up_at = 0, time.monotonic() + timeout_s
    while nodes[0].process.poll() is None:
        if time.monotonic() > give_up_at:
            raise SystemExit(f"{num_steps} steps in {timeout_s:g} s: raise --timeout-s")
        now = {name: resident(process) for name, process in processes.items()}
        peaks = {name: max(peaks[name], size) for name, size in now.items()}
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        done = sum('"reward/mean"' in line for line in lines)
        if done > num_steps:
            num_steps = done
            rows.append({"step": done, "after_mb": now, "peak_mb": peaks})
            print(json.dumps(rows[-1]), flush=True)
            peaks = dict.fromkeys(processes, 0)
        time.sleep(LOOK_S)
    return rows


def resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss) // 1_000_000
    except psutil.NoSuchProcess:
        return 0


def verdict(rows: list[dict[str, Any]], name: str, role: str) -> dict[str, Any]:
    """Compare the last quarter of what is to be flat with the first, by their medians."""
    sizes = [row["after_mb"][name] for row in rows if row["step"] >= FROM_STEP[role]]
    sizes = [size for size in sizes if size]
    if len(sizes) < 8:
        return {"name": name, "is_flat": None, "from_step": FROM_STEP[role]}
    quarter = len(sizes) // 4
    first, last = statistics.median(sizes[:quarter]), statistics.median(sizes[-quarter:])
    return {
        "name": name,
        "from_step": FROM_STEP[role],
        "first_mb": first,
        "last_mb": last,
        "peak_mb": max(row["peak_mb"][name] for row in rows),
        "growth": round(last / first - 1.0, 4),
        "is_flat": last / first - 1.0 <= FLAT,
    }


# --- a step ---------------------------------------------------------------------------------------


def compare_steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return reckoned and measured bytes of a step by vocabulary and case."""
    rows = []
    for vocab_size, case in product(arguments.vocab, arguments.cases):
        own = ["--of", str(vocab_size), "--case", case]
        command = [sys.executable, __file__, *sys.argv[1:], *own]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows}


# --- lengths --------------------------------------------------------------------------------------


def compare_lengths(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return lengths, filling and growth by way of filling rows."""
    rows = []
    for way in arguments.ways:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows}


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("what", choices=["run", "step", "lengths"], nargs="?", default="step")
    parser.add_argument("--model", type=Path, help="directory of the model that a run trains")
    parser.add_argument("--steps", type=int, default=300, help="of a run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for a run"
    )
    parser.add_argument("--keep", type=Path, help="directory for the run, kept afterwards")
    parser.add_argument("--timeout-s", type=float, default=4 * 3600.0, help="for a run")
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936], help="of a step")
    parser.add_argument("--layers", type=int, default=30, help="of a step")
    parser.add_argument("--groups", type=int, default=4, help="of a step, of 8 rollouts each")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="of a step")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of lengths")
    parser.add_argument("--measured", type=int, default=24, help="steps of lengths that compute")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = harness.parse(
        parser, layers=2, groups=1, steps=8, vocab=[49152], cases=["shared", "lora"], measured=2
    )
    if arguments.what != "step" and arguments.quick and arguments.model is None:
        arguments.model = harness.tiny_model()
    if arguments.of is not None:  # as `compare_steps` starts it
        print(json.dumps(measure(arguments)))
    elif arguments.way is not None:  # as `compare_lengths` starts it
        arguments.steps = min(arguments.steps, 100)
        print(json.dumps(watch(arguments)))
    elif arguments.what == "step":
        name = f"memory_step_{arguments.dtype}"
        print(f"wrote {harness.save(name, compare_steps(arguments))}")
    elif arguments.model is None:
        parser.error(f"{arguments.what} needs --model, the directory of a model with its tokenizer")
    elif arguments.what == "lengths":
        print(f"wrote {harness.save('memory_lengths', compare_lengths(arguments))}")
    else:
        result = watch_run(arguments)
        for each in result["verdicts"].values():
            print(json.dumps(each))
        print(f"wrote {harness.save('memory_run', result)}")


if __name__ == "__main__":
    main()
