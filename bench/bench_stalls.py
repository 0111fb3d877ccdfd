"""Inject faults into whole runs on virtual time, and see which explanation the learner gives.

The runs are those of tests/runtime/test_stalls.py: real nodes and files, with an engine, a trainer
and links that take the seconds that a fault says. A fault is named if the first explanation in the
metrics has its cause, its resource and the setting to change. The healthy runs are simulated fleets
that sample about twice as fast as the learner trains, with random sizes.

    step      optimizer steps from the fault to the explanation; 20 at most
    cause     the cause in the explanation, and the setting

    python bench/bench_stalls.py
    python bench/bench_stalls.py --real             on real processes; needs root for slow links
    python bench/bench_stalls.py --quick            two faults, two healthy runs, writes nothing

With `--real` the faults hit real nodes (nodes/stalled_node.py), of which each is a process with the
product's engine or trainer of a tiny model. Links are those of wan.py, and a slow disk or processor
is one that waits. The causes that were named before the right one are kept.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import harness
from broadcast.paths import Wan
from nodes.processes import CONFIG, END_S
from nodes.stalled_node import Fault, start

from echo.config.fields import Role

COLUMNS = "{:<24} {:>5}  {:<24} {:<40} {}"


def main() -> None:
    sys.path.insert(0, str(harness.ROOT))
    from tests.runtime.test_stalls import FAULTS, balanced
    from tests.sim.scenarios import simulate

    parser = harness.new_parser(__doc__)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), help="their names")
    parser.add_argument("--healthy", type=int, default=20, help="number of healthy runs")
    parser.add_argument("--real", action="store_true", help="on real processes")
    parser.add_argument("--jobs", type=int, default=1, help="real runs at the same time")
    arguments = harness.parse(parser, faults=["slow relay", "stuck reward"], healthy=2)
    print(COLUMNS.format("fault", "step", "cause", "setting", "right"))
    if arguments.real:
        found = measure_real(arguments.faults, arguments.healthy, num_jobs=arguments.jobs)
        print(f"wrote {harness.save('stalls_real', found)}")
        return
    rows = [inject(name) for name in arguments.faults]
    explained = [len(simulate(balanced(seed))[1].explained) for seed in range(arguments.healthy)]
    num_right = sum(row["is_right"] for row in rows)
    print(f"{num_right} of {len(rows)} faults are named with resource and setting")
    print(f"{sum(map(bool, explained))} of {len(explained)} healthy runs got an explanation")
    result = {"faults": rows, "explanations_of_healthy_runs": explained}
    print(f"wrote {harness.save('stalls', result)}")


def inject(name: str) -> dict[str, Any]:
    """Run until the learner explains something; return what it explained."""
    from tests.promises.world import World
    from tests.runtime.test_stalls import FAULTS, MAX_STEPS, explained

    make, cause, setting, resource = FAULTS[name]
    with tempfile.TemporaryDirectory() as directory:
        world = make(lambda **numbers: World(Path(directory), **numbers))
        try:
            begun = world.step
            world.run_until(
                lambda: explained(world) or world.step >= begun + MAX_STEPS, within_s=2000.0
            )
            num_steps, found = world.step - begun, explained(world)
        finally:
            world.close()
    first = found[0] if found else {"cause": "", "setting": "", "resource": "", "text": ""}
    is_right = (first["cause"], first["setting"]) == (cause, setting)
    is_right &= re.fullmatch(resource, first["resource"]) is not None
    print(COLUMNS.format(name, num_steps, first["cause"], first["setting"], is_right), flush=True)
    return {"fault": name, "steps": num_steps, "is_right": is_right, **first}


# --- on real processes ----------------------------------------------------------------------------


LEARNER, RELAY, LEAF = 0, 1, 2
"""The namespaces; the workers share the last one."""
WIDTH = 2730
"""Of the model's MLP: a version of 2 MB takes a slow link longer than messages do."""
SLOW_MBIT = 0.4
WITHIN_S = 500.0
CONTEXT = 1024
MAX_STEPS, HEALTHY_STEPS, WARM_UP_STEPS = 20, 30, 3
ONE_WAN = threading.Lock()
"""An emulator removes the namespaces of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """Real nodes and the fault that hits some of them."""

    workers: tuple[str, ...] = ("w1", "w2")
    tokens: int = 24
    max_staleness: int = 2
    group_size: int = 4
    groups_per_step: int = 4
    places: int = 64
    reward_s: float = 0.0
    sets: tuple[str, ...] = ()
    """Overrides for all nodes."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """What is wrong with the machines of single nodes."""
    up_mbit: Mapping[int, float] | None = None
    """Namespace -> Mbit/s of its uplink; None to run on loopback without namespaces."""
    has_relay: bool = False
    """Whether the workers have a relay; they then reach the learner through it only."""
    can_listen: bool = False


FULL = ("network.codec=full", "network.chunk_bytes=65536")
LEARNING = ("learner.micro_batch_tokens=64",)
"""A forward and backward pass for each rollout."""
REAL: Mapping[str, Real] = {
    "few in flight": Real(max_staleness=0, groups_per_step=2, tokens=256),
    "few places": Real(
        groups_per_step=8,
        tokens=128,
        places=2,
        faults=dict.fromkeys(("w1", "w2"), Fault(share=0.2)),
    ),
    "small KV cache": Real(
        workers=("w1",),
        groups_per_step=8,
        tokens=512,
        sets=(
            "engine.kind=vllm",
            "engine.options={max_num_seqs=64, kv_cache_memory_bytes=2200000, enforce_eager=true}",
        ),
    ),
    "slow weights": Real(up_mbit={LEARNER: SLOW_MBIT}, can_listen=True, sets=FULL),
    "slow relay": Real(up_mbit={RELAY: SLOW_MBIT}, has_relay=True, sets=FULL),
    "leaves without a relay": Real(up_mbit={LEARNER: SLOW_MBIT}, sets=FULL),
    "disk of the learner": Real(faults={"learner": Fault(disk_s=3.0)}),
    "disk of a worker": Real(
        max_staleness=0, sets=FULL, faults=dict.fromkeys(("w1", "w2"), Fault(disk_s=0.3))
    ),
    "stuck reward": Real(reward_s=4.0),
    "useless groups": Real(
        tokens=128, sets=("task.options={chance=0.02}", "batch.keep_zero_variance=false")
    ),
    "straggler": Real(
        workers=("w1", "w2", "w3"),
        max_staleness=0,
        groups_per_step=6,
        # Of short groups the learner takes one back, and grants w3 no other.
        tokens=900,
        places=8,
        sets=("leases.hedge_factor=false",),
        faults={"w3": Fault(share=0.05)},
    ),
    "needless checkpointing": Real(
        max_staleness=1,
        groups_per_step=8,
        sets=(*LEARNING, "learner.gradient_checkpointing=true"),
    ),
    "slow learner": Real(
        max_staleness=1, groups_per_step=8, faults={"learner": Fault(train_s=3.0)}
    ),
    "few workers": Real(
        workers=("w1",), groups_per_step=8, tokens=128, places=32, faults={"w1": Fault(share=0.2)}
    ),
}
HEALTHY = (
    Real(groups_per_step=8, tokens=48, max_staleness=3, sets=LEARNING, has_relay=True),
    Real(workers=("w1", "w2", "w3"), groups_per_step=16, tokens=96, max_staleness=4, sets=LEARNING),
    Real(group_size=8, groups_per_step=4, tokens=96, can_listen=True, sets=LEARNING),
)


def measure_real(faults: list[str], num_healthy: int, *, num_jobs: int) -> dict[str, Any]:
    """Run real nodes with each fault, and without one; return what the learner explained."""
    import_nodes()
    with ThreadPoolExecutor(num_jobs) as pool:
        found = [pool.submit(inject_real, name) for name in faults]
        runs = [pool.submit(run_healthy, real) for real in HEALTHY[:num_healthy]]
        rows, healthy = ([each.result() for each in some] for some in (found, runs))
    print(f"{sum(row['is_right'] for row in rows)} of {len(rows)} faults are named")
    num_explained = sum(bool(row["explained"]) for row in healthy)
    print(f"{num_explained} of {len(healthy)} healthy runs got an explanation")
    return {"faults": rows, "healthy": healthy}


def inject_real(name: str) -> dict[str, Any]:
    """Run real nodes with a fault until the learner names it; return what it explained."""
    from tests.runtime.test_stalls import FAULTS

    _, cause, setting, resource = FAULTS[name]

    def is_right(each: Mapping[str, str]) -> bool:
        is_named = (each["cause"], each["setting"]) == (cause, setting)
        return is_named and re.fullmatch(resource, each["resource"]) is not None

    with tempfile.TemporaryDirectory() as directory:
        run = RealRun(REAL[name], Path(directory), num_steps=MAX_STEPS)
        run.go(lambda: any(map(is_right, run.explained)))
        found, num_steps, times = run.explained, len(run.steps), times_of(run.steps)
    right = next(filter(is_right, found), {"cause": "", "setting": "", "resource": "", "text": ""})
    earlier = {each["cause"]: each["text"] for each in found if each["cause"] != cause}
    print(COLUMNS.format(name, num_steps, right["cause"], right["setting"], bool(right["cause"])))
    print(f"    {right['text']}; earlier: {', '.join(earlier) or 'none'}", flush=True)
    row = {"fault": name, "steps": num_steps, "is_right": bool(right["cause"]), **right, **times}
    return {**row, "earlier": earlier}  # cause -> the newest text


def run_healthy(real: Real) -> dict[str, Any]:
    """Run real nodes without a fault; return how long learner and workers waited."""
    with tempfile.TemporaryDirectory() as directory:
        run = RealRun(real, Path(directory), num_steps=HEALTHY_STEPS)
        run.go(lambda: False)
        found, num_steps, times = run.explained, len(run.steps), times_of(run.steps)
    row = {"steps": num_steps, **times, "explained": found}
    print(row, flush=True)
    return row


def times_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a step's mean seconds, and how long learner and workers waited, after the warm-up."""
    steps = rows[WARM_UP_STEPS:]
    step_s = sum(row["time/step"] for row in steps) or math.nan
    idle = [row.get("rollouts/idle_ratio", 0.0) for row in steps]
    return {
        "step_s": step_s / max(1, len(steps)),
        "learner_waited": sum(row["time/wait_for_batch"] for row in steps) / step_s,
        "workers_idle": sum(idle) / max(1, len(idle)),
    }


