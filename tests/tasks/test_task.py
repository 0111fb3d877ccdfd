"""A task: found, built and compared by its name; its examples and its splits."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from echo.core.errors import ConfigError
from echo.tasks.builtin import AdditionTask, CountdownTask
from echo.tasks.dataset import RowsTask
from echo.tasks.task import (
    BUILT_IN_TASKS,
    Example,
    GeneratedTask,
    Task,
    check_code,
    code_of,
    find_code,
    import_module,
    is_heldout,
    load_function,
    load_task,
    task_digests,
)

# --- tasks ----------------------------------------------------------------------------------------


MIXED = [{"name": "sums", "kind": "addition"}, {"name": "targets", "kind": "countdown"}]


@pytest.mark.parametrize(
    "task",
    [
        *(load_task(kind, {}) for kind in ("addition", "countdown", "word_problems")),
        load_task("mixture", {"tasks": MIXED}),
    ],
    ids=lambda task: type(task).__name__,
)
def test_what_a_built_in_task_calls_right_earns_the_reward(task: Task) -> None:
    for index in range(50):
        example = task.example(index, split="train")
        right = task.right_completion(example)
        assert right is not None
        assert task.reward(example, right) == 1


def test_an_answer_that_is_a_text_or_number_is_a_right_completion_by_default() -> None:
    task = load_task("dataset", {})
    answers: list[Any] = ["a", 5, None, ["a"]]
    given = [Example(index=0, split="train", prompt="", answer=each) for each in answers]
    found = [task.right_completion(example) for example in given]
    assert found == ["a", "5", None, None]


@pytest.mark.parametrize("make", [AdditionTask, CountdownTask])
def test_generated_examples_are_deterministic_and_in_one_split(make: type[GeneratedTask]) -> None:
    first, second, rng = make(), make(), random.Random(0)
    for split in ("train", "heldout"):
        for index in (*range(150), 10**9):
            example = first.example(index, split=split)
            assert example == second.example(index, split=split)
            assert Example(**json.loads(json.dumps(asdict(example)))) == example
            assert is_heldout(str(example.prompt)) == (split == "heldout")
    for _ in range(300):
        prompt, completion = first.demonstration(rng)
        assert not is_heldout(prompt)
        assert len(completion) + 1 <= first.max_completion_tokens


def test_an_example_names_where_it_came_from() -> None:
    assert str(Example(index=3, split="train", prompt="x")) == "train example 3"
    assert str(Example(index=3, split="train", prompt="x", source="a.jsonl:9")) == "a.jsonl:9"
    for index, split in ((-1, "train"), (0, "test")):
        with pytest.raises(ValueError, match="train, heldout"):
            Example(index=index, split=split, prompt="1+1=")


# --- a task by its name ---------------------------------------------------------------------------


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


REWARDS = """
import dataclasses

@dataclasses.dataclass
class Weight:
    value: "float" = 2.0

def correct(prompt, completion, answer):
    return Weight().value

