"""Episodes on a scripted engine: which tokens, which masks, which ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from echo.config.schema import TaskSection
from echo.core.rollout import PolicyVersion, Rollout
from echo.core.token_sets import NOT_RECORDED
from echo.engine.engine import (
    UNWATCHED,
    Completion,
    FinishReason,
    Request,
    Sampling,
    Watcher,
)
from echo.engine.stop_strings import StopStrings
from echo.leases.worker.held import Closed, HeldLeases
from echo.leases.worker.outbox import Outbox
from echo.roles.worker.sampling import EngineCall
from echo.runtime.episodes import EpisodeRunner, Opening, turns_of
from echo.runtime.worker.node import EpisodeWatcher
from echo.tasks.environment import Environment
from echo.tasks.rewards import InlineHost, Limits, RewardError
from echo.tasks.task import Example, load_task
from tests.promises.world import StubEngine
from tests.roles.harness import make_lease
from tests.tasks.test_environment import Calculator, call
from tests.wire.sets import make_sets

STOP = 0
"""Ids are code points; this one ends a turn."""

SAMPLING = Sampling(1.0, 1.0, 0, 30, (STOP,))


class Script(StubEngine):
    """Says the lines of a script, a new version for every turn, and keeps what it was asked."""

    def __init__(self, lines: Callable[[int, int], str]) -> None:
        super().__init__()
        self._lines = lines
        self.calls: list[list[Request]] = []
        self.held: list[PolicyVersion | None] = []
        self.named: list[PolicyVersion | None] = []

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *_: Any, **named: Any
    ) -> list[Completion]:
        turn = len(self.calls)
        self.calls.append(list(requests))
        self.named.append(named.get("version"))
        found = []
        for request in requests:
            line = self._lines(int(request.request_id.split(".")[-2]), turn)
            room = sampling.max_completion_tokens - len(request.prefix_ids)
            stop = sampling.stop
            is_stopped = stop is not None and stop.are_complete(list(map(ord, line)))
            ids = np.array([*map(ord, line), *([] if is_stopped else [STOP])][:room], np.int32)
            versions = np.tile(np.array([1, turn], np.int32), (len(ids), 1))
            logprobs = np.full(len(ids), -0.5, np.float32)
            reason: FinishReason = "stop" if ids[-1] == STOP or is_stopped else "length"
            if line == "NaN":
                reason, logprobs[-1] = "nonfinite", np.nan
            own = make_sets(*([token, token + 1] for token in ids.tolist()))
            found.append(Completion(request.request_id, ids, logprobs, reason, versions, own))
        return found

    @contextmanager
    def holding(self, version: PolicyVersion) -> Iterator[None]:
        self.held.append(version)
        yield
        self.held.append(None)


class Counting(Environment):
    """Wants 1, 2, 3; anything else gets an answer that depends on it."""

    is_bounded = True

    def __init__(self) -> None:
        self.heard: list[str] = []

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt="Count!", answer=3)

    def begin(self, example: Example) -> dict[str, int]:
        return {"said": 0, "last": example.answer}

    def reply(self, state: dict[str, int], text: str) -> str | None:
        self.heard.append(text)
        if text == "fail":
            raise ValueError("on purpose")
        if text == "half":
            return "\ud800"
        if text == "more":
            return "?" * 40
        state["said"] += text == str(state["said"] + 1)
        return None if state["said"] == state["last"] else "go on"

    def outcome(self, state: dict[str, int]) -> float:
        return state["said"] / state["last"]


class Characters:
    """A token for each character."""

    def encode_turn(self, messages: Sequence[dict[str, Any]], *, is_closed: bool) -> list[int]:
        if any("\ud800" in m["content"] for m in messages):
            raise TypeError("TextEncodeInput must be Union[...]")  # as tokenizers do
        closing = [] if is_closed else [STOP]
        return closing + [ord(c) for m in messages for c in f"<{m['content']}>"]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != STOP)


Results = list[list[Rollout] | RewardError]
Lines = Callable[[int, int], str]


def count(member: int, turn: int) -> str:
    """Say what is right."""
    return str(turn + 1)


def play(
    lines: Lines,
    *,
    sizes: Sequence[int] = (1,),
    max_turns: Callable[[Example], int] = lambda _: 8,
    version: PolicyVersion | None = None,
    sampling: Sampling = SAMPLING,
    watcher: Watcher = UNWATCHED,
) -> tuple[Results, Script, Counting, InlineHost]:
    engine, task, text = Script(lines), Counting(), Characters()
    host = InlineHost(task, Limits(score_s=60.0, step_s=60.0))
    runner = EpisodeRunner(engine, host, text, max_turns=max_turns)  # type: ignore[arg-type]
    openings = [
        Opening(
            name=f"{number}.0",
            prompt_ids=np.array([9, 9], np.int32),
            example=task.example(number, split="train"),
            seeds=range(100 * number, 100 * number + size),
        )
        for number, size in enumerate(sizes)
    ]
    results = runner.play(openings, sampling, watcher, version=version)
    runner.close()
    return results, engine, task, host


def text_of(rollout: Rollout) -> str:
    return "".join("|" if i == STOP else chr(i) for i in rollout.token_ids)


def only(results: Results) -> Rollout:
    [[rollout]] = results  # type: ignore[misc]
    return rollout


@pytest.mark.parametrize(
    ("line", "reason", "what"),
    [
        ("NaN", "bad_logprobs", "log-probability of nan at token 3 of request 0.0.1.1 under v1"),
        ("half", "reward_error", "0: what it says cannot be turned into tokens: TextEncode"),
        ("fail", "reward_error", "Counting.reply on train example 0 raised ValueError: on purpose"),
    ],
)
def test_a_fault_ends_its_group_and_no_other(line: str, reason: str, what: str) -> None:
    lines = {(1, 1): line}
    results, engine, task, _ = play(
        lambda member, turn: lines.get((member, turn), count(member, turn)), sizes=(2, 1)
    )
    bad, good = results
    assert isinstance(bad, RewardError)
    assert bad.reason == reason
    assert what in str(bad)
    assert [rollout.reward for rollout in good] == [1.0]  # type: ignore[union-attr]
    assert [len(call) for call in engine.calls] == [3, 3, 1], "nobody goes on with a failed group"
    assert "NaN" not in task.heard


def test_a_call_ends_as_soon_as_none_of_its_groups_is_wanted() -> None:
    held = HeldLeases(Outbox(max_deliveries=2, retry_s=1.0))
    for group_id in (0, 1):
        held.add(make_lease(group_id))
    groups = held.take(2, group_size=1)

    def line(member: int, turn: int) -> str:
        if turn:
            held.handle(groups[turn - 1], Closed())  # another worker has finished it
        return "?"

    call = EngineCall(groups, num_awaited=2, ends_at=np.inf, version=None)
    watcher = EpisodeWatcher(Mock(has_ended=False), call)
    results, engine, task, _ = play(line, sizes=(1,), watcher=watcher)
    assert len(engine.calls) == 3, "of eight turns"
    assert len(task.heard) == 2
    [fault] = results
    assert isinstance(fault, RewardError)


def test_what_is_sampled_stays_and_what_is_said_is_masked() -> None:
    results, engine, task, _ = play(count)
    rollout = only(results)
    assert text_of(rollout) == "1|<go on>2|<go on>3|"
    sampled = [c not in "<go on>" for c in text_of(rollout)]
    assert rollout.completion_mask.tolist() == sampled
    assert rollout.sampler_logprobs.tolist() == [-0.5 if own else 0.0 for own in sampled]
    assert rollout.support is not None
    assert rollout.support.sizes.tolist() == [2 if own else NOT_RECORDED for own in sampled]
    assert rollout.support.includes(rollout.token_ids).all()
    versions = map(tuple, rollout.policy_versions[rollout.completion_mask].tolist())
    assert sorted({*versions}) == [(1, turn) for turn in range(3)]
    assert (rollout.reward, rollout.finish_reason) == (1.0, "stop")
    assert task.heard == ["1", "2", "3"]
    prefixes = [call[0].prefix_ids.tolist() for call in engine.calls]
    ids = rollout.token_ids.tolist()
    assert prefixes == [[], ids[:9], ids[:18]], "the very tokens, not their text encoded again"
    assert len({call[0].seed for call in engine.calls}) == 3


def test_a_turn_that_a_stop_string_has_ended_is_closed_by_the_reply() -> None:
    stop = StopStrings(("2",), Characters().decode)
    results, engine, task, _ = play(count, sampling=replace(SAMPLING, stop=stop))
    rollout = only(results)
    assert text_of(rollout) == "1|<go on>2|<go on>3|"
    trained = "".join(text_of(rollout)[n] for n in np.flatnonzero(rollout.completion_mask))
    assert trained == "1|23|", "the stop string as it was sampled, and no stop token that was not"
    assert task.heard == ["1", "2", "3"]
    assert [call[0].turn_start for call in engine.calls] == [0, 9, 18]
    assert [len(call[0].turn_ids) for call in engine.calls] == [0, 0, 0]


def test_an_environment_that_never_ends_is_ended_and_counted() -> None:
    results, engine, _, host = play(lambda member, turn: "x", max_turns=lambda _: 2)
    rollout = only(results)
    assert text_of(rollout) == "x|<go on>x|"
    assert (rollout.reward, rollout.finish_reason) == (0.0, "length")
    counts = host.take_counts()
    assert (counts["env/turn_limit"], counts["env/episodes"], counts["env/turns"]) == (1, 1, 2)
    assert counts["env/tool_calls"] == 0
    assert len(engine.calls) == 2


def test_turns_and_tool_calls_of_an_episode_are_counted() -> None:
    lines = [call("add", '{"a": 1, "b": 2}') + call("divide", '{"a": 1, "b": 2}'), "It is 3."]
    task, text = Calculator(), Characters()
    host = InlineHost(task, Limits(score_s=60.0, step_s=60.0))
    engine = Script(lambda member, turn: lines[turn])
    runner = EpisodeRunner(engine, host, text, max_turns=lambda _: 8)  # type: ignore[arg-type]
    opening = Opening(
        name="0.0",
        prompt_ids=np.array([9, 9], np.int32),
        example=task.example(0, split="train"),
        seeds=range(1),
    )
    rollout = only(runner.play([opening], replace(SAMPLING, max_completion_tokens=500)))
    runner.close()
    assert rollout.reward == 1.0
    counts = host.take_counts()
    assert (counts["env/episodes"], counts["env/turns"], counts["env/tool_calls"]) == (1, 2, 2)


def test_each_task_of_a_mixture_has_its_own_limit_on_turns() -> None:
    kinds = ("tests.tasks.pool_tasks:Brief", "tests.tasks.pool_tasks:Counting", "addition")
    task = load_task("mixture", {"tasks": [{"kind": kind} for kind in kinds]})
    limit = turns_of(TaskSection(max_turns=5), task)
    assert limit is not None
    examples = [task.example(index, split="train") for index in range(3)]
    assert {each.task: limit(each) for each in examples} == {
        "Brief": 2, "Counting": 5, "addition": 5
    }  # fmt: skip
    results, *_ = play(
        lambda member, turn: "x", sizes=(1, 1), max_turns=lambda example: 1 + example.index
    )
    assert [text_of(rollout) for [rollout] in results] == ["x|", "x|<go on>x|"]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("more", "more|"),  # what is said has no space
        ("x" * 50, "x" * 30),  # the turn itself is cut off
    ],
)
def test_an_episode_ends_where_its_tokens_do(line: str, text: str) -> None:
    results, _, task, host = play(lambda member, turn: line)
    rollout = only(results)
    assert (text_of(rollout), rollout.finish_reason) == (text, "length")
    assert host.take_counts()["env/token_limit"] == 1
    assert task.heard == [text.rstrip("|")], "it hears the last turn, too"


def test_members_end_at_different_turns() -> None:
    results, engine, *_ = play(
        lambda member, turn: count(member, turn if member else 0), sizes=(2,), max_turns=lambda _: 4
    )
    [group] = results
    assert [rollout.reward for rollout in group] == [1 / 3, 1.0]  # type: ignore[union-attr]
    assert [len(call) for call in engine.calls] == [2, 2, 2, 1]


def test_a_version_is_held_over_all_turns_and_named_in_each() -> None:
    version = PolicyVersion(1, 7)
    _, engine, *_ = play(count, version=version)
    assert engine.held == [version, None]
    assert engine.named == [version] * 3
    assert play(count)[1].held == []
