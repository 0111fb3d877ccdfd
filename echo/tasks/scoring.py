"""Run a user's reward function so that nothing it does can harm the worker.

It may raise, return nonsense, or never return. A call runs in a daemon thread; when it takes
longer than its time limit the thread is abandoned and a new one takes its place. Python cannot
kill a thread, so their number is bounded: once MAX_STUCK_THREADS calls are stuck, every further
call is refused until one of them ends.

Why a thread and not a process: handing a call to a thread costs some 20 microseconds, to a process
several times that, which at the thousands of short completions per second of a small model would be
the larger part of the cost; a thread shares the task object, caches included, and needs no
serialisation. The limit of the choice: code that keeps the interpreter's lock without end
(catastrophic backtracking in one `re` match, one huge integer power) stalls the process whatever
we do here. The built-in tasks bound their input for that reason.
"""

from __future__ import annotations

import math
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from echo.errors import EchoError
from echo.tasks.task import Example, Task

MAX_STUCK_THREADS = 8
"""Abandoned calls that may be pending at once; each holds a stack and perhaps a core."""


class RewardError(EchoError):
    """A reward function raised, returned no finite number, or took too long."""


@dataclass(frozen=True, slots=True)
class _Call:
    task: Task
    example: Example
    completion: str
    result: Future[object] = field(default_factory=Future)


class _ScoringThread(threading.Thread):
    """Perform calls one after the other until told to stop."""

    def __init__(self) -> None:
        super().__init__(name="echo-reward", daemon=True)
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call.result.set_result(call.task.reward(call.example, call.completion))
            except BaseException as error:  # noqa: BLE001 -- the caller learns of it, whatever it is
                call.result.set_exception(error)


class _Scorer:
    """Hand calls to a thread; replace it when a call does not come back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_ScoringThread] = []
        self._stuck: list[_ScoringThread] = []

    def call(self, call: _Call, timeout_s: float) -> BaseException | None:
        """Perform a call; return what it raised, or raise TimeoutError if it is still going."""
        thread = self._take_thread()
        thread.calls.put(call)
        try:
            error = call.result.exception(timeout_s)
        except TimeoutError:
            self._abandon(thread)
            raise
        self._give_back(thread)
        return error

    def _take_thread(self) -> _ScoringThread:
        with self._lock:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            if len(self._stuck) >= MAX_STUCK_THREADS:
                raise RewardError(
                    f"{len(self._stuck)} calls of reward functions never returned; no more are "
                    "started until one ends: make the reward function stop by itself"
                )
            return self._idle.pop() if self._idle else _ScoringThread()

    def _give_back(self, thread: _ScoringThread) -> None:
        with self._lock:
            self._idle.append(thread)

    def _abandon(self, thread: _ScoringThread) -> None:
        thread.calls.put(None)  # should the call return after all, the thread ends
        with self._lock:
            self._stuck.append(thread)


_scorer = _Scorer()


def score(task: Task, example: Example, completion: str, timeout_s: float) -> float:
    """Return what `completion` is worth, or say what went wrong.

    Args:
        task: the judge.
        example: the prompt that was answered.
        completion: the answer's text.
        timeout_s: seconds that the reward function may take.

    Raises:
        RewardError: if it raises, does not return in time, or returns anything but a finite
            number. The message names the task and the example.
    """
    where = f"{type(task).__name__}.reward on {example}"
    call = _Call(task, example, completion)
    try:
        error = _scorer.call(call, timeout_s)
    except TimeoutError:
        raise RewardError(
            f"{where} did not return within {timeout_s:g} s; raise task.reward_timeout_s "
            "or make it faster"
        ) from None
    if error is not None:
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
    value = call.result.result()
    try:
        reward = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if isinstance(value, str | bytes) or not math.isfinite(reward):
        raise RewardError(f"{where} returned {value!r}; it must return a finite number")
    return reward
