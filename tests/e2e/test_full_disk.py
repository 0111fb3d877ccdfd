"""A disk that fills up while a run is on it."""

from __future__ import annotations

import resource

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_full_disk_at_a_checkpoint_leaves_the_old_one_and_the_run(cluster: Cluster) -> None:
    """After the first checkpoint no file may grow beyond a size that checkpoints exceed."""
    saved_step = 3
    cluster.hold_from(4 * (saved_step + 1))
    learner = cluster.start("learner", settings={"run.max_steps": 12})
    worker = cluster.start("worker", name="w1")
    cluster.wait_for(lambda: cluster.records("checkpoint"), "a checkpoint", alive=learner)

    limit = 700_000  # more than the ledger takes, less than the optimizer
    resource.prlimit(learner.process.pid, resource.RLIMIT_FSIZE, (limit, limit))

    cluster.let_go()
    cluster.finish(learner, worker)
    assert cluster.audit().num_steps == 12
    checkpoints = cluster.run_dir / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == f"step_{saved_step:06d}"
    names = sorted(path.name for path in checkpoints.glob("*"))
    assert names == ["latest", f"step_{saved_step:06d}"]
    log = cluster.log("learner")
    assert "step_000012.tmp: cannot write the trainer's state" in log
    assert "File too large" in log
    assert "the checkpoint before stays the newest" in log
