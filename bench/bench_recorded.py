"""Measure what the codec makes of the versions of real training runs.

Each run is the quickstart (a learner, a relay, two workers) with a checkpoint after every step. The
float32 masters in them, rounded to bf16 as publication does it, are the versions that its workers
got. Each is coded against the one before it, and as a keyframe; beside it the exclusive or with the
base through zstd level 1. The model is small (100,736 and 108,000 weights), so a delta is one or
two blocks: their heads count.

    changed %     words of a version that differ from those of the one before, median over the steps
    ratio         bytes of the image by bytes of the delta, all steps of the run together
    keyframe      bytes of the last image by bytes of it coded without a base

    python bench/bench_recorded.py
    python bench/bench_recorded.py --quick          one short run, writes nothing
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness
import numpy as np
import numpy.typing as npt
from bench_delta import Echo, XorZstd, rounded, timed
from learning.quickstart import train
from safetensors.numpy import load_file

from echo.train.saved_state import WEIGHTS_FILE
from echo.weights.delta import BLOCK_BYTES

COLUMNS = "{:<10} {:>8} {:>6} {:>10} {:>8} {:>14} {:>10} {:>9} {:>9}"
HEADINGS = [
    "task", "rate", "steps", "changed %", "ratio", "first-last", "xor+zstd1", "keyframe", "xor key",
]  # fmt: skip


def main() -> None:
    parser = harness.new_parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", default=["addition", "countdown"])
    add("--rates", nargs="+", default=["3e-4", "3e-5", "3e-6", "1e-6"], help="of learning")
    add("--steps", type=int, default=60)
    add("--timeout-s", type=float, default=400, help="for one run")
    arguments = harness.parse(parser, tasks=["addition"], rates=["3e-5"], steps=6)
    rows = []
    print(COLUMNS.format(*HEADINGS))
    for task in arguments.tasks:
        for rate in arguments.rates:
            rows.append(run(task, rate, arguments))
            show(rows[-1])
    settings = {name: getattr(arguments, name) for name in ("tasks", "rates", "steps")}
    print(f"wrote {harness.save('recorded', {'settings': settings, 'rows': rows})}")


def run(task: str, rate: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train once and return the figures of its versions."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = (
            f"run.dir={scratch}", "run.name=run", f"run.max_steps={arguments.steps}",
            f"optimizer.learning_rate={rate}", "checkpoint.interval_steps=1",
            f"checkpoint.keep_last={arguments.steps}", f"eval.interval_steps={arguments.steps}",
        )  # fmt: skip
        train(task, 0, settings, timeout_s=arguments.timeout_s)
        images = [image_of(path) for path in checkpoints(Path(scratch) / "run")]
    return {"task": task, "learning_rate": float(rate), **figures_of(images)}


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the directories of weights, in the order of their steps."""
    found = {int(path.name.rpartition("_")[2]): path for path in run_dir.glob("checkpoints/step_*")}
    return [next(found[step].rglob(WEIGHTS_FILE)) for step in sorted(found)]


def image_of(weights: Path) -> npt.NDArray[np.uint8]:
    """Return the bf16 image of a checkpoint's float32 masters."""
    tensors = load_file(weights)
    return np.concatenate(
        [rounded(tensors[name].reshape(-1)).view(np.uint8) for name in sorted(tensors)]
    )


def figures_of(images: list[npt.NDArray[np.uint8]]) -> dict[str, Any]:
    """Return how much changes from one image to the next, and what codes of it cost."""
    pairs = list(itertools.pairwise(images))
    shares = [float(np.mean(old.view(np.uint16) != new.view(np.uint16))) for old, new in pairs]
    row: dict[str, Any] = {
        "steps": len(pairs),
        "image_bytes": images[0].nbytes,
        "changed_share": statistics.median(shares),
        "changed_shares": [round(share, 5) for share in shares],
    }
    for name, codec in (("echo", Echo(2)), ("xor_zstd1", XorZstd())):
        sizes = [coded_bytes(codec, old, new) for old, new in pairs]
        row[name] = {
            "ratio": sum(new.nbytes for _, new in pairs) / sum(sizes),
            "first_ratio": images[0].nbytes / sizes[0],
            "last_ratio": images[0].nbytes / sizes[-1],
            "keyframe_ratio": images[-1].nbytes / coded_bytes(codec, None, images[-1]),
        }
    return row


def coded_bytes(
    codec: Echo | XorZstd, old: npt.NDArray[np.uint8] | None, new: npt.NDArray[np.uint8]
) -> int:
    """Return the bytes of an image coded block by block; what comes back is compared with it."""
    total, out = 0, np.empty_like(new)
    for start in range(0, new.nbytes, BLOCK_BYTES):
        block = slice(start, start + BLOCK_BYTES)
        base = None if old is None else old[block].data
        _, coded = timed(functools.partial(codec.encode, base, new[block].data))
        codec.decode(coded, base, out[block].data)
        total += len(coded)
    if not np.array_equal(out, new):
        raise SystemExit(f"{type(codec).__name__} did not bring an image back")
    return total


def show(row: dict[str, Any]) -> None:
    ours, theirs = row["echo"], row["xor_zstd1"]
    print(
        COLUMNS.format(
            row["task"],
            f"{row['learning_rate']:g}",
            row["steps"],
            f"{100 * row['changed_share']:.2f}",
            f"{ours['ratio']:.1f}",
            f"{ours['first_ratio']:.1f}-{ours['last_ratio']:.1f}",
            f"{theirs['ratio']:.1f}",
            f"{ours['keyframe_ratio']:.2f}",
            f"{theirs['keyframe_ratio']:.2f}",
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