LIMIT = 3
"""


@pytest.fixture
def user_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with the user's own modules; imports are undone afterwards."""
    modules, path = set(sys.modules), list(sys.path)
    (tmp_path / "my_tasks.py").write_text(OWN_TASK, encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    (tmp_path / "broken_tasks.py").write_text("import no_such_thing\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


NEEDED: dict[str, dict[str, Any]] = {
    "mixture": {"tasks": [{"kind": "addition"}]},
    "verifiers": {"env": "my_env"},
}


@pytest.mark.parametrize("kind", BUILT_IN_TASKS)
def test_built_in_tasks_load_by_name(kind: str) -> None:
    assert isinstance(load_task(kind, NEEDED.get(kind, {})), Task)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("additon", {}, r"'additon' is unknown \(did you mean 'addition'\?\).*package\.module:Cla"),
        ("mytasks:Parrot", {}, r"no module 'mytasks' in .*did you mean 'my_tasks'\?"),
        ("my_tasks.sub:Parrot", {}, r"importing 'my_tasks\.sub' failed|no module"),
        ("my_tasks:Parot", {}, r"has no 'Parot' \(did you mean 'Parrot'\?.*Parrot, Unfinished"),
        ("my_tasks:NOT_A_TASK", {}, "not a subclass of echo.tasks.task.Task"),
        ("my_tasks:Unfinished", {}, "Unfinished does not define example"),
        ("my_tasks:Parrot", {"phrse": "x"}, r"phrse: .*did you mean 'phrase'\?.*phrase, num_times"),
        ("my_tasks:Parrot", {"num_times": 0}, "num_times is 0, must be at least 1"),
        ("addition", {"digits": 3}, "no such option; it takes none"),
        ("broken_tasks:X", {}, "importing 'broken_tasks' failed: ModuleNotFoundError.*no_such"),
    ],
)
@pytest.mark.usefixtures("user_directory")
def test_what_cannot_be_loaded_is_explained(
    kind: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(kind, options)


def test_a_users_own_file_loads_with_options_and_its_digest_covers_the_whole_file(
    user_directory: Path,
) -> None:
    task = load_task("my_tasks:Parrot", {"phrase": "ab", "num_times": 2})
    example = task.example(4, split="heldout")
    assert (example.prompt, task.reward(example, "abab")) == ("abab", 1.0)
    before = task_digests(task)
    assert before == task_digests(load_task("my_tasks:Parrot", {}))
    assert before["dataset"] == ""
    (user_directory / "my_tasks.py").write_text(OWN_TASK + "\n# a helper\n", encoding="utf-8")
    assert task_digests(load_task("my_tasks:Parrot", {}))["task_source"] != before["task_source"]


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


# --- code that settings name ----------------------------------------------------------------------

RUNS = "from pathlib import Path\nPath('was_run').touch()\n"


VERIFIERS = {"kind": "verifiers", "options": {"env": "x"}}


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("addition", {"digits": 3, "note": "see hf://openai/gsm8k: it is long"}, []),
        ("my_tasks:Parrot", {"phrase": "my_tasks"}, ["my_tasks"]),
        ("dataset", {"path": "a.jsonl", "reward": "own/rewards.py:right"}, ["own/rewards.py"]),
        ("verifiers", {"env": "someone/my-env", "args": {}}, ["my_env"]),
        ("mixture", {"tasks": [{"kind": "my_tasks:Parrot"}, VERIFIERS]}, ["my_tasks", "x"]),
    ],
)
def test_code_is_found_wherever_settings_name_it(
    kind: str, options: dict[str, Any], names: list[str], user_directory: Path
) -> None:
    for name in names:
        path = user_directory / (name if name.endswith(".py") else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(RUNS)
    found = code_of(kind, options)
    assert list(found) == names
    check_code(kind, options, found, inherited_dir=user_directory / "inherited")
    assert not (user_directory / "was_run").exists()


def test_packages_around_a_module_count_and_pythons_own_library_does_not(
    user_directory: Path,
) -> None:
    package = user_directory / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text(RUNS)
    options = {"reward": "package.rewards:right", "other": "json.decoder:JSONDecoder"}
    before = code_of("dataset", options)
    assert list(before) == ["package.rewards"]
    (package / "__init__.py").write_text(RUNS)
    assert code_of("dataset", options) != before
    (package / "__init__.py").write_bytes(b"\r\n")
    (package / "rewards.py").write_text(RUNS.replace("\n", "\r\n"), newline="")
    windows = code_of("dataset", options)
    (package / "__init__.py").write_bytes(b"\n")
    (package / "rewards.py").write_text(RUNS)
    assert code_of("dataset", options) == windows, "line ends do not count"
    assert not (user_directory / "was_run").exists()


@pytest.mark.parametrize(
    ("name", "learners", "place"),
    [
        ("absent.py", "/home/them/absent.py", "absent.py"),
        ("absent", "/home/them/absent.py", "absent.py"),
        ("~nobody-here/a.py", "/home/nobody-here/a.py", "~nobody-here/a.py"),
        ("deep.absent", "/home/them/deep/absent/__init__.py", "deep/absent/__init__.py"),
    ],
)
def test_code_that_is_missing_is_named_with_where_from_and_where_to(
    name: str, learners: str, place: str, user_directory: Path
) -> None:
    theirs = {name: {"hash": "a" * 64, "path": learners}}
    text = f"copy {learners} from the learner's machine to {user_directory / place}"
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_code("dataset", {"reward": f"{name}:right"}, theirs, inherited_dir=user_directory)


def test_other_code_than_the_learners_is_not_run(user_directory: Path) -> None:
    (user_directory / "rewards.py").write_text(RUNS)
    options, elsewhere = {"reward": "rewards.py:right"}, user_directory / "inherited"
    theirs = {"rewards.py": {"hash": "a" * 64, "path": "/home/them/rewards.py"}}
    for learners in (theirs, {}):
        with pytest.raises(ConfigError, match=r"another one than the learner's.*was not run"):
            check_code("dataset", options, learners, inherited_dir=elsewhere)
    inherited = code_of("dataset", options)
    with pytest.raises(ConfigError, match="among files that came over the network"):
        check_code("dataset", options, inherited, inherited_dir=user_directory)
    assert not (user_directory / "was_run").exists()


# --- code by its name -----------------------------------------------------------------------------


def test_a_function_is_found_by_module_and_by_file_which_is_run_once(user_directory: Path) -> None:
    specs = (
        "my_rewards:correct",
        "my_rewards.py:correct",
        f"{user_directory}/my_rewards.py:correct",
    )
    functions = [load_function("reward", spec) for spec in specs]
    assert [function("", "", "") for function in functions] == [2.0] * 3
    assert functions[1] is functions[2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "correct",
            r"x: name what a Python file defines, as 'package\.module:function' or 'path/t",
        ),
        ("lambda completion: 1.0", "an expression, a method or a cell of a notebook gets a name"),
        ("rewards.ipynb:f", r"a notebook gets a name in a \.py file first"),
        ("my_rewards.py::correct", "name what a Python file defines"),
        ("./my_rewards:correct", "name what a Python file defines"),
        ("my_rewards.py:Judge.method", "a method"),
        ("my_rewards.py:corect", r"no function 'corect' \(did you mean 'correct'\?.*correct"),
        ("my_rewards.py:LIMIT", "no function 'LIMIT'"),
        ("my_reward:correct", r"no module 'my_reward' in .*did you mean 'my_rewards'\?"),
        ("absent.py:correct", r"no file 'absent\.py' in "),
        ("~nobody-here/a.py:correct", r"x: no file '~nobody-here/a\.py' in "),
        ("broken.py:correct", "importing 'broken.py' failed: ZeroDivisionError"),
    ],
)
@pytest.mark.usefixtures("user_directory")
def test_what_cannot_be_found_is_explained(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_function("x", spec)


@pytest.mark.parametrize("is_listed", [False, True])
def test_code_is_found_where_it_would_be_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    for directory in (here, other):
        directory.mkdir()
        (directory / "found_twice.py").write_text("")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(other), *([str(here)] if is_listed else []), *sys.path])
    monkeypatch.delitem(sys.modules, "found_twice", raising=False)
    found = find_code("found_twice")
    assert found == [(other if is_listed else here) / "found_twice.py"]
    assert "found_twice" not in sys.modules
    module = import_module("task.kind", "found_twice")
    assert [Path(str(module.__file__))] == found
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert find_code("found_twice") == found, "what is imported already is what runs"
    monkeypatch.delitem(sys.modules, "found_twice")


def test_code_in_directories_that_are_no_packages_is_found_without_importing_them(
    user_directory: Path,
) -> None:
    path = user_directory / "outer" / "inner" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(RUNS)
    assert find_code("outer.inner.module") == [path]
    assert not {"outer", "outer.inner"} & {*sys.modules}


@pytest.mark.parametrize(
    "name", ["no_such_module", "no.such.module", "absent.py", "~nobody-here/a.py", "sys", "json"]
)
def test_what_is_not_here_or_pythons_own_has_no_files(name: str) -> None:
    assert find_code(name) == []
