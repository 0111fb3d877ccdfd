"""vLLM in processes of its own: its AsyncLLM, for throughput, GPUs and tensor parallelism.

Our process has one thread with an event loop that talks to them. A process that dies takes nothing
of ours with it, and one that hangs is ended.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from echo.core.errors import EngineError
from echo.engine.concurrency import describe
from echo.engine.vllm_backend import (
    START_TIMEOUT_S,
    Backend,
    Death,
    EngineDeadError,
    Sample,
    adapter_request,
    num_sampled,
    read_facts,
    read_output,
)
from echo.engine.vllm_last_words import LastWords

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 20.0

T = TypeVar("T")


class ProcessBackend(Backend):
    """An AsyncLLM and the thread with its event loop."""

    def __init__(self, arguments: Mapping[str, Any], *, timeout_s: float) -> None:
        """Start vLLM.

        Args:
            arguments: of vLLM's AsyncEngineArgs.
            timeout_s: seconds that one call to its processes may take.

        Raises:
            EngineDeadError: if it does not start, with vLLM's reason.
        """
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._last_words = LastWords()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="vllm-client")
        self._thread.start()
        try:
            self._post(self._start(arguments)).result(timeout=START_TIMEOUT_S)
        except Exception as error:  # vLLM's start raises anything
            is_late = isinstance(error, TimeoutError) and not str(error)
            told = f"no answer in {START_TIMEOUT_S:g} s" if is_late else str(error)
            why = self._last_words.read() or f"{type(error).__name__}: {told}"
            self._stop_loop()
            raise EngineDeadError(f"vLLM does not start: {why}") from error
        self.facts = read_facts(self._engine.vllm_config)

    # --- the loop's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _post(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _start(self, arguments: Mapping[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # vLLM's processes inherit this: Ctrl-C and a closed terminal are for the node alone, which
        # finishes what it does.
        # Python's tracker would lift it again while it starts.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        with self._last_words.told():
            self._engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def _sample(
        self, request_id: str, prompt: Mapping[str, Any], params: Any, priority: int
    ) -> Sample:
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        output = None
        try:
            if self.death is not None:
                raise EngineDeadError(self.death.reason)
            stream = self._engine.generate(
                dict(prompt),
                params,
                request_id,
                lora_request=adapter_request(self._arguments),
                priority=priority,
            )
            async for found in stream:
                output = found
        except asyncio.CancelledError as error:
            reason = "the engine is closed" if self.death is None else self.death.reason
            raise EngineDeadError(reason) from error
        except (VllmDeadError, EngineGenerateError) as error:
            self.death = self.death or Death(self._why(error), len(self._tasks))
            raise EngineDeadError(self.death.reason) from error
        finally:
            self._tasks.discard(task)
        if output is None:
            raise EngineError(f"request {request_id}: vLLM gave no answer")
        return read_output(output)

    async def _update(self, update_info: Mapping[str, str], tag: str, clears_cache: bool) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._engine
        await self._bounded(engine.pause_generation(mode="keep", clear_cache=clears_cache))
        if "adapter" in update_info:
            adapter = adapter_request(self._arguments, update_info["adapter"])
            await self._bounded(engine.add_lora(adapter))
            await self._bounded(engine.update_weight_version(tag))
        else:
            await self._bounded(engine.start_weight_update())
            request = WeightTransferUpdateRequest(update_info=dict(update_info))
            await self._bounded(engine.update_weights(request))
            await self._bounded(engine.finish_weight_update(weight_version=tag))
        await self._bounded(engine.resume_generation())

    async def _bounded(self, call: Awaitable[T]) -> T:
        # A call that was under way when vLLM's process died would wait for ever.
        return await asyncio.wait_for(call, self._timeout_s)

    def _why(self, error: BaseException) -> str:
        """Return why vLLM died, from what it said in its own process if it did."""
        manager = self._engine.engine_core.resources.engine_manager
        processes = [] if manager is None else manager.processes
        was_killed = any(process.exitcode == -signal.SIGKILL for process in processes)
        return self._last_words.read(was_killed=was_killed) or describe(error)

    # --- other threads ---------------------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        """Whether it has died or was given up."""
        return self.death is not None or bool(self._engine.errored)

    def submit(
        self, request_id: str, prompt: Mapping[str, Any], params: Any, priority: int
    ) -> Future[Sample]:
        """Begin to sample."""
        if self.death is not None:
            future: Future[Sample] = Future()
            future.set_exception(EngineDeadError(self.death.reason))
            return future
        return self._post(self._sample(request_id, prompt, params, priority))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests."""
        if self.death is None:
            self._post(self._engine.abort(list(request_ids)))

    def num_sampled(self) -> dict[str, int]:
        """Return the tokens so far of every request that runs."""
        return num_sampled(self._engine.output_processor)

    def update(self, update_info: Mapping[str, str], tag: str, *, clears_cache: bool) -> None:
        """Swap weights while generation is paused."""
        try:
            self._post(self._update(update_info, tag, clears_cache)).result(6 * self._timeout_s)
        except Exception as error:  # vLLM's processes raise anything; they are half updated
            is_late = isinstance(error, TimeoutError)
            why = f"no answer in {self._timeout_s:g} s" if is_late else self._why(error)
            reason = f"the update failed: {why}"
            self.die(reason)
            raise EngineDeadError(reason) from error

    def die(self, reason: str) -> None:
        """Fail every request."""
        self.death = self.death or Death(reason, len(self._tasks))
        self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def close(self) -> None:
        """End vLLM's processes and our thread."""
        self.die("the engine is closed")
        try:
            self._post(self._shut_down()).result(CLOSE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 -- what is over anyway need not end well
            log.warning("vLLM did not end as it should: %s", describe(error))
        self._stop_loop()

    async def _shut_down(self) -> None:
        # Ending processes blocks; the cancelled requests get their turn first.
        await asyncio.sleep(0)
        self._engine.shutdown()

    def _stop_loop(self) -> None:
        self._last_words.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
