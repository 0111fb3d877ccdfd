"""`echo-task-server`: run a task's code on a host of its own, behind an address."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from echo.cli import interrupts
from echo.cli.output import fail
from echo.cli.parsers import task_server_parser
from echo.config.load import load_config
from echo.errors import ConfigError, EchoError
from echo.runtime.task_setup import describe_task, make_local_host
from echo.tasks.http_host import TOKEN_VARIABLE
from echo.tasks.http_server import TaskServer
from echo.tasks.loading import load_task

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; return the exit code."""
    arguments = task_server_parser().parse_args(argv)
    try:
        server = make_server(arguments.config, arguments.set, arguments.listen)
    except EchoError as error:
        return fail(error)
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        # In a thread, as the one that serves cannot wait for itself.
        threading.Thread(target=server.stop).start()

    with interrupts.handled(on_signal):
        print(f"serving the task on port {server.port}; Ctrl-C ends it", flush=True)
        server.serve()
        server.close()
    return interrupts.code_of(received[0]) if received else 0


def make_server(config_path: Path, overrides: Sequence[str], listen: str) -> TaskServer:
    """Return a server that is bound already.

    Raises:
        EchoError: if something does not fit; the message is for the user.
    """
    host_name, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen {listen}: write HOST:PORT, such as 127.0.0.1:7710")
    token = os.environ.get(TOKEN_VARIABLE, "")
    if host_name not in LOOPBACK and not token:
        raise ConfigError(
            f"--listen {listen}: anybody who reaches this address could run the task; set "
            f"{TOKEN_VARIABLE} to a secret, here and where learner and workers start"
        )
    config, _ = load_config(config_path, overrides)
    task = load_task(config.task.kind, config.task.options)
    host = make_local_host(config, task)
    return TaskServer(host, describe_task(config, task), (host_name, int(port)), token=token)


if __name__ == "__main__":
    sys.exit(main())
