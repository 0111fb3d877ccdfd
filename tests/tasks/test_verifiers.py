"""Real environments of verifiers' behind our interface; they need that package."""

from __future__ import annotations

import importlib.util
import queue
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from echo.core.errors import ConfigError, DataError
from echo.core.extras import install_command
from echo.tasks.environment import Environment
from echo.tasks.rewards import Limits, PoolHost, RewardError
from echo.tasks.task import Example, Reward, load_task
from echo.tasks.verifiers import VerifiersTask, _Session

ENV = "tests.tasks.verifiers_envs"

needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
GO_ON = [{"role": "user", "content": "go on"}]


def make(kind: str) -> Environment:
    task = load_task("verifiers", {"env": ENV, "args": {"kind": kind}})
    assert isinstance(task, Environment)
    return task


def play(task: Environment, *texts: str) -> tuple[list[Any], Reward]:
    state = task.begin(task.example(1, split="train"))
    try:
        replies = [task.reply(state, text) for text in texts]
        return replies, task.outcome(state)
    finally:
        task.end(state)


@needs_verifiers
def test_examples_come_from_its_dataset() -> None:
    task = make("count")
    example = task.example(4, split="train")
    assert example.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "count 1"},
    ]
    assert (example.answer, task.num_examples(split="train")) == ("1", 3)


@needs_verifiers
@pytest.mark.parametrize(
    ("kind", "texts", "says", "reward"),
    [
        ("single", ["it is 1"], [None], 1.0),
        ("single", ["it is 2"], [None], 0.0),
        ("grouped", ["it is 1"], [None], 3.0),
        ("count", ["1", "2", "3"], [GO_ON, GO_ON, None], 1.0),
        ("count", ["1", "x"], [GO_ON, GO_ON], 1 / 3),  # no room for more; judged all the same
    ],
)
def test_one_turn_and_several(kind: str, texts: list[str], says: list[Any], reward: float) -> None:
    said, judged = play(make(kind), *texts)
    assert said == says
    assert judged == pytest.approx(reward)


@needs_verifiers
def test_the_weighted_functions_of_a_rubric_are_the_parts_of_the_reward() -> None:
    for text, parts in (("it is 1", {"correct": 1.0, "is_short": -0.5}), ("it is " + 9 * "2", {})):
        _, judged = play(make("weighted"), text)
        assert judged == {"correct": 0.0, "is_short": 0.0} | parts


@needs_verifiers
def test_tools_are_called_and_told_of() -> None:
    task = make("tools")
    [tool] = task.tools(task.example(0, split="train"))
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    replies, reward = play(task, CALL, "so it is 1")
    assert replies == [[{"role": "tool", "content": "3"}], None]
    assert reward == 1.0


@needs_verifiers
def test_it_runs_in_a_process_of_its_own() -> None:
    options = {"env": ENV, "args": {"kind": "count"}}
    pool = PoolHost("verifiers", options, Limits(score_s=60, step_s=60), max_concurrent=1)
    try:
        example = make("count").example(0, split="train")
        episodes = [pool.begin(example) for _ in range(3)]
        assert [len(episode.reply("1") or []) for episode in episodes] == [1, 1, 1]
        assert episodes[0].outcome() == pytest.approx(1 / 3)
        assert episodes[1].reply("break") is None
        with pytest.raises(RewardError, match="sandbox is gone"):
            episodes[1].outcome()
    finally:
        pool.close()


@pytest.mark.parametrize("said", [[], ["user"], ["user", "user"], ["system", "assistant"]])
def test_an_environment_that_rewrites_what_was_said_is_refused(said: list[str]) -> None:
    session = _Session.__new__(_Session)
    session._conversation = [{"role": "user", "content": "1"}]
    session._requests = queue.SimpleQueue()
    session._requests.put([{"role": role, "content": "1"} for role in said])
    session._answer = lambda text: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="rewrites what was said before"):
        session.reply("2")


@pytest.mark.parametrize("method", ["reply", "outcome"])
def test_a_lost_connection_of_an_environment_is_told_each_time_that_it_is_asked(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo.tasks.verifiers._policy", lambda session: session)

    async def run(row: object, session: _Session, *_: object) -> None:
        await session.sample([{"role": "user", "content": "1"}])
        raise ConnectionResetError("the judge is gone")

    environment = SimpleNamespace(_run_rollout_state=run)
    example = Example(index=0, split="train", prompt="1", info={"row": {}})
    session = _Session(environment, example)
    assert session.next_request()
    for _ in range(3):  # its caller repeats a call whose connection is lost
        with pytest.raises(ConnectionResetError, match="the judge is gone"):
            session.reply("1") if method == "reply" else session.outcome()


def test_a_split_without_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_rows() -> list[dict[str, str]]:
        raise ValueError("no evaluation dataset")

    environment = SimpleNamespace(
        requires_group_rollouts=False,
        get_dataset=lambda: [{"prompt": "1"}],
        get_eval_dataset=no_rows,
    )
    package = SimpleNamespace(load_environment=lambda name: environment)
    monkeypatch.setitem(sys.modules, "verifiers", package)
    task = VerifiersTask(env="x")
    assert (task.num_examples(split="train"), task.num_examples(split="heldout")) == (1, 0)
    with pytest.raises(DataError, match="the environment x has no heldout rows"):
        task.example(0, split="heldout")


@needs_verifiers
def test_what_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="compares the rollouts of a group"):
        make("group").prepare()
    task = load_task("verifiers", {"env": "no-such-env"})
    with pytest.raises(ConfigError, match=r"'no-such-env'.*install it"):
        task.prepare()


def test_another_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", type(sys)("verifiers"))
    with pytest.raises(ConfigError, match=r"another interface than verifiers 0\.2\.1; pip install"):
        load_task("verifiers", {"env": "x"}).prepare()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("worker", "verifiers"))):
        load_task("verifiers", {"env": "x"}).prepare()
    with pytest.raises(ConfigError, match=r"task\.options\.env"):
        load_task("verifiers", {})
