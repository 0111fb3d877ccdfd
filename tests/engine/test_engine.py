from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import (
    Completion,
    Concurrency,
    Request,
    Sampling,
    VersionBarrier,
    VersionError,
    VersionSlots,
    describe_error,
    is_out_of_memory,
)
from echo.engine.hf.batch import StaticBatch
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import load_directory
from tests.engine.watchers import watching

VALID: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_completion_tokens": 8,
    "stop_ids": (2,),
}


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
    with pytest.raises(ValueError, match=rf"sampling\.{name} is {value}, must be"):
        Sampling(**{**VALID, name: value})


# --- the version barrier --------------------------------------------------------------------------


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


# --- versions side by side ------------------------------------------------------------------------


V3, V4 = PolicyVersion(1, 3), PolicyVersion(1, 4)


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
    with slots.request(None, V1) as held:
        assert held.version == V1
        assert load(slots, V4) == [V2]
        assert slots.installed == V4
        with slots.request(V2, None) as newest:
            assert newest.version == V4
    with pytest.raises(VersionError, match="exactly v2 is wanted, v4 is installed"):
        slots.request(None, V2).__enter__()
    with pytest.raises(VersionError, match="at least v5 is wanted, v4 is installed"):
        slots.request(PolicyVersion(1, 5), None).__enter__()
    with pytest.raises(VersionError, match="at least v2 is wanted, v1 is installed"):
        slots.request(V2, V1).__enter__()
    assert load(slots, V2) == [V1]
    slots.close()
    with pytest.raises(EngineError, match="no weights are loaded"):
        slots.request(None, None).__enter__()


def test_a_version_that_is_loaded_again_is_another_one() -> None:
    slots = VersionSlots(3)
    load(slots, V1)
    with slots.request(None, V1) as old:
        load(slots, V1)
        with slots.request(None, V1) as new:
            assert (old.version, new.version) == (V1, V1)
            assert old.serial < new.serial


def test_what_cannot_be_loaded_counts_for_nothing() -> None:
    slots = VersionSlots(2)
    load(slots, V1)
    with pytest.raises(ValueError, match="no"), slots.load(V2):
        raise ValueError("no")
    assert slots.installed == V1
    with slots.load(V2) as (slot, unloaded):
        assert unloaded is None
        assert slot.serial == 3, "the engine may have kept what it refused"


def test_a_load_waits_only_while_every_version_is_in_use() -> None:
    slots = VersionSlots(2)
    load(slots, V1, V2)
    with ThreadPoolExecutor(1) as pool:
        with slots.request(None, V1):
            loading = pool.submit(load, slots, V3)
            with slots.request(None, None) as newest:
                assert newest.version == V2
            with pytest.raises(TimeoutError):  # the newest must stay: the next may be wrong
                loading.result(timeout=0.05)
        assert loading.result(timeout=120) == [V1]
    assert slots.installed == V3


# --- memory that runs out -------------------------------------------------------------------------


