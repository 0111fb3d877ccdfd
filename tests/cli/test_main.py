from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import echo.cli.main
from echo import __version__
from echo.cli.main import COMMANDS, find_command, main
from echo.config import fields
from echo.core.extras import ROLES, install_command

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"echo-rl {__version__}\n"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("quikstart", "did you mean quickstart?"),
        ("nodes", "did you mean node?"),
        ("--role", f"there are {', '.join(COMMANDS)}"),
    ],
)
def test_an_unknown_command_is_refused(
    name: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith(f"error: no command {name!r}; {remedy}")


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (["node", "--role", "relay", "--set", "run.dir=\udcff"], "'run.dir=\\udcff' is not UTF-8"),
        (["sim", "--sweep", "job.model=\udcff"], "'job.model=\\udcff' is not UTF-8 text"),
        (["ledger", "x" * 256], "a name of more than 255 bytes, which no disk takes"),
        (["quickstart", "--resume", "x" * 256], "a name of more than 255 bytes"),
    ],
)
def test_an_argument_that_nothing_could_hold_is_refused(
    line: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert remedy in capsys.readouterr().err


def test_every_command_exists() -> None:
    assert all(callable(find_command(name)) for name in COMMANDS)


def test_the_rest_of_the_line_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "--role", "relay", "--help-config"]) == 0
    assert "[relay]" in capsys.readouterr().out


@pytest.mark.slow
def test_help_and_version_need_no_package() -> None:
    program = f"""
import contextlib, sys
sys.path.insert(0, {str(ROOT)!r})
from echo.cli.main import COMMANDS, main
for name in COMMANDS:
    for option in ("--help", "--version"):
        with contextlib.suppress(SystemExit):
            main([name, option])
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(f"echo-rl {__version__}\n") == len(COMMANDS)
    assert all(f"usage: echo-rl {name} " in done.stdout for name in COMMANDS)


def test_roles_are_those_of_the_configuration() -> None:
    assert fields.ROLES == ROLES


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [(["node", "--role", "worker"], "worker"), (["plan", "f"], "planner"), (["sim"], "planner")],
)
def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    extra: str,
) -> None:
    def find(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    monkeypatch.setattr(echo.cli.main, "find_command", find)
    assert main(arguments) == 2
    assert f"needs torch, which is not installed; install it with {install_command(extra)}" in (
        capsys.readouterr().err
    )
