"""`echo-rl ledger RUN`: a run's ledger as JSON lines, for everybody else's tools.

echo-rl ledger runs/NAME | jq 'select(.kind == "discarded")'
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from echo.cli.output import fail
from echo.cli.parsers import ledger_parser
from echo.core.errors import EchoError
from echo.records.ledger import read_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the records, oldest first, and return the exit code."""
    arguments = ledger_parser().parse_args(argv)
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
