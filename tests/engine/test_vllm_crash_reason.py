"""The reason of another process's death: from its log, or from the kernel."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo.engine.engine import is_out_of_memory
from echo.engine.vllm import plugin
from echo.engine.vllm.backend import CrashReason
from echo.engine.vllm.plugin import LOGGER, VARIABLE, listen


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger(LOGGER)
    before = list(logger.handlers)
    listen()
    listen()
    assert len(logger.handlers) <= len(before) + 1
    yield logger
    logger.handlers[:] = before


def log_failure(logger: logging.Logger, text: str, error: Exception) -> None:
    try:
        raise error
    except type(error):
        logger.exception(text)


def test_the_error_that_ends_a_process_is_left_in_a_file(logger: logging.Logger) -> None:
    words = CrashReason()
    with words.recorded():
        assert words.read() == ""
        # Those of a request that fails are not the end.
        log_failure(logger, "Invocation of %s method failed", ValueError("not this"))
        logger.error("EngineCore without an error")
        assert words.read() == ""
        error = RuntimeError("CUDA out of memory.\nTried to allocate 2 GiB")
        log_failure(logger, "EngineCore encountered a fatal error.", error)
    assert VARIABLE not in os.environ
    assert words.read() == "RuntimeError: CUDA out of memory."
    assert is_out_of_memory(words.read())
    # After that nobody is told any more.
    log_failure(logger, "EngineCore failed to start.", ValueError("another"))
    assert words.read() == "RuntimeError: CUDA out of memory."
    words.close()
    words.close()
    assert words.read() == ""


def test_a_process_that_the_kernel_has_killed_was_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 7\noom_kill 3\npgfault 9\n")
    monkeypatch.setattr(plugin, "VMSTAT", vmstat)
    words = CrashReason()
    assert words.read(was_killed=True) == "", "it was somebody else who killed it"
    vmstat.write_text("nr_free_pages 7\noom_kill 4\npgfault 9\n")
    assert words.read() == "", "it was another process that was killed"
    assert is_out_of_memory(words.read(was_killed=True))
    words.close()
    monkeypatch.setattr(plugin, "VMSTAT", tmp_path / "none")
    words = CrashReason()
    assert words.read(was_killed=True) == ""
    words.close()
