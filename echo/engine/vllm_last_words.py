"""Why a vLLM in processes of its own has died, which it tells nobody but its log.

Its process logs the error and ends; ours only learns that it is gone. So a handler of ours listens
to that log over there, and leaves the error in a file that is read here. A process that the kernel
kills to get memory back says nothing at all: the kernel's own counter has it then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo.engine.concurrency import describe

VARIABLE = "ECHO_VLLM_LAST_WORDS"
"""Names the file, to vLLM's processes."""

LOGGER = "vllm.v1.engine.core"
PREFIX = "EngineCore "
"""What the records of a death begin with, at the start or later."""

VMSTAT = Path("/proc/vmstat")


class LastWords:
    """The file of one vLLM, and what the kernel has done since."""

    def __init__(self) -> None:
        """Make the file, empty."""
        handle, path = tempfile.mkstemp(prefix="echo-vllm-", suffix=".txt")
        os.close(handle)
        self._path = Path(path)
        self._num_kills = _num_kills()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Have the processes that start meanwhile know the file."""
        os.environ[VARIABLE] = str(self._path)
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)

    def read(self, *, was_killed: bool = False) -> str:
        """Return why vLLM died; empty if nobody knows.

        Args:
            was_killed: whether one of its processes ended by SIGKILL, and not by ours.
        """
        with contextlib.suppress(OSError):
            text = self._path.read_text(encoding="utf-8")
            if text:
                return text
        if was_killed and _num_kills() > self._num_kills:
            return "killed by the kernel, as this machine was out of memory"
        return ""

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class _Writer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        path = os.environ.get(VARIABLE)
        error = record.exc_info[1] if record.exc_info else None
        if path and error is not None and str(record.msg).startswith(PREFIX):
            with contextlib.suppress(OSError):
                Path(path).write_text(describe(error), encoding="utf-8")


def listen() -> None:
    """Leave the last words of this process where it is told to; may be called more than once."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, _Writer) for handler in logger.handlers):
        logger.addHandler(_Writer())


def _num_kills() -> int:
    """Return how many processes the kernel has killed for their memory since it was started."""
    try:
        lines = VMSTAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
