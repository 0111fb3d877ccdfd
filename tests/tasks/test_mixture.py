from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from echo.errors import ConfigError
from echo.tasks.dataset import CYCLE, MixtureTask, spread
from echo.tasks.environment import Environment
from echo.tasks.task import load_task, task_digests

HERE = "tests.tasks.pool_tasks"


def dataset(path: Path, num_rows: int) -> dict[str, Any]:
    rows = [{"prompt": f"q{number}", "answer": f"a{number}"} for number in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "dataset", "options": {"path": str(path), "heldout_path": str(path)}}


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
    task = make({"kind": "addition", "weight": 3}, dataset(tmp_path / "a.jsonl", 4))
    examples = [task.example(index, split="train") for index in range(40)]
    assert [example.index for example in examples] == list(range(40))
    assert Counter(example.task for example in examples) == {"addition": 30, "dataset": 10}
    for example in examples:
        right = f"1+1>{example.answer}" if example.task == "addition" else example.answer
        assert task.reward(example, right) == 1.0
        assert task.reward(example, "?") == 0.0
    assert examples == [task.example(index, split="train") for index in range(40)]


def test_a_dataset_is_visited_whole_before_it_is_visited_again(tmp_path: Path) -> None:
    task = make({"kind": "addition"}, dataset(tmp_path / "a.jsonl", 7))
    prompts = [
        example.prompt
        for index in range(2 * CYCLE)
        if (example := task.example(index, split="train")).task == "dataset"
    ]
    assert len(prompts) == CYCLE
    epochs = [tuple(prompts[start : start + 7]) for start in range(0, 7 * 100, 7)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert len(set(epochs)) > 50, "in another order each time"


def test_tasks_of_one_and_of_several_turns(tmp_path: Path) -> None:
    task = make({"kind": f"{HERE}:Counting"}, dataset(tmp_path / "a.jsonl", 4))
    assert task.has_turns
    assert not task.is_bounded
    examples = {
        example.task: example for i in range(2) if (example := task.example(i, split="train"))
    }
    state = task.begin(examples["Counting"])
    assert [task.reply(state, text) for text in ("1", "2", "3")] == ["go on", "go on", None]
    assert task.outcome(state) == 1.0
    task.end(state)
    state = task.begin(examples["dataset"])
    assert task.reply(state, str(examples["dataset"].answer)) is None
    assert task.outcome(state) == 1.0
    task.end(state)


def test_tasks_of_one_turn_make_a_task_of_one_turn() -> None:
    task = make({"kind": "addition"}, {"kind": "countdown"})
    assert isinstance(task, Environment)
    assert not task.has_turns
    assert task.is_bounded


def test_the_digest_covers_every_task() -> None:
    one = task_digests(make({"kind": "addition"}))
    two = task_digests(make({"kind": "addition"}, {"kind": "countdown"}))
    assert one["task_source"] != two["task_source"]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], r"needs tables \[\[task\.options\.tasks\]\]"),
        ([{"kind": "addition", "wieght": 2}], r"tasks\[0\]\.wieght: .*did you mean 'weight'"),
        ([{"kind": "addition", "weight": 0}], r"tasks\[0\]\.weight = 0: must be a number above 0"),
        ([{"weight": 2}], r"tasks\[0\]: needs a `kind`"),
        ([{"kind": "addition"}] * 2, r"tasks\[1\]: two tasks are called 'addition'; give them a"),
        ([{"kind": "additon"}], "did you mean 'addition'"),
    ],
)
def test_what_does_not_fit_is_named(tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task("mixture", {"tasks": tables})
