"""Writes the output of commands: logs, errors and exit codes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from echo.core.errors import (
    ConfigError,
    DataError,
    EchoError,
    RefusedError,
    RolledBackError,
    StorageError,
    TransportError,
)
from echo.core.units import one_line, without_keys, without_secrets

if TYPE_CHECKING:
    from rich.console import Console

    from echo.ui.worker_status import StatusLine

EXIT_CODES: dict[type[EchoError], int] = {
    ConfigError: 2,
    DataError: 3,
    TransportError: 4,
    RefusedError: 5,
    RolledBackError: 6,
}
"""The exit code of each kind of error; every other error has the exit code 1."""

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


class LogFormatter(logging.Formatter):
    """Formats a log record so that text from a peer is harmless.

    Unprintable characters are escaped, so the text cannot control a terminal. All lines of a record
    after the first are indented, so the text cannot imitate a record. Keys are removed from
    addresses.
    """

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(map(one_line, without_keys(super().format(record)).split("\n")))


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON; keys are removed from addresses."""

    def __init__(self, node: str) -> None:
        """Put the node's name into every line."""
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's time (UTC), level and message.

        If the record has a traceback, add it.
        """
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "node": self._node,
            "message": without_keys(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = without_keys(self.formatException(record.exc_info))
        return json.dumps(line)


class _Forward(logging.Handler):
    """Passes records to all handlers of a node's log, also to handlers that are added later."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.handle(record)


MAX_LOG_BYTES = 32 << 20
"""Size at which a log file NAME.log is full. Its content then replaces the content of
NAME.log.1."""


class LogFile(RotatingFileHandler):
    """Writes log records to a file, and reports once if the file cannot be written.

    When the file has MAX_LOG_BYTES, its content is copied to a second file, and the file is
    emptied. The file is not renamed, because the process's standard output may be redirected into
    it.
    """

    def __init__(self, path: Path, log: logging.Logger) -> None:
        """Open the file at `path` for writing; report write errors to `log`.

        Raises:
            OSError: if the file cannot be opened for writing.
        """
        super().__init__(path, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8")
        self.rotator = _copy_and_empty
        self._log = log
        self._has_failed = self._fails = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to the file. If that fails, drop the record."""
        self._fails = False
        super().emit(record)
        self._has_failed &= self._fails

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- logging calls it so
        """Log why a record was not written.

        Several failures in a row cause only one log line.
        """
        self._fails = True
        if not self._has_failed:
            self._has_failed = True
            text = "%s cannot be written: %s; its lines are lost until there is space"
            self._log.warning(text, self.baseFilename, sys.exc_info()[1])


def _copy_and_empty(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    os.truncate(source, 0)


def make_log(
    name: str, *, to_file: Path | None, to_terminal: bool, is_json: bool = False
) -> logging.Logger:
    """Return a node's log, which writes to a file, to standard error, or to both.

    If `is_json` is set, each line is a JSON object; otherwise it is text. The log also gets the
    messages of engines, the transport, tasks and the rest of the runtime.

    Raises:
        StorageError: if the file cannot be written.
    """
    from echo.ui.worker_status import StatusLine  # imported here: --help needs no rich

    log = logging.getLogger(f"echo.{name}")
    log.setLevel(logging.INFO)
    log.propagate = False
    handlers: list[logging.Handler] = []
    if to_file is not None:
        try:
            to_file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(LogFile(to_file, log))
        except OSError as error:
            raise StorageError(
                f"{to_file} cannot be written: {error.strerror}; set run.dir to a directory that "
                "can be"
            ) from error
    if to_terminal:
        handlers.append(StatusLine(sys.stderr))
    for handler in handlers:
        text = LogFormatter(LOG_FORMAT, datefmt="%H:%M:%S")
        handler.setFormatter(JsonFormatter(name) if is_json else text)
        log.addHandler(handler)
    for part in ("engine", "net", "runtime", "tasks", "ui"):
        logging.getLogger(f"echo.{part}").handlers[:] = [_Forward(log)]
    logging.getLogger("echo.engine").setLevel(logging.INFO)
    return log


@contextmanager
def others_in_log(log: logging.Logger) -> Iterator[None]:
    """Within the `with` block, redirect standard output and standard error into the log's file.

    Libraries and their child processes write warnings to the terminal, where a warning would break
    the status line. Without a status line nothing is redirected.
    """
    from echo.ui.worker_status import StatusLine  # imported here: --help needs no rich

    line = next((h for h in log.handlers if isinstance(h, StatusLine) and h.is_live), None)
    file = next((h for h in log.handlers if isinstance(h, logging.FileHandler)), None)
    with ExitStack() as stack:
        if line is not None and file is not None and file.stream is not None:
            for stream in (sys.stdout, sys.stderr):
                stack.enter_context(_moved(stream, file.stream.fileno(), line))
        yield


@contextmanager
def _moved(stream: TextIO, to: int, line: StatusLine) -> Iterator[None]:
    """Within the `with` block, redirect a stream from the terminal to the file descriptor `to`.

    The status line still writes to the terminal.
    """
    if not stream.isatty():
        yield
        return
    number = stream.fileno()
    terminal = os.fdopen(os.dup(number), "w", encoding=stream.encoding)
    own = line.stream
    if own is stream:
        line.setStream(terminal)
    stream.flush()
    os.dup2(to, number)
    try:
        yield
    finally:
        stream.flush()
        if terminal.isatty():  # if it was closed, errors stay in the file
            os.dup2(terminal.fileno(), number)
        # Each stream still has to flush the text that it could not show.
        with suppress(OSError):
            line.setStream(own)
        with suppress(OSError):
            terminal.close()


def print_texts(texts: Iterable[str]) -> None:
    """Print each text on a line.

    If the reader closes the pipe, as `head` does, stop without an error.
    """
    try:
        for text in texts:
            print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(lines: Iterable[str]) -> None:
    """Print each line of JSON with all unprintable characters escaped.

    JSON itself leaves several such characters in its strings, for example U+009B, with which a
    model's text would control a terminal.
    """
    print_texts(line if line.isprintable() else _escaped(line) for line in lines)


def _escaped(line: str) -> str:
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)


def fail(error: EchoError) -> int:
    """Print an error to standard error, with secrets removed. Return the error's exit code.

    Unprintable characters are escaped: an error may contain a model's text.
    """
    # A user may have given a join string as the name of a file.
    lines = without_secrets(str(error)).split("\n")
    print("error: " + "\n".join(map(one_line, lines)), file=sys.stderr)
    return exit_code(error)


def exit_code(error: EchoError) -> int:
    """Return the exit code of a command that ends with this error."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


# --- commands -------------------------------------------------------------------------------------


def run_command(run: Callable[[Namespace, Console], int], arguments: Namespace) -> int:
    """Run a command's function with a console for its output; return the exit code.

    If the function raises an EchoError, print the error and return its exit code.
    """
    from rich.console import Console

    from echo.ui.drawing import UNWRAPPED  # imported here: --help needs no rich

    console = Console(markup=False, emoji=False)  # texts contain names that users chose
    if not console.is_terminal:
        console.width = UNWRAPPED  # in a file or a pipe no line wraps
    try:
        return run(arguments, console)
    except EchoError as error:
        return fail(error)
