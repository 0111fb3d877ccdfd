"""Low-rank adapters (LoRA), trained and published in place of all weights.

The weights of the base model do not change. Beside its weight [out, in], each target module has two
small matrices A [rank, in] and B [out, rank]. The module computes with weight + alpha / rank * B A,
where `alpha` and `rank` are settings. B starts at 0, so version 0 computes the same as the base.

The image of a version holds only A and B, under the names that peft gives them in its files. A
worker reads the base from a directory. The hash of the weights in this directory (`base_digest`)
must equal the hash of the learner's base.

Engines compute base and adapter separately and never merge them. Merging would round the sum to the
engine's dtype, and so change the learner's importance ratio.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from echo.config.schema import LoraSection, ModelSection
from echo.core.errors import ConfigError, DataError
from echo.core.extras import install_command
from echo.core.paths import local_path
from echo.engine.model import (
    build_meta_model,
    build_shapes,
    check_weights,
    load_directory,
    read_tensors,
    reads_images,
    resolve_model,
)
from echo.engine.weights import dtype_name, replaced, write_tensors
from echo.records.files import write_file

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
NAME = "default"
"""Name of the adapter inside peft's modules, and of a trainer's first adapter."""
PREFIX = "base_model.model."
"""Prefix of a module's name in peft's files."""
ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""Last part of the name of the module with a layer's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A base model, the shape of its adapters, and the number of versions to keep."""

    base_dir: Path
    """Hugging Face directory with the base's weights."""
    rank: int
    alpha: int
    """Numerator of the factor alpha / rank, which scales the product of the adapter's two matrices.
    """
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Last name parts of the modules to adapt. "all-linear" means every linear layer except the
    head.
    """
    num_versions: int = 1
    """Training accepts tokens from this number of newest versions. An engine keeps these versions
    side by side if memory allows.
    """


def add_adapter(model: Any, lora: Lora) -> dict[str, Tensor]:
    """Freeze a model's weights, add an adapter, and return the adapter's tensors by name.

    torch's global generator initialises A. The adapter's tensors have the model's dtype and device
    and require no gradient.

    Raises:
        ConfigError: if peft is missing, or a target module is missing or cannot have an adapter.
    """
    dtype = next(model.parameters()).dtype
    _inject(model, lora)
    model.requires_grad_(False)
    found = {}
    for name, parameter in model.named_parameters():
        if f".{NAME}." in name and ".lora_" in name:
            parameter.data = parameter.data.to(dtype)
            found[PREFIX + name.replace(f".{NAME}.", ".")] = parameter
    return found


def draw_adapter(shapes: Mapping[str, torch.Size], *, seed: int) -> dict[str, Tensor]:
    """Return a new float32 adapter on the CPU, with peft's initial values.

    B starts at 0.

    Args:
        shapes: shapes of the adapter's tensors, by name.
        seed: seed of a separate generator. The global generator is not used.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, tensor in found.items():
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    return found


def _inject(model: Any, lora: Lora) -> Any:
    """Add an adapter to a model, and return peft's configuration of the adapter.

    In a mixture of experts, the weights of the experts may be parameters without a linear module.
    peft adapts these parameters, too, and lists their names in the configuration.
    """
    config = _peft_config(lora)
    _check_targets(model, lora.target_modules)
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        # peft sets separate ranks for experts, and warns that no module matches them, since it
        # adapts experts after all modules.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern", RuntimeWarning)
        try:
            inject_adapter_in_model(config, model, NAME)
        except ValueError as error:
            raise ConfigError(
                f"lora.target_modules: peft refuses {', '.join(lora.target_modules)} of "
                f"{type(model).__name__}: {error}; name the modules that may have an adapter, or "
                "set lora.rank = 0 to train all weights"
            ) from error
    return config


def build_adapted(
    lora: Lora, dtype: torch.dtype, attn_implementation: str
) -> tuple[Any, dict[str, Tensor]]:
    """Build the base model with an adapter for sampling.

    Returns:
        The model and the adapter's tensors.

    Raises:
        DataError: if the base's weights cannot be read.
        EngineError: if the base's weights do not fit the base's config.json.
        ConfigError: for the same reasons as in `add_adapter`.
    """
    model = build_meta_model(lora.base_dir, dtype, attn_implementation)
    own = model.state_dict()
    weights = load_directory(lora.base_dir, dtype_name(dtype))
    check_weights(own, weights)
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    return model, add_adapter(model, lora)


