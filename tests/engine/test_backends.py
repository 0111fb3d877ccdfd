"""vLLM's engine and its backends over a stand-in for vLLM: what real vLLM does only in bad luck."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from echo.core.errors import EngineError
from echo.engine.engine import Sampling, VersionSlots
from echo.engine.lora import Lora
from echo.engine.model import load_directory
from echo.engine.vllm import backend as vllm_backend
from echo.engine.vllm import engine as vllm_engine
from echo.engine.vllm import launcher as vllm_launcher
from echo.engine.vllm.backend import (
    TIMEOUT_S,
    Backend,
    BackendOutput,
    BackendRequest,
    Death,
    EngineDeadError,
    EngineWasDeadError,
    Facts,
    HandedOver,
    InlineBackend,
    ProcessBackend,
    Span,
    _directory_for,
)
from echo.engine.vllm.engine import MAX_RESTARTS, VllmEngine
from echo.engine.weights import Weights
from tests.engine.engine_contract import ENDLESS, V1, V2, WITHIN_S, request, run, versions_of
from tests.engine.watchers import watching

NOTHING = np.empty(0, np.float32)


# --- the engine -----------------------------------------------------------------------------------


class StandIn(Backend):
    """A vLLM that answers at once, under the weights that it was handed last."""

    started: list[StandIn]
    """All of a test."""
    is_too_much: Callable[[Mapping[str, Any]], bool] = staticmethod(lambda _: False)
    """Whether memory does not hold what it is to be started with."""
    facts = Facts(num_blocks=64, block_size=32, max_model_len=512, max_num_seqs=9)

    def __init__(self, arguments: Mapping[str, Any], **_: object) -> None:
        if self.is_too_much(arguments):
            raise EngineDeadError("vLLM does not start: RuntimeError: CUDA out of memory")
        self.facts = replace(self.facts, max_num_seqs=arguments["max_num_seqs"])
        self.tag = ""
        self.weights: HandedOver = {}
        self.started.append(self)

    def submit(self, request: BackendRequest) -> Future[BackendOutput]:
        future: Future[BackendOutput] = Future()
        if self.death is not None:
            future.set_exception(EngineDeadError(self.death.reason))
        elif request.request_id.startswith("probe"):
            self.answer_probe(future)
        else:
            ids = np.full(request.params["max_tokens"], 5, np.int32)
            spans = (Span(self.tag, 0, len(ids)),)
            logprobs = np.zeros(len(ids), np.float32)
            future.set_result(BackendOutput(ids, logprobs, "length", spans, NOTHING))
        return future

    def answer_probe(self, future: Future[BackendOutput]) -> None:
        assert isinstance(self.weights, Mapping)
        expected = self.engine._probe.expected(self.weights).logprobs
        future.set_result(BackendOutput(np.empty(0, np.int32), NOTHING, "length", (), expected))

    engine: VllmEngine

    def update(self, weights: HandedOver, tag: str, *, clears_cache: bool) -> None:
        if self.death is not None:
            raise EngineWasDeadError(self.death.reason)
        self.weights, self.tag = weights, tag

    def die(self, reason: str) -> None:
        self.death = self.death or Death(reason, 0)

    def close(self) -> None:
        self.die("the engine is closed")

    def abort(self, request_ids: Any) -> None: ...

    def num_sampled(self) -> dict[str, int]:
        return {}

    def find_placement_fault(self) -> str:
        return "it is a stand-in"

    def add_adapter(self, adapter: Any) -> None: ...

    def remove_adapter(self, serial: int) -> None: ...


@pytest.fixture
def make_engine(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmEngine]:
    """Return a function that makes an engine over stand-ins."""
    torch.set_num_threads(1)
    monkeypatch.setattr(StandIn, "started", [], raising=False)
    monkeypatch.setattr(vllm_launcher, "InlineBackend", StandIn)
    monkeypatch.setattr(vllm_engine, "import_vllm", lambda **_: None)
    monkeypatch.setattr(vllm_engine, "make_arguments", lambda *_, **__: {"max_num_seqs": 9})
    monkeypatch.setattr(vllm_engine, "make_params", lambda *values, **_: {"max_tokens": values[2]})
    return partial(VllmEngine, tiny_model_dir)


@pytest.fixture
def engine(
    tiny_model_dir: Path, make_engine: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> VllmEngine:
    """An engine that samples from v1 in a stand-in."""
    engine = make_engine()
    monkeypatch.setattr(StandIn, "engine", engine, raising=False)
    engine.load(load_directory(tiny_model_dir, "float32"), V1)
    return engine


@pytest.fixture
def other(tiny_model_dir: Path) -> Weights:
    """Of v2."""
    weights = load_directory(tiny_model_dir, "float32")
    return {name: tensor * 1.5 for name, tensor in weights.items()}


def assert_samples(engine: VllmEngine, num_started: int) -> None:
    """v1 is sampled, by the last of so many."""
    assert len(StandIn.started) == num_started
    [completion] = run(engine, [request([1, 5])])
    assert set(versions_of(completion)) == {V1}


def test_a_probe_that_vllm_refuses_leaves_no_tokens_without_a_verdict(
    engine: VllmEngine, other: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a rollout that holds some would be waited for without end."""
    [first] = StandIn.started
    no_argument = ValueError("no such argument")
    monkeypatch.setattr(first, "answer_probe", lambda future: future.set_exception(no_argument))
    with pytest.raises(EngineError, match=r"cannot be probed: ValueError: no such.*started.*: v1"):
        engine.load(other, V2)
    assert engine.version_of(first.tag) is None
    assert_samples(engine, 2)


