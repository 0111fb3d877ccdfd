"""The common part of engines: settings, versions that are kept or swapped, memory that runs out."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import (
    Concurrency,
    InstalledVersion,
    Sampling,
    VersionError,
    VersionSlots,
    describe_error,
    is_out_of_memory,
)
from tests.engine.engine_contract import V1, V2, V3

V4 = PolicyVersion(1, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 0.009),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("max_completion_tokens", 0),
    ],
)
def test_impossible_settings_are_named_with_their_value(name: str, value: float) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    settings |= {"max_completion_tokens": 8, "stop_ids": (2,), name: value}
    with pytest.raises(ValueError, match=rf"sampling\.{name} is {value}, must be"):
        Sampling(**settings)


# --- the version barrier: what the contract of engines leaves ------------------------------------


def test_a_swap_that_fails_counts_for_nothing() -> None:
    installed = InstalledVersion()
    with installed.swap(V1):
        pass
    with pytest.raises(ValueError, match="no"), installed.swap(V2):
        raise ValueError("no")
    assert installed.installed == V1
    with installed.request(V1), installed.request(None):
        pass
    with pytest.raises(VersionError, match="v2 is wanted, v1 is installed"):
        installed.request(V2).__enter__()


# --- versions side by side ------------------------------------------------------------------------


def load(slots: VersionSlots, *versions: PolicyVersion) -> list[PolicyVersion | None]:
    """Load versions; return what had to go for each."""
    found = []
    for version in versions:
        with slots.load(version) as (_, unloaded):
            found.append(None if unloaded is None else unloaded.version)
    return found


def test_the_oldest_that_no_call_has_makes_room() -> None:
    slots = VersionSlots(3)
    assert load(slots, V1, V2, V3) == [None, None, None]
    with slots.request(V1) as held:
        assert held.version == V1
        assert load(slots, V4) == [V2]
        assert slots.installed == V4
        with slots.request(None) as newest:
            assert newest.version == V4
    with pytest.raises(VersionError, match="v2 is wanted, v4 is installed"):
        slots.request(V2).__enter__()
    assert load(slots, V2) == [V1]
    slots.close()
    with pytest.raises(EngineError, match="no weights are loaded"):
        slots.request(None).__enter__()


def test_a_version_that_is_loaded_again_is_another_one_and_what_fails_counts_for_nothing() -> None:
    slots = VersionSlots(3)
    load(slots, V1)
    with slots.request(V1) as old:
        load(slots, V1)
        with slots.request(V1) as new:
            assert (old.version, new.version) == (V1, V1)
            assert old.serial < new.serial
    with pytest.raises(ValueError, match="no"), slots.load(V2):
        raise ValueError("no")
    assert slots.installed == V1
    with slots.load(V2) as (slot, unloaded):
        assert unloaded is None
        assert slot.serial == 4, "the engine may have kept what it refused"


def test_a_load_waits_only_while_every_version_is_in_use() -> None:
    slots = VersionSlots(2)
    load(slots, V1, V2)
    with ThreadPoolExecutor(1) as pool:
        with slots.request(V1):
            loading = pool.submit(load, slots, V3)
            with slots.request(None) as newest:
                assert newest.version == V2
            with pytest.raises(TimeoutError):  # the newest must stay: the next may be wrong
                loading.result(timeout=0.05)
        assert loading.result(timeout=120) == [V1]
    assert slots.installed == V3


# --- memory that runs out -------------------------------------------------------------------------


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (RuntimeError(CPU), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"), True),
        (RuntimeError("std::bad_alloc"), True),
        (MemoryError(), True),
        (RuntimeError(f"Worker failed with error '{CUDA}', please check the stack trace"), True),
        (RuntimeError("expected scalar type Float"), False),
        (ValueError("room"), False),
    ],
)
def test_the_ways_in_which_memory_runs_out_are_known(error: BaseException, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_out_of_memory(describe_error(error)) is is_memory


def test_the_limit_is_halved_until_one_alone_is_too_much(caplog: pytest.LogCaptureFixture) -> None:
    concurrency = Concurrency()
    assert concurrency.bounded(100) == 100
    for limit in (3, 1):
        concurrency.halve(7, why="no memory", numbers="one needs 5 MiB")
        assert concurrency.bounded(100) == limit
    with pytest.raises(
        EngineError, match=r"a single running rollout.*: no memory; one needs 5 MiB\."
    ):
        concurrency.halve(7, why="no memory", numbers="one needs 5 MiB")
    assert concurrency.take_counts() == {"engine/out_of_memory": 3}
    assert concurrency.take_counts() == {}
    assert "out of memory with 7 running rollouts" in caplog.text
    assert "from now on at most 3 run" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
