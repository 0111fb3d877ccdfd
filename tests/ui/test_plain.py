from __future__ import annotations

import io

import pytest
from rich.console import Console

from echo.ui.live import PlainLog
from tests.ui.test_sections import COST


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> PlainLog:
    return PlainLog(Console(file=io.StringIO()), interval_s=5.0, now=clock)


QUIET = {"notices": (), "eval_history": ()}


def test_step_line_says_it_all(log: PlainLog, make_snapshot) -> None:
    assert log.lines_for(make_snapshot(**QUIET)) == [
        "[1:10] step 7/10  reward 0.700  staleness 0.50 (max 2 of 3)  1 worker (1 lost)  "
        "1.23k tokens/s  idle 12% (run 25%)  refused stale 4"
    ]


def test_a_step_says_what_it_costs_where_there_are_prices(log: PlainLog, make_snapshot) -> None:
    [line] = log.lines_for(make_snapshot(**QUIET, cost=COST))
    assert "$16.20/h ($3.46 so far, 2 on standby)" in line


def test_a_step_is_told_once_and_fast_steps_are_skipped(
    log: PlainLog, clock: Clock, make_snapshot
) -> None:
    told = []
    for tick in range(1000):  # 100 s, two steps a second, ten snapshots a second
        clock.now = tick / 10
        told += log.lines_for(make_snapshot(step=tick // 5, max_steps=1000, **QUIET))
    assert len(told) == 20
    assert len(set(told)) == 20


def test_what_was_evaluated_before_a_resume_is_no_news(log: PlainLog, make_snapshot) -> None:
    quiet = {"notices": (), "resumed_at": 5, "step": 5}
    assert not any("eval" in line for line in log.lines_for(make_snapshot(**quiet)))
    again = ((0, 0.36, 0.30), (5, 0.62, 0.71))
    [line] = log.lines_for(make_snapshot(**quiet, eval_history=again))
    assert "eval at step 5: held-out pass rate 0.620 sampled" in line
    assert log.lines_for(make_snapshot(**quiet, eval_history=again)) == []


def test_the_last_step_is_always_told(log: PlainLog, clock: Clock, make_snapshot) -> None:
    assert len(log.lines_for(make_snapshot(step=9, **QUIET))) == 1
    clock.now = 0.1
    assert "step 10/10" in log.lines_for(make_snapshot(step=10, **QUIET))[0]
    assert log.lines_for(make_snapshot(step=10, **QUIET)) == []


def test_waits_are_told_less_and_less_often(log: PlainLog, clock: Clock, make_snapshot) -> None:
    told = []
    for second in range(200):
        clock.now = float(second)
        lines = log.lines_for(make_snapshot(waiting_for="12 groups; 9 on w3", **QUIET))
        told += [(second, line) for line in lines]
    assert [second for second, _ in told] == [0, 10, 30, 70, 150]
    assert "no step for 0:10, the learner waits for 12 groups; 9 on w3" in told[1][1]


def test_evaluations_and_notices_are_told_once(log: PlainLog, make_snapshot) -> None:
    first = log.lines_for(make_snapshot(notices=("a", "b")))
    assert [line.split("] ")[1] for line in first[:2]] == ["a", "b"]
    assert "eval at step 5: held-out pass rate 0.610 sampled, 0.720 greedy" in first[3]
    assert log.lines_for(make_snapshot(notices=("b", "c"))) == ["[1:10] c"]
    assert log.lines_for(make_snapshot(notices=("b", "c"))) == []


def test_rewards_that_failed_are_told_beside_the_evaluation(log: PlainLog, make_snapshot) -> None:
    lines = log.lines_for(make_snapshot(eval_errors={5: 12}))
    assert any(line.endswith("0.720 greedy; 12 rewards failed and count as 0") for line in lines)


def test_a_flood_of_notices_is_cut(log: PlainLog, make_snapshot) -> None:
    log.lines_for(make_snapshot(**QUIET))
    flood = tuple(f"notice {i}" for i in range(50))
    lines = log.lines_for(make_snapshot(notices=flood, eval_history=()))
    assert lines[0] == "[1:10] (45 earlier notices not shown)"
    assert lines[-1] == "[1:10] notice 49"
    assert len(lines) == 6


def test_finish_tells_the_step_reached(clock: Clock, make_snapshot) -> None:
    file = io.StringIO()
    log = PlainLog(Console(file=file, width=40), now=clock)
    log.paint(make_snapshot(step=5, **QUIET))
    log.finish(make_snapshot(step=6, **QUIET))
    log.finish(make_snapshot(step=6, **QUIET))
    lines = file.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["5/10", "6/10"]
