"""vLLM engine that swaps weights while it samples.

A swap is a transaction. The engine checks the new weights against the model's shape, pauses
generation briefly, and sends the weights to vLLM. Then the engine probes the weights (`probe.py`):
vLLM's log-probabilities of a prompt must match transformers' log-probabilities under the same
tensors. If they differ too much, the engine reinstalls the previous version and raises an error. If
an update fails half way, the model has a mix of two versions. The engine then restarts vLLM with
the last version that passed the probe, as it does whenever vLLM dies. The tensors of this version
are kept in host memory, never on a GPU.

A patch is a swap that sends only the changed elements. These elements are scattered into vLLM's
parameters, and the result is probed. In two cases the engine sends whole versions instead: vLLM
keeps weights in its own layout, or an earlier patch has failed the probe.

`kv_cache` decides whether running rollouts keep their keys and values across a swap; see
`echo.engine.engine`.

Adapters are not swapped. vLLM keeps the adapters of the newest versions loaded and samples from
several of them in one batch. A new adapter is loaded between two steps and probed while rollouts on
the other adapters continue. An adapter that fails the probe is unloaded before any request has
sampled from it. vLLM caches keys and values per adapter, so keys and values computed with one
adapter are never used with another.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.core.timers import RecentMap
from echo.core.token_sets import MAX_SET_IDS, TOO_LARGE, TokenSets
from echo.engine.engine import (
    UNVERSIONED,
    UNWATCHED,
    Completion,
    Demand,
    Engine,
    InstalledVersion,
    KvCache,
    Request,
    Sampling,
    VersionSlot,
    VersionSlots,
    Watcher,
    describe_error,
    is_out_of_memory,
)
from echo.engine.lora import Lora
from echo.engine.model import (
    free_bytes,
    has_other_names_on_disk,
    names_on_disk,
    set_num_threads,
)
from echo.engine.vllm.arguments import (
    Process,
    import_vllm,
    lora_arguments,
    make_arguments,
    versions_in_memory,
)
from echo.engine.vllm.backend import (
    TIMEOUT_S,
    Backend,
    BackendOutput,
    BackendRequest,
    EngineDeadError,
    EngineWasDeadError,
    HandedOver,
    adapter_request,
    hand_over_adapter,
    remove_leftovers,
)
from echo.engine.vllm.launcher import Launcher
from echo.engine.vllm.places import join_changes
from echo.engine.vllm.probe import Expectation, SwapProbe
from echo.engine.weights import changes, tensors_from_image
from echo.weights.manifest import TensorSpec
from echo.weights.store.patches import Patch

# --- one call -------------------------------------------------------------------------------------
#
# A sample counts only if all its tokens come from weights that passed the probe. Samples from
# weights that are still being probed are held until the probe ends. A rollout is sampled again from
# its start, with the same seed, if it has tokens from weights that failed the probe, or if it was
# running when vLLM died. A rollout with a log-probability that is not finite is also sampled again,
# once: on a CPU a NaN in a block of the KV cache reaches the next request that gets the block.


POLL_S = 0.05
"""Longest time between two checks of whether a call must stop, seconds."""


class CacheCapacity:
    """Counts free blocks of the KV cache and free places in the batch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = (0, 0)
        self._num_blocks, self._num_seqs = self._all

    def resize(self, num_blocks: int, num_seqs: int) -> None:
        """Set the total numbers of blocks and places.

        The number of free blocks changes by as much as the total number of blocks, and the number
        of free places by as much as the total number of places.
        """
        with self._lock:
            self._num_blocks += num_blocks - self._all[0]
            self._num_seqs += num_seqs - self._all[1]
            self._all = num_blocks, num_seqs

    def take(self, num_blocks: int) -> bool:
        """Take one place and `num_blocks` blocks, and return True on success.

        If too few places or blocks are free, take nothing and return False.
        """
        with self._lock:
            if self._num_seqs < 1 or self._num_blocks < num_blocks:
                return False
            self._num_seqs -= 1
            self._num_blocks -= num_blocks
            return True

    def give_back(self, num_blocks: int) -> None:
        """Release one place and `num_blocks` blocks."""
        with self._lock:
            self._num_seqs += 1
            self._num_blocks += num_blocks


@dataclass(slots=True)
class _Running:
    index: int
    request_id: str
    num_blocks: int
    backend: Backend
    future: Future[BackendOutput]
    num_tokens: int = 0


