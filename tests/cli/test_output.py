from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import select
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console
from rich.table import Table

from echo.cli import output
from echo.cli.commands.node import main
from echo.cli.output import exit_code, fail, make_log, others_in_log, run_command
from echo.core.errors import (
    ConfigError,
    DataError,
    EchoError,
    RefusedError,
    StorageError,
    TransportError,
)
from echo.ui.report.run import WARNING


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 3),
        (TransportError("x"), 4),
        (RefusedError("x"), 5),
        (StorageError("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_code(error: EchoError, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(ConfigError("sync.max_staleness = -1: too small")) == 2
    assert capsys.readouterr().err == "error: sync.max_staleness = -1: too small\n"


def test_names_in_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    def show(_: Namespace, console: Console) -> int:
        table = Table("node")
        for name in ("fra [spot]", "ore[/]4090", ":fire:"):
            table.add_row(name)
        console.print(table)
        return 0

    assert run_command(show, Namespace()) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("fra [spot]", "ore[/]4090", ":fire:"))


def test_a_log_goes_to_its_file(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "w1.log"
    log = make_log("test_output", to_file=path, to_terminal=False)
    log.info("joined")
    logging.getLogger("echo.engine.vllm.probe").info("what is allowed")
    for handler in log.handlers:
        handler.close()
    joined, told = path.read_text().splitlines()
    assert joined.endswith("INFO    joined")
    assert told.endswith("INFO    what is allowed")
    assert not logging.getLogger("echo.test_output").propagate


def test_a_log_keeps_its_newest_lines_and_whoever_writes_into_it_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MAX_LOG_BYTES", 1000)
    path = tmp_path / "w1.log"
    log = make_log("test_rotation", to_file=path, to_terminal=False)
    with path.open("ab", buffering=0) as beside:  # as the output of C++ code does
        for number in range(100):
            log.info("line %03d", number)
            beside.write(b"NUMA\n")
        for handler in log.handlers:
            handler.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["w1.log", "w1.log.1"]
    older, newer = ((tmp_path / name).read_bytes() for name in ("w1.log.1", "w1.log"))
    assert len(older) <= 1000
    assert len(newer) <= 1000
    lines = (older + newer).decode().splitlines()
    assert "\0" not in "".join(lines)
    numbers = [int(line.split()[-1]) for line in lines if "line" in line]
    assert numbers == list(range(100 - len(numbers), 100))
    assert lines.count("NUMA") in (len(numbers), len(numbers) + 1)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(StorageError, match=r"logs.*set run\.dir"):
        make_log("test_output_2", to_file=tmp_path / "logs" / "w1.log", to_terminal=False)


def test_no_text_of_a_peer_passes_for_a_record_or_moves_the_terminal(tmp_path: Path) -> None:
    def fault() -> None:
        raise ValueError("bad\n12:00:00 INFO    all is well\x07")

    log = make_log("safe", to_file=tmp_path / "log", to_terminal=False)
    log.warning("refused: %s", "\x1b[2J\n12:00:00 INFO    all is well\u202e")
    try:
        fault()
    except ValueError:
        log.exception("internal error")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0].endswith("WARNING refused: \\x1b[2J")
    assert lines[1] == "    12:00:00 INFO    all is well\\u202e"
    assert [line[9:] for line in lines if not line.startswith("    ")] == [
        "WARNING refused: \\x1b[2J",
        "ERROR   internal error",
    ]
    assert "    12:00:00 INFO    all is well\\x07" in lines


def test_a_log_has_addresses_without_what_lets_one_in(tmp_path: Path) -> None:
    log = make_log("keyless", to_file=tmp_path / "log", to_terminal=False)
    key = "k" * 43
    log.info("joined run a-1 through tcp://10.0.0.5:7700#%s (learner)", key)
    log.info("no learner at tcp://[::1]:7700#%s.%s.%s yet", key, "s" * 22, "f" * 22)
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first.endswith("joined run a-1 through tcp://10.0.0.5:7700 (learner)")
    assert second.endswith("no learner at tcp://[::1]:7700 yet")


def test_a_join_string_given_as_the_name_of_a_file_is_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret = "s" * 22
    join = f"tcp://10.0.0.5:7700#{'k' * 43}.{secret}"
    assert main(["--role", "worker", "--config", join]) == 2
    config = str(Path(__file__).parents[2] / "configs" / "quickstart.toml")
    override = f"security.join={join}"
    assert main(["--role", "worker", "--config", config, "--set", override]) == 2
    printed = "".join(capsys.readouterr())
    assert "must be a key of 43 letters" in printed
    assert secret not in printed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk_is_told_once_where_the_lines_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "logs" / "w1.log"
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    log = make_log("full", to_file=path, to_terminal=False)
    log.addHandler(caplog.handler)
    for number in range(3):
        log.info("line %d", number)
    told = [message for message in caplog.messages if "cannot be written" in message]
    assert told == [
        f"{path} cannot be written: [Errno 28] No space left on device; its lines are lost until "
        "there is space"
    ]
    assert [message for message in caplog.messages if message.startswith("line")] == [
        "line 0", "line 1", "line 2",
    ]  # fmt: skip
    for handler in log.handlers:
        with contextlib.suppress(OSError):  # what is buffered still has no space
            handler.close()
    log.handlers.clear()


class Terminal:
    """A terminal that a process writes to, and what has arrived there."""

    def __init__(self) -> None:
        self._screen, far = pty.openpty()
        self.stream: TextIO = os.fdopen(far, "w", encoding="utf-8")
        self._is_open = True

    def text_until(self, end: str) -> str:
        """Return what is shown up to a text: the kernel brings what is written in pieces, later."""
        shown = ""
        while end not in shown:
            assert select.select([self._screen], [], [], 20)[0], f"{end!r} is not in {shown!r}"
            shown += os.read(self._screen, 1 << 16).decode()
        return shown

    def hang_up(self) -> None:
        self._is_open = False
        os.close(self._screen)

    def take_stderr(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take standard error, in a test itself: pytest takes it back after a fixture."""
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", self.stream)

    def close(self) -> None:
        if self._is_open:
            self.hang_up()
        self.stream.close()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with contextlib.closing(Terminal()) as made:
        yield made


def test_beside_a_status_line_what_others_write_goes_to_the_log(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w1.log"
    terminal.take_stderr(monkeypatch)
    log = make_log("test_strays", to_file=path, to_terminal=True)
    number = terminal.stream.fileno()
    with others_in_log(log):
        os.write(number, b"NUMA binding\n")  # as C++ does
        print("FutureWarning", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo of a child >&2"], stderr=number, check=True)
        log.info("joined")
    os.write(number, b"a traceback\n")
    for handler in log.handlers:
        handler.close()
    shown = terminal.text_until("a traceback")
    assert "joined" in shown
    found = path.read_text()
    for stray in ("NUMA binding", "FutureWarning", "of a child"):
        assert stray in found
        assert stray not in shown


def test_a_terminal_that_closes_meanwhile_ends_nothing(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w1.log"
    terminal.take_stderr(monkeypatch)
    log = make_log("test_hang_up", to_file=path, to_terminal=True)
    with others_in_log(log):
        terminal.hang_up()
        log.info("going on")
    print("the end", file=sys.stderr, flush=True)
    for handler in log.handlers:
        handler.close()
    found = path.read_text()
    assert "going on" in found
    assert "the end" in found
    assert "Logging error" not in found


def test_without_a_terminal_what_others_write_stays_where_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w1.log"
    log = make_log("test_pipe", to_file=path, to_terminal=True)
    with others_in_log(log):
        os.write(2, b"NUMA binding\n")
    for handler in log.handlers:
        handler.close()
    assert "NUMA binding" in capfd.readouterr().err
    assert path.read_text() == ""


def test_a_log_in_json_has_one_object_per_record_whatever_its_text(tmp_path: Path) -> None:
    key = "k" * 43
    log = make_log("w1", to_file=tmp_path / "w1.log", to_terminal=False, is_json=True)
    log.warning("two\nlines \x1b[31m of tcp://a:1#%s.s.f", key)
    try:
        int("none")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, (tmp_path / "w1.log").read_text().splitlines())
    assert first["message"].startswith("two\nlines \x1b[31m of tcp://a:1")
    assert key not in first["message"]
    lines = (tmp_path / "w1.log").read_text().splitlines()
    assert all(map(WARNING.match, lines)), "a report looks for them"
    assert (first["level"], first["node"], first.keys()) == (
        "warning", "w1", {"time", "level", "node", "message"},
    )  # fmt: skip
    assert first["time"].endswith("+00:00")
    assert second["traceback"].endswith(
        "ValueError: invalid literal for int() with base 10: 'none'"
    )
