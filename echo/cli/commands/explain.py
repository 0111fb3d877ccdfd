"""`echo-rl explain RUN`: prints a run's waits, their causes and the remedies.

The learner writes each explanation into metrics.jsonl, even during a wait. The command reads only a
run's files, so the run may be under way, finished or crashed.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from echo.cli.output import print_json, run_command
from echo.cli.parsers import explain_parser
from echo.core.units import counted, format_duration
from echo.records.run_files import read_metrics
from echo.ui.stalls import Stall, describe_waits, stalls_of

if TYPE_CHECKING:
    from rich.console import Console


def main(argv: Sequence[str] | None = None) -> int:
    """Print a run's waits and return the exit code."""
    return run_command(_run, explain_parser().parse_args(argv))


def _run(arguments: Namespace, console: Console) -> int:
    history = read_metrics(arguments.run)
    stalls = stalls_of(history)
    if arguments.json:
        print_json(msgspec.json.encode(each).decode() for each in stalls)
        return 0
    waits = describe_waits(history.train)
    steps = counted(len(history.train), "step")
    console.print(f"{steps}: {waits}" if waits else "no optimizer step yet")
    if not stalls:
        console.print("no wait was longer than usual")
    for each in stalls:
        console.print()
        console.print(f"{_when(each)}: {each.cause}", style="bold")
        console.print(each.text)
        if each.setting:
            console.print(f"change {each.setting}", style="cyan")
    return 0


def _when(stall: Stall) -> str:
    if stall.is_open:
        return f"after step {stall.last_step - 1}, and the wait had not ended"
    if stall.is_superseded:
        return f"after step {stall.last_step - 1}, before a resume"
    steps = f"step {stall.first_step}"
    if stall.last_step > stall.first_step:
        steps = f"steps {stall.first_step} to {stall.last_step}"
    return f"{steps}, {format_duration(stall.waited_s)} waited"
