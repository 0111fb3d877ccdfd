"""A user's code in a whole run: killed, counted and survived at workers, or kept at the learner."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from echo.core.errors import DataError
from echo.core.rollout import Group
from echo.leases.results import StoreGroup
from echo.runtime.learner.batches.groups import DeliveredGroups
from echo.runtime.learner.batches.rewards import LearnerRewards
from echo.runtime.learner.setup import load_data
from echo.runtime.worker import setup
from echo.tasks.rewards import LaterHost, RewardError
from echo.tasks.task import Example
from echo.tasks.tokenization import load_tokenizer
from tests.core.groups import make_group, make_rollout
from tests.runtime.harness import Play, Run, running

WriteTask = Callable[[str, str], None]
TASK = """
import threading

from echo.tasks.task import Example, Task

class Sums(Task):
    def example(self, index, *, split):
        digit = index % 5
        return Example(
            index=index, split=split, prompt=f"{digit}+2=", answer=str(digit + 2),
            info={"secret": "kept"}, source=f"the answer is {digit + 2}",
        )

    def reward(self, example, completion):
        assert example.info == {"secret": "kept"} and example.answer, "the example came whole"
        if example.split == "train" and example.index == 1:
            threading.Event().wait(60)
        if example.split == "train" and example.index == 2:
            raise ConnectionError("the judge is away")
        return 1.0 + len(completion)  # a rollout may be empty
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["worker", "learner"])
def test_a_tasks_code_is_killed_counted_and_survived_and_kept_where_it_runs(
    play: Play,
    write_task: WriteTask,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    """Two groups fail for two reasons, each group has one end, and the run goes on."""
    write_task("sums_task", TASK)

    async def scenario(run: Run) -> None:
        settings: dict[str, Any] = {
            "task": {"kind": "sums_task:Sums", "reward_timeout_s": 2.0},
            "reward": {"max_concurrent": 2, "where": where},
            # That code hangs is no reason for leases to expire.
            "network": {"lease_timeout_s": 1.0},
        }
        if where == "learner":
            data = load_data(run.config("learner", **settings))
            data.host.close()
            lease = data.prompts.lease(0, 0)
            assert "kept" not in str(lease)
            assert (lease.example["answer"], lease.example["source"]) == (None, "")
            monkeypatch.setattr(setup, "load_task", Mock(side_effect=AssertionError("not needed")))
        learner = await run.learner(**settings)
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        run.audit()
        reasons = {record["reason"] for record in run.ledger("discarded")}
        assert {"reward_timeout", "reward_retries"} <= reasons
        assert learner.role.counters["leases_expired"] == 0
        assert re.search(r"group 1 .*reward_timeout.*did not return within 2 s", caplog.text)
        rewards = [r for record in run.ledger("accepted") for r in record["rewards"]]
        assert min(rewards) >= 1, "no fault became a reward of 0"
        row = next(row for _, row in reversed(run.rows) if "env/latency" in row)
        assert row["env/calls"] > 0
        for name in ("env/errors", "env/retries"):
            assert sum(row.get(name, 0) for _, row in run.rows) > 0

    play(scenario)


RANKS = """
from echo.tasks.task import Example, Task

class Ranks(Task):
    def example(self, index, *, split):
        return Example(index=index, split=split, prompt=f"{index % 10}+2=")

    def reward(self, example, completion):
        return None

    async def rewards(self, example, completions):
        if example.index == 1:
            return [None] * len(completions)
        return [None, *range(1, len(completions))]
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["worker", "learner"])
def test_a_group_is_judged_in_one_call_and_answers_without_an_opinion_are_left_out_of_it(
    play: Play, write_task: WriteTask, where: str
) -> None:
    write_task("ranks_task", RANKS)

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            task={"kind": "ranks_task:Ranks"},
            reward={"max_concurrent": 1, "where": where},
            batch={"group_size": 3},
        )
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        run.audit()
        rewards = [record["rewards"] for record in run.ledger("accepted")]
        assert rewards
        assert all(each == [1, 2] for each in rewards)
        reasons = [(each["group"], each["reason"]) for each in run.ledger("discarded")]
        assert (1, "no_opinion") in reasons
        assert all(reason != "no_opinion" for group, reason in reasons if group != 1)
        assert sum(row.get("env/no_opinion", 0) for _, row in run.rows) > 0
        assert not any(row.get("env/errors") for _, row in run.rows)

    play(scenario)


def test_an_example_that_is_gone_when_its_group_is_scored_ends_that_group_alone() -> None:
    def gone(group_id: int) -> Example:
        raise DataError(f"example({group_id}) raised KeyError")

    examples: Any = SimpleNamespace(example=gone)
    text: Any = SimpleNamespace(decode=str)
    group = make_group(make_rollout([(1, 0)]), group_id=7)
    with pytest.raises(RewardError, match=r"example\(7\) raised KeyError") as caught:
        LearnerRewards(LaterHost(), examples, text).score(group)
    assert caught.value.reason == "reward_error"


@pytest.mark.slow
def test_a_reward_that_always_fails_ends_the_run_with_its_traceback(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            task={"kind": "tests.runtime.rewards:Raises"},
            run={"max_steps": 9},
            batch={"max_zero_signal_batches": 3},
        )
        async with running(learner, await run.worker("w1")) as (learning, working):
            with pytest.raises(RewardError) as caught:
                await learning
            assert "see the learner's log" in await working
        text = str(caught.value)
        match = re.match(
            r"(\d+) of the last \1 groups could not be finished \(\1 reward_error\)", text
        )
        assert match is not None
        assert int(match[1]) >= 6
        assert "on w1: Raises.reward on train example" in text
        assert 'raise KeyError("answer")' in text, "the traceback of the task's own code"
        assert "tasks/processes/main.py" not in text, "and of nothing else"
        assert run.ledger("checkpoint")[-1]["step"] == 0, "it may be resumed"
        assert not (run.run_dir / "final").exists()

    play(scenario)


GUESS = """
from echo.tasks.environment import Environment
from echo.tasks.task import Example

class Guess(Environment):
    def example(self, index, *, split):
        return Example(index=index, split=split, prompt=f"{index % 10}+", answer=str(index % 10))

    def begin(self, example):
        if example.split == "train" and example.index == 1:
            raise ValueError("no such level")
        return {"turns": [], "answer": example.answer}

    def reply(self, state, text):
        state["turns"].append(text)
        return None if state["answer"] in text else "9="

    def outcome(self, state):
        return len(state["turns"])
"""


@pytest.mark.slow
def test_an_environment_is_played_masked_trained_on_and_evaluated(
    play: Play, write_task: WriteTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task("guess_task", GUESS)

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            task={"kind": "guess_task:Guess", "max_turns": 3},
            sampling={"max_completion_tokens": 24},
            reward={"max_concurrent": 2},
            network={"lease_timeout_s": 30.0},
        )
        groups: list[Group] = []
        accept = DeliveredGroups.accept

        def note(delivered: DeliveredGroups, action: StoreGroup) -> None:
            groups.append(action.group)
            accept(delivered, action)

        monkeypatch.setattr(DeliveredGroups, "accept", note)
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        tokenizer = load_tokenizer(run.model_dir)
        said = tokenizer("9=", add_special_tokens=False)["input_ids"]
        assert any(rollout.reward > 1 for rollout in rollouts), "some took several turns"
        for rollout in rollouts:
            masked = rollout.token_ids[~rollout.completion_mask].tolist()
            assert masked == said * (round(rollout.reward) - 1)
            assert (rollout.sampler_logprobs[~rollout.completion_mask] == 0).all()
            assert (rollout.sampler_logprobs[rollout.completion_mask] < 0).any()
        assert [r["reason"] for r in run.ledger("discarded") if r["group"] == 1] == ["reward_error"]
        assert any("eval/Guess/reward" in row for _, row in run.rows)

    play(scenario)
