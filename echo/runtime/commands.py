"""Run an operator's shell command with a time limit, and keep the end of its output."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

MAX_OUTPUT_BYTES, MAX_OUTPUT_LINES = 64 << 10, 20
"""Largest numbers of bytes and lines that are kept from the end of a command's output."""


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended."""

    has_succeeded: bool
    outcome: str
    """The outcome as text, such as "ended with code 3"."""
    lines: tuple[str, ...]
    """The last lines of the command's output."""


async def run_shell(
    command: str, *, environment: Mapping[str, str], timeout_s: float
) -> CommandEnd:
    """Run a shell command, and kill it with its child processes at the time limit.

    Args:
        command: the shell command.
        environment: variables that the command gets in addition to the caller's environment.
        timeout_s: the time limit, seconds.
    """
    outcome = f"did not end within {timeout_s:g} s and was killed"
    # The output goes to a file: a background process of the command could hold a pipe open.
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
                outcome = f"ended with code {process.returncode}"
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
        lines = output.read().decode(errors="replace").splitlines()[-MAX_OUTPUT_LINES:]
    return CommandEnd(process.returncode == 0, outcome, tuple(lines))
