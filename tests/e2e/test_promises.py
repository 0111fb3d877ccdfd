"""Promises of four processes on policy: bit-exact weights, and no token of age.

With max_staleness 3 it is in test_deaths.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.weights import image_hash

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_STEPS = 8
WORKERS = ("w1", "w2")


@pytest.fixture(scope="module")
def on_policy(make_cluster: Callable[[], Cluster]) -> Cluster:
    """Return the finished run of a learner, a relay and two workers; each step has a checkpoint."""
    cluster = make_cluster()
    settings = {
        "run.max_steps": MAX_STEPS,
        "checkpoint.interval_steps": 1,
        "checkpoint.keep_last": 100,
    }
    cluster.settings["sync.max_staleness"] = 0
    addresses = [cluster.relay_address, cluster.learner_address]
    nodes = [
        cluster.start("learner", settings=settings),
        cluster.start("relay", name="r1"),
        *(
            cluster.start(
                "worker",
                name=name,
                settings={"worker.connect": addresses},
                env={"REWARD_S": "0.01"},
            )
            for name in WORKERS
        ),
    ]
    cluster.finish(*nodes)
    return cluster


def test_with_max_staleness_0_every_trained_token_is_on_policy(on_policy: Cluster) -> None:
    result = on_policy.audit(max_staleness=0)

    assert result.num_steps == MAX_STEPS
    assert set(result.staleness) == {0}


def published_hashes(cluster: Cluster) -> dict[int, str]:
    """Return the image hash of every step's weights, from the initial ones and the checkpoints."""
    model = next(
        line.split('"')[1]
        for line in cluster.config_path.read_text().splitlines()
        if line.startswith("name =")
    )
    hashes = {0: image_hash(cluster.directory / model / "model.safetensors")}
    for path in cluster.run_dir.glob("checkpoints/step_*"):
        hashes[int(path.name.removeprefix("step_"))] = image_hash(path / "weights.safetensors")
    return hashes


def check_installed(cluster: Cluster) -> set[int]:
    """Check every version that a worker installed; return their steps."""
    hashes = published_hashes(cluster)
    assert len(set(hashes.values())) == MAX_STEPS + 1, "versions that are equal show nothing"
    recorded = {record["version"][1]: record["image_hash"] for record in cluster.records("sealed")}
    assert recorded == hashes
    steps = set()
    for worker in WORKERS:
        for record in cluster.installed(worker):
            lineage, step = record["version"]
            assert lineage == 1
            assert record["image_hash"] == hashes[step], f"{worker} installed another v{step}"
            steps.add(step)
    return steps


def test_every_version_is_bit_identical_on_the_workers(on_policy: Cluster) -> None:
    """On policy each step is sampled with the version before it, so all of them are installed."""
    assert check_installed(on_policy) >= set(range(MAX_STEPS))


def test_the_exported_checkpoint_is_the_last_published_version(on_policy: Cluster) -> None:
    exported = image_hash(on_policy.run_dir / "final" / "model.safetensors")

    assert exported == published_hashes(on_policy)[MAX_STEPS]
