"""Handles the signals of Ctrl-C, SIGTERM and a closed terminal in commands.

* If the command has nothing to undo, for example during imports, a signal prints a line and ends
  the process.
* Within `unwinding`, the first signal prints a line and raises SystemExit, which runs the `finally`
  blocks. The second signal ends the process.
* While a node runs (cli/commands/node.py), the first signal drains the node, and the second signal
  stops it.

The exit code is always 128 + the signal's number, as in shells. The package imports this module
first, so that signals are handled during the other imports. Keep this module small.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STARTED_BY = "ECHO_STARTED_BY"
"""The environment variable in which the quickstart gives its process id to the nodes it starts."""
LOOK_S = 5.0
"""Seconds between two checks whether the process that started this process is still there."""
SAVE_S = 10.0
"""Seconds from the first SIGTERM to the second if a node is to end without its learner. In this
time a worker stops its engine and saves rollouts. More time would not help: the learner has ended
and acknowledges no more rollouts."""
HURRY_S = 5.0
"""Seconds within which a process must end after a signal to stop immediately."""


class Interrupted(Exception):  # noqa: N818 - not an error: the user wanted it
    """Raised if a signal has drained or stopped this process's node."""

    def __init__(self, number: int) -> None:
        """Make the exception; its text is the signal's name."""
        super().__init__(signal.Signals(number).name)
        self.exit_code = signal_exit_code(number)


def signal_exit_code(number: int) -> int:
    """Return the exit code of a command that a signal has ended."""
    return 128 + number


def is_interruption(code: int) -> bool:
    """Return whether a command ends with this exit code because a signal ended it."""
    return code in map(signal_exit_code, SIGNALS)


def install() -> None:
    """Install handlers that print "interrupted" and end this process with the signal's code.

    If the process inherited a signal as ignored, the signal stays ignored. An example is SIGHUP
    under nohup.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    announce(number)
    os._exit(signal_exit_code(number))


def announce(number: int) -> None:
    """Print "interrupted" to standard error. If the terminal is closed, print nothing."""
    if number == signal.SIGHUP:
        leave_terminal()
    with suppress(OSError):
        os.write(2, b"interrupted\n")


@contextmanager
def handled(handle: Callable[[int], None]) -> Iterator[None]:
    """Within the `with` block, call `handle` with the number of each SIGINT, SIGTERM and SIGHUP.

    The block's end restores the former handlers. If SIGHUP was ignored, as under nohup, SIGHUP
    stays ignored.
    """
    before = {
        number: signal.getsignal(number)
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, lambda number, _: handle(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def unwinding() -> Iterator[None]:
    """Within the `with` block, raise SystemExit at the first signal.

    SystemExit lets `finally` blocks run. The second signal ends the process at once.
    """
    is_unwinding = False

    def unwind(number: int) -> None:
        nonlocal is_unwinding
        if is_unwinding:
            os._exit(signal_exit_code(number))
        is_unwinding = True
        announce(number)
        raise SystemExit(signal_exit_code(number))

    with handled(unwind):
        yield


def leave_terminal() -> None:
    """Redirect each standard stream that is a terminal to /dev/null.

    A write to a closed terminal would raise an error. /dev/null accepts every write.
    """
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            with suppress(OSError):
                if stat.S_ISCHR(os.fstat(stream).st_mode):
                    os.dup2(nowhere, stream)


def end_with_parent() -> None:
    """End this process when the quickstart that started it is gone, as after SIGKILL.

    Otherwise a node of the quickstart would wait for its learner for hours. If no quickstart has
    started this process, do nothing. The processes that this process starts do not watch for the
    quickstart.
    """
    started_by = os.environ.pop(STARTED_BY, None)
    if started_by is not None:
        threading.Thread(target=_watch, args=(int(started_by),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    for _ in range(2):  # the second signal ends a node that waits for its learner
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SAVE_S)


def hurry(code: int) -> None:
    """Ensure that this process ends with `code` within HURRY_S.

    Python would wait for all threads. A thread that loads a model, makes a step or waits for a
    reward cannot be stopped. So this function does not wait for threads.
    """
    timer = threading.Timer(HURRY_S, os._exit, [code])
    timer.daemon = True
    timer.start()
