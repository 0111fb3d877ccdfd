from __future__ import annotations

import pytest

from echo import __version__
from echo.cli.main import COMMANDS, find_command, main


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"echo-rl {__version__}\n"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


def test_every_command_exists() -> None:
    assert all(callable(find_command(name)) for name in COMMANDS)


def test_the_rest_of_the_line_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "--role", "relay", "--help-config"]) == 0
    assert "[relay]" in capsys.readouterr().out
