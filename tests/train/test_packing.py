"""Packed rows against padded ones, family by family, and the models that cannot have them.

Helpers come from test_trainer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from echo.algo.losses import EntropyBonusLoss, ReferenceKlLoss, make_loss
from echo.core.errors import EngineError
from echo.core.rollout import Group
from echo.train import packing
from echo.train.batch import AdvantageSettings
from echo.train.policy import ModelSource
from echo.train.trainer import Trainer
from tests.train.test_trainer import FAST, change_of, make_group
from tests.train.trainers import policy_of, trainer_of

torch.set_num_threads(1)

SMALL: Mapping[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOTH = ["sliding_attention", "full_attention"]
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": BOTH, "query_pre_attn_scalar": 8},
    "qwen3_moe": EXPERTS,
    "llama": {},
    "qwen2": {},
    "qwen3 with windows": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "olmo3": {"sliding_window": 5, "layer_types": BOTH},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {"sliding_window": 5},
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
}
IN_EVERY_RUN = ("qwen3", "gemma3_text", "qwen3_moe")
LEAKING: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "qwen3_5_text": (DELTA, "its layers of linear_attention carry one rollout into the next"),
    "qwen2_moe": (
        EXPERTS
        | {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "shared_expert_intermediate_size": 16,
        },
        "Qwen2MoeAttention says its sliding window in the mask only",
    ),
    "gemma2": (
        {"sliding_window": 5, "final_logit_softcapping": None, "query_pre_attn_scalar": 8},
        "packed attention has no softcap",
    ),
    "recurrent_gemma": (
        {"lru_width": 32, "attention_window_size": 5},
        "a rollout changes by .*% when another one stands before it",
    ),
}


def cases(names: Any, kept: tuple[str, ...]) -> list[Any]:
    marks = [pytest.mark.matrix, pytest.mark.slow]
    return [pytest.param(name, marks=[] if name in kept else marks) for name in names]


def save_family(directory: Path, name: str, settings: Mapping[str, Any]) -> Path:
    transformers_logging.set_verbosity_error()
    config = AutoConfig.for_model(name.partition(" ")[0], **{**SMALL, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():  # far from neutral, so that every part matters
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif not parameter.any():
                parameter.normal_(0, 0.3)
    model.save_pretrained(directory)
    return directory


def stale_groups() -> list[Group]:
    """Lengths 3 to 16, one of them alone, and tokens that are masked."""
    groups = [make_group([1, 0, 0, 1], n) for n in range(5)]
    mask = [n % 3 > 0 for n in range(groups[1].rollouts[0].num_tokens)]
    groups[1] = change_of(groups[1], 0, completion_mask=torch.tensor(mask).numpy())
    return groups


def make_trainer(model_dir: Path, how: str, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "loss": EntropyBonusLoss(loss=make_loss("gspo", clip_low=0.9, clip_high=9.0), coef=0.01),
        "optimizer": FAST,
        "advantages": AdvantageSettings(normalize_by_std=False),
    }
    return trainer_of(model_dir, packing=how, **(settings | options))


def pass_of(trainer: Trainer, groups: list[Group]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of a batch, and then the metrics of its step."""
    loss = trainer._loss
    trainer.forward_backward(trainer._prepare(groups), loss)
    found = {
        name: tensor.grad.clone()
        for name, tensor in trainer._policy.parameters().items()
        if tensor.grad is not None
    }
    trainer._optimizer.zero_grad()
    return found, trainer.step(groups).metrics


@pytest.mark.parametrize("family", cases(FAMILIES, IN_EVERY_RUN))
@pytest.mark.slow
def test_packed_rows_give_the_padded_rows_loss_gradient_and_metrics(
    family: str, tmp_path: Path
) -> None:
    model_dir, groups = save_family(tmp_path, family, FAMILIES[family]), stale_groups()
    padded = make_trainer(model_dir, "padded")
    packed = make_trainer(model_dir, "packed", micro_batch_tokens=60)  # several rows
    assert packed._policy.is_packed
    for one, other in zip(packed.forward(groups), padded.forward(groups), strict=True):
        for row, expected in zip(one, other, strict=True):
            assert abs(row - expected).max() < 2e-6
    (gradient, metrics), (expected_gradient, expected_metrics) = (
        pass_of(trainer, groups) for trainer in (packed, padded)
    )
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        if not name.startswith(("perf/", "time/")):
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert metrics["loss/policy"] == pytest.approx(expected_metrics["loss/policy"], abs=1e-6)
    for name, tensor in expected_gradient.items():
        scale = max(float(tensor.abs().max()), 1e-3)
        assert float((gradient[name] - tensor).abs().max()) < 5e-6 * scale, name


def test_rows_without_positions_and_segments_would_be_wrong(tmp_path: Path) -> None:
    """The comparison above sees a leak: with one segment in place of several it fails."""
    model_dir, groups = save_family(tmp_path, "qwen3", {}), stale_groups()
    packed, padded = (make_trainer(model_dir, how) for how in ("packed", "padded"))
    expected = padded.forward(groups)
    original = packing.arguments

    def as_one(segments: Any, **options: Any) -> Any:
        whole = type(segments).of([sum(segments.lengths)])
        return original(whole, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "arguments", as_one)
        found = packed.forward(groups)
    far = max(
        abs(row - other).max()
        for one, two in zip(found, expected, strict=True)
        for row, other in zip(one, two, strict=True)
    )
    assert far > 0.1


