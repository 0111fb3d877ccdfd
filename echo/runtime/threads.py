"""Interface to threads: every blocking call that the event loop waits for goes through it.

A process uses real threads (`ThreadPools`). A simulation on virtual time (`echo/sim/clock.py`)
calls the functions in the loop, so its runs are deterministic. Some parts start threads of their
own inside such a call: an engine, the coder of deltas, the hashing of a recovered version. The loop
never waits for these threads directly, and a simulation uses no such part.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

Returned = TypeVar("Returned")

MAX_BLOCKING = min(32, (os.cpu_count() or 1) + 4)
"""Number of threads for calls that mostly wait, such as rewards: as in asyncio's default executor.
"""


class Pool(Protocol):
    """Threads for one purpose; calls start in the order in which `run` was called."""

    def run(self, function: Callable[..., Returned], *arguments: Any) -> asyncio.Future[Returned]:
        """Call a function in a thread; return a future of its result or exception."""


class Threads(Protocol):
    """The pools in which a node makes its blocking calls."""

    def pool(self, name: str, num_threads: int = 1) -> Pool:
        """Return a new pool of `num_threads` threads; `close` ends the pool."""

    def close(self) -> None:
        """Start no further calls in any pool; running calls continue to their end."""


class ThreadPools:
    """The real threads of a process, by pools."""

    def __init__(self) -> None:
        """Start without threads; each thread is started when a call needs it."""
        self._executors: list[ThreadPoolExecutor] = []

    def pool(self, name: str, num_threads: int = 1) -> Pool:
        """Return a new pool of `num_threads` threads, which are named after the pool."""
        executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._executors.append(executor)
        return _ExecutorPool(executor)

    def close(self) -> None:
        """Cancel calls that have not started; do not wait for running calls."""
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)


class _ExecutorPool:
    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor

    def run(self, function: Callable[..., Returned], *arguments: Any) -> asyncio.Future[Returned]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, function, *arguments)
