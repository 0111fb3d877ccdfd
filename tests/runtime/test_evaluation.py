"""An evaluation by workers: the scores of one machine, although a worker dies in the middle."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from echo.core.errors import DataError
from echo.core.rollout import PolicyVersion
from echo.engine.hf.engine import TransformersEngine
from echo.engine.model import load_directory
from echo.roles.joining import LIKELY_IDS
from echo.runtime.learner.evaluation_node import EvaluationNode, HeldoutGroups
from echo.runtime.learner.setup import (
    Data,
    assemble_evaluation,
    build_evaluator,
    load_data,
)
from echo.runtime.learner.versions.evaluation import EvalResult
from echo.runtime.node import INTERRUPTED
from echo.wire.messages import Lease
from tests.runtime.harness import Play, Run, running

LOG = logging.getLogger("test.evaluation")
VERSION = PolicyVersion(2, 7)
SETTINGS: dict[str, Any] = {
    "eval": {"num_prompts": 6, "num_samples": 3, "temperature": 0.7},
    "model": {"dtype": "float32"},
    "batch": {"group_size": 4},
}

HASHED = """
import zlib
from echo.tasks.task import Example, Task

class Hashed(Task):
    is_bounded = True

    def example(self, index, *, split):
        return Example(index=index, split=split, prompt=f"{index % 10}+1=", answer="")

    def reward(self, example, completion):
        return zlib.crc32(completion.encode()) / 2**32
"""
"""Each answer has a reward of its own, so equal scores are equal answers."""

HALF_BROKEN = """
from echo.tasks.task import Example, Task

class HalfBroken(Task):
    is_bounded = True

    def example(self, index, *, split):
        return Example(index=index, split=split, prompt=f"{index % 10}+1=", answer="")

    def reward(self, example, completion):
        if example.index % 2:
            raise ValueError("too odd")
        return 1.0
"""


async def evaluation(run: Run, data: Data, **sections: dict[str, Any]) -> EvaluationNode:
    """Return an evaluation of the run's model that waits for workers."""
    config = run.config("learner", **SETTINGS | sections)
    transport = await run.transport("learner", config.learner.listen)
    weights = partial(load_directory, run.model_dir, "float32")
    return assemble_evaluation(config, data, transport, weights, run.directory / "eval", log=LOG)


def scored_here(run: Run, data: Data, **sections: dict[str, Any]) -> EvalResult:
    """Return the scores of the run's model by an evaluation on this machine."""
    evaluator = build_evaluator(run.config("learner", **SETTINGS | sections), data, log=LOG)
    assert evaluator is not None
    result = evaluator.evaluate(VERSION, load_directory(run.model_dir, "float32"))
    assert result is not None
    return result


@pytest.mark.slow
def test_workers_give_the_scores_of_one_machine(
    play: Play, write_task: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task("hashed", HASHED)
    granted: list[Lease] = []
    lease_of = HeldoutGroups.lease

    def lease(groups: HeldoutGroups, group_id: int, attempt: int) -> Lease:
        granted.extend(lease_of(groups, group_id, again) for again in (attempt, attempt + 1))
        return granted[-2]

    monkeypatch.setattr(HeldoutGroups, "lease", lease)
    task = {"kind": "hashed:Hashed"}

    async def scenario(run: Run) -> None:
        data = load_data(run.config("learner", task=task, **SETTINGS))
        node = await evaluation(run, data, task=task)
        sections: dict[str, Any] = {"task": task, "worker": {"max_concurrent_rollouts": 2}}
        workers = [await run.worker(f"w{i}", **sections) for i in (1, 2)]
        async with running(node, *workers) as [learner, first_worker, second]:
            while not node.role.counters["accepted"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            first_worker.cancel()  # what it has begun, the other samples again
            assert await learner == "finished"
            assert await second == "the evaluation is finished"
        here = scored_here(run, data, task=task)
        assert node.result(VERSION) == here
        assert len(here.scores.rewards) == 18
        assert len(set(here.scores.rewards)) > 9
        # A lost answer would be sampled with the same seed by another worker.
        first, again = granted[::2], granted[1::2]
        assert [each.seed for each in first] == [each.seed for each in again]
        assert node.engines == {"transformers float32"}

    play(scenario)


def test_workers_send_no_ids_that_only_a_loss_needs(play: Play) -> None:
    loss = {"kind": "gspo", "score_centering": 8}

    async def scenario(run: Run) -> None:
        config = run.config("learner", loss=loss, **SETTINGS)
        node = await evaluation(run, load_data(config), loss=loss)
        assert node.role.settings.admission.settings[LIKELY_IDS] == 0
        node.release()

    play(scenario)


@pytest.mark.matrix
def test_an_evaluation_that_is_interrupted_releases_its_workers(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(run: Run) -> None:
        data = load_data(run.config("learner", **SETTINGS))
        node = await evaluation(run, data)
        worker = await run.worker("w1", worker={"max_concurrent_rollouts": 2})
        async with running(node, worker) as [learner, sampler]:
            while not node.role.counters["accepted"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            node.interrupt()
            assert await learner == INTERRUPTED
            assert await sampler == "the evaluation is stopped"

    with caplog.at_level(logging.INFO):
        play(scenario)
    assert re.search(r"stopped with \d+ of 24 answers, so there are no scores", caplog.text)


@pytest.mark.matrix
def test_an_answer_that_no_engine_can_sample_is_no_wrong_answer(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such prompt")

    async def scenario(run: Run) -> None:
        data = load_data(run.config("learner", **SETTINGS))
        node = await evaluation(run, data)
        async with running(node, await run.worker("w1")) as [learner, _]:
            with pytest.raises(DataError, match=r"no worker can answer .*engine_error: .*no such"):
                await learner

    monkeypatch.setattr(TransformersEngine, "generate", fail)
    monkeypatch.setattr(TransformersEngine, "can_sample", lambda _: True)
    play(scenario)


@pytest.mark.matrix
def test_a_failed_reward_counts_as_0(play: Play, write_task: Callable[[str, str], None]) -> None:
    write_task("half_broken", HALF_BROKEN)
    task = {"kind": "half_broken:HalfBroken"}

    async def scenario(run: Run) -> None:
        data = load_data(run.config("learner", task=task, **SETTINGS))
        for where in ("worker", "learner"):
            node = await evaluation(run, data, task=task, reward={"where": where})
            async with running(node, await run.worker("w1", task=task)) as [learner, _]:
                assert await learner == "finished"
            result = node.result(VERSION)
            assert (result.num_rewards, result.num_reward_errors) == (24, 12)
            assert (result.sampled, result.greedy) == (0.5, 0.5)
            assert "too odd" in result.error

    play(scenario)
