from __future__ import annotations

import random

import pytest

from echo.tasks.builtin import CountdownTask, evaluate
from echo.tasks.task import Example


def example_of(prompt: str) -> Example:
    return Example(index=0, split="train", prompt=prompt, answer=CountdownTask().answer(prompt))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("2*(2+8)", 1.0),
        ("(8+2)*2", 1.0),
        ("2*(2+8", 0.0),
        ("2*2+8", 0.0),  # another value
        ("20", 0.0),  # other digits
        ("22-8+6", 0.0),
        ("2*(2+8)+0", 0.0),
        ("(2)*((2+8))", 1.0),
        ("2*(+2+8)", 0.0),
        ("2**2+8+8", 0.0),
        ("2*(2+8)#", 0.0),
        ("__import__('os')", 0.0),
        ("(" * 100_000, 0.0),
        ("9" * 60, 0.0),
        ("", 0.0),
    ],
)
def test_rewards(completion: str, reward: float) -> None:
    assert CountdownTask().reward(example_of("228>20="), completion) == reward


def test_digits_may_not_be_joined_into_one_number() -> None:
    assert evaluate("22-8") == (14, [22, 8])
    assert CountdownTask().reward(example_of("228>14="), "22-8") == 0.0


def test_every_demonstration_is_right() -> None:
    task, rng = CountdownTask(), random.Random(1)
    for _ in range(500):
        prompt, completion = task.demonstration(rng)
        assert task.reward(example_of(prompt), completion) == 1.0


@pytest.mark.parametrize("expression", ["-1", "1/1", "1 + 1", "02+1", "1<2", "f(1)", "1.0", "()"])
def test_other_syntax_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        evaluate(expression)
