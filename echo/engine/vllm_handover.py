"""Weights on their way into a running vLLM: in memory where it shares ours, else as a file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from echo.core.errors import EngineError
from echo.engine.lora import Lora, write_adapter
from echo.engine.vllm_backend import Backend
from echo.engine.weights import save_safetensors

MEMORY = Path("/dev/shm")
"""Where a file is memory that vLLM's processes can map."""


def hand_over(
    backend: Backend,
    tensors: Mapping[str, Tensor],
    tag: str,
    *,
    clears_cache: bool,
    lora: Lora | None,
    is_same_process: bool,
) -> None:
    """Have vLLM take weights over; what it samples from then on has their tag.

    Args:
        backend: the running vLLM.
        tensors: all weights, or those of the adapter.
        tag: not used before.
        clears_cache: whether keys and values are thrown away and computed anew.
        lora: the adapter's shape; None where all weights are swapped.
        is_same_process: whether vLLM runs in this process.

    Raises:
        EngineDeadError: if that fails at any point; the engine is of no use any more.
        EngineError: if there is no room for the file; nothing has changed then.
    """
    if lora is None and is_same_process:
        from echo.engine.vllm_transfer import HANDED_OVER

        key = f"{id(backend):x} {tag}"
        HANDED_OVER[key] = tensors
        try:
            backend.update({"key": key}, tag, clears_cache=clears_cache)
        finally:
            del HANDED_OVER[key]
        return
    try:
        with tempfile.TemporaryDirectory(
            prefix="echo-", dir=MEMORY if MEMORY.is_dir() else None
        ) as directory:
            if lora is not None:
                write_adapter(Path(directory), tensors, lora, base_name="")
                where = {"adapter": directory}
            else:
                save_safetensors(Path(directory), tensors, max_shard_bytes=1 << 62)
                [path] = Path(directory).iterdir()
                where = {"path": str(path)}
            backend.update(where, tag, clears_cache=clears_cache)
    except OSError as error:
        raise EngineError(f"no room to hand the weights to vLLM: {error}") from error
