"""vLLM in our own process: its LLMEngine, stepped by one thread.

It starts in two seconds and is truly one process: for tests and small workers. All that touches the
engine is done by the one thread, between two steps; other threads leave it jobs and wait.

There is one in a process at a time, because vLLM keeps its process groups in globals. What else it
changes in the process that it lives in: torch's threads can no longer be set (undone
here), a process group of size one is made, and torch's global generator is seeded (every request of
ours has its own).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from echo.engine.concurrency import describe
from echo.engine.vllm_backend import (
    START_TIMEOUT_S,
    Backend,
    Death,
    EngineDeadError,
    EngineWasDeadError,
    Sample,
    adapter_request,
    num_sampled,
    read_facts,
    read_output,
)

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0

_ALIVE = threading.Lock()
"""Held while there is an engine in this process."""

T = TypeVar("T")
Job = Callable[[], None]


class InlineBackend(Backend):
    """An LLMEngine and its thread."""

    def __init__(self, arguments: Mapping[str, Any], *, num_threads: int, timeout_s: float) -> None:
        """Start vLLM.

        Args:
            arguments: of vLLM's EngineArgs.
            num_threads: CPU threads of one operation; 0 leaves torch's setting alone.
            timeout_s: seconds that a job may take.

        Raises:
            EngineDeadError: if it does not start, with vLLM's reason.
        """
        if not _ALIVE.acquire(timeout=CLOSE_TIMEOUT_S):
            raise EngineDeadError(
                'a vLLM runs in this process already; close it, or use engine.process = "engine"'
            )
        self._arguments = arguments
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._futures: dict[str, Future[Sample]] = {}
        self._lock = threading.Lock()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), daemon=True, name="vllm-step"
        )
        self._thread.start()
        try:
            started.result(timeout=START_TIMEOUT_S)
        except TimeoutError as error:
            why = f"no answer in {START_TIMEOUT_S:g} s"
            raise EngineDeadError(f"vLLM does not start: {why}") from error
        self.facts = read_facts(self._engine.vllm_config)

    # --- the engine's thread ---------------------------------------------------------------------

    def _run(self, started: Future[None]) -> None:
        try:
            self._start()
        except BaseException as error:  # noqa: BLE001 -- vLLM's start raises anything
            dead = EngineDeadError(f"vLLM does not start: {type(error).__name__}: {error}")
            dead.__cause__ = error
            _ALIVE.release()
            started.set_exception(dead)
            return
        started.set_result(None)
        try:
            self._loop()
        except Exception as error:  # whatever a step raises, no later one can be trusted
            log.warning("vLLM died", exc_info=error)
            self.die(f"{type(error).__name__}: {error}")
        while not self._jobs.empty():  # whoever waits for one must not wait for ever
            job = self._jobs.get()
            if job is not None:
                job()
        try:
            self._engine.engine_core.shutdown()
        except Exception as error:  # noqa: BLE001 -- what is over anyway need not end well
            log.warning("vLLM did not end as it should: %s", describe(error))
        _ALIVE.release()

    def _start(self) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        set_num_threads = torch.set_num_threads
        try:
            self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**self._arguments))
        finally:
            torch.set_num_threads = set_num_threads

    def _loop(self) -> None:
        while self.death is None:
            is_busy = self._engine.has_unfinished_requests()
            try:
                job = self._jobs.get(block=not is_busy)
            except queue.Empty:
                for output in self._engine.step():
                    if output.finished:
                        self._resolve(output)
                continue
            if job is None:
                return
            job()

    def _resolve(self, output: Any) -> None:
        future = self._futures.pop(output.request_id, None)
        if future is not None and not future.done():
            future.set_result(read_output(output))

    # --- other threads ---------------------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        """Whether it has died or was given up."""
        return self.death is not None

    def submit(
        self, request_id: str, prompt: Mapping[str, Any], params: Any, priority: int
    ) -> Future[Sample]:
        """Begin to sample between two steps."""
        future: Future[Sample] = Future()

        def add() -> None:
            if self.death is not None:
                return
            try:
                self._engine.add_request(
                    request_id,
                    dict(prompt),
                    params,
                    lora_request=adapter_request(self._arguments),
                    priority=priority,
                )
            except Exception as error:  # noqa: BLE001 -- the request's fault, and its answer
                if self._futures.pop(request_id, None) is not None:  # not given up meanwhile
                    future.set_exception(error)

        with self._lock:
            if self.death is not None:
                future.set_exception(EngineDeadError(self.death.reason))
                return future
            self._futures[request_id] = future
        self._jobs.put(add)
        return future

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests between two steps."""
        self._jobs.put(lambda: self._abort(request_ids))

    def _abort(self, request_ids: Sequence[str]) -> None:
        from vllm.v1.engine import FinishReason

        if self.death is not None:
            return
        # vLLM hands over what was sampled only through its asynchronous front: look before it ends.
        wanted = set(request_ids)
        states = self._engine.output_processor.request_states
        for state in [s for s in states.values() if s.external_req_id in wanted]:
            self._resolve(state.make_request_output([], None, FinishReason.ABORT, None))
        self._engine.abort_request(list(request_ids))

    def num_sampled(self) -> dict[str, int]:
        """Return the tokens so far of every request that runs."""
        return num_sampled(self._engine.output_processor)

    def update(self, update_info: Mapping[str, str], tag: str, *, clears_cache: bool) -> None:
        """Swap weights between two steps."""

        def swap() -> None:
            engine = self._engine
            core = engine.engine_core.engine_core
            core.pause_scheduler("keep", clears_cache)
            if "adapter" in update_info:
                engine.add_lora(adapter_request(self._arguments, update_info["adapter"]))
            else:
                engine.collective_rpc("start_weight_update")
                engine.collective_rpc("update_weights", kwargs={"update_info": dict(update_info)})
                engine.collective_rpc("finish_weight_update")
            engine.set_weight_version(tag)
            core.resume_scheduler()

        try:
            self._call(swap)
        except EngineDeadError:
            raise
        except TimeoutError as error:
            reason = f"the update took longer than {self._timeout_s:g} s"
            self.die(reason)
            raise EngineDeadError(reason) from error
        except Exception as error:  # vLLM's layers raise anything; the model is now half updated
            self.die(f"the update failed: {type(error).__name__}: {error}")
            raise EngineDeadError(f"{type(error).__name__}: {error}") from error

    def _call(self, function: Callable[[], T]) -> T:
        """Have the engine's thread do something and return what came of it."""
        answer: Future[T] = Future()

        def job() -> None:
            if self.death is not None:
                answer.set_exception(EngineWasDeadError(self.death.reason))
                return
            try:
                answer.set_result(function())
            except Exception as error:  # noqa: BLE001 -- belongs to the thread that asked
                answer.set_exception(error)

        with self._lock:
            if self.death is not None:
                raise EngineWasDeadError(self.death.reason)
            self._jobs.put(job)
        return answer.result(timeout=self._timeout_s)

    def die(self, reason: str) -> None:
        """Fail every request; the thread ends when it comes back from where it is."""
        with self._lock:
            self.death = self.death or Death(reason, len(self._futures))
            futures = list(self._futures.values())
            self._futures.clear()
        self._jobs.put(None)
        for future in futures:
            if not future.done():
                future.set_exception(EngineDeadError(reason))

    def close(self) -> None:
        """Stop the thread and the engine."""
        self.die("the engine is closed")
        self._thread.join(CLOSE_TIMEOUT_S)
