"""A relay and a worker whose operators lie, as real processes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_relay_that_lies_gains_nothing_and_its_worker_asks_the_learner_for_weights(
    make_cluster: Callable[[], Cluster],
) -> None:
    """Plans do not say where that is: the learner listens on a wildcard."""
    cluster = make_cluster()
    port = cluster.learner_address.rpartition(":")[2]
    cluster.settings |= {
        "run.max_steps": 6,
        "sync.max_staleness": 1,
        "network.lease_timeout_s": 2,
    }
    learner = cluster.start("learner", settings={"learner.listen": f"tcp://0.0.0.0:{port}"})
    relay = cluster.start("relay", "--lie", "relay_lies", name="r1")
    addresses = [cluster.relay_address, cluster.learner_address]
    behind = cluster.start("worker", name="w1", settings={"worker.connect": addresses})
    cluster.wait_for(lambda: cluster.log("w1").count("joined run"), "w1 joins", alive=learner)
    other = cluster.start("worker", name="w2")
    cluster.finish(learner, relay, behind, other)
    assert cluster.audit(max_staleness=1).num_steps == 6
    assert re.search("weights from r1 failed: .* does not match its hash", cluster.log("w1"))
    assert [record["version"][1] for record in cluster.installed("w1")][-1] >= 4
    assert cluster.count("refused/forged") > 0
    told = "refused a Deliver under the name of w1: its seal is wrong: .* over the link of r1"
    assert re.search(told, cluster.log("learner"))
    assert {record["worker"] for record in cluster.records("accepted")} == {"w2"}


@pytest.mark.matrix
def test_a_worker_that_states_other_log_probabilities_is_set_aside_by_name(
    make_cluster: Callable[[], Cluster],
) -> None:
    cluster = make_cluster()
    cluster.settings |= {
        "run.max_steps": 30,
        "batch.group_size": 2,
        "batch.groups_per_step": 10,
        "optimizer.learning_rate": 1e-4,
        "sync.max_staleness": 1,
    }
    learner = cluster.start("learner")
    names = ("w1", "w2", "liar")
    workers = [
        cluster.start("worker", *(["--lie", "state_less"] if name == "liar" else []), name=name)
        for name in names
    ]
    cluster.finish(learner, *workers)
    cluster.audit(max_staleness=1)
    [told] = re.findall(r"(\w+) is set aside for (.*)", cluster.log("learner"))
    assert told[0] == "liar"
    assert "the log-probabilities that it states differ from the learner's by" in told[1]
    assert cluster.count("mismatched_workers") == 1
    rows = [row["workers/mismatch_kl"] for row in cluster.metrics() if "workers/mismatch_kl" in row]
    [row] = [row for row in rows if {*row} == {*names}][:1]
    assert row["liar"] > 1 > 0.1 > max(row["w1"], row["w2"])
