"""Tests of `echo-rl status`, `ctl` and `top` where no learner answers."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from echo.cli.commands import ctl, status, top
from echo.core.monitoring.status import RunState
from echo.records.ledger import lock_run
from echo.records.run_files import save_status
from tests.core.test_status import STATUS


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose learner is gone; its keys lead to a port where nothing listens."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "operate").write_text(f"tcp://127.0.0.1:9#{'A' * 43}.{'A' * 22}\n")
    save_status(tmp_path, replace(STATUS, state="running", at=time.time() - 120))
    return tmp_path


@pytest.mark.parametrize(
    ("state", "shown", "note"),
    [
        ("running", "stopped", "the learner has ended without a word, or is elsewhere: as it was "),
        ("finished", "finished", "the run has finished, 2min ago"),
        ("stopped", "stopped", "the run has stopped, 2min ago"),
    ],
)
def test_the_saved_status_of_a_run_is_shown_with_its_age(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    state: RunState,
    shown: str,
    note: str,
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    save_status(run_dir, replace(STATUS, state=state, at=now - 120))
    assert status.main([str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert note in out
    assert f"echo run {shown}" in out
    assert "w1" in out
    assert status.main(["--json", str(run_dir)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"]) == (shown, STATUS.step)


def test_a_learner_that_is_starting_has_not_ended(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = lock_run(run_dir)
    try:
        assert status.main([str(run_dir)]) == 0
    finally:
        os.close(lock)
    out = " ".join(capsys.readouterr().out.split())
    assert "it may still be starting: as it was saved 2min ago" in out
    assert "echo run stopped" not in out


def test_a_run_without_encryption_is_read_from_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_status(tmp_path, replace(STATUS, at=time.time()))
    assert status.main([str(tmp_path)]) == 0
    assert "its links are not encrypted" in capsys.readouterr().out
    for main, words in ((ctl.main, ["pause"]), (top.main, [])):
        assert main([*words, str(tmp_path)]) == 2
        assert "security.curve = false" in capsys.readouterr().err


def test_a_directory_without_a_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([str(tmp_path)]) == 3
    assert "is the directory" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [["drain"], ["drain", "a", "b"], ["pause", "w1"], ["set", "k"]])
def test_a_command_with_wrong_words_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert ctl.main([*words, str(run_dir)]) == 2
    assert "see echo-rl ctl --help" in capsys.readouterr().err


def test_a_command_for_a_learner_that_is_gone_fails(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(["pause", str(run_dir)]) == 4
    assert "no learner answers" in capsys.readouterr().err


def test_top_needs_a_terminal(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main([str(run_dir)]) == 2
    assert "echo-rl status prints once" in capsys.readouterr().err


def test_ctl_says_what_its_acts_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ctl.main(["--help"])
    assert "standby NODE RUN" in capsys.readouterr().out
