"""What a whole run of four processes promises: bit-exact weights and the bound on staleness."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.weights import image_hash

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_STEPS = 8
WORKERS = ("w1", "w2")


def run_to_the_end(cluster: Cluster, max_staleness: int) -> None:
    """Run a learner, a relay and two workers, with a checkpoint of every step."""
    settings = {
        "run.max_steps": MAX_STEPS,
        "checkpoint.interval_steps": 1,
        "checkpoint.keep_last": 100,
    }
    cluster.settings["sync.max_staleness"] = max_staleness
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


@pytest.fixture(scope="module")
def on_policy(make_cluster: Callable[[], Cluster]) -> Cluster:
    """Return a finished run with max_staleness 0."""
    cluster = make_cluster()
    run_to_the_end(cluster, max_staleness=0)
    return cluster


@pytest.fixture(scope="module")
def off_policy(make_cluster: Callable[[], Cluster]) -> Cluster:
    """Return a finished run with max_staleness 3."""
    cluster = make_cluster()
    run_to_the_end(cluster, max_staleness=3)
    return cluster


def test_with_max_staleness_0_every_trained_token_is_on_policy(on_policy: Cluster) -> None:
    result = on_policy.audit(max_staleness=0)

    assert result.num_steps == MAX_STEPS
    assert set(result.staleness) == {0}


def test_with_max_staleness_3_no_trained_token_is_older(off_policy: Cluster) -> None:
    result = off_policy.audit(max_staleness=3)

    assert result.num_steps == MAX_STEPS
    assert max(result.staleness) >= 1, "the run was on policy, so the bound was not put to the test"


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
    recorded = {
        record["version"][1]: record["image_hash"] for record in cluster.records("published")
    }
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


def test_versions_that_overtake_each_other_are_bit_identical(off_policy: Cluster) -> None:
    assert len(check_installed(off_policy)) > 1


def test_the_exported_checkpoint_is_the_last_published_version(off_policy: Cluster) -> None:
    exported = image_hash(off_policy.run_dir / "final" / "model.safetensors")

    assert exported == published_hashes(off_policy)[MAX_STEPS]
