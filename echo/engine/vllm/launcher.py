"""Launches of vLLM. After a shortage of memory, vLLM is launched again with smaller arguments.

* If memory runs out at vLLM's first start, fewer versions of the adapter are kept. If their number
  is already minimal, the number of concurrent rollouts is halved instead.
* If memory runs out at a later start, the number of concurrent rollouts is halved.
* If memory runs out while rollouts run, the number of rollouts and the KV cache are halved.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from echo.core.units import format_bytes
from echo.engine.engine import Concurrency, is_out_of_memory
from echo.engine.model import free_bytes
from echo.engine.vllm.arguments import MIN_VERSIONS, Process, adapter_slots
from echo.engine.vllm.backend import (
    Backend,
    Death,
    EngineDeadError,
    Facts,
    InlineBackend,
    ProcessBackend,
)
from echo.engine.vllm.probe import SwapProbe
from echo.engine.vllm.starting import alone_on_gpus

log = logging.getLogger(__name__)


class Launcher:
    """Launches vLLM with arguments that fit into memory."""

    def __init__(
        self,
        arguments: dict[str, Any],
        probe: SwapProbe,
        *,
        device: str,
        process: Process,
        num_threads: int,
        num_versions: int,
    ) -> None:
        """Store the arguments of vLLM. `launch` starts vLLM.

        Args:
            arguments: vLLM's engine arguments; the launcher lowers some of them.
            probe: probe of the weights. The probe needs blocks of the KV cache.
            device: "cpu" or "cuda".
            process: "inline" runs vLLM in this process, "engine" in processes of its own.
            num_threads: CPU threads per operation; 0 for vLLM's choice.
            num_versions: number of adapter versions to keep side by side; 1 without adapters.
        """
        self._arguments = arguments
        self._probe = probe
        self._device = device
        self._process: Process = process
        self._num_threads = num_threads
        self.num_versions = num_versions
        """Number of versions of the adapter that are kept loaded; the first launch may lower this
        number.
        """
        self.concurrency = Concurrency()
        """The limit on concurrent rollouts, which each shortage of memory halves."""

    def launch(self, *, is_first: bool = False) -> Backend:
        """Start vLLM. If memory runs out, retry with fewer rollouts.

        The first launch also retries with fewer versions of the adapter. In a later launch the
        number of versions is fixed.
        """
        while True:
            try:
                return self._start()
            except EngineDeadError as error:
                if not is_out_of_memory(str(error)):
                    raise
                if is_first and self._keep_fewer(str(error)):
                    continue
                num_rollouts = self._arguments["max_num_seqs"] - 1
                self.concurrency.halve(num_rollouts, why=str(error), numbers=self._numbers())
                self._arguments["max_num_seqs"] = self.concurrency.bounded(num_rollouts) + 1

    def _start(self) -> Backend:
        is_measuring = self._device != "cpu" and not self._arguments.get("kv_cache_memory_bytes")
        num_gpus = self._arguments.get("tensor_parallel_size", 1)
        if self._device != "cpu":
            log.info(
                "vLLM starts: on a GPU it compiles the model and captures graphs first, which may "
                "take minutes; its cache makes later starts shorter (VLLM_CACHE_ROOT), and "
                "engine.options.enforce_eager = true leaves it out"
            )
        with alone_on_gpus(num_gpus) if is_measuring else contextlib.nullcontext():
            if self._process == "inline":
                return InlineBackend(self._arguments, num_threads=self._num_threads)
            return ProcessBackend(self._arguments)

    def _keep_fewer(self, why: str) -> bool:
        """Halve the number of adapter versions; return False if the number is already minimal."""
        if self.num_versions <= MIN_VERSIONS:
            return False
        number = max(MIN_VERSIONS, self.num_versions // 2)
        log.warning(
            "out of memory (%s): %d versions in place of %d are kept side by side",
            why,
            number,
            self.num_versions,
        )
        self.num_versions = number
        self._arguments |= adapter_slots(number)
        return True

    def num_blocks(self, facts: Facts) -> int:
        """Return the number of KV cache blocks that rollouts may take."""
        return facts.num_blocks - self._spare_blocks(facts)

    def _spare_blocks(self, facts: Facts) -> int:
        """Return the number of blocks reserved for vLLM itself (one) and for the probe."""
        return 1 + facts.blocks_of(self._probe.num_tokens + 1)

    def reduce(self, death: Death, facts: Facts) -> bool:
        """Reduce concurrent rollouts and the KV cache if vLLM died because memory ran out.

        Returns:
            Whether memory ran out while rollouts ran. If so, fewer rollouts will run.

        Raises:
            EngineError: if only a single rollout was running.
        """
        if not (death.num_running and is_out_of_memory(death.reason)):
            return False
        self.concurrency.halve(death.num_running, why=death.reason, numbers=self._numbers(facts))
        limit = self.concurrency.bounded(facts.max_num_seqs - 1)
        least = self._spare_blocks(facts) + facts.blocks_of(facts.max_model_len)
        self._arguments |= {
            "max_num_seqs": limit + 1,
            "max_model_len": facts.max_model_len,  # callers rely on it
            "num_gpu_blocks_override": max(least, facts.num_blocks // 2),
        }
        return True

    def _numbers(self, facts: Facts | None = None) -> str:
        parts = [f"the weights take {format_bytes(self._probe.weight_bytes)}"]
        if facts is not None:
            blocks = f"{facts.num_blocks} blocks of {facts.block_size} tokens"
            parts.append(f"the KV cache has {blocks}")
        # Asking for a GPU's free memory creates a CUDA context, which itself takes memory.
        if self._device == "cpu" or torch.cuda.is_initialized():
            free = free_bytes(torch.device(self._device))
            parts.append(f"free are {format_bytes(free)}")
        return ", ".join(parts)
