"""Mixtures of tasks."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from echo.core.errors import ConfigError
from echo.tasks.environment import Environment
from echo.tasks.mixture import CYCLE, MixtureTask, spread
from echo.tasks.task import load_task, task_digests
from tests.tasks.rows import numbered, write_jsonl

HERE = "tests.tasks.pool_tasks"


def dataset(directory: Path, num_rows: int) -> dict[str, Any]:
    path = write_jsonl(directory / "a.jsonl", numbered(num_rows))
    return {"kind": "dataset", "options": {"path": path, "heldout_path": path}}


def make(*tables: dict[str, Any]) -> MixtureTask:
    task = load_task("mixture", {"tasks": list(tables)})
    assert isinstance(task, MixtureTask)
    return task


@pytest.mark.parametrize("shares", [[1.0], [0.5, 0.5], [0.75, 0.2, 0.05], [0.999, 0.001]])
def test_every_stretch_is_mixed_as_the_weights_say(shares: list[float]) -> None:
    parts = [part for part, _ in spread(shares)]
    for length in (1, 7, 50, 333, CYCLE):
        counts = Counter(parts[:length])
        assert all(abs(counts[k] - share * length) <= 1 for k, share in enumerate(shares))
    assert spread(shares)[-1][1] == Counter(parts)[parts[-1]] - 1


def test_examples_go_to_their_own_task(tmp_path: Path) -> None:
    task = make({"kind": "addition", "weight": 3}, dataset(tmp_path, 4))
    examples = [task.example(index, split="train") for index in range(40)]
    assert [example.index for example in examples] == list(range(40))
    assert Counter(example.task for example in examples) == {"addition": 30, "dataset": 10}
    for example in examples:
        right = f"1+1>{example.answer}" if example.task == "addition" else example.answer
        assert task.reward(example, right) == 1.0
        assert task.reward(example, "?") == 0.0
    assert examples == [task.example(index, split="train") for index in range(40)]


def test_a_dataset_is_visited_whole_before_it_is_visited_again(tmp_path: Path) -> None:
    task = make({"kind": "addition"}, dataset(tmp_path, 7))
    examples = (task.example(index, split="train") for index in range(2 * CYCLE))
    prompts = [example.prompt for example in examples if example.task == "dataset"]
    assert len(prompts) == CYCLE
    epochs = [tuple(prompts[start : start + 7]) for start in range(0, 7 * 100, 7)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert len(set(epochs)) > 50, "in another order each time"


def test_tasks_of_one_and_of_several_turns(tmp_path: Path) -> None:
    task = make({"kind": f"{HERE}:Counting"}, dataset(tmp_path, 4))
    assert (task.has_turns, task.is_bounded) == (True, False)
    examples = {
        example.task: example for example in (task.example(i, split="train") for i in (0, 1))
    }
    answer = str(examples["dataset"].answer)
    for name, texts, said in (
        ("Counting", ["1", "2", "3"], ["go on", "go on", None]),
        ("dataset", [answer], [None]),
    ):
        state = task.begin(examples[name])
        assert [task.reply(state, text) for text in texts] == said
        assert task.outcome(state) == 1.0
        task.end(state)


def test_tasks_of_one_turn_make_a_task_of_one_turn_and_all_are_in_the_digest() -> None:
    two, one = make({"kind": "addition"}, {"kind": "countdown"}), make({"kind": "addition"})
    assert isinstance(two, Environment)
    assert (two.has_turns, two.is_bounded) == (False, True)
    assert task_digests(one)["task_source"] != task_digests(two)["task_source"]


ADDITION: dict[str, Any] = {"kind": "addition"}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], r"needs tables \[\[task\.options\.tasks\]\]"),
        ([{**ADDITION, "wieght": 2}], r"tasks\[0\]\.wieght: .*did you mean 'weight'"),
        ([{**ADDITION, "weight": 0}], r"tasks\[0\]\.weight = 0: must be a finite number"),
        ([{**ADDITION, "weight": math.inf}], r"weight = inf: must be a finite number"),
        (
            [{**ADDITION, "weight": 5000}, {"kind": "countdown"}],
            r"tasks\[1\]\.weight = 1: fewer than one example in 1000.*leave the task out",
        ),
        (
            [{"kind": "mixture", "options": {"tasks": [ADDITION]}}],
            r"tasks\[0\]: a mixture in a mixture; list its tasks here",
        ),
        ([{"weight": 2}], r"tasks\[0\]: needs a `kind`"),
        ([ADDITION] * 2, r"tasks\[1\]: two tasks are called 'addition'; give them a"),
        ([{"kind": "additon"}], "did you mean 'addition'"),
    ],
)
def test_what_does_not_fit_is_named(tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task("mixture", {"tasks": tables})
