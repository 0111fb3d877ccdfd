"""Weights as tensors, as the image of a version, and as deltas.

An image contains the tensors one after the other, sorted by name. Each tensor begins at a multiple
of ALIGNMENT_BYTES, so a worker can use the tensor in place. Tensors that share storage, such as a
head tied to the embedding, appear once, under the name that the model registers first.
"""

from __future__ import annotations

import bisect
import json
import logging
import math
import mmap
import os
import shutil
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from echo.core.errors import EngineError, StorageError
from echo.core.rollout import KEEP_VERSIONS, PolicyVersion
from echo.core.units import format_bytes
from echo.weights.delta import (
    SPARSE_SHARE,
    UNCHANGED,
    CodedBlock,
    WordBytes,
    decode_block,
    encode_changes,
    encode_delta,
    hash_old,
    most_sparse,
    word_bytes_of,
)
from echo.weights.manifest import TensorSpec
from echo.weights.store.memory import RecycledMemory, touched_memory
from echo.weights.store.patches import Patch

# --- tensors, images and files --------------------------------------------------------------------


Weights: TypeAlias = Mapping[str, Tensor]
"""Tensors by name. Of tied tensors, only one is included."""

CopyStream: TypeAlias = torch.cuda.Stream
"""CUDA stream on which a GPU copies weights while training runs."""

ALIGNMENT_BYTES = 16
"""Alignment of each tensor in an image: a multiple of every element size. Tensors of usual shapes
have no gaps between them.
"""

MAX_SHARD_BYTES = 5_000_000_000
"""Largest size of a file of weights, in bytes; Hugging Face's default."""

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOAT_DTYPES = ("float32", "bfloat16", "float16")

_PATTERNS: dict[WordBytes, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of a word -> integer dtype in which differences of bit patterns wrap around."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`, such as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"dtype {name!r} is unknown; use one of {', '.join(FLOAT_DTYPES)}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in a `TensorSpec`, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def publish_image(
    state: Mapping[str, Tensor], dtype: str
) -> tuple[tuple[TensorSpec, ...], bytearray]:
    """Write a state dict into a new byte image. The arguments are those of `lay_out`.

    Returns:
        The place of each tensor in the image, sorted by name, and the image's bytes.
    """
    specs, tensors = lay_out(state, dtype)
    image = bytearray(image_bytes(specs))
    write_image(specs, tensors, host_bytes(image))
    return specs, image


def lay_out(
    state: Mapping[str, Tensor], dtype: str, unrounded: Set[str] = frozenset()
) -> tuple[tuple[TensorSpec, ...], dict[str, Tensor]]:
    """Return the place of each tensor in a state dict's image, and the tensors to write.

    Args:
        state: tensors by name, on any device, in the order in which the model registers them.
        dtype: "bfloat16", "float16" or "float32". Floating-point tensors are rounded to this dtype,
            to nearest even. Other tensors keep their dtype.
        unrounded: names of floating-point tensors that keep their dtype, too.
    """
    tensors = dict(sorted(_untie(state).items()))
    return find_places(tensors, dtype, unrounded), tensors


def find_places(
    tensors: Mapping[str, Tensor], dtype: str, unrounded: Set[str] = frozenset()
) -> tuple[TensorSpec, ...]:
    """Return the place of each tensor in an image, sorted by name.

    No two tensors may be tied. Only shapes and dtypes are read. Arguments as for `lay_out`.
    """
    target = torch_dtype(dtype)
    specs = []
    end = 0
    for name, tensor in sorted(tensors.items()):
        is_rounded = tensor.is_floating_point() and name not in unrounded
        published = target if is_rounded else tensor.dtype
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        num_bytes = tensor.numel() * published.itemsize
        specs.append(
            TensorSpec(name, dtype_name(published), tuple(tensor.shape), offset, num_bytes)
        )
        end = offset + num_bytes
    return tuple(specs)


def round_tensors(
    tensors: Weights, dtype: torch.dtype, unrounded: Set[str] = frozenset()
) -> dict[str, Tensor]:
    """Return weights that are rounded like the weights of a published version.

    Arguments as for `lay_out`.
    """
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and name not in unrounded else tensor
        for name, tensor in tensors.items()
    }


