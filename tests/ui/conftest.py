"""Snapshots and run directories that the tests of the views share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo.core.monitoring.status import NodeStatus, RunStatus, StepStatus, VersionStatus
from echo.ui.sinks import Metric, MetricsWriter
from tests.records.rows import write_ledger

MakeStatus = Callable[..., RunStatus]
MakeRun = Callable[..., Path]


@pytest.fixture
def make_status() -> MakeStatus:
    """A run at step 7 of 10 with a learner, a relay and two workers, one of them lost."""

    def make(**changes: Any) -> RunStatus:
        fields: dict[str, Any] = {
            "run_name": "quickstart",
            "elapsed_s": 70.0,
            "step": 7,
            "max_steps": 10,
            "max_staleness": 3,
            "publish_period": 1,
            "nodes": (
                NodeStatus(node_id="learner", role="learner", state="training", version="v7"),
                NodeStatus(
                    node_id="r1", role="relay", state="forwarding", version="v6", staleness=1
                ),
                NodeStatus(
                    node_id="w2",
                    role="worker",
                    state="generating",
                    version="v6",
                    staleness=1,
                    tokens_per_s=1234.0,
                    bytes_per_s=2048.0,
                    num_leases=5,
                    parent="r1",
                    seen_s=0.2,
                ),
                NodeStatus(node_id="w10", role="worker", state="lost", version="v2", staleness=5),
            ),
            "reward_history": tuple(enumerate((0.3, 0.35, 0.4, 0.5, 0.55, 0.6, 0.7), 1)),
            "eval_history": ((0, 0.36, 0.30), (5, 0.61, 0.72)),
            "staleness_tokens": {0: 600, 1: 300, 2: 100},
            "idle_ratio": 0.25,
            "recent_idle_ratio": 0.12,
            "last_step": StepStatus(
                step=7,
                reward=0.7,
                mean_staleness=0.4,
                max_staleness=1,
                accepted_tokens_per_s=1234.0,
                seconds=2.5,
            ),
            "num_buffered": 3,
            "groups_per_step": 8,
            "num_leased": 5,
            "versions": (VersionStatus(version="v7", done=0.5, num_nodes=3, num_complete=1),),
            "broadcast_bytes": 3 * 1024**2,
            "refused": {"stale": 4, "duplicate": 0},
            "notices": ("w10 lost: silent for 10 s",),
        }
        return RunStatus(**(fields | changes))

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run directory as a finished run of some steps leaves it; step s took one second."""

    def make(
        name: str = "run", *, num_steps: int = 10, rewards: Callable[[int], float] | None = None
    ) -> Path:
        run_dir = tmp_path / name
        reward = rewards or (lambda step: step / (2 * num_steps))
        config = {
            "run": {"name": name, "max_steps": num_steps},
            "sync": {"max_staleness": 2, "publish_period": 1},
        }
        ledger: list[dict[str, Any]] = [
            {"kind": "lineage", "lineage": 1, "fork_step": 0, "at": 1000.0}
        ]
        with MetricsWriter(run_dir) as writer:
            writer.write(0, evaluation(0, 0.36, 0.30), at=1000.0)
            for step in range(1, num_steps + 1):
                row: dict[str, Metric] = {
                    "reward/mean": reward(step),
                    "staleness/hist": {"0": 30, "1": 10},
                    "broadcast/bytes": 1024,
                }
                writer.write(step, row, at=1000.0 + step)
                ledger += step_records(1, step)
            writer.write(num_steps, evaluation(num_steps, 0.81, 0.93), at=1000.0 + num_steps)
        ledger.append({"kind": "discarded", "group": 99, "reason": "stale", "step": 3})
        (run_dir / "config.json").write_text(json.dumps(config))
        write_ledger(run_dir, ledger)
        return run_dir

    return make


def evaluation(step: int, sampled: float, greedy: float) -> dict[str, float]:
    rates = {"eval/addition/reward": sampled, "eval/addition/pass@1": sampled}
    return {**rates, "eval/addition/greedy": greedy, "eval/version": step}


def step_records(lineage: int, step: int) -> list[dict[str, Any]]:
    """One group of 40 tokens, accepted and trained."""
    group = 100 * lineage + step
    return [
        {"kind": "accepted", "group": group, "tokens": 40, "versions": [[lineage, step - 1]]},
        {
            "kind": "trained",
            "lineage": lineage,
            "step": step,
            "groups": [group],
            "staleness": {"0": 30, "1": 10},
        },
    ]
