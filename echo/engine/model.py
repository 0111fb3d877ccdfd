"""Helpers for transformers models: structure, weight files, digests, device and dtype."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
from blake3 import blake3
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from echo.config.memory.models import check_unquantised, find_model, read_model_facts
from echo.config.schema import LearnerSection, ModelSection, SamplingSection, WorkerSection
from echo.core.errors import ConfigError, DataError, EngineError, StorageError
from echo.core.units import listed
from echo.engine import hub
from echo.engine.engine import Sampling
from echo.engine.stop_strings import StopStrings
from echo.engine.weights import INDEX_FILE, WEIGHTS_FILE, save_safetensors, torch_dtype
from echo.tasks import tokenization

if TYPE_CHECKING:
    from transformers import Qwen3Config, Qwen3ForCausalLM


# --- model without weights ------------------------------------------------------------------------


BUILDING = threading.Lock()
"""Lock that is held while a model is built. During a build, transformers disables initialisation
and weight tying in the whole process. Without the lock, a model built in another thread would have
untied weights.
"""


def import_architecture(directory: Path) -> None:
    """Import the code of the model that config.json describes, before the model is built.

    Raises:
        DataError: if config.json is missing, or describes no causal language model.
    """
    with explaining(directory):
        model_class(AutoConfig.from_pretrained(directory, trust_remote_code=False))


def model_class(config: Any) -> Any:
    """Import the code of a model, and return the auto class of transformers that builds it.

    Raises:
        DataError: if Echo cannot train and sample from this architecture; the message names the
            architecture and a page with the supported architectures.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder:
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        return AutoModelForImageTextToText
    name = (config.architectures or [config.model_type])[0]
    raise DataError(
        f"{name} is no causal language model of transformers, and none that reads images and could "
        "be trained on text alone: take another, docs/models.md lists families of them"
    )


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer of a text model."""
    own = getattr(config, "per_layer_config", None)  # required since transformers 5.20
    return [config if own is None else own[index] for index in range(config.num_hidden_layers)]


def head_widths(layer: Any) -> tuple[int, int]:
    """Return the widths of a head's keys and values; (0, 0) if the layer has no attention.

    Args:
        layer: the layer's configuration. Its fields have transformers' common names, also if the
            model's family has other names for them (n_head and n_embd of GPT-2).
    """
    num_heads = getattr(layer, "num_attention_heads", None)
    if not num_heads:
        return 0, 0
    if getattr(layer, "kv_lora_rank", None):  # latent attention: a field for each width
        return layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim
    width = getattr(layer, "head_dim", None) or layer.hidden_size // num_heads
    return width, width


def reads_images(directory: Path) -> bool:
    """Return whether the model in a directory reads images or sound in addition to text."""
    return has_towers(AutoConfig.from_pretrained(directory, trust_remote_code=False))


def has_towers(config: Any) -> bool:
    """Return whether a configuration's model reads images or sound in addition to text."""
    return config.get_text_config() is not config


def drop_towers(model: Any) -> Any:
    """Delete a model's layers that text does not pass through.

    These layers read images or sound, or join them to the text. Echo does not use these layers, so
    they would waste memory. The remaining layers keep their names, in memory and on disk.
    """
    base, decoder = model.base_model, model.get_decoder()
    if has_towers(model.config) and decoder is not base:
        for name, part in list(base.named_children()):
            if all(module is not decoder for module in part.modules()):
                delattr(base, name)
    return model


def choose_attention(config: Any, wanted: str) -> str:
    """Return the name of the attention implementation for a model.

    "auto" gives sdpa if sdpa is correct for the model, otherwise eager.

    sdpa is not correct for a model that caps its attention logits. Older releases of transformers
    silently ignore the cap.
    """
    if wanted != "auto":
        return wanted
    model_class(config)
    classes: list[Any] = [
        mapping[type(part)]
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs))
        for mapping in (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            MODEL_MAPPING,
        )
        if type(part) in mapping
    ]
    has_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    # The only attribute that reports this before an error; a tower's class has no other source.
    can_all = all(each._supports_sdpa for each in classes)  # noqa: SLF001
    return "sdpa" if can_all and not has_cap else "eager"


