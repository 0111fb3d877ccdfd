"""What the README tells a newcomer must be true of this checkout."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from echo.cli.parsers import node_parser
from echo.config.load import load_config
from echo.tasks.environment import Environment
from echo.tasks.task import Example, load_task

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_that_it_names_exists() -> None:
    paths = set(re.findall(r"(?:bin|configs|bench|tests)/[\w./-]*\w", README))
    paths |= set(re.findall(r"\]\(([^)#:]+)\)", README))
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_its_node_commands_are_understood() -> None:
    commands = re.findall(r"^bin/echo-node (.*?)(?: +#.*)?$", README, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        arguments = node_parser().parse_args(command.split())
        sets = [s for s in arguments.set if not s.startswith("model.name")]
        load_config(ROOT / arguments.config, [*sets, "model.name=m"], arguments.role)


def example_code(text: str) -> str:
    """Return the one Python example that has this text in it."""
    examples: list[str] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [code for code in examples if text in code]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    return code


def test_its_task_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_task.py").write_text(example_code("class Reverse"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        task = load_task("my_task:Reverse", {})
    finally:
        sys.modules.pop("my_task", None)
    example = task.example(3, split="train")
    assert task.reward(example, f" {example.answer}\n") == 1
    assert task.reward(example, str(example.answer)[1:]) == 0


def test_its_environment_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "second_try.py").write_text(example_code("class SecondTry"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        task = load_task("second_try:SecondTry", {})
    finally:
        sys.modules.pop("second_try", None)
    assert isinstance(task, Environment)
    example = task.example(3, split="train")
    state = task.begin(example)
    assert task.reply(state, "1>0") == example.prompt
    assert task.reply(state, f">{example.answer}") is None
    assert task.outcome(state) == 0.5


def test_its_reward_function_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards.py").write_text(example_code("def correct"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (table,) = re.findall(r"```toml\n(\[task\]\nkind = \"dataset\".*?)```", README, re.DOTALL)
    section = tomllib.loads(table)["task"]
    try:
        task = load_task(section["kind"], section["options"])
    finally:
        sys.modules.pop("echo_user_rewards", None)
    example = Example(index=0, split="train", prompt="?", answer="42", columns={"level": 1})
    assert task.reward(example, "It is 42.") == 1
    assert task.reward(example, "It is 43.") == 0


def test_it_names_no_figure_that_was_not_filled_in() -> None:
    assert "QUICKSTART_" not in README
