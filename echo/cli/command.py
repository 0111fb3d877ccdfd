"""What the commands that compute and write files have in common."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from echo import __version__
from echo.cli.output import fail
from echo.errors import EchoError

UNWRAPPED = 10_000
"""A width that no line reaches."""


def add_common_options(parser: argparse.ArgumentParser, *, out: Path, files: str) -> None:
    """Add the options that all of them have.

    Args:
        parser: of the command.
        out: where its files go by default.
        files: what they are called.
    """
    parser.add_argument(
        "--out",
        type=Path,
        default=out,
        metavar="DIR",
        help=f"where {files} go (default: {out})",
    )
    parser.add_argument("--version", action="version", version=f"echo-rl {__version__}")


def run_command(run: Callable[[Namespace, Console], int], arguments: Namespace) -> int:
    """Run a command that prints to a console; return its exit code, an error's if it fails."""
    console = Console()
    if not console.is_terminal:
        console.width = UNWRAPPED  # in a file or a pipe no line wraps
    try:
        return run(arguments, console)
    except EchoError as error:
        return fail(error)
