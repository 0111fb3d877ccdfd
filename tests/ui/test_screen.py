from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.segment import Segment
from rich.text import Text

from echo.core.monitoring.status import (
    CostStatus,
    LinkStatus,
    NodeStatus,
    SpeedStatus,
    VersionStatus,
)
from echo.ui import screen
from echo.ui.screen import render_live
from tests.ui.conftest import MakeStatus


def lines_of(view: object, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(view)
    return file.getvalue().splitlines()


def plain(row: object) -> str:
    """The text of a row, without its colours."""
    assert isinstance(row, Text)
    return row.plain


def test_everything_worth_knowing_is_on_the_screen(make_status: MakeStatus) -> None:
    snapshot = make_status(waiting_for="5 groups; 5 on w2", eta_s=30.0)
    text = "\n".join(lines_of(render_live(snapshot, 100, height=30), 100))
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
    rows = lines_of(render_live(make_status(), 80, height=24), 80)
    assert len(rows) <= 24
    starts = {row.split(" ", 1)[0] for row in rows}
    assert {"echo", "reward", "groups", "weights", "learner", "node", "refused", "·"} <= starts


def test_a_stall_is_explained_beside_the_activity(make_status: MakeStatus) -> None:
    status = make_status(activity="training", explanation="workers have no groups 85%\x1bc")
    text = "\n".join(lines_of(render_live(status, 200, height=30), 200))
    assert "training; advice from the last steps: workers have no groups 85%" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_the_learner_of_a_run_that_has_ended_does_not_train(
    make_status: MakeStatus, state: str
) -> None:
    text = "\n".join(lines_of(render_live(make_status(state=state, nodes=()), 100), 100))
    assert f"25% in all   {state}" in text
    assert "training" not in text


def test_names_from_the_network_cannot_steer_the_terminal(make_status: MakeStatus) -> None:
    evil = NodeStatus(node_id="w\x1b[2J", role="worker", state="gen\x1b]0;x\x07", parent="[bold]")
    snapshot = make_status(nodes=(evil,), notices=("\x1b[31mred",), waiting_for="\x1bc")
    text = "\n".join(lines_of(render_live(snapshot, 120), 120))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]" in text


@pytest.mark.parametrize(("width", "height"), [(60, 30), (80, 24), (120, 40)])
def test_a_command_in_a_notice_is_shown_whole(
    make_status: MakeStatus, width: int, height: int
) -> None:
    command = "ECHO_JOIN=THAT_LINE bin/echo-rl node --role worker"
    path = f"/home/somebody/echo/runs/two-machines{'-with-a-long-name' * 3}/keys/join"
    notice = f"12:00:01 others join with the line in {path}: {command}"
    snapshot = make_status(notices=("an older one " * 20, notice))
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
@example(width=56, height=7, num_nodes=0, step=0, max_staleness=0, rewards=[], name="")
@pytest.mark.slow
def test_any_size_and_content_can_be_drawn(
    make_status: MakeStatus,
    width: int,
    height: int,
    num_nodes: int,
    step: int,
    max_staleness: int,
    rewards: list[float],
    name: str,
) -> None:
    nodes = [NodeStatus(node_id=name + str(i), role="worker", state=name) for i in range(num_nodes)]
    snapshot = make_status(
        run_name=name,
        step=step,
        nodes=tuple(nodes),
        max_staleness=max_staleness,
        reward_history=tuple(enumerate(rewards, 1)),
        waiting_for=name,
        notices=(name,) * 8,
    )
    view = render_live(snapshot, width, height=height)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    rows = console.render_lines(view, pad=False)
    assert len(rows) <= height
    assert all(Segment.get_line_length(row) <= width for row in rows)


def test_staleness_bins_mark_the_bound_and_keep_every_token() -> None:
    bins = [("0", 5, False), ("1", 3, False), ("2", 0, False), ("3", 0, True)]
    assert screen.staleness_bins({0: 5, 1: 3}, 3, 8) == bins
    grouped = screen.staleness_bins(dict.fromkeys(range(12), 1), 11, 4)
    assert grouped == [("0-2", 3, False), ("3-5", 3, False), ("6-8", 3, False), ("9-11", 3, True)]
    assert screen.staleness_bins({1: 4, 5: 1}, 1, 8)[-1] == (">1", 1, False), "a bin of their own"


def test_a_bound_that_was_lowered_is_marked_where_it_is_now(make_status: MakeStatus) -> None:
    snapshot = make_status(staleness_bound=1, staleness_tokens={0: 5, 1: 3, 2: 2})
    lines = lines_of(Group(*screen.staleness_histogram(snapshot, 50, 6)), 50)
    title, *bars = map(str.rstrip, lines)
    assert title == "staleness mean 0.70, bound now 1"
    assert [bar.split()[0] for bar in bars] == ["0", "1", "2", "3"]
    assert [bar.endswith("◂ bound") for bar in bars] == [False, True, False, False]


