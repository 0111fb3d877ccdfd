"""Virtual time for asyncio: calls in order of their instants, and nothing in between.

On a `VirtualLoop` tasks, timers and timeouts run as they are, and time jumps to the next timer once
nothing is ready. Calls of one instant happen in the order in which they were asked for, so that the
same calls give the same history. It has no sockets and no threads. The loop does the work of a
node's threads (`InlineThreads`), in the simulated time that the caller states.
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
    """The loop has not ended, and nothing is scheduled on it."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time passes only while nothing is ready, and then at once.

    Timers of one instant fire in the order in which they were set, which asyncio does not promise:
    messages that arrive together keep their order.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self.num_calls = 0
        """Callbacks made so far."""

    def time(self) -> float:
        """Return seconds since the start."""
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Have something called at an instant."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def _run_once(self) -> None:
        """Make the calls that are ready; where none is, let time pass until a timer is due.

        Raises:
            StandstillError: if there is no timer either.
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
        """Leave it among the timers until its time has come."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> NoReturn:
        """Refuse: how long a thread takes, virtual time does not know.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{func!r} was to run in a thread: hand InlineThreads to its owner")

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no sockets."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread calls."""


class InlineThreads:
    """A node's threads on virtual time: each call is made in the loop, when it would have ended."""

    def __init__(self) -> None:
        self.is_closed = False

    def takes(self, pool: str, function: Callable[..., Any]) -> float:
        """Return the seconds that the next call of a pool takes."""
        return 0.0

    def pool(self, name: str, num_threads: int = 1) -> InlinePool:
        """Return a new pool, which makes `num_threads` calls at a time."""
        return InlinePool(self, name, num_threads)

    def close(self) -> None:
        """Make no more calls, those under way included."""
        self.is_closed = True


class InlinePool:
    """Calls of one purpose, in the order in which they were asked for."""

    def __init__(self, threads: InlineThreads, name: str, num_threads: int) -> None:
        self._threads = threads
        self._name = name
        self._free_at = [-math.inf] * num_threads

    def run(self, function: Callable[..., Returned], *arguments: Any) -> asyncio.Future[Returned]:
        """Make a call once a thread has been free for as long as it takes."""
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
