"""The guard of a task's process: ends it, and all that it starts, with its node.

    node  ->  guard  ->  the task's process  ->  whatever the task's code starts

The guard runs none of the task's code, so no timer, handler or signal mask of that code can stop
it. It ends the task's process when the node is dead, which it looks for every second, or when the
node asks for it with SIGTERM. It adopts every process below it whose parent has died, so it also
finds processes that have left their process group, and it kills until nothing is left. Then it ends
as the task's process did: with the same exit code or signal.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOOK_S = 1.0
"""Seconds between two looks whether the node is still there."""

# Of linux/prctl.h. Elsewhere there is no such call, and adopted processes stay.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_WATCHED = {signal.SIGCHLD, signal.SIGTERM}


def fork_guarded(node: int, end: socket.socket) -> None:
    """Return in a new process, for the task; this one becomes its guard and never returns.

    Args:
        node: id of the node's process, this one's parent.
        end: of the task's process; the guard closes its copy.
    """
    guard = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    task = os.fork()
    if task:
        end.close()
        _watch(node, task)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    # So what the task's code sends to its process group does not reach the guard.
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def _watch(node: int, task: int) -> None:
    """Wait for the end of node or task, then end everything, and this process like the task."""
    status = None
    while status is None:
        received = signal.sigtimedwait(_WATCHED, LOOK_S)
        is_over = os.getppid() != node or (
            received is not None and received.si_signo == signal.SIGTERM
        )
        if is_over:
            os.kill(task, signal.SIGKILL)  # not reaped yet, so the id is its own
        status = _reap(task, waits=is_over)
    _end_all()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # those of SIGKILL and SIGSTOP cannot be set, and need not be
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _reap(task: int, *, waits: bool) -> int | None:
    """Return how the task's process ended, None if it has not; adopted ones are cleared away."""
    while True:
        pid, status = os.waitpid(-1, 0 if waits else os.WNOHANG)
        if pid == task:
            return status
        if not pid:
            return None


def _end_all() -> None:
    """Kill what is left; children of the killed become children of this process."""
    with suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # mostly nothing is left, which is cheaper to ask than to search
        while True:
            for pid in _children(os.getpid()):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children(parent: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "pid (name) state ppid ...", where a name may hold anything.
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                yield int(path.parent.name)


def _prctl(option: int, value: int) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, value, 0, 0, 0)
