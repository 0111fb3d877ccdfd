"""Places of a checkpoint's elements in a model of vLLM, and files of changes to them.

`trace_places` runs the model's own loader once over tensors without memory (meta tensors) and
records each copy that the loader would make. A tensor that is copied once, whole, into one
contiguous piece of a parameter can later be changed element by element. Two further checks find
changes that the recorded copies do not show: the bits in the model must equal those of the tensor
that was just loaded, and no layer may keep a second form of its weights. If any check fails
(packed, quantised or sharded layers, experts), the model takes whole versions only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from echo.engine.engine import describe_error
from echo.engine.weights import TensorChange, write_tensors

CHANGES_FILE = "changes.safetensors"


class UnplacedError(Exception):
    """A tensor of the checkpoint has no contiguous place in the model; the message says why."""


class _Recorder(TorchDispatchMode):
    """Records copies from meta tensors; while active, no tensor is written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[Tensor, Tensor]] = []
        """(destination, source)"""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            self.copies.append((args[0], args[1]))
            return args[0]
        if func._schema.is_mutable:  # noqa: SLF001 -- such as padding a vocabulary with zeros
            return args[0]
        return func(*args, **(kwargs or {}))


def trace_places(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor's place in a model: a contiguous piece of one of its parameters.

    Args:
        model: a model of vLLM.
        tensors: the checkpoint that the model has just loaded, by name.

    Raises:
        UnplacedError: if a tensor has no such place, or the model also computes from another form
            of its weights.
    """
    _check_layers(model)
    found: dict[str, Tensor] = {}
    for name, destination, source in _trace(model, tensors):
        is_whole = source.shape == tensors[name].shape and source.is_contiguous()
        if name in found or not is_whole or not destination.is_contiguous():
            raise UnplacedError(f"{name} is taken in parts")
        found[name] = destination
    for name, tensor in tensors.items():
        if name not in found:
            raise UnplacedError(f"{name} is not copied, but computed from or left out")
        if not _have_equal_bits(found[name], tensor):
            raise UnplacedError(f"{name} is changed after it was loaded")
    return found


def _check_layers(model: nn.Module) -> None:
    """Refuse a model that may keep a second form of its weights, which changes would not reach."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
    for name, module in model.named_modules():
        if any(not parameter.numel() for _, parameter in _own(module)):
            raise UnplacedError(f"the weights of {name} are packed for this processor")
        method = getattr(module, "quant_method", None)
        is_plain = type(method) in plain
        if hasattr(module, "process_weights_after_loading"):
            is_plain = is_plain and type(module) is Attention
        if not is_plain:
            kind = type(module if method is None else method).__name__
            raise UnplacedError(f"{name} makes weights of its own kind from them ({kind})")


def _trace(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, destination, source) of each copy that the model's loader makes."""
    shadows = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    names = {_storage(shadow): name for name, shadow in shadows.items()}
    before = [(module, *each) for module in model.modules() for each in _own(module)]
    recorder = _Recorder()
    try:
        with recorder, torch.no_grad():
            model.load_weights(shadows.items())  # type: ignore[operator]
    except Exception as error:  # vLLM's loaders may raise anything; no weight has changed
        raise UnplacedError(f"its loader cannot be followed: {describe_error(error)}") from error
    finally:
        for module, name, parameter in before:  # a loader may replace parameters
            if getattr(module, name, None) is not parameter:
                setattr(module, name, parameter)
    for destination, source in recorder.copies:
        found = names.get(_storage(source))
        if found is None:
            raise UnplacedError("its loader computes with them")
        yield found, destination, source


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 -- a meta tensor has no address


def _have_equal_bits(place: Tensor, tensor: Tensor) -> bool:
    wanted = tensor.to(place.device, place.dtype).contiguous()
    return place.numel() == wanted.numel() and torch.equal(
        place.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)
    )


# --- changes for another process ------------------------------------------------------------------


def save_changes(directory: Path, changes: Sequence[TensorChange]) -> Path:
    """Write changes to a file and return its path; an index takes 4 bytes, or 8 above 2^31.

    Raises:
        OSError: if the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for number, change in enumerate(changes):
        where = change.where
        if isinstance(where, Tensor):
            is_short = int(where[-1]) < 1 << 31
            tensors[f"{number} where"] = where.int() if is_short else where
        tensors[f"{number} values"] = change.values
    places = [[c.name, c.where if isinstance(c.where, int) else None] for c in changes]
    path = directory / CHANGES_FILE
    write_tensors(path, tensors, {"places": json.dumps(places)})
    return path


def load_changes(path: Path) -> Iterator[TensorChange]:
    """Yield the changes that `save_changes` wrote, in the same order."""
    with safe_open(path, framework="pt") as file:
        for number, (name, first) in enumerate(json.loads(file.metadata()["places"])):
            where = file.get_tensor(f"{number} where") if first is None else int(first)
            yield TensorChange(name, where, file.get_tensor(f"{number} values"))
