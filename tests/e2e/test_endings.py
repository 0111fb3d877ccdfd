"""How nodes are stopped on purpose, and how a run goes on afterwards."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

INTERRUPTED = 130
PACE = {"REWARD_S": "0.02"}


def test_an_interrupted_run_is_saved_and_resumed_with_changes(cluster: Cluster) -> None:
    """Ctrl-C, a refused unsafe change, and a resumption with a safe one, under a living worker."""
    endless = {"run.max_steps": 1000, "checkpoint.interval_steps": 1000}
    learner = cluster.start("learner", settings=endless)
    worker = cluster.start("worker", name="w1", env=PACE)
    cluster.wait_for_step(3, learner)

    learner.interrupt()

    assert cluster.wait_for_end(learner) == INTERRUPTED
    step = cluster.records("trained")[-1]["step"]
    assert cluster.records("checkpoint")[-1]["step"] == step
    assert f"stopped at step {step}; --resume continues from step {step}" in learner.output
    assert worker.is_running
    cluster.audit(is_finished=False)

    num_records = len(cluster.records())
    refused = cluster.start(
        "learner", "--resume", settings={"batch.group_size": 8, "optimizer.learning_rate": 5e-3}
    )
    assert cluster.wait_for_end(refused) == 2
    assert "UNSAFE batch.group_size: 4 -> 8" in refused.output
    assert "safe   optimizer.learning_rate: 0.01 -> 0.005" in refused.output
    assert "batch.group_size is not safe for this run" in refused.output
    assert "--yes" in refused.output
    assert len(cluster.records()) == num_records, "a refused change must leave no trace"

    settings = {"run.max_steps": step + 4, "optimizer.learning_rate": 5e-3}
    resumed = cluster.start("learner", "--resume", settings=settings)
    cluster.finish(resumed, worker)
    assert "UNSAFE" not in resumed.output
    assert f"run.max_steps: 1000 -> {step + 4}" in resumed.output
    result = cluster.audit()
    assert result.fork_steps == {1: 0, 2: step}
    assert result.num_steps == step + 4


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


def test_an_existing_run_is_neither_overwritten_nor_changed_by_accident(cluster: Cluster) -> None:
    learner = cluster.start("learner")
    cluster.wait_for(lambda: cluster.records("published"), "v0 is published", alive=learner)
    learner.kill()
    num_records = len(cluster.records())

    again = cluster.start("learner")

    assert cluster.wait_for_end(again) == 2
    assert "holds a run already; continue it with --resume" in again.output
    assert len(cluster.records()) == num_records

    # Another order of prompts is not safe, and works: who says --yes takes the consequences.
    cluster.settings["run.seed"] = 5
    resumed = cluster.start("learner", "--resume", "--yes", settings={"run.max_steps": 2})
    cluster.finish(resumed, cluster.start("worker", name="w1"))
    assert "UNSAFE run.seed: 0 -> 5" in resumed.output
    result = cluster.audit()
    assert result.fork_steps == {1: 0, 2: 0}
    assert result.num_steps == 2
