"""`echo-rl node`: one learner, worker or relay, on a laptop or ten machines."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from echo.cli import interrupts
from echo.cli.dry_run import check_start, dry_run
from echo.cli.output import fail, make_log, show
from echo.cli.parsers import node_parser
from echo.cli.process import run_loop, run_node
from echo.config.fields import Role
from echo.config.load import diff_configs, load_config, load_resolved, parse_config, schema_help
from echo.config.schema import Config
from echo.core.errors import ConfigError, EchoError
from echo.core.extras import find_config
from echo.runtime import node
from echo.runtime.identity import ECHO_JOIN, Join
from echo.runtime.node import Node
from echo.ui.status_line import StatusLine, show_status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = node_parser().parse_args(argv)
    if arguments.help_config:
        show(schema_help(arguments.role))
        return 0
    try:
        config = read_config(arguments)
        if arguments.dry_run:
            show(dry_run(config, arguments.role))
            check_start(config, arguments.role)
            return 0
        code = run_role(
            config, arguments.role, resume=arguments.resume, has_report=not arguments.no_report
        )
    except EchoError as error:
        return fail(error)
    if interrupts.is_interruption(code):
        # A thread may still load a model or make a step; what was to be saved is saved.
        interrupts.hurry(code)
    return code


def read_config(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> Config:
    """Return the configuration that the arguments and ECHO_JOIN ask for.

    Raises:
        ConfigError: listing everything that is wrong.
    """
    role, overrides = arguments.role, list(arguments.set)
    if role != "learner" and (arguments.resume or arguments.init_from):
        option = "--resume" if arguments.resume else "--init-from"
        raise ConfigError(f"{option} is for the learner; a {role} joins whatever the learner runs")
    if arguments.yes and not arguments.resume:
        raise ConfigError("--yes accepts changes to a run that is resumed; it needs --resume")
    if arguments.init_from:
        overrides.append(f"learner.init_from={arguments.init_from}")
    join = environment.get(ECHO_JOIN) if role != "learner" else None
    if join:
        # First, so that --set goes before it.
        overrides.insert(0, f"security.join={Join.parse(join, source=ECHO_JOIN)}")
    if arguments.config is not None:
        config = read_file(arguments.config, overrides, role)
    elif join:
        config = parse_config({}, overrides, role)
    else:
        example = find_config("quickstart.toml")
        raise ConfigError(f"--config FILE is missing; {example} is one to start from")
    if arguments.resume:
        _check_changes(config, accept_unsafe=arguments.yes)
    return config


def read_file(path: Path, overrides: Sequence[str], role: Role | None) -> Config:
    """Read a configuration: TOML as written by hand, or a run's resolved config.json."""
    if path.suffix == ".json":
        return load_resolved(path, overrides, role)
    return load_config(path, overrides, role)


def _check_changes(config: Config, *, accept_unsafe: bool) -> None:
    """Print what differs from the run being resumed; refuse what is not safe."""
    path = config.run_dir / "config.json"
    if not path.exists():
        raise ConfigError(f"nothing to resume: {path} does not exist")
    # Without a role: what runs now must keep a learner's rules, not what an older release saved.
    changes = diff_configs(load_resolved(path), config)
    for change in changes:
        label = "safe  " if change.is_safe else "UNSAFE"
        print(
            f"{label} {change.key}: {change.old} -> {change.new}  ({change.why})", file=sys.stderr
        )
    unsafe = [change.key for change in changes if not change.is_safe]
    if unsafe and not accept_unsafe:
        raise ConfigError(
            f"the change of {', '.join(unsafe)} is not safe for this run; leave it as it was, "
            "start a new run with --init-from, or insist with --yes"
        )


def run_role(config: Config, role: str, *, resume: bool = False, has_report: bool = True) -> int:
    """Run one node until it ends; return the exit code."""
    if role == "learner":
        # Imported here: a relay's machine has no torch.
        from echo.cli.learner import run_learner

        return run_learner(config, resume=resume, has_report=has_report)
    section = config.relay if role == "relay" else config.worker
    name = node.node_name(role, section.name)
    config = config.model_copy(update={role: section.model_copy(update={"name": name})})
    log = make_log(name, to_file=config.run_dir / "logs" / f"{name}.log", to_terminal=True)
    return run_loop(_run_dialing(config, role, log), log)


async def _run_dialing(config: Config, role: str, log: logging.Logger) -> str:
    node: Node
    if role == "relay":
        from echo.runtime.relay import build_relay

        node = await build_relay(config, log=log)
    else:
        from echo.runtime.worker.setup import build_worker

        node = worker = await build_worker(config, log=log)
        for line in (line for line in log.handlers if isinstance(line, StatusLine)):
            node.spawn(show_status(worker.view, log, line), name="status")
    return await run_node(node)


if __name__ == "__main__":
    sys.exit(main())
