"""The reason of the death of vLLM's process, from its log or from the kernel; its end with ours."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo.engine.engine import is_out_of_memory
from echo.engine.vllm import plugin
from echo.engine.vllm.backend import CrashReason
from echo.engine.vllm.plugin import LOGGER, VARIABLE, listen
from tests.tasks.test_rewards import is_running, wait_until


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


# A worker, and a process that it has started: vLLM's, which loads the plugin, or another one.
PROGRAM = """
import multiprocessing, os, sys, time
from pathlib import Path
from echo.engine.vllm import plugin

def run():
    sys.modules["vllm"] = None
    try:
        plugin.register()
    except ImportError:
        part = Path(sys.argv[1], ".pid")
        part.write_text(str(os.getpid()))
        part.rename(Path(sys.argv[1], "pid"))
    time.sleep(600)

multiprocessing.get_context("fork").Process(target=run, name=sys.argv[2]).start()
time.sleep(600)
"""


@pytest.mark.parametrize(("name", "is_vllm"), [("EngineCore_DP0", True), ("Process-1", False)])
def test_the_process_of_vllm_does_not_outlive_a_worker_that_is_killed(
    name: str, is_vllm: bool, tmp_path: Path
) -> None:
    """It would keep the GPU, and the worker that is started next would find no memory there."""
    worker = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), name])
    try:
        assert wait_until((tmp_path / "pid").exists)
    finally:
        worker.kill()
        worker.wait(60)
    pid = int((tmp_path / "pid").read_text())
    if is_vllm:
        assert wait_until(lambda: not is_running(pid))
    else:
        assert is_running(pid)
        os.kill(pid, signal.SIGKILL)
