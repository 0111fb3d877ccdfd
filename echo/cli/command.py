"""What the commands that compute and write files have in common."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from rich.console import Console

from echo.cli.output import fail
from echo.errors import EchoError


def run_command(run: Callable[[Namespace, Console], int], arguments: Namespace) -> int:
    """Run a command that prints to a console; return its exit code, an error's if it fails."""
    try:
        return run(arguments, Console())
    except EchoError as error:
        return fail(error)
