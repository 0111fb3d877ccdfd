"""Families of models, what Echo does with each, and the table of docs/models.md that says so.

`test_families.py` here and `test_vllm_families.py` beside the engines' tests show every word of the
table. After a change of a row: `python -m tests.runtime.families`, and put what it prints into the
page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from echo.core.rollout import Group, PartialRollout, PolicyVersion
from echo.engine.engine import Engine, Request, Sampling
from echo.engine.lora import ALL_LINEAR, Lora
from echo.engine.model import model_class
from echo.engine.weights import VersionImages, tensors_from_image
from echo.train.optimizer import OptimizerSettings
from echo.train.trainer import Trainer
from echo.weights.manifest import TensorSpec
from tests.core.groups import make_group
from tests.engine.patches import BLOCK_BYTES, patch_between
from tests.train.trainers import fast_trainer

TOLERANCE = 1e-5
"""Nats between an engine's log-probability and the learner's, both in float32."""
V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
HOW = Sampling(1.0, 1.0, 0, 8, ())

# --- families -------------------------------------------------------------------------------------

SMALL: Mapping[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM samples with on a CPU
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
BOTH = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UNTIED = {"tie_word_embeddings": False}  # as released; vLLM gives these a head of their own
ROUTED = EXPERTS | UNTIED | {"n_routed_experts": 4, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}


GEMMA4 = {
    "sliding_window": 5,
    "layer_types": BOTH,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 32,
}


TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
QWEN_IMAGES = {
    "image_token_id": 28,
    "video_token_id": 29,
    "vision_start_token_id": 30,
    "vision_end_token_id": 31,
}
ROTATION = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table."""

    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration of its text, beside or in place of SMALL's."""
    images: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration around that of the text, if it reads images."""
    padded: str = ""
    """Why it is trained on padded rows; empty where it is trained on packed ones."""
    attention: str = "sdpa"
    """What it takes by itself, with every release of transformers that Echo runs with."""
    vllm: str = ""
    """What vLLM 0.32 says against it on a CPU; empty where it samples from it."""
    vllm_options: Mapping[str, Any] = field(default_factory=dict)
    """Of [engine.options]: what vLLM needs on a CPU."""
    vllm_tolerance: float = TOLERANCE
    lora: str = ""
    """What is said against an adapter on all linear layers; empty where there is one."""
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    """The modules that have an adapter."""
    vllm_lora: str = ""
    """What vLLM says on a CPU against an adapter; empty where it samples with it, or with nothing
    of this family."""
    notes: str = ""
    """For the table."""


FUSED = "vLLM refuses the adapter: .* fused 3D MoE weights"
NO_KERNEL = "module 'triton.language' has no attribute"
UNCACHED = {"enable_prefix_caching": False}
NO_TORCHVISION = "failed to be inspected"
TEXT_ALONE = "on text alone"
UNCAPPED = "only without `final_logit_softcapping`"
LINEAR = "its layers of linear_attention carry one rollout into the next"

FAMILIES: Mapping[str, Family] = {
    "llama": Family(label="Llama 2, 3"),
    "qwen2": Family(label="Qwen2, Qwen2.5"),
    "qwen3": Family(label="Qwen3"),
    "mistral": Family(label="Mistral", settings={"sliding_window": 5}, notes="with its window"),
    "phi3": Family(label="Phi-3, Phi-4", settings={"sliding_window": 5}, notes="with its window"),
    "smollm3": Family(label="SmolLM3", settings={"no_rope_layers": [1, 0]}),
    "gemma2": Family(
        label="Gemma 2",
        settings={
            "sliding_window": 5,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 32,
        },
        attention="eager",
        padded="packed attention has no softcap",
        vllm_tolerance=2e-3,
        notes="only without `final_logit_softcapping`; as released it is refused",
    ),
    "gemma3_text": Family(
        label="Gemma 3, text",
        settings={"sliding_window": 5, "layer_types": BOTH, "query_pre_attn_scalar": 32},
    ),
    "gemma4_text": Family(
        label="Gemma 4, text",
        settings=GEMMA4,
        notes=UNCAPPED,
    ),
    "olmo3": Family(label="OLMo 3", settings={"sliding_window": 5, "layer_types": BOTH}),
    "qwen3_moe": Family(label="Qwen3-MoE", settings=EXPERTS, vllm_lora=FUSED),
    "mixtral": Family(
        label="Mixtral",
        settings={"num_local_experts": 4, "num_experts_per_tok": 2},
        vllm_lora=NO_KERNEL,
    ),
    "deepseek_v3": Family(
        label="DeepSeek-V3",
        settings=ROUTED | LATENT,
        vllm="its attention on a CPU takes heads of 576",
        notes="the routers' correction bias is published in float32",
    ),
    "glm4_moe": Family(
        label="GLM-4.5",
        settings=ROUTED,
        vllm_lora=FUSED,
        notes="the routers' correction bias is published in float32",
    ),
    "gpt_oss": Family(
        label="gpt-oss",
        settings=EXPERTS
        | UNTIED
        | {"sliding_window": 5, "num_local_experts": 4, "layer_types": BOTH},
        attention="eager",
        vllm="is installed but not what vLLM samples from",
        padded="packed attention has no s_aux",
    ),
    "qwen3_next": Family(
        label="Qwen3-Next",
        settings=EXPERTS | DELTA | {"shared_expert_intermediate_size": 32},
        padded=LINEAR,
        vllm="CPU GDN attention requires BF16",
        vllm_options=UNCACHED,
    ),
    "qwen3_5_text": Family(
        label="Qwen3.5, text",
        settings=DELTA,
        padded=LINEAR,
        vllm=NO_TORCHVISION,
    ),
    "lfm2": Family(
        label="LFM2",
        settings={
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"],
        },
        padded="its layers of conv carry one rollout into the next",
        vllm="'Lfm2Config' object has no attribute 'conv_dim'",
        vllm_options=UNCACHED,
    ),
    "bamba": Family(
        label="Bamba",
        settings=MAMBA | {"attn_layer_indices": [1]},
        padded=LINEAR,
        vllm="does not dispatch through the Transformers attention interface",
    ),
    "granitemoehybrid": Family(
        label="Granite 4 hybrid",
        settings=MAMBA
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "logits_scaling": 1.0,
        },
        padded=LINEAR,
        vllm_options=UNCACHED,
        vllm_lora=NO_KERNEL,
        notes="only with `logits_scaling` = 1; as released it is refused",
    ),
    "nemotron_h": Family(
        label="Nemotron-H",
        settings={
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
        padded=LINEAR,
        vllm_options=UNCACHED,
        vllm_tolerance=1e-4,
        lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        lora="peft refuses all-linear of NemotronHForCausalLM: .*'out_proj' is incompatible",
    ),
    "qwen2_5_vl": Family(
        label="Qwen2.5-VL",
        settings={"rope_parameters": ROTATION},
        images={"vision_config": QWEN_TOWER, **QWEN_IMAGES},
        vllm=NO_TORCHVISION,
        notes=TEXT_ALONE,
    ),
    "qwen3_vl": Family(
        label="Qwen3-VL",
        settings={"rope_parameters": ROTATION | {"mrope_interleaved": True}},
        images={"vision_config": QWEN_TOWER, **QWEN_IMAGES},
        vllm=NO_TORCHVISION,
        notes=TEXT_ALONE,
    ),
    "gemma3": Family(
        label="Gemma 3",
        settings={"sliding_window": 5, "layer_types": BOTH, "query_pre_attn_scalar": 32},
        images={"vision_config": TOWER, "mm_tokens_per_image": 4, "image_token_index": 28},
        vllm=NO_TORCHVISION,
        notes=TEXT_ALONE,
    ),
    "gemma4": Family(
        label="Gemma 4",
        settings=GEMMA4,
        images={
            "vision_config": {**TOWER, "num_key_value_heads": 2, "head_dim": 16},
            "image_token_id": 28,
        },
        vllm=NO_TORCHVISION,
        notes=f"{TEXT_ALONE}; {UNCAPPED}",
    ),
    "mistral3": Family(
        label="Mistral Small 3",
        settings={"model_type": "mistral", "sliding_window": None},
        images={
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 16},
            "image_token_index": 28,
        },
        vllm=NO_TORCHVISION,
        notes=TEXT_ALONE,
    ),
    "smolvlm": Family(
        label="SmolVLM",
        settings={"model_type": "llama"},
        images={"vision_config": TOWER, "image_token_id": 28, "pad_token_id": 0},
        notes=TEXT_ALONE,
    ),
}
IN_EVERY_RUN = ("qwen3_moe", "qwen3_5_text", "deepseek_v3", "qwen2_5_vl")


def config_of(name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the configuration of a tiny model of a family."""
    family = FAMILIES[name]
    text = {**SMALL, **family.settings, **changes}
    settings = {"text_config": text, "tie_word_embeddings": True, **family.images}
    return AutoConfig.for_model(name, **(settings if family.images else text))