class Call:
    """One call of `VllmEngine.generate`: its requests and their state."""

    def __init__(
        self,
        engine: VllmEngine,
        requests: Sequence[Request],
        sampling: Sampling,
        watcher: Watcher,
        slot: VersionSlot | None,
    ) -> None:
        """Store the requests and the slot of their adapter. `run` starts sampling."""
        self._engine = engine
        self._slot = slot
        self._adapter = None if slot is None else adapter_request(slot)
        self._space = engine.space
        self._requests = requests
        self._sampling = sampling
        self._watcher = watcher
        self._waiting = deque(range(len(requests)))
        self._running: list[_Running] = []
        self._held: list[tuple[_Running, BackendOutput]] = []
        self._done: dict[int, Completion] = {}
        self._num_tries = 0
        self._num_ids = engine.num_set_ids if sampling.truncates else 0
        self._nonfinite: set[int] = set()
        """Indices of requests that were sampled again because a log-probability was not finite."""
        self._is_stopping = False
        self._counts: dict[str, int] = {}
        """How many tokens each request in vLLM had at the last look, those of other calls too."""
        self._progressed_at = time.monotonic()

    def run(self) -> list[Completion]:
        """Sample until all requests have ended or the watcher stops the call."""
        try:
            while len(self._done) < len(self._requests):
                self._is_stopping = self._is_stopping or self._watcher.should_stop()
                if self._is_stopping:
                    self._end_all()
                else:
                    self._start()
                self._report()
                self._collect()
        finally:
            for running in self._running:
                running.backend.abort([running.request_id])
                self._space.give_back(running.num_blocks)
                self._forget(running)
        return [self._done[index] for index in range(len(self._requests))]

    def _start(self) -> None:
        backend, salt = self._engine.current()
        facts = backend.facts
        while self._waiting:
            index = self._waiting[0]
            request = self._requests[index]
            self._engine.check(request, self._sampling)  # a restarted vLLM may have less capacity
            context = request.context_ids
            num_tokens = min(
                self._sampling.max_completion_tokens - len(request.prefix_ids),
                facts.max_model_len - len(context),
            )
            num_blocks = facts.blocks_of(len(context) + num_tokens)
            if not self._space.take(num_blocks):
                return
            self._waiting.popleft()
            self._num_tries += 1
            prompt: dict[str, object] = {"prompt_token_ids": context.tolist()}
            if salt is not None:
                prompt["cache_salt"] = salt
            # Unique to this call: two calls may use the same request ids at the same time.
            request_id = f"{request.request_id}/{id(self):x}/{self._num_tries}"
            num_barred = self._sampling.num_barred(len(request.turn_ids))
            params = make_params(
                self._sampling,
                request.seed,
                num_tokens,
                num_ids=self._num_ids,
                num_barred=num_barred,
            )
            if self._sampling.stop is not None:
                self._announce(request_id, request)
            future = backend.submit(BackendRequest(request_id, prompt, params, self._adapter))
            self._running.append(_Running(index, request_id, num_blocks, backend, future))

    def _announce(self, request_id: str, request: Request) -> None:
        from echo.engine.vllm.stops import StopSearch, announce_search

        stop, turn = self._sampling.stop, request.turn_ids
        assert stop is not None
        num_barred = max(0, self._sampling.min_tokens - len(turn))
        announce_search(
            request_id, StopSearch(stop, tuple(turn[-stop.num_tokens :].tolist()), num_barred)
        )

    def _forget(self, running: _Running) -> None:
        """Withdraw the stop-string search of a request that vLLM may never have accepted."""
        if self._sampling.stop is not None:
            from echo.engine.vllm.stops import forget_search

            forget_search(running.request_id)

    def _end_all(self) -> None:
        """Abort the running and the waiting requests. May be called again."""
        for index in self._waiting:
            self._done[index] = Completion(
                self._requests[index].request_id,
                np.empty(0, np.int32),
                np.empty(0, np.float32),
                "abort",
                np.empty((0, 2), np.int32),
            )
        self._waiting.clear()
        for backend in {running.backend for running in self._running}:
            # Repeated on each pass: vLLM cannot abort a request that it has not yet accepted.
            backend.abort([r.request_id for r in self._running if r.backend is backend])

    def _report(self) -> None:
        """Report new tokens. Declare vLLM dead after TIMEOUT_S without a token of any call.

        This call may get no token for longer than that. Its requests may have to wait until vLLM
        has read the prompts of other calls, or has computed their caches again after a swap.
        """
        before, counts = self._counts, dict[str, int]()
        for backend in {running.backend for running in self._running}:
            counts |= backend.num_sampled()
        self._counts = counts
        num_new = 0
        for running in self._running:
            num_tokens = counts.get(running.request_id, running.num_tokens)
            num_new += num_tokens - running.num_tokens
            running.num_tokens = num_tokens
        now = time.monotonic()
        if num_new:
            self._watcher.on_tokens(num_new)
        has_sampled = any(number > before.get(name, 0) for name, number in counts.items())
        is_expected = bool(self._held) or not self._running or self._engine.is_updating
        if has_sampled or is_expected:
            self._progressed_at = now
        elif now - self._progressed_at > TIMEOUT_S:
            self._progressed_at = now
            for running in self._running:
                running.backend.die(f"no token in {TIMEOUT_S:g} s")

    def _collect(self) -> None:
        futures = [running.future for running in self._running]
        if futures:
            wait(futures, timeout=POLL_S, return_when=FIRST_COMPLETED)
        else:
            time.sleep(POLL_S / 4)
        ended = [running for running in self._running if running.future.done()]
        for running in ended:
            self._running.remove(running)
            self._space.give_back(running.num_blocks)
            self._forget(running)
        for running in ended:
            error = running.future.exception()
            if error is None:
                sample = running.future.result()
                self._watcher.on_tokens(len(sample.token_ids) - running.num_tokens)
                self._held.append((running, sample))
            elif isinstance(error, EngineDeadError):
                self._engine.revive(running.backend)
                self._waiting.append(running.index)
            else:
                raise EngineError(f"vLLM refuses {running.request_id}: {error}") from error
        held, self._held = self._held, []
        for running, sample in held:
            self._check_sample(running, sample)

    def _check_sample(self, running: _Running, sample: BackendOutput) -> None:
        if sample.finish_reason == "abort" and not self._is_stopping:
            # Echo did not abort it: vLLM ends running requests when its process gets a stop signal.
            self._waiting.append(running.index)
            return
        versions = np.empty((len(sample.token_ids), 2), np.int32)
        if self._slot is not None:
            versions[:] = (self._slot.version.lineage, self._slot.version.step)
        for span in () if self._slot is not None else sample.spans:
            try:
                version = self._engine.version_of(span.tag)
            except KeyError:
                self._held.append((running, sample))
                return
            if version is None:
                self._waiting.append(running.index)
                return
            versions[span.start : span.end] = (version.lineage, version.step)
        ids, logprobs, reason = sample.token_ids, sample.logprobs, sample.finish_reason
        is_bad = ~np.isfinite(logprobs)
        if is_bad.any() and running.index not in self._nonfinite:
            self._nonfinite.add(running.index)
            self._waiting.append(running.index)
            return
        if is_bad.any():
            num_tokens = int(is_bad.argmax()) + 1
            ids, logprobs, reason = ids[:num_tokens], logprobs[:num_tokens], "nonfinite"
        request = self._requests[running.index]
        has_likely = self._sampling.likely_ids > 0 and not (self._num_ids or self._sampling.greedy)
        completion = Completion(
            request.request_id,
            ids,
            logprobs,
            reason,
            versions[: len(ids)],
            support=self._support_of(sample, len(ids), request),
            likely=likely_of(sample, self._sampling)[: len(ids)] if has_likely else None,
        )
        self._done[running.index] = completion
        if reason != "abort":
            self._watcher.on_completion(completion)

    def _support_of(
        self, sample: BackendOutput, num_tokens: int, request: Request
    ) -> TokenSets | None:
        """Return the supports of a sample's first `num_tokens` tokens.

        Return None if every id could be drawn for each token.
        """
        if self._num_ids:
            return self._engine.support_of(sample, self._num_ids)[:num_tokens]
        if not self._sampling.has_support:
            return None
        return self._sampling.barred_support(len(request.turn_ids), num_tokens)