class RealRun:
    """A learner, workers and perhaps a relay, as processes."""

    def __init__(self, real: Real, where: Path, *, num_steps: int) -> None:
        """Write the configuration and the model into a directory; start nothing."""
        self.real, self.where = real, where
        self._processes: list[ForkProcess] = []
        self._wan: Wan | None = None
        numbers = {
            "tokens": real.tokens, "max_staleness": real.max_staleness, "steps": num_steps,
            "group_size": real.group_size, "groups_per_step": real.groups_per_step,
            "max_concurrent_rollouts": real.places, "dead_after_s": 30,
        }  # fmt: skip
        (where / "run.toml").write_text(CONFIG.format(directory=where, **numbers))
        model = multiprocessing.get_context("fork").Process(target=save_model, args=(where,))
        model.start()
        model.join()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics that are whole."""
        path = self.where / "run" / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of metrics of the steps."""
        return [row for row in self.rows if "time/step" in row]

    @property
    def explained(self) -> list[dict[str, str]]:
        """The explanations since the first step; before it, nodes still start."""
        return [row["explain"] for row in self.rows if row.get("step") and "explain" in row]

    def go(self, is_enough: Callable[[], bool]) -> None:
        """Run until the learner ends, or until it is enough."""
        give_up_at = time.monotonic() + WITHIN_S
        with ExitStack() as stack:
            if self.real.up_mbit is not None:
                stack.enter_context(ONE_WAN)
                self._wan = Wan(3, rate_mbit=0, latency_ms=1, tuned=True)
                stack.callback(self._wan.close)
                for index, mbit in self.real.up_mbit.items():
                    self._wan.set(index, "up", mbit)
                if self.real.has_relay:
                    away = ["ip", "route", "add", "blackhole", self._wan.host(LEARNER)]
                    subprocess.run([*self._wan.inside(LEAF), *away], check=True)
            stack.callback(self._end)
            self._start_all()
            while self._processes[0].is_alive() and not is_enough():
                if time.monotonic() > give_up_at:
                    print(f"no end within {WITHIN_S:g} s", flush=True)
                    break
                time.sleep(0.2)
        if not self.rows:
            print((self.where / "output.txt").read_text()[-3000:], flush=True)

    def _start_all(self) -> None:
        real, join = self.real, self.where / "run" / "keys" / "join"
        hosts = ["127.0.0.1"] * 3 if self._wan is None else [self._wan.host(i) for i in range(3)]
        learner, relay = (f"tcp://{hosts[i]}:{port}" for i, port in enumerate(free_ports()))
        shared = [
            "task.kind=nodes.stalled_node:RandomRewards",
            f"task.options={{seconds={real.reward_s}}}", f"sampling.min_tokens={real.tokens}",
            f"learner.listen={learner}", f"relay.listen={relay}", f'relay.connect=["{learner}"]',
            f'worker.connect=["{relay if real.has_relay else learner}"]', *real.sets,
        ]  # fmt: skip
        self._start("learner", "learner", LEARNER, shared)
        while not join.exists() and self._processes[0].is_alive():
            time.sleep(0.1)
        shared.append(f"security.join={join}")
        if real.has_relay:
            self._start("relay", "r1", RELAY, [*shared, "relay.name=r1"])
        for name in real.workers:
            own = [f"worker.name={name}", f"network.store_dir={self.where / name}"]
            own += [f"worker.listen=tcp://{hosts[LEAF]}:0"] * real.can_listen
            self._start("worker", name, LEAF, [*shared, *own])

    def _start(self, role: Role, name: str, index: int, overrides: Sequence[str]) -> None:
        namespace = "" if self._wan is None else self._wan.inside(index)[-1]
        fault = self.real.faults.get(name, Fault())
        config = self.where / "run.toml"
        self._processes.append(start(role, config, overrides, fault=fault, namespace=namespace))

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout=END_S)
            process.kill()
            process.join()
        self._processes.clear()


def free_ports() -> tuple[int, int]:
    """Return two ports that nobody uses."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def save_model(where: Path) -> None:
    """Write the model of a run. A process of its own does it, since PyTorch then has threads."""
    from echo.engine.model import VLLM_HEAD_DIM, build_config, model_class, save_tiny_model

    config = build_config(head_dim=VLLM_HEAD_DIM)
    config.intermediate_size, config.max_position_embeddings = WIDTH, CONTEXT
    save_tiny_model(where / "model", model_class(config).from_config(config))


def import_nodes() -> None:
    """Import what nodes need, so that their processes need not."""
    for name in (
        "echo.runtime.learner.setup",
        "echo.runtime.worker.setup",
        "echo.cli.commands.node",
        "transformers.models.qwen3.modeling_qwen3",
    ):
        importlib.import_module(name)
    os.environ |= harness.finding(harness.ROOT / "bench", harness.ROOT)


if __name__ == "__main__":
    main()
