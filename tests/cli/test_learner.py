from __future__ import annotations

import json
import logging
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from echo.cli.commands.node import NoticeBoard, read_curve, show_summary
from echo.cli.output import LogFormatter
from echo.config.load import parse_config, save_resolved
from echo.ui.screen import MAX_NOTICES
from tests.records.rows import write_ledger


def test_the_board_keeps_the_newest_lines() -> None:
    board = NoticeBoard()
    for number in range(100):
        board.emit(logging.makeLogRecord({"msg": f"line {number}"}))
    assert board.lines == [f"line {number}" for number in range(100 - MAX_NOTICES, 100)]


def test_what_raised_where_is_not_for_the_board() -> None:
    board = NoticeBoard()
    board.setFormatter(LogFormatter("%(asctime)s %(message)s", datefmt="now"))
    try:
        int("none")
    except ValueError as error:
        caught = (type(error), error, error.__traceback__)
    board.emit(logging.makeLogRecord({"msg": "step 3 failed", "exc_info": caught}))
    assert board.lines == ["now step 3 failed"]
    assert board.last == "step 3 failed"


@pytest.mark.slow
def test_the_report_is_printed_and_kept_and_wraps_on_a_terminal_only(tmp_path: Path) -> None:
    run_dir = tmp_path / ("a directory with a long name " * 5).strip()
    run_dir.mkdir()
    rates = "eval/addition/reward", "eval/addition/greedy", "eval/version"
    rows = [
        {"step": 0, "time": 0.0, **dict(zip(rates, (0.3, 0.2, 0), strict=True))},
        {"step": 1, "time": 1.0, "reward/mean": 0.4, "time/step": 1.0, "staleness/mean": 0.0},
        {"step": 1, "time": 2.0, **dict(zip(rates, (0.8, 0.7, 1), strict=True))},
    ]
    write_ledger(run_dir, [])
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_resolved(parse_config({}), run_dir / "config.json")
    console = Console(file=StringIO())
    show_summary(run_dir, console, commands=["bin/echo-quickstart"])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "bin/echo-quickstart" in text
    assert f"{run_dir / 'metrics.jsonl'}\n" in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert (run_dir / "summary.txt").read_text() == text
    assert (run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    # A terminal wraps; the file that it leaves does not.
    terminal = Console(file=StringIO(), width=80, force_terminal=True)
    show_summary(run_dir, terminal, commands=["bin/echo-quickstart"])
    assert (run_dir / "summary.txt").read_text() == text


def test_a_run_that_ended_without_a_step_has_no_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    console = Console(file=StringIO())
    show_summary(tmp_path, console)
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        f"no optimizer step was made, so there is nothing to sum up; why: {tmp_path}/logs\n"
    )


def test_the_curve_before_a_resume_is_read_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("test")
    assert read_curve(tmp_path, log) is None
    assert "without the curve of the steps before" in caplog.text
    rows = [
        {"step": step, "time": 1.0, "lineage": lineage, "reward/mean": reward}
        for lineage, step, reward in [(1, 1, 0.1), (1, 2, None), (1, 3, 0.3), (2, 3, 0.4)]
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = read_curve(tmp_path, log)
    assert curve is not None
    assert curve.rewards == {1: 0.1, 3: 0.4}
