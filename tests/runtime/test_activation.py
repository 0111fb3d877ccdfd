"""A learner that puts on standby whom it can do without, says so, and counts what it costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo.core.metrics import Snapshot
from echo.records.ledger import read_records
from echo.runtime.learner.cost import spent_before
from echo.runtime.learner.node import LearnerNode
from tests.records.rows import write_ledger
from tests.runtime.harness import Play, Run, ends, running


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110, the condition is a file's
        await asyncio.sleep(0.02)


async def slow_learner(run: Run, **sections: Any) -> LearnerNode:
    """Return a learner whose steps take a third of a second, which one worker can keep up with.

    It decides within the seconds of a test.
    """
    learner = await run.learner(
        run={"max_steps": 100_000},
        sync={"max_staleness": 6},
        eval={"interval_steps": 100_000},
        checkpoint={"interval_steps": 100_000},
        **sections,
    )
    activation = learner._costs._activation
    activation.settings = replace(activation.settings, review_s=0.1, min_dwell_s=0.0)
    train = learner._train_on

    def slowly(groups: Any) -> Any:
        time.sleep(0.3)
        return train(groups)

    learner._train_on = slowly
    return learner


def with_two_on_standby(run: Run) -> tuple[dict[str, Any], Snapshot] | None:
    """The first row of metrics and the first picture that show two workers on standby."""
    rows = (row for _, row in run.rows if row.get("workers/standby") == 2)
    pictures = (s for s in run.snapshots if s.cost is not None and s.cost.num_standby == 2)
    row, picture = next(rows, None), next(pictures, None)
    return None if row is None or picture is None else (row, picture)


def test_workers_that_are_not_needed_stand_by_and_the_costs_are_told(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await slow_learner(run, learner={"price_per_h": 2.0})
        prices = {"w1": 0.2, "w2": 5.0, "w3": 9.0}
        workers = {
            name: await run.worker(name, worker={"price_per_h": price})
            for name, price in prices.items()
        }
        async with running(learner, *workers.values()):
            for name in ("w2", "w3"):
                await until(lambda name=name: workers[name].session.standby_since is not None)
            await until(lambda: with_two_on_standby(run))
            row, snapshot = with_two_on_standby(run)
        first, *later = run.ledger("activation")
        # Which of the two comes first hangs on whose rate is known first.
        assert {name for row in (first, *later) for name in row["deactivated"]} == {"w2", "w3"}
        before, after = first["numbers"]["before"], first["numbers"]["after"]
        assert after["cost_per_h"] < before["cost_per_h"]
        assert after["rate"] > after["required"] > 0
        # They bill on, on standby or not.
        assert row["cost/per_hour"] == pytest.approx(16.2, abs=0.01)
        assert row["cost/standby_per_hour"] == pytest.approx(14.0)
        assert row["workers/active"] == 1
        assert 0 < row["cost/per_step"] < row["cost/total"]
        assert row["cost/per_million_tokens"] > 0
        view = snapshot.cost
        assert view.per_h == pytest.approx(16.2, abs=0.01)
        assert "put on standby w" in view.decision
        states = {node.node_id: node.state for node in snapshot.nodes}
        assert "standby" in states["w3"]

    play(scenario)


@pytest.mark.slow
def test_at_the_budget_of_the_run_it_ends_with_a_checkpoint_and_goes_on_with_more(
    play: Play,
) -> None:
    async def scenario(run: Run) -> None:
        budget = {"budget_per_run": 1000.0}
        learner = await slow_learner(run, activation=budget, learner={"price_per_h": 1800.0})
        worker = await run.worker("w1")
        async with running(learner, worker) as (learning, working):
            assert await learner.wait_until(lambda: learner.session.step >= 2, within_s=60)
            learner._costs._meter.total += 1000.0
            assert await learning == "finished"
            assert await working == "the run is finished"
        steps = run.ledger("trained")[-1]["step"]
        assert steps < 100_000
        assert run.ledger("checkpoint")[-1]["step"] == steps
        assert (run.run_dir / "final").is_dir()
        assert all(len(found) == 1 for found in ends(run.ledger()).values())
        spent = run.ledger("cost")[-1]["total"]
        assert spent > 1000.0
        again = await run.learner(
            resume=True,
            run={"max_steps": steps + 1},
            sync={"max_staleness": 6},
            eval={"interval_steps": 100_000},
            activation={"budget_per_run": 9000.0},
        )
        async with running(again, await run.worker("w2")) as (learning, _):
            assert await learning == "finished"
        assert run.ledger("trained")[-1]["step"] == steps + 1
        assert run.ledger("cost")[-1]["total"] > spent

    play(scenario)


def test_a_run_that_waits_for_groups_ends_at_its_budget_too(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            activation={"budget_per_run": 0.3}, learner={"price_per_h": 1800.0}
        )
        async with running(learner) as (learning,):
            assert await learning == "finished"

    play(scenario)


def test_what_was_spent_before_a_resume_is_read_from_the_ledger(tmp_path: Path) -> None:
    write_ledger(tmp_path, [])
    assert spent_before(read_records(tmp_path), now=1.0) == 0.0
    write_ledger(
        tmp_path,
        [
            {"kind": "cost", "step": 1, "total": 1.0, "per_h": 3.6, "at": 500.0},
            {"kind": "cost", "step": 2, "total": 2.0, "per_h": 3.6, "at": 1000.0},
            {"kind": "published", "version": [1, 2], "root": ""},
        ],
    )
    # Machines billed on while the learner was away, for an hour at most as far as is known.
    assert spent_before(read_records(tmp_path), now=1100.0) == pytest.approx(2.1)
    assert spent_before(read_records(tmp_path), now=9000.0) == pytest.approx(5.6)
