"""Sample with vLLM: the engine for throughput, with weights swapped while it runs.

A swap is a transaction. The new weights are checked against the model's shape, handed over while
generation is paused for a moment (vLLM's own lifecycle), and probed: the engine's log-probabilities
of a fixed prompt must be those of transformers under the same tensors. If they are not, the version
before is put back and the error says so. An update that fails half way leaves a model that is
neither: vLLM is then started anew with the last version that was found right, as it is after any
other death. That version's tensors stay in host memory, where they arrived, never on a GPU.

`kv_cache` decides about keys and values of rollouts under way; see `echo.engine.engine`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.core.units import format_bytes
from echo.engine.available_memory import available_bytes
from echo.engine.concurrency import Concurrency, is_out_of_memory
from echo.engine.device import set_num_threads
from echo.engine.engine import UNVERSIONED, Completion, Engine, KvCache, Request, Sampling
from echo.engine.lora import Lora
from echo.engine.version_fence import VersionFence
from echo.engine.vllm_arguments import (
    Process,
    import_vllm,
    kv_cache_bytes,
    make_arguments,
)
from echo.engine.vllm_backend import Backend, Death, EngineDeadError, EngineWasDeadError, Facts
from echo.engine.vllm_call import Call, Room, make_params
from echo.engine.vllm_handover import hand_over
from echo.engine.vllm_probe import Probe

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Deaths in a row, without a swap that worked in between, after which vLLM is given up."""

TIMEOUT_S = 120.0
"""Seconds that vLLM may take for one step, or one call of a swap."""


@dataclass(frozen=True, slots=True, eq=False)
class _Installed:
    """Weights that were found right, and what the probe gives under them."""

    tensors: Mapping[str, Tensor]
    version: PolicyVersion
    expected: npt.NDArray[np.float32]


