"""Learner or worker of bench_adapters.py, which tells when versions go out and are sampled.

Each event is a line of JSON, with the machine's monotonic clock. Beside its groups a worker samples
one token at a time for nobody, so that there is always a request that begins: the first of them
under a version is when that one is sampled from.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from echo.cli.commands.node import read_run_file, run_learner, run_role
from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import UNVERSIONED, Request, Sampling
from echo.runtime.learner.versions.publish import Publication, PublishedVersions
from echo.train.trainer import Trainer
from nodes.timed_node import make_timed_step

REST_S = 0.01
"""Between two requests for nobody."""


class Events:
    """A file of events."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def tell(self, event: str, version: PolicyVersion, **facts: float) -> None:
        row = {"event": event, "step": version.step, "at": time.monotonic(), **facts}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def watch_learner(events: Events) -> None:
    """Tell when each version begins to be published: its step is done, nothing else is."""
    publish = PublishedVersions.publish

    async def timed(versions: PublishedVersions) -> Publication:
        step = versions._role.step  # noqa: SLF001 -- nothing else is told of it
        events.tell("publish", PolicyVersion(1, step))
        return await publish(versions)

    PublishedVersions.publish = timed  # type: ignore[method-assign,assignment]


def watch_worker(events: Events) -> None:
    """Tell how long loads take, how far apart steps are then, and when a version is sampled."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from echo.engine.vllm.engine import VllmEngine

    ends: deque[tuple[float, float]] = deque([(0.0, 0.0)], maxlen=4096)
    """Of steps: on the clock, and in CPU seconds of the thread that makes them."""
    step, load = LLMEngine.step, VllmEngine.load

    def timed_step(vllm: Any) -> Any:
        outputs = step(vllm)
        ends.append((time.monotonic(), time.thread_time()))
        return outputs

    def timed_load(
        engine: Any, tensors: Mapping[str, Any], version: PolicyVersion = UNVERSIONED
    ) -> None:
        began = time.monotonic()
        load(engine, tensors, version)
        loaded, before = time.monotonic(), list(ends)
        # What is computed anew comes behind a swap; where nothing is sampled there is no step.
        while ends[-1][0] < loaded and time.monotonic() < loaded + REST_S * 50:
            time.sleep(REST_S / 10)
        marks = [max((end for end in before if end[0] < began), default=(began, 0.0))]
        marks += [end for end in list(ends) if end[0] >= began]
        usual, during = (
            np.diff(np.array(some), axis=0) if len(some) > 1 else np.zeros((1, 2))
            for some in (before[-200:], marks)
        )
        events.tell(
            "loaded", version, load_s=loaded - began,
            gap_s=float(during[:, 0].max()), gap_cpu_s=float(during[:, 1].max()),
            usual_gap_cpu_s=float(np.median(usual[:, 1])),
        )  # fmt: skip
        if began_requests.acquire(blocking=False):
            threading.Thread(target=ask_for_ever, args=(engine, events), daemon=True).start()

    began_requests = threading.Lock()
    LLMEngine.step = timed_step  # type: ignore[method-assign,assignment]
    VllmEngine.load = timed_load  # type: ignore[method-assign,assignment]


def ask_for_ever(engine: Any, events: Events) -> None:
    """Sample single tokens, and tell the first of each version."""
    newest, number = PolicyVersion(0, 0), 0
    while True:
        number += 1
        request = Request(f"nobody {number}", np.array([1, 3 + number % 9], np.int32), number)
        try:
            [completion] = engine.generate([request], Sampling(1.0, 1.0, 0, 1, ()))
        except EngineError:
            return  # it is closed
        version = PolicyVersion(*completion.policy_versions[0].tolist())
        if version > newest:
            newest = version
            events.tell("sampled", version)
        time.sleep(REST_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("learner", "worker"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=3.0)
    arguments = parser.parse_args()
    config = read_run_file(arguments.config, arguments.set, arguments.role)
    events = Events(arguments.events)
    if arguments.role == "learner":
        watch_learner(events)
        Trainer.step = make_timed_step(arguments.step_s)  # type: ignore[method-assign,assignment]
        return run_learner(config, resume=False, has_report=False)
    watch_worker(events)
    return run_role(config, "worker")


if __name__ == "__main__":
    sys.exit(main())