def base_digest(directory: Path) -> str:
    """Return a hash of the names, shapes, dtypes and values of a directory's weights.

    The hash does not depend on how the weights are divided into files.

    Raises:
        DataError: if the weights are missing or damaged.
    """
    tensors = {}
    for name, tensor in read_tensors(directory):
        values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        hashed = blake3(values.data, max_threads=blake3.AUTO).digest()
        tensors[f"{name} {tensor.dtype} {list(tensor.shape)}"] = hashed
    digest = blake3()
    for label, hashed in sorted(tensors.items()):
        digest.update(label.encode() + b"\n" + hashed)
    return digest.hexdigest()


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds an adapter in peft's format instead of a whole model."""
    return (directory / ADAPTER_FILE).is_file()


def load_adapter(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter directory by name, converted to float32.

    Raises:
        DataError: if the tensors cannot be read.
    """
    try:
        return {n: t.float() for n, t in load_file(directory / ADAPTER_FILE).items()}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{directory / ADAPTER_FILE}: cannot read the adapter: {error}") from error


def write_adapter(
    directory: Path, tensors: Mapping[str, Tensor], lora: Lora, *, base_name: str
) -> None:
    """Write an adapter's two files into an existing directory.

    Raises:
        OSError: if the files cannot be written.
    """
    targets = set(target_names(tensors))
    if EXPERTS in targets:
        config = _inject(build_shapes(lora.base_dir), lora)
    else:
        config = _peft_config(lora)
        # Full names: a tower may have modules with the same last part, but has no adapter.
        whole_names = {name[len(PREFIX) :].partition(".lora_")[0] for name in tensors}
        config.target_modules = whole_names if reads_images(lora.base_dir) else targets
    config.base_model_name_or_path = base_name
    config.inference_mode = True
    fields = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    write_tensors(
        directory / ADAPTER_FILE,
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        {"format": "pt"},
    )
    (directory / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def export_adapter(
    directory: Path,
    assets: Mapping[str, Path],
    tensors: Mapping[str, Tensor],
    lora: Lora,
    *,
    base_name: str,
) -> None:
    """Write a directory that peft can load.

    `assets` are further files to write, such as the tokenizer's.

    The directory gets its name only when it is complete.

    Raises:
        StorageError: if the disk is full or not writable. An earlier directory is kept.
    """
    with replaced(directory, "adapter") as partial:
        for name, path in assets.items():
            if name != "config.json":  # with config.json, loaders would take it for a whole model
                shutil.copyfile(path, partial / name)
        write_adapter(partial, tensors, lora, base_name=base_name)


def target_names(tensors: Iterable[str]) -> list[str]:
    """Return the last parts of the adapted modules' names, sorted."""
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})


def _peft_config(lora: Lora) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            f"lora.rank = {lora.rank} needs peft, which cannot be imported here ({error}): run "
            f"{install_command('worker', 'lora')}, or set lora.rank = 0 on the learner"
        ) from error
    all_linear = lora.target_modules == (ALL_LINEAR,)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=ALL_LINEAR if all_linear else list(lora.target_modules),
        task_type="CAUSAL_LM",
    )


def _check_targets(model: Any, wanted: tuple[str, ...]) -> None:
    """Raise a ConfigError for target modules that are missing or cannot be adapted.

    Adapters of the head and of the embedding would have no effect. Echo computes log-probabilities
    from the head's own weight, without the head's module. An embedding looks up rows of its weight
    and multiplies nothing.
    """
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if wanted == (ALL_LINEAR,):
        return
    for name in wanted:
        if name not in linear:
            raise ConfigError(
                f"lora.target_modules: {name!r} is no linear layer of {type(model).__name__} that "
                f"can have an adapter; it has {', '.join(sorted(linear))} (the head and the "
                f'embeddings cannot), or write "{ALL_LINEAR}" for all of them'
            )


# --- from a configuration -------------------------------------------------------------------------
# The learner's base is the model that the run starts from: learner.init_from if that is a whole
# model, else model.name. A worker must use a base with the learner's hash: it tries its own
# model.name first, then the directory or hub id that the learner sends.


BASE_NAME, BASE_REVISION, BASE_DIGEST = "base.name", "base.revision", "base.digest"
"""Keys of the facts about the base model that the learner sends to workers."""


