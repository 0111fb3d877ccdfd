from __future__ import annotations

import json
import logging
from io import StringIO
from pathlib import Path

from rich.console import Console

from echo.cli.learner import MAX_NOTICES, NoticeBoard, report
from echo.config.load import parse_config, save_resolved


def test_the_board_keeps_the_newest_lines() -> None:
    board = NoticeBoard()
    for number in range(100):
        board.emit(logging.makeLogRecord({"msg": f"line {number}"}))
    assert board.lines == [f"line {number}" for number in range(100 - MAX_NOTICES, 100)]


def test_what_raised_where_is_not_for_the_board() -> None:
    board = NoticeBoard()
    board.setFormatter(logging.Formatter("%(message)s"))
    try:
        int("none")
    except ValueError as error:
        caught = (type(error), error, error.__traceback__)
    board.emit(logging.makeLogRecord({"msg": "step 3 failed", "exc_info": caught}))
    assert board.lines == ["step 3 failed"]


def test_the_report_is_printed_and_kept(tmp_path: Path) -> None:
    rates = "eval/addition/pass@1", "eval/addition/greedy", "eval/version"
    rows = [
        {"step": 0, "time": 0.0, **dict(zip(rates, (0.3, 0.2, 0), strict=True))},
        {"step": 1, "time": 1.0, "reward/mean": 0.4, "time/step": 1.0, "staleness/mean": 0.0},
        {"step": 1, "time": 2.0, **dict(zip(rates, (0.8, 0.7, 1), strict=True))},
    ]
    (tmp_path / "ledger.jsonl").write_text("")
    save_resolved(parse_config({})[0], tmp_path / "config.json")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = Console(file=StringIO(), width=100)
    report(tmp_path, console, commands=["bin/echo-quickstart"])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (tmp_path / "summary.txt").read_text() == text
    assert "bin/echo-quickstart" in text
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
