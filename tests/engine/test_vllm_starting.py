"""Starts of vLLM that fail: each likely cause is named with its remedy. Nothing here needs vLLM."""

from __future__ import annotations

import errno
import fcntl
import logging
import shutil
import sysconfig
import tempfile
import threading
from importlib import metadata
from pathlib import Path

import pytest

from echo.engine.vllm import plugin, starting
from echo.engine.vllm.starting import (
    alone_on_gpus,
    find_missing_compiler,
    find_missing_plugin,
    with_remedy,
)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (
            "AssertionError: Error in memory profiling. Initial free memory 60.0 GiB, current free "
            "memory 70.0 GiB. This happens when other processes sharing the same container release "
            "GPU memory while vLLM is profiling during initialization.",
            "set engine.options.kv_cache_memory_bytes",
        ),
        (
            "ValueError: Free memory on device cuda:0 (20.1/139.8 GiB) on startup is less than "
            "desired GPU memory utilization (0.85, 118.9 GiB). Decrease GPU memory utilization or "
            "reduce GPU memory used by other processes.",
            "set engine.options.gpu_memory_utilization to this worker's share",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing",
            "raise engine.options.kv_cache_memory_bytes, or on a GPU gpu_memory_utilization",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (40960), "
            "(4.4 GiB KV cache is needed, which is larger than the available KV cache memory",
            "lower engine.options.max_model_len",
        ),
        (
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable "
            "or set triton.knobs.build.impl.",
            "install gcc and the headers of Python",
        ),
        (
            "InductorError: CalledProcessError: Command '['/usr/bin/gcc', '/tmp/t/cuda_utils.c']' "
            "returned non-zero exit status 1.",
            "install gcc and the headers of Python",
        ),
        (
            "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(",
            'set engine.kind = "transformers"',
        ),
        (
            "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least "
            "8.0. Your Tesla T4 GPU has compute capability 7.5.",
            'set worker.dtype = "float32"',
        ),
        (
            "CUDA error: no kernel image is available for execution on the device",
            "update the driver",
        ),
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12020).",
            "update the driver",
        ),
        ("OSError: [Errno 28] No space left on device", "VLLM_CACHE_ROOT"),
        (
            "ValidationError: 1 validation error for ModelConfig\n  Value error, User-specified "
            "max_model_len (144) is greater than the derived max_model_len (128.0)",
            "lower engine.options.max_model_len to the model's window",
        ),
        ("no answer in 600 s", "VLLM_LOGGING_LEVEL=INFO in the environment"),
    ],
)
def test_each_likely_cause_comes_with_its_remedy(reason: str, remedy: str) -> None:
    told, reason = with_remedy(reason), " ".join(reason.split()).rstrip(".")
    assert told.startswith(f"{reason}. ")
    assert remedy.lower() in told.removeprefix(reason).lower()
    assert "\n" not in told


def test_a_cause_that_is_not_known_is_told_on_one_line() -> None:
    assert with_remedy("ValueError: no such\n  kernel.") == "ValueError: no such kernel."
    program = "x = 1\n" * 10_000
    told = with_remedy(f"InductorError: in\n{program}CalledProcessError: gcc")
    assert told.startswith("InductorError: in x = 1 x = 1")
    assert told.endswith("install gcc and the headers of Python (python3-dev)")
    assert len(told) < 800


def test_a_missing_compiler_and_missing_headers_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", {"gcc": "/usr/bin/gcc"}.get)
    monkeypatch.delenv("CC", raising=False)
    assert find_missing_compiler() == (
        f"{tmp_path / 'Python.h'} is missing: install the headers of Python (python3-dev)"
    )
    (tmp_path / "Python.h").touch()
    assert find_missing_compiler() == ""
    monkeypatch.setattr(shutil, "which", {}.get)
    assert find_missing_compiler() == "a C compiler is missing: install gcc"
    monkeypatch.setenv("CC", "/opt/cc")
    assert find_missing_compiler() == ""


def test_processes_that_would_not_find_the_plugin_are_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = metadata.EntryPoint("echo", plugin.ENTRY_POINT, plugin.PLUGIN_GROUP)
    other = metadata.EntryPoint("other", "other:register", plugin.PLUGIN_GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [other])
    assert "Echo is on Python's path but not installed" in find_missing_plugin()
    monkeypatch.setattr(metadata, "entry_points", lambda group: [other, own])
    for chosen, is_found in ((None, True), ("other,echo", True), ("other", False), ("", False)):
        with monkeypatch.context() as patch:
            if chosen is not None:
                patch.setenv("VLLM_PLUGINS", chosen)
            assert (find_missing_plugin() == "") == is_found


def test_the_entry_point_is_the_packages() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."{plugin.PLUGIN_GROUP}"]\necho = "{plugin.ENTRY_POINT}"' in text


def test_one_vllm_starts_on_a_gpu_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    caplog.set_level(logging.INFO)
    has_begun = threading.Event()

    def start() -> None:
        with alone_on_gpus(2):
            has_begun.set()

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1,2")
    with alone_on_gpus(1):  # the third GPU
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")
        start()  # on the others
        assert has_begun.is_set()
        has_begun.clear()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
        thread = threading.Thread(target=start)
        thread.start()
        while "waiting for another vLLM that starts on GPU 3" not in caplog.text:
            assert thread.is_alive()
        assert not has_begun.is_set()
    thread.join(10)
    assert has_begun.is_set()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    start()
    assert {path.name for path in tmp_path.iterdir()} == {
        f"echo-vllm-gpu-{gpu}.lock" for gpu in "0123"
    }


def test_another_start_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(starting, "MAX_WAIT_S", 0)
    with alone_on_gpus(1), alone_on_gpus(1):
        assert "vLLM starts on GPU 0 beside another one, after 0 s" in caplog.text


def test_a_lock_that_cannot_be_made_stops_no_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with alone_on_gpus(1):
        assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_stops_no_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as Lustre without the option flock, if TMPDIR lies there."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone_on_gpus(2):
        assert len(list(tmp_path.iterdir())) == 2
