"""What a worker's terminal shows while it works: one line below its log, drawn anew in place.

Where standard error is no terminal the same text is a line of the log now and then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable
from typing import TextIO

from echo.core.metrics import WorkerView

REFRESH_S = 1.0
"""Seconds between two states of the line."""
LOG_S = 60.0
"""Seconds between two lines of a log."""
RATE_WINDOW_S = 10.0
"""Seconds over which tokens per second are averaged, at least."""

_ERASE = "\r\x1b[K"


class StatusLine(logging.StreamHandler[TextIO]):
    """Writes log lines to a stream, and below them a status line if the stream is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        """Begin without a status."""
        super().__init__(stream)
        self.is_live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        """Whether `show` shows anything."""
        self._status = ""

    def show(self, status: str) -> None:
        """Show a status in place of the one before; an empty one erases it."""
        if not self.is_live:
            return
        self.acquire()
        try:
            # A line that wraps could not be erased.
            self._status = status[: shutil.get_terminal_size().columns - 1]
            self.stream.write(_ERASE + self._status)
            self.flush()
        except OSError:  # the terminal is gone
            self.is_live = False
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log line above the status; the caller holds the handler's lock."""
        status = self._status
        if status:
            self.show("")
        super().emit(record)
        if status:
            self.show(status)


class WorkerStatus:
    """Tokens per second, groups and version of a worker, in words."""

    def __init__(self) -> None:
        """Begin without a measurement."""
        self._sampled: deque[tuple[float, int]] = deque()

    def text(self, view: WorkerView, *, now: float) -> str:
        """Return the status at an instant, seconds on any clock."""
        self._sampled.append((now, view.num_tokens))
        while len(self._sampled) > 2 and self._sampled[1][0] <= now - RATE_WINDOW_S:
            self._sampled.popleft()
        (since, before), (_, newest) = self._sampled[0], self._sampled[-1]
        rate = (newest - before) / (now - since) if now > since else 0.0
        groups = "group" if view.num_groups == 1 else "groups"
        return (
            f"{view.version}  {rate:,.0f} tokens/s  {view.num_groups} {groups} delivered  "
            f"{view.activity}"
        )


async def show_status(
    view: Callable[[], WorkerView], log: logging.Logger, line: StatusLine
) -> None:
    """Tell a worker's status until cancelled: on its terminal, or else in its log."""
    status, loop = WorkerStatus(), asyncio.get_running_loop()
    told_at = loop.time()
    try:
        while True:
            await asyncio.sleep(REFRESH_S)
            text = status.text(view(), now=loop.time())
            if line.is_live:
                line.show(text)
            elif loop.time() >= told_at + LOG_S:
                told_at = loop.time()
                log.info("%s", text)
    finally:
        line.show("")
