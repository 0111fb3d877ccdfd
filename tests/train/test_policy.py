"""The policy: other architectures than the tiny Qwen3, what it loads, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mistral3.modeling_mistral3 import Mistral3Model

from echo.algo.batching import MicroBatch, TrainingRow, collate
from echo.core.errors import DataError, EchoError, EngineError
from echo.core.rollout import Rollout
from echo.engine.hf.engine import TransformersEngine
from echo.train.models.policy import ModelSource, frozen_policy
from tests.runtime.families import save_family
from tests.train.trainers import policy_of

CPU = torch.device("cpu")


def make_batch() -> MicroBatch:
    samples = []
    for prompt, completion in (([1, 5, 6], [7, 8, 9, 2]), ([1, 4], [3])):
        size = len(completion)
        rollout = Rollout(
            token_ids=np.array(completion, dtype=np.int32),
            sampler_logprobs=np.zeros(size, dtype=np.float32),
            policy_versions=np.ones((size, 2), dtype=np.int32),
            completion_mask=np.ones(size, dtype=np.bool_),
            reward=0.0,
            finish_reason="stop",
        )
        prompt_ids = np.array(prompt, dtype=np.int32)
        samples.append(TrainingRow(prompt_ids=prompt_ids, rollout=rollout, advantage=1.0))
    return collate(samples)


def save_model(directory: Path, architecture: str, **settings: Any) -> Path:
    config = getattr(transformers, f"{architecture}Config")(vocab_size=32, **settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for parameter in model.parameters():  # far from neutral, so that every part matters
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    return directory


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
SMALL_OPT = {
    "hidden_size": 16,
    "word_embed_proj_dim": 8,
    "ffn_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("architecture", "settings", "gradient_checkpointing"),
    [
        ("Llama", SMALL, False),
        ("Qwen2", {**SMALL, "tie_word_embeddings": True}, True),
        ("OPT", {**SMALL_OPT, "dropout": 0.5, "attention_dropout": 0.5}, True),
    ],
)
def test_any_causal_lm_scores_as_by_its_own_logits(
    tmp_path: Path, architecture: str, settings: dict[str, Any], gradient_checkpointing: bool
) -> None:
    path = save_model(tmp_path, architecture, **settings)
    batch = make_batch()
    policy = policy_of(path, gradient_checkpointing=gradient_checkpointing)
    logprobs, entropies = policy.logprobs(batch, inv_temperature=1.25)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    rows = (([1, 5, 6], [7, 8, 9, 2]), ([1, 4], [3]))
    expected_entropies = []
    for row, (prompt, completion) in enumerate(rows):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion[:-1]])).logits
        expected = torch.log_softmax(1.25 * logits[0, len(prompt) - 1 :], -1)
        expected_entropies.append(-(expected.exp() * expected).sum(-1))
        picked = expected.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        assert torch.allclose(logprobs[row, : len(completion)], picked, atol=1e-5)
        assert not logprobs[row, len(completion) :].any()
    assert torch.allclose(entropies, torch.cat(expected_entropies), atol=1e-5)
    logprobs.sum().backward()
    assert all(tensor.grad is not None for tensor in policy.parameters().values())


@pytest.mark.parametrize(("gradient_checkpointing", "num_runs"), [(False, 1), (True, 2)])
def test_checkpointing_runs_the_layers_again_in_the_backward(
    tiny_model_dir: Path, gradient_checkpointing: bool, num_runs: int
) -> None:
    policy = policy_of(tiny_model_dir, gradient_checkpointing=gradient_checkpointing)
    runs: list[int] = []
    policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    runs.clear()
    policy.logprobs(make_batch(), inv_temperature=1.0)[0].sum().backward()
    assert len(runs) == num_runs


def test_the_masters_are_float32(tiny_model_dir: Path, tmp_path: Path) -> None:
    stored = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    stored.save_pretrained(tmp_path)
    tensors = policy_of(tmp_path).tensors()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    file = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensors[name], file[name].float()) for name in tensors)


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("Gemma2", {**SMALL, "head_dim": 8}, r"final_logit_softcapping = 30\.0"),
        ("Granite", {**SMALL, "logits_scaling": 8.0}, r"logits_scaling = 8\.0"),
        ("Cohere", SMALL, r"logit_scale = 0\.0625"),
        (
            "Phi",
            SMALL,
            "PhiForCausalLM has an LM head with a bias, .* docs/models.md lists families",
        ),
    ],
)
def test_models_that_change_their_logits_are_refused(
    tmp_path: Path, architecture: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        policy_of(save_model(tmp_path, architecture, **settings))


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    settings = {**SMALL, "head_dim": 8, "use_bidirectional_attention": True}
    config = AutoConfig.for_model("gemma3_text", vocab_size=32, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"Gemma3ForCausalLM .* from tokens that come later"):
        policy_of(tmp_path)


def test_a_model_that_needs_its_tower_for_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family(tmp_path, "mistral3")
    forward = Mistral3Model.forward

    def counting(self: Any, **given: Any) -> Any:
        given["input_ids"] += 0 * self.vision_tower.config.image_size
        return forward(self, **given)

    monkeypatch.setattr(Mistral3Model, "forward", counting)
    with pytest.raises(EngineError, match=r"cannot be trained on text alone .*vision_tower"):
        policy_of(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("t5", "t5 is no causal language model .* on text alone: take another, docs/models.md"),
        ("gpt_oss", r'does not compute its attention so: set model\.attn_implementation = "auto"'),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_can(
    tmp_path: Path, model_type: str, message: str
) -> None:
    """The configuration alone is enough, at both ends."""
    settings = SMALL if model_type == "gpt_oss" else {}
    AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path)
    with pytest.raises(EchoError, match=message):
        policy_of(tmp_path, tensors={}, attn_implementation="sdpa")
    with pytest.raises(EchoError, match=message):
        TransformersEngine(tmp_path, attn_implementation="sdpa")


def flash_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' flash_attention_2 with its handling of types, around plain attention."""
    if query.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=options["scaling"]
    )
    return output.transpose(1, 2), None


