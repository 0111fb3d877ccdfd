"""Weights of a model directory, read into a model that is cut up: each rank its own rows.

Nobody has the model whole. transformers finds which tensor of the files becomes which of the model,
joins what it joins (experts, a layer's at a time), and reads of each what this rank has. What it
has read is copied into the shards, one decoder layer after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from echo.core.errors import DataError
from echo.engine.model import build_shapes, weight_files
from echo.train import sharding


def read(weights_dir: Path, model_dir: Path, model: Any) -> None:
    """Read weights; an adapter's tensors stay as they are.

    Args:
        weights_dir: with the files.
        model_dir: of the model, which may have an adapter here.
        model: cut up over the ranks.

    Raises:
        DataError: if a file cannot be read, or the files do not make the model up.
    """
    own = {name.replace(".base_layer", ""): tensor for name, tensor in _named(model).items()}
    shapes = _cut_shapes(model_dir, own)
    mapping: list[Any] = get_model_conversion_mapping(shapes)
    config = LoadStateDictConfig(weight_mapping=mapping, dtype=torch.float32)
    missing = shapes.state_dict().keys() & own.keys()
    try:
        with ExitStack() as opened:
            files = [
                opened.enter_context(safe_open(path, framework="pt"))
                for path in weight_files(weights_dir)
            ]
            slices = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118
            for _, keys in groupby(sorted(slices, key=_layer), _layer):
                found, _ = convert_and_load_state_dict_in_model(
                    shapes, {key: slices[key] for key in keys}, config
                )
                if found.mismatched_keys or found.conversion_errors:
                    wrong = sorted(map(str, (*found.mismatched_keys, *found.conversion_errors)))
                    raise DataError(
                        f"{weights_dir}: {wrong[:5]} do not fit the model of {model_dir}: "
                        "the weights are of another one"
                    )
                missing -= _take(shapes, own)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise DataError(f"{weights_dir}: cannot read the weights: {error}") from error
    if missing:
        raise lacking(weights_dir, missing)


def lacking(directory: Path, names: Iterable[str]) -> DataError:
    """Return the error for files that leave some of a model's tensors out."""
    return DataError(
        f"{directory}: the weights lack {sorted(names)[:5]}, which would start at random; is this "
        "the checkpoint of a causal language model?"
    )


def _layer(key: str) -> int:
    """Return the number of the layer that a tensor of a file belongs to; -1 for none."""
    number = re.search(r"\.(\d+)\.", key)
    return -1 if number is None else int(number[1])


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def _cut_shapes(model_dir: Path, own: Mapping[str, Tensor]) -> Any:
    """Return the model without memory, cut up like the given tensors."""
    shapes = build_shapes(model_dir)
    assert shapes is not None, "the model was built from it"
    for name in _named(shapes):
        _empty(shapes, name, own[name])
    return shapes


def _take(shapes: nn.Module, own: Mapping[str, Tensor]) -> set[str]:
    """Move what has been read into the shards; return its names."""
    found = {name: t for name, t in _named(shapes).items() if not t.is_meta and name in own}
    for name, tensor in found.items():
        with torch.no_grad():
            sharding.local(own[name]).copy_(sharding.local(tensor))
        _empty(shapes, name, own[name])
    return set(found)


def _empty(shapes: nn.Module, name: str, own: Tensor) -> None:
    """Let go of a tensor's memory; it keeps the form of this rank's own."""
    part = sharding.like(torch.empty_like(sharding.local(own), device="meta"), own)
    path, _, last = name.rpartition(".")
    is_parameter = isinstance(own, nn.Parameter)
    new = nn.Parameter(part, requires_grad=False) if is_parameter else part
    setattr(shapes.get_submodule(path), last, new)
