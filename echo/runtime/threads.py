"""The port for threads: every call that the event loop waits for.

A process has real threads (`ThreadPools`). On virtual time `echo/sim/clock.py` calls the functions
in the loop, so that a run is the same each time. A part that blocks inside such a call (an engine,
the coder of deltas, the hashing of a recovered version) may have threads of its own: the loop never
waits for them, and a simulation calls none of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

Returned = TypeVar("Returned")

MAX_BLOCKING = min(32, (os.cpu_count() or 1) + 4)
"""Threads for calls that mostly wait, such as rewards: as many as asyncio takes by itself."""


class Pool(Protocol):
    """Threads of one purpose, which take calls in the order in which they are made."""

    def run(self, function: Callable[..., Returned], *arguments: Any) -> asyncio.Future[Returned]:
        """Call a function off the loop; the future has its result, or what it raised."""


class Threads(Protocol):
    """Where a node's blocking calls are made."""

    def pool(self, name: str, num_threads: int = 1) -> Pool:
        """Return a new pool; it ends with `close`."""

    def close(self) -> None:
        """Begin no more calls; those under way end by themselves."""


class ThreadPools:
    """The threads of a process."""

    def __init__(self) -> None:
        """Begin without a thread: each starts when it is needed."""
        self._executors: list[ThreadPoolExecutor] = []

    def pool(self, name: str, num_threads: int = 1) -> Pool:
        """Return a new pool; its threads bear its name."""
        executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._executors.append(executor)
        return _ExecutorPool(executor)

    def close(self) -> None:
        """Begin no more calls, and wait for none of those under way."""
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)


class _ExecutorPool:
    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor

    def run(self, function: Callable[..., Returned], *arguments: Any) -> asyncio.Future[Returned]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, function, *arguments)
