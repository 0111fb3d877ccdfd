"""`echo-rl ctl`: sends an operator's command to the learner of a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from echo.cli.output import run_command
from echo.cli.parsers import ctl_parser
from echo.core.errors import ConfigError
from echo.core.units import counted
from echo.runtime.access import find_run
from echo.runtime.viewer import send_command

if TYPE_CHECKING:
    from rich.console import Console

NUM_WORDS = {"pause": (0, 0), "resume": (0, 1), "drain": (1, 1), "standby": (1, 1), "set": (2, 2),
             "stop": (0, 0)}  # fmt: skip
"""The smallest and the largest number of arguments of each command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `echo-rl ctl` and return its exit code."""
    return run_command(_run, ctl_parser().parse_args(argv))


def _run(arguments: Namespace, console: Console) -> int:
    *words, run = arguments.words
    least, most = NUM_WORDS[arguments.act]
    if not least <= len(words) <= most:
        given = f"{arguments.act} with {counted(len(words), 'word')} before the run"
        raise ConfigError(f"{given}; see echo-rl ctl --help")
    target = find_run(run)
    if not target.accesses:
        raise ConfigError(
            f"{target.name}: its links are not encrypted (security.curve = false), or it has not "
            "started; such a run admits no operator: use Ctrl-C at the learner"
        )
    subject, value = (*words, "", "")[:2]
    outcome = send_command(target, arguments.act, subject, value)
    if not outcome.is_done:
        raise ConfigError(outcome.text)
    console.print(outcome.text, highlight=False)
    return 0
