"""Tests of the status of a run: its JSON, and its curves."""

from __future__ import annotations

import math

import pytest

from echo.core.errors import DataError
from echo.core.monitoring.status import (
    MAX_POINTS,
    CostStatus,
    LinkStatus,
    NodeStatus,
    RunStatus,
    SpeedStatus,
    StepStatus,
    VersionStatus,
    finite,
    thinned,
)

STATUS = RunStatus(
    run_name="run",
    at=1.5,
    state="paused",
    elapsed_s=7.0,
    step=3,
    max_steps=9,
    max_staleness=2,
    staleness_bound=1,
    publish_period=1,
    nodes=(NodeStatus(node_id="w1", role="worker", state="generating", rtt_s=0.1),),
    reward_history=((1, 0.5), (2, 0.75)),
    eval_history=((0, 0.1, 0.2),),
    eval_errors={0: 2},
    staleness_tokens={0: 10, 1: 2},
    last_step=StepStatus(
        step=3,
        reward=None,
        mean_staleness=0.5,
        max_staleness=1,
        accepted_tokens_per_s=9.0,
        seconds=1.0,
    ),
    speed=SpeedStatus(
        tokens_per_s=5.0, mfu=None, peak_memory_bytes=1e9, forward_backward_s=1.0, optimizer_s=0.1
    ),
    versions=(
        VersionStatus(
            version="v3",
            done=0.5,
            num_nodes=2,
            num_complete=1,
            slowest=LinkStatus(parent="r1", child="w1", bytes_per_s=2e6, remaining_s=41.0),
        ),
    ),
    refused={"stale": 4},
    cost=CostStatus(
        per_h=1.0,
        total=2.0,
        per_million_tokens=None,
        standby_per_h=0.0,
        unconfirmed_per_h=0.0,
        budget_per_run=None,
        num_active=1,
        num_standby=0,
    ),
    notices=("w1 joined",),
)


def test_a_status_comes_back_from_json_as_it_was() -> None:
    assert RunStatus.from_json(STATUS.to_json(), source="a test") == STATUS
    assert STATUS.bound == 1


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"run_name": 1}', b"[" * 100_000])
def test_other_text_is_no_status(text: bytes) -> None:
    with pytest.raises(DataError, match="a test: no status of a run, or one of another release"):
        RunStatus.from_json(text, source="a test")


def test_a_long_curve_is_thinned_to_means_and_its_last_point() -> None:
    assert thinned([]) == ()
    assert thinned([(1, 0.5), (2, math.nan), (3, 1.0)]) == ((1, 0.5), (3, 1.0))
    curve = thinned([(step, float(step % 2)) for step in range(1, 10_001)])
    assert len(curve) <= MAX_POINTS + 1
    assert curve[0] == (20, 0.5)
    assert curve[-1] == (10_000, 0.0)
    assert curve[-2][0] < 10_000


def test_values_that_json_does_not_have_are_left_out() -> None:
    assert [finite(value) for value in (1.0, None, math.nan, math.inf)] == [1.0, None, None, None]