def build_meta_model(directory: Path, dtype: torch.dtype, attn_implementation: str) -> Any:
    """Return the model of config.json with uninitialised weights.

    Raises:
        DataError: if config.json is missing, or describes no causal language model.
    """
    with explaining(directory):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with BUILDING, no_init_weights():
            model: Any = model_class(config).from_config(
                config,
                dtype=dtype,
                attn_implementation=choose_attention(config, attn_implementation),
                trust_remote_code=False,
            )
    drop_towers(model)
    model.tie_weights()
    model.requires_grad_(False)
    model.eval()
    return model


UNREADABLE = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError),
    *(ValueError, StrictDataclassError),
)
"""Errors that transformers raises for a config.json from which it cannot build a model."""


@contextmanager
def explaining(directory: Path) -> Iterator[None]:
    """Raise a DataError with the reason if the block cannot build a model."""
    try:
        yield
    except UNREADABLE as error:
        raise DataError(
            f"{directory}: no causal language model can be built from its config.json: "
            f"{explain(error)}"
        ) from error


def explain(error: BaseException) -> str:
    """Return transformers' error in one line, with the remedy if it is known."""
    text = " ".join(str(error).partition("\n\n")[0].split())
    if "attention implementation" not in text:
        is_sentence = isinstance(error, OSError | ValueError | ImportError | StrictDataclassError)
        return text if is_sentence and text else f"{type(error).__name__}: {text}"
    name = text.partition(" ")[0]
    return f'{name} does not compute its attention so: set model.attn_implementation = "auto"'


