from __future__ import annotations

import io
import logging
import math
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from echo.core.metrics import CostView, NodeView, Snapshot, SpeedView, StepView, WorkerView
from echo.ui import live
from echo.ui.live import (
    Curve,
    LiveView,
    Marks,
    PlainLog,
    RemainingTime,
    StatusLine,
    WorkerStatus,
    line_chart,
    render_live,
    to_ascii,
    value_range,
)
from tests.ui.conftest import MakeSnapshot


def lines_of(view: object, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(view)
    return file.getvalue().splitlines()


def plain(row: object) -> str:
    """The text of a row, without its colours."""
    assert isinstance(row, Text)
    return row.plain


class Terminal(io.TextIOWrapper):
    """A terminal in memory."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self._shown = io.BytesIO()
        super().__init__(self._shown, encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return self._shown.getvalue().decode(self.encoding)


def terminal_console(terminal: Terminal) -> Console:
    environ = {"TERM": "xterm"}
    return Console(file=terminal, width=80, height=24, force_terminal=True, _environ=environ)


def test_everything_worth_knowing_is_on_the_screen(make_snapshot: MakeSnapshot) -> None:
    snapshot = make_snapshot(waiting_for="5 groups; 5 on w2")
    text = "\n".join(lines_of(render_live(snapshot, 100, height=30, eta_s=30.0), 100))
    for expected in (
        "echo quickstart",
        "step 7/10   1:10 elapsed   ETA 0:30",
        "reward 0.7",
        "held-out pass rate ● 0.61 sampled ◆ 0.72 greedy",
        "staleness mean 0.50",
        "60.0%",
        "0.0% ◂ bound",
        "3 buffered, 8 needed   5 leased   1.23k tokens/s in the last step",
        "v7 ━━",
        " 50%   3 MiB sent   a version per step",
        "idle 12% recently, 25% in all   waits for 5 groups; 5 on w2",
        "refused  stale 4",
        "w10 lost: silent for 10 s",
    ):
        assert expected in text
    assert "duplicate" not in text
    rows = lines_of(render_live(make_snapshot(), 80, height=24), 80)
    assert len(rows) <= 24
    starts = {row.split(" ", 1)[0] for row in rows}
    assert {"echo", "reward", "groups", "weights", "learner", "node", "refused", "·"} <= starts


def test_names_from_the_network_cannot_steer_the_terminal(make_snapshot: MakeSnapshot) -> None:
    evil = NodeView(node_id="w\x1b[2J", role="worker", state="gen\x1b]0;x\x07", parent="[bold]")
    snapshot = make_snapshot(nodes=(evil,), notices=("\x1b[31mred",), waiting_for="\x1bc")
    text = "\n".join(lines_of(render_live(snapshot, 120), 120))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]" in text


@pytest.mark.parametrize(("width", "height"), [(60, 30), (80, 24), (120, 40)])
def test_a_command_in_a_notice_is_shown_whole(
    make_snapshot: MakeSnapshot, width: int, height: int
) -> None:
    command = "ECHO_JOIN=THAT_LINE bin/echo-rl node --role worker"
    path = f"/home/somebody/echo/runs/two-machines{'-with-a-long-name' * 3}/keys/join"
    notice = f"12:00:01 others join with the line in {path}: {command}"
    snapshot = make_snapshot(notices=("an older one " * 20, notice))
    rows = lines_of(render_live(snapshot, width, height=height), width)
    assert len(rows) <= height
    shown = "".join(row.rstrip() for row in rows).replace(" ", "")
    assert f"·{notice}".replace(" ", "") in shown
    # What is longer than a row is folded without an indent: joined again, it is what it was.
    assert "…" not in "".join(rows[-4:])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    width=st.integers(1, 130),
    height=st.integers(0, 40),
    num_nodes=st.integers(0, 12),
    step=st.integers(0, 12),
    max_staleness=st.integers(0, 70),
    rewards=st.lists(st.floats(), max_size=6),
    name=st.text(max_size=20),
)
@pytest.mark.slow
def test_any_size_and_content_can_be_drawn(
    make_snapshot: MakeSnapshot,
    width: int,
    height: int,
    num_nodes: int,
    step: int,
    max_staleness: int,
    rewards: list[float],
    name: str,
) -> None:
    nodes = [NodeView(node_id=name + str(i), role="worker", state=name) for i in range(num_nodes)]
    snapshot = make_snapshot(
        run_name=name,
        step=step,
        nodes=tuple(nodes),
        max_staleness=max_staleness,
        reward_history=tuple(rewards),
        waiting_for=name,
        notices=(name,) * 8,
    )
    view = render_live(snapshot, width, height=height)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    rows = console.render_lines(view, pad=False)
    assert len(rows) <= height
    assert all(Segment.get_line_length(row) <= width for row in rows)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_live_view_falls_back_to_ascii(make_snapshot: MakeSnapshot, encoding: str) -> None:
    terminal = Terminal(encoding)
    with LiveView(terminal_console(terminal)) as view:
        view.update(make_snapshot(run_name="naïve ✓"))
    assert view.failure is None
    assert "na?ve ?" in terminal.text()
    assert re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", terminal.text()).isascii()


class Pipe(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def fileno(self) -> int:
        raise OSError("not a descriptor")


@pytest.mark.parametrize("kind", [Terminal, Pipe])
def test_live_view_outlives_output_that_goes_away(
    make_snapshot: MakeSnapshot, caplog: pytest.LogCaptureFixture, kind: type
) -> None:
    output = kind()
    console = terminal_console(output) if kind is Terminal else Console(file=output)
    if kind is Terminal:
        output.close()
    with LiveView(console) as view:
        view.update(make_snapshot())
    assert view.failure is not None
    assert "The live view stopped, the run goes on" in caplog.text
    view.update(make_snapshot())


def test_update_never_waits_for_a_paused_terminal(make_snapshot: MakeSnapshot) -> None:
    resumed, is_writing = threading.Event(), threading.Event()

    class Paused(Terminal):
        def write(self, text: str) -> int:
            is_writing.set()
            resumed.wait(120)
            return super().write(text)

    view = LiveView(terminal_console(Paused()))
    view.update(make_snapshot())
    assert is_writing.wait(120)
    # The drawing thread is stuck now; were these drawn by the caller, they would be stuck as well.
    for step in range(100):
        view.update(make_snapshot(step=step))
    resumed.set()
    view.close()
    assert view.failure is None


def test_mode_decides_between_a_screen_that_is_given_back_and_lines(
    make_snapshot: MakeSnapshot,
) -> None:
    screen, terminal, file = Terminal(), Terminal(), io.StringIO()
    with LiveView(terminal_console(screen)) as view:
        view.update(make_snapshot())
    assert view.failure is None
    # The last frame stays behind on the normal screen.
    assert "quickstart" in screen.text().rpartition("\x1b[?1049l")[2]
    assert screen.text().count("\x1b[?1049h") == screen.text().count("\x1b[?1049l")
    view.close()
    with LiveView(terminal_console(terminal), mode="off") as view:
        view.update(make_snapshot())
    assert "\x1b[?1049h" not in terminal.text()
    assert "step 7/10" in terminal.text()
    with LiveView(Console(file=file)) as view:
        view.update(make_snapshot())
    assert "step 7/10" in file.getvalue()
    assert "\x1b" not in file.getvalue()


# --- charts ---------------------------------------------------------------------------------------


def test_marks_lie_over_the_curve() -> None:
    curve = Curve([(0, 1.0), (10, 1.0)], "cyan")
    marks = Marks([(0, 0.0), (10, 1.0), (5, math.nan)], "green", "●")
    size = {"width": 30, "height": 4}
    rows = line_chart([curve], [marks], **size, x_range=(0, 10), y_range=(0, 1))
    assert rows[0].plain.endswith("●")
    assert rows[2].plain.split("│")[1].startswith("●")
    assert sum(row.plain.count("●") for row in rows) == 2


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats()), max_size=50),
    st.integers(0, 120),
    st.integers(0, 20),
)
def test_chart_always_has_the_size_asked_for(
    points: list[tuple[float, float]], width: int, height: int
) -> None:
    rows = line_chart(
        [Curve(points, "cyan")],
        [Marks(points, "green", "o")],
        width=width,
        height=height,
        x_range=(0, 100),
        y_range=value_range([y for _, y in points]),
    )
    assert [row.cell_len for row in rows] == [width] * height


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0.0, 1.0)),
        ([0.34, 0.76], (0.3, 0.8)),
        ([0.0, 1.0], (0.0, 1.0)),
        ([0.5], (0.4, 0.5)),
        ([math.inf, 0.15], (0.1, 0.2)),
        ([-10.0, 10.0], (-11.0, 11.0)),
    ],
)
def test_value_range(values: list[float], expected: tuple[float, float]) -> None:
    assert value_range(values) == pytest.approx(expected)


def test_what_is_drawn_in_ascii_is_as_wide() -> None:
    assert to_ascii("ab│⠉⣿ ● ◆ █▌ ◂ S …") == "ab|** o x ## < S ~"
    assert to_ascii("wörker 中文 ✓") == "w?rker ???? ?"


# --- sections -------------------------------------------------------------------------------------


def test_staleness_bins_mark_the_bound_and_keep_every_token() -> None:
    bins = [("0", 5, False), ("1", 3, False), ("2", 0, False), ("3", 0, True)]
    assert live.staleness_bins({0: 5, 1: 3}, 3, 8) == bins
    grouped = live.staleness_bins(dict.fromkeys(range(12), 1), 11, 4)
    assert grouped == [("0-2", 3, False), ("3-5", 3, False), ("6-8", 3, False), ("9-11", 3, True)]
    assert live.staleness_bins({1: 4, 5: 1}, 1, 8)[-1] == (">1", 1, False), "a bin of their own"


@pytest.mark.parametrize(
    ("short", "value", "text"),
    [
        (live.short_count, 0, "0"), (live.short_count, 999, "999"), (live.short_count, 999.9, "1k"),
        (live.short_count, 12345, "12.3k"), (live.short_count, 4.56e6, "4.56M"),
        (live.short_count, 2e10, "20G"),
        (live.clock, 0, "0:00"), (live.clock, 7.4, "0:07"), (live.clock, 59.6, "1:00"),
        (live.clock, 754, "12:34"), (live.clock, 3723, "1:02:03"), (live.clock, 183840, "2d 03:04"),
        (live.clock, -1, "0:00"), (live.clock, math.inf, "-"),
    ],
)  # fmt: skip
def test_numbers_and_times_are_short(short: Any, value: float, text: str) -> None:
    assert short(value) == text


def test_node_table_shows_every_column_where_there_is_room(make_snapshot: MakeSnapshot) -> None:
    rows = [row.plain for row in live.node_table(make_snapshot().nodes, 100, 9)]
    assert rows[0].split() == [
        "node", "role", "version", "stale", "tok/s", "bytes/s", "leases", "state", "parent", "seen",
    ]  # fmt: skip
    assert rows[3].split() == [
        "w2", "worker", "v6", "1", "1.23k", "2", "KiB", "5", "generating", "r1", "0:00",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows[1:]] == ["learner", "r1", "w2", "w10"]


def test_node_table_keeps_nodes_in_trouble_and_sums_up_the_rest() -> None:
    nodes = [NodeView(node_id=f"w{i}", role="worker", state="generating") for i in range(30)]
    nodes[20] = NodeView(node_id="w20", role="worker", state="lost")
    rows = [row.plain.strip() for row in live.node_table(nodes, 100, 5)]
    assert len(rows) == 5
    assert [row.split()[0] for row in rows[1:4]] == ["w0", "w1", "w20"]
    assert rows[4] == "and 27 more: 27 generating"


def test_long_waits_wrap_and_end_visibly_cut(make_snapshot: MakeSnapshot) -> None:
    snapshot = make_snapshot(waiting_for="12 groups; " + "9 on w3, which waits for v17 " * 9)
    rows = live.status(snapshot, 60, num_wait_rows=2)
    assert len(rows) == 4
    assert plain(rows[2]).startswith("learner  idle 12% recently, 25% in all   waits for 12")
    assert plain(rows[3]).rstrip().endswith("...")


def test_costs_and_the_learners_speed_have_rows_of_their_own(make_snapshot: MakeSnapshot) -> None:
    cost = CostView(
        per_h=16.2,
        total=3.456,
        per_million_tokens=1.25,
        standby_per_h=14.0,
        unconfirmed_per_h=0.0,
        budget_per_run=20.0,
        num_active=1,
        num_standby=2,
        decision="fewer or cheaper workers are enough: 1 of 3 workers active",
    )
    spent = {"forward_backward_s": 1.23, "optimizer_s": 0.104}
    speed = SpeedView(tokens_per_s=43210.0, mfu=0.403, peak_memory_bytes=61.5 * 2**30, **spent)
    without = live.status(make_snapshot(), 140, num_wait_rows=1)
    rows = live.status(make_snapshot(cost=cost, speed=speed), 140, num_wait_rows=1)
    assert len(rows) == len(without) + 3
    assert [plain(row).rstrip() for row in (rows[1], *rows[-2:])] == [
        "trainer  43.2k tokens/s   40% MFU   peak 61.5 GiB   1.2 s passes, 0.1 s update",
        "cost     $16.20/h   $3.46 so far of $20.00   $1.25 per million tokens   "
        "1 active, 2 on standby   $14.00/h for machines on standby",
        "         fewer or cheaper workers are enough: 1 of 3 workers active",
    ]
    assert live.speed_row(replace(speed, mfu=None, peak_memory_bytes=2**20)).plain == (
        "trainer  43.2k tokens/s   peak 1 MiB   1.2 s passes, 0.1 s update"
    )


STEADY = ((80, 0.0), (81, 900.0), (82, 910.0), (83, 920.0), (84, 930.0))
"""A resumed run, which made no step before its workers had joined."""


@pytest.mark.parametrize(
    ("seen", "now", "eta_s"),
    [
        (STEADY[:2], 900.0, None),  # without the first step, which waits for workers
        (STEADY, 930.0, 160.0),
        (STEADY, 933.0, 157.0),  # three seconds into the step under way, three fewer are left
        # A time without workers does not move it.
        ((*STEADY, (85, 4000.0)), 4000.0, 150.0),
        (STEADY, 4000.0, 150.0),
        # Steps are made again.
        (((7, 0.0), (8, 10.0), (9, 20.0), (10, 30.0), (8, 40.0)), 40.0, None),
    ],
)
def test_remaining_time(
    make_snapshot: MakeSnapshot,
    seen: tuple[tuple[int, float], ...],
    now: float,
    eta_s: float | None,
) -> None:
    """What is left of 100 steps, after each of (step, instant) was seen."""
    pace = RemainingTime()
    for step, at in seen:
        snapshot = make_snapshot(step=step, elapsed_s=at, max_steps=100, resumed_at=seen[0][0])
        pace.observe(snapshot)
    assert pace.eta_s(replace(snapshot, elapsed_s=now)) == eta_s


"""A resumed run, which made no step before its workers had joined."""


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


def test_step_line_says_it_all(log: Log, make_snapshot: MakeSnapshot) -> None:
    assert log.lines_for(make_snapshot(**QUIET)) == [
        "[1:10] step 7/10  reward 0.700  staleness 0.40 (max 1 of 3)  1.23k tokens/s  2.5 s  | "
        "1 worker (1 lost)  idle 12% recently, 25% in all  refused stale 4"
    ]


def test_a_step_is_told_when_its_row_is_written(log: Log, make_snapshot: MakeSnapshot) -> None:
    log.lines_for(make_snapshot(**QUIET))
    log.at = 10.0
    # The counter has moved, the row of the step has not been written.
    assert log.lines_for(make_snapshot(step=8, **QUIET)) == []
    row = row_of(make_snapshot, step=8, reward=0.25, mean_staleness=2.0)
    [line] = log.lines_for(make_snapshot(step=8, last_step=row, **QUIET))
    assert "step 8/10  reward 0.250  staleness 2.00" in line
    assert log.lines_for(make_snapshot(step=8, last_step=row, **QUIET)) == []


def row_of(make_snapshot: MakeSnapshot, **changes: Any) -> StepView:
    """Return the row of a step."""
    row = make_snapshot().last_step
    assert row is not None
    return replace(row, **changes)


def at_step(make_snapshot: MakeSnapshot, step: int, **changes: Any) -> Snapshot:
    """Return a snapshot at a step whose row was written."""
    return make_snapshot(step=step, last_step=row_of(make_snapshot, step=step), **changes)


def test_a_step_is_told_once_and_fast_steps_are_skipped_but_the_last(
    log: Log, make_snapshot: MakeSnapshot
) -> None:
    told = []
    for tick in range(1000):  # 100 s, two steps a second, ten snapshots a second
        log.at = tick / 10
        told += log.lines_for(at_step(make_snapshot, tick // 5, max_steps=200, **QUIET))
    assert len(told) == len(set(told)) == 20
    [last] = log.lines_for(at_step(make_snapshot, 200, max_steps=200, **QUIET))
    assert "step 200/200" in last
    assert log.lines_for(at_step(make_snapshot, 200, max_steps=200, **QUIET)) == []


def test_what_was_evaluated_before_a_resume_is_no_news(
    log: Log, make_snapshot: MakeSnapshot
) -> None:
    quiet = {"notices": (), "resumed_at": 5, "step": 5, "last_step": None}
    assert not any("eval" in line for line in log.lines_for(make_snapshot(**quiet)))
    again = make_snapshot(**quiet, eval_history=((0, 0.36, 0.30), (5, 0.62, 0.71)))
    [line] = log.lines_for(again)
    assert "eval at step 5: held-out pass rate 0.620 sampled" in line
    assert log.lines_for(again) == []
    # Where rewards are not 0 or 1 their mean is no pass rate.
    scores = make_snapshot(**quiet, eval_history=((6, 1.2, 0.9),), evals_are_rates=False)
    [line] = log.lines_for(scores)
    assert "eval at step 6: held-out reward 1.200 sampled" in line


def test_waits_are_told_less_and_less_often(log: Log, make_snapshot: MakeSnapshot) -> None:
    told = []
    for second in range(200):
        log.at = float(second)
        lines = log.lines_for(make_snapshot(waiting_for="12 groups; 9 on w3", **QUIET))
        told += [(second, line) for line in lines]
    assert [second for second, _ in told] == [0, 10, 30, 70, 150]
    assert "no step for 0:10, the learner waits for 12 groups; 9 on w3" in told[1][1]


def test_evaluations_and_notices_are_told_once(log: Log, make_snapshot: MakeSnapshot) -> None:
    first = log.lines_for(make_snapshot(notices=("a", "b")))
    assert [line.split("] ")[1] for line in first[:2]] == ["a", "b"]
    assert "eval at step 5: held-out pass rate 0.610 sampled, 0.720 greedy" in first[3]
    assert log.lines_for(make_snapshot(notices=("b", "c"))) == ["[1:10] c"]
    assert log.lines_for(make_snapshot(notices=("b", "c"))) == []
    flood = tuple(f"notice {i}" for i in range(50))
    lines = log.lines_for(make_snapshot(notices=flood))
    assert lines[0] == "[1:10] (45 earlier notices not shown)"
    assert lines[-1] == "[1:10] notice 49"
    assert len(lines) == 6


def test_finish_tells_the_step_reached(log: Log, make_snapshot: MakeSnapshot) -> None:
    log.paint(at_step(make_snapshot, 5, **QUIET))
    log.finish(at_step(make_snapshot, 6, **QUIET))
    log.finish(at_step(make_snapshot, 6, **QUIET))
    assert [line.split()[2] for line in log.file.getvalue().splitlines()] == ["5/10", "6/10"]


# --- status of a worker ---------------------------------------------------------------------------


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
            status.tell(view(0), now=float(second))
    text = "v3  0 tokens/s  7 groups delivered  sampling"
    said = stream.text() if is_terminal else stream.getvalue()
    assert (said.count(text), caplog.text.count(text)) == ((121, 0) if is_terminal else (0, 2))
