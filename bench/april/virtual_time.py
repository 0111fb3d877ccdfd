"""Asyncio loop on virtual time.

Nodes, roles and transports run as they are. Time stands still while anything computes, in the
loop or in one of its threads, and jumps to the next timer, or to the end of the next thread's
`sleep`, once nothing does. A run is therefore the same on a busy machine. When it is over no more
time passes, and threads that still wait for it end with a `TimeIsOverError`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

Result = TypeVar("Result")


class TimeIsOverError(Exception):
    """The run has ended that a thread was waiting in."""


class VirtualClock:
    """Seconds since the start, and the threads that wait for them to pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()
        self._num_busy = 0
        self._serials = itertools.count()
        self._sleepers: list[tuple[float, int, threading.Event]] = []
        self._waiting: set[threading.Event] = set()
        """What threads wait for, asleep or in `wait`."""
        self._is_over = False
        self.on_idle: Callable[[], object] = lambda: None

    @property
    def is_idle(self) -> bool:
        """Whether every thread sleeps."""
        return self._num_busy == 0

    def count(self, change: int) -> None:
        """Note that a thread has work, or has none any more."""
        with self._lock:
            self._num_busy += change

    def sleep(self, seconds: float) -> None:
        """Have time pass for the calling thread.

        Raises:
            TimeIsOverError: if the run ends first.
        """
        event = threading.Event()
        with self._lock:
            wakes_at = self.now + seconds
            heapq.heappush(self._sleepers, (wakes_at, next(self._serials), event))
        self.wait(event)

    def wait(self, event: threading.Event) -> None:
        """Have the calling thread wait for another one's `wake`, while time goes on.

        Raises:
            TimeIsOverError: if the run ends first.
        """
        with self._lock:
            if self._is_over:
                raise TimeIsOverError
            self._num_busy -= 1
            self._waiting.add(event)
        if self.is_idle:
            self.on_idle()
        event.wait()
        with self._lock:
            self._waiting.discard(event)
            if self._is_over:
                raise TimeIsOverError

    def wake(self, event: threading.Event) -> None:
        """End a thread's `wait`; it counts as at work from now on."""
        with self._lock:
            self._wake(event)

    def end(self) -> None:
        """Let no more time pass for threads, and have all that wait for it end."""
        with self._lock:
            self._is_over = True
            self._sleepers.clear()
            for event in self._waiting:
                self._wake(event)

    def _wake(self, event: threading.Event) -> None:
        if not event.is_set():
            self._num_busy += 1
            event.set()

    def advance(self, limit: float) -> None:
        """Jump to `limit`, or to where the first sleeping thread goes on."""
        with self._lock:
            if self._sleepers and self._sleepers[0][0] <= limit:
                self.now, _, event = heapq.heappop(self._sleepers)
                self._wake(event)
            elif limit < float("inf"):
                self.now = limit


class _Selector(selectors.DefaultSelector):
    """Waits for threads at work, never for time."""

    clock: VirtualClock

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        while not events and (timeout is None or timeout > 0):
            if self.clock.is_idle:
                # What a thread did last is seen before time goes on.
                events = super().select(0)
                if not events:
                    limit = float("inf") if timeout is None else self.clock.now + timeout
                    self.clock.advance(limit)
                    return super().select(0)
            else:
                events = super().select(0.02)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; its `clock` is also that of the threads it starts."""

    def __init__(self) -> None:
        selector = _Selector()
        selector.clock = self.clock = VirtualClock()
        super().__init__(selector)
        # So that the loop looks at once, and not only when it has waited for a while.
        self.clock.on_idle = lambda: self.call_soon_threadsafe(lambda: None)

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        self.clock.count(1)
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(lambda _: self.clock.count(-1))
        return future


def run(main: Callable[[VirtualClock], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine function to its end in virtual time."""
    loop = VirtualLoop()

    async def to_the_end() -> Result:
        try:
            return await main(loop.clock)
        finally:
            loop.clock.end()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(to_the_end())
