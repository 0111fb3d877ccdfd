"""Arithmetic of a step, against torch's count of the operations that really run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from echo.engine.lora import Lora, add_adapter
from echo.train import speed
from echo.train.models.flops import AttentionShape, model_flops
from echo.train.models.policy import Compute
from echo.train.speed import Speedometer
from tests.runtime.families import BOTH, EXPERTS, SMALL

LENGTH = 24


def counted(model: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        ids = torch.zeros(1, LENGTH, dtype=torch.int64)
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3", {}), ("qwen3", {"tie_word_embeddings": False}), ("llama", {"head_dim": None})],
)
def test_the_formula_is_what_runs(family: str, settings: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **{**SMALL, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    flops = model_flops(model, model.get_output_embeddings().weight)
    attention = sum(layer.flops(LENGTH) for layer in flops.attention)
    # This attention multiplies the whole square, of which the causal half counts.
    assert counted(model) == flops.row(LENGTH, LENGTH) + attention
    assert flops.palm([LENGTH]) == counted(model)
    assert flops.row(LENGTH, LENGTH) - flops.row(LENGTH, 1) == 6 * (LENGTH - 1) * 32 * 64


def test_frozen_weights_have_no_gradient_to_compute(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    head = model.get_output_embeddings().weight
    whole = model_flops(model, head)
    adapter = add_adapter(model, Lora(rank=2, alpha=4, base_dir=tiny_model_dir))
    size = 0
    for tensor in adapter.values():
        tensor.requires_grad_()
        size += tensor.numel()
    flops = model_flops(model, head)
    assert flops.row(8, 4) - flops.row(8, 3) == 4 * head.numel()
    assert 4 * flops.body + 2 * flops.body_trained == 4 * whole.body + 6 * size


def test_heads_of_each_layer_are_its_own() -> None:
    """Gemma 4 has wider heads in layers of full attention."""
    settings = {**SMALL, "layer_types": BOTH, "sliding_window": 5, "global_head_dim": 64}
    sizes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 32}
    config = AutoConfig.for_model("gemma4_text", **{**settings, **sizes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    flops = model_flops(model, model.get_output_embeddings().weight)
    assert flops.is_exact
    assert [layer.window for layer in flops.attention] == [5, None]
    if hasattr(config, "per_layer_config"):  # older releases of transformers say it otherwise
        assert [layer.width for layer in flops.attention] == [64, 128]


@pytest.mark.parametrize("field", ["num_attention_heads", "num_hidden_layers", "num_experts"])
@pytest.mark.parametrize("value", ["many", [1, 2], 0, -1])
def test_a_configuration_that_says_it_otherwise_costs_a_metric_and_no_run(
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    field: str,
    value: Any,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**{field: value}))
    model.config = config
    head = model.get_output_embeddings().weight
    flops = model_flops(model, head)
    assert flops.row(8, 4) > 0
    if not flops.is_exact:
        assert "the arithmetic of Qwen3ForCausalLM is unknown" in caplog.text
        monkeypatch.setattr(speed, "peak_flops", lambda _: 1e12)
        meter = Speedometer(flops, Compute(device=torch.device("cpu")))
        meter.passed([(8, 0)], 4, is_packed=True)
        assert "perf/mfu" not in meter.metrics()


def test_a_token_meets_its_share_of_the_experts() -> None:
    config = AutoConfig.for_model("qwen3_moe", **{**SMALL, **EXPERTS})
    model = AutoModelForCausalLM.from_config(config)
    flops = model_flops(model, model.get_output_embeddings().weight)
    attention = 64 * 64 * 2 + 64 * 32 * 2
    router, expert = 4 * 64, 3 * 64 * 32
    assert flops.body == 2 * (attention + router + 2 * expert)


def test_a_window_counts_the_band() -> None:
    whole, band = AttentionShape(width=10), AttentionShape(width=10, window=4)
    assert band.flops(4) == whole.flops(4) == 6 * 10 * 16
    assert band.flops(9) == 6 * 10 * (16 + 2 * 5 * 4)