HOW = Sampling(1.0, 1.0, 0, 16, (2, 9))
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA),
        RuntimeError(CPU),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
        RuntimeError(f"Worker failed with error '{CUDA}', please check the stack trace above"),
    ],
)
def test_the_ways_in_which_memory_runs_out_are_known(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert is_out_of_memory(describe_error(error))


@pytest.mark.parametrize("error", [RuntimeError("expected scalar type Float"), ValueError("room")])
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_limit_is_halved_until_one_alone_is_too_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    concurrency = Concurrency()
    assert concurrency.bounded(100) == 100
    for limit in (3, 1):
        concurrency.halve(7, why="no memory", numbers="one needs 5 MiB")
        assert concurrency.bounded(100) == limit
    with pytest.raises(EngineError, match=r"a single rollout.*: no memory; one needs 5 MiB\."):
        concurrency.halve(7, why="no memory", numbers="one needs 5 MiB")
    assert concurrency.take_counts() == {"engine/out_of_memory": 3}
    assert concurrency.take_counts() == {}
    assert "out of memory with 7 rollouts under way" in caplog.text
    assert "from now on 3 at one time" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


class Memory:
    """Holds so many tokens' keys and values, and fails as a device does beyond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_tokens: int | None = None) -> None:
        self.num_tokens = num_tokens
        self.error: Exception = torch.OutOfMemoryError(CUDA)
        forward = TransformersEngine._forward

        def limited(engine: Any, ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
            logits = forward(engine, ids, mask, positions, cache)
            if self.num_tokens is not None and len(ids) * cache.get_seq_length() > self.num_tokens:
                raise self.error
            return logits

        monkeypatch.setattr(TransformersEngine, "_forward", limited)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    torch.set_num_threads(1)
    return Memory(monkeypatch)


@pytest.fixture
def engine(tiny_model_dir: Path) -> TransformersEngine:
    engine = TransformersEngine(tiny_model_dir)
    engine.load(load_directory(tiny_model_dir, "float32"))
    return engine


def equal_prompts() -> list[Request]:
    """Four groups of four."""
    return [Request(f"r{n}", np.arange(3, 12, dtype=np.int32) + n // 4, n) for n in range(16)]


def unequal_prompts() -> list[Request]:
    lengths = np.random.default_rng(1).integers(1, 20, 16)
    return [
        Request(f"r{n}", np.arange(length, dtype=np.int32) % 29 + 3, n)
        for n, length in enumerate(lengths)
    ]


def distinct_prompts() -> list[Request]:
    """Sixteen that alone, before any token, exceed a small memory."""
    return [Request(f"r{n}", np.full(12, 3 + n, np.int32), n) for n in range(16)]


class Told:
    """What an engine told of its work."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.completions: list[Completion] = []

    def count(self, number: int) -> None:
        self.num_tokens += number

    def run(self, engine: TransformersEngine, requests: Sequence[Request]) -> list[Completion]:
        return engine.generate(
            requests,
            HOW,
            watching(on_tokens=self.count, on_completion=self.completions.append),
        )


@pytest.mark.slow
@pytest.mark.parametrize("make_requests", [equal_prompts, unequal_prompts, distinct_prompts])
@pytest.mark.parametrize(("num_tokens", "limit"), [(220, 8), (75, 2)])
def test_no_token_is_lost_or_sampled_twice(
    engine: TransformersEngine,
    memory: Memory,
    make_requests: Callable[[], list[Request]],
    num_tokens: int,
    limit: int,
) -> None:
    """It runs out at the prompts or in the middle; the same completions come, each told once."""
    requests = make_requests()
    expected = Told().run(engine, requests)
    memory.num_tokens = num_tokens
    told = Told()
    found = told.run(engine, requests)
    assert [c.request_id for c in found] == [r.request_id for r in requests]
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert told.num_tokens == sum(len(c.token_ids) for c in found)
    assert sorted(c.request_id for c in told.completions) == sorted(r.request_id for r in requests)
    # Fewer than the half of 16, where some had ended before it ran out.
    assert limit // 2 <= engine.max_concurrent_rollouts(9, 16) <= limit
    assert engine.take_counts()["engine/out_of_memory"] >= {8: 1, 2: 3}[limit]
    told.run(engine, requests)
    assert engine.take_counts() == {}, "the smaller concurrency was not kept"


@pytest.mark.slow
def test_the_numbers_are_those_of_the_longest(
    engine: TransformersEngine, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.num_tokens = 220
    requests = unequal_prompts()
    Told().run(engine, requests)
    longest = max(len(request.prompt_ids) for request in requests)
    assert f"one rollout of {longest} + 16 tokens" in caplog.records[0].getMessage()


def test_what_has_ended_takes_no_room_in_the_parts() -> None:
    batch = StaticBatch(equal_prompts()[:4], HOW, window=None)
    tokens = np.array([5, 2, 5, 5])
    [ended] = batch.append(0, tokens, np.zeros(4, np.float32), PolicyVersion(1, 1))
    assert ended == 1
    parts = batch.parts(2)
    assert [part.num_rows for part in parts] == [part.num_running for part in parts] == [2, 1]


def test_one_rollout_that_does_not_fit_ends_it_with_the_numbers(
    engine: TransformersEngine, memory: Memory
) -> None:
    memory.num_tokens, memory.error = 15, RuntimeError(CPU)
    with pytest.raises(EngineError) as caught:
        Told().run(engine, equal_prompts())
    message = str(caught.value)
    for part in (
        "out of memory with a single rollout under way",
        "can't allocate memory",
        "the weights take 394 KiB",
        "one rollout of 9 + 16 tokens at least",
        "the budget is",
        "free are",
        "Lower sampling.max_completion_tokens",
    ):
        assert part in message
    assert engine.take_counts() == {"engine/out_of_memory": 5}


def test_errors_of_another_kind_are_not_tried_again(
    engine: TransformersEngine, memory: Memory
) -> None:
    memory.num_tokens, memory.error = 15, RuntimeError("a kernel failed")
    with pytest.raises(RuntimeError, match="a kernel failed"):
        Told().run(engine, equal_prompts())
    assert engine.take_counts() == {}


def test_it_stops_when_told_to_though_parts_are_waiting(
    engine: TransformersEngine, memory: Memory
) -> None:
    memory.num_tokens = 75
    told = Told()
    found = engine.generate(
        equal_prompts(),
        Sampling(1.0, 1.0, 0, 16, ()),
        watching(should_stop=lambda: told.num_tokens > 100, on_tokens=told.count),
    )
    assert len(found) == 16
    assert {c.finish_reason for c in found} == {"length", "abort"}
    assert sum(len(c.token_ids) for c in found) == told.num_tokens < 120
