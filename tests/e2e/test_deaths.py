"""A worker or the relay dies in the middle of a run: nobody else stops, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from tests.e2e.audit import Audit
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_STEPS = 12
MIDDLE = 20
"""Group at which the gate holds a run, so that it does not come beyond step 5."""


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
    for node in workers:  # one that has nothing yet, and a dead parent, asks the learner for all
        cluster.wait_for(
            partial(cluster.has_newest, node.name), f"{node.name} samples", alive=learner
        )
    lost = cluster.open_groups("killed")
    killed.kill()
    cluster.wait_for(
        lambda: "killed is silent" in cluster.log("learner"), "it is missed", alive=learner
    )

    relay.kill()

    direct = f"through {cluster.learner_address} (learner)"

    def is_back(name: str) -> bool:
        return direct in cluster.log(name)

    for node in workers:  # one alone could end the run before the other is back
        cluster.wait_for(partial(is_back, node.name), f"{node.name} is back", alive=learner)
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
    first, *deltas = [row["broadcast/bytes"] for row in deaths.cluster.metrics()]
    assert max(deltas) < first / 10, "they were not written in place"


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
