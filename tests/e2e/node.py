"""A node of these tests: the ordinary command, after what a test needs done to the process.

    python -m tests.e2e.node [--crash-at POINT] [--lie LIE] [--protocol NUMBER] LINE

LINE is that of `echo-node`. Forked by fork_server.py in most tests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from echo.cli import interrupts
from echo.cli.commands.node import main as node


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node; return its exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--crash-at", default="", help="a point of crash_points.py to die at")
    parser.add_argument("--lie", default="", help="one of lies.py, to tell from the start")
    parser.add_argument("--protocol", type=int, help="version of the protocol to speak")
    own, line = parser.parse_known_args(arguments)
    interrupts.install()
    if own.crash_at:
        from tests.e2e import crash_points

        crash_points.install(own.crash_at)
    if own.lie:
        from tests.e2e import lies

        lies.install(own.lie)
    if own.protocol is not None:
        from echo.wire import codec

        vars(codec).update(PROTOCOL_VERSION=own.protocol)
    return node(line)


if __name__ == "__main__":
    sys.exit(main())
