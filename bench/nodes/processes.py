"""A learner and workers of one of the scripts here, as processes joined over loopback."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import harness

BENCH = Path(__file__).resolve().parents[1]
END_S = 30.0
"""For a node that was told to end, before it is killed."""
CONFIG = """
[run]
max_steps = {steps}
dir = "{directory}"
[model]
name = "{directory}/model"
[sampling]
max_completion_tokens = {tokens}
[sync]
max_staleness = {max_staleness}
publish_period = 1
[batch]
group_size = {group_size}
groups_per_step = {groups_per_step}
keep_zero_variance = true
[learner]
listen = "tcp://127.0.0.1:0"
num_threads = 1
[worker]
num_threads = 1
max_concurrent_rollouts = {max_concurrent_rollouts}
[checkpoint]
interval_steps = 100000
[eval]
interval_steps = 0
[network]
heartbeat_s = 1
dead_after_s = {dead_after_s}
[limits]
min_free_disk_bytes = 0
[activation]
mode = "off"
[ui]
live = "off"
"""


def run_nodes(
    module: str,
    where: Path,
    workers: Sequence[str],
    options: Callable[[str], Sequence[str]],
    *,
    within_s: float,
    tree: Path | None = None,
    more: str = "",
    inside: Callable[[str], Sequence[str]] = lambda _: (),
    **settings: float,
) -> Path:
    """Run a learner and workers to the learner's end; return the run's directory.

    Args:
        module: of bench/, which takes a role and --config.
        where: a directory that holds the model, for all that they write.
        workers: their names.
        options: of the node of each name, "learner" among them.
        within_s: for the whole run.
        tree: the checkout whose product they run; None for this one.
        more: sections of the configuration besides.
        inside: what a node's command stands behind, such as that of a network namespace.
        settings: what CONFIG leaves open.
    """
    config = where / "run.toml"
    config.write_text(CONFIG.format(directory=where, **settings) + more)
    environment = harness.finding(*([] if tree is None else [tree]))
    join, output_path = where / "run" / "keys" / "join", where / "output.txt"
    give_up_at = time.monotonic() + within_s
    processes: list[subprocess.Popen[bytes]] = []
    with output_path.open("wb") as output:

        def start(role: str, name: str, *own: str) -> None:
            command = [*inside(name), sys.executable, "-m", module, role, "--config", str(config)]
            command += [*own, *options(name)]
            processes.append(
                subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=BENCH)
            )

        try:
            start("learner", "learner")
            while not join.exists():
                if processes[0].poll() is not None or time.monotonic() > give_up_at:
                    said = output_path.read_text()[-3000:]
                    raise SystemExit(f"no learner that workers can join: {said or 'it is silent'}")
                time.sleep(0.1)
            for name in workers:
                sets = (f"worker.name={name}", f"security.join={join}")
                start("worker", name, *(word for each in sets for word in ("--set", each)))
            processes[0].wait(timeout=max(0.0, give_up_at - time.monotonic()))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=END_S)
                process.kill()
                process.wait()
    return where / "run"
