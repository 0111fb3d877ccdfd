from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.tasks.addition import AdditionTask, add_in_columns
from echo.tasks.task import Example


def example_of(prompt: str) -> Example:
    return Example(index=0, split="train", prompt=prompt, answer=AdditionTask().answer(prompt))


def test_columns_are_written_units_first_with_the_carry() -> None:
    assert add_in_columns("478", "365", is_forgetful=False) == "8+5=137+6=144+3=08>0843"
    assert add_in_columns("478", "365", is_forgetful=True) == "8+5=137+6=134+3=07>0733"


@pytest.mark.slow
@given(st.integers(0, 999), st.integers(0, 999))
def test_who_carries_is_right(left: int, right: int) -> None:
    completion = add_in_columns(f"{left:03d}", f"{right:03d}", is_forgetful=False)
    example = example_of(f"{left:03d}+{right:03d}=")
    assert AdditionTask().reward(example, completion) == 1.0
    assert int(completion.split(">")[1]) == left + right


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (">0843", 1.0),  # the scratchpad is not judged
        ("nonsense>0843", 1.0),
        ("0843", 0.0),
        (">843", 0.0),
        (">0843 ", 0.0),
        (">0843>0843", 0.0),
        (">0843>", 0.0),
        (">0733", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_text_after_the_only_marker_counts(completion: str, reward: float) -> None:
    assert AdditionTask().reward(example_of("478+365="), completion) == reward


def test_about_47_percent_of_the_demonstrations_are_right() -> None:
    task, rng = AdditionTask(), random.Random(0)
    demonstrations = [task.demonstration(rng) for _ in range(4000)]
    rewards = [task.reward(example_of(prompt), text) for prompt, text in demonstrations]
    assert sum(rewards) / len(rewards) == pytest.approx(0.474, abs=0.03)
