"""Entry point by which vLLM's processes load our plugin.

The group is `vllm.general_plugins` in pyproject.toml. Nothing is imported from vLLM until it asks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from echo.engine.engine import describe_error

VARIABLE = "ECHO_VLLM_CRASH_REASON"
"""Names the file, to vLLM's processes."""

LOGGER = "vllm.v1.engine.core"
PREFIX = "EngineCore "
"""Prefix of the records of a death, at the start or later."""

VMSTAT = Path("/proc/vmstat")


class _Writer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        path = os.environ.get(VARIABLE)
        error = record.exc_info[1] if record.exc_info else None
        if path and error is not None and str(record.msg).startswith(PREFIX):
            with contextlib.suppress(OSError):
                Path(path).write_text(describe_error(error), encoding="utf-8")


def listen() -> None:
    """Leave this process's crash reason where it is told to; may be called more than once."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, _Writer) for handler in logger.handlers):
        logger.addHandler(_Writer())


def count_kills() -> int:
    """Return how many processes the kernel has killed for their memory since it was started."""
    try:
        lines = VMSTAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


BACKEND = "echo"
"""The name under which vLLM knows our way of handing weights over."""

WORKER_EXTENSION = "echo.engine.vllm.transfer.WorkerExtension"
"""Further methods of its workers."""


def register() -> None:
    """Make the weight transfer backend known, and hear of deaths; may be called more than once."""
    listen()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    # vLLM offers no question for it, and refuses a second registration.
    if BACKEND not in Factory._registry:  # noqa: SLF001
        Factory.register_engine(BACKEND, "echo.engine.vllm.transfer", "TransferEngine")
