from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo.errors import ConfigError
from echo.tasks.task import find_code, import_module, load_function

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
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS, encoding="utf-8")
    (tmp_path / "broken.py").write_text("1 / 0\n", encoding="utf-8")
    modules, search = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield path
    sys.path[:] = search
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.parametrize("spec", ["my_rewards:correct", "my_rewards.py:correct", "{path}:correct"])
def test_a_function_is_found_by_module_and_by_file(rewards: Path, spec: str) -> None:
    function = load_function("reward", spec.format(path=rewards))
    assert function("", "", "") == 2.0


def test_a_file_is_run_once(rewards: Path) -> None:
    first = load_function("reward", "my_rewards.py:correct")
    assert load_function("reward", str(rewards) + ":correct") is first


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("correct", r"x: name a function as 'package\.module:function' or 'path/to/file\.py"),
        ("my_rewards.py:corect", r"no function 'corect'; did you mean 'correct'\?.*correct"),
        ("my_rewards.py:LIMIT", "no function 'LIMIT'"),
        ("my_reward:correct", r"no module 'my_reward' in .*did you mean 'my_rewards'\?"),
        ("absent.py:correct", r"no file 'absent\.py' in "),
        ("broken.py:correct", "importing 'broken.py' failed: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_found_is_explained(rewards: Path, spec: str, message: str) -> None:
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


@pytest.mark.parametrize("name", ["no_such_module", "no.such.module", "absent.py", "sys", "json"])
def test_what_is_not_here_or_pythons_own_has_no_files(name: str) -> None:
    assert find_code(name) == []
