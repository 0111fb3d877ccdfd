"""vLLM backends: vLLM in this process, or in processes of its own.

`InlineBackend` runs vLLM in our own process, for tests and small workers. It starts in two seconds
and starts no other process. A single thread, the engine's thread, runs all steps. Other threads put
jobs into a queue. The engine's thread runs the jobs between two steps.

A process has at most one `InlineBackend` at a time, because vLLM keeps its process groups in
globals. vLLM has three other effects on the process:

* It disables `torch.set_num_threads`, which `InlineBackend` restores.
* It creates a process group of size one.
* It seeds torch's global generator, which our requests do not use.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import fcntl
import logging
import math
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
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.core.token_sets import TokenSets
from echo.core.units import format_bytes
from echo.engine.engine import FinishReason, VersionSlot, describe_error
from echo.engine.lora import Lora, write_adapter
from echo.engine.model import weight_bytes
from echo.engine.vllm.places import JoinedChanges, save_changes
from echo.engine.vllm.plugin import PROCESS_NAME, VARIABLE, count_kills
from echo.engine.vllm.starting import with_remedy
from echo.engine.weights import WEIGHTS_FILE, Weights, save_safetensors
from echo.records.files import is_locked

# --- contract -------------------------------------------------------------------------------------
#
# A tag is the text that vLLM attaches to tokens as their weight version. Each installation of
# weights has its own tag, so two installations of the same version have different tags.


START_TIMEOUT_S = 600.0
"""Seconds for vLLM to start: load its code, compile, and profile a GPU's memory."""
TIMEOUT_S = 120.0
"""Seconds that vLLM may take for one step, or for one call during a swap of weights."""


class EngineDeadError(EngineError):
    """vLLM has died or does not answer, and must be restarted."""


class EngineWasDeadError(EngineDeadError):
    """vLLM had died before the requested operation began."""


@dataclass(frozen=True, slots=True)
class Death:
    """The reason why vLLM died, and the number of requests that were running."""

    reason: str
    num_running: int
    """Number of requests that were running when vLLM died."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes that a started vLLM reports."""

    num_blocks: int
    """Number of blocks of the KV cache."""
    block_size: int
    """Number of tokens that a block holds."""
    max_model_len: int
    """Longest sequence that vLLM takes, in tokens."""
    max_num_seqs: int
    """Largest number of sequences that are sampled concurrently."""

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """A request to a backend to sample one completion."""

    request_id: str
    """Name of the request; no other running request has the same name."""
    prompt: Mapping[str, Any]
    """vLLM's prompt, with the token ids."""
    params: Any
    """vLLM's SamplingParams."""
    adapter: Any = None
    """vLLM's LoRARequest for a loaded adapter; None for the base model."""
    priority: int = 0
    """Requests with a lower number are scheduled first."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a sample, and the tag of the weights that sampled them."""

    tag: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class BackendOutput:
    """The result of one request to a backend."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """[T] log-probability of each sampled token, nats; empty if not requested."""
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    prompt_logprobs: npt.NDArray[np.float32]
    """[P - 1] log-probability of each prompt token after the first, nats; empty if not requested.
    """
    likely: TokenSets | None = None
    """All ids that vLLM returned for each token, with log-probabilities. These are the most likely
    ids and the sampled token.
    """
    supports: tuple[npt.NDArray[np.int32] | None, ...] = ()
    """For each token, the ids that the token could have been drawn from. A token's entry is None if
    vLLM may have returned only a part of these ids. The whole tuple is empty if no ids were
    requested.
    """


HandedOver = Weights | Sequence[JoinedChanges]
"""Weights for a backend to install: all weights, or changes to the weights that vLLM has."""


class Backend(abc.ABC):
    """A running vLLM. Any thread may call its methods."""

    facts: Facts
    death: Death | None = None
    """Why vLLM died; None as long as vLLM seems to run."""

    @abc.abstractmethod
    def submit(self, request: BackendRequest) -> Future[BackendOutput]:
        """Begin to sample; return a future with the sample.

        The future raises EngineDeadError if vLLM dies.
        """

    @abc.abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End the requests with these ids. Their samples get the reason "abort"."""

    @abc.abstractmethod
    def num_sampled(self) -> dict[str, int]:
        """Return how many tokens each running request has sampled so far, by the request's id."""

    @abc.abstractmethod
    def update(self, weights: HandedOver, tag: str, *, clears_cache: bool) -> None:
        """Pause sampling, install weights and their tag, and resume sampling.

        The call is bounded in time.

        Args:
            weights: all weights, or the changes to the installed weights. Changes are allowed only
                if `find_placement_fault` returns "".
            tag: a tag that was never used before.
            clears_cache: whether running requests' keys and values are dropped and computed again.

        Raises:
            EngineWasDeadError: if vLLM had died before.
            EngineDeadError: if the update fails. The engine is unusable afterwards.
            EngineError: if there is no space for the file with the weights. vLLM is unchanged.
        """

    @abc.abstractmethod
    def find_placement_fault(self) -> str:
        """Return the reason why vLLM cannot take patches; "" if there is none.

        Raises:
            EngineWasDeadError: if vLLM had died before.
            EngineDeadError: if vLLM does not answer.
        """

    @abc.abstractmethod
    def add_adapter(self, adapter: Any) -> None:
        """Load an adapter between two steps, in bounded time.

        Args:
            adapter: vLLM's LoRARequest, with the directory to read the adapter from.

        Raises:
            EngineDeadError: if the engine has died.
            EngineError: if vLLM refuses the adapter. The loaded adapters are unchanged.
        """

    @abc.abstractmethod
    def remove_adapter(self, serial: int) -> None:
        """Unload the adapter `serial` if it is loaded. No request may use this adapter.

        Raises:
            EngineDeadError: if the engine has died.
            EngineError: if vLLM does not unload the adapter.
        """

    @abc.abstractmethod
    def die(self, reason: str) -> None:
        """Declare vLLM dead. Every request fails with EngineDeadError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop vLLM and its threads, in bounded time."""


