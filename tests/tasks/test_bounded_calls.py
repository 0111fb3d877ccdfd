from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator

import pytest

from echo.tasks.bounded_calls import MAX_STUCK_THREADS, BoundedCalls
from echo.tasks.faults import RewardError
from echo.tasks.host import InlineHost, Limits
from echo.tasks.task import Example, Task

EXAMPLE = Example(index=3, split="train", prompt="?", source="rows.jsonl:4")


class Judge(Task):
    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def example(self, index: int, *, split: str) -> Example:
        return EXAMPLE

    def reward(self, example: Example, completion: str) -> float:
        return self.function()  # type: ignore[return-value]


CALLS: list[BoundedCalls] = []
"""Those of the test that runs."""


@pytest.fixture(autouse=True)
def gate() -> Iterator[threading.Event]:
    """An event that stuck reward functions wait for, and threads of this test's own."""
    CALLS[:] = [BoundedCalls()]
    event = threading.Event()
    yield event
    event.set()


def score(task: Task, example: Example, completion: str, timeout_s: float) -> float:
    host = InlineHost(task, Limits(score_s=timeout_s, step_s=60), calls=CALLS[0])
    return host.score(example, completion)


@pytest.mark.parametrize(("value", "reward"), [(0.25, 0.25), (True, 1.0), (-3, -3.0)])
def test_a_finite_number_is_the_reward(value: object, reward: float) -> None:
    result = score(Judge(lambda: value), EXAMPLE, "", 60)
    assert (result, type(result)) == (reward, float)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1.0", [1], 10**400])
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(RewardError, match=r"Judge\.reward on rows\.jsonl:4 returned .*finite"):
        score(Judge(lambda: value), EXAMPLE, "", 60)


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, TimeoutError, RewardError])
def test_what_it_raises_is_reported_with_its_cause(kind: type[BaseException]) -> None:
    def fail() -> float:
        raise kind("on purpose")

    what = rf"rows\.jsonl:4 raised {kind.__name__}: on purpose \(test_bounded_calls\.py:\d+\)"
    with pytest.raises(RewardError, match=what) as caught:
        score(Judge(fail), EXAMPLE, "", 60)
    assert caught.value.reason == ("reward_retries" if kind is TimeoutError else "reward_error")


def test_a_call_that_hangs_is_abandoned_and_the_next_one_works(gate: threading.Event) -> None:
    with pytest.raises(RewardError, match=r"did not return within 0\.02 s.*reward_timeout_s"):
        score(Judge(gate.wait), EXAMPLE, "", 0.02)
    assert score(Judge(lambda: 1), EXAMPLE, "", 60) == 1.0


def test_the_number_of_stuck_calls_is_bounded_and_recovers(gate: threading.Event) -> None:
    for _ in range(MAX_STUCK_THREADS):
        with pytest.raises(RewardError, match="did not return"):
            score(Judge(gate.wait), EXAMPLE, "", 0.001)
    with pytest.raises(RewardError, match="8 calls of reward functions never returned"):
        score(Judge(lambda: 1), EXAMPLE, "", 60)
    stuck = list(CALLS[0]._stuck)
    gate.set()
    for thread in stuck:
        thread.join(120)
    assert score(Judge(lambda: 1), EXAMPLE, "", 60) == 1.0


def test_threads_end_with_what_they_were_made_for() -> None:
    threads: list[threading.Thread] = []
    task = Judge(lambda: threads.append(threading.current_thread()) or 1)
    host = InlineHost(task, Limits(score_s=60, step_s=60))
    assert host.score(EXAMPLE, "") == 1.0
    assert threads[0].is_alive()
    del host
    gc.collect()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_threads_are_used_again(gate: threading.Event) -> None:
    idents: set[int] = set()
    for _ in range(20):
        score(Judge(lambda: idents.add(threading.get_ident()) or 1), EXAMPLE, "", 60)
    assert len(idents) == 1
    assert threading.get_ident() not in idents
