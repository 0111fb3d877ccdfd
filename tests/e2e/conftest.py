"""Fixtures of the end-to-end tests: clusters that leave no process behind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.fork_server import ForkServer


@pytest.fixture(scope="package")
def forks() -> Iterator[ForkServer]:
    """Return what forks nodes."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def cluster(tmp_path: Path, model_dir: Path, forks: ForkServer) -> Iterator[Cluster]:
    """Return a cluster without nodes; those that a test starts are gone after it."""
    cluster = Cluster(tmp_path / "site", model_dir, forks)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def make_cluster(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, forks: ForkServer
) -> Iterator[Callable[[], Cluster]]:
    """Return a maker of clusters that live as long as the module's tests."""
    clusters: list[Cluster] = []

    def make() -> Cluster:
        clusters.append(Cluster(tmp_path_factory.mktemp("site"), model_dir, forks))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of every log to the report of a failed test."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Cluster):
                report.sections.append((f"logs in {value.directory}", value.logs))
    return report