def adapter_request(slot: VersionSlot, path: str = "loaded") -> Any:
    """Return vLLM's LoRARequest for the adapter of a slot.

    vLLM identifies a loaded adapter by its number alone. If an adapter with the same number is
    already loaded, vLLM uses the loaded weights and does not read the directory `path`. vLLM shares
    keys and values between requests whose adapters have the same name and path. So each number and
    name is used only once.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{slot.version} {slot.serial}", slot.serial, path)


def read_output(output: Any) -> BackendOutput:
    """Return the result of a request from vLLM's finished `RequestOutput`."""
    [completion] = output.outputs
    token_ids = list(completion.token_ids)
    returned = completion.logprobs or [{}] * len(token_ids)
    rows = zip(token_ids, returned, strict=True)
    prompt = list(output.prompt_token_ids)
    # The first token of a prompt has no context, so it has no row.
    prompt_rows = zip(prompt, output.prompt_logprobs or [None] * len(prompt), strict=True)
    return BackendOutput(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array([row[token].logprob for token, row in rows if row], np.float32),
        finish_reason=completion.finish_reason,
        spans=tuple(Span(s.version, s.start, s.end) for s in completion.weight_versions or ()),
        supports=tuple(getattr(completion.logprobs, "supports", ())),
        prompt_logprobs=np.array(
            [row[token].logprob for token, row in prompt_rows if row], np.float32
        ),
        likely=_likely_sets(returned),
    )


def _likely_sets(rows: Sequence[Mapping[int, Any]]) -> TokenSets:
    """Return, for each token, the ids with a log-probability above minus infinity."""
    kept = [
        sorted((token, each.logprob) for token, each in row.items() if math.isfinite(each.logprob))
        for row in rows
    ]
    return TokenSets(
        sizes=np.array([len(row) for row in kept], np.int32),
        ids=np.array([token for row in kept for token, _ in row], np.int32),
        logprobs=np.array([logprob for row in kept for _, logprob in row], np.float32),
    )


