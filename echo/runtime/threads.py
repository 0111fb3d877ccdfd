"""Thread pools: the event loop makes each blocking call through a pool.

A process uses real threads (`ThreadPools`). A simulation on virtual time (`echo/sim/clock.py`)
calls the functions in the loop, so its runs are deterministic. Some calls start more threads: those
of an engine, of the coder of deltas, and of the hashing of a recovered version. The loop waits only
for the call, not for its threads. Simulations make none of these calls.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

Returned = TypeVar("Returned")

MAX_BLOCKING = min(32, (os.cpu_count() or 1) + 4)
"""Number of threads for calls that mostly wait, such as rewards.

The number is the same as in asyncio's default executor.
"""


class Pool(Protocol):
    """Threads for one purpose. Calls start in the order in which `run` received them."""

    def run(self, function: Callable[..., Returned], *arguments: Any) -> asyncio.Future[Returned]:
        """Call a function in a thread. Return a future of the result or exception."""


class Threads(Protocol):
    """The pools of a node for its blocking calls."""

    def pool(self, name: str, num_threads: int = 1) -> Pool:
        """Return a new pool of `num_threads` threads. `close` ends the pool."""

    def close(self) -> None:
        """Start no more calls in any pool. Running calls continue to their end."""


class ThreadPools:
    """The real threads of a process, in pools."""

    def __init__(self) -> None:
        self._executors: list[ThreadPoolExecutor] = []

    def pool(self, name: str, num_threads: int = 1) -> Pool:
        """Return a new pool of `num_threads` threads. The threads are named after the pool."""
        executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._executors.append(executor)
        return _ExecutorPool(executor)

    def close(self) -> None:
        """Cancel calls that have not started. Do not wait for running calls."""
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)


class _ExecutorPool:
    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor

    def run(self, function: Callable[..., Returned], *arguments: Any) -> asyncio.Future[Returned]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, function, *arguments)
