"""Nodes of bench_stalls.py, which a fault slows: a disk, a processor, or a task's reward.

Everything is the product's own but the fault. A slow disk is one whose every write takes some
seconds more: writes of chunks at a worker, and fdatasync at the learner. A slow processor is a
process that is stopped (SIGSTOP) for a part of each second, from its run's sixth step on. A slow
device of the learner is an optimizer step that takes some seconds more.

Each node is a fork of a process that has imported what nodes need, so that a run starts at once.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo.config.fields import Role
from echo.tasks.builtin import AdditionTask
from echo.tasks.task import Example

if TYPE_CHECKING:
    from echo.core.rollout import Group
    from echo.train.step import StepResult

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
PR_SET_PDEATHSIG = 1
SLOW_FROM_STEP = 6
PERIOD_S = 1.0
"""In which a slowed process goes on once and is stopped once."""


class RandomRewards(AdditionTask):
    """Additions whose reward is random, so that nearly every group teaches something."""

    def __init__(self, seconds: float = 0.0, chance: float = 0.5) -> None:
        """Let each call of the reward take so many seconds, and return 1 with this chance."""
        self.seconds, self.chance = seconds, chance

    def reward(self, example: Example, completion: str) -> float:
        """Return 0 or 1."""
        time.sleep(self.seconds)
        return float(random.Random(completion).random() < self.chance)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the machine of a node."""

    disk_s: float = 0.0
    """Seconds that each write to the disk takes more."""
    share: float = 1.0
    """Share of the time in which the process is not stopped."""
    train_s: float = 0.0
    """Seconds that each optimizer step takes more."""


def start(
    role: Role, config: Path, overrides: Sequence[str], *, fault: Fault, namespace: str
) -> ForkProcess:
    """Start a node as a fork of this process.

    Args:
        role: learner, relay or worker.
        config: the run's file; all output goes to output.txt beside it.
        overrides: of the configuration.
        fault: what is wrong with its machine.
        namespace: name of its network namespace; "" for that of this process.
    """
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_run, args=(role, config, overrides, fault, namespace))
    process.start()
    return process


def _run(
    role: Role, config_path: Path, overrides: Sequence[str], fault: Fault, namespace: str
) -> None:
    from echo.cli.commands.node import read_run_file, run_learner, run_role

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if namespace:
        with (NAMESPACES / namespace).open("rb") as file:
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"no namespace {namespace}")
    output = os.open(config_path.parent / "output.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if fault.disk_s:
        _slow_disk(fault.disk_s)
    if fault.train_s:
        _slow_steps(fault.train_s)
    config = read_run_file(config_path, overrides, role)
    if fault.share < 1:
        _slow_down(fault.share, config.run_dir / "metrics.jsonl")
    if role == "learner":
        sys.exit(run_learner(config, resume=False, has_report=False))
    sys.exit(run_role(config, role))


def _slow_disk(seconds: float) -> None:
    """Let each write take longer."""
    from echo.runtime.threads import Pool, ThreadPools

    sync, make = os.fdatasync, ThreadPools.pool

    def slow_sync(file: int) -> None:
        time.sleep(seconds)
        sync(file)

    def slow_pool(self: ThreadPools, name: str, num_threads: int = 1) -> Pool:
        pool = make(self, name, num_threads)
        if name == "weights":
            pool.run = functools.partial(pool.run, wait_and_call)  # type: ignore[method-assign]
        return pool

    def wait_and_call(function: Callable[[], Any]) -> Any:
        time.sleep(seconds)
        return function()

    os.fdatasync = slow_sync  # type: ignore[assignment]
    ThreadPools.pool = slow_pool  # type: ignore[method-assign]


def _slow_steps(seconds: float) -> None:
    """Let each optimizer step take longer; the learner's other threads go on."""
    from echo.train.trainer import Trainer

    step = Trainer.step

    def slow_step(self: Trainer, groups: Sequence[Group]) -> StepResult:
        result = step(self, groups)
        time.sleep(seconds)
        return result

    Trainer.step = slow_step  # type: ignore[method-assign]


def _slow_down(share: float, rows: Path) -> None:
    """Let this process go on for a share of the time only, once its run has some steps."""
    node = os.getpid()
    if os.fork():
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while not rows.exists() or rows.read_bytes().count(b"reward/mean") < SLOW_FROM_STEP:
        time.sleep(0.1)
    while os.getppid() == node:
        os.kill(node, signal.SIGSTOP)
        time.sleep(PERIOD_S * (1 - share))
        os.kill(node, signal.SIGCONT)
        time.sleep(PERIOD_S * share)
    os._exit(0)
