"""Reading a model directory and this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo.config.memory import read_machine, read_model_facts
from echo.core.errors import DataError

DIMENSIONS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 192,
    "vocab_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def write_config(directory: Path, table: object) -> Path:
    (directory / "config.json").write_text(json.dumps(table), encoding="utf-8")
    return directory


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, Any] = {name: {"shape": shape} for name, shape in shapes.items()}
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_parameters_are_counted_in_the_files(tmp_path: Path) -> None:
    write_config(tmp_path, DIMENSIONS)
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": [3, 4], "b": [5]})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": []})
    facts = read_model_facts(tmp_path)
    assert facts.num_params == 12 + 5 + 1
    assert (facts.num_layers, facts.head_dim, facts.num_kv_heads) == (2, 16, 2)


def test_parameters_are_estimated_without_files(tmp_path: Path) -> None:
    # The quickstart's Qwen3: 100 736 with the four norms of queries and keys, 16 numbers each.
    assert read_model_facts(write_config(tmp_path, DIMENSIONS)).num_params == 100_736 - 64
    untied = {**DIMENSIONS, "tie_word_embeddings": False}
    assert read_model_facts(write_config(tmp_path, untied)).num_params == 100_736 - 64 + 32 * 64


def test_older_and_nested_configurations(tmp_path: Path) -> None:
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 32}
    facts = read_model_facts(write_config(tmp_path, gpt2))
    assert (facts.head_dim, facts.num_kv_heads, facts.intermediate_size) == (16, 4, 256)
    nested = read_model_facts(write_config(tmp_path, {"text_config": DIMENSIONS}))
    assert nested.hidden_size == 64


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "num_hidden_layers = None is not a dimension"),
        ([1], "num_hidden_layers = None is not a dimension"),
        ({**DIMENSIONS, "vocab_size": "32"}, "vocab_size = '32' is not a dimension"),
        ({**DIMENSIONS, "num_attention_heads": 0}, "num_attention_heads = 0 is not a dimension"),
    ],
)
def test_not_a_language_model(tmp_path: Path, table: object, message: str) -> None:
    with pytest.raises(DataError, match=f"config.json: {message}"):
        read_model_facts(write_config(tmp_path, table))


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json: no readable model configuration"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"config\.json: no readable model configuration"):
        read_model_facts(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\x05" + bytes(7) + b"[1,2]",
        b"\x02" + bytes(7) + b"{",
        b"\x07" + bytes(7) + b'{"a":1}',
    ],
)
def test_a_damaged_weights_file(tmp_path: Path, content: bytes) -> None:
    write_config(tmp_path, DIMENSIONS)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"model\.safetensors: not a safetensors file"):
        read_model_facts(tmp_path)


def test_this_machine_has_memory() -> None:
    machine = read_machine(gpu_bytes=5)
    assert 2**20 < machine.host_bytes < 2**50
    assert machine.gpu_bytes == 5
