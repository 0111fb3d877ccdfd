from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo.errors import ConfigError
from echo.tasks.addition import AdditionTask
from echo.tasks.loading import BUILT_IN, load_task, task_digests
from echo.tasks.rows import RowsTask
from echo.tasks.task import Example, Task

OWN_TASK = """
from echo.tasks.task import Example, Task

class Parrot(Task):
    def __init__(self, *, phrase: str = "hello", num_times: int = 1) -> None:
        if num_times < 1:
            raise ValueError(f"num_times is {num_times}, must be at least 1")
        self.phrase = phrase * num_times

    def example(self, index, *, split):
        return Example(index=index, split=split, prompt=self.phrase, answer=self.phrase)

    def reward(self, example, completion):
        return float(completion == example.answer)

class Unfinished(Task):
    def reward(self, example, completion):
        return 0.0

NOT_A_TASK = 3
"""


@pytest.fixture
def user_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with the user's own my_tasks.py; imports are undone afterwards."""
    modules, path = set(sys.modules), list(sys.path)
    (tmp_path / "my_tasks.py").write_text(OWN_TASK, encoding="utf-8")
    (tmp_path / "broken_tasks.py").write_text("import no_such_thing\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


NEEDED = {"mixture": {"tasks": [{"kind": "addition"}]}, "verifiers": {"env": "my_env"}}


@pytest.mark.parametrize("kind", BUILT_IN)
def test_built_in_tasks_load_by_name(kind: str) -> None:
    assert isinstance(load_task(kind, NEEDED.get(kind, {})), Task)


def test_a_users_own_file_loads_with_options(user_directory: Path) -> None:
    task = load_task("my_tasks:Parrot", {"phrase": "ab", "num_times": 2})
    example = task.example(4, split="heldout")
    assert (example.prompt, task.reward(example, "abab")) == ("abab", 1.0)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("additon", {}, r"'additon' is unknown; did you mean 'addition'\?.*package\.module:Class"),
        ("my_task:Parrot", {}, r"no module 'my_task' in .*did you mean 'my_tasks'\?"),
        ("my_tasks.sub:Parrot", {}, r"importing 'my_tasks\.sub' failed|no module"),
        ("my_tasks:Parot", {}, r"has no 'Parot'; did you mean 'Parrot'\?.*Parrot, Unfinished"),
        ("my_tasks:NOT_A_TASK", {}, "not a subclass of echo.tasks.task.Task"),
        ("my_tasks:Unfinished", {}, "Unfinished does not define example"),
        ("my_tasks:Parrot", {"phrse": "x"}, r"phrse: .*did you mean 'phrase'\?.*phrase, num_times"),
        ("my_tasks:Parrot", {"num_times": 0}, "num_times is 0, must be at least 1"),
        ("addition", {"digits": 3}, "no such option; it takes none"),
        ("broken_tasks:X", {}, "importing 'broken_tasks' failed: ModuleNotFoundError.*no_such"),
    ],
)
def test_what_cannot_be_loaded_is_explained(
    user_directory: Path, kind: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(kind, options)


def test_the_source_digest_covers_the_whole_file(user_directory: Path) -> None:
    before = task_digests(load_task("my_tasks:Parrot", {}))
    assert before == task_digests(load_task("my_tasks:Parrot", {"phrase": "other options"}))
    assert before["dataset"] == ""
    (user_directory / "my_tasks.py").write_text(OWN_TASK + "\n# a helper\n", encoding="utf-8")
    assert task_digests(load_task("my_tasks:Parrot", {}))["task_source"] != before["task_source"]


def test_the_digest_of_a_built_in_task_is_stable() -> None:
    assert task_digests(AdditionTask()) == task_digests(load_task("addition", {}))


class Lines(RowsTask):
    def reward(self, example: Example, completion: str) -> float:
        return 0.0


def test_the_dataset_digest_follows_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8")
    first = task_digests(Lines(path=str(path)))["dataset"]
    assert len(first) == 64
    path.write_text('{"prompt": "b"}\n', encoding="utf-8")
    assert task_digests(Lines(path=str(path)))["dataset"] != first
    assert task_digests(Lines(path=str(tmp_path / "absent")))["dataset"] == ""
