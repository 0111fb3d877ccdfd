from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from echo.tasks import scoring
from echo.tasks.scoring import MAX_STUCK_THREADS, RewardError, score
from echo.tasks.task import Example, Task

EXAMPLE = Example(index=3, split="train", prompt="?", source="rows.jsonl:4")


class Judge(Task):
    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def example(self, index: int, *, split: str) -> Example:
        return EXAMPLE

    def reward(self, example: Example, completion: str) -> float:
        return self.function()  # type: ignore[return-value]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that stuck reward functions wait for, and threads of this test's own."""
    monkeypatch.setattr(scoring, "_scorer", scoring._Scorer())
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(("value", "reward"), [(0.25, 0.25), (True, 1.0), (-3, -3.0)])
def test_a_finite_number_is_the_reward(value: object, reward: float) -> None:
    result = score(Judge(lambda: value), EXAMPLE, "", 10)
    assert (result, type(result)) == (reward, float)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1.0", [1], 10**400])
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(RewardError, match=r"Judge\.reward on rows\.jsonl:4 returned .*finite"):
        score(Judge(lambda: value), EXAMPLE, "", 10)


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, TimeoutError, RewardError])
def test_what_it_raises_is_reported_with_its_cause(kind: type[BaseException]) -> None:
    def fail() -> float:
        raise kind("on purpose")

    with pytest.raises(RewardError, match=rf"rows\.jsonl:4 raised {kind.__name__}: on purp") as e:
        score(Judge(fail), EXAMPLE, "", 10)
    assert isinstance(e.value.__cause__, kind)


def test_a_call_that_hangs_is_abandoned_and_the_next_one_works(gate: threading.Event) -> None:
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"did not return within 0\.02 s.*reward_timeout_s"):
        score(Judge(gate.wait), EXAMPLE, "", 0.02)
    assert time.monotonic() - started < 5
    assert score(Judge(lambda: 1), EXAMPLE, "", 10) == 1.0


def test_the_number_of_stuck_calls_is_bounded_and_recovers(gate: threading.Event) -> None:
    for _ in range(MAX_STUCK_THREADS):
        with pytest.raises(RewardError, match="did not return"):
            score(Judge(gate.wait), EXAMPLE, "", 0.001)
    with pytest.raises(RewardError, match="8 calls of reward functions never returned"):
        score(Judge(lambda: 1), EXAMPLE, "", 10)
    stuck = list(scoring._scorer._stuck)
    gate.set()
    for thread in stuck:
        thread.join(10)
    assert score(Judge(lambda: 1), EXAMPLE, "", 10) == 1.0


def test_threads_are_used_again(gate: threading.Event) -> None:
    idents: set[int] = set()
    for _ in range(20):
        score(Judge(lambda: idents.add(threading.get_ident()) or 1), EXAMPLE, "", 10)
    assert len(idents) == 1
    assert threading.get_ident() not in idents