def full_disk(*_: object, **__: object) -> None:
    raise EngineError("no space to hand the weights to vLLM: No space left on device")


def test_weights_that_cannot_be_handed_back_make_it_start_anew(
    engine: VllmEngine, other: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the wrong ones would go on, and every rollout begin again without end."""
    [first] = StandIn.started
    update = first.update

    def update_once(*values: Any, **named: Any) -> None:
        update(*values, **named)
        monkeypatch.setattr(first, "update", full_disk)

    monkeypatch.setattr(first, "update", update_once)
    find = engine._probe.find_fault
    monkeypatch.setattr(
        engine._probe, "find_fault", lambda *each: "no" if first.death is None else find(*each)
    )
    with pytest.raises(EngineError, match=r"v2 is installed but not what .*; rolled back.*: v1"):
        engine.load(other, V2)
    assert_samples(engine, 2)


def test_nobody_samples_from_a_vllm_that_got_no_weights(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts with weights of nobody's."""
    monkeypatch.setattr(StandIn, "update", full_disk)
    StandIn.started[0].die("killed by the test")
    for _ in range(2):
        with pytest.raises(EngineError, match="restarted with v1, vLLM is wrong: no space"):
            run(engine, [request([1, 5])])
    assert all(backend.death is not None for backend in StandIn.started)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (Facts(64, 32, 64, 9), "the prompt has 80 tokens, the model's window 64"),
        (Facts(8, 32, 512, 9), r"does not hold one rollout of 80 \+ 200 tokens"),
    ],
)
def test_one_that_holds_less_when_it_is_started_anew_refuses_what_it_cannot_sample(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, facts: Facts, message: str
) -> None:
    """Others may have taken memory; a request that can never find room would wait without end."""
    [first] = StandIn.started
    begun, answer = threading.Event(), Future[BackendOutput]()

    def stay(*_: object) -> Future[BackendOutput]:
        begun.set()
        return answer

    monkeypatch.setattr(first, "submit", stay)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run, engine, [request([5] * 80)], ENDLESS)
        assert begun.wait(WITHIN_S)
        monkeypatch.setattr(StandIn, "facts", facts)
        answer.set_exception(EngineDeadError("killed by the test"))
        with pytest.raises(EngineError, match=message):
            asked.result(timeout=WITHIN_S)


def test_every_token_is_told_of_also_where_an_answer_comes_between_two_looks(
    engine: VllmEngine,
) -> None:
    told: list[int] = []
    requests = [request([1, 5], n, str(n)) for n in range(12)]
    engine.generate(requests, Sampling(1.0, 1.0, 0, 7, ()), watching(on_tokens=told.append))
    assert sum(told) == 12 * 7


