"""How a node becomes a process: its loop, its signals, and the exit code it ends with."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any

import uvloop

from echo.cli import interrupts
from echo.cli.interrupts import Interrupted
from echo.cli.output import exit_code
from echo.core.errors import EchoError
from echo.net.zmq import raise_descriptor_limit
from echo.runtime.node import INTERRUPTED, Node, tune_malloc


async def run_node(node: Node) -> str:
    """Run a node; the first signal drains it, the second stops it, the third kills the process.

    Raises:
        EchoError: if the node cannot go on.
        Interrupted: if a signal has ended it.
    """
    received: list[int] = []

    def on_signal(number: int) -> None:
        if number == signal.SIGHUP:
            interrupts.leave_terminal()
            if received:
                return  # a terminal that closes sends it more than once
        received.append(number)
        code = interrupts.code_of(number)
        if len(received) == 1:
            node.interrupt()
        elif len(received) == 2:
            node.log.warning("stopping at once: what is unfinished is given up")
            interrupts.hurry(code)
            node.stop(INTERRUPTED)
        else:
            os._exit(code)

    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]  # under nohup
    for number in before:
        loop.add_signal_handler(number, on_signal, number)
    try:
        reason = await node.run()
    finally:
        # Or the process could not be stopped while threads of the node still work.
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    if received and reason == INTERRUPTED:
        raise Interrupted(received[0])
    return reason


def run_loop(main_coroutine: Coroutine[Any, Any, str], log: logging.Logger) -> int:
    """Run a node's coroutine on uvloop; log how it ends and return the exit code."""
    tune_malloc()
    raise_descriptor_limit()
    try:
        reason = uvloop.run(main_coroutine)
    except EchoError as error:
        log.error("%s", error)  # noqa: TRY400 - the message is for the user, the trace is not
        return exit_code(error)
    except Interrupted as interrupted:
        log.info("ended: %s", INTERRUPTED)
        return interrupted.exit_code
    log.info("ended: %s", reason)
    return 0
