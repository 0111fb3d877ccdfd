"""When a worker leaves by itself, and how its machine is given back."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from echo.config.load import parse_config
from echo.roles.worker import ReleaseTerms
from echo.runtime.worker.release import release, terms_of
from tests.runtime.harness import Play, Run, running
from tests.runtime.test_activation import slow_learner, until

LOG = logging.getLogger("test.retirement")
AT_ONCE = ReleaseTerms(standby_s=0.0, learner_gone_s=0.0)


def run_release(command: str, *, timeout_s: float = 30.0) -> bool:
    return asyncio.run(release(command, reason="enough", timeout_s=timeout_s, log=LOG))


def test_a_command_that_succeeds_confirms_and_its_output_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert run_release('echo "gone: $ECHO_RELEASE_REASON"; echo and more >&2')
    assert "on_release: gone: enough" in caplog.text
    assert "on_release: and more" in caplog.text


def test_a_command_that_fails_says_that_the_machine_may_go_on_billing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not run_release("echo no such instance; exit 3")
    assert "ended with code 3" in caplog.text
    assert "may go on billing" in caplog.text


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    assert not run_release(f"(sleep 60; touch {tmp_path}/late) & sleep 60", timeout_s=0.3)
    assert time.monotonic() - began < 30
    assert "was killed" in caplog.text


def test_what_a_command_leaves_in_the_background_is_not_waited_for() -> None:
    began = time.monotonic()
    assert run_release("sleep 40 &")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("after_s", "gone_s"), [(60, 60), (1, 10), (7200, 300)])
def test_a_short_silence_is_no_reason_and_giving_up_comes_later(after_s: int, gone_s: int) -> None:
    config = parse_config({}, [f"worker.release_after_s={after_s}"])
    assert terms_of(config) == ReleaseTerms(standby_s=after_s, learner_gone_s=gone_s)


@pytest.mark.slow
def test_an_interrupted_worker_gives_its_machine_back_and_its_cost_ends(
    play: Play, tmp_path: Path
) -> None:
    async def scenario(run: Run) -> None:
        learner = await slow_learner(run)
        terms = {"release_after_s": 0.3, "on_release": f"touch {tmp_path}/released"}
        needed = await run.worker("w1", worker={"price_per_h": 0.2})
        spare = await run.worker("w2", worker={"price_per_h": 5.0, **terms})
        async with running(learner, needed, spare) as (_, working, leaving):
            assert "on standby for" in await leaving
            assert (tmp_path / "released").exists()
            await until(lambda: run.rows[-1][1].get("cost/per_hour") == pytest.approx(0.2))
            assert run.rows[-1][1]["cost/unconfirmed_per_hour"] == 0
            assert not working.done()

    play(scenario)


@pytest.mark.slow
def test_a_release_that_fails_goes_on_counting(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await slow_learner(run)
        terms = {"release_after_s": 3600.0, "on_release": "exit 1"}
        stays = await run.worker("w1", worker={"price_per_h": 0.2})
        leaves = await run.worker("w2", worker={"price_per_h": 5.0, **terms})
        async with running(learner, stays, leaves) as (_, _, leaving):
            await until(lambda: run.rows and run.rows[-1][1].get("cost/per_hour") == 5.2)
            leaves.session.terms = AT_ONCE
            assert "without the learner" in await leaving
            await until(
                lambda: run.rows and run.rows[-1][1].get("cost/unconfirmed_per_hour") == 5.0
            )
            assert run.rows[-1][1]["cost/per_hour"] == pytest.approx(5.2)

    play(scenario)


@pytest.mark.parametrize("where", ["before", "within"])
def test_the_machine_is_given_back_once_though_the_run_ends_while_its_worker_leaves(
    play: Play, tmp_path: Path, where: str
) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner()
        command = f"echo begun >> {tmp_path}/released; sleep 0.5; echo done >> {tmp_path}/released"
        terms = {"release_after_s": 3600.0, "on_release": command}
        worker = await run.worker("w1", worker=terms)
        if where == "before":
            worker.session._settle = lambda now: []  # type: ignore[method-assign]
        learner.session.is_granting = False
        async with running(learner, worker) as (_, working):
            await until(lambda: worker.session.is_admitted)
            worker.session.terms = AT_ONCE
            await until(lambda: worker.session.is_leaving)
            if where == "within":
                await until((tmp_path / "released").exists)
            learner.perform(learner.session.finish("the run is finished"))
            assert await working == "the run is finished"
        assert (tmp_path / "released").read_text().split() == ["begun", "done"]

    play(scenario)


def test_a_release_that_has_begun_is_not_left_by_an_interrupt(play: Play, tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner()
        command = f"echo begun >> {tmp_path}/released; sleep 0.5; echo done >> {tmp_path}/released"
        worker = await run.worker("w1", worker={"release_after_s": 3600.0, "on_release": command})
        learner.session.is_granting = False
        async with running(learner, worker) as (_, working):
            await until(lambda: worker.session.is_admitted)
            worker.session.terms = AT_ONCE
            await until((tmp_path / "released").exists)
            worker.interrupt()
            assert await working == "interrupted"
            assert (tmp_path / "released").read_text().split() == ["begun", "done"]

    play(scenario)


@pytest.mark.slow
def test_the_machine_is_given_back_at_the_end_of_the_run_and_not_after_an_interrupt(
    play: Play, tmp_path: Path
) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 1})
        ends = await run.worker("w1", worker={"on_release": f"touch {tmp_path}/at-the-end"})
        stopped = await run.worker("w2", worker={"on_release": f"touch {tmp_path}/interrupted"})
        async with running(stopped) as (stopping,):
            stopped.interrupt()
            assert await stopping == "interrupted"
        async with running(learner, ends) as (learning, working):
            assert await learning == "finished"
            assert await working == "the run is finished"
        assert (tmp_path / "at-the-end").exists()
        assert not (tmp_path / "interrupted").exists()

    play(scenario)


def test_a_worker_without_its_learner_gives_its_machine_back(play: Play, tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        terms = {"release_after_s": 1.1, "on_release": f"touch {tmp_path}/released"}
        network = {"heartbeat_s": 0.2, "dead_after_s": 0.5}
        async with running(await run.worker("w1", worker=terms, network=network)) as (working,):
            assert "without the learner for" in await working
        assert (tmp_path / "released").exists()

    play(scenario)
