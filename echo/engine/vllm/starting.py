"""Starts of vLLM: remedies for failed starts, and a lock for one start per GPU at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

from echo.engine.vllm.plugin import ENTRY_POINT, PLUGIN_GROUP

log = logging.getLogger(__name__)

MAX_WAIT_S = 600.0
"""Longest wait, in seconds, until another vLLM on the same GPU has started."""

POLL_S = 0.1
"""Seconds between two attempts to take the lock of a GPU."""

REMEDIES = (
    (
        "Error in memory profiling",
        "Another process gave back memory of this GPU while vLLM measured it: set "
        "engine.options.kv_cache_memory_bytes, so that vLLM measures nothing",
    ),
    (
        "less than desired GPU memory utilization",
        "Other processes hold memory of this GPU, nvidia-smi lists them: end them, or set "
        "engine.options.gpu_memory_utilization to this worker's share",
    ),
    (
        "No available memory for the cache blocks|Cannot auto-fit max_model_len",
        "The weights leave no memory for the KV cache: raise engine.options.kv_cache_memory_bytes, "
        "or on a GPU gpu_memory_utilization, or take a GPU with more memory",
    ),
    (
        "greater than the derived max_model_len",
        "Lower engine.options.max_model_len to the model's window",
    ),
    (
        "larger than the available KV cache memory",
        "Lower engine.options.max_model_len, or raise engine.options.kv_cache_memory_bytes, or on "
        "a GPU gpu_memory_utilization",
    ),
    (
        r"Failed to find C compiler|CalledProcessError|Python\.h",
        "Triton compiles C code when vLLM starts: install gcc and the headers of Python "
        "(python3-dev)",
    ),
    (
        "No valid attention backend",
        "vLLM has no attention for heads of this size on this GPU: set engine.kind = "
        '"transformers"',
    ),
    (
        "Bfloat16 is only supported on GPUs",
        'This GPU is too old for bfloat16: set worker.dtype = "float32"',
    ),
    (
        "no kernel image is available|driver version is insufficient|driver on your system is too",
        "This build of PyTorch and vLLM does not fit the GPU or its driver: update the driver, or "
        'set engine.kind = "transformers"',
    ),
    (
        "No space left on device",
        "Free space on the disk, or name another by VLLM_CACHE_ROOT and TMPDIR",
    ),
    (
        "^no answer in ",
        "VLLM_LOGGING_LEVEL=INFO in the environment shows how far it comes, and engine.options."
        "enforce_eager = true leaves out the compilation",
    ),
)
"""Patterns of messages of failed starts, and the remedy for each pattern."""


MAX_REASON = 600
"""Number of characters of a reason that are shown. Compiler errors can quote whole programs."""


def with_remedy(reason: str) -> str:
    """Return the reason for a failed start on one line, with the remedy if it is known."""
    text = textwrap.shorten(reason, MAX_REASON, placeholder=" ...")
    for pattern, remedy in REMEDIES:
        if re.search(pattern, reason):
            return f"{text.rstrip('. ')}. {remedy}"
    return text


def find_missing_compiler() -> str:
    """Return what is missing for Triton to compile C code; "" if nothing is missing.

    Even if something is missing, vLLM may start, because Triton's cache may hold the compiled code.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler is None:
        return "a C compiler is missing: install gcc"
    if not header.is_file():
        return f"{header} is missing: install the headers of Python (python3-dev)"
    return ""


def find_missing_plugin() -> str:
    """Return the reason why vLLM's processes cannot find Echo's plugin, or ""."""
    points = metadata.entry_points(group=PLUGIN_GROUP)
    if not any(point.value == ENTRY_POINT for point in points):
        return (
            "Echo is on Python's path but not installed, so vLLM's processes do not find it; "
            'install it, or set engine.process = "inline"'
        )
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and not {p.name for p in points if p.value == ENTRY_POINT} & set(
        chosen.split(",")
    ):
        return f"VLLM_PLUGINS = {chosen!r} leaves out Echo's plugin; add echo to it"
    return ""


@contextmanager
def alone_on_gpus(num_gpus: int) -> Iterator[None]:
    """Hold a lock on each of the first `num_gpus` GPUs while the block starts vLLM on them.

    vLLM measures the free memory of a GPU before and after a trial run. If another vLLM started on
    the same GPU in between, the first start would fail or compute a wrong memory share. If a lock
    is not free after MAX_WAIT_S, the block runs without it. If the process dies in the block, its
    locks are released, too.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(num_gpus)]
    with ExitStack() as stack:
        for gpu in sorted(gpu.strip() for gpu in gpus[:num_gpus]):
            stack.enter_context(_lock_of(gpu))
        yield


@contextmanager
def _lock_of(gpu: str) -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"echo-vllm-gpu-{gpu.replace('/', '-')}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:  # such as a file of another user
        log.debug("no lock for GPU %s: %s", gpu, error)
        yield
        return
    try:
        is_waiting, give_up_at = False, time.monotonic() + MAX_WAIT_S
        while not _take(descriptor):
            if not is_waiting:
                log.info("waiting for another vLLM that starts on GPU %s", gpu)
                is_waiting = True
            if time.monotonic() >= give_up_at:
                log.warning("vLLM starts on GPU %s beside another one, after %g s", gpu, MAX_WAIT_S)
                break
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Return whether to wait no longer: the lock is taken, or there is none to take."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks, as some of clusters are
        log.debug("no lock for a GPU: %s", error)
    return True
