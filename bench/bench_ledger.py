"""Cost of accepting a group: the ledger of this checkout and of another one, in turns.

A learner's loop and its disk thread, without network and model: groups are granted, come, are
stored and acknowledged once they are on the disk; every 32 of them are a step, every 10 steps a
checkpoint frees their files. Two loads: `steady`, at a rate that leaves the disk idle most of the
time, and `full`, with 16 groups on their way at any time. Latencies are of acceptance (a group has
come -> it may be acknowledged) and of a grant (decided -> it may be sent).

Each turn is a process of its own. The ledger before comes from a checkout of that commit:

    git worktree add ../before COMMIT
    python bench/bench_ledger.py --before ../before
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"20 kB": (8, 147), "2 MB": (16, 7710)}
"""Rollouts of a group and tokens of each; a token has 17 bytes."""
LOADS = {"steady": {"20 kB": 100.0, "2 MB": 8.0}, "full": {"20 kB": 0.0, "2 MB": 0.0}}
"""Groups per second; 0 for as many as it takes."""
NUM_GROUPS = {"20 kB": 1000, "2 MB": 240}
IN_FLIGHT = 16
STEP_GROUPS = 32
CHECKPOINT_STEPS = 10


def make_group(num_rollouts: int, num_tokens: int) -> Any:
    from echo.core import rollout

    chance = np.random.default_rng(0)
    rollouts = tuple(
        rollout.Rollout(
            token_ids=chance.integers(0, 150_000, num_tokens, dtype=np.int32),
            sampler_logprobs=-chance.random(num_tokens, dtype=np.float32),
            policy_versions=np.tile(np.array([1, 0], np.int32), (num_tokens, 1)),
            completion_mask=np.ones(num_tokens, np.bool_),
            reward=float(member % 2),
            finish_reason="stop",
        )
        for member in range(num_rollouts)
    )
    return rollout.Group(
        group_id=0,
        attempt=0,
        worker_id="worker-1",
        prompt_ids=np.arange(64, dtype=np.int32),
        rollouts=rollouts,
    )


class Records:
    """The ledger of a checkout; its thread writes everything, and what waits for it goes on."""

    def __init__(self, run_dir: Path, disk: Callable[..., Any]) -> None:
        from echo.core.records import Granted
        from echo.core.rollout import PolicyVersion
        from echo.records.ledger import Began, Ledger

        self.ledger = Ledger(run_dir, spool_bytes=1 << 40)
        self.ledger.append(Began(lineage=1, fork_step=0))
        self.granted = partial(Granted, attempt=0, worker="worker-1", version=PolicyVersion(1, 0))
        self.disk = disk

    async def grant(self, group_id: int) -> None:
        self.ledger.append(self.granted(group=group_id))
        await self.disk(self.ledger.commit)

    async def step(self, groups: list[Any], step: int) -> None:
        # In the trainer's thread, which has just made the step.
        record = partial(self.ledger.trained, groups, lineage=1, consumed_at=step)
        await asyncio.get_running_loop().run_in_executor(None, record)

    async def checkpoint(self, step: int) -> None:
        await self.disk(self.ledger.sync)
        await self.disk(partial(self.ledger.checkpointed, lineage=1, step=step, oldest_step=step))


class Learner:
    """The way of groups from their grant to their step, and how long it takes."""

    def __init__(self, ledger: Records, size: str, load: str) -> None:
        self.ledger = ledger
        self.num_groups, self.rate = NUM_GROUPS[size], LOADS[load][size]
        self.pattern = make_group(*SIZES[size])
        from echo.wire.codec import encode_group

        self.encode = encode_group
        _, self.arrays = self.encode(self.pattern)
        self.chance = random.Random(0)
        self.accept_s: list[float] = []
        self.grant_s: list[float] = []
        self.unsynced: list[asyncio.Event] = []
        self.has_unsynced = asyncio.Event()
        self.slots = asyncio.Semaphore(self.num_groups if self.rate else IN_FLIGHT)
        self.buffer: list[Any] = []
        self.num_steps = 0

    async def run(self) -> None:
        syncing = asyncio.create_task(self.sync())
        groups = []
        for group_id in range(self.num_groups):
            groups.append(asyncio.create_task(self.bring(group_id)))
            await asyncio.sleep(self.chance.expovariate(self.rate) if self.rate else 0)
        await asyncio.gather(*groups)
        syncing.cancel()

    async def sync(self) -> None:
        """Force groups onto the disk, all at once that have come meanwhile."""
        while True:
            await self.has_unsynced.wait()
            self.has_unsynced.clear()
            stored, self.unsynced = self.unsynced, []
            await self.ledger.disk(self.ledger.ledger.sync)
            for each in stored:
                each.set()

    async def bring(self, group_id: int) -> None:
        async with self.slots:
            decided_at = time.perf_counter()
            await self.ledger.grant(group_id)
            self.grant_s.append(time.perf_counter() - decided_at)
            await asyncio.sleep(self.chance.uniform(0, 0.002))
            group = replace(self.pattern, group_id=group_id)
            header, _ = self.encode(replace(group, rollouts=group.rollouts[:1]))
            came_at, is_stored = time.perf_counter(), asyncio.Event()
            self.ledger.ledger.store(group, header, self.arrays)
            self.unsynced.append(is_stored)
            self.has_unsynced.set()
            await is_stored.wait()
            self.accept_s.append(time.perf_counter() - came_at)
            self.buffer.append(group)
            if len(self.buffer) == STEP_GROUPS:
                await self.step()

    async def step(self) -> None:
        groups, self.buffer = self.buffer, []
        self.num_steps += 1
        await self.ledger.step(groups, self.num_steps - 1)
        if self.num_steps % CHECKPOINT_STEPS == 0:
            await self.ledger.checkpoint(self.num_steps)


async def take_turn(size: str, load: str, run_dir: Path) -> dict[str, Any]:
    """Return the seconds of each acceptance and grant, groups per second and bytes written."""
    disk = partial(asyncio.get_running_loop().run_in_executor, ThreadPoolExecutor(1))
    learner = Learner(Records(run_dir, disk), size, load)
    bytes_before, began_at = written_bytes(), time.perf_counter()
    await learner.run()
    elapsed_s = time.perf_counter() - began_at
    await disk(learner.ledger.ledger.close)
    return {
        "accept_s": learner.accept_s,
        "grant_s": learner.grant_s,
        "groups_per_s": learner.num_groups / elapsed_s,
        "bytes_per_group": (written_bytes() - bytes_before) / learner.num_groups,
    }


def written_bytes() -> int:
    """Return the bytes that this process has sent to the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def run_turn(size: str, load: str, directory: Path, checkout: Path) -> dict[str, Any]:
    """Take a turn in a process of its own."""
    with tempfile.TemporaryDirectory(dir=directory) as run_dir:
        code = "import sys; sys.path[:0] = sys.argv[1:3]; import bench_ledger as b; b.turn()"
        done = subprocess.run(
            [sys.executable, "-c", code, str(checkout), str(ROOT / "bench"), size, load, run_dir],
            stdout=subprocess.PIPE, check=True, text=True,
        )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def turn() -> None:
    """What the process of a turn does."""
    size, load, run_dir = sys.argv[3:]
    print(json.dumps(asyncio.run(take_turn(size, load, Path(run_dir)))))


