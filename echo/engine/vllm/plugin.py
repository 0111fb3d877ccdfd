"""Entry point by which vLLM's processes load our plugin.

pyproject.toml registers the entry point, in the group PLUGIN_GROUP. The module imports nothing from
vLLM until vLLM calls `register`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from multiprocessing import current_process, parent_process
from pathlib import Path

from echo.engine.engine import describe_error
from echo.tasks.processes.guard import end_with

PLUGIN_GROUP = "vllm.general_plugins"
"""Group of entry points that vLLM calls in each of its processes."""

ENTRY_POINT = "echo.engine.vllm.plugin:register"

VARIABLE = "ECHO_VLLM_CRASH_REASON"
"""Environment variable with the path of the file for crash reasons."""

LOGGER = "vllm.v1.engine.core"
PREFIX = "EngineCore "
"""Prefix of vLLM's log messages about a failed start or a later death."""

VMSTAT = Path("/proc/vmstat")


class _Writer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        path = os.environ.get(VARIABLE)
        error = record.exc_info[1] if record.exc_info else None
        if path and error is not None and str(record.msg).startswith(PREFIX):
            with contextlib.suppress(OSError):
                Path(path).write_text(describe_error(error), encoding="utf-8")


def listen() -> None:
    """Have this process write its crash reason to the file that VARIABLE names.

    A second call does nothing.
    """
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, _Writer) for handler in logger.handlers):
        logger.addHandler(_Writer())


def count_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory."""
    try:
        lines = VMSTAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


PROCESS_NAME = "EngineCore"
"""Beginning of the names of the processes that vLLM starts in ours. They start all others."""


def end_with_worker() -> None:
    """If vLLM has started this process in a process of Echo, end when that process ends.

    Otherwise vLLM would outlive a worker that is killed, and would keep the GPU. The processes that
    vLLM starts here end with this process by themselves.
    """
    worker = parent_process()
    if worker is not None and current_process().name.startswith(PROCESS_NAME):
        end_with(worker.pid or 0)


BACKEND = "echo"
"""Name of our weight transfer backend in vLLM's registry."""

WORKER_EXTENSION = "echo.engine.vllm.transfer.WorkerExtension"
"""Class whose methods vLLM adds to its workers."""


def register() -> None:
    """Register the weight transfer backend and the log handler.

    In vLLM's own process, also have it end with ours. A second call does nothing.
    """
    listen()
    end_with_worker()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    # vLLM has no public query for a registered backend, and refuses a second registration.
    if BACKEND not in Factory._registry:  # noqa: SLF001
        Factory.register_engine(BACKEND, "echo.engine.vllm.transfer", "TransferEngine")
