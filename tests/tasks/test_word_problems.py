"""Word problems are true, split by text, and judged by their last number."""

from __future__ import annotations

import operator
import random
import re

import pytest

from echo.tasks.task import Example, load_task
from echo.tasks.word_problems import (
    INSTRUCTION,
    STORIES,
    WordProblemTask,
    draw_numbers,
    draw_problem,
)

CALCULATE = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


@pytest.mark.parametrize("operation", STORIES)
def test_every_answer_is_the_result_of_its_numbers(operation: str) -> None:
    rng = random.Random(0)
    for _ in range(200):
        a, b, answer = draw_numbers(operation, rng)
        assert CALCULATE[operation](a, b) == answer
        assert answer * b == a or operation != "/"
        assert answer > 1
        assert max(a, b, answer) < 100


@pytest.mark.parametrize("operation", STORIES)
def test_every_story_tells_both_numbers_once_and_asks(operation: str) -> None:
    for story in STORIES[operation]:
        assert (story.count("{a}"), story.count("{b}")) == (1, 1), story
        assert story.endswith("?"), story
        assert set(re.findall(r"{(\w+)}", story)) <= {"a", "b", "name", "other", "things", "places"}


def test_all_stories_are_told() -> None:
    rng = random.Random(0)
    told = {draw_problem(rng)[0] for _ in range(2000)}
    assert len(told) > 1900, "they differ"
    for story in (story for stories in STORIES.values() for story in stories):
        pattern = re.sub(r"\\{\w+\\}", r"\\w+", re.escape(story))
        assert any(re.match(pattern, text) for text in told), story
    assert all(text.endswith(f"? {INSTRUCTION}") for text in told)


def test_no_problem_is_on_both_sides_and_each_is_drawn_again() -> None:
    task = load_task("word_problems", {})
    sides = [
        {str(task.example(index, split=split).prompt) for index in range(500)}
        for split in ("train", "heldout")
    ]
    assert not sides[0] & sides[1]
    assert task.example(7, split="train") == WordProblemTask().example(7, split="train")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("21", 1.0),
        ("Ava has 12 + 9 = 21 shells.", 1.0),
        ("It is **21**.", 1.0),
        ("21.0 dollars", 1.0),
        ("The answer is 21, I am sure", 1.0),
        ("12+9=21", 1.0),
        ("$21", 1.0),
        ("Ava has 21 shells, which is 9 more.", 0.0),  # the last number counts
        ("12 - 9 = 3", 0.0),
        ("-21", 0.0),
        ("2,1", 0.0),
        ("210", 0.0),
        ("0.21", 0.0),
        ("121", 0.0),
        ("21.5", 0.0),
        ("twenty-one", 0.0),
        ("", 0.0),
        ("9" * 5000, 0.0),
    ],
)
def test_the_last_number_is_judged(completion: str, reward: float) -> None:
    example = Example(index=0, split="train", prompt="?", answer=21)
    assert WordProblemTask().reward(example, completion) == reward


def test_thousands_may_have_commas() -> None:
    example = Example(index=0, split="train", prompt="?", answer=1200)
    for completion in ("1,200", "1200", "= 1,200.00"):
        assert WordProblemTask().reward(example, completion) == 1.0
