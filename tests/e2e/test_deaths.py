"""A worker or the relay dies in the middle of a run: nobody else stops, and nothing is lost."""

from __future__ import annotations

import re

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MIDDLE = 20
"""Group at which the gate holds a run of 12 steps, so that it does not come beyond step 5."""


def count_links(cluster: Cluster, name: str) -> int:
    """Return how often a worker has found its way through the relay."""
    return cluster.log(name).count(f"through {cluster.relay_address} (r1)")


def newest_installed(cluster: Cluster, name: str) -> int:
    return max((record["version"][1] for record in cluster.installed(name)), default=-1)


def test_a_killed_worker_is_replaced_by_the_other(cluster: Cluster) -> None:
    cluster.hold_from(MIDDLE)
    learner = cluster.start("learner", settings={"run.max_steps": 12})
    first, second = (cluster.start("worker", name=name) for name in ("w1", "w2"))
    cluster.wait_for(
        lambda: max(cluster.open_groups("w1"), default=0) >= MIDDLE,
        "w1 holds a group that it cannot finish",
        alive=learner,
    )
    lost = cluster.open_groups("w1")

    first.kill()

    cluster.wait_for(
        lambda: "w1 is silent" in cluster.log("learner"), "w1 is missed", alive=learner
    )
    cluster.let_go()
    cluster.finish(learner, second)
    result = cluster.audit()
    assert result.num_steps == 12
    assert lost <= result.accepted.keys()
    # What it delivered with its last breath was not lost.
    lost -= {group for group in lost if result.accepted[group]["worker"] == "w1"}
    assert lost, "it held nothing any more"
    granted_again = {r["group"] for r in cluster.records("granted") if r["attempt"] > 0}
    assert lost <= granted_again


def test_workers_of_a_killed_relay_go_on_with_the_learner(cluster: Cluster) -> None:
    """They are told the relay's address only: the learner's they have from its plan."""
    via_relay = {"worker.connect": [cluster.relay_address]}
    cluster.hold_from(MIDDLE)
    learner = cluster.start("learner", settings={"run.max_steps": 12})
    relay = cluster.start("relay", name="r1")
    workers = [cluster.start("worker", name=name, settings=via_relay) for name in ("w1", "w2")]
    cluster.wait_for_step(3, learner)
    for name in ("w1", "w2"):
        cluster.wait_for(lambda name=name: count_links(cluster, name), f"{name} is there")

    relay.kill()

    direct = f"through {cluster.learner_address}#"  # with the key that the plan says
    for name in ("w1", "w2"):  # one alone could end the run before the other is back
        cluster.wait_for(lambda name=name: direct in cluster.log(name), f"{name} is back")
    cluster.let_go()
    cluster.finish(learner, *workers)
    result = cluster.audit()
    assert result.num_steps == 12
    for name in ("w1", "w2"):
        log = cluster.log(name)
        assert f"through {cluster.relay_address} (r1)" in log
        assert log.index("(r1)") < log.index("(learner)")


def test_a_restarted_relay_serves_again(cluster: Cluster) -> None:
    """The learner tells nobody its address, so its workers have no way but the relay."""
    cluster.hold_from(MIDDLE)
    port = cluster.learner_address.rpartition(":")[2]
    via_relay = {"worker.connect": [cluster.relay_address]}
    learner = cluster.start(
        "learner", settings={"run.max_steps": 12, "learner.listen": f"tcp://0.0.0.0:{port}"}
    )
    relay = cluster.start("relay", name="r1")
    workers = [cluster.start("worker", name=name, settings=via_relay) for name in ("w1", "w2")]
    cluster.wait_for_step(3, learner)
    for name in ("w1", "w2"):
        cluster.wait_for(lambda name=name: count_links(cluster, name), f"{name} is there")

    relay.kill()
    relay = cluster.start("relay", name="r1")

    for name in ("w1", "w2"):
        cluster.wait_for(lambda name=name: count_links(cluster, name) >= 2, f"{name} is back")
    num_steps = len(cluster.records("trained"))
    cluster.hold_from(40)
    for name in ("w1", "w2"):
        cluster.wait_for(
            lambda name=name: newest_installed(cluster, name) > num_steps + 1,
            f"{name} has weights that came through the restarted relay",
            alive=learner,
        )
    cluster.let_go()
    cluster.finish(learner, *workers, relay)
    assert cluster.audit().num_steps == 12


def test_a_restarted_relay_finds_what_it_held(cluster: Cluster) -> None:
    """It asks for nothing of what lies in its files, and serves it."""
    via_relay = {"worker.connect": [cluster.relay_address]}
    with_files = {"network.store_dir": str(cluster.directory / "arenas")}
    cluster.hold_from(MIDDLE)
    learner = cluster.start("learner", settings={"run.max_steps": 12})
    relay = cluster.start("relay", name="r1", settings=with_files)
    worker = cluster.start("worker", name="w1", settings=via_relay)

    def held() -> int:
        return max(map(int, re.findall(r"holds v(\d+)", cluster.log("r1"))), default=-1)

    cluster.wait_for(lambda: held() >= 3, "r1 holds v3 or newer", alive=learner)

    relay.kill()
    num_held, num_joined = held(), cluster.log("r1").count("joined run")
    relay = cluster.start("relay", name="r1", settings=with_files)
    cluster.wait_for(
        lambda: cluster.log("r1").count("joined run") > num_joined, "r1 is back", alive=learner
    )
    num_steps = len(cluster.records("trained"))
    cluster.let_go()

    cluster.finish(learner, worker, relay)
    assert cluster.audit().num_steps == 12
    found = re.findall(r"found v(\d+): (\d+) of (\d+) chunks are right", cluster.log("r1"))
    whole = [int(step) for step, num_right, num_chunks in found if num_right == num_chunks]
    assert len(whole) >= max(1, len(found) - 1), "only the newest may have been on its way"
    assert max(whole) >= num_held
    assert newest_installed(cluster, "w1") > num_steps + 1
