from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import pytest
from torch import Tensor

from echo.core.rollout import PolicyVersion
from echo.engine.engine import UNVERSIONED, Completion, Engine, Request, Sampling
from echo.runtime.learner.evaluation import Evaluations, Evaluator
from echo.tasks.rewards import InlineHost, Limits
from echo.tasks.task import Example, Task
from tests.engine.watchers import watching


class EchoEngine(Engine):
    """Answers with the prompt's last token; sampled ones with that plus the seed's parity."""

    installed = None

    def load(self, tensors: Mapping[str, Tensor], version: PolicyVersion = UNVERSIONED) -> None:
        pass

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *_: object, **named: object
    ) -> list[Completion]:
        ids = [int(r.prompt_ids[-1]) + (0 if sampling.greedy else r.seed % 2) for r in requests]
        return [
            Completion(
                r.request_id,
                np.array([i], np.int32),
                np.zeros(1, np.float32),
                "stop",
                np.zeros((1, 2), np.int32),
            )
            for r, i in zip(requests, ids, strict=True)
        ]

    def holding(self, exact_version: PolicyVersion) -> AbstractContextManager[None]:
        raise NotImplementedError

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        return 8

    def close(self) -> None:
        pass


class Same(Task):
    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt=str(index), answer=str(index))

    def reward(self, example: Example, completion: str) -> float:
        if example.answer == "3":
            raise RuntimeError("no idea")
        return float(completion == example.answer)


SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_completion_tokens=4, stop_ids=())


class FirstId:
    def decode(self, ids: Sequence[int]) -> str:
        return str(ids[0])


def make_evaluator(prompts: Sequence[int] = range(4)) -> Evaluator:
    task = Same()
    return Evaluator(
        EchoEngine(),
        InlineHost(task, Limits(score_s=60.0, step_s=60.0)),
        prompts=[(task.example(i, split="heldout"), [0, i]) for i in prompts],
        text=FirstId(),  # type: ignore[arg-type]
        sampling=SAMPLING,
        seed=0,
    )


def test_both_rates_are_means_and_a_failed_reward_counts_as_zero() -> None:
    result = make_evaluator().evaluate(PolicyVersion(1, 7), {})
    assert result is not None
    assert result.metrics("same") == {
        "eval/same/pass@1": 0.5,  # 0 and 2 of four: odd seeds answer one too many
        "eval/same/greedy": 0.75,
        "eval/version": 7,
        "eval/reward_errors": 2,
    }
    assert str(result).startswith(
        "evaluation of v7: sampled 0.500, greedy 0.750; 2 of 8 rewards failed and count as 0: "
        "Same.reward on heldout example 3 raised RuntimeError: no idea"
    )


def test_an_evaluation_whose_rewards_all_fail_has_no_figure() -> None:
    result = make_evaluator(prompts=[3, 3]).evaluate(PolicyVersion(1, 0), {})
    assert result is not None
    assert result.metrics("same") == {"eval/version": 0, "eval/reward_errors": 4}
    assert str(result).startswith("evaluation of v0: no figure, 4 of 4 rewards failed: Same.reward")


@pytest.mark.parametrize("after", [0, 3, 6])
def test_it_stops_wherever_it_is(after: int) -> None:
    asked = iter(range(100))
    stop = watching(should_stop=lambda: next(asked) >= after)
    assert make_evaluator().evaluate(PolicyVersion(1, 0), {}, stop) is None


def due_steps(published: Sequence[int], *, max_steps: int = 1000) -> list[int]:
    async def ask() -> list[int]:
        evaluations = Evaluations(make_evaluator(), interval_steps=20, max_steps=max_steps)
        return [s for s in published if await evaluations.is_due(PolicyVersion(1, s))]

    return asyncio.run(ask())


def test_every_interval_is_evaluated_once_whatever_the_publish_period() -> None:
    assert due_steps(range(61)) == [0, 20, 40, 60]
    assert due_steps(range(0, 70, 3)) == [0, 21, 42, 60]
    assert due_steps(range(0, 100, 30)) == [0, 30, 60, 90]


def test_a_resume_between_two_intervals_waits_for_the_next() -> None:
    assert due_steps(range(25, 62)) == [40, 60]


def test_the_last_version_is_always_evaluated() -> None:
    assert due_steps(range(34), max_steps=33) == [0, 20, 33]


def test_one_runs_at_a_time_and_the_last_waits_for_it() -> None:
    async def scenario() -> None:
        evaluations = Evaluations(make_evaluator(), interval_steps=1, max_steps=3)
        finished = asyncio.Event()
        assert await evaluations.is_due(PolicyVersion(1, 0))
        evaluations.started(asyncio.ensure_future(finished.wait()))  # type: ignore[arg-type]
        assert not await evaluations.is_due(PolicyVersion(1, 1))
        last = asyncio.ensure_future(evaluations.is_due(PolicyVersion(1, 3)))
        await asyncio.sleep(0)
        assert not last.done()
        finished.set()
        assert await last

    asyncio.run(scenario())
