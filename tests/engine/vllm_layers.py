"""Real vLLM that computes with its parameters as they are, as on a GPU, on a CPU too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Have vLLM in this process pack nothing of what it loads meanwhile."""
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.ops, "_supports_onednn", False)
        patch.setattr(layers, "check_cpu_sgl_kernel", lambda *_: False)
        yield
