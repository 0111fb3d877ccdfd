"""vLLM backends: in this process, or in processes of its own.

vLLM in our own process (`InlineBackend`) starts in two seconds and is truly one process: for tests
and small workers. All that touches the engine is done by the one thread, between two steps; other
threads leave it jobs and wait.

There is one in a process at a time, because vLLM keeps its process groups in globals. Its other
effects on the process that it lives in: torch's threads can no longer be set (undone here), a
process group of size one is made, and torch's global generator is seeded (every request of ours has
its own).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import os
import queue
import shutil
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.core.units import format_bytes
from echo.engine.engine import FinishReason, VersionSlot, describe_error
from echo.engine.lora import Lora, write_adapter
from echo.engine.model import weight_bytes
from echo.engine.vllm.places import save_changes
from echo.engine.vllm.plugin import VARIABLE, count_kills
from echo.engine.weights import WEIGHTS_FILE, TensorChange, Weights, save_safetensors

# --- contract -------------------------------------------------------------------------------------
#
# A tag is the text that vLLM attaches to tokens as their weight version. Each installation of
# weights has its own, so that the same version installed twice can be told apart.


START_TIMEOUT_S = 600.0
"""Seconds for vLLM to start: loading its code, compiling, profiling a GPU's memory."""
TIMEOUT_S = 120.0
"""Seconds that vLLM may take for one step, or one call of a swap."""


class EngineDeadError(EngineError):
    """vLLM has died, or does not answer: it must be restarted."""


class EngineWasDeadError(EngineDeadError):
    """It had died before it began with what was asked of it."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a vLLM came to its end."""

    reason: str
    num_running: int
    """Requests that were under way."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a started engine reports of itself."""

    num_blocks: int
    """Blocks of the KV cache."""
    block_size: int
    """Tokens per block."""
    max_model_len: int
    """Longest sequence, tokens."""
    max_num_seqs: int
    """Sequences sampled concurrently."""

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """A request to a backend."""

    request_id: str
    """Not in use."""
    prompt: Mapping[str, Any]
    """vLLM's, with the token ids."""
    params: Any
    """vLLM's SamplingParams."""
    adapter: Any = None
    """vLLM's LoRARequest of one that is loaded; None for the base."""
    priority: int = 0
    """Lower ones go first."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a sample and the tag of the weights that sampled them."""

    tag: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class BackendOutput:
    """vLLM's answer to one request."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """[T]; empty if they were not asked for."""
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    prompt_logprobs: npt.NDArray[np.float32]
    """[P - 1] of the prompt's tokens after the first; empty if they were not asked for."""


HandedOver = Weights | Sequence[TensorChange]
"""All weights, or what has changed of those that vLLM has."""


class Backend(abc.ABC):
    """A running vLLM; its methods may be called from any thread."""

    facts: Facts
    death: Death | None = None
    """Set once it is known to have died, or was given up."""

    @abc.abstractmethod
    def submit(self, request: BackendRequest) -> Future[BackendOutput]:
        """Begin to sample; what is returned gets the sample, or EngineDeadError."""

    @abc.abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; they get what was sampled so far, with the reason "abort"."""

    @abc.abstractmethod
    def num_sampled(self) -> dict[str, int]:
        """Return the tokens so far of every request that runs."""

    @abc.abstractmethod
    def update(self, weights: HandedOver, tag: str, *, clears_cache: bool) -> None:
        """Pause, take weights over, tag what follows, and go on; bounded in time.

        Args:
            weights: all of them, or what has changed of them; see `why_unplaced`.
            tag: not used before.
            clears_cache: whether keys and values are dropped and computed again.

        Raises:
            EngineWasDeadError: if it has died before.
            EngineDeadError: if that fails at any point; the engine can no longer be used.
            EngineError: if there is no space to hand them over; nothing has changed then.
        """

    @abc.abstractmethod
    def why_unplaced(self) -> str:
        """Return why vLLM takes whole versions only; nothing if it takes patches.

        Raises:
            EngineWasDeadError: if it has died before.
            EngineDeadError: if it does not answer.
        """

    @abc.abstractmethod
    def add_adapter(self, adapter: Any) -> None:
        """Load an adapter beside the others between two steps; bounded in time.

        Args:
            adapter: vLLM's LoRARequest, with the directory to read.

        Raises:
            EngineDeadError: if the engine has died.
            EngineError: if vLLM refuses it; the others are as they were.
        """

    @abc.abstractmethod
    def remove_adapter(self, serial: int) -> None:
        """Unload an adapter that no request uses; one that is not loaded is none.

        Raises:
            EngineError: as `add_adapter`.
        """

    @abc.abstractmethod
    def die(self, reason: str) -> None:
        """Give up on the engine: every request gets EngineDeadError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop vLLM; bounded in time."""


def adapter_request(slot: VersionSlot, path: str = "loaded") -> Any:
    """Return vLLM's LoRARequest for the adapter of a slot.

    vLLM knows an adapter by its number alone: under one that it has seen it samples from the
    weights that it has, whatever the directory holds by now. Requests are equal, and keys and
    values shared, by name and path. So number and name are never used twice.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{slot.version} {slot.serial}", slot.serial, path)


