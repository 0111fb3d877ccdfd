"""Nodes that are stopped on purpose, and the run that goes on afterwards."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.e2e.cluster import Cluster, NodeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

INTERRUPTED = 130
PACE = {"REWARD_S": "0.02"}


@dataclass
class Resumed:
    """A finished run that Ctrl-C interrupted, and all that was tried to go on with it."""

    cluster: Cluster
    step: int
    """Where it was interrupted."""
    nodes: dict[str, NodeProcess]
    num_records: dict[str, int]
    """Records of the ledger after each of them had ended."""


@pytest.fixture(scope="module")
def resumed(make_cluster: Callable[[], Cluster]) -> Resumed:
    """Return the run: one worker lives until its end, another joins it when it goes on beyond."""
    cluster = make_cluster()
    nodes: dict[str, NodeProcess] = {}
    num_records: dict[str, int] = {}

    def start(what: str, *arguments: str, **settings: object) -> NodeProcess:
        nodes[what] = cluster.start("learner", *arguments, settings=settings)
        return nodes[what]

    def has_ended(what: str) -> None:
        cluster.wait_for_end(nodes[what])
        num_records[what] = len(cluster.records())

    endless = {"run.max_steps": 1000, "checkpoint.interval_steps": 1000}
    learner = start("interrupted", **endless)
    worker = cluster.start("worker", name="w1", env=PACE)
    cluster.wait_for_step(3, learner)
    learner.interrupt()
    has_ended("interrupted")
    step = cluster.records("trained")[-1]["step"]
    saved = [record["step"] for record in cluster.records("checkpoint")]
    assert saved == [step]
    assert worker.is_running
    cluster.audit(is_finished=False)

    start("unsafe", "--resume", **{"batch.group_size": 8, "optimizer.learning_rate": 5e-3})
    has_ended("unsafe")
    start("safe", "--resume", **{"run.max_steps": step + 4, "optimizer.learning_rate": 5e-3})
    cluster.finish(nodes["safe"], worker)
    # Another order of prompts is not safe, and works: who says --yes takes the consequences.
    settings = {"run.max_steps": step + 6, "optimizer.learning_rate": 5e-3, "run.seed": 5}
    start("insisted", "--resume", "--yes", **settings)
    cluster.finish(nodes["insisted"], cluster.start("worker", name="w2"))
    return Resumed(cluster, step, nodes, num_records)


def test_an_interrupted_run_is_saved_and_resumed_with_changes(resumed: Resumed) -> None:
    """Ctrl-C, and a resumption with a safe change, under a living worker."""
    nodes, step = resumed.nodes, resumed.step
    assert nodes["interrupted"].process.returncode == INTERRUPTED
    said = nodes["interrupted"].output
    assert f"stopped at step {step}; --resume continues from step {step}" in said
    assert "UNSAFE" not in nodes["safe"].output
    assert f"run.max_steps: 1000 -> {step + 4}" in nodes["safe"].output
    result = resumed.cluster.audit()
    assert result.fork_steps == {1: 0, 2: step, 3: step + 4}
    assert result.num_steps == step + 6


def test_an_unsafe_change_is_refused_and_leaves_no_trace(resumed: Resumed) -> None:
    assert resumed.nodes["unsafe"].process.returncode == 2
    said = resumed.nodes["unsafe"].output
    assert "UNSAFE batch.group_size: 4 -> 8" in said
    assert "safe   optimizer.learning_rate: 0.01 -> 0.005" in said
    assert "batch.group_size is not safe for this run" in said
    assert "--yes" in said
    assert resumed.num_records["unsafe"] == resumed.num_records["interrupted"]


def test_an_unsafe_change_is_made_where_it_is_insisted_on(resumed: Resumed) -> None:
    assert "UNSAFE run.seed: 0 -> 5" in resumed.nodes["insisted"].output


def test_a_worker_drains_at_the_first_interrupt_and_stops_at_the_second(cluster: Cluster) -> None:
    learner = cluster.start("learner", settings={"run.max_steps": 1000})
    polite = cluster.start("worker", name="polite", env=PACE)
    mark = cluster.directory / "stuck-in-a-reward"
    stuck = cluster.start("worker", name="stuck", env={"REWARD_S": "45", "REWARD_MARK": str(mark)})
    cluster.wait_for_step(1, learner)
    cluster.wait_for(mark.exists, "stuck judges a group", alive=learner)

    stuck.interrupt()
    polite.process.send_signal(signal.SIGHUP)  # its terminal is closed

    assert cluster.wait_for_end(polite) == 128 + signal.SIGHUP
    cluster.wait_for(
        lambda: "polite left: stopped by its operator" in cluster.log("learner"),
        "the learner hears of it",
        alive=learner,
    )
    cluster.wait_for(
        lambda: "again to stop at once" in stuck.output,
        "it waits for its running batch",
        alive=stuck,
    )
    stuck.interrupt()
    assert cluster.wait_for_end(stuck) == INTERRUPTED

    learner.process.send_signal(signal.SIGHUP)
    assert cluster.wait_for_end(learner) == 128 + signal.SIGHUP
    step = cluster.records("trained")[-1]["step"]
    assert cluster.records("checkpoint")[-1]["step"] == step
    cluster.audit(is_finished=False)
