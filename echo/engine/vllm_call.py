"""One call of `generate` on vLLM: its requests in waves, watched until all have ended.

A sample counts only if all its tokens come from weights that the probe has found right. Tokens of
weights that are still being probed are held until the verdict; a rollout that holds tokens of wrong
ones, or that was under way when vLLM died, is sampled again from its start, with the same seed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, Request, Sampling
from echo.engine.vllm_backend import Backend, EngineDeadError, Sample

POLL_S = 0.05
"""Seconds between two looks at whether to stop."""


class Judge(Protocol):
    """What a call asks of the engine that it belongs to."""

    timeout_s: float

    def current(self) -> tuple[Backend, str | None]:
        """Return the running vLLM and the salt of its prefix cache."""

    def version_of(self, tag: str) -> PolicyVersion | None:
        """Return what a tag stands for: None for wrong weights; KeyError while it is open."""

    def revive(self, backend: Backend) -> None:
        """Start vLLM again if this one is the one that died."""


class Room:
    """Blocks of the KV cache and places in the batch, shared by all calls."""

    def __init__(self) -> None:
        """Start without any; see `resize`."""
        self._lock = threading.Lock()
        self._all = (0, 0)
        self._num_blocks, self._num_seqs = self._all

    def resize(self, num_blocks: int, num_seqs: int) -> None:
        """Have so much room in all, whatever is taken of it now."""
        with self._lock:
            self._num_blocks += num_blocks - self._all[0]
            self._num_seqs += num_seqs - self._all[1]
            self._all = num_blocks, num_seqs

    def take(self, num_blocks: int) -> bool:
        """Take a place and so many blocks if there are; return whether."""
        with self._lock:
            if self._num_seqs < 1 or self._num_blocks < num_blocks:
                return False
            self._num_seqs -= 1
            self._num_blocks -= num_blocks
            return True

    def give_back(self, num_blocks: int) -> None:
        """Free a place and its blocks."""
        with self._lock:
            self._num_seqs += 1
            self._num_blocks += num_blocks


@dataclass(slots=True)
class _Running:
    index: int
    request_id: str
    num_blocks: int
    backend: Backend
    future: Future[Sample]
    num_tokens: int = 0


class Call:
    """The state of one call."""

    def __init__(
        self,
        engine: Judge,
        room: Room,
        requests: Sequence[Request],
        sampling: Sampling,
        on_completion: Callable[[Completion], None],
    ) -> None:
        """Take the requests; nothing is sampled before `run`."""
        self._engine = engine
        self._room = room
        self._requests = requests
        self._sampling = sampling
        self._on_completion = on_completion
        self._waiting = deque(range(len(requests)))
        self._running: list[_Running] = []
        self._held: list[tuple[_Running, Sample]] = []
        self._done: dict[int, Completion] = {}
        self._num_tries = 0
        self._is_stopping = False
        self._progressed_at = time.monotonic()

    def run(
        self, should_stop: Callable[[], bool], on_tokens: Callable[[int], None]
    ) -> list[Completion]:
        """Sample until every request has ended or `should_stop` says so."""
        try:
            while len(self._done) < len(self._requests):
                self._is_stopping = self._is_stopping or should_stop()
                if self._is_stopping:
                    self._end_all()
                else:
                    self._start()
                self._report(on_tokens)
                self._collect()
        finally:
            for running in self._running:
                running.backend.abort([running.request_id])
                self._room.give_back(running.num_blocks)
        return [self._done[index] for index in range(len(self._requests))]

    def _start(self) -> None:
        backend, salt = self._engine.current()
        facts = backend.facts
        while self._waiting:
            index = self._waiting[0]
            request = self._requests[index]
            context = request.context_ids
            num_tokens = min(
                self._sampling.max_completion_tokens - len(request.prefix_ids),
                facts.max_model_len - len(context),
            )
            num_blocks = -(-(len(context) + num_tokens) // facts.block_size)
            if not self._room.take(num_blocks):
                return
            self._waiting.popleft()
            self._num_tries += 1
            prompt: dict[str, object] = {"prompt_token_ids": context.tolist()}
            if salt is not None:
                prompt["cache_salt"] = salt
            # Ours alone: callers may use the same names at the same time.
            request_id = f"{request.request_id}/{id(self):x}/{self._num_tries}"
            params = make_params(self._sampling, request.seed, num_tokens)
            future = backend.submit(request_id, prompt, params, 0)
            self._running.append(_Running(index, request_id, num_blocks, backend, future))

    def _end_all(self) -> None:
        """Abort what runs, and give up what has not begun; may be called again."""
        while self._waiting:
            self._finish(self._waiting.popleft(), None)
        for backend in {running.backend for running in self._running}:
            # Repeated until it works: one that vLLM has not yet taken in cannot be aborted.
            backend.abort([r.request_id for r in self._running if r.backend is backend])

    def _report(self, on_tokens: Callable[[int], None]) -> None:
        """Tell how many tokens have come, and give up on an engine that makes none."""
        counts: dict[str, int] = {}
        for backend in {running.backend for running in self._running}:
            counts |= backend.num_sampled()
        num_new = 0
        for running in self._running:
            num_tokens = counts.get(running.request_id, running.num_tokens)
            num_new += num_tokens - running.num_tokens
            running.num_tokens = num_tokens
        now = time.monotonic()
        if num_new:
            on_tokens(num_new)
        if num_new or self._held or not self._running:
            self._progressed_at = now
        elif now - self._progressed_at > self._engine.timeout_s:
            self._progressed_at = now
            for running in self._running:
                running.backend.die(f"no token in {self._engine.timeout_s:g} s")

    def _collect(self) -> None:
        futures = [running.future for running in self._running]
        if futures:
            wait(futures, timeout=POLL_S, return_when=FIRST_COMPLETED)
        else:
            time.sleep(POLL_S / 4)
        ended = [running for running in self._running if running.future.done()]
        for running in ended:
            self._running.remove(running)
            self._room.give_back(running.num_blocks)
        for running in ended:
            error = running.future.exception()
            if error is None:
                self._held.append((running, running.future.result()))
            elif isinstance(error, EngineDeadError):
                self._engine.revive(running.backend)
                self._waiting.append(running.index)
            else:
                raise EngineError(f"vLLM refuses {running.request_id}: {error}") from error
        held, self._held = self._held, []
        for running, sample in held:
            self._judge(running, sample)

    def _judge(self, running: _Running, sample: Sample) -> None:
        if sample.finish_reason == "abort" and not self._is_stopping:
            # Not by us: vLLM ends what runs when somebody tells its process to stop.
            self._waiting.append(running.index)
            return
        versions = np.empty((len(sample.token_ids), 2), np.int32)
        for span in sample.spans:
            try:
                version = self._engine.version_of(span.tag)
            except KeyError:
                self._held.append((running, sample))
                return
            if version is None:
                self._waiting.append(running.index)
                return
            versions[span.start : span.end] = (version.lineage, version.step)
        if np.isnan(sample.logprobs).any():
            raise EngineError(
                f"the model produced NaN in request {self._requests[running.index].request_id}; "
                "the weights hold NaN or overflow in the engine's dtype"
            )
        request_id = self._requests[running.index].request_id
        self._finish(
            running.index,
            Completion(
                request_id, sample.token_ids, sample.logprobs, sample.finish_reason, versions
            ),
        )

    def _finish(self, index: int, completion: Completion | None) -> None:
        self._done[index] = completion or Completion(
            self._requests[index].request_id,
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            "abort",
            np.empty((0, 2), np.int32),
        )
        if self._done[index].finish_reason != "abort":
            self._on_completion(self._done[index])


def make_params(
    sampling: Sampling, seed: int, max_tokens: int, *, of_prompt: bool = False
) -> object:
    """Return vLLM's parameters of one request: tokens out, with their log-probabilities.

    Args:
        sampling: how tokens are drawn.
        seed: of this request.
        max_tokens: new ones.
        of_prompt: whether the log-probabilities of the prompt's tokens are wanted too.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if sampling.greedy else sampling.top_k,
        # 63 bits: vLLM hands it to torch as a signed number, and -1 would mean none.
        seed=seed & 0x7FFFFFFFFFFFFFFF,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0 if of_prompt else None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
