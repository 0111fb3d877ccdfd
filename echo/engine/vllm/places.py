"""The places of a checkpoint's elements in a model of vLLM, and the changes to write there.

`trace_places` runs the model's own loader once over tensors without memory (meta tensors) and
records each copy that the loader would make. If the loader copies a tensor once, as a whole, into
one contiguous piece of a parameter, patches can change the tensor in place. The recorded copies do
not show everything that a loader does, so there are two further checks. First, the bits in the
model must equal the bits of the loaded tensor. Second, no layer may keep a second form of its
weights, such as a packed copy. If any check fails, the model takes whole versions only. Experts and
packed, quantised or sharded layers fail a check.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from echo.engine.engine import describe_error
from echo.engine.weights import TensorChange, dtype_name, torch_dtype, write_tensors

CHANGES_FILE = "changes.safetensors"


class UnplacedError(Exception):
    """A checkpoint's tensor has no contiguous place in the model."""


class _Recorder(TorchDispatchMode):
    """Records the copies that a loader makes from meta tensors, and prevents writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[Tensor, Tensor]] = []
        """(destination, source) of each recorded copy."""

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
    """Return each tensor's place: a contiguous piece of one of the model's parameters.

    Args:
        model: a model of vLLM.
        tensors: the checkpoint that the model has just loaded, by name.

    Raises:
        UnplacedError: if a tensor has no such place, or if the model computes from another form of
            its weights.
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
    """Raise if a layer may keep a second form of its weights.

    No patch would reach the second form.
    """
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


# --- changes for vLLM -----------------------------------------------------------------------------

MAX_COPY_BYTES = 512 << 20
"""Largest number of bytes of changes that are copied to a GPU at once. The changes of most versions
take fewer bytes.
"""

_ALIGNMENT_BYTES = 8
"""Each part begins at a multiple of this number of bytes: the size of torch's int64. At other
offsets torch cannot view memory as int64.
"""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The place of one tensor's changes in `JoinedChanges.data`."""

    name: str
    dtype: str
    number: int
    """Number of changed elements."""
    values_at: int
    """Place of the new values in the data, in bytes from its start."""
    first: int | None
    """Index of the first changed element if the elements are contiguous; else None."""
    where_at: int
    """Place of the indices in the data, in bytes from its start."""
    where_dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class JoinedChanges:
    """Changes of tensors in one piece of memory, for a single copy to a GPU.

    Consecutive changes of the same tensor are joined, so that one scatter writes them. An index
    takes 4 bytes, or 8 bytes if some index of the same tensor is 2^31 or more.
    """

    data: Tensor
    """uint8 [num_bytes] values and indices of the changes, on any device."""
    pieces: Sequence[_Piece]

    def __iter__(self) -> Iterator[TensorChange]:
        """Yield the change of each tensor, as views of the data."""
        for piece in self.pieces:
            values = self._view(piece.values_at, piece.number, piece.dtype)
            where: Tensor | int | None = piece.first
            if where is None:
                where = self._view(piece.where_at, piece.number, piece.where_dtype)
            yield TensorChange(piece.name, where, values)

    def _view(self, start: int, number: int, dtype: str) -> Tensor:
        kind = torch_dtype(dtype)
        return self.data[start : start + number * kind.itemsize].view(kind)


def join_changes(changes: Iterable[TensorChange]) -> list[JoinedChanges]:
    """Return the changes in pieces of memory of about MAX_COPY_BYTES each."""
    joined = []
    batch: list[TensorChange] = []
    num_bytes = 0
    for change in changes:
        batch.append(change)
        num_bytes += change.num_bytes
        if num_bytes >= MAX_COPY_BYTES:
            joined.append(_join(batch))
            batch, num_bytes = [], 0
    return [*joined, _join(batch)] if batch else joined


def _join(changes: Iterable[TensorChange]) -> JoinedChanges:
    parts: list[Tensor] = []
    pieces: list[_Piece] = []
    end = 0

    def add(part: Tensor) -> int:
        nonlocal end
        padding = torch.empty(-part.nbytes % _ALIGNMENT_BYTES, dtype=torch.uint8)
        parts.extend((part.contiguous().view(-1).view(torch.uint8), padding))
        start, end = end, end + part.nbytes + padding.numel()
        return start

    for (name, dtype, is_run), group in itertools.groupby(changes, _kind):
        if is_run:
            for change in group:
                values, first = change.values, int(change.where)
                pieces.append(_Piece(name, dtype, values.numel(), add(values), first, 0, ""))
            continue
        indices, all_values = zip(*((change.where, change.values) for change in group), strict=True)
        values, where = torch.cat(all_values), torch.cat(indices)
        if int(where.max()) < 1 << 31:
            where = where.int()
        index = dtype_name(where.dtype)
        pieces.append(_Piece(name, dtype, values.numel(), add(values), None, add(where), index))
    return JoinedChanges(torch.cat(parts), pieces)


def _kind(change: TensorChange) -> tuple[str, str, bool]:
    return change.name, dtype_name(change.values.dtype), isinstance(change.where, int)


@torch.no_grad()
def store_changes(joined: Iterable[JoinedChanges], places: Mapping[str, Tensor]) -> None:
    """Write changes into the places of their tensors. All places must be on one device."""
    device = next(iter(places.values())).device
    for each in joined:
        for change in JoinedChanges(each.data.to(device), each.pieces):
            change.store(places[change.name])


def save_changes(directory: Path, joined: Sequence[JoinedChanges]) -> Path:
    """Write changes to a new file for another process, and return its path.

    Raises:
        OSError: if the file cannot be written.
    """
    path = directory / CHANGES_FILE
    pieces = [[dataclasses.astuple(piece) for piece in each.pieces] for each in joined]
    data = {str(number): each.data for number, each in enumerate(joined)}
    write_tensors(path, data, {"pieces": json.dumps(pieces)})
    return path


def load_changes(path: Path) -> Iterator[JoinedChanges]:
    """Yield the changes that `save_changes` wrote, in the same order."""
    with safe_open(path, framework="pt") as file:
        for number, pieces in enumerate(json.loads(file.metadata()["pieces"])):
            data = file.get_tensor(str(number))
            yield JoinedChanges(data, [_Piece(*piece) for piece in pieces])
