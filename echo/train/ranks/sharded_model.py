"""Reading of a model directory into shards: each rank reads its own rows.

transformers matches the tensors of the files to the tensors of the model, joins some tensors (for
example the experts of a layer), and reads only this rank's rows. The tensors are copied into the
shards, one decoder layer after the other.

Reading one rank's rows is correct only if each row of the result comes from the same row of each
source. Tensors without this property are read whole by every rank.
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
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from echo.core.errors import DataError
from echo.engine.model import build_shapes, lacking, weight_files
from echo.train.ranks import sharding


def read(weights_dir: Path, model_dir: Path, model: Any) -> None:
    """Read a directory's weights into a sharded model, but read no adapter.

    Args:
        weights_dir: directory of the files.
        model_dir: directory of the model's configuration.
        model: the model, sharded over the ranks, perhaps with an adapter.

    Raises:
        DataError: if a file cannot be read, or the files belong to another model.
    """
    own = {name.replace(".base_layer", ""): tensor for name, tensor in _named(model).items()}
    shapes = build_shapes(model_dir)
    assert shapes is not None, "the model was built from it"
    mapping: list[Any] = get_model_conversion_mapping(shapes)
    config = LoadStateDictConfig(weight_mapping=mapping, dtype=torch.float32)
    try:
        with ExitStack() as opened:
            files = [
                opened.enter_context(safe_open(path, framework="pt"))
                for path in weight_files(weights_dir)
            ]
            slices = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118
            _cut(shapes, own, read_whole=_names_read_whole(slices, shapes))
            missing = shapes.state_dict().keys() & own.keys()
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


def _layer(key: str) -> int:
    number = re.search(r"\.(\d+)\.", key)
    return -1 if number is None else int(number[1])


def _named(model: nn.Module) -> dict[str, Tensor]:
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def _names_read_whole(keys: Iterable[str], shapes: Any) -> set[str]:
    """Return the names of the tensors that every rank must read whole.

    The rows of these tensors have other places in the files than in the model.
    """
    # A new mapping at each call: some conversions keep a state.
    mapping = get_model_conversion_mapping(shapes)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    own, found = shapes.state_dict(), set()
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, shapes.base_model_prefix, own)
        if pattern is not None and not all(map(_keeps_rows, by_pattern[pattern].operations)):
            first, *_ = targets = by_pattern[pattern].target_patterns
            found |= {name.replace(first, target) for target in targets}
    return found


def _keeps_rows(operation: ConversionOps) -> bool:
    """Return whether row i of an operation's result depends only on row i of the inputs."""
    match operation:
        case MergeModulelist(dim=dim):
            return dim == 0  # then each input becomes a row
        case Concatenate(dim=dim) | Chunk(dim=dim):
            return dim > 0
        case Transpose(dim0=one, dim1=other):
            return min(one, other) > 0
    return False


def _cut(shapes: nn.Module, own: Mapping[str, Tensor], *, read_whole: set[str]) -> None:
    """Give each tensor on the meta device the shape of the part that this rank reads."""
    for name in _named(shapes):
        tensor = own[name]
        if name in read_whole and isinstance(tensor, nn.Parameter):  # buffers are never cut
            form = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            _empty(shapes, name, nn.Parameter(form))
        elif sharding.local(tensor).numel():
            _empty(shapes, name, tensor)
        else:
            module, last = _place(shapes, name)
            delattr(module, last)


def _take(shapes: nn.Module, own: Mapping[str, Tensor]) -> set[str]:
    """Copy each tensor that was read to its shard in `own`; return the names of these tensors."""
    found = {name: t for name, t in _named(shapes).items() if not t.is_meta and name in own}
    for name, tensor in found.items():
        sharding.copy_local(own[name], tensor)
        _empty(shapes, name, own[name])
    return set(found)


def _empty(shapes: nn.Module, name: str, own: Tensor) -> None:
    """Put an empty tensor in the place of a tensor that was read, to free memory.

    The empty tensor is on the meta device, and is sharded like `own`.
    """
    part = sharding.like(torch.empty_like(sharding.local(own), device="meta"), own)
    module, last = _place(shapes, name)
    is_parameter = isinstance(own, nn.Parameter)
    setattr(module, last, nn.Parameter(part, requires_grad=False) if is_parameter else part)


def _place(shapes: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return shapes.get_submodule(path), last
