"""Reads a model's dimensions from the model's directory.

This module does not import torch, so it cannot measure a GPU's free memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo.config.fields import UNREADABLE
from echo.config.memory.step import ModelFacts
from echo.core.errors import ConfigError, DataError
from echo.core.paths import local_path

PACKED: Mapping[str, bool] = {
    "llama": False, "qwen2": False, "qwen3": True, "mistral": False, "phi3": False,
    "smollm3": False, "gemma3": True, "gemma3_text": True, "gemma4": True, "gemma4_text": True,
    "olmo3": True, "qwen3_moe": True,
    "mixtral": False, "deepseek_v3": True, "glm4_moe": True, "qwen2_5_vl": False, "qwen3_vl": True,
    "mistral3": False, "smolvlm": False,
}  # fmt: skip
"""Families of models whose rollouts may share a row and a prompt (docs/models.md). The keys are
values of model_type. The value is True if the family normalises the queries and keys of each head.
For other families, these properties are unknown, so the larger memory is counted."""

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def find_model(name: str, revision: str | None = None, *, key: str = "model.name") -> Path | None:
    """Return the directory of the model `name`; None if the model is on the hub.

    Raises:
        ConfigError: if a revision is set for a directory.
        DataError: if the directory is missing, contains no model, or contains a quantised model.
    """
    path = local_path(name)
    try:
        has_model, is_directory = (path / "config.json").is_file(), path.is_dir()
    except OSError as error:
        raise DataError(f"{key} = {name!r}: cannot be looked at: {error.strerror}") from error
    if has_model:
        if revision is not None:
            raise ConfigError(
                f"model.revision = {revision!r} has no effect on the local directory {path}; "
                "remove it"
            )
        check_unquantised(path)
        return path
    if is_directory:
        raise DataError(
            f"{key} = {name!r}: {path.absolute()} has no config.json; name the directory of a "
            "Hugging Face model, with config.json, tokenizer and safetensors, or its id on the hub"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"{key} = {name!r}: no such directory (looked at {path.absolute()})")
    return None


_QUANTISED_WEIGHT = re.compile(r"(weight|qweight|packed|blocks)$")


def check_unquantised(directory: Path) -> None:
    """Refuse a model with quantised weights, which training cannot change.

    Raises:
        DataError: if the weights are quantised. The message names the method or one quantised
            tensor.
    """
    try:
        table = json.loads((directory / "config.json").read_bytes())
    except (OSError, *UNREADABLE):
        table = {}  # readers that need the table raise an error
    tables = [table, table.get("text_config")] if isinstance(table, dict) else []
    found = ""
    for fields in tables:
        for key in ("quantization_config", "compression_config"):
            if isinstance(fields, dict) and (how := fields.get(key)):
                method = how.get("quant_method") if isinstance(how, dict) else None
                found = f"config.json says that its weights are quantised ({method or key})"
    for path in () if found else sorted(directory.glob("*.safetensors")):
        for name, entry in _read_header(path).items():
            kind = entry["dtype"]
            if kind not in _FLOATS and len(entry["shape"]) > 1 and _QUANTISED_WEIGHT.search(name):
                found = f"{path.name} holds the weights {name} quantised, as {kind}"
                break
    if found:
        raise DataError(
            f"{directory}: {found}, and such weights cannot be trained: name the model that it was "
            "made from, with weights in bfloat16, float16 or float32"
        )


def read_model_facts(directory: Path) -> ModelFacts:
    """Read the dimensions of a model from the config.json in the model's directory.

    Parameters are counted in the safetensors files. If files are missing, the number is estimated
    from the dimensions.

    Raises:
        DataError: if config.json is missing or damaged, or describes no causal language model.
    """
    path = directory / "config.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *UNREADABLE) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"{path}: no readable model configuration: {reason}") from error
    # A multimodal model keeps the dimensions of its language part one level down.
    dims = table.get("text_config", table) if isinstance(table, dict) else {}
    dims = dims if isinstance(dims, dict) else {}
    kinds = dims.get("layers_block_type")  # newer files of Nemotron-H lack the number of layers
    num_kinds = len(kinds) if isinstance(kinds, list) else None
    facts = {
        "num_layers": _dimension(dims, path, "num_hidden_layers", "n_layer", default=num_kinds),
        "hidden_size": _dimension(dims, path, "hidden_size", "n_embd"),
        "vocab_size": _dimension(dims, path, "vocab_size"),
        "num_heads": _dimension(dims, path, "num_attention_heads", "n_head"),
    }
    hidden, heads = facts["hidden_size"], facts["num_heads"]
    facts["num_kv_heads"] = _dimension(dims, path, "num_key_value_heads", default=heads)
    facts["head_dim"] = _dimension(dims, path, "head_dim", default=max(1, hidden // heads))
    facts["intermediate_size"] = _dimension(dims, path, "intermediate_size", default=4 * hidden)
    is_tied = bool(dims.get("tie_word_embeddings", table.get("tie_word_embeddings", False)))
    num_params = _count_stored(directory) or _estimate_params(facts, is_tied=is_tied)
    model_type = table.get("model_type") if isinstance(table, dict) else None
    return ModelFacts(
        num_params=num_params,
        is_tied=is_tied,
        has_head_norms=PACKED.get(str(model_type), True),
        shares_prompts=str(model_type) in PACKED,
        **facts,
    )


def _dimension(dims: Mapping[str, Any], path: Path, *names: str, default: int | None = None) -> int:
    value = next((dims[name] for name in names if dims.get(name) is not None), default)
    if not isinstance(value, int) or value < 1:
        raise DataError(
            f"{path}: {names[0]} = {value!r} is not a dimension; this needs the configuration of "
            "a causal language model"
        )
    return value


def _count_stored(directory: Path) -> int:
    """Return the number of parameters in the safetensors files. If files are missing, return 0.

    In the hub's cache, some files may be missing or incomplete.
    """
    paths = sorted(directory.glob("*.safetensors"))
    totals = [re.search(r"-of-(\d+)\.safetensors$", path.name) for path in paths]
    if any(total is not None and int(total[1]) != len(paths) for total in totals):
        return 0
    return sum(_count_in_file(path) for path in paths)


def _count_in_file(path: Path) -> int:
    return sum(math.prod(entry["shape"]) for entry in _read_header(path).values())


def _read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, with each tensor's shape and dtype.

    Raises:
        DataError: if the file is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # No more bytes than the header can have are read, because a damaged file may state any
            # length.
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        for entry in header.values():
            math.prod(entry["shape"])
            str(entry["dtype"])
        return dict(header)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a safetensors file, or cut off ({error}); copy or download it again"
        ) from error


def _estimate_params(facts: Mapping[str, int], *, is_tied: bool) -> int:
    """Estimate the number of parameters of a decoder with gated MLPs and no biases."""
    hidden, head_dim = facts["hidden_size"], facts["head_dim"]
    attention = 2 * hidden * head_dim * (facts["num_heads"] + facts["num_kv_heads"])
    mlp = 3 * hidden * facts["intermediate_size"]
    embeddings = facts["vocab_size"] * hidden * (1 if is_tied else 2)
    return facts["num_layers"] * (attention + mlp + 2 * hidden) + hidden + embeddings
