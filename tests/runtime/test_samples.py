"""Samples of rollouts: which are taken, and that they reach the log and the follower as text."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from echo.cli.commands.node import NoticeBoard
from echo.core.monitoring.samples import TextSample, spread_over
from echo.core.rollout import PolicyVersion
from echo.runtime.learner.samples import MAX_CHARACTERS, NEW_CHAIN, SAMPLE_STEPS, SampleLog
from echo.runtime.learner.versions.evaluation import Answer, result_of
from tests.core.groups import make_group, make_rollout
from tests.runtime.harness import Play, Run, running


class Noting:
    """A follower that notes the samples, and no more."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, TextSample]] = []

    def write_samples(self, step: int, samples: Any) -> None:
        self.samples += [(step, sample) for sample in samples]


@pytest.mark.parametrize(
    ("number", "taken"),
    [(0, []), (1, [0]), (2, [0, 9]), (3, [0, 4, 9]), (10, [*range(10)]), (12, [*range(10)])],
)
def test_samples_are_spread_from_the_best_to_the_worst(number: int, taken: list[int]) -> None:
    assert spread_over(range(10), number) == taken


def test_every_tenth_step_its_best_and_its_worst_rollout_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    follower: Any = Noting()
    log = logging.getLogger("test.samples")
    board = NoticeBoard()
    log.addHandler(board)
    samples = SampleLog(2, follower, decode=lambda ids: f"\x1b{ids[0]}" * MAX_CHARACTERS, log=log)
    group = make_group(*(make_rollout([(1, 0)], reward=each) for each in (0.5, 1.0, 0.0, 0.25)))
    with caplog.at_level(logging.INFO, log.name):
        for step in range(1, 2 * SAMPLE_STEPS):
            samples.trained(step, [group])
    log.removeHandler(board)
    assert [(step, each.reward) for step, each in follower.samples] == [(10, 1.0), (10, 0.0)]
    assert {each.source for _, each in follower.samples} == {group.worker_id}
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith(f"sample of step 10 (train, {group.worker_id}, reward 1):")
    assert "\\x1b" in caplog.messages[0]
    assert "\x1b" not in caplog.messages[0]
    assert "characters ...]" in caplog.messages[0]
    assert board.lines == []  # they are for the log's file


def test_chains_of_an_agent_are_told_apart() -> None:
    follower: Any = Noting()
    log = logging.getLogger("test.samples")
    samples = SampleLog(1, follower, decode=lambda ids: "-" * len(ids), log=log)
    rollout = make_rollout([(1, 0)] * 5, reward=1.0)
    rollout = dataclasses.replace(rollout, branches=np.array([[3, 0]], np.int32))
    samples.trained(SAMPLE_STEPS, [make_group(rollout, rollout)])
    [(_, sample)] = follower.samples
    assert sample.completion == f"---{NEW_CHAIN}--"


def test_a_sample_of_an_evaluation_has_the_prompt_beyond_its_first_stop_token() -> None:
    text: Any = SimpleNamespace(decode=lambda ids: "system", decode_all=lambda ids: "system, user")
    openings: Any = [SimpleNamespace(prompt_ids=np.array([1, 2]))]
    answers = [[Answer("4", 1.0)]]
    result = result_of(PolicyVersion(1, 0), openings, answers, answers, text)
    assert [sample.prompt for sample in result.samples] == ["system, user"]


@pytest.mark.slow
def test_a_run_samples_its_evaluations_and_none_if_none_is_wanted(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner, worker = await run.learner(), await run.worker("w1")
        async with running(learner, worker) as (learning, _):
            await learning
        steps = [step for step, _ in run.samples]
        # Version 2 is left out if the evaluation of version 0 is not over by then.
        assert steps in ([0, 0, 3, 3], [0, 0, 2, 2, 3, 3])
        assert {each.kind for _, each in run.samples} == {"eval"}
        prompts = [each.prompt for _, each in run.samples]
        assert prompts[:2] == prompts[-2:]  # the same, so that they can be compared
        assert run.samples[-1][1].source == "v3"

    play(scenario)
