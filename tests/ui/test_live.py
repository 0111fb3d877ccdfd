from __future__ import annotations

import io
import re
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment

from echo.core.metrics import NodeView
from echo.ui import live
from echo.ui.live import LiveView, _newest_whole, render_live


def lines_of(view: object, width: int, encoding: str = "utf-8") -> list[str]:
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    console = Console(file=buffer, width=width, color_system=None)
    console.print(view)
    buffer.flush()
    return buffer.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]


class Terminal(io.TextIOWrapper):
    """A terminal in memory."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def terminal_console(terminal: Terminal, width: int = 80, height: int = 24) -> Console:
    return Console(
        file=terminal,
        width=width,
        height=height,
        force_terminal=True,
        _environ={"TERM": "xterm"},
    )


def test_everything_worth_knowing_is_on_the_screen(make_snapshot) -> None:
    snapshot = make_snapshot(waiting_for="5 groups; 5 on w2")
    text = "\n".join(lines_of(render_live(snapshot, 100, height=30, eta_s=30.0), 100))
    for expected in (
        "echo quickstart",
        "step 7/10   1:10 elapsed   ETA 0:30",
        "reward 0.7",
        "● 0.61 sampled ◆ 0.72 greedy at step 5",
        "staleness mean 0.50",
        "60.0%",
        "0.0% ◂ S",
        "3 of 8 buffered   5 leased   1.23k tokens/s",
        "v7 ━━",
        " 50%   3 MiB sent   a version per step",
        "idle 12% (run 25%)   waits for 5 groups; 5 on w2",
        "refused  stale 4",
        "w10 lost: silent for 10 s",
    ):
        assert expected in text
    assert "duplicate" not in text


def test_a_terminal_of_80_by_24_shows_every_part(make_snapshot) -> None:
    rows = lines_of(render_live(make_snapshot(), 80, height=24), 80)
    assert len(rows) <= 24
    starts = {row.split(" ", 1)[0] for row in rows}
    assert {"echo", "reward", "groups", "weights", "learner", "node", "refused", "·"} <= starts


def test_names_from_the_network_cannot_steer_the_terminal(make_snapshot) -> None:
    evil = NodeView(node_id="w\x1b[2J", role="worker", state="gen\x1b]0;x\x07", parent="[bold]")
    snapshot = make_snapshot(nodes=(evil,), notices=("\x1b[31mred",), waiting_for="\x1bc")
    text = "\n".join(lines_of(render_live(snapshot, 120), 120))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]" in text


@pytest.mark.parametrize(("width", "height"), [(60, 30), (80, 24), (120, 40)])
def test_a_command_in_a_notice_is_shown_whole(make_snapshot, width: int, height: int) -> None:
    command = "ECHO_JOIN=THAT_LINE bin/echo-node --role worker"
    path = f"/home/somebody/echo/runs/two-machines{'-with-a-long-name' * 3}/keys/join"
    notice = f"12:00:01 others join with the line in {path}: {command}"
    snapshot = make_snapshot(notices=("an older one " * 20, notice))
    rows = lines_of(render_live(snapshot, width, height=height), width)
    assert len(rows) <= height
    shown = "".join(row.rstrip() for row in rows).replace(" ", "")
    assert f"·{notice}".replace(" ", "") in shown
    # What is longer than a row is folded without an indent: joined again, it is what it was.
    assert "…" not in "".join(rows[-4:])


def test_older_notices_are_left_out_as_a_whole(make_snapshot) -> None:
    told = live.notices(["old " * 30, "new " * 30], 60)
    assert [len(rows) for rows in told] == [3, 3]
    for num_rows, expected in [(6, 6), (5, 3), (3, 3), (2, 2), (0, 0)]:
        shown = _newest_whole(told, num_rows)
        assert len(shown) == expected
        assert all("new" in row.plain for row in shown[-3:])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    width=st.integers(1, 220),
    height=st.integers(0, 70),
    num_nodes=st.integers(0, 40),
    step=st.integers(0, 12),
    max_staleness=st.integers(0, 70),
    rewards=st.lists(st.floats(), max_size=12),
    name=st.text(max_size=30),
)
def test_any_size_and_content_can_be_drawn(
    make_snapshot, width, height, num_nodes, step, max_staleness, rewards, name
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


def test_first_snapshot_of_a_run_can_be_drawn(make_snapshot) -> None:
    snapshot = make_snapshot(
        step=0, max_steps=0, nodes=(), reward_history=(), eval_history=(), staleness_tokens={}
    )
    assert "reward -" in "\n".join(lines_of(render_live(snapshot, 60), 60))


def test_live_view_draws_and_gives_the_terminal_back(make_snapshot) -> None:
    terminal = Terminal()
    with LiveView(terminal_console(terminal), refresh_per_s=1000) as view:
        view.update(make_snapshot())
    text = terminal.text()
    assert view.failure is None
    # The last frame stays behind on the normal screen.
    assert "quickstart" in text.rpartition("\x1b[?1049l")[2]
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l")
    view.close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_live_view_falls_back_to_ascii(make_snapshot, encoding: str) -> None:
    terminal = Terminal(encoding)
    with LiveView(terminal_console(terminal), refresh_per_s=1000) as view:
        view.update(make_snapshot(run_name="naïve ✓"))
    assert view.failure is None
    assert "na?ve ?" in terminal.text()
    assert re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", terminal.text()).isascii()


def test_live_view_outlives_a_terminal_that_goes_away(make_snapshot, caplog) -> None:
    terminal = Terminal()
    console = terminal_console(terminal)
    terminal.close()
    with LiveView(console, refresh_per_s=1000) as view:
        view.update(make_snapshot())
    assert view.failure is not None
    assert "The live view stopped, the run goes on" in caplog.text
    view.update(make_snapshot())


class Pipe(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def fileno(self) -> int:
        raise OSError("not a descriptor")


def test_live_view_outlives_a_broken_pipe(make_snapshot) -> None:
    with LiveView(Console(file=Pipe()), refresh_per_s=1000) as view:
        view.update(make_snapshot())
    assert view.failure is not None


def test_update_never_waits_for_a_paused_terminal(make_snapshot) -> None:
    resumed, is_writing = threading.Event(), threading.Event()

    class Paused(Terminal):
        def write(self, text: str) -> int:
            is_writing.set()
            resumed.wait(120)
            return super().write(text)

    view = LiveView(terminal_console(Paused()), refresh_per_s=1000)
    view.update(make_snapshot())
    assert is_writing.wait(120)
    # The drawing thread is stuck now; were these drawn by the caller, they would be stuck as well.
    for step in range(100):
        view.update(make_snapshot(step=step))
    resumed.set()
    view.close()
    assert view.failure is None


def test_mode_decides_between_screen_and_lines(make_snapshot) -> None:
    terminal, file = Terminal(), io.StringIO()
    with LiveView(terminal_console(terminal), refresh_per_s=1000, mode="off") as view:
        view.update(make_snapshot())
    assert "\x1b[?1049h" not in terminal.text()
    assert "step 7/10" in terminal.text()
    with LiveView(Console(file=file), refresh_per_s=1000) as view:
        view.update(make_snapshot())
    assert "step 7/10" in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_refresh_rate_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="refresh_per_s is 0, must be above 0"):
        LiveView(Console(file=io.StringIO()), 0)