def image_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the length, in bytes, of an image whose tensors have the places `specs`."""
    return specs[-1].offset + specs[-1].num_bytes if specs else 0


PIECE_NUMBERS = 32 << 20
"""Number of elements that are rounded at a time in a copy between devices."""


def write_image(
    specs: Iterable[TensorSpec], tensors: Weights, image: Tensor, *, is_beside: bool = False
) -> None:
    """Round tensors and write them to their places in an image.

    Args:
        specs: the places of the tensors.
        tensors: the tensors by name, on any device.
        image: uint8 [num_bytes], on any device; the gaps are left unchanged.
        is_beside: whether to return before the copies to the host are complete. The device's
            current stream then completes the copies.
    """
    places, sources = list[Tensor](), list[Tensor]()
    for spec in specs:
        place, tensor = image[spec.offset : spec.offset + spec.num_bytes], tensors[spec.name]
        if tensor.device == image.device:
            numbers = place.view(torch_dtype(spec.dtype)).view(tensor.shape)
            places.append(numbers)
            sources.append(tensor.detach())
        else:
            round_into(place, spec.dtype, tensor.detach(), is_beside=is_beside)
    if places:  # a GPU copies all of them in a few launches
        torch._foreach_copy_(places, sources)


def round_into(place: Tensor, dtype: str, tensor: Tensor, *, is_beside: bool = False) -> None:
    """Round a tensor and write it to its place, uint8 [num_bytes], on any device.

    Between devices, this rounds on the source device and copies the rounded elements. `copy_` alone
    would copy the unrounded elements and round on the target.
    """
    target = place.view(torch_dtype(dtype))
    if tensor.device == target.device:
        target.view(tensor.shape).copy_(tensor)  # nothing is allocated
        return
    numbers = tensor.reshape(-1)
    for start in range(0, numbers.numel(), PIECE_NUMBERS):
        piece = slice(start, start + PIECE_NUMBERS)
        target[piece].copy_(numbers[piece].to(target.dtype), non_blocking=is_beside)


def host_bytes(image: bytearray | memoryview) -> Tensor:
    """Return a tensor, uint8 [num_bytes], that shares the memory of `image`."""
    return _view(memoryview(image), torch.uint8, len(image), 0)


def find_nonfinite(tensors: Weights) -> list[str]:
    """Return the names of weights with NaN or infinity, in the order of `tensors`."""
    # One pass of `aminmax` finds both bounds, and NaN propagates into them. `isfinite` would
    # allocate a mask for each tensor.
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
        and tensor.numel()
        and not all(bool(bound.isfinite()) for bound in tensor.aminmax())
    ]


def tensors_from_image(specs: Iterable[TensorSpec], image: memoryview) -> dict[str, Tensor]:
    """Return the tensors of an image as views of its memory.

    The caller must keep the memory alive and unchanged while it uses the tensors. Writing to a view
    of read-only memory is undefined.

    Raises:
        EngineError: if a tensor's bytes lie outside the image or do not match its shape.
    """
    tensors = {}
    for spec in specs:
        dtype = torch_dtype(spec.dtype)
        numel = math.prod(spec.shape)
        if spec.num_bytes != numel * dtype.itemsize or not (
            0 <= spec.offset <= spec.offset + spec.num_bytes <= image.nbytes
        ):
            raise EngineError(
                f"tensor {spec.name}: {spec.num_bytes} bytes at {spec.offset} do not fit "
                f"{spec.dtype}{list(spec.shape)} in an image of {image.nbytes} bytes"
            )
        tensors[spec.name] = _view(image, dtype, numel, spec.offset).view(spec.shape)
    return tensors


@dataclass(frozen=True, slots=True, eq=False)
class TensorChange:
    """The changes of a patch to one tensor in one block of the image."""

    name: str
    where: Tensor | int
    """Indices of the changed elements in the flattened tensor. If the elements are contiguous, this
    has only the index of the first element.
    """
    values: Tensor
    """New values of the elements, in the dtype of the image."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the indices and the values."""
        return self.values.nbytes + (0 if isinstance(self.where, int) else self.where.nbytes)

    def store(self, own: Tensor) -> None:
        """Write the new values into `own`, a contiguous tensor of any dtype and device."""
        target, values = own.view(-1), self.values
        if isinstance(self.where, int):
            target[self.where : self.where + values.numel()] = values.to(target)
            return
        pattern = _PATTERNS.get(target.dtype.itemsize)  # type: ignore[call-overload]
        if target.device.type == "cpu" and pattern is not None:  # numpy is ten times as fast
            bits = values.to(target.dtype).view(pattern).numpy()
            target.view(pattern).numpy()[self.where.numpy()] = bits
        else:
            target[self.where.to(target.device)] = values.to(target)


