from __future__ import annotations

import logging
from pathlib import Path

import pytest

from echo.cli.output import exit_code, fail, make_log
from echo.errors import (
    ConfigError,
    DataError,
    EchoError,
    RefusedError,
    StorageError,
    TransportError,
)


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


def test_a_log_goes_to_its_file(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "w1.log"
    log = make_log("test_output", to_file=path, to_terminal=False)
    log.info("joined")
    for handler in log.handlers:
        handler.close()
    assert path.read_text().endswith("INFO    joined\n")
    assert not logging.getLogger("echo.test_output").propagate


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(StorageError, match=r"logs.*set run\.dir"):
        make_log("test_output_2", to_file=tmp_path / "logs" / "w1.log", to_terminal=False)