@pytest.mark.parametrize("what", ["samples for others", "takes weights", "nothing"])
def test_vllm_is_given_up_only_where_it_samples_for_nobody(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A long line of prompts, contexts computed anew, or a large version are not its death."""
    [vllm] = StandIn.started
    asked: list[BackendRequest] = []
    answer: Future[BackendOutput] = Future()
    now = 0.0

    def submit(request: BackendRequest) -> Future[BackendOutput]:
        asked.append(request)
        return answer

    def look() -> dict[str, int]:
        nonlocal now
        now += TIMEOUT_S / 2
        if now == 3 * TIMEOUT_S:
            answer.set_result(StandIn.submit(vllm, asked[0]).result())
        return {"of another call": int(now) if what == "samples for others" else 7}

    def die(reason: str) -> None:
        StandIn.die(vllm, reason)
        if not answer.done():
            answer.set_exception(EngineDeadError(reason))

    def update(weights: HandedOver, tag: str, *, clears_cache: bool) -> None:
        [completion] = run(engine, [request([1, 5])])
        assert set(versions_of(completion)) == {V1}
        raise EngineError("no space")

    monkeypatch.setattr(vllm, "submit", submit)
    monkeypatch.setattr(vllm, "num_sampled", look)
    monkeypatch.setattr(vllm, "die", die)
    monkeypatch.setattr(vllm, "update", update)
    clock = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
    monkeypatch.setattr(vllm_engine, "time", clock)
    if what == "takes weights":
        with pytest.raises(EngineError, match="no space"):
            engine.load(engine._good.tensors, V2)  # type: ignore[union-attr]
    else:
        [completion] = run(engine, [request([1, 5])])
        assert set(versions_of(completion)) == {V1}
    reason = f"no token in {TIMEOUT_S:g} s"
    assert vllm.death == (Death(reason, 0) if what == "nothing" else None)
    assert not engine.is_updating


def test_the_versions_of_old_tags_are_forgotten(
    tiny_model_dir: Path, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._versions, "max_entries", 3)
    weights = load_directory(tiny_model_dir, "float32")
    for version in (V2, V1) * 4:
        engine.load(weights, version)
    assert len(engine._versions) == 3
    assert_samples(engine, 1)


def test_what_killed_processes_were_handing_over_is_removed(
    make_engine: Callable[..., VllmEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would take the memory of a whole version until the machine is started anew."""
    monkeypatch.setattr(vllm_backend, "MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("echo-weights-of-a-killed-one", "echo-weights-not-locked-yet", "of-others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "echo-weights-of-a-killed-one" / "lock").touch()
    (tmp_path / "of-others" / "lock").touch()
    with _directory_for(1) as directory:
        make_engine()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            (directory.name, "echo-weights-not-locked-yet", "of-others")
        )
    assert not directory.exists()


def test_one_that_dies_again_and_again_is_given_up(engine: VllmEngine) -> None:
    for _ in range(MAX_RESTARTS):
        engine.revive(StandIn.started[-1])
    for _ in range(2):
        with pytest.raises(EngineError, match=r"vLLM died .* times without a swap that worked"):
            engine.revive(StandIn.started[-1])
    assert len(StandIn.started) == 1 + MAX_RESTARTS


def test_a_rollout_takes_blocks_of_the_cache_and_a_place(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five blocks less than there are: one is vLLM's, four the probe's, as is one of the places."""
    monkeypatch.setattr(StandIn, "facts", Facts(20, 32, 512, 9))
    engine.revive(StandIn.started[-1])
    assert engine.max_concurrent_rollouts(16, 48) == 7
    assert engine.max_concurrent_rollouts(16, 16) == 8


@pytest.mark.slow
def test_memory_that_runs_out_at_the_start_makes_it_try_with_fewer(
    make_engine: Callable[..., VllmEngine], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where vLLM measures a GPU with as many sequences and adapters as it may have to hold."""
    monkeypatch.setattr(StandIn, "is_too_much", lambda _, arguments: arguments["max_num_seqs"] > 3)
    engine = make_engine()
    assert engine.max_concurrent_rollouts(3, 4) == 2
    assert engine.take_counts() == {"engine/out_of_memory": 2}
    # Fewer versions first.
    monkeypatch.setattr(StandIn, "is_too_much", lambda _, arguments: arguments["max_loras"] > 4)
    engine = make_engine(lora=Lora(base_dir=tiny_model_dir, rank=4, alpha=8, num_versions=6))
    assert engine.num_versions == 3
    assert engine.take_counts() == {}, "as many rollouts as before"
    slots = engine._installed
    assert isinstance(slots, VersionSlots)
    assert slots._num_slots == 4


def test_memory_that_runs_out_while_nothing_is_sampled_is_not_laid_to_the_rollouts(
    engine: VllmEngine,
) -> None:
    """As where other weights are handed over, or somebody else takes the memory."""
    most = engine.max_concurrent_rollouts(3, 4)
    StandIn.started[0].die("the update failed: CUDA out of memory")
    run(engine, [request([1, 5])])
    assert_samples(engine, 2)
    assert engine.max_concurrent_rollouts(3, 4) == most
    assert engine.take_counts() == {}


def test_memory_that_runs_out_in_a_swap_is_told_with_what_to_lower(
    engine: VllmEngine, other: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = StandIn.update

    def fail(stand_in: StandIn, weights: HandedOver, tag: str, *, clears_cache: bool) -> None:
        if stand_in is StandIn.started[0]:
            stand_in.die("the update failed: OutOfMemoryError: CUDA out of memory")
            raise EngineDeadError("OutOfMemoryError: CUDA out of memory")
        update(stand_in, weights, tag, clears_cache=clears_cache)

    monkeypatch.setattr(StandIn, "update", fail)
    message = "v2 could not be installed: .*out of memory .*lower engine.options.gpu_memory_utiliz"
    with pytest.raises(EngineError, match=message):
        engine.load(other, V2)
    assert_samples(engine, 2)


# --- in this process ------------------------------------------------------------------------------


class Vllm:
    """What a backend asks of vLLM's engine."""

    errored = False

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=9, block_size=32),
            model_config=SimpleNamespace(max_model_len=64),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
        )
        self.engine_core = SimpleNamespace(shutdown=lambda: None, pause_scheduler_async=self.pause)
        self.files: dict[str, dict[str, torch.Tensor]] = {}
        """What it was handed, by path."""
        self.requests: list[str] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(self, request_id: str, *_: Any, **__: Any) -> None:
        self.requests.append(request_id)

    def step(self) -> list[Any]:
        return [SimpleNamespace(request_id=name, finished=True) for name in self.requests]

    def shutdown(self) -> None: ...

    async def pause(self, **_: object) -> None: ...

    async def resume_generation(self) -> None: ...

    async def update_weight_version(self, tag: str) -> None: ...

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        for path in kwargs.get("update_info", {}).values():
            self.files[path] = load_file(path)


