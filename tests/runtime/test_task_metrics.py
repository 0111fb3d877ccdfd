from __future__ import annotations

import pytest

from echo.runtime.learner.report import TaskMetrics


def test_totals_become_differences_over_all_workers() -> None:
    metrics = TaskMetrics()
    first = {
        "w1": {"env/calls": 10, "env/milliseconds": 500, "refused/stale": 3},
        "w2": {"env/calls": 10, "env/milliseconds": 1500, "env/errors": 2, "env/retries": 1},
    }
    assert metrics.row(first) == pytest.approx(
        {"env/calls": 20, "env/errors": 2, "env/retries": 1, "env/latency": 0.1}
    )
    second = {"w1": {"env/calls": 14, "env/milliseconds": 540}, "w2": first["w2"]}
    assert metrics.row(second) == pytest.approx(
        {"env/calls": 4, "env/errors": 0, "env/retries": 0, "env/latency": 0.01}
    )


def test_a_worker_that_leaves_or_starts_anew_takes_nothing_back() -> None:
    metrics = TaskMetrics()
    metrics.row({"w1": {"env/calls": 10}, "w2": {"env/calls": 7}})
    assert metrics.row({"w1": {"env/calls": 3}})["env/calls"] == 3
    assert metrics.row({"w1": {"env/calls": 3}, "w2": {"env/calls": 8}})["env/calls"] == 1


def test_without_a_task_that_is_called_there_is_no_row() -> None:
    assert TaskMetrics().row({"w1": {"refused/stale": 3}}) == {}


def test_what_rarely_happens_is_shown_from_its_first_time_on() -> None:
    metrics = TaskMetrics()
    assert metrics.row({"w1": {"engine/out_of_memory": 0}}) == {}
    assert metrics.row({"w1": {"engine/out_of_memory": 2}}) == {"engine/out_of_memory": 2}
    second = {"w1": {"engine/out_of_memory": 2, "env/turn_limit": 5}}
    assert metrics.row(second) == {"engine/out_of_memory": 0, "env/turn_limit": 5}
