"""`echo-rl ledger RUN`: prints a run's ledger as JSON lines, for other tools.

echo-rl ledger runs/NAME | jq 'select(.kind == "discarded")'
"""

from __future__ import annotations

from collections.abc import Sequence

from echo.cli.output import fail, print_json
from echo.cli.parsers import ledger_parser
from echo.core.errors import EchoError
from echo.records.ledger import read_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the records of the run's ledger, oldest first, and return the exit code."""
    arguments = ledger_parser().parse_args(argv)
    try:
        print_json(read_lines(arguments.run))
    except EchoError as error:
        return fail(error)
    return 0
