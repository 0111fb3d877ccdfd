"""A process that has imported what nodes need, and forks one for each request.

To import torch, transformers and echo takes some eight CPU seconds, which a cluster of five would
spend five times. A fork has them already. It is a process of its own in all that matters here: it
leads its own session, has the arguments, directory, environment and output that it was given, gets
signals, ends with an exit code, and goes through Python's ordinary end.

Nothing but imports happens before a fork, and none of them starts a thread: a fork has only the
thread that called it, and would wait for ever for a lock that another one held.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
IMPORTS = (
    "echo.cli.commands.node",
    "echo.runtime.relay",
    "echo.runtime.worker.setup",
    "tests.e2e.node",
    "transformers.models.qwen3.modeling_qwen3",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Or their libraries start a pool of threads when they are imported."""
ANSWER_S = 300.0
"""Seconds for the imports and a fork, on a busy machine."""


class Lines:
    """JSON messages over a socket, one a line."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self._unread = b""

    def send(self, **message: Any) -> None:
        self.channel.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return what has come, waiting for something to come.

        Raises:
            EOFError: if the other end is gone.
        """
        if not (data := self.channel.recv(1 << 16)):
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]


# --- the tests' end ------------------------------------------------------------------------------


class ForkServer:
    """The server, and the exit codes of its forks."""

    def __init__(self) -> None:
        """Start it; it imports while the caller goes on."""
        own, theirs = socket.socketpair()
        own.settimeout(ANSWER_S)
        self._lines = Lines(own)
        self._codes: dict[int, int] = {}
        self._forked: list[int] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=REPOSITORY,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: Path
    ) -> Fork:
        """Return a new process.

        Args:
            arguments: of `tests.e2e.node`.
            cwd: its directory.
            env: its environment, whole.
            output: where it writes what it prints.
        """
        output.touch()
        self._lines.send(arguments=list(arguments), cwd=str(cwd), env=dict(env), output=str(output))
        while not self._forked:
            self._hear()
        return Fork(self, self._forked.pop())

    def code(self, pid: int) -> int | None:
        """Return the exit code of a fork, or None while it runs."""
        while select.select([self._lines.channel], [], [], 0)[0]:
            self._hear()
        return self._codes.get(pid)

    def _hear(self) -> None:
        for message in self._lines.receive():
            if "code" in message:
                self._codes[message["pid"]] = message["code"]
            else:
                self._forked.append(message["pid"])

    def close(self) -> None:
        """End it, and whatever of its forks still runs."""
        self._lines.channel.close()
        self._process.wait(timeout=ANSWER_S)


class Fork:
    """A forked process, with the words of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        give_up_at = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# --- the server ----------------------------------------------------------------------------------


def main() -> int:
    for name in IMPORTS:
        importlib.import_module(name)
    num_threads = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 1
    assert num_threads == 1, f"an import has started a thread: there are {num_threads}"
    # What the imports made is for good: a collection in a fork would touch, and so copy, all of it.
    gc.collect()
    gc.freeze()
    for request in requests(Lines(socket.socket(fileno=int(sys.argv[1])))):
        # In the fork. Its loop is left so that it ends as any Python does.
        return run(**request)
    return 0


def requests(lines: Lines) -> Iterator[dict[str, Any]]:
    """Fork for each request that comes, which the fork alone gets, until the tests' end is gone."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    running: set[int] = set()
    try:
        while True:
            ready = select.select([lines.channel, woken], [], [])[0]
            if woken in ready:
                woken.recv(4096)
                for pid, code in reap():
                    running.remove(pid)
                    lines.send(pid=pid, code=code)
            for request in lines.receive() if lines.channel in ready else ():
                if not (pid := os.fork()):
                    running.clear()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (lines.channel, woken, waker):
                        end.close()
                    yield request
                    return
                running.add(pid)
                lines.send(pid=pid)
    except (EOFError, ConnectionError):
        pass
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def reap() -> Iterator[tuple[int, int]]:
    """Yield process and exit code of the children that have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def run(arguments: list[str], cwd: str, env: dict[str, str], output: str) -> int:
    """Become the process that was asked for."""
    os.setsid()
    # Or who starts the tests with nohup, or in the background, has nodes that ignore signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    for target, source in ((0, nowhere), (1, written), (2, written)):
        os.dup2(source, target)
    os.close(nowhere)
    os.close(written)
    from tests.e2e.node import main as node

    sys.path[0] = cwd  # as python -m has it
    sys.argv[1:] = arguments
    return node(arguments)


if __name__ == "__main__":
    sys.exit(main())
