"""`echo-rl status`: prints a run's status from the learner, or the last saved status."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from echo.cli.output import print_json, run_command
from echo.cli.parsers import status_parser
from echo.core.errors import TransportError
from echo.core.monitoring.status import RunStatus
from echo.core.units import format_duration
from echo.records.run_files import read_status
from echo.runtime.access import Target, find_run
from echo.runtime.viewer import ask_status

if TYPE_CHECKING:
    from rich.console import Console

MAX_WIDTH = 160
"""Largest width of the text, in columns. On a wider screen only the chart would become wider."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `echo-rl status` and return its exit code."""
    return run_command(_run, status_parser().parse_args(argv))


def _run(arguments: Namespace, console: Console) -> int:
    from echo.ui.screen import render_live  # here, since --json needs no rich

    target = find_run(arguments.run)
    status, note = present_status(target)
    if arguments.json:
        print_json([status.to_json().decode()])
        return 0
    if note:
        console.print(note, highlight=False)
    width = min(console.width, MAX_WIDTH) if console.is_terminal else 100
    console.print(render_live(status, width))
    return 0


def present_status(target: Target) -> tuple[RunStatus, str]:
    """Return a run's status, and a line that says how old the status is.

    If the learner answered, the line is "".

    Raises:
        EchoError: if no learner answers, and no status was saved on this machine.
    """
    if not target.accesses and target.run_dir is not None:
        return saved_status(target, why="its links are not encrypted, so it admits no viewers")
    try:
        return ask_status(target), ""
    except TransportError as error:
        if target.run_dir is None:
            raise
        return saved_status(target, why=str(error))


def saved_status(target: Target, *, why: str) -> tuple[RunStatus, str]:
    """Return the last status that a run's learner saved, and a line for the user.

    The line has the status's age, and `why`: the reason for showing a saved status.

    Raises:
        DataError, StorageError: if there is no saved status, or the status cannot be read.
    """
    assert target.run_dir is not None
    status = read_status(target.run_dir)
    age = format_duration(max(0.0, time.time() - status.at))
    if status.state in ("finished", "stopped"):
        return status, f"the run has {status.state}, {age} ago"
    saved = f"as it was saved {age} ago ({why})"
    if not target.accesses:
        return status, saved
    if target.is_in_use:
        return status, f"the learner does not answer; it may still be starting: {saved}"
    status = replace(status, state="stopped", activity="", waiting_for="", eta_s=None)
    return status, f"the learner has ended without a word, or is elsewhere: {saved}"
