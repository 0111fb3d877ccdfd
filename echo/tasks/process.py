"""A process of a task's own: bounded in time and memory, and killed where it does not obey.

The parent's end. The child (process_main.py) is another interpreter that has imported nothing of
ours but the task; both talk over a socket pair, one call at a time, msgpack behind a length. A call
that does not come back in time ends with the child, and with whatever it has started itself. Should
this process die first, an idle child sees its end of the socket close; a busy one is killed by an
alarm of the kernel's that it set before it began.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

import msgspec

from echo.tasks.calls import Answer, Call
from echo.tasks.faults import RewardError

START_TIMEOUT_S = 120.0
"""Seconds for the child to import the task: libraries of an environment can be large."""

MAX_MESSAGE_BYTES = 64 << 20

_LENGTH = struct.Struct("<I")
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from echo.tasks.process_main import main; main(int(sys.argv[2]))"
)


class TaskSpec(msgspec.Struct, frozen=True):
    """What a child needs to build its task."""

    kind: str
    options: dict[str, Any]
    memory_bytes: int | None = None


class Request(msgspec.Struct, frozen=True):
    """A call, and how long it may take."""

    call: Call
    timeout_s: float


class TaskProcess:
    """One child."""

    def __init__(self, spec: TaskSpec) -> None:
        """Start the child and wait until it has its task.

        Raises:
            RewardError: if it cannot.
        """
        self.num_episodes = 0
        own, theirs = socket.socketpair()
        self._channel = Channel(own)
        with theirs:
            search_path = json.dumps([os.fspath(path) for path in sys.path])
            self._child = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, search_path, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_stderr() else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        try:
            self._channel.send(spec, within_s=START_TIMEOUT_S)
            answer = self._channel.receive(Answer, within_s=START_TIMEOUT_S)
        except (TimeoutError, OSError) as error:
            self.discard()
            raise RewardError(
                f"the process of the task {spec.kind} did not start: {self._how_it_ended(error)}",
                reason="reward_lost",
            ) from error
        if answer.fault is not None:
            self.discard()
            raise RewardError(answer.fault.text, reason=answer.fault.reason)

    def call(self, call: Call, timeout_s: float) -> Answer:
        """Carry out a call.

        Raises:
            TimeoutError: if it takes longer; the child has been killed.
            RewardError: if the child died.
        """
        try:
            self._channel.send(Request(call, timeout_s), within_s=timeout_s)
            answer: Answer = self._channel.receive(Answer, within_s=timeout_s)
        except TimeoutError:
            self.discard()
            raise
        except (OSError, msgspec.DecodeError) as error:
            self.discard()
            raise RewardError(
                f"the task's process died during {call}: {self._how_it_ended(error)}",
                reason="reward_lost",
            ) from error
        return answer

    @property
    def is_alive(self) -> bool:
        """Whether it can be called."""
        return self._child.poll() is None

    def kill(self) -> None:
        """End the child, and what it has started, at once; from any thread."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def discard(self) -> None:
        """Kill the child and close the socket, which no other thread may be using."""
        self.kill()
        self._channel.close()

    def _how_it_ended(self, error: Exception) -> str:
        code = self._child.poll()
        if code is None or code == -signal.SIGKILL:
            return f"{error or type(error).__name__} (killed; by the system if memory was short)"
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"it ended by itself with code {code}"


class Channel:
    """Messages over one end of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Any, *, within_s: float | None = None) -> None:
        """Send a message whole.

        Raises:
            TimeoutError: if the other end does not take it.
            OSError: if it is gone.
        """
        data = msgspec.msgpack.encode(message)
        self._socket.settimeout(within_s)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, kind: type[Any], *, within_s: float | None = None) -> Any:
        """Return the next message.

        Raises:
            TimeoutError: if it does not come.
            OSError: if the other end is gone.
            msgspec.DecodeError: if it is none.
        """
        give_up_at = None if within_s is None else time.monotonic() + within_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, give_up_at))
        if length > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"a message of {length} bytes; {MAX_MESSAGE_BYTES} are allowed")
        return msgspec.msgpack.decode(self._read(length, give_up_at), type=kind)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, count: int, give_up_at: float | None) -> bytes:
        parts = []
        while count:
            if give_up_at is not None:
                self._socket.settimeout(max(1e-3, give_up_at - time.monotonic()))
            else:
                self._socket.settimeout(None)
            part = self._socket.recv(min(count, 1 << 20))
            if not part:
                raise ConnectionError("the other end is closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _has_stderr() -> bool:
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
