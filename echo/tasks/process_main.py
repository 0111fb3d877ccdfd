"""The child's end of a task's process: build the task, then answer one call after the other."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket

import msgspec

from echo.errors import EchoError
from echo.tasks.calls import Answer, Fault, Performer
from echo.tasks.process import Channel, Request, TaskSpec
from echo.tasks.task import load_task

GRACE_S = 5.0
"""Seconds after a call's time limit in which the parent kills this process, if there is one."""


def main(fd: int) -> None:
    """Serve the parent until it closes its end.

    Args:
        fd: the file descriptor of this end of the socket pair.
    """
    channel = Channel(socket.socket(fileno=fd))
    # The kernel's own handling: what keeps the interpreter busy for ever ends even so.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        spec: TaskSpec = channel.receive(TaskSpec)
        performer, fault = _build(spec)
        channel.send(Answer(fault=fault))
        while performer is not None:
            request: Request = channel.receive(Request)
            signal.setitimer(signal.ITIMER_REAL, request.timeout_s + GRACE_S)
            answer = performer.answer(request.call)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _send(channel, answer, request)


def _build(spec: TaskSpec) -> tuple[Performer | None, Fault | None]:
    try:
        task = load_task(spec.kind, spec.options)
        task.prepare()
    except EchoError as error:
        return None, Fault("reward_lost", f"the task's process cannot build it: {error}")
    if spec.memory_bytes is not None:
        # What it has by now is not counted against the task: imports differ between machines.
        used = _data_bytes()
        limit = spec.memory_bytes + used
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return Performer(task), None


def _data_bytes() -> int:
    """Return the private writable memory of this process in bytes; 0 where that is not known."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123
            found = [line for line in file if line.startswith("VmData:")]
        return int(found[0].split()[1]) << 10
    except (OSError, IndexError, ValueError):
        return 0


def _send(channel: Channel, answer: Answer, request: Request) -> None:
    try:
        channel.send(answer)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        text = f"{request.call} returned what cannot be sent: {error}; return texts and numbers"
        channel.send(Answer(fault=Fault("reward_error", text)))
