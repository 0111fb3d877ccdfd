from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from echo.tasks.calls import Answer, Call, Fault, Score
from echo.tasks.faults import RewardError
from echo.tasks.host import InlineHost, Limits, TaskHost
from echo.tasks.task import Example, RetryCall, Task

EXAMPLE = Example(index=3, split="train", prompt="?", source="rows.jsonl:4")

LIMITS = Limits(score_s=60.0, step_s=60.0)


class Judge(Task):
    def __init__(self, function: Callable[[str], object]) -> None:
        self.function = function

    def example(self, index: int, *, split: str) -> Example:
        return EXAMPLE

    def reward(self, example: Example, completion: str) -> float:
        return self.function(completion)  # type: ignore[return-value]


class Slow(TaskHost):
    """A host whose calls wait for a gate."""

    def __init__(self) -> None:
        super().__init__("slow", LIMITS, max_concurrent=2)
        self.gate = threading.Event()

    def _answer(self, call: Call) -> Answer:
        assert isinstance(call, Score)
        self.gate.wait(20)
        if call.completion == "bad":
            return Answer(fault=Fault("reward_error", "on purpose"))
        return Answer(len(call.completion))


def test_a_task_in_this_process_is_scored_in_order() -> None:
    progress: list[int] = []
    host = InlineHost(Judge(len), LIMITS)
    assert host.score_all(EXAMPLE, ["", "a", "bc"], on_progress=progress.append) == [0, 1, 2]
    assert progress == [1, 1, 1]
    assert host.take_counts()["env/calls"] == 3


@pytest.mark.parametrize("reward", [-10.5, 1e38])
def test_a_reward_beyond_the_bound_is_a_fault(reward: float) -> None:
    limits = Limits(score_s=60.0, step_s=60.0, max_abs_reward=10.0)
    assert InlineHost(Judge(lambda _: -10), limits).score(EXAMPLE, "") == -10.0
    host = InlineHost(Judge(lambda _: reward), limits)
    with pytest.raises(RewardError, match=r"returned .*, beyond reward\.max_abs = 10;") as caught:
        host.score(EXAMPLE, "")
    assert caught.value.reason == "reward_too_large"
    assert host.take_counts()["env/errors"] == 1


def test_a_call_in_this_process_that_hangs_is_left_alone() -> None:
    gate = threading.Event()
    host = InlineHost(Judge(lambda _: gate.wait(20)), Limits(score_s=0.02, step_s=5.0))
    with pytest.raises(
        RewardError, match=r"Judge\.reward on rows\.jsonl:4 did not return"
    ) as caught:
        host.score(EXAMPLE, "")
    gate.set()
    assert caught.value.reason == "reward_timeout"
    assert host.take_counts()["env/errors"] == 1


def test_what_may_work_later_is_tried_again_and_counted() -> None:
    calls: list[str] = []

    def fail_once(text: str) -> float:
        calls.append(text)
        if len(calls) == 1:
            raise RetryCall("not yet")
        return 1.0

    host = InlineHost(Judge(fail_once), LIMITS)
    assert host.score(EXAMPLE, "x") == 1.0
    counts = host.take_counts()
    assert (counts["env/calls"], counts["env/retries"]) == (2, 1)
    assert "env/errors" not in counts


def test_an_error_is_not_tried_again() -> None:
    calls: list[str] = []

    def fail(text: str) -> float:
        calls.append(text)
        raise ValueError("wrong")

    with pytest.raises(RewardError, match="wrong"):
        InlineHost(Judge(fail), LIMITS).score(EXAMPLE, "x")
    assert calls == ["x"]


def test_who_waits_is_told_that_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo.tasks.host.TICK_S", 0.01)
    host = Slow()
    ticks: list[int] = []

    def on_progress(number: int) -> None:
        ticks.append(number)
        if len(ticks) >= 3:
            host.gate.set()

    assert host.score_all(EXAMPLE, ["a", "bc", "def"], on_progress=on_progress) == [1, 2, 3]
    host.close()


def test_the_first_fault_ends_the_group() -> None:
    host = Slow()
    host.gate.set()
    with pytest.raises(RewardError, match="on purpose"):
        host.score_all(EXAMPLE, ["a", "bad", "def"], on_progress=lambda _: None)
    host.close()


def test_who_waits_when_it_is_closed_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echo.tasks.host.TICK_S", 0.01)
    host = Slow()

    def on_progress(number: int) -> None:
        host.close()

    with pytest.raises(RewardError, match="slow is being closed") as caught:
        host.score_all(EXAMPLE, ["a"] * 6, on_progress=on_progress)
    host.gate.set()
    assert caught.value.reason == "reward_lost"
