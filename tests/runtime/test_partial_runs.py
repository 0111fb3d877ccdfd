"""Unfinished rollouts in whole runs: stopped early, continued later, handed over, recovered."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from echo.roles.worker import EngineCall
from tests.runtime.harness import Play, Run, running

LONG: dict[str, Any] = {
    "sampling": {"max_completion_tokens": 60},
    "sync": {"max_staleness": 3},
    "batch": {"groups_per_step": 2},
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have the engine pause at turn 30 of a call, until the event is set or it is stopped.

    Calls that follow pause at their first turn: what is unfinished then stays so for a while.
    """
    is_over, has_paused, on_tokens = threading.Event(), threading.Event(), EngineCall.on_tokens
    num_turns: Counter[EngineCall] = Counter()

    def wait_first(call: EngineCall, number: int) -> None:
        on_tokens(call, number)
        num_turns[call] += 1
        if num_turns[call] >= 30:
            has_paused.set()
        while has_paused.is_set() and not (is_over.is_set() or call.is_recalled):
            is_over.wait(0.01)

    monkeypatch.setattr(EngineCall, "on_tokens", wait_first)
    return is_over


@pytest.mark.slow
def test_a_run_with_over_submission_keeps_its_promises(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 12}, rollout={"over_submission": 2.0}, **LONG)
        worker = await run.worker("w1", worker={"max_concurrent_rollouts": 8})
        async with running(learner, worker) as (learning, _):
            assert await learning == "finished"
        counts = worker.role.partial_counts
        assert counts["interrupted"] > 0
        assert counts["resumed"] > 0
        assert any(len(record["versions"]) > 1 for record in run.ledger("accepted"))
        run.audit(max_staleness=3)

    play(scenario)


@pytest.mark.slow
def test_a_killed_worker_goes_on_where_its_file_says(play: Play, slow: threading.Event) -> None:
    async def scenario(run: Run) -> None:
        long = {**LONG, "sampling": {"max_completion_tokens": 110}}
        learner = await run.learner(run={"max_steps": 6}, rollout={"partial_ship_s": 1}, **long)
        path = run.run_dir / "workers" / "w1" / "partials.bin"
        async with running(learner) as (learning,):
            first = await run.worker("w1")
            async with running(first):
                assert await learner.wait_until(path.exists, within_s=60)
            slow.set()
            again = await run.worker("w1")
            async with running(again):
                assert await learning == "finished"
            assert again.role.partial_counts["resumed_tokens"] > 0
        run.audit(max_staleness=3)

    play(scenario)