class VllmEngine(Engine):
    """Sample from a causal language model with vLLM.

    Args:
        model_dir: directory with config.json; weights in it are not read.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16" or "float16".
        process: "inline" runs vLLM in this process, "engine" in processes of its own.
        kv_cache: what becomes of keys and values when weights are swapped in flight.
        arguments: engine arguments of vLLM, passed through.
        memory_budget_bytes: memory for weights and KV cache together; None for vLLM's own share of
            a GPU, and on a CPU for a quarter of what is available, at most 4 GiB.
        num_threads: CPU threads of one operation; 0 for vLLM's choice.
        timeout_s: seconds without an answer after which vLLM counts as dead.
        lora: the adapter that `load` takes, and its base in place of `model_dir`; None where it
            takes all weights.

    Raises:
        EngineError: if vLLM is not installed, or cannot run this model with these arguments.
    """

    is_continuous = True

    def __init__(
        self,
        model_dir: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        process: Process = "inline",
        kv_cache: KvCache = "recompute",
        arguments: Mapping[str, Any] | None = None,
        memory_budget_bytes: int | None = None,
        num_threads: int = 0,
        timeout_s: float = TIMEOUT_S,
        lora: Lora | None = None,
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise EngineError(
                f'vLLM takes the GPUs that it sees: in place of worker.device = "{device}" set '
                'CUDA_VISIBLE_DEVICES and worker.device = "cuda"'
            )
        passed = dict(arguments or {})
        is_cpu = device == "cpu"
        import_vllm(is_cpu=is_cpu, passed=passed, num_threads=num_threads)
        self.timeout_s = timeout_s
        self._device = device
        self._process: Process = process
        self._num_threads = num_threads
        self._clears_cache = kv_cache == "recompute"
        self._lora = lora
        self._probe = Probe(Path(model_dir), dtype, lora)
        self._arguments = make_arguments(
            Path(model_dir) if lora is None else lora.base_dir,
            is_cpu=is_cpu,
            dtype=dtype,
            kv_cache_bytes=kv_cache_bytes(
                memory_budget_bytes, self._probe.weight_bytes, is_cpu=is_cpu
            ),
            process=process,
            passed=passed,
            lora_rank=0 if lora is None else lora.rank,
            lora_targets=self._probe.lora_targets,
        )
        self._fence = VersionFence()
        self._lock = threading.RLock()
        self._serials = itertools.count(1)
        self._tag = ""
        self._versions: dict[str, PolicyVersion | None] = {}
        self._good: _Installed | None = None
        self._num_restarts = 0
        self._is_closed = False
        self._concurrency = Concurrency()
        self._room = Room()
        self._backend = self._start()
        self.window = self._backend.facts.max_model_len

    # --- the contract ----------------------------------------------------------------------------

    @property
    def installed(self) -> PolicyVersion | None:
        """The version that samples."""
        return self._fence.installed

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion = UNVERSIONED) -> None:
        """Swap weights in flight, probe them, and go back if they are not what samples."""
        with self._fence.swap(version):
            set_num_threads(self._num_threads)  # of this thread, which may be any
            expected = self._probe.expected(tensors)
            self._swap(_Installed(tensors, version, expected))

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        should_stop: Callable[[], bool],
        on_tokens: Callable[[int], None] = lambda _: None,
        on_completion: Callable[[Completion], None] = lambda _: None,
        min_version: PolicyVersion | None = None,
        exact_version: PolicyVersion | None = None,
    ) -> list[Completion]:
        """Sample a completion for each request, beside whatever else runs."""
        with self._fence.request(min_version, exact_version):
            for request in requests:
                request.check(
                    window=self.window,
                    vocab_size=self._probe.vocab_size,
                    max_completion_tokens=sampling.max_completion_tokens,
                )
                num_tokens = len(request.prompt_ids) + sampling.max_completion_tokens
                self.max_concurrent_rollouts(0, num_tokens)
            call = Call(self, self._room, requests, sampling, on_completion)
            return call.run(should_stop, on_tokens)

    def holding(self, exact_version: PolicyVersion) -> AbstractContextManager[None]:
        """Keep newer weights out while the body runs."""
        return self._fence.request(None, exact_version)

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Divide the KV cache that vLLM reports by the need of one rollout."""
        facts = self._backend.facts
        num_tokens = min(prompt_tokens + completion_tokens, facts.max_model_len)
        number = self._num_blocks // facts.blocks_of(num_tokens)
        if number < 1:
            raise EngineError(
                f"the KV cache of {facts.num_blocks} blocks of {facts.block_size} tokens does not "
                f"hold one rollout of {prompt_tokens} + {completion_tokens} tokens; raise "
                "engine.options.kv_cache_memory_bytes or lower sampling.max_completion_tokens"
            )
        return self._concurrency.bounded(min(number, facts.max_num_seqs - 1))

    def take_counts(self) -> dict[str, int]:
        """Return how often memory ran out since this was last asked."""
        return self._concurrency.take_counts()

    def close(self) -> None:
        """Stop vLLM and forget the weights."""
        self._fence.close()
        with self._lock:
            self._is_closed = True
            self._good = None
            self._backend.close()

    # --- what a call asks ------------------------------------------------------------------------

    def current(self) -> tuple[Backend, str | None]:
        """Return the running vLLM and, where caches outlive weights, what keeps versions apart."""
        with self._lock:
            return self._backend, None if self._clears_cache else self._tag

    def version_of(self, tag: str) -> PolicyVersion | None:
        """Return what a tag stands for; KeyError while the probe runs."""
        return self._versions[tag]

    def revive(self, backend: Backend) -> None:
        """Start vLLM again if `backend` is the one in use."""
        with self._lock:
            if self._backend is backend:
                self._restart()

    # --- swaps -----------------------------------------------------------------------------------

    def _swap(self, new: _Installed) -> None:
        with self._lock:
            before = "none" if self._good is None else str(self._good.version)
            try:
                complaint = self._install_alive(new)
            except EngineDeadError as error:
                self._restart()
                raise EngineError(
                    f"{new.version} could not be installed: {error}; vLLM was started anew, "
                    f"version: {before}"
                ) from error
            if complaint is None:
                self._good = new
                self._num_restarts = 0
                return
            self._roll_back()
            raise EngineError(
                f"{new.version} is installed but not what vLLM samples from: {complaint}; rolled "
                f"back, version: {before}"
            )

    def _roll_back(self) -> None:
        if self._good is None:
            return
        try:
            complaint = self._install(self._good)
        except EngineDeadError as error:
            complaint = str(error)
        if complaint is not None:
            log.warning("cannot go back to %s in place: %s", self._good.version, complaint)
            self._restart()

    def _install_alive(self, weights: _Installed) -> str | None:
        """Install, if need be on a vLLM started anew: it may have died of something else."""
        if not self._backend.is_dead:
            with contextlib.suppress(EngineWasDeadError):
                return self._install(weights)
        self._restart()
        return self._install(weights)

    def _install(self, weights: _Installed) -> str | None:
        """Hand weights over, probe them and judge their tag; return what is wrong with them."""
        self._tag = tag = str(next(self._serials))
        hand_over(
            self._backend,
            weights.tensors,
            tag,
            clears_cache=self._clears_cache,
            lora=self._lora,
            is_same_process=self._process == "inline",
        )
        params = make_params(Sampling(1.0, 1.0, 0, 1, ()), 0, 1, of_prompt=True)
        prompt = {"prompt_token_ids": self._probe.prompt_ids, "cache_salt": f"probe {tag}"}
        future = self._backend.submit(f"probe {tag}", prompt, params, -1)
        try:
            sample = future.result(timeout=self.timeout_s)
        except FutureTimeoutError as error:
            reason = f"the probe got no answer in {self.timeout_s:g} s"
            self._backend.die(reason)
            raise EngineDeadError(reason) from error
        complaint = self._probe.complaint(sample.prompt_logprobs, weights.expected)
        self._versions[tag] = weights.version if complaint is None else None
        return complaint

    # --- vLLM itself -----------------------------------------------------------------------------

    def _start(self) -> Backend:
        """Start vLLM, if need be for fewer rollouts at one time; then count its room."""
        while True:
            try:
                backend = self._make_backend()
            except EngineDeadError as error:
                if not is_out_of_memory(str(error)):
                    raise
                num_rollouts = self._arguments["max_num_seqs"] - 1
                self._concurrency.halve(num_rollouts, why=str(error), numbers=self._numbers())
                self._arguments["max_num_seqs"] = self._concurrency.bounded(num_rollouts) + 1
            else:
                facts = backend.facts
                self._num_blocks = facts.num_blocks - self._spare_blocks(facts)
                self._room.resize(self._num_blocks, facts.max_num_seqs - 1)
                return backend

    def _make_backend(self) -> Backend:
        if self._process == "inline":
            from echo.engine.vllm_inline import InlineBackend

            return InlineBackend(
                self._arguments, num_threads=self._num_threads, timeout_s=self.timeout_s
            )
        from echo.engine.vllm_process import ProcessBackend

        return ProcessBackend(self._arguments, timeout_s=self.timeout_s)

    def _spare_blocks(self, facts: Facts) -> int:
        """Return blocks that no rollout gets: one is vLLM's own, some are the probe's."""
        return 1 + facts.blocks_of(len(self._probe.prompt_ids) + 1)

    def _heed(self, death: Death, facts: Facts) -> None:
        """Go on with less at one time where vLLM died because memory ran out.

        Raises:
            EngineError: if a single rollout was under way.
        """
        if not (death.num_running and is_out_of_memory(death.reason)):
            return
        self._concurrency.halve(death.num_running, why=death.reason, numbers=self._numbers(facts))
        limit = self._concurrency.bounded(facts.max_num_seqs - 1)
        least = self._spare_blocks(facts) + facts.blocks_of(facts.max_model_len)
        self._arguments |= {
            "max_num_seqs": limit + 1,
            "max_model_len": facts.max_model_len,  # which callers rely on
            "num_gpu_blocks_override": max(least, facts.num_blocks // 2),
        }
        self._num_restarts = 0  # it will not die of the same again

    def _numbers(self, facts: Facts | None = None) -> str:
        """Say what there is."""
        parts = [f"the weights take {format_bytes(self._probe.weight_bytes)}"]
        if facts is not None:
            blocks = f"{facts.num_blocks} blocks of {facts.block_size} tokens"
            parts.append(f"the KV cache has {blocks}")
        # A look at a GPU that only other processes use would take some of it.
        if self._device == "cpu" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            free = available_bytes(torch.device(self._device))
            parts.append(f"free are {format_bytes(free)}")
        return ", ".join(parts)

    def _restart(self) -> None:
        """Start vLLM anew with the last weights that were found right.

        Raises:
            EngineError: if it dies again and again, or does not come up right.
        """
        if self._is_closed:
            raise EngineError("the engine is closed")
        self._num_restarts += 1
        backend = self._backend
        backend.close()
        if backend.death is not None:
            self._heed(backend.death, backend.facts)
        if self._num_restarts > MAX_RESTARTS:
            raise EngineError(
                f"vLLM died {self._num_restarts} times without a swap that worked in between; its "
                "own messages stand above"
            )
        version = "no version" if self._good is None else str(self._good.version)
        log.warning("vLLM is started anew with %s", version)
        self._backend = self._start()
        try:
            complaint = None if self._good is None else self._install(self._good)
        except EngineDeadError as error:
            log.warning("vLLM died again at once: %s", error)
            self._restart()
            return
        if complaint is not None:
            raise EngineError(f"started anew with {version}, vLLM is wrong: {complaint}")