def num_sampled(output_processor: Any) -> dict[str, int]:
    """Return the number of tokens that vLLM sampled for each running request."""
    states = list(output_processor.request_states.values())
    return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}


def update_calls(weights: HandedOver, where: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the worker calls that install weights: (method, keyword arguments).

    Args:
        weights: the weights or changes to install.
        where: tells vLLM's workers where the weights lie, as a field of `transfer.TransferUpdate`
            and the field's value.
    """
    info = {"update_info": dict(where)}
    if isinstance(weights, Mapping):
        return [("start_weight_update", {}), ("update_weights", info), ("finish_weight_update", {})]
    return [("patch_weights", info)]


def read_facts(vllm_config: Any) -> Facts:
    """Return the sizes in the configuration of a started vLLM."""
    return Facts(
        num_blocks=int(vllm_config.cache_config.num_gpu_blocks),
        block_size=int(vllm_config.cache_config.block_size),
        max_model_len=int(vllm_config.model_config.max_model_len),
        max_num_seqs=int(vllm_config.scheduler_config.max_num_seqs),
    )


log = logging.getLogger(__name__)

INLINE_CLOSE_TIMEOUT_S = 10.0
"""Longest time, in seconds, to wait for the last step of an engine that is closed. A new engine in
this process waits as long for its predecessor. Without a limit, a step that hangs would keep the
node from ending.
"""

_ALIVE = threading.Lock()
"""Lock that is held while this process has an `InlineBackend`."""

T = TypeVar("T")
Job = Callable[[], None]


class InlineBackend(Backend):
    """vLLM in this process: an LLMEngine and the thread that steps it."""

    def __init__(self, arguments: Mapping[str, Any], *, num_threads: int) -> None:
        """Start vLLM in this process, and the thread that runs its steps.

        Args:
            arguments: arguments for vLLM's EngineArgs.
            num_threads: CPU threads per operation; 0 keeps torch's setting.

        Raises:
            EngineDeadError: if vLLM does not start, with its reason.
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
            why = with_remedy(f"no answer in {START_TIMEOUT_S:g} s")
            raise EngineDeadError(f"vLLM does not start: {why}") from error
        self.facts = read_facts(self._engine.vllm_config)

    # --- the engine's thread ---------------------------------------------------------------------

    def _run(self, started: Future[None]) -> None:
        try:
            self._start()
        except BaseException as error:  # noqa: BLE001 -- vLLM may raise anything
            why = with_remedy(f"{type(error).__name__}: {error}")
            dead = EngineDeadError(f"vLLM does not start: {why}")
            dead.__cause__ = error
            _ALIVE.release()
            started.set_exception(dead)
            return
        started.set_result(None)
        try:
            self._loop()
        except Exception as error:  # after any failed step the engine cannot be trusted
            log.warning("vLLM died", exc_info=error)
            self.die(f"{type(error).__name__}: {error}")
        while not self._jobs.empty():  # the thread that queued a job waits for its result
            job = self._jobs.get()
            if job is not None:
                job()
        try:
            self._engine.engine_core.shutdown()
        except Exception as error:  # noqa: BLE001 -- a failed shutdown changes nothing
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
        answer = read_output(output)  # before `_pop`: if this fails, `die` fails the request
        if (future := self._pop(output.request_id)) is not None:
            future.set_result(answer)

    def _pop(self, request_id: str) -> Future[BackendOutput] | None:
        """Remove a request and return its future, which the caller must resolve.

        If the request has ended already, return None.
        """
        with self._lock:
            return self._futures.pop(request_id, None)

    # --- other threads ---------------------------------------------------------------------------

    def submit(self, request: BackendRequest) -> Future[BackendOutput]:
        """Begin to sample between two steps; return a future with the sample."""
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
            except Exception as error:  # noqa: BLE001 -- becomes the request's result
                if self._pop(request.request_id) is not None:  # not failed by `die` meanwhile
                    future.set_exception(error)

        with self._lock:
            if self.death is not None:
                future.set_exception(EngineDeadError(self.death.reason))
                return future
            self._futures[request.request_id] = future
        self._jobs.put(add)
        return future

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests between two steps of the engine's thread."""
        self._jobs.put(lambda: self._abort(request_ids))

    def _abort(self, request_ids: Sequence[str]) -> None:
        from vllm.v1.engine import FinishReason

        if self.death is not None:
            return
        # An LLMEngine returns no output for an aborted request, so read its tokens before the
        # abort.
        wanted = set(request_ids)
        states = self._engine.output_processor.request_states
        for state in [s for s in states.values() if s.external_req_id in wanted]:
            self._resolve(state.make_request_output([], None, FinishReason.ABORT, None))
        self._engine.abort_request(list(request_ids))

    def num_sampled(self) -> dict[str, int]:
        return num_sampled(self._engine.output_processor)

    def update(self, weights: HandedOver, tag: str, *, clears_cache: bool) -> None:
        """Swap weights between two steps, without a copy of the new weights."""
        from echo.engine.vllm.transfer import HANDED_OVER

        key = f"{id(self):x} {tag}"
        HANDED_OVER[key] = weights
        try:
            self._between_steps(lambda: self._swap(weights, key, tag, clears_cache))
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's layers may raise anything; the model is half updated
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
        except Exception as error:  # vLLM may raise anything
            raise EngineError(f"vLLM refuses the adapter: {describe_error(error)}") from error

    def _between_steps(self, change: Callable[[], T]) -> T:
        """Run `change` in the engine's thread. Return its result or raise its exception."""
        done: Future[T] = Future()

        def job() -> None:
            if self.death is not None:
                done.set_exception(EngineWasDeadError(self.death.reason))
                return
            try:
                found = change()
            except Exception as error:  # noqa: BLE001 -- raised in the thread that asked
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
        """Install weights in the engine's thread. vLLM reads them from `HANDED_OVER[key]`."""
        core = self._engine.engine_core.engine_core
        core.pause_scheduler("keep", clears_cache)
        for method, arguments in update_calls(weights, {"key": key}):
            self._engine.collective_rpc(method, kwargs=arguments)
        self._engine.set_weight_version(tag)
        core.resume_scheduler()

    def find_placement_fault(self) -> str:
        """Ask vLLM's worker, between two steps, why it cannot take patches. Return the answer."""
        [why] = self._between_steps(lambda: self._engine.collective_rpc("find_placement_fault"))
        return str(why)

    def die(self, reason: str) -> None:
        """Fail every request. The engine's thread ends after its present step or job."""
        with self._lock:
            self.death = self.death or Death(reason, len(self._futures))
            futures = list(self._futures.values())
            self._futures.clear()
        self._jobs.put(None)
        for future in futures:
            future.set_exception(EngineDeadError(reason))

    def close(self) -> None:
        """Stop the engine and its thread."""
        self.die("the engine is closed")
        self._thread.join(INLINE_CLOSE_TIMEOUT_S)


# --- hand-over by files ---------------------------------------------------------------------------


MEMORY = Path("/dev/shm")
"""Directory whose files lie in memory and can be mapped by vLLM's processes."""

HEADER_BYTES = 16 << 20
"""Upper bound of a tensor file's header (names and shapes)."""

PREFIX = "echo-weights-"
"""Beginning of the names of directories with files for vLLM."""

LOCK = "lock"
"""Name of a file in such a directory. The process that hands the files over has locked it."""


def hand_over_adapter(
    backend: Backend, tensors: Mapping[str, Tensor], lora: Lora, slot: VersionSlot
) -> None:
    """Write an adapter to a file, and let vLLM load the file while sampling continues.

    Args:
        backend: the running vLLM.
        tensors: the adapter's tensors, by name.
        lora: shape of the adapter.
        slot: the slot of the adapter's version.

    Raises:
        EngineDeadError: if vLLM has died.
        EngineError: if vLLM refuses the adapter, or there is no space for the file. The loaded
            adapters are unchanged.
    """
    with _directory_for(weight_bytes(tensors)) as directory:
        write_adapter(directory, tensors, lora, base_name="")
        backend.add_adapter(adapter_request(slot, str(directory)))


@contextmanager
def _directory_for(num_bytes: int) -> Iterator[Path]:
    """Yield a new directory in /dev/shm, or on disk if /dev/shm is too small.

    In containers /dev/shm is often small.
    """
    try:
        needed = num_bytes + HEADER_BYTES
        has_space = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= needed
        with (
            tempfile.TemporaryDirectory(
                prefix=PREFIX, dir=MEMORY if has_space else None
            ) as directory,
            _lock_in(Path(directory)),
        ):
            yield Path(directory)
    except OSError as error:
        raise EngineError(
            f"no space to hand the weights to vLLM: {error}; free {format_bytes(needed)} in "
            f"{MEMORY} (of a container: docker run --shm-size) or {tempfile.gettempdir()}"
        ) from error


@contextmanager
def _lock_in(directory: Path) -> Iterator[None]:
    """Have a locked file in a directory, so that `remove_leftovers` leaves the directory alone."""
    with (directory / f".{LOCK}").open("w") as file:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (directory / f".{LOCK}").rename(directory / LOCK)  # so it is never seen unlocked
        yield


def remove_leftovers() -> None:
    """Remove the directories of processes that were killed while they handed weights to vLLM.

    In /dev/shm, such a directory would keep the memory of a whole version.
    """
    for place in {MEMORY, Path(tempfile.gettempdir())}:
        for lock in place.glob(f"{PREFIX}*/{LOCK}"):
            if not is_locked(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)


# --- crash reason ---------------------------------------------------------------------------------
#
# When vLLM's process fails, it logs the error and exits; our process sees only the exit. So a log
# handler of ours in vLLM's process writes the error to a file that our process reads. A process
# that the kernel kills to free memory logs nothing, but the kernel counts such kills.


class CrashReason:
    """The file in which vLLM records the reason for a crash.

    The object also stores how many processes the kernel had killed before vLLM started.
    """

    def __init__(self) -> None:
        """Create the empty file. Count the processes that the kernel has killed so far."""
        handle, path = tempfile.mkstemp(prefix="echo-vllm-", suffix=".txt")
        os.close(handle)
        self._path = Path(path)
        self._num_kills = count_kills()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Put the file's path into the environment of processes that are started in the block."""
        os.environ[VARIABLE] = str(self._path)
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)

    def read(self, *, was_killed: bool = False) -> str:
        """Return why vLLM died; "" if the reason is unknown.

        Args:
            was_killed: whether SIGKILL ended one of vLLM's processes.
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
# One thread of our process runs an event loop that talks to vLLM's processes. If a vLLM process
# dies, ours goes on; if one hangs, calls time out and `close` ends it.


CLOSE_TIMEOUT_S = 20.0
"""Longest time, in seconds, to wait until vLLM's processes have ended, and again for our thread.
Without a limit, a process that hangs would keep the node from ending.
"""


class ProcessBackend(Backend):
    """vLLM in its own processes: an AsyncLLM and the thread of its event loop."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start vLLM in its own processes, and the event loop for these processes.

        Args:
            arguments: arguments for vLLM's AsyncEngineArgs.

        Raises:
            EngineDeadError: if vLLM does not start, with its reason.
        """
        self._arguments = arguments
        self._tasks: set[asyncio.Task[Any]] = set()
        self._crash_reason = CrashReason()
        before = active_children()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="vllm-client")
        self._thread.start()
        try:
            self._post(self._start(arguments)).result(timeout=START_TIMEOUT_S)
        except Exception as error:  # vLLM may raise anything
            is_late = isinstance(error, TimeoutError) and not str(error)
            late = f"no answer in {START_TIMEOUT_S:g} s"
            reason = late if is_late else f"{type(error).__name__}: {error}"
            why = self._crash_reason.read() or reason
            # If vLLM is late, our thread waits for its process, which holds the GPU. While this
            # process starts, it does not react to SIGTERM.
            for process in active_children():
                if process.name.startswith(PROCESS_NAME) and process not in before:
                    process.kill()
            self._stop_loop()
            raise EngineDeadError(f"vLLM does not start: {with_remedy(why)}") from error
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

        # vLLM's processes inherit the blocked signals: only the node handles Ctrl-C and a closed
        # terminal, and it finishes its work first. Python's resource tracker starts first, since
        # its start unblocks SIGINT again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        with self._crash_reason.recorded():
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
        # Not `pause_generation`: it sleeps for 20 ms to let outputs arrive before it returns.
        pause = engine.engine_core.pause_scheduler_async
        await self._bounded(pause(mode="keep", clear_cache=clears_cache))
        for method, arguments in update_calls(weights, {"path": str(path)}):
            await self._bounded(engine.collective_rpc(method, kwargs=arguments))
        await self._bounded(engine.update_weight_version(tag))
        await self._bounded(engine.resume_generation())

    async def _bounded(self, call: Awaitable[T]) -> T:
        # Without a timeout, a call would wait forever if vLLM's process died during it.
        return await asyncio.wait_for(call, TIMEOUT_S)

    def _why(self, error: BaseException) -> str:
        manager = self._engine.engine_core.resources.engine_manager
        processes = [] if manager is None else manager.processes
        was_killed = any(process.exitcode == -signal.SIGKILL for process in processes)
        return self._crash_reason.read(was_killed=was_killed) or describe_error(error)

    # --- other threads ---------------------------------------------------------------------------

    @property
    def _is_dead(self) -> bool:
        return self.death is not None or bool(self._engine.errored)

    def submit(self, request: BackendRequest) -> Future[BackendOutput]:
        """Begin to sample; return a future with the sample."""
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
        """Write the weights to a file, and swap them while generation is paused."""
        if isinstance(weights, Mapping):
            num_bytes = weight_bytes(weights)
        else:
            num_bytes = sum(joined.data.nbytes for joined in weights)
        with _directory_for(num_bytes) as directory:
            if isinstance(weights, Mapping):
                save_safetensors(directory, weights, max_shard_bytes=1 << 62)
                path = directory / WEIGHTS_FILE
            else:
                path = save_changes(directory, weights)
            self._see_through(lambda: self._swap(weights, path, tag, clears_cache))

    def find_placement_fault(self) -> str:
        """Return why a worker of vLLM cannot take patches; "" if all workers can."""
        found: list[str] = self._see_through(
            lambda: self._bounded(self._engine.collective_rpc("find_placement_fault"))
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
        """Run a coroutine on the event loop in bounded time, and return its result.

        Raises:
            EngineWasDeadError: if vLLM had died before.
            EngineDeadError: if vLLM dies, does not answer, or fails. Its weights may be partly
                updated.
            EngineError: if vLLM reports an error but still runs, and `may_refuse` is true.
        """
        if self._is_dead:
            raise EngineWasDeadError("it had died before")
        try:
            return self._post(ask()).result(6 * TIMEOUT_S)
        except Exception as error:  # vLLM may raise anything
            is_late = isinstance(error, TimeoutError)
            why = f"no answer in {TIMEOUT_S:g} s" if is_late else self._why(error)
            if may_refuse and not (is_late or self._is_dead):
                raise EngineError(f"vLLM refuses the adapter: {why}") from error
            reason = f"the update failed: {why}"
            self.die(reason)
            raise EngineDeadError(reason) from error

    def die(self, reason: str) -> None:
        """Fail every request with this reason, and record the death."""
        self.death = self.death or Death(reason, len(self._tasks))
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no request is running
            self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def close(self) -> None:
        """End vLLM's processes and our thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        self.die("the engine is closed")
        try:
            self._post(self._shut_down()).result(CLOSE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 -- a failed shutdown changes nothing
            log.warning("vLLM did not end as it should: %s", describe_error(error))
        self._stop_loop()

    async def _shut_down(self) -> None:
        # Shutdown blocks the loop, so let the cancelled requests run first.
        await asyncio.sleep(0)
        self._engine.shutdown()

    def _stop_loop(self) -> None:
        self._crash_reason.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