def changes(patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> Iterator[TensorChange]:
    """Yield the changes that a patch has made, tensor by tensor within each block.

    Args:
        patch: the changed words of each block.
        image: the image with the patch applied.
        specs: the place of each tensor in the image, in order of offset.
    """
    for number, block in patch.blocks.items():
        has_no_words = block.where is not None and not block.where.size
        if has_no_words and block.new_tail == block.old_tail:
            continue  # such a block has words of 1 byte, unlike its tensors
        start = number * patch.block_bytes
        stop = min(start + patch.block_bytes, len(image))
        for spec in overlapping(specs, start, stop):
            dtype = torch_dtype(spec.dtype)
            if block.where is None or block.new.itemsize != dtype.itemsize:
                first = max(start, spec.offset) - spec.offset
                last = min(stop, spec.offset + spec.num_bytes) - spec.offset
                piece = image[spec.offset + first : spec.offset + last]
                values = _view(piece, dtype, len(piece) // dtype.itemsize, 0)
                yield TensorChange(spec.name, first // dtype.itemsize, values)
                continue
            shift = (spec.offset - start) // dtype.itemsize
            last = shift + math.prod(spec.shape)
            low, high = np.searchsorted(block.where, (shift, last))
            if low < high:
                where = torch.from_numpy(block.where[low:high] - shift)
                values = torch.from_numpy(block.new[low:high].view(f"i{dtype.itemsize}"))
                yield TensorChange(spec.name, where, values.view(dtype))


@torch.no_grad()
def scatter(
    patch: Patch, image: memoryview, specs: Sequence[TensorSpec], own: Mapping[str, Tensor]
) -> None:
    """Write the changes of a patch into tensors of any dtype and device.

    `own` has the contiguous tensors to write to, by name. Other arguments as for `changes`.
    """
    for change in changes(patch, image, specs):
        change.store(own[change.name])


def overlapping(specs: Sequence[TensorSpec], start: int, stop: int) -> Iterator[TensorSpec]:
    """Yield the tensors that overlap the bytes [start, stop) of an image."""
    first = bisect.bisect_right(specs, start, key=lambda spec: spec.offset) - 1
    for spec in specs[max(first, 0) :]:
        if spec.offset >= stop:
            return
        if spec.offset + spec.num_bytes > start:
            yield spec


def save_hf(
    directory: Path,
    model_dir_assets: Mapping[str, Path],
    tensors: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a directory that transformers' `from_pretrained` loads.

    The directory gets its name only when it is complete. The directory replaces an earlier
    directory of this name.

    Args:
        directory: the directory to write.
        model_dir_assets: further files to write, by name (`asset_files`). The dtype in config.json
            is set to the tensors' dtype, so that loading does not round.
        tensors: the weights. Of tied tensors only the first is written.
        max_shard_bytes: largest size of a file. Larger weights go to several files with an index.

    Raises:
        StorageError: if the disk is full or not writable. An earlier directory is kept.
    """
    with replaced(directory, "model") as partial:
        for name, path in model_dir_assets.items():
            shutil.copyfile(path, partial / name)
        _set_dtype(partial / "config.json", tensors)
        save_safetensors(partial, tensors, max_shard_bytes=max_shard_bytes)


@contextmanager
def replaced(directory: Path, what: str) -> Iterator[Path]:
    """Yield a new directory. If the block succeeds, the new directory replaces `directory`.

    Raises:
        StorageError: if the disk is full or not writable. An earlier directory is kept.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    previous = directory.with_name(f"{directory.name}.previous")

    def put_back() -> None:
        if previous.exists() and not directory.exists():
            previous.rename(directory)

    try:
        put_back()  # after a crash between the two renames below
        for leftover in (partial, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if directory.exists():
            directory.rename(previous)
        partial.rename(directory)
        shutil.rmtree(previous, ignore_errors=True)
    except OSError as error:
        with suppress(OSError):
            put_back()
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"{directory}: the {what} could not be written: {error}") from error


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions of an ordinary new file.

    safetensors itself would create a file that other users cannot read.

    Raises:
        OSError: if the file cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode & 0o777
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:  # safetensors wraps an OSError
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(mode)


def save_safetensors(
    directory: Path, tensors: Mapping[str, Tensor], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors as model.safetensors, or as shards with an index."""
    shards: list[dict[str, Tensor]] = []
    space = 0
    for name, tensor in sorted(_untie(tensors).items()):
        num_bytes = tensor.numel() * tensor.element_size()
        if not shards or num_bytes > space:
            shards.append({})
            space = max_shard_bytes
        shards[-1][name] = tensor.detach().cpu().contiguous()
        space -= num_bytes
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS_FILE]
    weight_map: dict[str, str] = {}
    for file_name, shard in zip(names, shards, strict=True):
        write_tensors(directory / file_name, shard, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _untie(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name, without repeated views of the same memory."""
    seen: set[tuple[object, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in seen:
            seen.add(place)
            kept[name] = tensor
    return kept


def _view(image: memoryview, dtype: torch.dtype, numel: int, offset: int) -> Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    with warnings.catch_warnings():
        # A received image may be read-only; nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(image, dtype=dtype, count=numel, offset=offset)


def _set_dtype(config_path: Path, tensors: Mapping[str, Tensor]) -> None:
    config: dict[str, Any] = json.loads(config_path.read_bytes())
    dtypes = {dtype_name(t.dtype) for t in tensors.values() if t.is_floating_point()}
    if len(dtypes) == 1:
        config.pop("torch_dtype", None)  # the name before transformers 5
        config["dtype"] = dtypes.pop()
        config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# --- delta on the device --------------------------------------------------------------------------
# The learner keeps the last published image on its device. The device finds the words that differ
# in the new image and subtracts them, at the speed of its memory. The host receives and packs an
# index and a difference per change. After a small step they take about 4 % of a bf16 image. The
# coded blocks are byte for byte those of echo.weights.delta, so receivers need not know where a
# block was coded. A block that is not sparse is copied to the host and coded there. One thread
# launches this work. It waits for the device once for the numbers of changes, and once for each
# BATCH_BYTES of changes, which come in two copies per PIECE_BYTES of the image. It sleeps while it
# waits. It makes no copy into unpinned memory and reads no single number from the device: each
# would hold the CUDA context until the device has finished, and so block the thread that launches
# the training step.
# The host's copy of the new image needs no transfer either: the host applies decode_block() to the
# coded blocks, with the image of the version before as base.


MIN_BLOCK_BYTES = 4 << 10
"""Blocks with fewer bytes than this number are coded on the host, because the header of a coded
block may take more bytes than the coding saves.
"""


PIECE_BYTES = 128 << 20
"""Number of image bytes that are compared at a time. A comparison allocates one byte per word."""
PACKERS = 4
"""Number of threads that pack the changes of a version."""
BATCH_BYTES = 256 << 20
"""Approximate bytes of changes per transfer to the host. The device and the host each allocate a
buffer of this size. The host's buffer is pinned.
"""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive blocks that are compared in one operation. All their words have the same size."""

    blocks: range
    start: int
    stop: int
    word_bytes: WordBytes

    @property
    def pattern(self) -> torch.dtype:
        return _PATTERNS[self.word_bytes]


class DeviceDelta:
    """The changes between two images on one device, coded block by block on that device.

    The host waits for the device once to get the number of changes in every block, and then once
    for each BATCH_BYTES of changes.
    """

    def __init__(
        self, old: Tensor, new: Tensor, tensors: Sequence[TensorSpec], *, block_bytes: int
    ) -> None:
        """Count, for each block, the words that differ between two images.

        Args:
            old: the bytes of an image, uint8 [num_bytes], contiguous. Both images must stay
                unchanged until `encode` has ended.
            new: the bytes of the next image, of the same length and on the same device.
            tensors: the place of each tensor in the images, in order of offset.
            block_bytes: image bytes per block, a multiple of 16.

        Raises:
            EngineError: if the images differ in length or device, or `new` is not uint8.
        """
        if (new.shape, new.dtype, new.device) != (old.shape, torch.uint8, old.device):
            raise EngineError(
                f"an image of {new.dtype}{list(new.shape)} on {new.device} cannot follow one of "
                f"{old.dtype}{list(old.shape)} on {old.device}"
            )
        self._old, self._new = old, new
        self._block_bytes = block_bytes
        self._spans: list[tuple[int, int]] = [
            (piece.start, piece.stop) for piece in _pieces(new.numel(), block_bytes)
        ]
        self._word_bytes = [word_bytes_of(tensors, *span) for span in self._spans]
        self._plan = list(self._split())
        found = [self._count(piece) for piece in self._plan]
        [counts] = copy_to_host([torch.cat(found)]) if found else [np.empty(0, np.int32)]
        self._counts: list[int] = counts.tolist()

    @property
    def changed_share(self) -> float:
        """Share of the image's words that have changed, 0 to 1."""
        num_words = sum((p.stop - p.start) // p.word_bytes for p in self._plan)
        return sum(self._counts) / num_words if num_words else 0.0

    def encode(self, held: memoryview, pool: Executor | None = None) -> Iterator[CodedBlock]:
        """Yield, in order, the coded blocks that turn the old image into the new image.

        Args:
            held: the old image on the host.
            pool: threads that pack several blocks at a time. If None, this thread packs the blocks.
        """
        batch: list[_Piece] = []
        num_bytes = 0
        for piece in self._plan:
            batch.append(piece)
            num_bytes += self._num_crossing(piece)
            if num_bytes > BATCH_BYTES:
                yield from self._encode(batch, held, pool)
                batch, num_bytes = [], 0
        yield from self._encode(batch, held, pool)

    def _split(self) -> Iterator[_Piece]:
        sizes: list[WordBytes] = [
            1 if (stop - start) % word else word
            for (start, stop), word in zip(self._spans, self._word_bytes, strict=True)
        ]
        most, first = max(1, PIECE_BYTES // self._block_bytes), 0
        for index in range(1, len(sizes) + 1):
            if index == len(sizes) or sizes[index] != sizes[first] or index - first == most:
                start, stop = self._spans[first][0], self._spans[index - 1][1]
                yield _Piece(range(first, index), start, stop, sizes[first])
                first = index

    def _words(self, piece: _Piece) -> tuple[Tensor, Tensor]:
        images = (self._old, self._new)
        old, new = (image[piece.start : piece.stop].view(piece.pattern) for image in images)
        return old, new

    def _count(self, piece: _Piece) -> Tensor:
        old, new = self._words(piece)
        differs, per_block = old != new, self._block_bytes // piece.word_bytes
        num_whole = differs.numel() // per_block
        whole, rest = differs[: num_whole * per_block], differs[num_whole * per_block :]
        counts = whole.view(num_whole, per_block).sum(1, dtype=torch.int32)
        return torch.cat([counts, rest.sum(dtype=torch.int32)[None]]) if rest.numel() else counts

    def _crosses_whole(self, index: int) -> bool:
        """Return whether a block is copied to the host as a whole and coded there."""
        start, stop = self._spans[index]
        num_bytes, word_bytes = stop - start, self._word_bytes[index]
        is_small = num_bytes < MIN_BLOCK_BYTES or num_bytes % word_bytes > 0
        return is_small or self._counts[index] > most_sparse(num_bytes // word_bytes)

    def _num_changes(self, piece: _Piece) -> int:
        return sum(self._counts[i] for i in piece.blocks if not self._crosses_whole(i))

    def _num_crossing(self, piece: _Piece) -> int:
        num_bytes: int = self._num_changes(piece) * (4 + piece.word_bytes)
        whole = (self._spans[i] for i in piece.blocks if self._crosses_whole(i))
        return num_bytes + sum(stop - start for start, stop in whole)

    def _find(self, piece: _Piece) -> tuple[Tensor, Tensor]:
        """Return two tensors: each changed word's index in the block, and new minus old value.

        Words in blocks that are copied as a whole are left out.
        """
        old, new = self._words(piece)
        per_block = self._block_bytes // piece.word_bytes
        differs = old != new
        for index in piece.blocks:
            if self._counts[index] and self._crosses_whole(index):
                first = (index - piece.blocks.start) * per_block
                differs[first : first + per_block] = False
        # With a known size the host need not wait for the device.
        found = torch.nonzero_static(differs, size=self._num_changes(piece)).flatten()
        return found.remainder(per_block).to(torch.int32), new[found] - old[found]

    def _encode(
        self, batch: Sequence[_Piece], held: memoryview, pool: Executor | None
    ) -> Iterator[CodedBlock]:
        sparse = [piece for piece in batch if self._num_changes(piece)]
        whole = [i for piece in batch for i in piece.blocks if self._crosses_whole(i)]
        found = [self._find(piece) for piece in sparse]
        crossing = [each for pair in found for each in pair]
        crossing += [self._new[slice(*self._spans[index])] for index in whole]
        copied = copy_to_host(crossing)
        images = dict(zip(whole, copied[len(crossing) - len(whole) :], strict=True))
        changes: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}
        for number, piece in enumerate(sparse):
            where, steps = copied[2 * number : 2 * number + 2]
            end = 0
            for index in piece.blocks:
                if not self._crosses_whole(index):
                    first, end = end, end + self._counts[index]
                    changes[index] = where[first:end], steps[first:end]

        def code(index: int) -> CodedBlock:
            base = held[slice(*self._spans[index])]
            if index in images:
                word_bytes = self._word_bytes[index]
                return encode_delta(base, images[index].data, word_bytes=word_bytes)
            if not self._counts[index]:
                return CodedBlock(bytes([UNCHANGED]), hash_old(np.empty(0, np.uint8)))
            where, steps = changes[index]
            steps, places = steps.view(f"<u{steps.itemsize}"), where.astype(np.int64)
            replaced = np.take(np.frombuffer(base, steps.dtype), places)
            return CodedBlock(encode_changes(places, steps), hash_old(replaced))

        indices = [index for piece in batch for index in piece.blocks]
        yield from map(code, indices) if pool is None else pool.map(code, indices)


def copy_to_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Copy tensors of one device to the host, and wait for the device only once."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    copied = [torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors]
    for target, tensor in zip(copied, tensors, strict=True):
        target.copy_(tensor, non_blocking=True)
    _wait_for(tensors[0].device)
    return [tensor.numpy() for tensor in copied]


def _wait_for(device: torch.device) -> None:
    """Sleep until a GPU's current stream has finished, without spinning on a core."""
    event: Any = torch.cuda.Event(blocking=True)
    torch.cuda.current_stream(device).record_event(event)
    event.synchronize()


# --- image of each version ------------------------------------------------------------------------
# The image of a version is on the host. If the weights are on a GPU, the image is transferred
# during the next step, in one of two ways. The memory budget (config/memory/) chooses by whether
# the GPU also has memory for the last image.
#
#     in host memory   weights --rounded--> image on the host           (the coder compares)
#
#     on the GPU       weights -> image there --+--> changed words --> coded blocks on the host
#                            last image there --+                        |
#                               host image of the last version ----------+--> host image of this one
# "In host memory" needs no lasting GPU memory. The GPU copies the whole image from the weights into
# pinned pages, on a separate stream. The trainer waits for that stream before it changes the
# weights (train/weights.py). Until then the copy has the time of a forward and a backward pass. "On
# the GPU" copies about 4 % of the image, and the host need not search for changes. The GPU holds
# two images: the new image is rounded before the next step, and compared with the last image during
# that step. Nothing reads the weights by then, so no update waits for the comparison. The host
# decodes the coded blocks on the same base as receivers do. So the host's image, which is hashed
# and signed, equals the image of the receivers. In three cases the whole image is copied, and its
# delta coded on the host: if more than SPARSE_SHARE of the words changed, if the set or layout of
# the tensors changed, and after a restart.
# Host and GPU each write two images in turns. An image is overwritten only once its copy has
# arrived and nothing reads it any more. Until then the learner puts off the next version, but not
# its next step (`prepare`). The host makes memory for both images with the first version, and
# touches all pages. First touches cost more than the rest of making a version. If an older image is
# read for long, a thread makes memory for a third image.


_log = logging.getLogger(__name__)


def image_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeroed memory for an image, pinned if this process uses a GPU.

    Raises:
        EngineError: if the host cannot pin the pages.
    """
    cuda: Any = torch.cuda
    if not cuda.is_initialized() or not num_bytes:
        return touched_memory(num_bytes)
    return pinned(np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8))  # a page belongs to one image


def pinned(piece: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pin mapped memory for direct copies if this process uses a GPU.

    torch's own allocator of pinned memory would round the size up to a power of two.

    Raises:
        EngineError: if the host cannot pin the pages.
    """
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return piece
    runtime, address = cuda.cudart(), piece.ctypes.data
    if int(runtime.cudaHostRegister(address, piece.nbytes, 0)):
        raise EngineError(
            f"the host cannot pin {format_bytes(piece.nbytes)} of its memory for a version: leave "
            "it more (--dry-run shows how much), or train a smaller model"
        )
    weakref.finalize(piece, runtime.cudaHostUnregister, address).atexit = False
    return piece


@dataclass(frozen=True, slots=True)
class CodedDelta:
    """A delta: coded blocks that make a later image from a base version's image."""

    base: PolicyVersion
    block_bytes: int
    """Number of image bytes that each block codes."""
    blocks: tuple[CodedBlock, ...]
    """All blocks of the image, in order, as `encode_delta` returns them."""


@dataclass(frozen=True, slots=True)
class VersionImage:
    """The image of a version on the host, perhaps still incomplete."""

    specs: tuple[TensorSpec, ...]
    memory: memoryview
    """The image's bytes, valid once `ready` is done."""
    ready: Future[CodedDelta | None] | None = None
    """Future that is done when `memory` is complete; None if `memory` was complete at once. The
    future's result is the delta against the previous version, or None if the device coded no delta.
    """


@dataclass(frozen=True, slots=True)
class _Last:
    version: PolicyVersion
    specs: tuple[TensorSpec, ...]
    memory: memoryview
    image: Tensor


class VersionImages:
    """Makes the images of versions, one after the other."""

    helpers = ()
    """Processes that map the images and help to code the changes. Only a learner with several ranks
    has helpers (`train/ranks/sharded_images.py`).
    """

    def __init__(
        self,
        dtype: str,
        *,
        block_bytes: int,
        is_on_device: bool | None = None,
        unrounded: Set[str] = frozenset(),
        copy_stream: CopyStream | None = None,
    ) -> None:
        """Start without an image. The first version is copied as a whole.

        Args:
            dtype: dtype of the floating-point tensors in the image.
            block_bytes: image bytes per coded block.
            is_on_device: whether to keep the last image on the weights' device and find the changes
                there. If None, this is done only on a CUDA device.
            unrounded: names of floating-point tensors that keep their own dtype.
            copy_stream: stream of the weights' device, in which images are copied to the host. The
                trainer waits for the stream before it changes the weights. The stream is used only
                if the host finds the changes. If the host finds them and `copy_stream` is None,
                `make` itself waits for the copy.
        """
        self._dtype = dtype
        self._unrounded = unrounded
        self._block_bytes = block_bytes
        self._is_on_device = False if block_bytes % ALIGNMENT_BYTES else is_on_device
        self._stream = copy_stream
        self._comparing: CopyStream | None = None
        """Stream that compares and copies images on a GPU; the trainer does not wait for it."""
        self._thread = ThreadPoolExecutor(1, "image")
        self._ready: Future[CodedDelta | None] | None = None
        self._growing: Future[None] | None = None
        self._last: _Last | None = None
        self._spare: Tensor | None = None
        """Device memory of the image before the last image. The next image reuses this memory."""
        # Host memory of the last version's image and of the image being made.
        self._memory = RecycledMemory(2, image_memory, max_pieces=KEEP_VERSIONS + 1)

    def prepare(self) -> bool:
        """Return whether `make` can run without waiting.

        If memory for the next image is missing, start to allocate it.
        """
        if any(each is not None and not each.done() for each in (self._ready, self._growing)):
            return False
        if self._memory.can_grow and not self._memory.has_free:
            self._growing = self._thread.submit(self._memory.grow)
            return False
        return self._memory.has_free

    def make(self, weights: Weights, version: PolicyVersion) -> VersionImage:
        """Return the image of a version. Its bytes may arrive later."""
        under_way: list[Future[Any] | None] = [self._ready, self._growing]
        wait([each for each in under_way if each is not None])
        specs, tensors = lay_out(weights, self._dtype, self._unrounded)
        device = self.device_of(weights)
        if device is not None:
            try:
                return self._make_on_device(specs, tensors, version, device)
            except torch.OutOfMemoryError:
                self._leave(device)
        self._last = self._ready = self._spare = None
        memory = self._memory.take(image_bytes(specs))
        if self._stream is None:
            write_image(specs, tensors, host_bytes(memory))
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                write_image(specs, tensors, host_bytes(memory), is_beside=True)
            has_arrived = self._stream.record_event(torch.cuda.Event(blocking=True))
            self._ready = self._thread.submit(has_arrived.synchronize)
        return VersionImage(specs, memory, self._ready)

    def device_of(self, weights: Weights) -> torch.device | None:
        """Return the device that finds the changes; None if the host finds them."""
        devices = {tensor.device for tensor in weights.values()}
        if len(devices) != 1 or self._is_on_device is False:
            return None
        [device] = devices
        return device if self._is_on_device or device.type == "cuda" else None

    def _leave(self, device: torch.device) -> None:
        _log.warning(
            "%s has no space for the last version beside the training: whole versions are copied "
            "to the host from now on",
            device,
        )
        self._is_on_device = False

    def _make_on_device(
        self,
        specs: tuple[TensorSpec, ...],
        tensors: Weights,
        version: PolicyVersion,
        device: torch.device,
    ) -> VersionImage:
        last, self._last = self._last, None
        spare, self._spare = self._spare, None
        if last is not None and (last.specs, last.image.device) != (specs, device):
            last = spare = None  # frees their memory for the new image
        # A spare image has the same layout, so its gaps are zeros as well.
        new = spare
        if new is None:
            new = torch.zeros(image_bytes(specs), dtype=torch.uint8, device=device)
        write_image(specs, tensors, new)
        memory = self._memory.take(new.numel())
        self._last = _Last(version, specs, memory, new)
        if device.type == "cuda":
            if self._comparing is None:
                # Of high priority: its few kernels would otherwise wait behind the step's kernels.
                self._comparing = torch.cuda.Stream(device, priority=-1)
            self._comparing.wait_stream(torch.cuda.current_stream(device))
        self._ready = self._thread.submit(self._export, self._last, last)
        return VersionImage(specs, memory, self._ready)

    def _export(self, made: _Last, last: _Last | None) -> CodedDelta | None:
        """Copy an image to the host. Return the delta if the device has coded a delta."""
        # Without a stream the block runs as usual. When it ends, the device has run all of its
        # work.
        with torch.cuda.stream(self._comparing):
            return self._export_on_stream(made, last)

    def _export_on_stream(self, made: _Last, last: _Last | None) -> CodedDelta | None:
        try:
            if last is not None:
                delta = DeviceDelta(
                    last.image, made.image, made.specs, block_bytes=self._block_bytes
                )
                if delta.changed_share <= SPARSE_SHARE:
                    coded = self._follow(last, made, delta)
                    self._spare = last.image  # the device has finished reading the image
                    return coded
        except torch.OutOfMemoryError:
            self._leave(made.image.device)
        host_bytes(made.memory).copy_(made.image, non_blocking=True)
        if made.image.device.type == "cuda":
            _wait_for(made.image.device)
        if last is not None and self._is_on_device is not False:
            self._spare = last.image
        return None

    def _follow(self, last: _Last, made: _Last, delta: DeviceDelta) -> CodedDelta:
        """Apply a delta to the host's last image to make the new image. Return the coded delta."""
        held, memory = last.memory, made.memory
        with ThreadPoolExecutor(min(PACKERS, os.cpu_count() or 1), "changes") as pool:
            blocks = tuple(delta.encode(held, pool))
            pieces = _pieces(len(memory), self._block_bytes)

            def decode(block: CodedBlock, piece: slice) -> None:
                decode_block(memoryview(block.coded), held[piece], memory[piece])

            for _ in pool.map(decode, blocks, pieces):
                pass
        return CodedDelta(last.version, self._block_bytes, blocks)


def _pieces(num_bytes: int, block_bytes: int) -> Iterator[slice]:
    stops: Sequence[int] = [*range(0, num_bytes, block_bytes), num_bytes]
    return (slice(start, stop) for start, stop in pairwise(stops))
