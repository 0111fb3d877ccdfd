from __future__ import annotations

import io
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from echo.core.monitoring.status import CostStatus, RunStatus, StepStatus
from echo.ui.live import LiveView, PlainLog
from tests.ui.conftest import MakeStatus
from tests.ui.terminals import Pipe, Terminal, terminal_console


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_live_view_falls_back_to_ascii(make_status: MakeStatus, encoding: str) -> None:
    terminal = Terminal(encoding)
    with LiveView(terminal_console(terminal)) as view:
        view.update(make_status(run_name="naïve ✓"))
    assert view.failure is None
    assert "na?ve ?" in terminal.text()
    assert re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", terminal.text()).isascii()


@pytest.mark.parametrize("kind", [Terminal, Pipe])
def test_live_view_outlives_output_that_goes_away(
    make_status: MakeStatus, caplog: pytest.LogCaptureFixture, kind: type
) -> None:
    output = kind()
    console = terminal_console(output) if kind is Terminal else Console(file=output)
    if kind is Terminal:
        output.close()
    with LiveView(console) as view:
        view.update(make_status())
    assert view.failure is not None
    assert "The live view stopped, the run goes on" in caplog.text
    view.update(make_status())


def test_update_never_waits_for_a_paused_terminal(make_status: MakeStatus) -> None:
    resumed, is_writing = threading.Event(), threading.Event()

    class Paused(Terminal):
        def write(self, text: str) -> int:
            is_writing.set()
            resumed.wait(120)
            return super().write(text)

    view = LiveView(terminal_console(Paused()))
    view.update(make_status())
    assert is_writing.wait(120)
    # The drawing thread is stuck now; were these drawn by the caller, they would be stuck as well.
    for step in range(100):
        view.update(make_status(step=step))
    resumed.set()
    view.close()
    assert view.failure is None


def test_mode_decides_between_a_screen_that_is_given_back_and_lines(
    make_status: MakeStatus,
) -> None:
    screen, terminal, file = Terminal(), Terminal(), io.StringIO()
    with LiveView(terminal_console(screen)) as view:
        view.update(make_status())
    assert view.failure is None
    # The last frame stays behind on the normal screen.
    assert "quickstart" in screen.text().rpartition("\x1b[?1049l")[2]
    assert screen.text().count("\x1b[?1049h") == screen.text().count("\x1b[?1049l")
    view.close()
    with LiveView(terminal_console(terminal), mode="off") as view:
        view.update(make_status())
    assert "\x1b[?1049h" not in terminal.text()
    assert "step 7/10" in terminal.text()
    with LiveView(Console(file=file)) as view:
        view.update(make_status())
    assert "step 7/10" in file.getvalue()
    assert "\x1b" not in file.getvalue()


# --- lines of a plain log -------------------------------------------------------------------------


class Log(PlainLog):
    """Lines of 40 columns in memory, at a time that a test sets."""

    def __init__(self) -> None:
        self.at, self.file = 0.0, io.StringIO()
        super().__init__(Console(file=self.file, width=40), now=lambda: self.at)


@pytest.fixture
def log() -> Log:
    return Log()


QUIET = {"notices": (), "eval_history": ()}


def test_step_line_says_it_all(log: Log, make_status: MakeStatus) -> None:
    assert log.lines_for(make_status(**QUIET)) == [
        "[1:10] step 7/10  reward 0.700  staleness 0.40 (max 1, bound 3)  1.23k tokens/s  2.5s  | "
        "1 worker (1 lost)  idle 12% recently, 25% in all  refused stale 4"
    ]


def test_a_bound_that_was_lowered_is_told_as_the_present_one(
    log: Log, make_status: MakeStatus
) -> None:
    row = row_of(make_status, max_staleness=2)
    [line] = log.lines_for(make_status(staleness_bound=1, last_step=row, **QUIET))
    assert "staleness 0.40 (max 2, bound now 1)" in line


def test_a_step_is_told_when_its_row_is_written(log: Log, make_status: MakeStatus) -> None:
    log.lines_for(make_status(**QUIET))
    log.at = 10.0
    # The counter has moved, the row of the step has not been written.
    assert log.lines_for(make_status(step=8, **QUIET)) == []
    row = row_of(make_status, step=8, reward=0.25, mean_staleness=2.0)
    [line] = log.lines_for(make_status(step=8, last_step=row, **QUIET))
    assert "step 8/10  reward 0.250  staleness 2.00" in line
    assert log.lines_for(make_status(step=8, last_step=row, **QUIET)) == []


