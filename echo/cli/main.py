"""The front of every command: `echo-rl COMMAND`, and a function for each executable of its own.

A line is read before the command is imported, so that its help needs no package; a package that
is missing then is named together with what installs it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence

from echo.cli import parsers
from echo.cli.output import fail
from echo.core.errors import ConfigError
from echo.core.extras import install_command, version

COMMANDS = {
    "node": "run a learner, worker or relay",
    "plan": "say what to rent for a run, what it costs and how to start it",
    "sim": "simulate a run with the code that would run it",
    "quickstart": "train a small model with four processes on this machine",
}

PARSERS: dict[str, Callable[[], ArgumentParser]] = {
    "node": parsers.node_parser,
    "plan": parsers.plan_parser,
    "sim": parsers.sim_parser,
    "quickstart": parsers.quickstart_parser,
}

EXTRAS = {"plan": "planner", "sim": "planner", "quickstart": "learner"}
"""What a command needs; a node by its role."""


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the rest of the command line to the command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("--version", "-V"):
        print(version())
        return 0
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"error: no command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    return run(name, arguments[1:])


def node(argv: Sequence[str] | None = None) -> int:
    """Run `echo-node`."""
    return run("node", argv)


def plan(argv: Sequence[str] | None = None) -> int:
    """Run `echo-plan`."""
    return run("plan", argv)


def sim(argv: Sequence[str] | None = None) -> int:
    """Run `echo-sim`."""
    return run("sim", argv)


def quickstart(argv: Sequence[str] | None = None) -> int:
    """Run `echo-quickstart`."""
    return run("quickstart", argv)


def run(name: str, argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    line = list(sys.argv[1:] if argv is None else argv)
    arguments = PARSERS[name]().parse_args(line)
    try:
        return find_command(name)(line)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "echo"):
            raise
        extra = EXTRAS.get(name) or arguments.role
        needs = f"echo-{name} --role {arguments.role}" if name == "node" else f"echo-{name}"
        return fail(
            ConfigError(
                f"{needs} needs {package}, which is not installed; install it with "
                f"{install_command(extra)}"
            )
        )


def usage() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<12} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: echo-rl COMMAND [options]", *lines, "echo-rl COMMAND --help says more"]
    )


def find_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command; only the one that is asked for is imported."""
    if name == "node":
        from echo.cli.node import main as command
    elif name == "plan":
        from echo.cli.plan import main as command
    elif name == "sim":
        from echo.cli.sim import main as command
    else:
        from echo.cli.quickstart import main as command
    return command


if __name__ == "__main__":
    sys.exit(main())
