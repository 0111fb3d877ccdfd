"""`echo-rl COMMAND`: one name for every command, so that none has to be called `echo`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from echo import __version__

COMMANDS = {
    "node": "run a learner, worker or relay",
    "plan": "say what to rent for a run, what it costs and how to start it",
    "task-server": "run a task's code, rewards and environments, on a host of its own",
    "quickstart": "train a small model with four processes on this machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the rest of the command line to the command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("--version", "-V"):
        print(f"echo-rl {__version__}")
        return 0
    if name in ("--help", "-h"):
        print(usage())
        return 0
    command = find_command(name)
    if command is None:
        print(f"error: no command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    return command(arguments[1:])


def usage() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<12} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: echo-rl COMMAND [options]", *lines, "echo-rl COMMAND --help says more"]
    )


def find_command(name: str) -> Callable[[Sequence[str]], int] | None:
    """Return the function of a command; only the one that is asked for is imported."""
    if name == "node":
        from echo.cli.node import main as command

        return command
    if name == "plan":
        from echo.cli.plan import main as plan

        return plan
    if name == "task-server":
        from echo.cli.task_server import main as task_server

        return task_server
    if name == "quickstart":
        from echo.cli.quickstart import main as quickstart

        return quickstart
    return None


if __name__ == "__main__":
    sys.exit(main())