def row_of(make_status: MakeStatus, **changes: Any) -> StepStatus:
    """Return the row of a step."""
    row = make_status().last_step
    assert row is not None
    return replace(row, **changes)


def at_step(make_status: MakeStatus, step: int, **changes: Any) -> RunStatus:
    """Return a snapshot at a step whose row was written."""
    return make_status(step=step, last_step=row_of(make_status, step=step), **changes)


def test_a_step_is_told_once_and_fast_steps_are_skipped_but_the_last(
    log: Log, make_status: MakeStatus
) -> None:
    told = []
    for tick in range(1000):  # 100 s, two steps a second, ten snapshots a second
        log.at = tick / 10
        told += log.lines_for(at_step(make_status, tick // 5, max_steps=200, **QUIET))
    assert len(told) == len(set(told)) == 20
    [last] = log.lines_for(at_step(make_status, 200, max_steps=200, **QUIET))
    assert "step 200/200" in last
    assert log.lines_for(at_step(make_status, 200, max_steps=200, **QUIET)) == []


def test_waits_are_told_less_and_less_often(log: Log, make_status: MakeStatus) -> None:
    told = []
    for second in range(200):
        log.at = float(second)
        lines = log.lines_for(make_status(waiting_for="12 groups; 9 on w3", **QUIET))
        told += [(second, line) for line in lines]
    assert [second for second, _ in told] == [0, 10, 30, 70, 150]
    assert "no step for 0:10, the learner waits for 12 groups; 9 on w3" in told[1][1]


def test_notices_are_told_once_and_evaluations_are_among_them(
    log: Log, make_status: MakeStatus
) -> None:
    first = log.lines_for(make_status(notices=("a", "b")))
    assert [line.split("] ")[1] for line in first[:2]] == ["a", "b"]
    assert "sampled" not in "".join(first), "the learner has logged its evaluations"
    assert log.lines_for(make_status(notices=("b", "c"))) == ["[1:10] c"]
    assert log.lines_for(make_status(notices=("b", "c"))) == []
    flood = tuple(f"notice {i}" for i in range(50))
    lines = log.lines_for(make_status(notices=flood))
    assert lines[0] == "[1:10] (45 earlier notices not shown)"
    assert lines[-1] == "[1:10] notice 49"
    assert len(lines) == 6


def test_each_hour_is_told_with_what_the_money_bought(log: Log, make_status: MakeStatus) -> None:
    cost = CostStatus(
        per_h=4.0, total=10.0, per_million_tokens=2.0, standby_per_h=0.0, unconfirmed_per_h=0.0,
        budget_per_run=None, num_active=2, num_standby=0,
    )  # fmt: skip
    begin = make_status(cost=cost, elapsed_s=0.0, eval_history=((0, 0.36, 0.3),))
    assert not [line for line in log.lines_for(begin) if "the last" in line]
    for minutes in (59, 61):
        later = make_status(
            step=9,
            elapsed_s=60.0 * minutes,
            staleness_tokens={0: 1_001_000},
            reward_history=((7, 0.7), (9, 0.8)),
            cost=replace(cost, total=14.0),
        )
        lines = [line for line in log.lines_for(later) if "the last" in line]
        assert len(lines) == (minutes > 60)
    assert lines == [
        "[1:01:00] the last 1.02h: 2 steps, 1M tokens trained, reward 0.700 -> 0.800, "
        "held-out pass rate 0.360 -> 0.610, for $4.00 ($4 per million trained tokens)"
    ]
    assert not [line for line in log.lines_for(later) if "the last" in line]


def test_finish_tells_the_step_reached(log: Log, make_status: MakeStatus) -> None:
    log.paint(at_step(make_status, 5, **QUIET))
    log.finish(at_step(make_status, 6, **QUIET))
    log.finish(at_step(make_status, 6, **QUIET))
    assert [line.split()[2] for line in log.file.getvalue().splitlines()] == ["5/10", "6/10"]