def check_weights(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise if names, shapes or tied values of weights do not fit the model.

    Args:
        own: the model's state dict; names that share memory are tied.
        tensors: the weights to install; one of several tied names is enough.

    Raises:
        EngineError: listing missing and unknown names, wrong shapes, and tied names with different
            values.
    """
    places: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in own.items():
        places.setdefault((tensor.data_ptr(), *tensor.shape), []).append(name)
    missing = [" or ".join(names) for names in places.values() if not tensors.keys() & set(names)]
    unknown = [name for name in tensors if name not in own]
    wrong = [
        f"{name} {list(tensor.shape)} instead of {list(own[name].shape)}"
        for name, tensor in tensors.items()
        if name in own and tensor.shape != own[name].shape
    ]
    twice = [
        f"{first} and {second}"
        for first, *others in places.values()
        for second in others
        if first in tensors and second in tensors
        if not torch.equal(tensors[first], tensors[second])
    ]
    problems = {
        "missing": missing,
        "not in this model": unknown,
        "of the wrong shape": wrong,
        "tied by config.json but different": twice,
    }
    found = [f"{what}: {listed(names)}" for what, names in problems.items() if names]
    if found:
        raise EngineError(
            f"the weights do not fit the model, none was installed; {'; '.join(found)}; "
            "config.json and weights must come from the same model"
        )


# --- names in memory and on disk ------------------------------------------------------------------
# For some families transformers merges tensors when it reads files: the experts of a layer, one
# file entry each, become one tensor with an additional dimension. Training, images and deltas use
# only the names in memory. The names on disk are for exported directories and for vLLM.


def build_shapes(directory: Path, attn_implementation: str = "eager") -> Any | None:
    """Return the model that a directory describes, with its tensors on the meta device.

    Return None if the directory has no config.json.

    Raises:
        DataError: if config.json describes no causal language model.
    """
    if not (directory / "config.json").is_file():
        return None
    with torch.device("meta"):
        return build_meta_model(directory, torch.float32, attn_implementation)


def unrounded_names(model: Any | None) -> frozenset[str]:
    """Return the names of persistent float buffers, which are never rounded.

    For example, a router chooses experts by a bias in float32. A rounded bias would choose other
    experts.
    """
    if model is None:
        return frozenset()
    buffers = {name for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return frozenset(buffers & model.state_dict().keys())


def has_other_names_on_disk(model: Any | None) -> bool:
    """Return whether a model's tensors have different names in memory and in weight files."""
    return model is not None and bool(get_model_conversion_mapping(model, add_legacy=False))


def names_on_disk(model: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return weights under the names in the model's files.

    Tensors that transformers has merged in memory are split again.
    """
    if not has_other_names_on_disk(model):
        return tensors
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return found


# --- model directories ----------------------------------------------------------------------------


def load_directory(directory: Path, dtype: str) -> dict[str, Tensor]:
    """Return the weights of a model directory by their names in memory.

    Floating-point tensors are rounded to `dtype`, except the tensors in `unrounded_names`.

    Raises:
        DataError: if weights are missing, damaged or not in the safetensors format, or if
            transformers cannot match the files to the model.
    """
    model = build_shapes(directory)
    tensors: Iterable[tuple[str, Tensor]] = read_tensors(directory)
    if model is not None and _is_for_transformers(directory, model):
        tensors = distinct_tensors(drop_towers(_load_whole(directory))).items()
    target, unrounded = torch_dtype(dtype), unrounded_names(model)
    return {
        name: tensor.to(target) if tensor.is_floating_point() and name not in unrounded else tensor
        for name, tensor in tensors
    }


def load_towers(directory: Path) -> dict[str, Tensor]:
    """Return the float32 weights that `drop_towers` deletes from a model.

    Raises:
        DataError: for the same reasons as in `load_directory`.
    """
    model = build_shapes(directory)
    if model is None or not has_towers(model.config):
        return {}
    own = model.state_dict().keys()
    whole = distinct_tensors(_load_whole(directory))
    return {name: tensor for name, tensor in whole.items() if name not in own}


def _is_for_transformers(directory: Path, model: Any) -> bool:
    """Return whether only transformers can read a directory's weight files.

    True if transformers renames the tensors of the files, or if the files hold weights of towers
    (layers for images or sound). Otherwise safetensors suffices.
    """
    if not has_other_names_on_disk(model) and not has_towers(model.config):
        return False
    return bool(shapes_in(directory).keys() - model.state_dict().keys())


def _load_whole(directory: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with BUILDING:
            loaded: Any = model_class(config).from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, output_loading_info=True,
                dtype=torch.float32,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{directory}: cannot read the weights: {error}") from error
    model, report = loaded
    for what in ("missing_keys", "unexpected_keys"):
        if report[what]:
            raise DataError(f"{directory}: {what.replace('_', ' ')}: {sorted(report[what])[:5]}")
    return model.requires_grad_(False)


def distinct_tensors(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by name, without copies.

    Of tied tensors, only one is returned.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def weight_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of bytes of the weights. Shared memory counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}.values())


def shapes_in(directory: Path) -> dict[str, list[int]]:
    """Return the shapes of a model directory's tensors, as read from the headers of its files.

    Raises:
        DataError: for the same reasons as in `load_directory`.
    """
    found: dict[str, list[int]] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                found |= {name: file.get_slice(name).get_shape() for name in names}
        except (OSError, SafetensorError) as error:
            raise unreadable(path, error) from error
    return found


def check_weight_files(directory: Path, model: Any) -> None:
    """Check from the headers of a directory's files that the weights in them belong to a model.

    If transformers translates the names in the files, only names that the files and the model share
    are compared.

    Args:
        directory: holds the weight files.
        model: built from config.json; may be on the meta device.

    Raises:
        DataError: if a file is missing or damaged, if a tensor is missing, if a tensor has another
            shape than in the model, or if a file holds a tensor that its layer in the model lacks.
    """
    shapes, own = shapes_in(directory), model.state_dict(keep_vars=True)
    wrong = [
        f"{name} {shape} instead of {list(own[name].shape)}"
        for name, shape in shapes.items()
        if name in own and shape != list(own[name].shape)
    ]
    if wrong:
        raise DataError(
            f"{directory}: weights of the wrong shape: {listed(wrong)}; config.json and weights "
            "must come from the same model"
        )
    unknown = shapes.keys() - own.keys()
    if unknown and not has_other_names_on_disk(model):
        check_owners(directory, unknown, model)
        if len(unknown) == len(shapes) and not _with_prefix(unknown, model) & own.keys():
            raise lacking(directory, own)
    if not unknown:
        there = {id(own[name]) for name in shapes}
        named = model.named_parameters(remove_duplicate=False)
        missing = [name for name, parameter in named if id(parameter) not in there]
        if missing:
            raise lacking(directory, missing)


def check_owners(directory: Path, unknown: Iterable[str], model: Any) -> None:
    """Raise if a layer of the model would ignore weights in the files.

    The layer would then compute other values than in the model that wrote the files. Weights
    outside the model's layers, for example of a value head, may stay unused.

    Args:
        directory: holds the weight files.
        unknown: names of tensors in the files that are no parameters or persistent buffers of the
            model.
        model: built from config.json.

    Raises:
        DataError: naming these weights.
    """
    layers = {name for name, _ in model.named_modules()} - {""}
    layers |= {name.partition(".")[2] for name in layers}  # names in files that lack the prefix
    buffers = {name for name, _ in model.named_buffers()}
    ignored = model._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001 -- no public attribute
    foreign = [
        name
        for name in sorted(unknown)
        if name.rpartition(".")[0] in layers and name not in buffers
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    if foreign:
        raise DataError(
            f"{directory}: the weights {listed(foreign)} belong to layers of the model, but "
            f"{type(model).__name__} of config.json has no such parameters; config.json and "
            "weights must come from the same model"
        )


def _with_prefix(names: Iterable[str], model: Any) -> set[str]:
    """Put the prefix of the model's base before each name.

    The base is the model without its head. If files hold only the base's weights, the names in the
    files lack the prefix.
    """
    return {f"{model.base_model_prefix}.{name}" for name in names}


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error to raise for a file of weights that cannot be read."""
    is_cut = "incomplete metadata" in str(error)
    why = "the file is cut off" if is_cut else f"cannot read the weights: {error}"
    return DataError(f"{path}: {why}; {COPY_AGAIN}")


COPY_AGAIN = "copy or download it again"


def lacking(directory: Path, names: Iterable[str]) -> DataError:
    """Return the error to raise for files that lack some of a model's tensors."""
    return DataError(
        f"{directory}: the weights lack {sorted(names)[:5]}, which would start at random; is this "
        "the checkpoint of a causal language model?"
    )


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a model directory, reading one tensor at a time.

    Raises:
        DataError: for the same reasons as in `load_directory`.
    """
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 -- not a dict
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise unreadable(path, error) from error


def resolve_model(name: str, revision: str | None = None, *, key: str = "model.name") -> Path:
    """Return the directory of a model. If necessary, download the model from the hub.

    Args:
        name: a directory, or the id of a model on the hub ("Qwen/Qwen3-0.6B").
        revision: branch, tag or commit on the hub; None for its default branch.
        key: the key of the configuration that `name` comes from, for messages.

    Raises:
        ConfigError: if a revision is given for a local directory.
        DataError: if there is no model in the directory, or the model cannot be downloaded.
    """
    path = find_model(name, revision, key=key)
    if path is not None:
        return path
    found = hub.download(name, revision, key)
    check_unquantised(found)
    return found


def weight_files(directory: Path) -> list[Path]:
    """Return the paths of the safetensors files of a model directory.

    Raises:
        DataError: if there are no such files, or a file that the index names is missing.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            files = [directory / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index}: not an index of weights: {error!r}; {COPY_AGAIN}") from error
    else:
        files = [directory / WEIGHTS_FILE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        present = sorted(path.name for path in directory.glob("*")) or "nothing"
        remedy = (
            f"copy or download the whole directory again, with {INDEX_FILE} of several files"
            if any(directory.glob("*.safetensors"))
            else "only safetensors are read: convert others with transformers' save_pretrained"
        )
        raise DataError(
            f"{directory}: the weights {', '.join(missing)} are missing (found: {present}); "
            f"{remedy}"
        )
    return files


def has_all_weights(directory: Path) -> bool:
    """Return whether a directory has all its weight files."""
    try:
        return bool(weight_files(directory))
    except DataError:
        return False


# --- what a configuration says of its model -------------------------------------------------------


def make_sampling(
    sampling: SamplingSection, text: tokenization.TextCodec | None, *, likely_ids: int = 0
) -> Sampling:
    """Return the sampling settings that an engine takes.

    Args:
        sampling: the section [sampling] of the configuration.
        text: has the ids that end a completion, and decodes tokens to find stop strings. If None,
            the result has no stop ids and no stop strings.
        likely_ids: number of most likely ids to record with each token.
    """
    stop = StopStrings(sampling.stop, text.decode_all) if text and sampling.stop else None
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_completion_tokens=sampling.max_completion_tokens,
        # The model has no others, and min_tokens could not bar them.
        stop_ids=()
        if text is None
        else tuple(token for token in text.stop_ids if 0 <= token < text.vocab_size),
        likely_ids=likely_ids,
        min_tokens=sampling.min_tokens,
        stop=stop,
    )


def model_digests(
    section: ModelSection, model_dir: Path, chat_template: str | None
) -> dict[str, str]:
    """Return the hashes of the model, the tokenizer and the chat template, by name.

    The learner's and the worker's hashes must be equal.
    """
    kwargs = section.chat_template_kwargs
    digests = tokenization.tokenizer_digests(model_dir, kwargs, chat_template=chat_template)
    return {"model": model_digest(model_dir), **digests}


def model_digest(model_dir: Path) -> str:
    """Return a hash of config.json, without the fields for origin, versions and dtype."""
    fields = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    fields = tokenization.drop_code(fields)
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        fields.pop(name, None)
    return blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest()


WINDOW_FIELDS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length",
    "max_sequence_length", "seq_length", "seq_len", "max_target_positions",
)  # fmt: skip
"""Names that different families of models give to the context window in config.json."""


def context_window(model_dir: Path) -> int:
    """Return a model's longest sequence in tokens; 2^20 if there is no limit."""
    fields = fields_of_model(model_dir)
    named = [fields.get(name) for name in WINDOW_FIELDS]
    return min((size for size in named if isinstance(size, int) and size > 0), default=1 << 20)


def fields_of_model(model_dir: Path) -> dict[str, Any]:
    """Return the fields of config.json, with the fields of `text_config` on the top level."""
    fields = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return {**fields, **(fields.get("text_config") or {})}


def vocab_size(model_dir: Path) -> int:
    """Return the number of rows of the model's embedding.

    Raises:
        DataError: if config.json has no valid vocab_size.
    """
    number = fields_of_model(model_dir).get("vocab_size")
    if not isinstance(number, int):
        raise DataError(
            f"{model_dir / 'config.json'}: vocab_size = {number!r}: write the rows of the model's "
            "embedding there"
        )
    return number


def write_model_files(asset_dir: Path, assets: Mapping[str, bytes]) -> Path:
    """Write the model files that a worker has received to `asset_dir`, and return that path.

    Raises:
        DataError: if a JSON file cannot be parsed.
        StorageError: if the files cannot be written.
    """
    try:
        asset_dir.mkdir(parents=True, exist_ok=True)
        for name, data in assets.items():
            (asset_dir / name).write_bytes(tokenization.without_code(name, data))
    except OSError as error:
        raise StorageError(
            f"cannot write what this worker inherits: {error}; free disk space, or set run.dir "
            "elsewhere"
        ) from error
    return asset_dir


# --- device ---------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or of the host for a CPU, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def pick_device(name: str) -> str:
    """Return the torch device for a setting.

    "auto" is the first GPU, or the CPU if there is no GPU.

    Raises:
        ConfigError: if torch has no such device, or if this machine lacks the device.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if num_gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device = {name!r} is unknown: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        here = "no GPU" if not num_gpus else f"{num_gpus} GPUs, numbered from 0"
        raise ConfigError(
            f"device = {name!r}: PyTorch {torch.__version__} finds {here} on this machine; use "
            "auto, cpu, or one that is here"
        )
    return name


def find_gpus() -> tuple[str, list[str]]:
    """Return PyTorch's platform (for example "CUDA 13.0" or "CPU") and the GPUs."""
    hip = getattr(torch.version, "hip", None)
    build = f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return build, [
        f"{properties.name} ({properties.total_memory / 1e9:.0f} GB)"
        for properties in map(torch.cuda.get_device_properties, range(num_gpus))
    ]


def set_num_threads(num_threads: int) -> None:
    """Set torch's number of CPU threads; 0 keeps the default."""
    if num_threads:
        torch.set_num_threads(num_threads)


def free_gpu_bytes(name: str) -> int | None:
    """Return the free memory of a GPU in bytes; None for a CPU.

    Raises:
        ConfigError: if the device is not on this machine.
    """
    device = torch.device(pick_device(name))
    return free_bytes(device) if device.type == "cuda" else None


def pick_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype to compute in.

    "auto" gives bfloat16 on a GPU and float32 on any other device. For a node that computes on a
    CPU, `with_cpu_dtype` replaces "auto" by the faster dtype before this function is called.
    """
    if name == "auto":
        name = "bfloat16" if device.startswith("cuda") else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


MIN_PRODUCT = 1 << 18
"""bfloat16 is tried if a layer's matrix has at least this number of weights. In a smaller model,
conversions and norms cost more time than faster products save.
"""
MIN_GAIN = 1.5
"""Smallest speed-up over float32 at which bfloat16 is chosen. CPUs with instructions
for bfloat16 reach a speed-up of 2 to 10.
"""
TIMED_ROWS = 64
"""Number of rows of the timed matrix, one for each token. With few rows, the timing would measure
how fast the weights are read, not how fast they are multiplied.
"""
MAX_TIMED_WIDTH = 2048
"""Largest width of the timed matrix. A larger matrix is cut to this width, so that a timing takes
only milliseconds. The ratio of the two dtypes' times stays the same.
"""
NUM_TIMED = 5
"""Number of timings of each dtype. The shortest counts, so only one must be undisturbed."""


def choose_cpu_dtype(directory: Path) -> tuple[Literal["float32", "bfloat16"], str]:
    """Choose float32 or bfloat16 for a model on this CPU. Return the dtype and an explanation.

    If the dtype is float32, the explanation is empty.

    The function times a matrix product of the model's shape in both dtypes, alternately. It
    compares the shortest times, because other programs can only lengthen a time.
    """
    try:
        facts = read_model_facts(directory)
    except DataError:  # not a known model, or no config.json: the engine raises the error
        return "float32", ""
    shape = facts.hidden_size, facts.intermediate_size
    if math.prod(shape) < MIN_PRODUCT:
        return "float32", ""
    width, inner = (min(size, MAX_TIMED_WIDTH) for size in shape)
    operands = {
        dtype: (torch.ones(TIMED_ROWS, width, dtype=dtype), torch.ones(inner, width, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    best = dict.fromkeys(operands, math.inf)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads would wait for each other on a busy machine
    for _ in range(1 + NUM_TIMED):  # the first round generates the kernels
        for dtype, (rows, weights) in operands.items():
            began_at = time.perf_counter()
            torch.nn.functional.linear(rows, weights)
            best[dtype] = min(best[dtype], time.perf_counter() - began_at)
    torch.set_num_threads(num_threads)
    gain = best[torch.float32] / best[torch.bfloat16]
    if gain < MIN_GAIN:
        return "float32", ""
    return "bfloat16", (
        f"computes in bfloat16, in which this CPU multiplies {width} x {inner} matrices {gain:.1f} "
        "times as fast as in float32"
    )


def with_cpu_dtype(
    section: LearnerSection | WorkerSection, base_dir: Path
) -> tuple[LearnerSection | WorkerSection, str]:
    """If a section has `dtype = "auto"` and computes on a CPU, choose its dtype.

    Return the section, and a line about the choice; "" if nothing was chosen. For a GPU the section
    is unchanged.
    """
    if section.dtype != "auto" or pick_device(section.device) != "cpu":
        return section, ""
    dtype, note = choose_cpu_dtype(base_dir)
    return section.model_copy(update={"dtype": dtype}), note


# --- tiny model -----------------------------------------------------------------------------------
#
# A character-level Qwen3 of 100,736 parameters, small enough to learn on a laptop's CPU. It is a
# normal Hugging Face directory: AutoTokenizer and AutoModelForCausalLM load it, and every node
# treats it like any other model.


SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")

CHARACTERS = "0123456789+-*/=()<>:,;|. "

PAD_ID, BOS_ID, EOS_ID = range(3)

HEAD_DIM = 16
"""Width of the tiny model's heads: 4 heads for its width of 64."""
VLLM_HEAD_DIM = 32
"""Width of the tiny model's heads for vLLM: the smallest width that vLLM's attention on CPUs takes.
The total width of all heads stays the same, so the number of heads is halved.
"""

VOCAB_SIZE = 32
"""Number of rows of the tiny model's embedding: its 28 tokens, rounded up to a multiple of 16."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tiny model's tokenizer, with one token per character.

    A text begins with <bos>, and there is no chat template. Unknown characters become <pad>, so
    that any task's prompts can be encoded.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def shape(head_dim: int) -> dict[str, Any]:
    """Return the tiny model's dimensions as fields of its configuration.

    All query heads together are 64 wide, for any `head_dim`.
    """
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 64 // head_dim,
        "num_key_value_heads": 32 // head_dim,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "initializer_range": 0.04,
    }


def build_config(*, head_dim: int = HEAD_DIM) -> Qwen3Config:
    """Return the configuration of the tiny model."""
    from transformers import Qwen3Config  # imported here: most processes need one architecture

    return Qwen3Config(
        **shape(head_dim),
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )


def build_model(*, seed: int, head_dim: int = HEAD_DIM) -> Qwen3ForCausalLM:
    """Return the tiny model with random float32 weights.

    The state of torch's global generator is restored.
    """
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(build_config(head_dim=head_dim))


def save_tiny_model(directory: Path, model: Qwen3ForCausalLM) -> None:
    """Write a tiny model and its tokenizer as a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save_pretrained(directory)
    model.config.save_pretrained(directory)
    save_safetensors(directory, dict(model.named_parameters()))