def test_node_table_shows_every_column_where_there_is_room(make_status: MakeStatus) -> None:
    rows = [row.plain for row in screen.node_table(make_status().nodes, 100, 9)]
    assert rows[0].split() == [
        "node", "role", "version", "stale", "tok/s", "down/s", "up/s", "leases", "state", "parent",
        "seen",
    ]  # fmt: skip
    assert rows[3].split() == [
        "w2", "worker", "v6", "1", "1.23k", "2", "KiB", "-", "5", "generating", "r1", "0:00",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows[1:]] == ["learner", "r1", "w2", "w10"]


def test_a_rate_below_one_byte_per_second_is_no_rate(make_status: MakeStatus) -> None:
    nodes = [replace(node, bytes_per_s=0.3) for node in make_status().nodes if node.node_id == "w2"]
    assert screen.node_table(nodes, 100, 9)[1].plain.split()[5] == "-"


def test_node_table_keeps_nodes_in_trouble_and_sums_up_the_rest() -> None:
    nodes = [NodeStatus(node_id=f"w{i}", role="worker", state="generating") for i in range(30)]
    nodes[20] = NodeStatus(node_id="w20", role="worker", state="lost")
    rows = [row.plain.strip() for row in screen.node_table(nodes, 100, 5)]
    assert len(rows) == 5
    assert [row.split()[0] for row in rows[1:4]] == ["w0", "w1", "w20"]
    assert rows[4] == "and 27 more: 27 generating"


def test_a_terminal_of_80_columns_cuts_no_figure_and_marks_what_it_cuts(
    make_status: MakeStatus,
) -> None:
    status = make_status()
    assert status.last_step is not None
    cost = CostStatus(
        per_h=0.76,
        total=0.29,
        per_million_tokens=101.0,
        standby_per_h=0.0,
        unconfirmed_per_h=0.0,
        budget_per_run=None,
        num_active=1,
        num_standby=1,
        decision="the active workers are too many for the links: 1 of 2 workers active; publish "
        "less often",
    )
    nodes = [
        NodeStatus(
            node_id=f"relay-of-region-{number}",
            role="relay",
            state=state,
            version="v23/L2",
            mismatch_kl=0.0085,
            reward=0.15,
            bytes_per_s=1e6,
        )
        for number, state in enumerate(["waiting for leases", "waiting for newer weights"])
    ]
    last_step = replace(status.last_step, useful_share=0.33)
    status = make_status(cost=cost, nodes=tuple(nodes), last_step=last_step)
    shown = screen.status(status, 80, num_wait_rows=1)
    groups, decision = plain(shown[0]), plain(shown[-1])
    assert groups.rstrip().endswith("5 leased   1.23k tokens/s   33% useful")
    assert decision.endswith("1 of 2 workers active; …")
    heading, *rows = map(plain, screen.node_rows(nodes, 80))
    assert rows[0].startswith("relay-of-reg… relay")
    assert rows[0].rstrip().endswith("waiting for leases")
    assert rows[1].rstrip().endswith("waiting for newer weights")
    assert {len(row) for row in (groups, decision, heading, *rows)} == {80}


def test_long_waits_wrap_and_end_visibly_cut(make_status: MakeStatus) -> None:
    snapshot = make_status(waiting_for="12 groups; " + "9 on w3, which waits for v17 " * 9)
    rows = screen.status(snapshot, 60, num_wait_rows=2)
    assert len(rows) == 4
    assert plain(rows[2]).startswith("learner  idle 12% recently, 25% in all   waits for 12")
    assert plain(rows[3]).rstrip().endswith("...")


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [(90, "slowest r1>w2 2 MiB/s, 0:41 left", "per step"), (70, "slowest r1>w2 2 MiB/s", "left")],
)
def test_the_slowest_link_of_a_version_is_named(
    make_status: MakeStatus, width: int, shown: str, hidden: str
) -> None:
    slowest = LinkStatus(parent="r1", child="w2", bytes_per_s=2 * 2**20, remaining_s=41.0)
    version = VersionStatus(version="v7", done=0.5, num_nodes=3, num_complete=1, slowest=slowest)
    rows = screen.status(make_status(versions=(version,)), width, num_wait_rows=1)
    [row] = [row for row in lines_of(Group(*rows), width) if row.startswith("weights")]
    assert shown in row
    assert hidden not in row


def test_costs_and_the_learners_speed_have_rows_of_their_own(make_status: MakeStatus) -> None:
    cost = CostStatus(
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
    speed = SpeedStatus(tokens_per_s=43210.0, mfu=0.403, peak_memory_bytes=61.5 * 2**30, **spent)
    without = screen.status(make_status(), 140, num_wait_rows=1)
    rows = screen.status(make_status(cost=cost, speed=speed), 140, num_wait_rows=1)
    assert len(rows) == len(without) + 3
    assert [plain(row).rstrip() for row in (rows[1], *rows[-2:])] == [
        "trainer  43.2k tokens/s   40% MFU   peak 61.5 GiB   1.23s passes, 104ms update",
        "cost     $16.20/h   $3.46 so far of $20.00   $1.25 per million accepted tokens   "
        "1 active, 2 on standby   $14.00/h for machines on standby",
        "         fewer or cheaper workers are enough: 1 of 3 workers active",
    ]
    assert screen.speed_row(replace(speed, mfu=None, peak_memory_bytes=2**20)).plain == (
        "trainer  43.2k tokens/s   peak 1 MiB   1.23s passes, 104ms update"
    )
