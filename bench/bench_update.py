"""Measure an update of the weights, from the optimizer's step to the version that is installed.

**Stages.** CPU seconds (user + system, all threads) per GB of the bf16 image, in a process of its
own for each kind of update (update/stages.py), with Qwen3-0.6B's shapes and float32 weights of
which a step changes a given share of the bf16 words. Kinds take turns:

    changes   weights are views of the image / in float32, which changes are scattered into
    whole     image, manifest, hashed segments, decoding into new space, hash, copy: as for late
              joiners, for float32, and where much has changed
    memory    the image alone, in new memory for each version instead of that of an older one

The first update of a process is cold, the median from the third on is warm. The sum of the least
that each stage took of these differs less between runs on a machine with other work. What the nodes
do in the background (the seal of a version, its audit) is told apart.

**Wire.** Seconds from the end of the step until the version is installed, by a learner and a node
that writes it in place as soon as it is there, two processes that talk over the project's
transport (update/node.py). Links of a given rate are emulated (wan.py, needs root); the wire's time
is that of the bytes that came, at what TCP can use of the rate. The cores are those of both
processes together; the emulator may use all.

    python bench/bench_update.py
    python bench/bench_update.py --quick            128 MiB, some minutes, writes nothing
    python bench/bench_update.py --before COMMIT    the stages of that commit as well, in turns

NOT RUN, for want of a GPU (8 GB of bf16, eight cores or more; rows have wall seconds, too):

    python bench/bench_update.py --device cuda --shape Qwen3-4B --parts stages --shares 0.014
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from broadcast.paths import Loopback, Wan, show_work, work_of
from update.state import SCALES, SHAPES

MTU_SHARE = 1448 / 1500
KINDS = {
    "changes, views": ("changes", "views"),
    "changes, float32": ("changes", "float32"),
    "whole": ("whole", "bfloat16"),
    "memory": ("image", "views"),
}
CRITICAL = {
    "learner": (
        "learner: round into an image",
        "learner: round into new memory",
        "learner: manifest",
        "learner: find, pack, sign",
    ),
    "worker": (
        "worker: verify chunks",
        "worker: open blocks",
        "worker: decode blocks",
        "worker: write (the pause)",
        "worker: scatter into the engine",
        "worker: hash at install",
        "worker: copy into the engine",
    ),
}
LATENCY_MS = 1.0
WARM = 3
"""The first update that counts as warm."""


def parse_arguments() -> argparse.Namespace:
    parser = harness.new_parser(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=["stages", "wire"], default=["stages", "wire"])
    add("--shape", choices=SHAPES, default="Qwen3-0.6B")
    add("--shares", nargs="+", type=float, choices=SCALES, default=list(SCALES))
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--updates", type=int, default=5, help="of each process")
    add("--rounds", type=int, default=2, help="processes of each kind, in turns")
    add("--rates-mbit", nargs="+", type=float, default=[100.0, 1000.0, 0.0], help="0: loopback")
    add("--cores", nargs="+", type=int, default=[1, 2], help="of learner and receiver together")
    add("--before", metavar="COMMIT", help="take the stages of this one, too, in turns")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="of the weights, for the stages")
    arguments = harness.parse(parser, shape="128MiB", updates=4, rounds=1)
    if arguments.updates < WARM:
        parser.error(f"--updates must be at least {WARM}: the first ones are not warm")
    return arguments


# --- stages ---------------------------------------------------------------------------------------


def stages_of(
    kind: str, share: float, tree: Path, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the updates of one process of a tree."""
    path, engine = KINDS[kind]
    bench = tree / "bench"
    # Where older commits have it.
    module = "update.stages" if (bench / "update").exists() else "update_stages"
    command = [sys.executable, "-m", module, path, f"--engine={engine}"]
    command += [f"--shape={arguments.shape}", f"--share={share}", f"--device={arguments.device}"]
    command += [f"--updates={arguments.updates}"]
    own = harness.finding(tree)
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=bench, env=own
    )
    updates = [json.loads(line) for line in done.stdout.splitlines()]
    ends = [sum(end_s(update, end) for end in CRITICAL) for update in updates]
    taken = ", ".join(f"{each:.3f}" for each in ends)
    print(f"{kind}, {share:.1%}, {tree.name}: {taken} CPU s/GB", flush=True)
    return updates


