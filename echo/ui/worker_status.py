"""Shows the status of a worker: in a line below its log, or every minute in its log."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections import deque
from typing import TextIO

from echo.core.monitoring.metrics import WorkerView
from echo.core.monitoring.status import RATE_WINDOW_S
from echo.core.timers import LOG_PERIOD_S
from echo.core.units import counted

_ERASE = "\r\x1b[K"


class StatusLine(logging.StreamHandler[TextIO]):
    """A log handler that keeps a status line below the log lines on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        """Start with an empty status. Log lines and the status are written to `stream`."""
        super().__init__(stream)
        self.is_live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        """Whether the stream is a terminal that can show a status line."""
        self._status = ""

    def show(self, status: str) -> None:
        """Show `status` instead of the present status. An empty status erases the line."""
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
        """Write a log line above the status line. The caller holds the handler's lock."""
        status = self._status
        if status:
            self.show("")
        super().emit(record)
        if status:
            self.show(status)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- logging's name
        """Ignore a write error, because a closed terminal cannot show it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class WorkerStatus:
    """Reports a worker's speed, groups and version on its terminal or in its log."""

    def __init__(self, line: StatusLine, log: logging.Logger) -> None:
        """Start without a measurement of the speed."""
        self._line, self._log = line, log
        self._reported_at: float | None = None
        self._sampled: deque[tuple[float, int]] = deque()

    def report(self, view: WorkerView, *, now: float) -> None:
        """Show the worker's state on the status line.

        Without a terminal, log the state every LOG_PERIOD_S seconds. `now` is the time in seconds.
        """
        text = self.text(view, now=now)
        if self._line.is_live:
            self._line.show(text)
        elif self._reported_at is None:
            self._reported_at = now  # the log has just reported the start
        elif now >= self._reported_at + LOG_PERIOD_S:
            self._reported_at = now
            self._log.info("%s", text)

    def text(self, view: WorkerView, *, now: float) -> str:
        """Return the text of the status line at the time `now` in seconds."""
        self._sampled.append((now, view.num_tokens))
        while len(self._sampled) > 2 and self._sampled[1][0] <= now - RATE_WINDOW_S:
            self._sampled.popleft()
        (since, before), (_, newest) = self._sampled[0], self._sampled[-1]
        rate = (newest - before) / (now - since) if now > since else 0.0
        groups = counted(view.num_groups, "group")
        return f"{view.version}  {rate:,.0f} tokens/s  {groups} delivered  {view.activity}"
