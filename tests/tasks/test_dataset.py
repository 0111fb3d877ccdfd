from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from echo.errors import ConfigError, DataError
from echo.tasks.dataset import DatasetTask
from echo.tasks.task import Example, load_task, task_digests

FUNCTIONS = """
def all_columns(prompt, completion, **row):
    return f"{prompt}|{completion}|{sorted(row.items())}"

def by_name(completion, answer, level, bonus=7):
    return (completion, answer, level, bonus)

def whole(prompt, completion, answer):
    return float(completion == answer)

async def later(prompt, completion, answer):
    return 0.5

def trl(prompts, completions, answer, **columns):
    return [(prompts, completions, answer, columns)]

def neither(text):
    return 0.0
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    search = list(sys.path)
    yield path
    sys.path[:] = search
    sys.modules.pop("echo_user_rewards", None)


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def judge(tmp_path: Path, function: str, row: dict[str, Any], completion: str = "c") -> Any:
    """What a function says of the first row, read as a learner reads it and sent to a worker."""
    path = write(tmp_path / "rows.jsonl", row)
    task = DatasetTask(path=path, heldout_path=path, reward=f"rewards.py:{function}")
    example = task.example(0, split="train")
    sent = Example(**json.loads(json.dumps(asdict(example))))
    return DatasetTask(reward=f"rewards.py:{function}").reward(sent, completion)


ROW = {"prompt": "p", "answer": "a", "info": {"x": 1}, "level": 3}


def test_a_function_gets_prompt_completion_and_the_whole_row(tmp_path: Path) -> None:
    expected = "p|c|[('answer', 'a'), ('info', {'x': 1}), ('level', 3)]"
    assert judge(tmp_path, "all_columns", ROW) == expected


def test_a_function_gets_the_columns_that_it_names(tmp_path: Path) -> None:
    assert judge(tmp_path, "by_name", ROW) == ("c", "a", 3, 7)


def test_a_coroutine_function_is_awaited(tmp_path: Path) -> None:
    assert judge(tmp_path, "later", ROW) == 0.5


def test_a_function_for_trl_gets_lists(tmp_path: Path) -> None:
    columns = {"info": [{"x": 1}], "level": [3]}
    assert judge(tmp_path, "trl", ROW) == (["p"], ["c"], ["a"], columns)
    chat = [{"role": "user", "content": "p"}]
    answer = [{"role": "assistant", "content": "c"}]
    result = judge(tmp_path, "trl", {"messages": chat, "answer": "a"})
    assert result[:3] == ([chat], [answer], ["a"])


def test_columns_of_other_names_are_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"question": "q", "solution": "42", "level": 1})
    task = DatasetTask(path=path, columns={"prompt": "question", "answer": "solution"})
    example = task.example(0, split="train" if task.num_examples(split="train") else "heldout")
    assert (example.prompt, example.answer, example.columns) == ("q", "42", {"level": 1})


@pytest.mark.parametrize(
    ("reward", "answer", "right", "wrong"),
    [
        ("exact", "Paris", " Paris\n", "Paris!"),
        ("exact", 42, "42", "42.0"),
        ("math", "0.5", r"so it is \boxed{\frac{1}{2}}", r"so it is \boxed{\frac{1}{3}}"),
        ("math", "1,200", "That makes $1200.", "That makes $120."),
    ],
)
def test_the_built_in_rewards(reward: str, answer: Any, right: str, wrong: str) -> None:
    if reward == "math":
        pytest.importorskip("math_verify")
    task = load_task("dataset", {"reward": reward})
    example = Example(index=0, split="train", prompt="?", answer=answer)
    assert [task.reward(example, text) for text in (right, wrong)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"reward": "rewards.py:neither"}, ConfigError, r"takes text; .*reward\(prompt, completio"),
        ({"reward": "rewards.py:hole"}, ConfigError, "no function 'hole'; did you mean 'whole'"),
        ({"columns": {"promt": "q"}}, ConfigError, "promt: no such column is read; did you mean"),
        ({"reward": "exact"}, DataError, r"rows\.jsonl:1: .*needs the column `answer`; it has pro"),
        ({"reward": "rewards.py:by_name"}, DataError, r"rows\.jsonl:1: .*needs the columns level"),
        ({"columns": {"prompt": "q"}}, DataError, r"rows\.jsonl:1: .*needs `q`.*columns prompt"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "p"})
    with pytest.raises(kind, match=message):
        DatasetTask(path=path, **options).example(0, split="train")


def test_the_digest_follows_the_functions_file(functions: Path) -> None:
    options = {"reward": "rewards.py:whole"}
    before = task_digests(load_task("dataset", options))
    functions.write_text(FUNCTIONS + "# another\n", encoding="utf-8")
    assert task_digests(load_task("dataset", options))["task_source"] != before["task_source"]
