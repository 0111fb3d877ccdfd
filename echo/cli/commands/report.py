"""`echo-rl report RUN`: writes an HTML page about a run, and each figure as a PNG file.

The command reads only the run's files, so the run may be finished, under way or crashed. The page
loads no other files, so it can be opened without a network.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echo.cli.commands.rollouts import decoder_of, describe_removed, rollouts_of
from echo.cli.output import run_command
from echo.cli.parsers import report_parser
from echo.core.errors import EchoError, StorageError
from echo.core.monitoring.samples import spread_over
from echo.core.units import counted
from echo.records.files import write_file
from echo.records.ledger import StoredGroup, read_records, stored_groups
from echo.ui.report.figures import draw_all
from echo.ui.report.page import render_page
from echo.ui.report.run import read_runs
from echo.ui.rollouts import ShownRollout
from echo.ui.trace import parse_window, render_trace

if TYPE_CHECKING:
    from rich.console import Console

PAGE, TRACE = "report.html", "trace.json"
"""File names of the page and of the trace."""
NUM_SAMPLES = 8
"""Number of rollouts on the page."""
NUM_SAMPLED_GROUPS = 16
"""Number of groups from which the page's rollouts are chosen."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a run, and return the exit code."""
    return run_command(_run, report_parser().parse_args(argv))


def _run(arguments: Namespace, console: Console) -> int:
    run_dir: Path = arguments.run
    window = None if arguments.trace is None else parse_window(arguments.trace)
    runs = read_runs([run_dir, *arguments.compare])
    plots = draw_all(runs)
    rollouts: list[ShownRollout] = []
    why = ""
    if len(runs) == 1:
        rollouts, why = _samples(run_dir)
    page = render_page(runs, plots, rollouts, without_rollouts=why, made_at=time.time())
    files = {PAGE: page.encode()} | {f"{plot.name}.png": plot.png for plot in plots}
    if window is not None:
        files[TRACE] = render_trace(runs[0], window)
    out = arguments.out or run_dir / "report"
    _write(out, files)
    figures = counted(len(plots), "figure")
    console.print(f"{out / PAGE}, with {figures} beside it: open it in a browser")
    if window is not None:
        console.print(f"{out / TRACE}: open it at https://ui.perfetto.dev")
    return 0


def _samples(run_dir: Path) -> tuple[list[ShownRollout], str]:
    """Return some rollouts of the newest groups, best first. If there are none, return the reason.

    The groups of the last steps are used. If these groups are too few, groups that were never
    trained on are added.
    """
    stored = stored_groups(read_records(run_dir))
    stored.sort(key=lambda each: each.step or 0)
    found: list[ShownRollout] = []
    try:
        decode = decoder_of(run_dir)
        for each in reversed(stored):
            found += rollouts_of(run_dir, [each], decode)
            if len({rollout.group for rollout in found}) >= NUM_SAMPLED_GROUPS:
                break
    except EchoError as error:
        return [], str(error)
    if not found:
        return [], f"No rollouts of groups: {_why_none(stored)}."
    found.sort(key=lambda rollout: -rollout.reward)
    return spread_over(found, NUM_SAMPLES), ""


def _why_none(stored: Sequence[StoredGroup]) -> str:
    if not stored:
        return "no group has been accepted yet"
    return describe_removed(stored) or "others have deleted their files"


def _write(out: Path, files: dict[str, bytes]) -> None:
    """Write the files into a directory, which is created if it is missing.

    Raises:
        StorageError: if a file cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_file(out / name, data)
    except OSError as error:
        raise StorageError(
            f"{out}: the report cannot be written: {error.strerror}; choose another directory with "
            "--out"
        ) from error
