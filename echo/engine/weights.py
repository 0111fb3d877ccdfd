"""Weights on their way: model directory to tensors to the byte image of a version, and back.

An image is the tensors one after the other, sorted by name, each at a multiple of
ALIGNMENT_BYTES so that a worker can use it in place. Tensors that share storage (a language-model
head tied to the embedding) are in it once, under the name that the model registers first.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from echo.core.errors import ConfigError, DataError, EngineError, StorageError
from echo.weights.manifest import TensorSpec

Weights: TypeAlias = Mapping[str, Tensor]
"""Tensors by name, tied ones once."""

ALIGNMENT_BYTES = 16
"""A multiple of every element size; usual shapes leave no gap at it."""

MAX_SHARD_BYTES = 5_000_000_000
"""Size above which Hugging Face itself starts another file by default."""

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""What is fetched from the hub: no code, and weights only in a format that cannot hold code."""

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`, such as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"dtype {name!r} is unknown; use one of {', '.join(FLOAT_DTYPES)}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which a dtype travels."""
    return str(dtype).removeprefix("torch.")


def publish_image(
    state: Mapping[str, Tensor], dtype: str
) -> tuple[tuple[TensorSpec, ...], bytearray]:
    """Lay a state dict out as one byte image.

    Args:
        state: tensors by name, on any device, in the order in which the model registers them.
        dtype: "bfloat16", "float16" or "float32"; floating-point tensors are rounded to it, to
            nearest even. Others keep their dtype.

    Returns:
        Where each tensor lies, sorted by name, and the bytes.
    """
    specs, tensors = lay_out(state, dtype)
    image = bytearray(image_bytes(specs))
    write_image(specs, tensors, host_bytes(image))
    return specs, image


def lay_out(
    state: Mapping[str, Tensor], dtype: str
) -> tuple[tuple[TensorSpec, ...], dict[str, Tensor]]:
    """Return where each tensor of a state dict lies in its image, and the tensors as they are.

    Arguments as for `publish_image`.
    """
    target = torch_dtype(dtype)
    tensors = dict(sorted(_untie(state).items()))
    specs = []
    end = 0
    for name, tensor in tensors.items():
        published = target if tensor.is_floating_point() else tensor.dtype
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        num_bytes = tensor.numel() * published.itemsize
        specs.append(
            TensorSpec(name, dtype_name(published), tuple(tensor.shape), offset, num_bytes)
        )
        end = offset + num_bytes
    return tuple(specs), tensors


def image_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the length of an image that is laid out like this."""
    return specs[-1].offset + specs[-1].num_bytes if specs else 0


def write_image(specs: Iterable[TensorSpec], tensors: Weights, image: Tensor) -> None:
    """Write tensors to their places in an image, rounded where they are: one after the other.

    Args:
        specs: the places.
        tensors: by name, on any device.
        image: uint8 [num_bytes], on any device; the gaps stay as they are.
    """
    for spec in specs:
        tensor = tensors[spec.name].detach().to(torch_dtype(spec.dtype)).contiguous()
        image[spec.offset : spec.offset + spec.num_bytes].copy_(_as_bytes(tensor))


def host_bytes(image: bytearray) -> Tensor:
    """Return memory as a tensor, uint8 [num_bytes], that shares it."""
    return _view(memoryview(image), torch.uint8, len(image), 0)


def tensors_from_image(specs: Iterable[TensorSpec], image: memoryview) -> dict[str, Tensor]:
    """Return the tensors of an image as views of its memory: nothing is copied.

    The caller keeps the memory alive and unchanged for as long as it uses them. Writing to a
    view of read-only memory is undefined.

    Raises:
        EngineError: if a tensor does not fit into the image or its own shape.
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


def save_hf(
    directory: Path,
    model_dir_assets: Mapping[str, Path],
    tensors: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` loads.

    It appears whole or not at all; one of the same name is replaced.

    Args:
        directory: where to.
        model_dir_assets: files to put beside the weights, by name (`asset_files`). The dtype in
            config.json is set to that of the tensors, so that loading rounds nothing.
        tensors: the weights; of tied ones only the first is written.
        max_shard_bytes: weights beyond it are spread over several files with an index.

    Raises:
        StorageError: if the disk is full or not writable; what was there before is kept.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    previous = directory.with_name(f"{directory.name}.previous")
    try:
        for leftover in (partial, previous):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, path in model_dir_assets.items():
            shutil.copyfile(path, partial / name)
        _set_dtype(partial / "config.json", tensors)
        save_safetensors(partial, tensors, max_shard_bytes=max_shard_bytes)
        if directory.exists():
            directory.rename(previous)
        partial.rename(directory)
        shutil.rmtree(previous, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"{directory}: the model could not be written: {error}") from error


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file that has the permissions of an ordinary new file.

    The library gives it those of a private temporary file, so that others cannot read an export.

    Raises:
        OSError: if it cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode & 0o777
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:  # an OSError in its own wrapping
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(mode)


