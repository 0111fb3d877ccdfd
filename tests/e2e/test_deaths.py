"""A worker or the relay dies in the middle of a run: nobody else stops, and nothing is lost."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PACE = {"REWARD_S": "0.02"}
"""About ten steps in two seconds: slow enough to have a middle."""


def test_a_killed_worker_is_replaced_by_the_other(cluster: Cluster) -> None:
    learner = cluster.start("learner", settings={"run.max_steps": 12})
    first, second = (cluster.start("worker", name=name, env=PACE) for name in ("w1", "w2"))
    cluster.wait_for(
        lambda: len({record["worker"] for record in cluster.records("accepted")}) == 2,
        "both workers deliver",
        alive=learner,
    )
    cluster.wait_for_step(2, learner)
    lost = cluster.wait_for(lambda: cluster.open_groups("w1"), "w1 holds groups", alive=learner)

    first.kill()

    lost &= cluster.open_groups("w1")
    assert cluster.records("trained")[-1]["step"] < 12, "the run was over too soon to show anything"
    cluster.finish(learner, second)
    result = cluster.audit()
    assert result.num_steps == 12
    granted_again = {r["group"] for r in cluster.records("granted") if r["attempt"] > 0}
    assert lost <= granted_again
    assert lost <= result.accepted.keys()
    assert "w1 is silent" in cluster.log("learner")


def test_workers_of_a_killed_relay_go_on_with_the_learner(cluster: Cluster) -> None:
    """They are told the relay's address only: the learner's they have from its plan."""
    via_relay = {"worker.connect": [cluster.relay_address]}
    learner = cluster.start("learner", settings={"run.max_steps": 12})
    relay = cluster.start("relay", name="r1")
    workers = [
        cluster.start("worker", name=name, env=PACE, settings=via_relay) for name in ("w1", "w2")
    ]
    cluster.wait_for_step(3, learner)

    relay.kill()

    num_steps = len(cluster.records("trained"))
    assert num_steps < 12, "the run was over too soon to show anything"
    cluster.finish(learner, *workers)
    result = cluster.audit()
    assert result.num_steps == 12
    for name in ("w1", "w2"):
        log = cluster.log(name)
        assert f"through {cluster.relay_address} (r1)" in log
        assert f"through {cluster.learner_address} (learner)" in log
        assert log.index("(r1)") < log.index("(learner)")


def test_a_restarted_relay_serves_again(cluster: Cluster) -> None:
    """The learner tells nobody its address, so its workers have no way but the relay."""
    port = cluster.learner_address.rpartition(":")[2]
    via_relay = {"worker.connect": [cluster.relay_address]}
    learner = cluster.start(
        "learner", settings={"run.max_steps": 12, "learner.listen": f"tcp://0.0.0.0:{port}"}
    )
    relay = cluster.start("relay", name="r1")
    workers = [
        cluster.start("worker", name=name, env=PACE, settings=via_relay) for name in ("w1", "w2")
    ]
    cluster.wait_for_step(3, learner)

    relay.kill()
    num_steps = len(cluster.records("trained"))
    assert num_steps < 8, "the run was over too soon to show anything"
    relay = cluster.start("relay", name="r1")

    cluster.finish(learner, *workers, relay)
    result = cluster.audit()
    assert result.num_steps == 12
    for name in ("w1", "w2"):
        assert cluster.log(name).count(f"through {cluster.relay_address} (r1)") == 2
        newest = cluster.installed(name)[-1]["version"][1]
        assert newest > num_steps + 1, "the weights did not come through the restarted relay"