def make_params(
    sampling: Sampling,
    seed: int,
    max_tokens: int,
    *,
    of_prompt: bool = False,
    num_ids: int = 0,
    num_barred: int = 0,
) -> object:
    """Return vLLM's SamplingParams for one request.

    Args:
        sampling: how tokens are sampled.
        seed: fixes the random choices.
        max_tokens: number of tokens after which the request ends.
        of_prompt: whether the log-probabilities of the prompt are computed, too.
        num_ids: number of most likely ids to return for each token, to find the token's support; 0
            for no ids.
        num_barred: number of tokens before the first possible stop id.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if sampling.greedy else sampling.top_k,
        min_p=0.0 if sampling.greedy else sampling.min_p,
        # 63 bits: vLLM passes the seed to torch as a signed number, and -1 would mean no seed.
        seed=seed & 0x7FFFFFFFFFFFFFFF,
        max_tokens=max_tokens,
        min_tokens=min(num_barred, max_tokens),
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,
        logprobs=num_ids or (0 if sampling.greedy else sampling.likely_ids),
        flat_logprobs=num_ids > 0,
        prompt_logprobs=0 if of_prompt else None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def likely_of(sample: BackendOutput, sampling: Sampling) -> TokenSets:
    """Return the k most likely ids of each token, where k is `sampling.likely_ids`.

    vLLM also returns the sampled id. If the sampled id is not among the k ids, it is left out.
    """
    sets = sample.likely
    assert sets is not None
    assert sets.logprobs is not None
    is_beyond = np.repeat(sets.sizes > sampling.likely_ids, sets.counts)
    is_beyond &= sets.ids == np.repeat(sample.token_ids, sets.counts)
    return TokenSets(
        sizes=np.minimum(sets.sizes, np.int32(sampling.likely_ids)),
        ids=sets.ids[~is_beyond],
        logprobs=sets.logprobs[~is_beyond],
    )


log = logging.getLogger(__name__)

FIRST_SET_IDS = 1024
"""Number of most likely ids that the engine at first requests from vLLM for each token. If a
support has more ids, later requests ask for four times as many ids. vLLM sends all ids that were
requested, so a larger number would cost time for each token.
"""

MAX_RESTARTS = 3
"""Largest number of restarts without a successful swap in between. At the next death of vLLM the
engine fails.
"""


MAX_TAGS = 1 << 14
"""Number of installations whose version is remembered. No rollout has tokens of as many."""


@dataclass(frozen=True, slots=True, eq=False)
class _Installed:
    tensors: Mapping[str, Tensor]
    version: PolicyVersion
    expected: Expectation


def _refuse(device: str, kv_cache: KvCache, lora: Lora | None) -> None:
    """Raise if vLLM cannot use this device, or if `kv_cache` is "keep" with LoRA.

    With LoRA, `kv_cache` would have no effect.
    """
    if device not in ("cpu", "cuda"):
        raise EngineError(
            f'vLLM takes the GPUs that it sees: in place of worker.device = "{device}" set '
            'CUDA_VISIBLE_DEVICES and worker.device = "cuda"'
        )
    if lora is not None and kv_cache == "keep":
        raise EngineError(
            'engine.kv_cache = "keep" has no use with lora.rank above 0, where vLLM samples each '
            "rollout from one version; remove it"
        )


def _make_launcher(
    arguments: dict[str, Any],
    probe: SwapProbe,
    lora: Lora | None,
    *,
    device: str,
    process: Process,
    num_threads: int,
) -> Launcher:
    """Return vLLM's launcher.

    With LoRA, vLLM keeps no more versions of the adapter than fit into the host's memory.
    """
    num_versions = Engine.num_versions
    if lora is not None:
        free = free_bytes(torch.device("cpu"))
        num_versions = versions_in_memory(lora, probe.adapter_bytes, free)
        arguments = arguments | lora_arguments(lora.rank, probe.lora_targets, num_versions)
    return Launcher(
        arguments,
        probe,
        device=device,
        process=process,
        num_threads=num_threads,
        num_versions=num_versions,
    )


def _swap_remedy(error: EngineDeadError) -> str:
    """Return the remedy if vLLM ran out of memory in a swap, otherwise ""."""
    if not is_out_of_memory(str(error)):
        return ""
    return (
        " (a swap builds the largest layer again: lower engine.options.gpu_memory_utilization or "
        "kv_cache_memory_bytes)"
    )


class VllmEngine(Engine):
    """An engine that samples from a causal language model with vLLM.

    Args:
        model_dir: directory with config.json; weights in it are not read.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16" or "float16".
        process: "inline" runs vLLM in this process, "engine" in processes of its own.
        kv_cache: whether running rollouts keep their keys and values when weights are swapped.
        arguments: engine arguments passed through to vLLM.
        num_threads: CPU threads per operation; 0 for vLLM's choice.
        lora: the base model, which replaces `model_dir`, and the shape of the adapters that `load`
            takes. None if `load` takes all weights.
        demand: expected rollouts, which determine the size of the KV cache on a CPU. If None, free
            memory determines the size.

    Raises:
        EngineError: if vLLM is not installed, if vLLM cannot run this model with these arguments,
            or if an argument has no effect.
    """

    is_continuous = True

    def __init__(
        self,
        model_dir: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        process: Process = "inline",
        kv_cache: KvCache = "recompute",
        arguments: Mapping[str, Any] | None = None,
        num_threads: int = 0,
        lora: Lora | None = None,
        demand: Demand | None = None,
    ) -> None:
        _refuse(device, kv_cache, lora)
        passed = arguments or {}
        import_vllm(is_cpu=device == "cpu", passed=passed, num_threads=num_threads)
        self._num_threads = num_threads
        self._clears_cache = kv_cache == "recompute"
        self._lora = lora
        self._probe = SwapProbe(model_dir, dtype, lora)
        engine_arguments = make_arguments(
            model_dir if lora is None else lora.base_dir,
            is_cpu=device == "cpu",
            dtype=dtype,
            process=process,
            passed=passed,
            demand=demand,
        )
        self._launcher = _make_launcher(
            engine_arguments,
            self._probe,
            lora,
            device=device,
            process=process,
            num_threads=num_threads,
        )
        self._adapters: dict[VersionSlot, _Installed] = {}
        """Loaded adapters that passed the probe, by slot."""
        self._lock = threading.RLock()
        self._serials = itertools.count(1)
        self._tag = ""
        self._versions = RecentMap[str, PolicyVersion | None](max_entries=MAX_TAGS)
        """The version of each tag; None if the weights failed the probe."""
        self._good: _Installed | None = None
        self._patch_fault = ""
        """The last logged reason why vLLM cannot take patches."""
        self._is_misplaced = False
        """Whether a patch has failed the probe while the whole version passed it."""
        self.takes_patches = lora is None
        self._num_restarts = 0
        self._is_closed = False
        self.is_updating = False
        """Whether vLLM is being sent weights. It then samples nothing; the backend limits the time.
        """
        self.num_set_ids = min(FIRST_SET_IDS, self._probe.vocab_size)
        """Number of likely ids to request for each token if the sampling truncates."""
        self.space = CacheCapacity()
        """Free capacity of vLLM's KV cache and batch, shared by all calls."""
        remove_leftovers()
        self._backend = self._start(is_first=True)
        self.num_versions = self._launcher.num_versions
        self._installed: InstalledVersion | VersionSlots = (
            InstalledVersion() if lora is None else VersionSlots(self.num_versions + 1)
        )
        self.window = self._backend.facts.max_model_len

    # --- the contract ----------------------------------------------------------------------------

    @property
    def installed(self) -> PolicyVersion | None:
        return self._installed.installed

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion = UNVERSIONED) -> None:
        """Swap the weights while rollouts run, and probe the new weights.

        If the probe fails, restore the previous version. Adapters are not swapped: a new adapter is
        loaded beside the earlier adapters, while rollouts continue.
        """
        if isinstance(self._installed, VersionSlots):
            with self._installed.load(version) as (slot, unloaded):
                self._load_adapter(slot, unloaded, tensors)
            return
        with self._installed.swap(version):
            new = self._expected(tensors, version)
            self._swap(version, lambda: self._install(new))

    def patch(self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> None:
        """Write a patch to the image and to vLLM, and probe the patched weights.

        If the probe fails, roll back.
        """
        if not isinstance(self._installed, InstalledVersion):
            super().patch(patch, image, specs)
            return
        with self._installed.swap(patch.version):
            self._swap(
                patch.version,
                lambda: self._install_patch(patch, image, specs),
                take_back=lambda: patch.take_back(image),
            )

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watcher: Watcher = UNWATCHED,
        *,
        version: PolicyVersion | None = None,
    ) -> list[Completion]:
        """Sample one completion for each request; see `Engine.generate`."""
        # vLLM's sampler would fail on more ids than there are.
        likely_ids = min(sampling.likely_ids, self._probe.vocab_size)
        sampling = replace(sampling, likely_ids=likely_ids)
        with self._installed.request(version) as slot:
            for request in requests:
                self.check(request, sampling)
            return Call(self, requests, sampling, watcher, slot).run()

    def holding(self, version: PolicyVersion) -> AbstractContextManager[object]:
        """Keep the adapter of a version loaded while the block runs."""
        return self._installed.request(version)

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return how many rollouts the KV cache and the settings allow at once."""
        number = self.rollouts_in_memory(prompt_tokens, completion_tokens)
        return min(number, self._backend.facts.max_num_seqs - 1)

    def rollouts_in_memory(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return how many rollouts fit into vLLM's KV cache at once."""
        facts = self._backend.facts
        num_tokens = min(prompt_tokens + completion_tokens, facts.max_model_len)
        number = self._num_blocks // facts.blocks_of(num_tokens)
        if number < 1:
            raise EngineError(
                f"the KV cache of {facts.num_blocks} blocks of {facts.block_size} tokens does not "
                f"hold one rollout of {prompt_tokens} + {completion_tokens} tokens; raise "
                "engine.options.kv_cache_memory_bytes or lower sampling.max_completion_tokens"
            )
        return self._launcher.concurrency.bounded(number)

    def take_counts(self) -> dict[str, int]:
        """Return how often memory ran out since the last call, by metric name."""
        return self._launcher.concurrency.take_counts()

    def close(self) -> None:
        """Stop vLLM and release the weights."""
        self._installed.close()
        with self._lock:
            self._is_closed = True
            self._good = None
            self._adapters.clear()
            self._backend.close()

    # --- used by `Call` --------------------------------------------------------------------------

    def check(self, request: Request, sampling: Sampling) -> None:
        """Raise if the running vLLM cannot sample this request.

        Raises:
            EngineError: naming the request, or the KV cache that is too small for the request.
        """
        request.check(
            window=self._backend.facts.max_model_len,
            vocab_size=self._probe.vocab_size,
            max_completion_tokens=sampling.max_completion_tokens,
        )
        self.max_concurrent_rollouts(len(request.prompt_ids), sampling.max_completion_tokens)

    def current(self) -> tuple[Backend, str | None]:
        """Return the backend and the cache salt of the weights.

        If swaps clear the cache, the salt is None.
        """
        with self._lock:
            return self._backend, None if self._clears_cache else self._tag

    def version_of(self, tag: str) -> PolicyVersion | None:
        """Return the version with this tag; None if that version failed the probe.

        Raises:
            KeyError: while the probe of these weights runs.
        """
        if tag not in self._versions:
            raise KeyError(tag)
        return self._versions.get(tag)

    def support_of(self, sample: BackendOutput, num_ids: int) -> TokenSets:
        """Return the supports of a sample.

        If a support has more ids than were requested, later calls request more.

        Args:
            sample: a sample that was requested with `num_ids`.
            num_ids: number of ids of each token that were requested.
        """
        from echo.engine.vllm.supports import supports_of

        largest = min(MAX_SET_IDS, self._probe.vocab_size)
        support = supports_of(sample.supports, is_every_id=num_ids == self._probe.vocab_size)
        if num_ids == self.num_set_ids < largest and (support.sizes == TOO_LARGE).any():
            self.num_set_ids = min(4 * num_ids, largest)
            log.info(
                "a token could have been any of more than %d ids: %d are requested from now on",
                num_ids,
                self.num_set_ids,
            )
        return support

    def revive(self, backend: Backend) -> None:
        """Restart vLLM if the dead `backend` has not been replaced yet."""
        with self._lock:
            if self._backend is backend:
                self._restart()

    # --- swaps -----------------------------------------------------------------------------------

    def _expected(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> _Installed:
        set_num_threads(self._num_threads)  # the setting is per thread
        return _Installed(tensors, version, self._probe.expected(tensors))

    def _swap(
        self,
        version: PolicyVersion,
        install: Callable[[], str | None],
        take_back: Callable[[], None] = lambda: None,
    ) -> None:
        """Install weights, and roll back if this fails.

        If vLLM was already dead, restart it first.

        Args:
            version: the version to name in errors.
            install: function that sends the weights and probes them. It returns why the probe
                failed, or None.
            take_back: function that restores the image of the previous version.
        """
        with self._lock:
            before = "none" if self._good is None else str(self._good.version)
            while True:
                try:
                    fault = install()
                    break
                except EngineDeadError as error:
                    take_back()
                    self._restart()
                    if not isinstance(error, EngineWasDeadError):  # else retry
                        raise EngineError(
                            f"{version} could not be installed: {error}{_swap_remedy(error)}; vLLM "
                            f"was restarted, version: {before}"
                        ) from error
                except BaseException:  # such as no space to hand weights over
                    take_back()
                    raise
            if fault is None:
                self._num_restarts = 0
                return
            take_back()
            self._roll_back()
            raise EngineError(
                f"{version} is installed but not what vLLM samples from: {fault}; rolled back, "
                f"version: {before}"
            )

    def _roll_back(self) -> None:
        if self._good is None:
            return
        try:
            fault = self._install(self._good)
        except EngineError as error:  # dead, or there is no space to hand weights over
            fault = str(error)
        if fault is not None:
            log.warning("cannot go back to %s in place: %s", self._good.version, fault)
            self._restart()

    def _install(self, weights: _Installed) -> str | None:
        return self._hand_over(names_on_disk(self._probe.model, weights.tensors), weights)

    def _hand_over(self, what: HandedOver, weights: _Installed) -> str | None:
        """Send weights or changes to vLLM and probe the result. Return the fault, or None."""
        self._tag = tag = str(next(self._serials))
        self.is_updating = True
        try:
            self._backend.update(what, tag, clears_cache=self._clears_cache)
        finally:
            self.is_updating = False
        fault = self._find_fault(self._backend, weights, tag)
        self._versions[tag] = weights.version if fault is None else None
        if fault is None:
            self._good = weights
        return fault

    def _install_patch(
        self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]
    ) -> str | None:
        """Write a patch to the image, and install the patched weights in vLLM.

        If vLLM takes patches, send and probe only the changes. If vLLM takes no patches, or if the
        probe of the changes fails, send and probe all weights.

        Returns:
            Why the last probe failed, or None.
        """
        patch_fault = self._find_patch_fault()
        patch.write(image)
        weights = self._expected(tensors_from_image(specs, image.toreadonly()), patch.version)
        if patch_fault:
            return self._install(weights)
        joined = join_changes(changes(patch, image, specs))
        fault = self._hand_over(joined, weights)
        if fault is None:
            return None
        log.warning(
            "vLLM does not sample from %s, which was changed in place: %s", weights.version, fault
        )
        fault = self._install(weights)
        self._is_misplaced = fault is None
        return fault

    def _find_patch_fault(self) -> str:
        """Return the reason why vLLM cannot take patches, or "". Log a new reason."""
        if self._is_misplaced:
            why = "a patch was found wrong"
        elif has_other_names_on_disk(self._probe.model):
            why = "vLLM has other names for the weights than the version"
        else:
            why = self._backend.find_placement_fault()
        if why not in ("", self._patch_fault):
            log.info("vLLM gets whole versions in place of patches: %s", why)
        self._patch_fault = why
        return why

    def _find_fault(
        self, backend: Backend, weights: _Installed, tag: str, adapter: Any = None
    ) -> str | None:
        """Probe weights. Return how vLLM's log-probabilities deviate, or None.

        Raises:
            EngineDeadError: if vLLM does not answer the probe. The backend is declared dead.
        """
        params = make_params(Sampling(1.0, 1.0, 0, 1, ()), 0, 1, of_prompt=True)
        prompt = {"prompt_token_ids": weights.expected.prompt_ids, "cache_salt": f"probe {tag}"}
        future = backend.submit(BackendRequest(f"probe {tag}", prompt, params, adapter, -1))
        try:
            sample = future.result(timeout=TIMEOUT_S)
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM may raise any exception
            is_late = isinstance(error, TimeoutError)
            why = f"no answer in {TIMEOUT_S:g} s" if is_late else describe_error(error)
            backend.die(reason := f"it cannot be probed: {why}")
            raise EngineDeadError(reason) from error
        expected, tensors = weights.expected, weights.tensors
        fault = self._probe.find_fault(sample.prompt_logprobs, expected, tensors)
        if fault is None:
            self._probe.accepted(expected, tensors)
        return fault

    # --- adapters --------------------------------------------------------------------------------

    def _load_adapter(
        self, slot: VersionSlot, unloaded: VersionSlot | None, tensors: Mapping[str, Tensor]
    ) -> None:
        """Replace an old adapter by a new adapter while rollouts continue.

        Probe the new adapter.
        """
        # Copied: the caller's memory is valid only during `load`, these tensors are kept longer.
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        weights = self._expected(copies, slot.version)
        if unloaded is not None:
            self._unload(unloaded)
        try:
            fault = self._add_adapter_alive(slot, weights)
        except EngineError:
            self._unload(slot)  # vLLM may have loaded a part of it
            raise
        if fault is not None:
            self._unload(slot)
            raise EngineError(
                f"{slot.version} is loaded but not what vLLM samples from: {fault}; unloaded, "
                f"version: {self.installed or 'none'}"
            )
        self._num_restarts = 0

    def _add_adapter_alive(self, slot: VersionSlot, weights: _Installed) -> str | None:
        """Load and probe an adapter. If vLLM is dead, restart it first."""
        while True:
            backend = self.current()[0]
            try:
                return self._add_adapter(backend, slot, weights)
            except EngineDeadError as error:
                self.revive(backend)
                if isinstance(error, EngineWasDeadError):
                    continue  # at most MAX_RESTARTS times
                raise EngineError(
                    f"{slot.version} could not be loaded: {error}; vLLM was restarted, "
                    f"version: {self.installed or 'none'}"
                ) from error

    def _add_adapter(self, backend: Backend, slot: VersionSlot, weights: _Installed) -> str | None:
        assert self._lora is not None
        hand_over_adapter(backend, weights.tensors, self._lora, slot)
        adapter = adapter_request(slot)
        fault = self._find_fault(backend, weights, str(slot.serial), adapter)
        if fault is None:
            with self._lock:
                if self._backend is not backend:
                    raise EngineWasDeadError("it was restarted without the adapter just loaded")
                self._adapters[slot] = weights
        return fault

    def _unload(self, slot: VersionSlot) -> None:
        with self._lock:
            self._adapters.pop(slot, None)
        with contextlib.suppress(EngineError):  # then vLLM is dead, or evicts this adapter first
            self._backend.remove_adapter(slot.serial)

    # --- vLLM itself -----------------------------------------------------------------------------

    def _reinstall(self) -> str | None:
        """Reinstall the weights that passed the probe. Return why a probe now fails, or None."""
        for slot, weights in self._adapters.items():
            fault = self._add_adapter(self._backend, slot, weights)
            if fault is not None:
                return fault
        return None if self._good is None else self._install(self._good)

    def _start(self, *, is_first: bool = False) -> Backend:
        backend = self._launcher.launch(is_first=is_first)
        facts = backend.facts
        self._probe.bound(facts.max_model_len)
        self._num_blocks = self._launcher.num_blocks(facts)
        self.space.resize(self._num_blocks, facts.max_num_seqs - 1)
        return backend

    def _restart(self) -> None:
        """Restart vLLM with the last weights that passed the probe.

        Raises:
            EngineError: if vLLM has died more than MAX_RESTARTS times in a row, or fails the probe.
        """
        if self._is_closed:
            raise EngineError("the engine is closed")
        self._num_restarts += 1
        # vLLM may have died during a probe: samples held for its result are then sampled again.
        if self._tag not in self._versions:
            self._versions[self._tag] = None
        backend = self._backend
        backend.close()
        if backend.death is not None and self._launcher.reduce(backend.death, backend.facts):
            self._num_restarts = 0  # the cause of this death is removed
        if self._num_restarts > MAX_RESTARTS:
            raise EngineError(
                f"vLLM died {self._num_restarts} times without a swap that worked in between; its "
                "own messages stand above"
            )
        found_right = [*self._adapters.values(), *([] if self._good is None else [self._good])]
        version = ", ".join(str(weights.version) for weights in found_right) or "no version"
        log.warning("vLLM is restarted with %s", version)
        self._backend = self._start()
        try:
            fault = self._reinstall()
        except EngineDeadError as error:
            log.warning("vLLM died again at once: %s", error)
            self._restart()
            return
        except EngineError as error:  # such as no space to hand weights over
            fault = str(error)
        if fault is not None:
            why = f"restarted with {version}, vLLM is wrong: {fault}"
            self._backend.die(why)  # or other calls would sample from it
            raise EngineError(why)
