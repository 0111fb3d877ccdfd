from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import VersionBarrier, VersionError

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


@pytest.fixture
def barrier() -> VersionBarrier:
    barrier = VersionBarrier()
    with barrier.swap(V1):
        pass
    return barrier


def test_nothing_runs_before_something_is_installed() -> None:
    with (
        pytest.raises(EngineError, match="no weights are loaded"),
        VersionBarrier().request(V1, V1),
    ):
        pass


def test_a_swap_that_fails_counts_for_nothing(barrier: VersionBarrier) -> None:
    with pytest.raises(ValueError, match="no"), barrier.swap(V2):
        raise ValueError("no")
    assert barrier.installed == V1
    with barrier.swap(V2):
        pass
    assert barrier.installed == V2


def test_a_swap_waits_for_an_exact_version_and_for_no_other_request(
    barrier: VersionBarrier,
) -> None:
    swapped = threading.Event()

    def swap() -> None:
        with barrier.swap(V2):
            swapped.set()

    with ThreadPoolExecutor(1) as pool:
        with barrier.request(None, V1), barrier.request(V1, None):
            pool.submit(swap)
            assert not swapped.wait(0.05)
        assert swapped.wait(120)


def test_while_a_swap_waits_no_more_exact_ones_begin(barrier: VersionBarrier) -> None:
    """Or a stream of them would keep the new version out for ever."""

    def ask() -> None:
        with barrier.request(None, V1):
            pass

    with ThreadPoolExecutor(1) as pool:
        with barrier.swap(V2):
            asked = pool.submit(ask)
            assert not asked.done()
        with pytest.raises(VersionError, match="exactly v1 is wanted, v2 is installed"):
            asked.result(timeout=120)
