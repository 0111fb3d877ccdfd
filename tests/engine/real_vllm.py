"""Real vLLM in the process of tests: what it computes with, how fast, and what a start costs."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from echo.engine.vllm.arguments import import_vllm
from tests.engine.engine_contract import SLOW


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Have vLLM in this process compute with its parameters as they are, as on a GPU."""
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.ops, "_supports_onednn", False)
        patch.setattr(layers, "check_cpu_sgl_kernel", lambda *_: False)
        yield


@pytest.fixture(autouse=True, scope="module")
def _real_vllm() -> Iterator[None]:
    """Make steps slow while something is to happen to a generation, and starts and ends cheap.

    Each of these collects garbage in all that was ever imported, which costs more than the rest.
    The first of a class of models would besides import vLLM into another process, to look at the
    class without CUDA.
    """
    import_vllm(is_cpu=True, passed={}, num_threads=1)
    from vllm.v1.engine.llm_engine import LLMEngine

    step = LLMEngine.step

    def step_slowly(vllm):  # type: ignore[no-untyped-def]
        if SLOW.is_set():
            time.sleep(0.04)
        return step(vllm)

    gc.freeze()
    registry = importlib.import_module("vllm.model_executor.models.registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLMEngine, "step", step_slowly)
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