class Inline(InlineBackend):
    def _start(self) -> None:
        self._engine = Vllm()


def test_an_answer_that_cannot_be_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise KeyError("no log-probability")

    monkeypatch.setattr(vllm_backend, "read_output", fail)
    backend = Inline({}, num_threads=0)
    try:
        future = backend.submit(BackendRequest("r", {}, None))
        with pytest.raises(EngineDeadError, match="KeyError"):
            future.result(timeout=WITHIN_S)
    finally:
        backend.close()


# --- in processes of its own ----------------------------------------------------------------------


class Process(ProcessBackend):
    async def _start(self, arguments: Mapping[str, Any]) -> None:
        self._engine = self.vllm = Vllm()


@pytest.fixture
def process() -> Iterator[Process]:
    backend = Process({})
    yield backend
    backend.close()


def test_weights_go_through_memory_or_where_that_has_no_space_through_the_disk(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has 64 MiB of it if nobody says otherwise."""
    disk, weights = tmp_path / "disk", {"a": torch.arange(3.0)}
    disk.mkdir()
    monkeypatch.setattr(vllm_backend, "MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    for free, place in ((1 << 30, tmp_path), (1 << 20, disk)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        process.update(weights, "1", clears_cache=True)
        [(path, found)] = process.vllm.files.items()
        assert Path(path).parents[1] == place
        assert torch.equal(found["a"], weights["a"])
        process.vllm.files.clear()
    disk.rmdir()
    message = r"no space to hand the weights .*; free 16 MiB in .* --shm-size\) or .*disk"
    with pytest.raises(EngineError, match=message):
        process.update(weights, "2", clears_cache=True)
    assert process.death is None


def wait_for_a_process() -> None:
    """Start one as vLLM does, and wait for its answer, which does not come."""
    process = get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore_DP0")
    process.start()
    process.join()
    raise RuntimeError("Engine core initialization failed.")


class Late(ProcessBackend):
    async def _start(self, arguments: Mapping[str, Any]) -> None:
        wait_for_a_process()


def test_a_process_that_does_not_start_in_time_does_not_keep_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_backend, "START_TIMEOUT_S", 0.3)
    other = get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore")
    other.start()  # of another engine
    try:
        with pytest.raises(EngineDeadError, match=r"vLLM does not start: no answer in 0.3 s"):
            Late({})
        assert active_children() == [other]
    finally:
        other.kill()
        other.join()


CALLS: list[Callable[[Backend], object]] = [
    lambda backend: backend.update({}, "1", clears_cache=True),
    lambda backend: backend.find_placement_fault(),
    lambda backend: backend.add_adapter(None),
    lambda backend: backend.remove_adapter(1),
]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_asked_of_one_that_had_died_or_is_closed_says_so(
    process: Process, call: Callable[[Backend], object]
) -> None:
    """So that whoever asked tries again with one that is started anew, if that is possible."""
    process.vllm.errored = True
    with pytest.raises(EngineWasDeadError):
        call(process)
    closed = Process({})
    closed.close()
    closed.close()
    closed.die("again")
    closed.abort(["r"])
    with pytest.raises(EngineWasDeadError):
        call(closed)
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        closed.submit(BackendRequest("r", {}, None)).result(timeout=WITHIN_S)
