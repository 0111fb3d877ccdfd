"""Read what the memory budget needs to know: a model directory's dimensions, this machine's memory.

Nothing here imports torch: free GPU memory comes from whoever has it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from echo.config.footprint import ModelFacts
from echo.config.memory import Machine
from echo.core.errors import DataError

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def read_model_facts(directory: Path) -> ModelFacts:
    """Return the dimensions of the model in `directory` from its config.json.

    Parameters are counted in the safetensors files, or, where those are absent, estimated from
    the dimensions.

    Raises:
        DataError: if config.json is missing, damaged or of no causal language model.
    """
    path = directory / "config.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: no readable model configuration: {error}") from error
    # A multimodal model keeps the dimensions of its language part one level down.
    dims = table.get("text_config", table) if isinstance(table, dict) else {}
    facts = {
        "num_layers": _dimension(dims, path, "num_hidden_layers", "n_layer"),
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
    return ModelFacts(num_params=num_params, **facts)


def read_machine(gpu_bytes: int | None = None) -> Machine:
    """Return the memory that this process may still take.

    Args:
        gpu_bytes: free bytes of the GPU that the model will run on; None on a CPU.
    """
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists():
        text = limit.read_text(encoding="ascii").strip()
        if text != "max":
            in_use = int(used.read_text(encoding="ascii"))
            available = min(available, max(0, int(text) - in_use))
    return Machine(host_bytes=available, gpu_bytes=gpu_bytes)


def _dimension(dims: Mapping[str, Any], path: Path, *names: str, default: int | None = None) -> int:
    value = next((dims[name] for name in names if dims.get(name) is not None), default)
    if not isinstance(value, int) or value < 1:
        raise DataError(
            f"{path}: {names[0]} = {value!r} is not a dimension; this needs the configuration of "
            "a causal language model"
        )
    return value


def _count_stored(directory: Path) -> int:
    """Return the parameters in the directory's safetensors files, 0 unless all of them are there.

    In the hub's cache some may be missing, or still on their way.
    """
    paths = sorted(directory.glob("*.safetensors"))
    totals = [re.search(r"-of-(\d+)\.safetensors$", path.name) for path in paths]
    if any(total is not None and int(total[1]) != len(paths) for total in totals):
        return 0
    return sum(_count_in_file(path) for path in paths)


def _count_in_file(path: Path) -> int:
    """Add up the shapes in one file's header: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise DataError(f"{path}: not a safetensors file: a header of {length} bytes")
            header = json.loads(file.read(length))
        return sum(
            math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a safetensors file: {error}") from error


def _estimate_params(facts: Mapping[str, int], *, is_tied: bool) -> int:
    """Estimate the parameters of a decoder with gated MLPs and without biases."""
    hidden, head_dim = facts["hidden_size"], facts["head_dim"]
    attention = 2 * hidden * head_dim * (facts["num_heads"] + facts["num_kv_heads"])
    mlp = 3 * hidden * facts["intermediate_size"]
    embeddings = facts["vocab_size"] * hidden * (1 if is_tied else 2)
    return facts["num_layers"] * (attention + mlp + 2 * hidden) + hidden + embeddings
