"""`echo-rl doctor`: checks whether this machine can run a node, and finds causes of slowness.

Each check ends within seconds and leaves nothing behind. Without a configuration or a join string
only the machine is checked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from echo.cli.commands.node import check_join, check_start, find_config_of, join_awaited
from echo.cli.output import print_json, run_command
from echo.cli.parsers import doctor_parser
from echo.config.fields import Role
from echo.config.load import apply_inherited, check_inherited, has_own_model
from echo.config.schema import Config
from echo.core.errors import ConfigError, EchoError
from echo.core.extras import find_lock
from echo.core.units import counted, format_duration, one_line, without_secrets
from echo.net.kernel import raise_descriptor_limit, read_kernel
from echo.net.transport import is_loopback
from echo.roles.joining import digest_mismatch
from echo.runtime.doctor.link import LinkReport, check_link, check_nat, route_to, try_link
from echo.runtime.doctor.machine import (
    Finding,
    check_descriptors,
    check_gpu,
    check_kernel,
    check_packages,
    check_python,
    check_run_dir,
    installed_versions,
    locked_versions,
    nvidia_driver,
)
from echo.runtime.identity import ECHO_JOIN, Join, JoinSource
from echo.runtime.node import start_transport

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 1
"""Exit code after a failed check."""
COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks that the command line requests; return the exit code."""
    return run_command(_run, doctor_parser().parse_args(argv))


def _run(arguments: Namespace, console: Console) -> int:
    findings = []
    for finding in examine(arguments):
        findings.append(finding)
        if arguments.json:
            print_json([msgspec.json.encode(asdict(finding)).decode()])
        else:
            _show(finding, console)
    num_failed = sum(finding.level == "failed" for finding in findings)
    num_warnings = sum(finding.level == "warning" for finding in findings)
    if not arguments.json:
        warnings = counted(num_warnings, "warning")
        console.print(f"{counted(len(findings), 'check')}: {num_failed} failed, {warnings}")
    return FAILED if num_failed else 0


