"""Runs `echo-rl COMMAND`: finds the command and parses its command line.

The command line is parsed before the command's module is imported, so `--help` needs no installed
package. If a package is missing at the import, the error names the package and how to install it.
"""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import NamedTuple

from echo.cli import parsers
from echo.cli.output import fail
from echo.core.errors import ConfigError, nearest
from echo.core.extras import install_command, version


class Command(NamedTuple):
    """A command's help text, the function that makes its parser, and its required extra."""

    help: str
    parser: Callable[[], ArgumentParser]
    extra: str = "relay"
    """The extra of pyproject.toml that the command needs. With `--role`, the command needs the
    role's extra instead."""


COMMANDS = {
    "node": Command("run a learner, worker or relay", parsers.node_parser),
    "plan": Command(
        "say what to rent for a run, what it costs and how to start it",
        parsers.plan_parser,
        "planner",
    ),
    "sim": Command(
        "simulate a run on virtual time with the code of real runs", parsers.sim_parser, "planner"
    ),
    "quickstart": Command(
        "train a small model with four processes on this machine",
        parsers.quickstart_parser,
        "learner",
    ),
    "doctor": Command("check whether this machine can run a node", parsers.doctor_parser),
    "eval": Command(
        "score a model or a checkpoint on held-out prompts", parsers.eval_parser, "learner"
    ),
    "status": Command("print the status of a run, from anywhere", parsers.status_parser),
    "top": Command("watch a run from anywhere, and operate it", parsers.top_parser),
    "ctl": Command("pause, resume, drain, stand by, set or stop", parsers.ctl_parser),
    "ledger": Command("print what happened to every group of a run", parsers.ledger_parser),
    "explain": Command(
        "say what a run has waited for, and what would help", parsers.explain_parser
    ),
    "rollouts": Command(
        "show prompts, completions and rewards of a run", parsers.rollouts_parser, "learner"
    ),
    "report": Command("write a report of a run as one HTML file", parsers.report_parser, "learner"),
}
"""The commands, under their names. The function `main` of the module echo.cli.commands.NAME runs a
command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument; return the command's exit code."""
    name, *line = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("--version", "-V"):
        print(version())
        return 0
    if name in ("--help", "-h"):
        print(usage())
        return 0
    if name in COMMANDS:
        return run(name, line)
    near = nearest(name, COMMANDS)
    guess = f"did you mean {near}? " if near else ""
    return fail(ConfigError(f"no command {name!r}; {guess}there are {', '.join(COMMANDS)}"))


def run(name: str, line: Sequence[str]) -> int:
    """Run the command `name` with its command line; return its exit code."""
    command = COMMANDS[name]
    arguments = command.parser().parse_args(line)
    try:
        return find_command(name)(line)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "echo"):
            raise
        role = getattr(arguments, "role", None)
        needs = f"echo-rl {name} --role {role}" if role else f"echo-rl {name}"
        return fail(
            ConfigError(
                f"{needs} needs {package}, which is not installed; install it with "
                f"{install_command(role or command.extra)}"
            )
        )


def usage() -> str:
    """Return the text of `echo-rl --help`: each command with one line of help."""
    lines = [f"  {name:<12} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: echo-rl COMMAND [options]",
            *lines,
            "echo-rl COMMAND --help says more, echo-rl --version which release this is",
        ]
    )


def find_command(name: str) -> Callable[[Sequence[str]], int]:
    """Import the module of a command and return its function `main`."""
    module = importlib.import_module(f"echo.cli.commands.{name}")
    function: Callable[[Sequence[str]], int] = module.main
    return function


if __name__ == "__main__":
    sys.exit(main())
