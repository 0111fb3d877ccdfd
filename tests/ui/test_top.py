"""Tests of the screen of `echo-rl top`: what keys choose, ask and confirm."""

from __future__ import annotations

import io

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment

from echo.core.monitoring.status import NodeStatus
from echo.ui.top import TopScreen
from echo.wire.messages import Operation
from tests.ui.conftest import MakeStatus
from tests.ui.test_screen import lines_of


@pytest.fixture
def screen(make_status: MakeStatus) -> TopScreen:
    screen = TopScreen(by="ann@desk")
    screen.show(make_status(), may_operate=True)
    return screen


def text_of(screen: TopScreen, width: int = 100, height: int = 24) -> str:
    return "\n".join(lines_of(screen.render(width, height), width))


def order(screen: TopScreen) -> list[str]:
    return [node.node_id for node in screen.nodes()]


def test_keys_sort_reverse_and_filter(screen: TopScreen) -> None:
    assert order(screen) == ["learner", "r1", "w2", "w10"]
    screen.press("S")
    assert order(screen) == ["w10", "w2", "r1", "learner"]
    screen.press("Ssss")  # name, state, lag, tok/s
    assert order(screen)[0] == "w2"
    assert "1-4 of 4 by tok/s" in text_of(screen)
    screen.press("/W")
    assert "filter: W_" in text_of(screen)
    screen.press("q\x7f2\r")
    assert order(screen) == ["w2"]
    assert not screen.is_over, "it was a letter of the filter"
    assert "filter 'W2'" in text_of(screen)
    screen.press("\x1b")
    assert len(order(screen)) == 4
    screen.press("/zz\r")
    assert "none by tok/s, filter 'zz'" in text_of(screen)
    screen.press("\x1b[B")  # there is nothing to select
    screen.press("/\x1bq")
    assert screen.is_over


@pytest.mark.parametrize(
    ("keys", "question", "operation"),
    [
        ("p", "pause the run?", Operation(number=1, act="pause", by="ann@desk")),
        ("jjjd", "drain w2? it finishes its 5 leases and leaves",
         Operation(number=1, act="drain", subject="w2", by="ann@desk")),
        ("\x1b[Fb", "put w10 on standby", Operation(number=1, act="standby", subject="w10",
                                                  by="ann@desk")),
        ("-", "staleness bound of new leases: 3 -> 2?",
         Operation(number=1, act="set", subject="sync.max_staleness", value="2", by="ann@desk")),
    ],
)  # fmt: skip
def test_each_act_is_confirmed_first(
    screen: TopScreen, keys: str, question: str, operation: Operation
) -> None:
    assert screen.press(keys) == []
    assert question in text_of(screen)
    assert screen.press("n") == []
    assert "not done" in text_of(screen)
    assert screen.press(keys[-1] + "y") == [operation]
    assert "asked the learner" in text_of(screen)
    screen.say("as asked")
    assert "as asked" in text_of(screen)


def test_what_was_chosen_is_taken_back_with_the_same_key(
    screen: TopScreen, make_status: MakeStatus
) -> None:
    held = NodeStatus(node_id="w1", role="worker", state="standby", hold="standby")
    screen.show(make_status(state="paused", nodes=(held,)), may_operate=True)
    assert screen.press("py") == [Operation(number=1, act="resume", by="ann@desk")]
    [operation] = screen.press("jby")
    assert (operation.act, operation.subject) == ("resume", "w1")
    assert "echo quickstart paused" in text_of(screen)


def test_acts_that_are_not_possible_say_why(screen: TopScreen, make_status: MakeStatus) -> None:
    for keys, why in (
        ("d", "select a worker or relay first"),
        ("\x1b[Hd", "select a worker or relay first"),  # the learner
        ("+", "the bound is from 0 to 3"),
    ):
        screen.press(keys)
        assert why in text_of(screen)
        assert screen.press("y") == []
    screen.show(make_status(), may_operate=False)
    screen.press("p")
    assert "this key only reads" in text_of(screen)
    assert screen.press("y") == []
    empty = TopScreen(by="x")
    assert empty.press("pjd") == []
    assert "waiting for the learner" in text_of(empty)


def test_the_selected_node_stays_in_view_among_many(make_status: MakeStatus) -> None:
    nodes = [NodeStatus(node_id=f"w{i}", role="worker", state="generating") for i in range(200)]
    screen = TopScreen(by="x")
    screen.show(make_status(nodes=tuple(nodes)), may_operate=True)
    assert "w0 " in text_of(screen)
    screen.press("j" + "\x1b[6~" * 7)
    assert "w70 " in text_of(screen)
    assert "w0 " not in text_of(screen)
    screen.press("\x1b[F")
    assert "of 200 by name" in text_of(screen)
    assert "w199 " in text_of(screen)
    screen.press("\x1b[5~")
    assert "w189 " in text_of(screen)


def test_without_the_graph_its_figures_stay(screen: TopScreen) -> None:
    for height in (24, 50):
        for _ in range(2):
            text = text_of(screen, 80, height)
            assert all(part in text for part in ("reward 0.7", "0.61", "bound 3", "w10"))
            screen.press("g")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.text(st.sampled_from("sS/gpdb+-jkyn q\r\x1b\x7f[AB"), max_size=30),
    width=st.integers(1, 120),
    height=st.integers(1, 50),
)
@pytest.mark.slow
def test_any_keys_at_any_size_can_be_drawn(
    make_status: MakeStatus, keys: str, width: int, height: int
) -> None:
    screen = TopScreen(by="x")
    screen.show(make_status(), may_operate=True)
    screen.press(keys)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    rows = console.render_lines(screen.render(width, height), pad=False)
    assert len(rows) <= height
    assert all(Segment.get_line_length(row) <= width for row in rows)
