from __future__ import annotations

import json
import random

import pytest

from echo.tasks.builtin import AdditionTask, CountdownTask
from echo.tasks.task import Example, GeneratedTask, is_heldout

TASKS = [AdditionTask, CountdownTask]


@pytest.mark.parametrize("make", TASKS)
def test_examples_are_deterministic_and_survive_json(make: type[GeneratedTask]) -> None:
    first, second = make(), make()
    for split in ("train", "heldout"):
        for index in (0, 7, 10**9):
            example = first.example(index, split=split)
            assert example == second.example(index, split=split)
            fields = {name: getattr(example, name) for name in Example.__slots__}
            assert Example(**json.loads(json.dumps(fields))) == example


@pytest.mark.parametrize("make", TASKS)
def test_no_prompt_is_in_both_splits(make: type[GeneratedTask]) -> None:
    task = make()
    for index in range(300):
        assert not is_heldout(str(task.example(index, split="train").prompt))
        assert is_heldout(str(task.example(index, split="heldout").prompt))


@pytest.mark.parametrize("make", TASKS)
def test_demonstrations_come_from_training_prompts_and_fit(make: type[GeneratedTask]) -> None:
    task, rng = make(), random.Random(0)
    for _ in range(300):
        prompt, completion = task.demonstration(rng)
        assert not is_heldout(prompt)
        assert len(completion) + 1 <= task.max_completion_tokens


def test_successive_examples_differ() -> None:
    task = AdditionTask()
    assert len({str(task.example(index, split="train").prompt) for index in range(200)}) > 195


@pytest.mark.parametrize(("index", "split"), [(-1, "train"), (0, "test")])
def test_an_impossible_example_is_refused(index: int, split: str) -> None:
    with pytest.raises(ValueError, match="train, heldout"):
        Example(index=index, split=split, prompt="1+1=")


def test_an_example_names_where_it_came_from() -> None:
    assert str(Example(index=3, split="train", prompt="x")) == "train example 3"
    assert str(Example(index=3, split="train", prompt="x", source="a.jsonl:9")) == "a.jsonl:9"
