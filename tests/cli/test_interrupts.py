"""Signals: one line and the right code before there is anything to save, a drained node after."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo.cli import interrupts
from echo.cli.commands import node as node_command
from echo.cli.commands import sim
from echo.cli.commands.node import NodeSignals, run_loop, run_node
from echo.core.errors import ConfigError
from echo.runtime.node import Node
from echo.sim.network import Network, Port
from echo.sim.transport import SimTransport
from tests.runtime.test_node import Script

REPOSITORY = Path(__file__).parents[2]
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
HEAVY = 'print("importing", flush=True)\nimport time\ntime.sleep(60)\n'


@pytest.fixture(autouse=True)
def hears_hangups() -> Iterator[None]:
    """Undo what `nohup` does to everything below it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


CHILD = """
import signal, time
from echo.cli import interrupts
interrupts.LOOK_S = interrupts.SAVE_S = 0.05
def told(*_):
    print("told", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next one ends this process
signal.signal(signal.SIGTERM, told)
interrupts.end_with_parent()
print("begun", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
from echo.cli import interrupts
environment = {**os.environ, interrupts.STARTED_BY: str(os.getpid())}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_node_of_a_quickstart_is_ended_when_the_quickstart_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        parent.kill()
        assert parent.stdout.read() == "told\n", "then a second signal has ended it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("node", signal.SIGINT),
        ("plan", signal.SIGINT),
        ("sim", signal.SIGTERM),
        ("quickstart", signal.SIGHUP),
    ],
)
def test_while_modules_are_imported_a_signal_ends_with_one_line(
    tmp_path: Path, command: str, number: int
) -> None:
    for name in ("rich", "pydantic", "uvloop"):
        (tmp_path / f"{name}.py").write_text(HEAVY)
    with subprocess.Popen(
        [sys.executable, "-m", f"echo.cli.commands.{command}", "--version"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + number, "interrupted\n")


def test_unwinding_undoes_what_was_begun(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    undone: list[int] = []

    def work() -> None:
        with interrupts.unwinding(), ExitStack() as stack:
            stack.callback(undone.append, 1)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        work()
    assert (caught.value.code, undone) == (143, [1])
    assert capfd.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == before


def doze(scenario: object) -> None:
    time.sleep(60)


@pytest.mark.slow
def test_an_interrupted_sweep_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "run_one", doze)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    def interrupt() -> None:
        while not active_children():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    scenarios: Sequence[Any] = [1, 2]
    with pytest.raises(SystemExit, match="143"):
        sim.run_all(scenarios)
    assert not active_children()


class SlowNode(Node):
    """Needs for ever to drain, unless it is told that it may."""

    may_end = True

    async def drain(self) -> None:
        if not self.may_end:
            await self.wait_until(lambda: False, within_s=60)


def run(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None], *, may_end: bool) -> int:
    """Run a node in which `work` is called once it runs; return the exit code."""
    # They would end, or silence, the tests.
    monkeypatch.setattr(interrupts, "hurry", lambda code: None)
    monkeypatch.setattr(interrupts, "leave_terminal", lambda: None)
    log = logging.getLogger("test.interrupts")

    class Working(SlowNode):
        async def work(self) -> None:
            work()

    async def main() -> str:
        transport = SimTransport(Network(), Port("node", address="tcp://node:1"))
        await transport.start()
        node = Working(Script(), transport, log=log)
        node.may_end = may_end
        return await run_node(node)

    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    code = run_loop(main(), log)
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before
    return code


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_the_first_signal_drains(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def work() -> None:
        os.kill(os.getpid(), number)
        if number == signal.SIGHUP:
            os.kill(os.getpid(), number)  # as a terminal that closes

    assert run(monkeypatch, work, may_end=True) == 128 + number


def test_the_second_signal_stops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_command, "SAME_SIGNAL_S", 0.01)

    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    assert run(monkeypatch, work, may_end=False) == 143
    assert "stopping at once" in caplog.text


def test_a_signal_that_a_launcher_passes_on_as_well_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    async def drain(self: SlowNode) -> None:
        await self.wait_until(lambda: False, within_s=0.2)

    monkeypatch.setattr(SlowNode, "drain", drain)
    assert run(monkeypatch, work, may_end=True) == 130
    assert "stopping at once" not in caplog.text


def test_a_key_that_is_pressed_again_and_again_stops_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "hurry", lambda code: None)

    async def press() -> list[int]:
        transport = SimTransport(Network(), Port("node", address="tcp://node:1"))
        node = SlowNode(Script(), transport, log=logging.getLogger("test.interrupts"))
        signals = NodeSignals(node)
        for tenths in range(0, 20, 4):
            clock = SimpleNamespace(monotonic=lambda tenths=tenths: tenths / 10)
            monkeypatch.setattr(node_command, "time", clock)
            signals.receive(signal.SIGINT)
        return signals.received

    assert asyncio.run(press()) == [signal.SIGINT] * 2


@pytest.mark.parametrize(("sinks", "codes"), [([], []), (["tensorboard"], [0])])
def test_a_learner_ends_soon_whatever_the_library_of_a_tracker_waits_for(
    sinks: list[str], codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end wandb asks a server that never answers for another minute."""
    hurried: list[int] = []
    monkeypatch.setattr(interrupts, "hurry", hurried.append)
    monkeypatch.setattr(node_command, "run_role", lambda *_, **__: 0)
    options = [
        "--config",
        str(CONFIG),
        "--set",
        f"metrics.sinks={sinks}".replace("'", '"'),
        "--set",
        "model.name=m",
    ]
    assert node_command.main(["--role", "learner", *options]) == 0
    assert hurried == codes


def test_a_start_that_is_refused_needs_no_hurry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise ConfigError("not so")

    monkeypatch.setattr(interrupts, "hurry", lambda _: pytest.fail("it would end the caller"))
    monkeypatch.setattr(node_command, "run_role", refuse)
    options = ["--config", str(CONFIG), "--set", 'metrics.sinks=["tensorboard"]']
    assert node_command.main(["--role", "learner", *options, "--set", "model.name=m"]) == 2
    assert capsys.readouterr().err == "error: not so\n"
