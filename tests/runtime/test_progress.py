"""Totals in a run's rows and snapshots, and what the learner says that it waits for."""

from __future__ import annotations

import asyncio

import pytest

from echo.runtime.progress import RATE_WINDOW_S, Progress, describe_wait
from tests.runtime.harness import Play, Run, running
from tests.runtime.test_recovery import make_group


def test_a_row_has_times_rates_and_staleness_of_its_step() -> None:
    progress = Progress(staleness_tokens={0: 100}, now=10.0)
    progress.accepted(make_group(0), now=11.0)
    progress.stepped(waited_s=1.5, trained_s=0.5, staleness={0: 3, 2: 1})
    row = progress.step_metrics({"reward/mean": 0.5}, {0: 3, 2: 1}, bytes_sent=70, now=12.0)
    assert row == {
        "reward/mean": 0.5,
        "time/step": 2.0,
        "time/train": 0.5,
        "time/wait_for_batch": 1.5,
        "learner/idle_ratio": 0.75,
        "perf/tokens_per_s": 2.0,
        "broadcast/bytes": 70,
        "staleness/mean": 0.5,
        "staleness/max": 2,
        "staleness/hist": {"0": 3, "2": 1},
    }
    again = progress.step_metrics({}, {}, bytes_sent=100, now=13.0)
    assert (again["broadcast/bytes"], again["perf/tokens_per_s"]) == (30, 0.0)
    assert "staleness/mean" not in again


def test_only_recent_groups_count_for_the_rate() -> None:
    progress = Progress(staleness_tokens={}, now=0.0)
    for second in range(100):
        progress.accepted(make_group(second), now=float(second))
    assert len(progress._accepted) == RATE_WINDOW_S + 1


def test_nothing_waited_for_is_no_idling() -> None:
    assert Progress(staleness_tokens={}, now=0.0).idle_ratio == 0.0


def test_the_learner_says_whom_it_waits_for(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner()
        async with running(learner):
            await asyncio.sleep(0.05)
            assert describe_wait(learner.session) == "2 groups; no worker has joined yet"
        [snapshot] = run.snapshots[-1:]
        assert snapshot.waiting_for == "2 groups; no worker has joined yet"
        assert (snapshot.step, snapshot.max_steps, snapshot.num_buffered) == (0, 3, 0)
        assert snapshot.broadcast_done == 1.0

    play(scenario)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_snapshot_shows_every_node(play: Play, num_workers: int) -> None:
    async def scenario(run: Run) -> None:
        workers = [await run.worker(f"w{i}") for i in range(num_workers)]
        learner = await run.learner()
        async with running(learner, *workers) as (learning, *_):
            await learning
        seen = {node.node_id for snapshot in run.snapshots for node in snapshot.nodes}
        assert seen == {f"w{i}" for i in range(num_workers)}
        assert sum(run.snapshots[-1].staleness_tokens.values()) > 0
        assert len(run.snapshots[-1].reward_history) == 3

    play(scenario)