def save_family(
    directory: Path, name: str, changes: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write a tiny random model of a family as its hub files would be, all of it far from neutral.

    What its weights are is representable in bfloat16, so that publishing rounds nothing away.
    """
    transformers_logging.set_verbosity_error()
    config = config_of(name, changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.ndim == 1:
                    tensor.add_(0.1 * torch.randn_like(tensor))
                elif not tensor.any():
                    tensor.normal_(0, 0.3)
                tensor.copy_(tensor.bfloat16())
            for buffer_name, buffer in model.named_buffers():
                if buffer_name in model.state_dict():  # and these are not
                    buffer.copy_(torch.randn_like(buffer) / 3)
    model.save_pretrained(directory)
    return directory


# --- one step through the real parts --------------------------------------------------------------


def publish(trainer: Trainer, dtype: str) -> tuple[Sequence[TensorSpec], bytearray]:
    """Return where each tensor lies in the image of the weights, and the image."""
    images = VersionImages(dtype, block_bytes=BLOCK_BYTES, unrounded=trainer.unrounded)
    made = images.make(trainer.tensors(), V1)
    return made.specs, bytearray(made.memory)


def make_trainer(name: str, model_dir: Path, lora: Lora | None = None) -> Trainer:
    optimizer = OptimizerSettings(learning_rate=3e-3, warmup_steps=0)
    return fast_trainer(model_dir, lora=lora, optimizer=optimizer)


def sample(engine: Engine, version: PolicyVersion) -> list[Group]:
    """Prompts of unequal length, four rollouts of each."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 32, length).astype(np.int32) for length in (1, 3, 9)]
    requests = [Request(f"{n}", prompts[n // 4], n) for n in range(12)]
    found = engine.generate(requests, HOW, version=version)
    rollouts = [
        PartialRollout()
        .extended(one.token_ids, one.logprobs, one.policy_versions, finish_reason="length")
        .rollout((1, 0, 0, 1)[number % 4], stale_tokens="keep")
        for number, one in enumerate(found)
    ]
    return [
        replace(make_group(*rollouts[4 * number :][:4], group_id=number), prompt_ids=prompt)
        for number, prompt in enumerate(prompts)
    ]


def farthest(trainer: Trainer, groups: Sequence[Group]) -> float:
    """The largest difference between a sampled log-probability and the learner's own, nats."""
    return max(
        float(np.abs(own - rollout.sampler_logprobs).max())
        for group, rows in zip(groups, trainer.forward(groups), strict=True)
        for own, rollout in zip(rows, group.rollouts, strict=True)
    )


Check = Callable[[Engine, Mapping[str, Tensor]], None]


def train_one_step(
    trainer: Trainer,
    engine: Engine,
    *,
    dtype: str = "bfloat16",
    tolerance: float = TOLERANCE,
    check: Check = lambda engine, tensors: None,
) -> None:
    """Publish, sample, train, publish what changed, and sample again.

    The weights are such as `dtype` represents; `check` compares an engine's with those of an image.
    """
    specs, first = publish(trainer, dtype)
    image, own = memoryview(bytearray(first)), trainer.tensors()
    for key, tensor in tensors_from_image(specs, image).items():
        assert torch.equal(tensor.float(), own[key].float()), key  # routers' biases included
    engine.load(tensors_from_image(specs, image.toreadonly()), V1)
    groups = sample(engine, V1)
    assert farthest(trainer, groups) < tolerance
    trainer.step(groups)
    _, second = publish(trainer, dtype)
    patch = patch_between(specs, first, second, base=V1, version=V2)
    assert patch.num_words
    if engine.takes_patches:
        engine.patch(patch, image, specs)
    else:
        patch.write(image)
        engine.load(tensors_from_image(specs, image.toreadonly()), V2)
    assert image == second
    tensors = tensors_from_image(specs, image.toreadonly())
    check(engine, tensors)
    trainer.policy.load(tensors)
    assert farthest(trainer, sample(engine, V2)) < tolerance


# --- table ----------------------------------------------------------------------------------------


def table() -> str:
    """Return the table of docs/models.md."""
    lines = [
        "| family | `model_type` | rows | LoRA | transformers engine | vLLM engine | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        notes = [family.notes] if family.notes else []
        if family.attention != "sdpa":
            notes.append(
                f"its attention is `{family.attention}`: transformers' sdpa cannot compute it"
            )
        if family.lora:
            targets = ", ".join(f"`{target}`" for target in family.lora_targets)
            notes.append(f"peft refuses `all-linear`, `lora.target_modules` may name {targets}")
        if family.vllm:
            notes.append(f"vLLM: `{family.vllm}`")
        elif family.vllm_options:
            notes.append(
                "vLLM on a CPU needs `enable_prefix_caching = false` in `[engine.options]`"
            )
        cells = [
            family.label,
            f"`{name}`",
            "padded" if family.padded else "packed",
            "transformers engine" if family.vllm or family.vllm_lora else "both engines",
            "in place",
            "no" if family.vllm else "yes",
            "; ".join(notes),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
