from __future__ import annotations

import asyncio
import io
import logging

import pytest

from echo.core.metrics import WorkerView
from echo.ui import live
from echo.ui.live import StatusLine, WorkerStatus, show_status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def view(num_tokens: int, num_groups: int = 7) -> WorkerView:
    return WorkerView(
        version="v3", num_tokens=num_tokens, num_groups=num_groups, activity="sampling"
    )


def test_tokens_per_second_are_those_of_the_last_seconds() -> None:
    status = WorkerStatus()
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
    assert terminal.getvalue() == f"{erase}{status}{erase}joined\n{erase}{status}{erase}"


def test_a_terminal_that_is_gone_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    line = StatusLine(Gone())
    line.show("a")
    line.show("b")
    assert not line.is_live


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_worker_tells_its_status_on_a_terminal_or_in_its_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_terminal: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(live, "REFRESH_S", 0.001)
    monkeypatch.setattr(live, "LOG_S", 0.002)
    stream = Terminal() if is_terminal else io.StringIO()
    line = StatusLine(stream)
    asked = iter(range(20))

    def look() -> WorkerView:
        if next(asked) == 19:
            raise asyncio.CancelledError
        return view(0)

    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        asyncio.run(show_status(look, logging.getLogger("test.status"), line))
    text = "v3  0 tokens/s  7 groups delivered  sampling"
    assert (text in stream.getvalue(), text in caplog.text) == (is_terminal, not is_terminal)
    assert stream.getvalue().endswith("\r\x1b[K") == is_terminal