def _show(finding: Finding, console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    head = Text(f"{finding.level:<8}", style=COLOURS[finding.level])
    head.append(f"{one_line(finding.name)}: ", style="bold")
    head.append(without_secrets(one_line(finding.text)), style="default")
    console.print(head)
    for label, text in (("why", finding.why), ("do", finding.remedy)):
        if text:
            line = Text(f"{label}: {without_secrets(one_line(text))}")
            console.print(Padding(line, (0, 0, 0, 8), expand=False))


def examine(arguments: Namespace) -> Iterator[Finding]:
    """Run the requested checks and yield their findings."""
    yield from check_python()
    yield from check_packages(installed_versions(), locked_versions(find_lock().read_text()))
    yield from check_gpu(*_gpus(), nvidia_driver())
    yield from check_descriptors(raise_descriptor_limit())
    yield from check_kernel(read_kernel())
    try:
        role, config = _configuration(arguments)
    except EchoError as error:
        yield _failed("configuration", str(error), "no node starts with it")
        return
    if config is None:
        yield from check_run_dir(Path("runs"), min_free_bytes=0)
        return
    limit = config.limits.min_free_disk_bytes if role == "learner" else 0
    yield from check_run_dir(config.run_dir, min_free_bytes=limit)
    yield from check_configuration(config, role)
    if role != "learner":
        yield from check_joining(config, role)
    if arguments.engine:
        yield from check_engine(config)


def _failed(name: str, text: str, why: str, remedy: str = "") -> Finding:
    return Finding("failed", name, text, why=why, remedy=remedy)


def _gpus() -> tuple[str | None, Sequence[str]]:
    """Return the platform for which PyTorch was built, and the GPUs that PyTorch finds.

    Without PyTorch the platform is None and there are no GPUs.
    """
    try:
        from echo.engine.model import find_gpus
    except ModuleNotFoundError:
        return None, ()
    return find_gpus()


def _configuration(arguments: Namespace) -> tuple[Role, Config | None]:
    """Return the role and the configuration to check.

    The configuration is None if neither the command line nor ECHO_JOIN names a configuration.

    Raises:
        ConfigError: if the configuration is wrong.
    """
    join = arguments.connect or os.environ.get(ECHO_JOIN)
    role: Role = arguments.role or ("learner" if arguments.config and not join else "worker")
    if arguments.connect and role == "learner":
        raise ConfigError("--connect is for a worker or a relay: it dials the learner")
    if arguments.connect:
        Join.parse(arguments.connect, source="--connect")  # so that an error names the option
    if arguments.config is None and not join and not (arguments.role or arguments.set):
        return role, None
    given = None if role == "learner" else join
    return role, find_config_of(role, arguments.config, arguments.set, join=given, patience=False)


def check_configuration(config: Config, role: Role) -> Iterator[Finding]:
    """Run the checks that `--dry-run` makes.

    The checks find errors that would stop a node in its first minute.
    """
    problems = check_start(config, role).problems
    for problem in problems:
        yield _failed("start", problem, f"the {role} would end with this error")
    if not problems:
        yield Finding("ok", "start", f"a {role} with this configuration would start")


def check_joining(config: Config, role: Role) -> Iterator[Finding]:
    """Connect to the learner, and compare its settings and files with those of this node.

    Without a join string no connection is tried.
    """
    if (awaited := join_awaited(config, role)) is not None:
        yield Finding(
            "warning",
            "link",
            f"not tried: no learner has written {awaited} yet",
            why=f"the {role} would start, and wait for this file",
            remedy="check again when the learner runs",
        )
        return
    try:
        check_join(config, role)
    except EchoError:
        return  # `check_configuration` has reported it
    section = config.relay if role == "relay" else config.worker
    source = JoinSource(role, section.connect, config.security, config.run_dir)  # type: ignore[arg-type]
    for report in asyncio.run(_try_links(config, source)):
        yield from check_link(report)
        route = route_to(report.address)
        if route is not None and report.node_id is not None and not is_loopback(report.address):
            yield from check_nat(*route, section.advertise or section.listen)
        if report.welcome is not None and role == "worker":
            yield from _compare(config, report)


async def _try_links(config: Config, source: JoinSource) -> list[LinkReport]:
    transport = await start_transport(config.network, None, source.keys())
    try:
        return [
            await try_link(transport, address, fingerprint=source.fingerprint())
            for address in source.addresses()
        ]
    finally:
        await transport.close()


def _compare(config: Config, report: LinkReport) -> Iterator[Finding]:
    welcome = report.welcome
    assert welcome is not None
    differing = check_inherited(config, welcome.settings)
    if differing:
        text = "; ".join(map(str, differing))
        yield _failed("settings", text, "the worker would end with this error")
        return
    if not has_own_model(config):
        yield Finding("ok", "model", "the worker takes model and tokenizer from the learner")
        return
    from echo.engine.model import model_digests, resolve_model

    config = apply_inherited(config, welcome.settings)
    try:
        assert config.model.name is not None
        directory = resolve_model(config.model.name, config.model.revision)
        template = welcome.settings.get("model.chat_template")
        fault = digest_mismatch(
            ours=model_digests(config.model, directory, template), theirs=welcome.digests
        )
    except EchoError as error:
        fault = str(error)
    if fault is None:
        yield Finding("ok", "model", "model, tokenizer and chat template are the learner's")
        return
    yield _failed("model", fault, "the learner would refuse the worker")


# --- engine ---------------------------------------------------------------------------------------

PROMPT_TOKENS, NEW_TOKENS = 64, 16
"""Number of tokens of the prompt, and of those that are sampled: enough to show that the engine
works, and few enough for a large model on a CPU.
"""


def check_engine(config: Config) -> Iterator[Finding]:
    """Load the configured model into the worker's engine, and sample from it."""
    if config.model.name is None:
        yield _failed(
            "engine",
            "model.name is not set, and only a running worker gets the learner's",
            "--engine loads a model",
            "--set model.name=DIRECTORY",
        )
        return
    from echo.engine.engine import Request, Sampling
    from echo.engine.model import load_directory, resolve_model
    from echo.runtime.worker.setup import import_engine, make_engine

    began = time.monotonic()
    try:
        import_engine(config, log=logging.getLogger(__name__))
        directory = resolve_model(config.model.name, config.model.revision)
        engine = make_engine(config, directory)
        try:
            engine.load(load_directory(directory, config.model.dtype))
            loaded_s = time.monotonic() - began
            prompt = np.zeros(PROMPT_TOKENS, np.int32)
            times = []
            for number, num_new in enumerate((1, 1, NEW_TOKENS)):  # the first one warms up
                request = Request(f"{number}.doctor", prompt_ids=prompt, seed=number)
                began = time.monotonic()
                engine.generate([request], Sampling(1.0, 1.0, 0, num_new, ()))
                times.append(time.monotonic() - began)
        finally:
            engine.close()
    except EchoError as error:
        yield _failed("engine", str(error), "a worker would end with this error")
        return
    later_s = times[2] - times[1]  # not positive if something held up the call for one token
    least = f"{NEW_TOKENS / max(times[2], 1e-6):.0f} or more"
    rate = f"{(NEW_TOKENS - 1) / later_s:.0f}" if later_s > 0 else least
    yield Finding(
        "ok",
        "engine",
        f"{config.engine.kind} was ready in {format_duration(loaded_s)}; the first token of a "
        f"prompt of {PROMPT_TOKENS} comes after {format_duration(times[1])}, later ones at "
        f"{rate} per second and rollout",
    )
