"""The one thread in which small files beside the arenas are written and removed, in order.

Even a small write waits where the kernel holds back whoever dirties more pages, or commits the
journal of its file system; the loop must not. What is done here is of use to a later process only,
so nobody waits for it either, but `flush`: before the directory is read, or its room counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger(__name__)


class DiskThread:
    """Calls functions, one after the other, in the order in which they were handed over."""

    def __init__(self) -> None:
        """Start; the thread begins with the first call."""
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="arenas")

    def call(self, function: Callable[[], None]) -> None:
        """Call a function that handles its own faults; at once after `close`."""
        if self._pool is None:
            function()
        else:
            self._pool.submit(function).add_done_callback(_report)

    def flush(self) -> None:
        """Wait until everything handed over so far was called."""
        if self._pool is not None:
            self._pool.submit(lambda: None).result()

    def close(self) -> None:
        """Wait for everything, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _report(future: Future[None]) -> None:
    error = future.exception()
    if error is not None:
        _log.error("internal error", exc_info=error)
