from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from echo.core.errors import ConfigError
from echo.engine.model import (
    CHARACTERS,
    EOS_ID,
    PAD_ID,
    build_model,
    context_window,
    pick_device,
    pick_dtype,
    save_tiny_model,
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


def test_mixed_precision_is_for_gpus_unless_asked_for() -> None:
    assert pick_dtype("auto", "cpu") == torch.float32
    assert pick_dtype("auto", "cuda:1") == torch.bfloat16
    assert pick_dtype("float32", "cuda") == torch.float32
    assert pick_dtype("bfloat16", "cpu") == torch.bfloat16
