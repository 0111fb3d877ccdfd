"""Learner or worker whose model work takes a given time.

The learner makes its real step (of a tiny model) and then waits until the step has taken `step_s`.
The worker's engine makes up tokens; each of its groups takes `group_s`, give or take `spread`, and
as much longer as there are more of them than `slots`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo.cli.commands.node import read_run_file, run_learner, run_role
from echo.core.rollout import Group, PolicyVersion
from echo.engine.engine import (
    UNVERSIONED,
    UNWATCHED,
    Completion,
    Engine,
    Request,
    Sampling,
    Watcher,
)
from echo.runtime.worker import setup
from echo.train.step import StepResult
from echo.train.trainer import Trainer

TOKENS = 16
"""Of every completion."""


class TimedEngine(Engine):
    """Makes up completions in a given time; a token has the version that is installed meanwhile."""

    is_continuous = True

    def __init__(self, group_s: float, spread: float, slots: int | None = None) -> None:
        self._group_s = group_s
        self._slots = slots
        self._running = Counter[str]()
        self._random = random.Random()
        self._spread = spread
        self._installed: PolicyVersion | None = None

    @property
    def installed(self) -> PolicyVersion | None:
        return self._installed

    def load(self, tensors: Mapping[str, Any], version: PolicyVersion = UNVERSIONED) -> None:
        self._installed = version

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watcher: Watcher = UNWATCHED,
        **_: Any,
    ) -> list[Completion]:
        full_s = self._group_s * self._random.uniform(1 - self._spread, 1 + self._spread)
        left_s, versions = full_s, list[tuple[int, int]]()
        call = requests[0].request_id
        self._running[call] = 1
        while left_s > 0 and not watcher.should_stop():
            share = min(1.0, self._slots / len(self._running)) if self._slots else 1.0
            pause_s = min(left_s / share, 0.25)
            time.sleep(pause_s)
            left_s -= pause_s * share
            made = math.floor(TOKENS * min(1.0, 1 - left_s / full_s)) - len(versions)
            # The learner predicts from these when a group will be done.
            watcher.on_tokens(made * len(requests))
            assert self._installed is not None
            versions += [(self._installed.lineage, self._installed.step)] * made
        del self._running[call]
        is_whole = left_s <= 0
        completions = [
            made_up(request, 5 + index % 3, versions, is_whole=is_whole)
            for index, request in enumerate(requests)
        ]
        for completion in completions if is_whole else ():
            watcher.on_completion(completion)
        return completions

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        return 1 << 20

    def close(self) -> None:
        pass


def made_up(
    request: Request, token_id: int, versions: Sequence[tuple[int, int]], *, is_whole: bool
) -> Completion:
    """Return a completion of so many tokens, or one that was stopped before its first."""
    num_tokens = TOKENS - len(request.prefix_ids) if is_whole else 0
    versions = versions[TOKENS - num_tokens :]
    return Completion(
        request_id=request.request_id,
        token_ids=np.full(num_tokens, token_id, dtype=np.int32),
        logprobs=np.full(num_tokens, -2.5, dtype=np.float32),
        policy_versions=np.array(versions, np.int32).reshape(-1, 2),
        finish_reason="length" if is_whole else "abort",
    )


def make_timed_step(step_s: float) -> Callable[[Trainer, Sequence[Group]], StepResult]:
    """Return an optimizer step that takes `step_s` in all."""
    real = Trainer.step

    def step(trainer: Trainer, groups: Sequence[Group]) -> StepResult:
        began = time.monotonic()
        result = real(trainer, groups)
        time.sleep(max(0.0, step_s - (time.monotonic() - began)))
        return result

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("learner", "worker"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--group-s", type=float, default=1.0)
    parser.add_argument("--spread", type=float, default=0.1)
    parser.add_argument("--slots", type=int, help="groups that a worker samples at full speed")
    arguments = parser.parse_args()
    config = read_run_file(arguments.config, arguments.set, arguments.role)
    if arguments.role == "learner":
        Trainer.step = make_timed_step(arguments.step_s)  # type: ignore[method-assign,assignment]
        return run_learner(config, resume=False, has_report=False)
    setup.make_engine = lambda *_: TimedEngine(arguments.group_s, arguments.spread, arguments.slots)
    return run_role(config, "worker")


if __name__ == "__main__":
    sys.exit(main())