def summarise(turns: list[dict[str, Any]]) -> dict[str, float]:
    accepting = np.concatenate([each["accept_s"] for each in turns])
    granting = np.concatenate([each["grant_s"] for each in turns])
    return {
        "num_groups": len(accepting),
        "accept_p50_s": float(np.quantile(accepting, 0.5)),
        "accept_p99_s": float(np.quantile(accepting, 0.99)),
        "grant_p50_s": float(np.quantile(granting, 0.5)),
        "grant_p99_s": float(np.quantile(granting, 0.99)),
        "groups_per_s": float(np.median([each["groups_per_s"] for each in turns])),
        "bytes_per_group": float(np.median([each["bytes_per_group"] for each in turns])),
    }


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=ROOT, help="on the disk in question")
    arguments = harness.parse(parser, sizes=["20 kB"], rounds=1)
    began_in = harness.environment()
    rows = []
    kinds = ("now",) if arguments.before is None else ("before", "now")
    for size in arguments.sizes:
        for load in LOADS:
            turns: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
            for _ in range(arguments.rounds):
                for kind, done in turns.items():
                    checkout = ROOT if kind == "now" else arguments.before.resolve()
                    done.append(run_turn(size, load, arguments.directory, checkout))
            for kind, done in turns.items():
                rounds = [summarise([each]) for each in done]
                row = {"size": size, "load": load, "ledger": kind, **summarise(done)}
                rows.append({**row, "rounds": rounds})
                print(
                    f"{size:>6} {load:6} {kind:6} accept p50 {row['accept_p50_s'] * 1e3:7.2f} ms, "
                    f"p99 {row['accept_p99_s'] * 1e3:7.2f} ms; grant p50 "
                    f"{row['grant_p50_s'] * 1e3:6.3f} ms, p99 {row['grant_p99_s'] * 1e3:6.2f} ms; "
                    f"{row['groups_per_s']:6.0f} groups/s; {row['bytes_per_group'] / 1e3:8.1f} kB "
                    "a group",
                    flush=True,
                )
    print(harness.save("ledger", {"load_average_before": began_in["load_average"], "rows": rows}))


if __name__ == "__main__":
    main()
