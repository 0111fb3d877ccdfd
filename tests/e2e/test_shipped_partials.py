"""Workers told to stop, or killed, in the middle of their rollouts, and one that comes back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, NodeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]  # promise 36 is the same on virtual time


def partials_of(cluster: Cluster, name: str) -> Path:
    return cluster.run_dir / "workers" / name / "partials.bin"


def begin_rollouts(cluster: Cluster, name: str, learner: NodeProcess) -> NodeProcess:
    """Start a slow worker, and wait until it has shipped what it has begun."""
    worker = cluster.start("worker", "--token-s", "0.04", name=name)
    path = partials_of(cluster, name)
    cluster.wait_for(path.exists, f"{name} has written what it has begun", alive=learner)
    assert cluster.open_groups(name)
    return worker


def test_what_lost_workers_have_begun_is_finished_by_others(cluster: Cluster) -> None:
    cluster.settings["sampling.max_completion_tokens"] = 100
    settings = {
        "run.max_steps": 8,
        "rollout.partial_ship_s": 1,
        "rollout.over_submission": 2,
    }
    learner = cluster.start("learner", settings=settings)

    told_to_stop = begin_rollouts(cluster, "w1", learner)
    told_to_stop.process.send_signal(signal.SIGTERM)
    assert cluster.wait_for_end(told_to_stop) in (0, 130, 143)
    left = partials_of(cluster, "w1").read_bytes()

    killed = begin_rollouts(cluster, "w2", learner)
    killed.kill()
    assert len(cluster.records("trained")) < 8, "the run was over too soon to show anything"

    # The machine of the first comes back, with what it had and another address.
    assert partials_of(cluster, "w1").read_bytes() == left
    back = cluster.start("worker", name="w1")
    cluster.finish(learner, back)

    result = cluster.audit()
    assert result.num_steps == 8
    # To the second what the first had shipped, and back what the second had.
    assert cluster.count("partials/handed_over") >= 2
    assert cluster.count("partials/resumed") >= 2
    assert "unfinished groups of" in cluster.log("w1")
