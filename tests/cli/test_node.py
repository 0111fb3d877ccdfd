from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo.cli.node import main
from echo.config.load import load_config, save_resolved

LEARNER = '[model]\nname = "nowhere"\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}"\n{LEARNER}[worker]\nconnect = "tcp://a:1"\n')
    return path


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--role", "worker", "--resume"], "--resume is for the learner; a worker"),
        (["--role", "relay", "--init-from", "x"], "--init-from is for the learner; a relay"),
        (["--role", "learner", "--yes"], "--yes accepts changes to a run that is resumed"),
        (["--role", "learner"], "--config FILE is missing"),
        (["--role", "learner", "--config", "missing.toml"], "missing.toml: cannot be read"),
    ],
)
def test_a_wrong_line_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert complaint in capsys.readouterr().err


def test_a_missing_model_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("--role", "learner", "--config", config, "--set", "model.name=./nowhere",
               "--set", "ui.live=off")  # fmt: skip
    assert code == 3
    assert "./nowhere" in capsys.readouterr().err


def test_a_dry_run_starts_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(config.parent.iterdir())
    assert run("--role", "worker", "--config", config, "--dry-run") == 0
    assert "tcp://a:1" in capsys.readouterr().out
    assert list(config.parent.iterdir()) == before


def test_there_must_be_something_to_resume(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--role", "learner", "--config", config, "--resume") == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_a_resume_prints_the_difference_and_refuses_what_is_not_safe(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = config.parent / "run"
    run_dir.mkdir()
    save_resolved(load_config(config, [], "learner")[0], run_dir / "config.json")
    changes = ["--set", "run.max_steps=7", "--set", "batch.group_size=3"]
    assert run("--role", "learner", "--config", config, "--resume", *changes) == 2
    err = capsys.readouterr().err
    assert "safe   run.max_steps: 100 -> 7" in err
    assert "UNSAFE batch.group_size: 8 -> 3" in err
    assert "the change of batch.group_size is not safe" in err
    # What the directory says of itself is a configuration too.
    own = run_dir / "config.json"
    assert json.loads(own.read_text())["run"]["max_steps"] == 100
    assert run("--role", "learner", "--config", own, "--dry-run") == 0


def test_a_worker_that_finds_nobody_gives_up(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run("--role", "worker", "--config", config, "--set", "worker.connect=tcp://127.0.0.1:9",
               "--set", "network.reconnect_for_s=0.2", "--set", "worker.name=lonely")  # fmt: skip
    assert code == 4
    assert "network.reconnect_for_s sets how long to try" in capsys.readouterr().err
    assert "no learner reached" in (config.parent / "run" / "logs" / "lonely.log").read_text()
