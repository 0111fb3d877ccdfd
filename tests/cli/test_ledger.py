from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from echo.cli.commands.ledger import main
from echo.core.records import Granted
from echo.records.ledger import Began, Ledger


def write_run(run_dir: Path, num_groups: int) -> None:
    ledger = Ledger(run_dir, spool_bytes=1 << 20)
    ledger.append(Began(lineage=1, fork_step=0))
    for group in range(num_groups):
        ledger.append(Granted(group=group, attempt=0, worker="w1"))
    ledger.close()


def test_every_record_is_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 2)
    assert main([str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["lineage", "granted", "granted"]
    assert [line["group"] for line in lines[1:]] == [0, 1]
    assert all(line["at"] > 1.6e9 for line in lines)


def test_a_directory_without_a_run_is_unusable_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 3
    assert "ledger.sqlite: no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_program_that_stops_reading_ends_it_quietly(tmp_path: Path) -> None:
    write_run(tmp_path, 5000)
    code = "import sys; from echo.cli.commands.ledger import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2],
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert b'"lineage"' in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
