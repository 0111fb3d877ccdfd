"""Print a run's ledger as JSON lines, oldest record first.

echo-rl ledger runs/NAME | jq 'select(.kind == "discarded")'
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from echo.cli.output import fail
from echo.errors import EchoError
from echo.records.ledger import read_lines


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="echo-rl ledger",
        description="Print what happened to every group of a run: one JSON object a line, oldest "
        "first, verified. A run that goes on may be read.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the records and return the exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        for line in read_lines(arguments.run):
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except EchoError as error:
        return fail(error)
    return 0
