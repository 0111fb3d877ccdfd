"""A fast and a slow worker: the slow one delays no batch, and what it lost is in the ledger."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]  # promise 10 is the same on virtual time

SLOW = {"REWARD_S": "2"}
"""A group of four takes this worker more than eight seconds."""


def test_a_slow_worker_is_passed_over_and_its_groups_are_copied(cluster: Cluster) -> None:
    """On-policy: a batch waits for the slow worker if that has a part in it."""
    cluster.settings["sync.max_staleness"] = 0
    cluster.hold_from(0)
    slow = cluster.start("worker", name="slow", env=SLOW)
    fast = cluster.start("worker", name="fast")
    learner = cluster.start("learner", settings={"run.max_steps": 12})
    for name in ("slow", "fast"):
        cluster.wait_for(lambda name=name: cluster.installed(name), f"{name} is there")

    cluster.let_go()
    cluster.finish(learner, slow, fast)

    result = cluster.audit(max_staleness=0)
    assert result.num_steps == 12
    made = Counter(record["worker"] for record in result.accepted.values())
    assert made["fast"] >= 40, made
    copies = [r for r in cluster.records("granted") if "copy_of" in r]
    assert copies, "the slow worker's groups were not given to the fast one"
    assert {r["worker"] for r in copies} == {"fast"}
    won = [r for r in result.accepted.values() if r["attempt"] > 0]
    assert {r["worker"] for r in won} == {"fast"}
    cancelled = cluster.records("cancelled")
    assert {(r["group"], r["worker"]) for r in cancelled} >= {(r["group"], "slow") for r in won}
    assert cluster.count("hedges/issued") == len(copies)
    assert cluster.count("hedges/won") == len(won)
    assert cluster.count("leases_cancelled") == len(cancelled)
    assert "was finished by another worker" in cluster.log("slow")
