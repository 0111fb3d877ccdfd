"""The end of a run reaches nodes that are away just then."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest

from echo.runtime.learner.node import LearnerNode
from tests.runtime.harness import RELAY, Play, Run, running

PATIENCE_S = 600.0
"""Longest pause between two dials that the learner reckons with: more than a test takes."""


def be_patient(learner: LearnerNode) -> None:
    options = learner.transport.options
    learner.transport.options = dataclasses.replace(options, max_redial_s=PATIENCE_S)


def cut_before_shutdown(run: Run, learner: LearnerNode, name: str, other: str) -> None:
    """Let a link fail at the moment when the end of the run is about to be told."""
    say = learner._tell_end

    async def cut_and_say(reason: str) -> None:
        run.network.cut(name, other)
        await say(reason)

    learner._tell_end = cut_and_say  # type: ignore[method-assign]


def forget_before_shutdown(learner: LearnerNode, name: str) -> None:
    """Let a node have been silent for long when the end of the run is about to be told."""
    say = learner._tell_end

    async def forget_and_say(reason: str) -> None:
        learner.session.roster.nodes[name].heard_at -= 5 * PATIENCE_S
        await say(reason)

    learner._tell_end = forget_and_say  # type: ignore[method-assign]


async def until_over(learner: LearnerNode) -> None:
    """Wait until whoever is here has been told."""
    assert await learner.wait_until(lambda: bool(learner.session.finish_reason), within_s=60)
    await asyncio.sleep(0.1)


def test_a_worker_that_comes_back_after_the_end_of_a_resumed_run_hears_of_it(play: Play) -> None:
    """The first learner did all the work; what is left for the second is over in no time."""

    async def scenario(run: Run) -> None:
        worker = await run.worker("w1")
        learner = await run.learner()
        async with running(learner, worker) as (learning, _):
            assert await learning == "finished"
        learner = await run.learner(resume=True)
        be_patient(learner)
        async with running(learner) as (learning,):
            await until_over(learner)
            assert not learning.done()
            async with running(await run.worker("w2")) as (working,):
                assert await working == "the run is finished"
            assert learner._return_s > 2 * PATIENCE_S, "a node may dial in vain once"
            learner._missing_until = -math.inf  # nobody else is missing
            assert await learning == "finished"

    play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["learner", pytest.param("relay", marks=pytest.mark.matrix)])
def test_a_worker_that_is_cut_off_at_the_end_hears_of_it_when_it_is_back(
    play: Play, other: str
) -> None:
    async def scenario(run: Run) -> None:
        network = {"dead_after_s": PATIENCE_S, "reconnect_for_s": PATIENCE_S}
        learner = await run.learner(network=network)
        be_patient(learner)
        cut_before_shutdown(run, learner, "w1", other)
        relays = [await run.relay(network=network)] if other == "relay" else []
        connect = {"connect": [RELAY]} if relays else {}
        worker = await run.worker("w1", network=network, worker=connect)
        async with running(learner, worker, *relays) as (learning, *others):
            await until_over(learner)
            assert not any(task.done() for task in (learning, *others[1:]))
            run.network.mend("w1", other)
            assert [await task for task in others] == ["the run is finished"] * len(others)
            assert await learning == "finished"

    play(scenario)


@pytest.mark.slow
def test_a_node_that_died_long_ago_is_not_waited_for(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(network={"dead_after_s": 10 * PATIENCE_S})
        be_patient(learner)
        async with running(await run.relay(), learner) as (relaying, learning):
            nodes = learner.session.roster.nodes
            assert await learner.wait_until(lambda: "relay" in nodes, within_s=60)
            relaying.cancel()
            forget_before_shutdown(learner, "relay")
            async with running(await run.worker("w1")):
                assert await learning == "finished"

    play(scenario)


@pytest.mark.slow
def test_relays_are_told_though_a_worker_never_comes_back(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(network={"dead_after_s": 10 * PATIENCE_S})
        be_patient(learner)
        learner.session.is_granting = False
        nodes = learner.session.roster.nodes
        async with running(await run.relay(), await run.worker("w1"), learner) as (
            relaying,
            dying,
            learning,
        ):
            assert await learner.wait_until(lambda: {"relay", "w1"} <= nodes.keys(), within_s=60)
            dying.cancel()
            forget_before_shutdown(learner, "w1")
            learner.session.is_granting = True
            async with running(await run.worker("w2")):
                assert await learning == "finished"
            assert await relaying == "the run is finished"

    play(scenario)
