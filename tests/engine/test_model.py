from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from echo.config.schema import LearnerSection, WorkerSection
from echo.core.errors import ConfigError
from echo.engine import model
from echo.engine.model import (
    CHARACTERS,
    EOS_ID,
    PAD_ID,
    build_model,
    choose_cpu_dtype,
    context_window,
    head_widths,
    layer_configs,
    pick_device,
    pick_dtype,
    save_tiny_model,
    with_cpu_dtype,
)
from echo.tasks.tokenization import TextCodec, decode, load_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_model(path, build_model(seed=3))
    return path


def test_the_seed_fixes_the_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = build_model(seed=1), build_model(seed=1), build_model(seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_auto_classes_load_the_directory_with_the_same_weights(directory: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    own = build_model(seed=3).state_dict()
    assert loaded.state_dict().keys() == own.keys()
    assert all(torch.equal(loaded.state_dict()[name], own[name]) for name in own)


def test_every_character_round_trips_as_one_token(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    ids = TextCodec(tokenizer, [], {}).encode_prompt(CHARACTERS)
    assert ids == [1, *range(3, 28)]
    assert decode(tokenizer, ids[1:], []) == CHARACTERS
    assert (len(tokenizer), tokenizer.eos_token_id) == (28, EOS_ID)
    assert tokenizer.chat_template is None
    assert TextCodec(tokenizer, [], {}).encode_prompt("1é") == [1, 4, PAD_ID]


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"n_positions": 64, "n_ctx": 64}, 64),
        ({"max_seq_len": 32}, 32),
        ({"max_sequence_length": 33}, 33),
        ({"seq_length": 34}, 34),
        ({"max_position_embeddings": 512, "sliding_window": 8}, 512),
        ({"text_config": {"n_positions": 35}}, 35),
        ({"text_config": None, "max_position_embeddings": None}, 1 << 20),
    ],
)
def test_the_window_has_a_name_in_every_family(
    tmp_path: Path, fields: dict[str, object], window: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert context_window(tmp_path) == window


# --- devices --------------------------------------------------------------------------------------


def test_a_device_that_is_named_is_taken_if_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cpu", "cuda", "cuda:1"):
        assert pick_device(name) == name
    with pytest.raises(ConfigError, match=r"'cuda:2': PyTorch .* finds 2 GPUs, numbered from 0"):
        pick_device("cuda:2")
    with pytest.raises(ConfigError, match="'gpu' is unknown: use auto, cpu, cuda or cuda:N"):
        pick_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"'cuda': PyTorch .* finds no GPU on this machine; use"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("sizes", "seconds", "expected"),
    [
        ((512, 1024), {torch.float32: 4.0, torch.bfloat16: 1.0}, "bfloat16"),
        ((512, 1024), {torch.float32: 1.4, torch.bfloat16: 1.0}, "float32"),
        ((512, 1024), {torch.float32: 1.0, torch.bfloat16: 3.0}, "float32"),
        ((4096, 12288), {torch.float32: 4.0, torch.bfloat16: 1.0}, "bfloat16"),
        ((64, 192), None, "float32"),  # so small a model is not measured
        ((256, 768), None, "float32"),
    ],
)
def test_a_cpu_computes_in_the_type_that_it_multiplies_faster(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int],
    seconds: dict[torch.dtype, float] | None,
    expected: str,
) -> None:
    hidden, inner = sizes
    dimensions = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1}
    others = {"vocab_size": 8, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(dimensions | others))
    now = 0.0

    def linear(rows: Tensor, weights: Tensor) -> None:
        nonlocal now
        assert seconds is not None
        assert rows.shape[-1] == weights.shape[-1] == min(hidden, 2048)
        now += seconds[rows.dtype]

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    num_threads = torch.get_num_threads()
    dtype, note = choose_cpu_dtype(tmp_path)
    assert dtype == expected
    assert (" 4.0 times as fast as in float32" in note) == (expected == "bfloat16")
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize(
    ("family", "settings", "widths"),
    [
        ("gpt2", {"n_head": 4, "n_embd": 96}, (24, 24)),
        ("gpt_neo", {"num_heads": 4, "hidden_size": 96}, (24, 24)),
        ("mpt", {"n_heads": 4, "d_model": 96}, (24, 24)),
        ("qwen3", {"head_dim": 40}, (40, 40)),
        ("deepseek_v3", {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, (192, 128)),
        ("mamba", {}, (0, 0)),
    ],
)
def test_the_width_of_a_head_is_found_by_any_familys_names(
    family: str, settings: dict[str, Any], widths: tuple[int, int]
) -> None:
    config = AutoConfig.for_model(family, **settings)
    assert head_widths(layer_configs(config)[0]) == widths


def test_a_type_that_is_set_or_a_gpu_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "choose_cpu_dtype", None)
    learner, worker = LearnerSection(dtype="float32"), WorkerSection(dtype="bfloat16")
    assert with_cpu_dtype(learner, tmp_path) == (learner, "")
    assert with_cpu_dtype(worker, tmp_path) == (worker, "")
    monkeypatch.setattr(model, "pick_device", lambda name: "cuda")
    assert with_cpu_dtype(LearnerSection(), tmp_path) == (LearnerSection(), "")
    assert with_cpu_dtype(WorkerSection(), tmp_path) == (WorkerSection(), "")


def test_a_directory_without_dimensions_is_left_to_the_engine(tmp_path: Path) -> None:
    assert choose_cpu_dtype(tmp_path) == ("float32", "")


def test_mixed_precision_is_for_gpus_unless_asked_for() -> None:
    assert pick_dtype("auto", "cpu") == torch.float32
    assert pick_dtype("auto", "cuda:1") == torch.bfloat16
    assert pick_dtype("float32", "cuda") == torch.float32
    assert pick_dtype("bfloat16", "cpu") == torch.bfloat16
