from __future__ import annotations

import io
import logging
from typing import Any

import pytest

from echo.core.monitoring.metrics import WorkerView
from echo.ui.worker_status import StatusLine, WorkerStatus
from tests.ui.terminals import Pipe, Terminal


def view(num_tokens: int, num_groups: int = 7) -> WorkerView:
    numbers = {"num_tokens": num_tokens, "num_groups": num_groups}
    return WorkerView(version="v3", **numbers, activity="sampling")


def test_tokens_per_second_are_those_of_the_last_seconds() -> None:
    status = WorkerStatus(StatusLine(io.StringIO()), logging.getLogger("test.status"))
    assert status.text(view(0, 1), now=0.0) == "v3  0 tokens/s  1 group delivered  sampling"
    for second in range(1, 20):
        text = status.text(view(1000 * second), now=float(second))
    assert text == "v3  1,000 tokens/s  7 groups delivered  sampling"
    for second in range(20, 40):
        text = status.text(view(19_000), now=float(second))
    assert text.startswith("v3  0 tokens/s")


def test_the_line_stays_below_the_log_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    line = StatusLine(terminal)
    line.show("x" * 50)
    line.handle(logging.makeLogRecord({"msg": "joined"}))
    line.show("")
    status, erase = "x" * 19, "\r\x1b[K"
    assert terminal.text() == f"{erase}{status}{erase}joined\n{erase}{status}{erase}"
    monkeypatch.setattr(terminal, "write", Pipe().write)  # it is gone
    line.show("a")
    line.show("b")
    assert not line.is_live


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_worker_tells_its_status_on_a_terminal_or_in_its_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_terminal: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream: Any = Terminal() if is_terminal else io.StringIO()
    status = WorkerStatus(StatusLine(stream), logging.getLogger("test.status"))
    with caplog.at_level(logging.INFO):
        for second in range(121):
            status.report(view(0), now=float(second))
    text = "v3  0 tokens/s  7 groups delivered  sampling"
    said = stream.text() if is_terminal else stream.getvalue()
    assert (said.count(text), caplog.text.count(text)) == ((121, 0) if is_terminal else (0, 2))
