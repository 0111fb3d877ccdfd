"""Provides virtual time for asyncio, through an event loop that makes calls without waiting.

Tasks, timers and timeouts run unchanged on a `VirtualLoop`. When no callback is ready, time jumps
to the next timer. Calls for the same instant are made in the order of scheduling. So the same
program always gives the same history. The loop has no sockets and no threads. `InlineThreads` makes
a node's thread calls in the loop, after their simulated times.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from echo.runtime.threads import Returned


class StandstillError(RuntimeError):
    """The program has not ended, but the loop has no further calls to make."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that advances time to the next timer when the loop is idle.

    Timers of the same instant fire in the order of scheduling. asyncio's own loops do not guarantee
    this order. So messages that arrive together keep their order.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self.num_calls = 0
        """Number of callbacks that the loop has made since its start."""

    def time(self) -> float:
        """Return the virtual seconds since the start."""
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback for an instant.

        Callbacks for the same instant run in the order in which they were scheduled.
        """
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _run_once(self) -> None:
        """Make the ready calls. If there are none, advance time to the next timer.

        Raises:
            StandstillError: if no call is ready and no timer is set.
        """
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self)))
                raise StandstillError(
                    f"nothing will ever happen: at {self._now:.3f} s no timer is set and nothing "
                    f"is ready, and these tasks wait: {waiting or 'none'}"
                )
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        self.num_calls += len(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 -- as its base class does

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing, because the loop drops a cancelled timer when the timer's instant comes."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> NoReturn:
        """Refuse to run a function in a thread, because its virtual duration is unknown.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{func!r} was to run in a thread: hand InlineThreads to its owner")

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing, because the loop has no sockets."""

    def _write_to_self(self) -> None:
        """Do nothing, because no other thread calls the loop."""


class InlineThreads:
    """Takes the place of a node's threads. Calls are made in the event loop instead.

    Each call is made after its simulated time.
    """

    def __init__(self) -> None:
        self.is_closed = False

    def takes(self, pool: str, function: Callable[..., Any]) -> float:
        """Return how many simulated seconds a call of `function` takes in this pool."""
        return 0.0

    def pool(self, name: str, num_threads: int = 1) -> InlinePool:
        """Return a new pool that makes at most `num_threads` calls at a time."""
        return InlinePool(self, name, num_threads)

    def close(self) -> None:
        """Drop all scheduled calls, even those that have already begun."""
        self.is_closed = True


class InlinePool:
    """Takes the place of a pool of threads.

    Calls begin in the order in which they were requested.
    """

    def __init__(self, threads: InlineThreads, name: str, num_threads: int) -> None:
        self._threads = threads
        self._name = name
        self._free_at = [-math.inf] * num_threads

    def run(self, function: Callable[..., Returned], *arguments: Any) -> asyncio.Future[Returned]:
        """Schedule a call of `function`. Return a future that gets the call's result.

        The call begins when a simulated thread of the pool is free. The function runs at the end of
        the call's simulated time.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Returned] = loop.create_future()
        begins_at = max(loop.time(), self._free_at[0])
        ends_at = begins_at + self._threads.takes(self._name, function)
        heapq.heapreplace(self._free_at, ends_at)

        def call() -> None:
            if self._threads.is_closed or future.cancelled():
                return
            try:
                result = function(*arguments)
            except BaseException as error:  # noqa: BLE001 -- the caller's, as from a thread
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():  # the call may have ended its own node
                    future.set_result(result)

        if ends_at > loop.time():
            loop.call_at(ends_at, call)
        else:
            loop.call_soon(call)
        return future
