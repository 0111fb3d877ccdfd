"""What the commands that compute and write files have in common."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from rich.console import Console

from echo.cli.output import fail
from echo.core.errors import EchoError

UNWRAPPED = 10_000
"""A width that no line reaches."""


def run_command(run: Callable[[Namespace, Console], int], arguments: Namespace) -> int:
    """Run a command that prints to a console; return its exit code, an error's if it fails."""
    console = Console()
    if not console.is_terminal:
        console.width = UNWRAPPED  # in a file or a pipe no line wraps
    try:
        return run(arguments, console)
    except EchoError as error:
        return fail(error)
