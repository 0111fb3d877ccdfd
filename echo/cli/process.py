"""How a node becomes a process: its loop, its signals, and the exit code it ends with."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any

import uvloop

from echo.cli.output import exit_code
from echo.errors import EchoError
from echo.runtime.kernel import raise_descriptor_limit, tune_malloc
from echo.runtime.node import Node

INTERRUPTED = 130
"""Exit code after a second Ctrl-C, and after one before the node ran, as shells use it."""


async def run_node(node: Node) -> str:
    """Run a node with Ctrl-C and SIGTERM handled: the first drains, the second ends at once."""
    num_signals = 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            os._exit(INTERRUPTED)
        node.interrupt()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        return await node.run()
    finally:
        # Or the process could not be stopped while threads of the node still work.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def run_loop(main_coroutine: Coroutine[Any, Any, str], log: logging.Logger) -> int:
    """Run a node's coroutine on uvloop; log how it ends and return the exit code."""
    tune_malloc()
    raise_descriptor_limit()
    try:
        reason = uvloop.run(main_coroutine)
    except EchoError as error:
        log.error("%s", error)  # noqa: TRY400 - the message is for the user, the trace is not
        return exit_code(error)
    except KeyboardInterrupt:
        # Models were still being loaded: there is nothing to save.
        log.warning("interrupted before the start")
        return INTERRUPTED
    log.info("ended: %s", reason)
    return 0
