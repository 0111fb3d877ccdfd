"""`echo-rl doctor` as a user runs it: findings as JSON, exit codes, the engine."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from echo.cli.commands.doctor import _compare, main
from echo.config.load import inherited_settings, parse_config
from echo.config.schema import Config
from echo.engine.engine import Sampling
from echo.engine.model import build_model, save_tiny_model
from echo.records import files
from echo.runtime.doctor.link import LinkReport
from echo.runtime.doctor.machine import Finding
from echo.runtime.worker import setup
from tests.roles.test_joining import UNSIGNED


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "TRIAL_BYTES", 1 << 20)
    monkeypatch.setattr(files, "NUM_SYNCS", 1)
    monkeypatch.delenv("ECHO_JOIN", raising=False)
    monkeypatch.chdir(tmp_path)


def findings(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    """Return the exit code, and the last level of each name that `--json` prints."""
    code = main([*words, "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, {row["name"]: row["level"] for row in rows}


def test_the_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(capsys)
    assert code == 0
    assert {"Python", "packages", "GPU", "open files", "ledger"} <= found.keys()
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{len(found)} checks: 0 failed")


def test_one_warning_is_not_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding("warning", "clock", "it is late")
    monkeypatch.setattr("echo.cli.commands.doctor.examine", lambda arguments: [finding])
    main([])
    assert capsys.readouterr().out.splitlines()[-1] == "1 check: 0 failed, 1 warning"


def test_a_configuration_that_would_not_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(f'[model]\nname = "missing"\n[learner]\nlisten = "{address}"\n')
        code, found = findings(capsys, "--config", str(config))
        main(["--config", str(config)])
    assert (code, found["start"]) == (1, "failed")
    shown = capsys.readouterr().out
    assert "why: the learner would end with this error" in shown
    assert "do: see the text" not in shown  # an error says itself what to do
    config.write_text("[model]\nnam = 1\n")
    code, found = findings(capsys, "--config", str(config))
    assert (code, found["configuration"]) == (1, "failed")


def test_a_worker_without_a_join_string_is_checked_to_the_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    line = ["--role", "worker", "--config", str(config), "--engine"]
    config.write_text('[worker]\nconnect = "tcp://10.0.0.5:7700"\n')
    code, found = findings(capsys, *line)
    assert (code, found["start"], found["engine"]) == (1, "failed", "failed")
    config.write_text('[worker]\nconnect = "tcp://127.0.0.1:7700"\n')  # beside its learner
    code, found = findings(capsys, *line)
    assert (found["start"], found["link"], found["engine"]) == ("ok", "warning", "failed")


def test_a_join_string_that_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    join = f"{address}#{'A' * 43}.{'B' * 21}A.{'C' * 21}A"
    code, found = findings(capsys, "--connect", join)
    assert (code, found["link"]) == (1, "failed")
    assert main(["--connect", "tcp://host"]) == 1
    assert "configuration: --connect is not a join string" in capsys.readouterr().out


def test_the_engine_is_tried_with_its_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "model", build_model(seed=0))
    words = ["--role", "worker", "--engine", "--set", f"model.name={tmp_path / 'model'}"]
    config = tmp_path / "run.toml"
    config.write_text('[security]\ncurve = false\n[worker]\nconnect = ["tcp://127.0.0.1:9"]\n')
    code, found = findings(capsys, "--config", str(config), *words)
    assert (code, found["link"], found["engine"]) == (1, "failed", "ok")


def test_a_first_token_that_was_held_up_gives_no_absurd_rate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path / "model", build_model(seed=0))

    class HeldUp:
        def load(self, tensors: object) -> None: ...

        def generate(self, requests: object, sampling: Sampling) -> None:
            time.sleep(0.2 if sampling.max_completion_tokens == 1 else 0.02)

        def close(self) -> None: ...

    monkeypatch.setattr(setup, "make_engine", lambda *_: HeldUp())
    words = ["--role", "worker", "--engine", "--set", f"model.name={tmp_path / 'model'}"]
    config = tmp_path / "run.toml"
    config.write_text('[security]\ncurve = false\n[worker]\nconnect = ["tcp://127.0.0.1:9"]\n')
    main(["--config", str(config), *words])
    told = " ".join(capsys.readouterr().out.split())
    found = re.search(r"later ones at (\d+) or more per second", told)
    assert found is not None, told
    assert int(found[1]) <= 16 / 0.02


CONNECT = "worker.connect=tcp://10.0.0.5:7700"


def compared(config: Config, **learner: Any) -> list[Finding]:
    """Return the findings about a learner whose Welcome differs in `learner`."""
    settings = inherited_settings(config)
    welcome = msgspec.structs.replace(UNSIGNED, **{"settings": settings, "digests": {}} | learner)
    return list(_compare(config, LinkReport("tcp://h:1", welcome=welcome)))


def test_settings_that_contradict_the_learner_are_a_failure() -> None:
    config = parse_config({"sampling": {"temperature": 0.5}}, [CONNECT], "worker")
    [finding] = compared(config, settings={"sampling.temperature": 1.0})
    assert (finding.level, finding.name) == ("failed", "settings")
    assert "sampling.temperature = 0.5 contradicts the learner, which uses 1.0" in finding.text
    [finding] = compared(config)
    assert (finding.level, finding.text) == (
        "ok",
        "the worker takes model and tokenizer from the learner",
    )


def test_a_model_that_is_not_the_learners_is_a_failure(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, build_model(seed=0))
    config = parse_config({}, [CONNECT, f"model.name={tmp_path}"], "worker")
    [finding] = compared(config)
    assert (finding.level, finding.name) == ("ok", "model")
    [finding] = compared(config, digests={"model": "another"})
    assert (finding.level, finding.name) == ("failed", "model")
    assert "the learner another. Give both the same files" in finding.text
