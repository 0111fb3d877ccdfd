"""What a learner without a batch does by time, on a virtual clock."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from echo.core.errors import TransportError
from echo.roles.learner import Learner
from echo.runtime.learner.node import FIRST_WORKER_S, BatchWait
from tests.roles.harness import Run as PaperRun
from tests.runtime.harness import Play, Run, running

ADDRESS = "tcp://learner:7700"


def make_waiting(session: Learner, *, reconnect_for_s: float = 300.0) -> BatchWait:
    log = logging.getLogger("test.waiting")
    return BatchWait(session, address=ADDRESS, reconnect_for_s=reconnect_for_s, log=log)


def paper_run(tmp_path: Path) -> tuple[PaperRun, Learner]:
    run = PaperRun(tmp_path)
    run.start_learner()
    assert run.learner is not None
    return run, run.learner


@pytest.mark.parametrize("reconnect_for_s", [300.0, 2 * FIRST_WORKER_S])
def test_the_first_worker_is_waited_for_longest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reconnect_for_s: float
) -> None:
    _, session = paper_run(tmp_path)
    waiting = make_waiting(session, reconnect_for_s=reconnect_for_s)
    waiting.begin(now=100.0)
    for second in range(100, 281):
        assert waiting.look(now=float(second)) == "no_worker"
    assert len(caplog.messages) == 3  # one a minute
    assert f"waiting for workers at {ADDRESS} for 2min, since this learner began" in caplog.text
    limit_s = max(FIRST_WORKER_S, reconnect_for_s)
    waiting.look(now=99.0 + limit_s)
    with pytest.raises(TransportError, match=f"no worker at {ADDRESS} for .*h.*--resume"):
        waiting.look(now=100.0 + limit_s)


def test_workers_that_are_gone_are_waited_for_as_long_as_they_try(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, session = paper_run(tmp_path)
    waiting = make_waiting(session)
    waiting.begin(now=0.0)
    worker = run.start_worker("w1")
    run.world.run_until(lambda: "w1" in session.roster.nodes, within_s=10.0)
    waiting.look(now=1000.0)
    run.world.kill(worker)
    run.world.run_until(lambda: not session.roster.nodes, within_s=10.0)
    waiting.look(now=1299.0)
    assert f"waiting for workers at {ADDRESS} for 4.98min, since w1 left" in caplog.text
    with pytest.raises(TransportError, match=f"no worker at {ADDRESS} for 5min, since w1 left"):
        waiting.look(now=1300.0)
    # Nobody looks during a step: the time of a wait counts from its beginning.
    waiting.begin(now=5000.0)
    waiting.look(now=5299.0)
    # A worker whose engine is still being built is here.
    run.start_worker("w2")
    run.world.run_until(lambda: "w2" in session.roster.nodes, within_s=10.0)
    waiting.look(now=5300.0)
    waiting.look(now=5599.0)


def test_what_keeps_groups_from_workers_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, session = paper_run(tmp_path)
    run.is_training = False
    run.start_worker("w1")
    run.world.run_until(lambda: session.leases.num_running > 0, within_s=10.0)
    waiting = make_waiting(session)
    waiting.begin(now=0.0)
    assert waiting.look(now=100.0) == ""  # something runs
    [member] = session.roster.members("worker")
    session.leases.drop_worker("w1")
    for group in [*session.buffer]:  # type: ignore[attr-defined]
        session.buffer._remove(group.group_id)  # type: ignore[attr-defined]
    member.worker.is_stuck = True
    for second in range(101, 200):
        assert waiting.look(now=float(second)) == "busy"
    assert caplog.messages == [
        "nothing can be granted for 4s: no worker takes a group; waiting for 2 of 2 groups; w1 has "
        "0 (waiting for leases)"
    ]
    member.worker.installed = None
    assert waiting.look(now=200.0) == "no_weights"
    session._scheduler.step = 100
    assert waiting.look(now=201.0) == "outdated"
    now = "nothing can be granted: the newest version is too old for the next step; waiting for 2"
    assert caplog.messages[-1].startswith(now)


@pytest.mark.slow
def test_a_learner_that_nobody_asks_publishes_by_time(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("echo.weights.schedule.PublishPace.is_due", lambda self, step: False)

    after: list[str] = []

    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 4})
        look = learner._look

        async def looking() -> None:
            await look()
            after.append(learner._progress.activity)

        monkeypatch.setattr(learner, "_look", looking)
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        assert set(after) == {""}, "a learner that has published waits again"
        assert [r["version"][1] for r in run.ledger("published")] == [0, 2, 4]
        assert "the newest version is too old for the next step" in caplog.text

    play(scenario)


@pytest.mark.slow
def test_a_learner_without_workers_saves_and_ends(play: Play) -> None:
    async def scenario(run: Run) -> None:
        soon = {"reconnect_for_s": 0.3}
        learner = await run.learner(run={"max_steps": 10_000}, network=soon)
        async with running(learner, await run.worker("w1")) as (learning, working):
            while learner.session.step < 2:  # noqa: ASYNC110, a step has no event
                await asyncio.sleep(0.01)
            working.cancel()
            with pytest.raises(TransportError, match="no worker at tcp://learner:7700 for "):
                await learning
        step = learner.session.step
        assert run.ledger("checkpoint")[-1]["step"] == step
        learner = await run.learner(resume=True, run={"max_steps": step + 1})
        async with running(learner, await run.worker("w2")) as (learning, _):
            assert await learning == "finished"

    play(scenario)
