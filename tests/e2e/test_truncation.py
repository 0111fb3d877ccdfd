"""Truncated sampling with a narrow loss: ratios are exact, through a relay and a crash."""

from __future__ import annotations

import signal
from statistics import mean

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_STEPS = 5


def test_ratios_are_of_the_distribution_that_was_sampled_from(cluster: Cluster) -> None:
    """The crash leaves groups that are stored and not trained, which the resumed learner reads."""
    cluster.settings = {
        "run.max_steps": MAX_STEPS,
        "sampling.top_p": 0.7,
        "sampling.min_p": 0.02,
        "loss.kind": "gspo",
        "batch.keep_zero_variance": True,
    }
    relay = cluster.start("relay", name="r1")
    to_relay = {"worker.connect": [cluster.relay_address]}
    worker = cluster.start("worker", name="w1", settings=to_relay)
    doomed = cluster.start("learner", "--crash-at", "published:2")
    assert cluster.wait_for_end(doomed) == -signal.SIGKILL
    cluster.finish(cluster.start("learner", "--resume"), worker, relay)
    assert cluster.audit().num_steps == MAX_STEPS
    rows = [row for row in cluster.metrics() if "support/ids" in row]
    assert len(rows) >= MAX_STEPS
    assert all(1 <= row["support/ids"] < 32 for row in rows)
    assert not any(row["support/too_large"] for row in rows)
    fresh = [row["is_ratio/mean"] for row in rows if row["staleness/max"] == 0]
    assert fresh
    assert fresh == pytest.approx([1.0] * len(fresh), abs=1e-3), "the policy that sampled them"
    # Scored on the whole vocabulary the mean would be some .75.
    assert mean(row["is_ratio/mean"] for row in rows) == pytest.approx(1.0, abs=0.1)
    assert cluster.count("discarded/no_support") == 0
