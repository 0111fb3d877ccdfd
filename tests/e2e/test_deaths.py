"""A worker or the relay dies in the middle of a run: nobody else stops, and nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.e2e.audit import Audit
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_STEPS = 12
MIDDLE = 20
"""Group at which the gate holds a run, so that it does not come beyond step 5."""


def count_links(cluster: Cluster, name: str) -> int:
    """Return how often a worker has found its way through the relay."""
    return cluster.log(name).count(f"through {cluster.relay_address} (r1)")


def newest_installed(cluster: Cluster, name: str) -> int:
    return max((record["version"][1] for record in cluster.installed(name)), default=-1)


# --- with a way to the learner -------------------------------------------------------------------


@dataclass
class Deaths:
    """A finished run in which a worker was killed, and then the relay."""

    cluster: Cluster
    audit: Audit
    lost: set[int]
    """Groups that the worker held."""


@pytest.fixture(scope="module")
def deaths(make_cluster: Callable[[], Cluster]) -> Deaths:
    """Return a run that went on after both.

    Its workers are told the relay's address only: the learner's they have from its plan.
    """
    cluster = make_cluster()
    via_relay = {"worker.connect": [cluster.relay_address]}
    cluster.hold_from(MIDDLE)
    in_place = {"network.codec": "delta", "optimizer.learning_rate": 1e-6}
    learner = cluster.start("learner", settings={"run.max_steps": MAX_STEPS, **in_place})
    relay = cluster.start("relay", name="r1")
    workers = [cluster.start("worker", name=name, settings=via_relay) for name in ("w1", "w2")]
    killed = cluster.start("worker", name="killed", settings=via_relay)
    cluster.wait_for(
        lambda: max(cluster.open_groups("killed"), default=0) >= MIDDLE,
        "the worker holds a group that it cannot finish",
        alive=learner,
    )
    cluster.wait_for_step(3, learner)
    lost = cluster.open_groups("killed")
    killed.kill()
    cluster.wait_for(
        lambda: "killed is silent" in cluster.log("learner"), "it is missed", alive=learner
    )

    relay.kill()

    direct = f"through {cluster.learner_address}#"  # with the key that the plan says
    for node in workers:  # one alone could end the run before the other is back
        cluster.wait_for(
            lambda name=node.name: direct in cluster.log(name),
            f"{node.name} is back",
            alive=learner,
        )
    cluster.let_go()
    cluster.finish(learner, *workers)
    return Deaths(cluster, cluster.audit(), lost)


def test_a_run_goes_on_without_the_dead(deaths: Deaths) -> None:
    assert deaths.audit.num_steps == MAX_STEPS


def test_no_trained_token_is_older_than_the_bound(deaths: Deaths) -> None:
    """As the audit has checked; what lay at the gate put the bound to the test."""
    assert max(deaths.audit.staleness) >= 1


def test_versions_that_overtake_each_other_are_bit_identical(deaths: Deaths) -> None:
    """They came through the relay until that was killed, and then from the learner."""
    published = {
        tuple(record["version"]): record["image_hash"]
        for record in deaths.cluster.records("sealed")
    }
    for name in ("w1", "w2"):
        installed = deaths.cluster.installed(name)
        assert len(installed) > 1
        for record in installed:
            assert record["image_hash"] == published[tuple(record["version"])], name


def test_groups_of_a_killed_worker_are_granted_again_and_accepted(deaths: Deaths) -> None:
    accepted = deaths.audit.accepted
    assert deaths.lost <= accepted.keys()
    # What it delivered with its last breath was not lost.
    lost = {group for group in deaths.lost if accepted[group]["worker"] != "killed"}
    assert lost, "it held nothing any more"
    records = deaths.cluster.records("granted")
    assert lost <= {record["group"] for record in records if record["attempt"] > 0}


def test_workers_of_a_killed_relay_go_on_with_the_learner(deaths: Deaths) -> None:
    for name in ("w1", "w2"):
        log = deaths.cluster.log(name)
        assert f"through {deaths.cluster.relay_address} (r1)" in log
        assert log.index("(r1)") < log.index("(learner)")


# --- with no way but the relay -------------------------------------------------------------------


@dataclass
class Restart:
    """A finished run in which the relay was killed and came back."""

    cluster: Cluster
    num_held: int
    """Newest version that the relay held when it was killed."""
    num_steps: int
    """Steps that had been made when both workers were back."""


@pytest.fixture(scope="module")
def restart(make_cluster: Callable[[], Cluster]) -> Restart:
    """Return a run that went on; the learner tells nobody its address."""
    cluster = make_cluster()
    cluster.hold_from(MIDDLE)
    port = cluster.learner_address.rpartition(":")[2]
    via_relay = {"worker.connect": [cluster.relay_address]}
    with_files = {"network.store_dir": str(cluster.directory / "version_store")}
    learner = cluster.start(
        "learner", settings={"run.max_steps": MAX_STEPS, "learner.listen": f"tcp://0.0.0.0:{port}"}
    )
    relay = cluster.start("relay", name="r1", settings=with_files)
    workers = [cluster.start("worker", name=name, settings=via_relay) for name in ("w1", "w2")]

    def held() -> int:
        return max(map(int, re.findall(r"holds v(\d+)", cluster.log("r1"))), default=-1)

    cluster.wait_for(lambda: held() >= 3, "r1 holds v3 or newer", alive=learner)
    for node in workers:
        cluster.wait_for(lambda name=node.name: count_links(cluster, name), f"{node.name} is there")

    relay.kill()
    num_held = held()
    relay = cluster.start("relay", name="r1", settings=with_files)

    for node in workers:
        cluster.wait_for(
            lambda name=node.name: count_links(cluster, name) >= 2, f"{node.name} is back"
        )
    num_steps = len(cluster.records("trained"))
    cluster.hold_from(2 * MIDDLE)
    for node in workers:
        cluster.wait_for(
            lambda name=node.name: newest_installed(cluster, name) > num_steps + 1,
            f"{node.name} has weights that came through the restarted relay",
            alive=learner,
        )
    cluster.let_go()
    cluster.finish(learner, *workers, relay)
    return Restart(cluster, num_held, num_steps)


@pytest.mark.matrix
def test_a_restarted_relay_serves_again(restart: Restart) -> None:
    assert restart.cluster.audit().num_steps == MAX_STEPS
    for name in ("w1", "w2"):
        assert newest_installed(restart.cluster, name) > restart.num_steps + 1
        assert restart.cluster.learner_address not in restart.cluster.log(name)


@pytest.mark.matrix
def test_a_restarted_relay_finds_what_it_held(restart: Restart) -> None:
    """It asks for nothing of what lies in its files, and serves it."""
    log = restart.cluster.log("r1")
    found = re.findall(r"found v(\d+): (\d+) of (\d+) chunks are right", log)
    whole = [int(step) for step, num_right, num_chunks in found if num_right == num_chunks]
    assert len(whole) >= max(1, len(found) - 1), "only the newest may have been on its way"
    assert max(whole) >= restart.num_held
