"""A relay whose operator lies, between the learner and a worker, as real processes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_worker_behind_a_relay_that_replays_old_weights_asks_the_learner(
    make_cluster: Callable[[], Cluster],
) -> None:
    """The plan does not say where: the learner listens on a wildcard."""
    cluster = make_cluster()
    port = cluster.learner_address.rpartition(":")[2]
    cluster.settings |= {"run.max_steps": 6, "sync.max_staleness": 1}
    learner = cluster.start("learner", settings={"learner.listen": f"tcp://0.0.0.0:{port}"})
    relay = cluster.start("relay", "--lie", "replay_chunks", name="r1")
    addresses = [cluster.relay_address, cluster.learner_address]
    worker = cluster.start("worker", name="w1", settings={"worker.connect": addresses})
    cluster.finish(learner, relay, worker)
    assert cluster.audit(max_staleness=1).num_steps == 6
    assert re.search("weights from r1 failed: .* does not match its hash", cluster.log("w1"))
    assert [record["version"][1] for record in cluster.installed("w1")][-1] >= 4
