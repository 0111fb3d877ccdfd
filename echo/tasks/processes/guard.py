"""The guard ends a task's process and its children if the node dies.

    node  ->  guard  ->  the task's process  ->  its children

The guard executes no code of the task, so timers, handlers and signal masks of that code do not
affect the guard. The guard checks every second whether the node lives. If the node has died, or has
sent SIGTERM to the guard, the guard kills the task's process. The guard adopts every descendant
whose parent has died, even if the descendant has left its process group. When the task's process
has ended, the guard kills all adopted descendants. Then the guard ends with the exit code or signal
of the task's process.
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

CHECK_S = 1.0
"""Seconds between two checks of whether the node lives."""

# From linux/prctl.h. Other systems have no such call; orphans there are not adopted.
_PR_SET_PDEATHSIG = 1  # this process gets a signal when its parent ends
_PR_SET_CHILD_SUBREAPER = 36  # this process adopts the orphans among its descendants

_WATCHED = {signal.SIGCHLD, signal.SIGTERM}


def fork_guarded(node: int, end: socket.socket) -> None:
    """Fork this process, which becomes the guard. The child returns and runs the task.

    Args:
        node: process id of the node, the parent of this process.
        end: the task's side of the socket pair. The guard closes its own copy of this descriptor.
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
    end_with(guard)
    # Signals that the task's code sends to its process group must not reach the guard.
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def end_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent ends.

    Linux takes the end of the thread that started this process for the end of the parent.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch(node: int, task: int) -> None:
    """Wait for the end of the task's process, and exit with its code or signal.

    The guard runs this function. If the node has died, or if the guard has received SIGTERM, the
    guard kills the task's process. When the task's process has ended, the guard kills all of its
    own remaining children. These are the descendants of the task's process that the guard has
    adopted.
    """
    status = None
    while status is None:
        received = signal.sigtimedwait(_WATCHED, CHECK_S)
        is_over = os.getppid() != node or (
            received is not None and received.si_signo == signal.SIGTERM
        )
        if is_over:
            os.kill(task, signal.SIGKILL)  # not reaped yet, so no other process has this id
        status = _reap(task, waits=is_over)
    _end_all()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL and SIGSTOP have no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _reap(task: int, *, waits: bool) -> int | None:
    """Return the exit status of the task's process; None while the process runs.

    The exit statuses of adopted processes are dropped. If `waits`, wait for the end of the task's
    process.
    """
    while True:
        pid, status = os.waitpid(-1, 0 if waits else os.WNOHANG)
        if pid == task:
            return status
        if not pid:
            return None


def _end_all() -> None:
    """Kill all children of the guard.

    The guard adopts the children of each killed process, and kills them, too.
    """
    with suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # mostly there is none, and this call is cheaper than a search
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
