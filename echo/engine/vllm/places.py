"""Places of a checkpoint's elements in a model of vLLM, and the changes on their way there.

The model's own loader runs once over tensors without memory, and what it would have copied where is
noted: a tensor that is copied once, whole, into one contiguous piece of a parameter can be changed
element by element from then on. Changes that a note cannot show are looked at as well: the bits
that lie there must be those of the tensor that was just loaded, and no layer may keep a second form
of its weights. Where any of it does not hold (packed, quantised or sharded layers, experts), the
model takes whole versions.
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
    """An element of the checkpoint has no place of its own; the message says why."""


class _Recorder(TorchDispatchMode):
    """Notes copies from tensors without memory; meanwhile nothing that has memory is written."""

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
        if func._schema.is_mutable:  # noqa: SLF001 -- such as the zeros behind a vocabulary
            return args[0]
        return func(*args, **(kwargs or {}))


def trace_places(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return where each tensor lies in a model: a contiguous piece of one of its parameters.

    Args:
        model: of vLLM.
        tensors: the checkpoint that it has just loaded, by name.

    Raises:
        UnplacedError: if one of them has no such place, or what lies there is not all that the
            model computes from.
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
    """Refuse a model that may keep weights in a second form, where changes would not arrive."""
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
    except Exception as error:  # vLLM's loaders raise anything; nothing has changed
        raise UnplacedError(f"its loader cannot be followed: {describe_error(error)}") from error
    finally:
        for module, name, parameter in before:  # which a loader may replace
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
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 -- the identity of no memory


def _have_equal_bits(place: Tensor, tensor: Tensor) -> bool:
    wanted = tensor.to(place.device, place.dtype).contiguous()
    return place.numel() == wanted.numel() and torch.equal(
        place.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)
    )


# --- changes for another process ------------------------------------------------------------------


def save_changes(directory: Path, changes: Sequence[TensorChange]) -> Path:
    """Write changes to a file, 4 bytes and a value for each element; return its path.

    Raises:
        OSError: if it cannot be written.
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
    """Yield what `save_changes` wrote, in its order."""
    with safe_open(path, framework="pt") as file:
        for number, (name, first) in enumerate(json.loads(file.metadata()["places"])):
            where = file.get_tensor(f"{number} where") if first is None else int(first)
            yield TensorChange(name, where, file.get_tensor(f"{number} values"))