@pytest.mark.parametrize("loss", ["grpo", "gepo", "m2po", "decoupled_ppo"])
@pytest.mark.slow
def test_every_kind_of_loss_sees_the_same(tiny_model_dir: Path, loss: str) -> None:
    groups = stale_groups()[2:]
    options: dict[str, Any] = {"loss": make_loss(loss), "minibatches_per_step": 2}
    found = make_trainer(tiny_model_dir, "packed", micro_batch_tokens=40, **options).step(groups)
    padded = make_trainer(tiny_model_dir, "padded", **options).step(groups)
    for name, value in padded.metrics.items():
        if not name.startswith(("perf/", "time/")):
            assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_whole_groups_and_the_longest_first(tiny_model_dir: Path) -> None:
    policy = policy_of(tiny_model_dir, packing="packed", micro_batch_tokens=30)
    trainer = make_trainer(tiny_model_dir, "packed")
    rows = trainer._prepare(stale_groups()).samples
    seen = []
    for indices, micro in policy.micro_batches(rows, whole_groups=True):
        assert micro.segments is not None
        assert micro.input_ids.shape == (1, sum(micro.segments.lengths))
        assert list(micro.segments.lengths) == sorted(micro.segments.lengths, reverse=True)
        assert micro.segments.ends.tolist()[-1] == micro.input_ids.shape[1]
        seen.append({rows[index].group_index for index in indices})
    assert sum(map(len, seen)) == len(set().union(*seen)) == 5


@pytest.mark.slow
def test_checkpointing_keeps_segments_apart_too(tiny_model_dir: Path) -> None:
    groups = stale_groups()
    plain, checkpointed = (
        pass_of(make_trainer(tiny_model_dir, "packed", gradient_checkpointing=value), groups)
        for value in (False, True)
    )
    for name, tensor in plain[0].items():
        assert torch.allclose(checkpointed[0][name], tensor, atol=3e-7), name


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("backend", "gradient_checkpointing"),
    [("aot_eager", True), ("inductor", False)],
)
def test_compiled_layers_compute_the_same(
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    *,
    gradient_checkpointing: bool,
) -> None:
    compile_with = partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_with)
    options: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing}
    eager = make_trainer(tiny_model_dir, "packed", **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = make_trainer(tiny_model_dir, "packed", compile_layers=True, **options)
    for groups in (stale_groups(), stale_groups()[1:]):  # rows of two lengths
        (gradient, metrics), (expected, expected_metrics) = (
            pass_of(trainer, groups) for trainer in (compiled, eager)
        )
        assert metrics["loss/policy"] == pytest.approx(expected_metrics["loss/policy"], abs=1e-6)
        for name, tensor in expected.items():
            scale = max(float(tensor.abs().max()), 1e-3)
            assert float((gradient[name] - tensor).abs().max()) < 1e-5 * scale, name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("family", cases(LEAKING, ("recurrent_gemma",)))
def test_an_architecture_that_leaks_is_named_or_padded(family: str, tmp_path: Path) -> None:
    settings, why = LEAKING[family]
    transformers_logging.set_verbosity_error()
    config = AutoConfig.for_model(family, **{**SMALL, **settings})
    attention = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    obstacle = packing.find_obstacle(model, torch.float32, torch.float32)
    assert obstacle is not None
    assert re.search(why, obstacle)
    assert model.config._attn_implementation == attention
    error = packing.refuse(model, obstacle)
    assert type(model).__name__ in str(error)
    assert 'set learner.packing = "auto" or "padded"' in str(error)


def test_products_in_16_bits_are_packed_too(tiny_model_dir: Path) -> None:
    policy = policy_of(tiny_model_dir, packing="packed", dtype=torch.bfloat16)
    assert policy.describe_rows() == "Qwen3ForCausalLM is trained on packed rows"


def test_policy_and_reference_share_their_rows(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstacles = iter([None, "it leaks"])  # of the policy and of the reference
    find = packing.find_obstacle
    monkeypatch.setattr(packing, "find_obstacle", lambda *args: next(obstacles) or find(*args))
    loss = ReferenceKlLoss(loss=make_loss("grpo"), coef=0.1)
    reference = ModelSource(model_dir=tiny_model_dir)
    trainer = make_trainer(tiny_model_dir, "auto", loss=loss, reference=reference)
    assert trainer.describe_rows() == (
        "Qwen3ForCausalLM is trained on padded rows: the reference shares them, and "
        "Qwen3ForCausalLM is trained on padded rows: it leaks"
    )
    assert trainer.step(stale_groups()).metrics["kl/reference"] == pytest.approx(0.0, abs=1e-9)


def test_a_model_that_leaks_is_refused_or_trained_padded(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaks(*_: Any) -> str:
        return "it leaks"

    monkeypatch.setattr(packing, "find_obstacle", leaks)
    with pytest.raises(EngineError, match="Qwen3ForCausalLM cannot be trained on packed rows: it"):
        policy_of(tiny_model_dir, packing="packed")
    policy = policy_of(tiny_model_dir, packing="padded")
    assert policy.describe_rows() == (
        'Qwen3ForCausalLM is trained on padded rows: learner.packing = "padded"'
    )
    with pytest.raises(EngineError, match='"eager" has attention of its own'):
        policy_of(tiny_model_dir, packing="packed", attn_implementation="eager")