def base_directory(model_dir: Path, init_from: str | None) -> Path:
    """Return the base directory: `init_from` if it is a whole model, else `model_dir`."""
    start = _initial_directory(init_from)
    return model_dir if start is None or is_adapter(start) else start


def make_lora(section: LoraSection, base_dir: Path, *, num_versions: int) -> Lora | None:
    """Return the `Lora` of a configuration; None if [lora] is off."""
    if not section.rank:
        return None
    return Lora(
        base_dir=base_dir,
        rank=section.rank,
        alpha=2 * section.rank if section.alpha is None else section.alpha,
        target_modules=section.target_modules,
        num_versions=num_versions,
    )


def initial_adapter(section: LoraSection, init_from: str | None) -> Path | None:
    """Return the directory of the adapter that a run starts from, or None.

    Raises:
        ConfigError: if the run starts from an adapter, but [lora] is off.
    """
    start = _initial_directory(init_from)
    if start is None or not is_adapter(start):
        return None
    if not section.rank:
        raise ConfigError(
            f"learner.init_from = {str(start)!r} holds an adapter and no whole model: set "
            "lora.rank to its rank to train it on, or merge it into its base (peft's "
            "merge_and_unload)"
        )
    return start


def base_name(model: ModelSection, lora: Lora, init_from: str | None) -> str:
    """Return the name by which other nodes find the base: an absolute directory or a hub id."""
    name = str(model.name)
    is_hub_id = not local_path(name).is_dir() and _is_models(lora, init_from)
    return name if is_hub_id else str(lora.base_dir.absolute())


def base_settings(
    model: ModelSection, lora: Lora, init_from: str | None, run_dir: Path, *, is_resumed: bool
) -> dict[str, Any]:
    """Return the base's name, revision and hash, to send to workers.

    Raises:
        DataError: if the base's weights are missing or have changed since the run began, or if
            base.json, which records their hash, cannot be read.
    """
    digest = base_digest(lora.base_dir)
    path = run_dir / "base.json"
    note = json.dumps({"digest": digest})
    if not is_resumed:
        write_file(path, note.encode())
    elif _noted_digest(path, note, lora) != digest:
        raise DataError(
            f"the weights in {lora.base_dir} are not those that this run's adapter was trained on; "
            "put them back, or start a new run"
        )
    revision = model.revision if _is_models(lora, init_from) else None
    name = base_name(model, lora, init_from)
    return {BASE_NAME: name, BASE_REVISION: revision, BASE_DIGEST: digest}


def _noted_digest(path: Path, note: str, lora: Lora) -> str:
    """Return the base's hash that the run recorded in base.json.

    Raises:
        DataError: if the hash cannot be read. The message contains the line to write into
            base.json.
    """
    try:
        return str(json.loads(path.read_bytes())["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} does not say which base this run's adapter was trained on ({error}): restore "
            f"it from a copy of the run, or, if {lora.base_dir} is as it was when the run "
            f"began, write this line into it: {note}"
        ) from error


def find_base(model: ModelSection, settings: Mapping[str, Any]) -> Path:
    """Return a local directory whose weights have the hash of the learner's base.

    Args:
        model: the section [model] of the worker's configuration.
        settings: settings that the learner sent. They include the learner's result of
            `base_settings`.

    Raises:
        ConfigError: if neither the worker's base nor the base that the learner names has the
            learner's hash.
    """
    tried = []
    for name, revision in (
        (model.name, model.revision),
        (settings[BASE_NAME], settings[BASE_REVISION]),
    ):
        if name is None:
            continue
        try:
            directory = resolve_model(name, revision)
            if base_digest(directory) == settings[BASE_DIGEST]:
                return directory
        except DataError as error:
            tried.append(str(error))
        else:
            tried.append(f"{name}: other weights than the learner's base")
    raise ConfigError(
        "\n  ".join(
            [
                f"the learner trains an adapter on {settings[BASE_NAME]}, and only the adapter is "
                "sent: copy that directory here and set model.name to it",
                *tried,
            ]
        )
    )


def _initial_directory(init_from: str | None) -> Path | None:
    return None if init_from is None else local_path(init_from)


def _is_models(lora: Lora, init_from: str | None) -> bool:
    """Return whether the base is `model.name`, and not `init_from`."""
    start = _initial_directory(init_from)
    return start is None or lora.base_dir != start
