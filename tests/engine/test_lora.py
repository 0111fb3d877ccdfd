"""Adapters: what is trained, what a version holds, what peft reads, and what is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo.algo.losses import GrpoLoss
from echo.core.errors import ConfigError, DataError, EngineError
from echo.core.extras import install_command
from echo.engine.hf.engine import TransformersEngine
from echo.engine.lora import Lora, base_digest, build_adapted, export_adapter, load_adapter
from echo.engine.model import load_directory
from echo.engine.weights import save_safetensors
from echo.train.optimizer import OptimizerSettings
from echo.train.trainer import Trainer
from tests.engine.engine_contract import (
    SAMPLINGS,
    V1,
    V2,
    Watched,
    assert_swapped,
    assert_the_learners,
    mixed_requests,
    request,
    run,
    versions_of,
)
from tests.engine.lora_models import adapted_policy, published
from tests.train.test_trainer import make_groups
from tests.train.trainers import trainer_of

torch.set_num_threads(1)

MakeTinyModel = Callable[..., Path]


def make_trainer(base_dir: Path, **options: object) -> Trainer:
    return trainer_of(
        base_dir,
        loss=GrpoLoss(),
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=0),
        lora=Lora(base_dir=base_dir, rank=4, alpha=8),
        **options,
    )


@pytest.mark.slow
def test_it_starts_as_the_base_and_only_the_adapter_is_trained_and_published(
    tiny_model_dir: Path,
) -> None:
    plain = trainer_of(tiny_model_dir, loss=GrpoLoss(), optimizer=OptimizerSettings())
    trainer = make_trainer(tiny_model_dir)
    for one, other in zip(
        plain.forward(make_groups()), trainer.forward(make_groups()), strict=True
    ):
        for first, second in zip(one, other, strict=True):
            np.testing.assert_allclose(first, second, atol=1e-6)
    base = {n: t.clone() for n, t in trainer.policy.model.named_parameters() if "lora" not in n}
    before = trainer.snapshot()

    trainer.step(make_groups())

    after = trainer.tensors()
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in after)
    assert len(after) == 2 * 2 * 7, "two matrices, two layers, seven linear modules"
    assert any(not torch.equal(after[name], before[name]) for name in before)
    for name, tensor in trainer.policy.model.named_parameters():
        if "lora" not in name:
            assert torch.equal(tensor, base[name]), name


@pytest.mark.slow
def test_a_saved_trainer_continues_bit_by_bit(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model_dir)
    trainer.step(make_groups())
    trainer.save_state(tmp_path)
    assert (tmp_path / "weights.safetensors").stat().st_size < 60_000, "the adapter alone"
    trainer.step(make_groups(seed=1))

    resumed = make_trainer(tiny_model_dir, seed=5)
    resumed.load_state(tmp_path)
    resumed.step(make_groups(seed=1))

    expected = trainer.snapshot()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in resumed.snapshot().items())


@pytest.mark.parametrize(("is_tied", "how"), [(True, "all"), (False, "plain")])
@pytest.mark.slow
def test_the_engine_samples_what_the_learner_scores(
    make_tiny_model: MakeTinyModel, is_tied: bool, how: str
) -> None:
    base_dir = make_tiny_model(tie_word_embeddings=is_tied, initializer_range=0.2)
    policy, lora = adapted_policy(base_dir)
    engine = TransformersEngine(base_dir, lora=lora)
    assert not engine.takes_patches, "what is published is not what it computes with"
    engine.load(published(policy), V1)
    requests = mixed_requests(8)
    for one, completion in zip(requests, run(engine, requests, SAMPLINGS[how]), strict=True):
        assert_the_learners(completion, policy.model, one, SAMPLINGS[how])
        assert set(versions_of(completion)) == {V1}


@pytest.mark.slow
def test_adapters_are_swapped_in_flight(make_tiny_model: MakeTinyModel) -> None:
    base_dir = make_tiny_model(max_position_embeddings=512, initializer_range=0.2)
    policies = [adapted_policy(base_dir, seed=seed) for seed in (0, 1)]
    engine = TransformersEngine(base_dir, lora=policies[0][1])
    engine.load(published(policies[0][0]), V1)
    prompt = request([1, 5, 9])
    watched = Watched(engine, [prompt])
    watched.wait_for(5)
    engine.load(published(policies[1][0]), V2)
    [completion] = watched.result()
    assert assert_swapped(completion, prompt, [policy.model for policy, _ in policies]) >= 5


def test_peft_loads_what_is_exported(tiny_model_dir: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    policy, lora = adapted_policy(tiny_model_dir)
    directory = tmp_path / "final"
    for _ in range(2):  # the second replaces the first
        export_adapter(directory, {}, published(policy), lora, base_name=str(tiny_model_dir))
    assert [path.name for path in tmp_path.iterdir()] == ["final"]

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model = PeftModel.from_pretrained(base, directory)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = policy.model(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
    assert model.peft_config["default"].base_model_name_or_path == str(tiny_model_dir)
    again = load_adapter(directory)
    assert all(torch.equal(again[name], tensor) for name, tensor in published(policy).items())


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        (("q_proj", "qkv_proj"), "'qkv_proj' is no linear layer of Qwen3ForCausalLM"),
        (("lm_head",), "the head and the embeddings cannot"),
        (("embed_tokens",), "it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj"),
        (("all-linear", "q_proj"), "'all-linear' is no linear layer"),
    ],
)
def test_chosen_targets_get_an_adapter_and_impossible_ones_are_refused(
    tiny_model_dir: Path, targets: tuple[str, ...], complaint: str
) -> None:
    lora = Lora(base_dir=tiny_model_dir, rank=2, alpha=2, target_modules=("q_proj", "v_proj"))
    _, adapter = build_adapted(lora, torch.float32, "sdpa")
    assert {name.split(".")[-3] for name in adapter} == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=complaint):
        build_adapted(replace(lora, target_modules=targets), torch.float32, "sdpa")


def test_without_peft_it_says_what_to_install(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    remedy = re.escape(install_command("worker", "lora"))
    with pytest.raises(ConfigError, match=rf"lora\.rank = 4 needs peft.*{remedy}"):
        make_trainer(tiny_model_dir)


@pytest.mark.slow
def test_weights_that_are_no_such_adapter_are_refused(tiny_model_dir: Path) -> None:
    policy, _ = adapted_policy(tiny_model_dir, rank=8)
    engine = TransformersEngine(tiny_model_dir, lora=Lora(base_dir=tiny_model_dir, rank=4, alpha=8))
    with pytest.raises(EngineError, match="of the wrong shape"):
        engine.load(published(policy))
    with pytest.raises(EngineError, match="missing"):
        engine.load(load_directory(tiny_model_dir, "float32"))
    with pytest.raises(DataError, match="belong to another model"):
        make_trainer(tiny_model_dir, tensors=published(policy))


def test_the_hash_of_a_base_is_that_of_its_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    weights = load_directory(tiny_model_dir, "float32")
    sharded, changed = tmp_path / "sharded", tmp_path / "changed"
    for directory in (sharded, changed):
        directory.mkdir()
    save_safetensors(sharded, weights, max_shard_bytes=100_000)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert base_digest(sharded) == base_digest(tiny_model_dir)
    next(iter(weights.values())).view(-1)[0] += 1e-3
    save_safetensors(changed, weights)
    assert base_digest(changed) != base_digest(tiny_model_dir)