def row_of(kind: str, share: float, processes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what the processes of one kind took, per stage and in all."""
    cold = [updates[0] for updates in processes]
    warm = [update for updates in processes for update in updates[WARM - 1 :]]
    image_bytes = warm[0]["image_bytes"]
    row: dict[str, Any] = {
        "kind": kind,
        "share": f"{share:.1%}",
        "image_bytes": image_bytes,
        "ratio": statistics.median(image_bytes / update["wire_bytes"] for update in warm),
        "stages": {},
    }
    for name in warm[0]["stages"]:
        taken = [cpu_s(update, name) for update in warm]
        row["stages"][name] = {
            "cold": statistics.median(cpu_s(update, name) for update in cold),
            "warm": statistics.median(taken),
            "least": min(taken),
            "warm_all": [round(each, 4) for each in taken],
            "warm_wall": statistics.median(wall_s(update, name) for update in warm),
            "faults": statistics.median(update["stages"][name]["faults"] for update in warm),
        }
        if "words" in warm[0]["stages"][name]:
            row["stages"][name] |= pause_of([update["stages"][name] for update in warm])
    for when, updates in (("cold", cold), ("warm", warm)):
        ends = [{end: end_s(update, end) for end in CRITICAL} for update in updates]
        row[when] = {end: statistics.median(each[end] for each in ends) for end in CRITICAL}
        row[when]["both"] = statistics.median(sum(each.values()) for each in ends)
    own = row["stages"]
    least = {
        end: sum(own[each]["least"] for each in CRITICAL[end] if each in own) for end in CRITICAL
    }
    return {**row, "least": {**least, "both": sum(least.values())}}


def cpu_s(update: dict[str, Any], name: str) -> float:
    """Return the CPU seconds per GB of image of a stage."""
    stage = update["stages"][name]
    return float((stage["user"] + stage["system"]) / update["image_bytes"] * 1e9)


def wall_s(update: dict[str, Any], name: str) -> float:
    """Return the seconds per GB of image of a stage."""
    return float(update["stages"][name]["wall"] / update["image_bytes"] * 1e9)


def end_s(update: dict[str, Any], end: str) -> float:
    """Return the CPU seconds per GB of image of what is waited for at one end."""
    return sum(cpu_s(update, name) for name in CRITICAL[end] if name in update["stages"])


def pause_of(stages: list[dict[str, float]]) -> dict[str, float]:
    """Return how long the writing of a word takes, which is a pause where nobody may sample."""
    cpu = [1e9 * (each["user"] + each["system"]) / each["words"] for each in stages]
    wall = [1e9 * each["wall"] / each["words"] for each in stages]
    return {
        "cpu_ns_per_word": statistics.median(cpu),
        "wall_ns_per_word": statistics.median(wall),
        "least_wall_ns_per_word": min(wall),
    }


def measure_stages(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all kinds at all shares, in turns."""
    rows = []
    with harness.trees(arguments.before) as sides:
        for share in arguments.shares:
            cases = list(itertools.product(arguments.kinds, sides))
            processes: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
            for _, (kind, side) in itertools.product(range(arguments.rounds), cases):
                updates = stages_of(kind, share, sides[side], arguments)
                processes.setdefault((kind, side), []).append(updates)
            for kind, side in cases:
                row = row_of(kind, share, processes[kind, side])
                rows.append({"side": side, **row} if arguments.before else row)
                show_stages(rows[-1])
    return rows


def show_stages(row: dict[str, Any]) -> None:
    print(
        f"{row['kind']}, {row.get('side', 'now')}, {row['share']} changed, 1/{row['ratio']:.0f}: "
        "CPU s/GB, cold / warm / least (wall), page faults"
    )
    for name, stage in row["stages"].items():
        print(
            f"    {name:<34} {stage['cold']:7.3f} {stage['warm']:7.3f} {stage['least']:7.3f} "
            f"({stage['warm_wall']:.3f}) {stage['faults']:9.0f}",
            f"{stage['cpu_ns_per_word']:.2f} ns of CPU a word, {stage['wall_ns_per_word']:.2f} "
            f"(least {stage['least_wall_ns_per_word']:.2f}) ns"
            if "cpu_ns_per_word" in stage
            else "",
        )
    for end in ("learner", "worker", "both"):
        figures = " ".join(f"{row[when][end]:7.3f}" for when in ("cold", "warm", "least"))
        print(f"    {end.upper():<34} {figures}", flush=True)


# --- wire -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Start processes that may use so many cores."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class Pair:
    """A learner and a receiver."""

    def __init__(self, path: Loopback, kind: str, share: float, shape: str) -> None:
        """Start them, and have a first version installed."""
        words = [f"--kind={kind}", f"--share={share}", f"--shape={shape}"]
        self._learner = path.start(0, "update.node", f"--listen={path.listen(0)}", *words)
        self._processes = [self._learner]
        address = self._learner.hear()["address"]
        words = [f"--listen={path.listen(1)}", f"--connect={address}", "--name=receiver-1"]
        self._receiver = path.start(1, "broadcast.node", "receiver", *words)
        self._processes.append(self._receiver)
        self._receiver.hear()
        self._learner.ask("plan")
        self._wire_bytes = 0
        self.update()

    def update(self) -> dict[str, float]:
        """Publish a version; return how long it took until it was installed."""
        before_s = self._receiver.ask("cpu")["cpu_s"]
        published = self._learner.ask("publish")
        arrived = self._receiver.hear()
        sealed = self._learner.ask("seal")
        held = self._receiver.ask("hash")
        if held["hash"] != sealed["hash"]:
            raise RuntimeError(f"the receiver holds {held}, the learner {sealed}")
        row = {
            "seconds": arrived["at"] - published["at"],
            "wire_bytes": held["wire_bytes"] - self._wire_bytes,
            "image_bytes": sealed["image_bytes"],
            "learner_cpu_s": self._learner.ask("cpu")["cpu_s"] - published["cpu_s"],
            "receiver_cpu_s": self._receiver.ask("cpu")["cpu_s"] - before_s,
        }
        self._wire_bytes = held["wire_bytes"]
        self._learner.ask("step")
        return row

    def close(self) -> None:
        """End both, the receiver first."""
        for process in reversed(self._processes):
            process.close()


def measure_wire(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all rates on all numbers of cores."""
    rows = []
    limited = [rate for rate in arguments.rates_mbit if rate]
    paths = [limited] * bool(limited) + [[0.0]] * (0.0 in arguments.rates_mbit)
    cases = itertools.product(arguments.cores, ["changes", "whole"], paths)
    for cores, kind, rates in cases:
        with contextlib.ExitStack() as stack:
            path = Wan(2, rate_mbit=0.0, latency_ms=LATENCY_MS) if rates != [0.0] else Loopback()
            stack.callback(path.close)
            with on_cores(cores):
                pair = Pair(path, kind, 0.014, arguments.shape)
            stack.callback(pair.close)
            for rate in rates:
                if isinstance(path, Wan):
                    path.set(0, "up", rate)
                before = path.status()
                updates = [pair.update() for _ in range(arguments.updates)]
                show_work(work := work_of(before, path.status()))
                rows.append(wire_row(kind, cores, rate, updates) | {"emulator": work})
                print({key: value for key, value in rows[-1].items() if key != "emulator"})
    return rows


def wire_row(kind: str, cores: int, rate: float, updates: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians of the updates, the first apart."""
    warm = updates[WARM - 1 :]
    gb = warm[0]["image_bytes"] / 1e9
    row: dict[str, Any] = {
        "kind": kind,
        "cores": str(cores),
        "rate_mbit": f"{rate:g}",
        "first_s": updates[0]["seconds"],
        "all_s": [round(update["seconds"], 4) for update in updates],
    }
    for name in ("seconds", "wire_bytes"):
        row[name] = statistics.median(update[name] for update in warm)
    for end in ("learner", "receiver"):
        row[f"{end}_cpu_s_per_gb"] = statistics.median(each[f"{end}_cpu_s"] for each in warm) / gb
    if rate:
        row["wire_s"] = row["wire_bytes"] * 8e-6 / (rate * MTU_SHARE)
        row["x_wire"] = row["seconds"] / row["wire_s"]
        row["least_x_wire"] = min(update["seconds"] for update in updates) / row["wire_s"]
    return row


# --- aims -----------------------------------------------------------------------------------------


def aims(stages: list[dict[str, Any]], wire: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was to be reached, and what was."""
    rows: list[dict[str, Any]] = []

    def add(name: str, most: float, value: float) -> None:
        rows.append({"aim": name, "at_most": most, "figure": value, "is_met": value <= most})

    for row in stages:
        case = row.get("side", "now"), row["kind"], row["share"]
        if case == ("now", "changes, views", "1.4%"):
            pause = row["stages"]["worker: write (the pause)"]
            add("both ends, CPU s/GB", 0.65, row["warm"]["both"])
            add("worker, CPU s/GB", 0.12, row["warm"]["worker"])
            add("pause, ns of CPU per changed word", 4.0, pause["cpu_ns_per_word"])
            add("pause, ns per changed word", 4.0, pause["wall_ns_per_word"])
            add("first update over the third", 1.0, row["cold"]["both"] / row["warm"]["both"])
    for row in wire:
        if (row["kind"], row["cores"]) == ("changes", "2") and "x_wire" in row:
            most = 1.1 if row["rate_mbit"] == "100" else 6.0
            add(f"installed, times the wire at {row['rate_mbit']} Mbit/s", most, row["x_wire"])
    for row in rows:
        print(f"{row['aim']:<48} at most {row['at_most']:5.2f}: {row['figure']:.3f}")
    return rows


def main() -> None:
    arguments = parse_arguments()
    options = {key: value for key, value in vars(arguments).items() if key != "quick"}
    stages = measure_stages(arguments) if "stages" in arguments.parts else []
    wire = measure_wire(arguments) if "wire" in arguments.parts else []
    result = {"options": options, "stages": stages, "wire": wire, "aims": aims(stages, wire)}
    path = harness.save("update" if arguments.device == "cpu" else "update_gpu", result)
    print(f"wrote {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
