"""`echo-rl debug FILE`: replay what a node recorded with `--log-events`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from echo.cli.output import fail
from echo.cli.parsers import debug_parser
from echo.core.errors import EchoError
from echo.runtime.event_log import replay_log


def main(argv: Sequence[str] | None = None) -> int:
    """Replay the file, say how far it is the same, and return the exit code."""
    arguments = debug_parser().parse_args(argv)
    try:
        played = replay_log(arguments.file)
    except EchoError as error:
        return fail(error)
    counts = f"{played.num_calls} calls, {played.num_actions} actions"
    if played.difference:
        sys.stdout.write(f"{counts} before it: the same\n{played.difference}\n")
        return 1
    end = "; the log ends there at its bound" if played.is_bounded else ""
    sys.stdout.write(f"{counts}: the same{end}\n")
    return 0
