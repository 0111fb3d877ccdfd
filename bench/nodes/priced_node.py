"""Learner that judges its own choice of workers, or a site: priced workers and a relay.

    python -m nodes.priced_node learner --config RUN --verdicts FILE
    python -m nodes.priced_node worker --config RUN --node '{"role": "worker", "set": [...]}' ...

The learner's steps and the workers' groups take a given time, as in timed_node.py. Each time that
the learner has chosen, it tries every set with what it has measured (`bench_activation.judge`) and
writes a line. A site is one process that has imported what its nodes need; each of them is a fork,
a process with sockets of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench_activation import judge

from echo.cli.commands.node import read_run_file, run_learner, run_role
from echo.fleet.activation import Question, ReviewAnswer, choose
from echo.runtime.learner import setup
from echo.runtime.learner.costs.activation import ActivationSettings, activation_settings
from echo.runtime.worker import setup as worker_setup
from echo.train.trainer import Trainer
from nodes.timed_node import TimedEngine, make_timed_step

PR_SET_PDEATHSIG = 1


def verdict(question: Question, answer: ReviewAnswer) -> dict[str, Any]:
    """Return what the learner has measured, and how good the rule's choice and the set are."""
    active = question.active
    chosen = choose(
        question.workers, question.job, question.links, preferred=active, periods=question.periods
    ).active
    return {
        "active": sorted(active),
        "wanted": sorted(answer.active),
        "chosen": sorted(chosen),
        "cause": answer.cause,
        "tokens_per_s": {worker.name: worker.tokens_per_s for worker in question.workers},
        "train_s": question.job.train_s,
        "broadcast_s": question.links.broadcast_s(active),
        "uplink_bytes_per_s": question.links.uplink_bytes_per_s,
        "idle": question.idle_share,
        "idle_predicted": answer.before.idle_share,
        "slowdown": answer.choice.slowdown,
        "active_gaps": asdict(judge(question, active)),
        "chosen_gaps": asdict(judge(question, chosen)),
    }


def watch_choices(path: Path, *, dwell_s: float) -> None:
    """Have each answer judged, and decisions made sooner: these runs are short."""
    solve, settings = Question.solve, activation_settings

    def judged(question: Question) -> ReviewAnswer:
        answer = solve(question)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdict(question, answer)) + "\n")
        return answer

    def shortened(*sections: Any) -> ActivationSettings | None:
        found = settings(*sections)
        if found is None:
            return None
        return replace(found, min_dwell_s=dwell_s)

    Question.solve = judged  # type: ignore[method-assign,assignment]
    setup.activation_settings = shortened  # type: ignore[assignment,attr-defined]


def run_site(config: Path, common: Sequence[str], nodes: Sequence[dict[str, Any]]) -> int:
    """Fork each node, and end them all when told to, or when this process is gone."""
    forks = []
    for node in nodes:
        if not (fork := os.fork()):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            worker_setup.make_engine = lambda *_, node=node: TimedEngine(node["group_s"], 0.05)
            read = read_run_file(config, [*common, *node["set"]], node["role"])
            os._exit(run_role(read, node["role"]))
        forks.append(fork)

    def end(*_: Any) -> None:
        for fork in forks:
            os.kill(fork, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    return max(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("learner", "worker"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--verdicts", type=Path, help="where the learner writes its choices")
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--dwell-s", type=float, default=24.0, help="between two questions")
    parser.add_argument("--node", type=json.loads, action="append", default=[])
    arguments = parser.parse_args()
    if arguments.role == "worker":
        return run_site(arguments.config, arguments.set, arguments.node)
    watch_choices(arguments.verdicts, dwell_s=arguments.dwell_s)
    Trainer.step = make_timed_step(arguments.step_s)  # type: ignore[method-assign,assignment]
    config = read_run_file(arguments.config, arguments.set, arguments.role)
    return run_learner(config, resume=False, has_report=False)


if __name__ == "__main__":
    sys.exit(main())