def save_safetensors(
    directory: Path, tensors: Mapping[str, Tensor], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors into a directory as model.safetensors, or as shards with an index."""
    shards: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in sorted(_untie(tensors).items()):
        num_bytes = tensor.numel() * tensor.element_size()
        if not shards or num_bytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor.detach().cpu().contiguous()
        room -= num_bytes
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


def load_directory(directory: Path, dtype: str) -> dict[str, Tensor]:
    """Read the safetensors of a model directory, floating-point ones rounded to `dtype`.

    Raises:
        DataError: if weights are missing, damaged, or in a format that is not safetensors.
    """
    target = torch_dtype(dtype)
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 -- not a dict
                    tensor = file.get_tensor(name)
                    tensors[name] = tensor.to(target) if tensor.is_floating_point() else tensor
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: cannot read the weights: {error}") from error
    return tensors


def resolve_model(name: str, revision: str | None = None) -> Path:
    """Return the directory of a model, downloading it from the hub where it is not local.

    Args:
        name: a directory, or the id of a model on the hub ("Qwen/Qwen3-0.6B").
        revision: branch, tag or commit on the hub; None for its default branch.

    Raises:
        ConfigError: if a revision is asked of a local directory.
        DataError: if there is no such directory, or the hub cannot deliver.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"model.revision = {revision!r} has no effect on the local directory {path}; "
                "remove it"
            )
        return path
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"model.name = {name!r}: no such directory (looked at {path.absolute()})")
    return _download(name, revision)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=DOWNLOAD_PATTERNS))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        # Offline, the hub's own message speaks of its cache and not of what to do.
        raise DataError(
            f"model.name = {name!r} is neither a directory here nor available from the hub "
            f"(revision {revision or 'default'}): {type(error).__name__}: "
            f"{str(error).splitlines()[0]}; without a network set model.name to a local directory"
        ) from error


def _untie(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep the first of all tensors that are the same memory in the same layout."""
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


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _set_dtype(config_path: Path, tensors: Mapping[str, Tensor]) -> None:
    config: dict[str, Any] = json.loads(config_path.read_bytes())
    dtypes = {dtype_name(t.dtype) for t in tensors.values() if t.is_floating_point()}
    if len(dtypes) == 1:
        config.pop("torch_dtype", None)  # the name before transformers 5
        config["dtype"] = dtypes.pop()
        config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors of a model directory.

    Raises:
        DataError: if there are none, or not all that its index names.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index}: not an index of weights: {error!r}") from error
        files = [directory / name for name in names]
    else:
        files = [directory / WEIGHTS_FILE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        present = sorted(path.name for path in directory.glob("*")) or "nothing"
        raise DataError(
            f"{directory}: the weights {', '.join(missing)} are missing (found: {present}); "
            "only safetensors are read: convert others with transformers' save_pretrained"
        )
    return files