def read_output(output: Any) -> BackendOutput:
    """Translate a finished `RequestOutput` of vLLM."""
    [completion] = output.outputs
    token_ids = list(completion.token_ids)
    rows = zip(token_ids, completion.logprobs or [{}] * len(token_ids), strict=True)
    prompt = list(output.prompt_token_ids)
    # Nothing stands before the first token of a prompt, so it has no row.
    prompt_rows = zip(prompt, output.prompt_logprobs or [None] * len(prompt), strict=True)
    return BackendOutput(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array([row[token].logprob for token, row in rows if row], np.float32),
        finish_reason=completion.finish_reason,
        spans=tuple(Span(s.version, s.start, s.end) for s in completion.weight_versions or ()),
        prompt_logprobs=np.array(
            [row[token].logprob for token, row in prompt_rows if row], np.float32
        ),
    )


def num_sampled(output_processor: Any) -> dict[str, int]:
    """Return the tokens so far of every request, from vLLM's bookkeeping in this process."""
    states = list(output_processor.request_states.values())
    return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}


def update_calls(weights: HandedOver, where: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Return what vLLM's workers are called to take weights over: methods and their arguments.

    Args:
        weights: that are handed over.
        where: they lie, as `transfer.TransferUpdate` has it.
    """
    info = {"update_info": dict(where)}
    if isinstance(weights, Mapping):
        return [("start_weight_update", {}), ("update_weights", info), ("finish_weight_update", {})]
    return [("patch_weights", info)]


def read_facts(vllm_config: Any) -> Facts:
    """Return what a started engine says of itself."""
    return Facts(
        num_blocks=int(vllm_config.cache_config.num_gpu_blocks),
        block_size=int(vllm_config.cache_config.block_size),
        max_model_len=int(vllm_config.model_config.max_model_len),
        max_num_seqs=int(vllm_config.scheduler_config.max_num_seqs),
    )


log = logging.getLogger(__name__)

INLINE_CLOSE_TIMEOUT_S = 10.0

_ALIVE = threading.Lock()
"""Held while there is an engine in this process."""

T = TypeVar("T")
Job = Callable[[], None]


class InlineBackend(Backend):
    """An LLMEngine and its thread."""

    def __init__(self, arguments: Mapping[str, Any], *, num_threads: int) -> None:
        """Start vLLM.

        Args:
            arguments: of vLLM's EngineArgs.
            num_threads: CPU threads of one operation; 0 leaves torch's setting alone.

        Raises:
            EngineDeadError: if it does not start, with vLLM's reason.
        """
        if not _ALIVE.acquire(timeout=INLINE_CLOSE_TIMEOUT_S):
            raise EngineDeadError(
                'a vLLM runs in this process already; close it, or use engine.process = "engine"'
            )
        self._arguments = arguments
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._futures: dict[str, Future[BackendOutput]] = {}
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
        while not self._jobs.empty():  # a thread that waits for one must not wait forever
            job = self._jobs.get()
            if job is not None:
                job()
        try:
            self._engine.engine_core.shutdown()
        except Exception as error:  # noqa: BLE001 -- what is over anyway need not end well
            log.warning("vLLM did not end as it should: %s", describe_error(error))
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
        answer = read_output(output)  # first: if that fails the request dies with the engine
        if (future := self._pop(output.request_id)) is not None:
            future.set_result(answer)

    def _pop(self, request_id: str) -> Future[BackendOutput] | None:
        """Return the future of a request for the caller alone to end; None if it has ended."""
        with self._lock:
            return self._futures.pop(request_id, None)

    # --- other threads ---------------------------------------------------------------------------

    def submit(self, request: BackendRequest) -> Future[BackendOutput]:
        """Begin to sample between two steps."""
        future: Future[BackendOutput] = Future()

        def add() -> None:
            if self.death is not None:
                return
            try:
                self._engine.add_request(
                    request.request_id,
                    dict(request.prompt),
                    request.params,
                    lora_request=request.adapter,
                    priority=request.priority,
                )
            except Exception as error:  # noqa: BLE001 -- the request's fault, and its answer
                if self._pop(request.request_id) is not None:  # not given up meanwhile
                    future.set_exception(error)

        with self._lock:
            if self.death is not None:
                future.set_exception(EngineDeadError(self.death.reason))
                return future
            self._futures[request.request_id] = future
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
        return num_sampled(self._engine.output_processor)

    def update(self, weights: HandedOver, tag: str, *, clears_cache: bool) -> None:
        """Swap weights between two steps, taken from where they are."""
        from echo.engine.vllm.transfer import HANDED_OVER

        key = f"{id(self):x} {tag}"
        HANDED_OVER[key] = weights
        try:
            self._between_steps(lambda: self._swap(weights, key, tag, clears_cache))
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's layers raise anything; the model is now half updated
            self.die(f"the update failed: {type(error).__name__}: {error}")
            raise EngineDeadError(f"{type(error).__name__}: {error}") from error
        finally:
            del HANDED_OVER[key]

    def add_adapter(self, adapter: Any) -> None:
        """Load an adapter between two steps."""
        self._change_adapters(lambda: self._engine.add_lora(adapter))

    def remove_adapter(self, serial: int) -> None:
        """Unload an adapter between two steps."""
        self._change_adapters(lambda: self._engine.remove_lora(serial))

    def _change_adapters(self, change: Callable[[], object]) -> None:
        try:
            self._between_steps(change)
        except EngineError:
            raise
        except Exception as error:  # vLLM raises anything
            raise EngineError(f"vLLM refuses the adapter: {describe_error(error)}") from error

    def _between_steps(self, change: Callable[[], T]) -> T:
        """Have the engine's thread do something, and return it; what it raises is raised here."""
        done: Future[T] = Future()

        def job() -> None:
            if self.death is not None:
                done.set_exception(EngineWasDeadError(self.death.reason))
                return
            try:
                found = change()
            except Exception as error:  # noqa: BLE001 -- belongs to the thread that asked
                done.set_exception(error)
            else:
                done.set_result(found)

        with self._lock:
            if self.death is not None:
                raise EngineWasDeadError(self.death.reason)
            self._jobs.put(job)
        try:
            return done.result(timeout=TIMEOUT_S)
        except TimeoutError as error:
            reason = f"the update took longer than {TIMEOUT_S:g} s"
            self.die(reason)
            raise EngineDeadError(reason) from error

    def _swap(self, weights: HandedOver, key: str, tag: str, clears_cache: bool) -> None:
        """Swap weights, in the engine's thread."""
        core = self._engine.engine_core.engine_core
        core.pause_scheduler("keep", clears_cache)
        for method, arguments in update_calls(weights, {"key": key}):
            self._engine.collective_rpc(method, kwargs=arguments)
        self._engine.set_weight_version(tag)
        core.resume_scheduler()

    def why_unplaced(self) -> str:
        """Ask vLLM's worker between two steps."""
        [why] = self._between_steps(lambda: self._engine.collective_rpc("why_unplaced"))
        return str(why)

    def die(self, reason: str) -> None:
        """Fail every request; the thread ends when it comes back from where it is."""
        with self._lock:
            self.death = self.death or Death(reason, len(self._futures))
            futures = list(self._futures.values())
            self._futures.clear()
        self._jobs.put(None)
        for future in futures:
            future.set_exception(EngineDeadError(reason))

    def close(self) -> None:
        """Stop the thread and the engine."""
        self.die("the engine is closed")
        self._thread.join(INLINE_CLOSE_TIMEOUT_S)


# --- hand-over by files ---------------------------------------------------------------------------


MEMORY = Path("/dev/shm")
"""Where a file is memory that vLLM's processes can map."""

HEADER_BYTES = 16 << 20
"""More than names and shapes take in a file of tensors."""


def hand_over_adapter(
    backend: Backend, tensors: Mapping[str, Tensor], lora: Lora, slot: VersionSlot
) -> None:
    """Have vLLM load an adapter beside those that it has; nothing is paused.

    Args:
        backend: the running vLLM.
        tensors: of the adapter.
        lora: its shape.
        slot: that it gets.

    Raises:
        EngineDeadError: if vLLM has died.
        EngineError: if it refuses the adapter, or there is no space for the file; the others are
            as they were.
    """
    with _directory_for(weight_bytes(tensors)) as directory:
        write_adapter(directory, tensors, lora, base_name="")
        backend.add_adapter(adapter_request(slot, str(directory)))


@contextmanager
def _directory_for(num_bytes: int) -> Iterator[Path]:
    """Yield a directory in memory, or on the disk where that has no space: a container's is small.

    Args:
        num_bytes: of the tensors that are to be written.
    """
    try:
        needed = num_bytes + HEADER_BYTES
        has_space = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= needed
        with tempfile.TemporaryDirectory(
            prefix="echo-", dir=MEMORY if has_space else None
        ) as directory:
            yield Path(directory)
    except OSError as error:
        raise EngineError(
            f"no space to hand the weights to vLLM: {error}; free {format_bytes(needed)} in "
            f"{MEMORY} (of a container: docker run --shm-size) or {tempfile.gettempdir()}"
        ) from error


# --- crash reason ---------------------------------------------------------------------------------
#
# Its process logs the error and ends; ours only learns that it is gone. So a handler of ours
# listens to that log over there, and leaves the error in a file that is read here. A process that
# the kernel kills to get memory back says nothing at all: the kernel's own counter has it then.


class CrashReason:
    """The file of one vLLM, and what the kernel has done since."""

    def __init__(self) -> None:
        """Make the file, empty."""
        handle, path = tempfile.mkstemp(prefix="echo-vllm-", suffix=".txt")
        os.close(handle)
        self._path = Path(path)
        self._num_kills = count_kills()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Have the processes that start meanwhile know the file."""
        os.environ[VARIABLE] = str(self._path)
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)

    def read(self, *, was_killed: bool = False) -> str:
        """Return why vLLM died; empty if it is unknown.

        Args:
            was_killed: whether one of its processes ended by SIGKILL, and not by ours.
        """
        with contextlib.suppress(OSError):
            text = self._path.read_text(encoding="utf-8")
            if text:
                return text
        if was_killed and count_kills() > self._num_kills:
            return "killed by the kernel, as this machine was out of memory"
        return ""

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


# --- processes of its own -------------------------------------------------------------------------
#
# Our process has one thread with an event loop that talks to them. A process that dies takes
# nothing of ours with it, and one that hangs is ended.


CLOSE_TIMEOUT_S = 20.0


class ProcessBackend(Backend):
    """An AsyncLLM and the thread with its event loop."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start vLLM.

        Args:
            arguments: of vLLM's AsyncEngineArgs.

        Raises:
            EngineDeadError: if it does not start, with vLLM's reason.
        """
        self._arguments = arguments
        self._tasks: set[asyncio.Task[Any]] = set()
        self._crash_reason = CrashReason()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="vllm-client")
        self._thread.start()
        try:
            self._post(self._start(arguments)).result(timeout=START_TIMEOUT_S)
        except Exception as error:  # vLLM's start raises anything
            is_late = isinstance(error, TimeoutError) and not str(error)
            told = f"no answer in {START_TIMEOUT_S:g} s" if is_late else str(error)
            why = self._crash_reason.read() or f"{type(error).__name__}: {told}"
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
        with self._crash_reason.told():
            self._engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def _sample(self, request: BackendRequest) -> BackendOutput:
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
                dict(request.prompt),
                request.params,
                request.request_id,
                lora_request=request.adapter,
                priority=request.priority,
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
            raise EngineError(f"request {request.request_id}: vLLM gave no answer")
        return read_output(output)

    async def _swap(self, weights: HandedOver, path: Path, tag: str, clears_cache: bool) -> None:
        engine = self._engine
        # Not `pause_generation`, which sleeps for 20 ms so that outputs come before it returns.
        pause = engine.engine_core.pause_scheduler_async
        await self._bounded(pause(mode="keep", clear_cache=clears_cache))
        for method, arguments in update_calls(weights, {"path": str(path)}):
            await self._bounded(engine.collective_rpc(method, kwargs=arguments))
        await self._bounded(engine.update_weight_version(tag))
        await self._bounded(engine.resume_generation())

    async def _bounded(self, call: Awaitable[T]) -> T:
        # A call that was under way when vLLM's process died would wait forever.
        return await asyncio.wait_for(call, TIMEOUT_S)

    def _why(self, error: BaseException) -> str:
        """Return why vLLM died, from what it said in its own process if it did."""
        manager = self._engine.engine_core.resources.engine_manager
        processes = [] if manager is None else manager.processes
        was_killed = any(process.exitcode == -signal.SIGKILL for process in processes)
        return self._crash_reason.read(was_killed=was_killed) or describe_error(error)

    # --- other threads ---------------------------------------------------------------------------

    @property
    def _is_dead(self) -> bool:
        return self.death is not None or bool(self._engine.errored)

    def submit(self, request: BackendRequest) -> Future[BackendOutput]:
        """Begin to sample."""
        if self.death is not None:
            future: Future[BackendOutput] = Future()
            future.set_exception(EngineDeadError(self.death.reason))
            return future
        return self._post(self._sample(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        if self.death is None:
            self._post(self._engine.abort(list(request_ids)))

    def num_sampled(self) -> dict[str, int]:
        return num_sampled(self._engine.output_processor)

    def update(self, weights: HandedOver, tag: str, *, clears_cache: bool) -> None:
        """Swap weights while generation is paused, taken from a file in memory."""
        if isinstance(weights, Mapping):
            num_bytes = weight_bytes(weights)
        else:
            num_bytes = sum(change.num_bytes for change in weights)
        with _directory_for(num_bytes) as directory:
            if isinstance(weights, Mapping):
                save_safetensors(directory, weights, max_shard_bytes=1 << 62)
                path = directory / WEIGHTS_FILE
            else:
                path = save_changes(directory, weights)
            self._see_through(lambda: self._swap(weights, path, tag, clears_cache))

    def why_unplaced(self) -> str:
        """Ask vLLM's workers between two steps."""
        found: list[str] = self._see_through(
            lambda: self._bounded(self._engine.collective_rpc("why_unplaced"))
        )
        return next(filter(None, found), "")

    def add_adapter(self, adapter: Any) -> None:
        """Load an adapter between two steps."""
        self._see_through(lambda: self._bounded(self._engine.add_lora(adapter)), may_refuse=True)

    def remove_adapter(self, serial: int) -> None:
        """Unload an adapter between two steps."""
        self._see_through(lambda: self._bounded(self._engine.remove_lora(serial)), may_refuse=True)

    def _see_through(
        self, ask: Callable[[], Coroutine[Any, Any, T]], *, may_refuse: bool = False
    ) -> T:
        """Have the loop ask vLLM something, and return its answer; bounded in time.

        Raises:
            EngineWasDeadError: if it has died before.
            EngineDeadError: if it dies, is silent, or fails; it may be half updated then.
            EngineError: if it fails where it `may_refuse`.
        """
        if self._is_dead:
            raise EngineWasDeadError("it had died before")
        try:
            return self._post(ask()).result(6 * TIMEOUT_S)
        except Exception as error:  # vLLM's processes raise anything
            is_late = isinstance(error, TimeoutError)
            why = f"no answer in {TIMEOUT_S:g} s" if is_late else self._why(error)
            if may_refuse and not (is_late or self._is_dead):
                raise EngineError(f"vLLM refuses the adapter: {why}") from error
            reason = f"the update failed: {why}"
            self.die(reason)
            raise EngineDeadError(reason) from error

    def die(self, reason: str) -> None:
        """Fail every request."""
        self.death = self.death or Death(reason, len(self._tasks))
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all requests
            self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def close(self) -> None:
        """End vLLM's processes and our thread; a second call changes nothing."""
        if self._loop.is_closed():
            return
        self.die("the engine is closed")
        try:
            self._post(self._shut_down()).result(CLOSE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 -- what is over anyway need not end well
            log.warning("vLLM did not end as it should: %s", describe_error(error))
        self._stop_loop()

    async def _shut_down(self) -> None:
        # Ending processes blocks; the cancelled requests get their turn first.
        await asyncio.sleep(0)
        self._engine.shutdown()

    def _stop_loop(self) -> None:
        self._crash_reason.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