@pytest.mark.slow
def test_flash_attention_is_used_in_16_bits_only(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_class = transformers.PreTrainedModel
    for name in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
        monkeypatch.setattr(model_class, name, lambda self, wanted, *_, **__: wanted)
    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, "flash_attention_2", flash_attention
    )
    options: dict[str, Any] = {"attn_implementation": "flash_attention_2"}
    with pytest.raises(EngineError, match=r'set learner\.dtype = "bfloat16"'):
        policy_of(tiny_model_dir, **options)
    policy = policy_of(tiny_model_dir, dtype=torch.bfloat16, **options)
    plain = policy_of(tiny_model_dir, dtype=torch.bfloat16)
    (found, _), (expected, _) = (
        each.logprobs(make_batch(), inv_temperature=1.0) for each in (policy, plain)
    )
    assert torch.allclose(found, expected, atol=0.02)
    # The probe of mismatches scores in float32.
    scorer = frozen_policy(ModelSource(model_dir=tiny_model_dir), policy.compute)
    assert scorer.model.config._attn_implementation == "packed"


def test_weights_that_hold_nan_are_named_as_the_cause(tiny_model_dir: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match="the weights of Qwen3ForCausalLM hold NaN or infinity"):
        policy_of(directory)


def test_logits_changed_in_an_unknown_way_are_noticed(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = transformers.Qwen3ForCausalLM.forward

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "forward", shifted)
    with pytest.raises(EngineError, match="Qwen3ForCausalLM computes its logits in another way"):
        policy_of(tiny_model_dir)


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}: cannot load it"):
        policy_of(tmp_path)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model_dir / "config.json").read_text())
    tensors = load_file(tiny_model_dir / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"lack \['model\.norm\.weight'\].* random"):
        policy_of(tmp_path)


def test_weights_of_another_model_change_nothing(tiny_model_dir: Path) -> None:
    policy = policy_of(tiny_model_dir)
    before = {key: value.detach().clone() for key, value in policy.tensors().items()}
    weights = {key: value + 1.0 for key, value in before.items()}
    lacking = {key: value for key, value in weights.items() if key != "model.norm.weight"}
    for given, message in (
        (lacking, r"lack 1 of the model's tensors: \['model\.norm\.weight'\]"),
        (weights | {"model.bogus": torch.zeros(1)}, r"1 unknown tensors: \['model\.bogus'\]"),
        (weights | {"model.norm.weight": torch.zeros(3)}, r"weight has shape \[3\], .* \[64\]"),
    ):
        with pytest.raises(DataError, match=message):
            policy.load(given)
    assert all(torch.equal(policy.tensors()[key], before[key]) for key in before)


def test_the_name_of_a_tied_tensor_may_come_along(tiny_model_dir: Path) -> None:
    policy = policy_of(tiny_model_dir)
    weights = {name: tensor.detach() * 0.5 for name, tensor in policy.tensors().items()}
    policy.load({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    assert all(torch.equal(policy.tensors()[name], weights[name]) for name in weights)
