"""Run a user's reward function in this process so that little of what it does can harm it.

It may raise, return nonsense, or never return. A call runs in a daemon thread; when it takes
longer than its time limit the thread is abandoned and a new one takes its place. Python cannot
kill a thread, so their number is bounded: once MAX_STUCK_THREADS calls are stuck, every further
call is refused until one of them ends.

Handing a call to a thread costs much less than to a process, which at the thousands of short
completions per second of a small model would be the larger part of the cost.
The limit of a thread: code that keeps the interpreter's lock without end (catastrophic
backtracking in one `re` match, one huge integer power) stalls the process whatever we do here. So
only tasks that say of themselves that they are bounded run this way; others get processes of their
own (pool.py).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from echo.tasks.calls import Answer
from echo.tasks.faults import RewardError

MAX_STUCK_THREADS = 8
"""Abandoned calls that may be pending at once; each holds a stack and perhaps a core."""


@dataclass(frozen=True, slots=True)
class _Job:
    function: Callable[[], Answer]
    result: Future[Answer] = field(default_factory=Future)


class _CallingThread(threading.Thread):
    """Perform jobs one after the other until told to stop."""

    def __init__(self) -> None:
        super().__init__(name="echo-reward", daemon=True)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                job.result.set_result(job.function())
            except BaseException as error:  # noqa: BLE001 -- the caller learns of it, whatever it is
                job.result.set_exception(error)
            del job  # it may refer to whoever made this thread, and keep both alive


class BoundedCalls:
    """Hand calls to threads; replace one whose call does not come back.

    The threads end when nobody refers to this any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_CallingThread] = []
        self._stuck: list[_CallingThread] = []
        weakref.finalize(self, _end, self._idle).atexit = False

    def call(self, function: Callable[[], Answer], timeout_s: float) -> Answer:
        """Return what the function returns.

        Raises:
            TimeoutError: if it takes longer; its thread is left alone.
            RewardError: if too many threads have been left alone already.
        """
        job = _Job(function)
        thread = self._take_thread()
        thread.jobs.put(job)
        try:
            error = job.result.exception(timeout_s)
        except TimeoutError:
            self._abandon(thread)
            raise
        self._give_back(thread)
        if error is not None:
            raise error
        return job.result.result()

    def _take_thread(self) -> _CallingThread:
        with self._lock:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            if len(self._stuck) >= MAX_STUCK_THREADS:
                raise RewardError(
                    f"{len(self._stuck)} calls of reward functions never returned; no more are "
                    "started until one ends: make the reward function stop by itself",
                    reason="reward_timeout",
                )
            return self._idle.pop() if self._idle else _CallingThread()

    def _give_back(self, thread: _CallingThread) -> None:
        with self._lock:
            self._idle.append(thread)

    def _abandon(self, thread: _CallingThread) -> None:
        thread.jobs.put(None)  # should the call return after all, the thread ends
        with self._lock:
            self._stuck.append(thread)


def _end(threads: list[_CallingThread]) -> None:
    for thread in threads:
        thread.jobs.put(None)
