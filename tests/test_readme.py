"""What the README tells a newcomer must be true of this checkout."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from echo.cli.node import make_parser
from echo.config.load import load_config
from echo.tasks.loading import load_task

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
        arguments = make_parser().parse_args(command.split())
        sets = [s for s in arguments.set if not s.startswith("model.name")]
        load_config(ROOT / arguments.config, [*sets, "model.name=m"], arguments.role)


def test_its_task_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_task.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        task = load_task("my_task:Reverse", {})
    finally:
        sys.modules.pop("my_task", None)
    example = task.example(3, split="train")
    assert task.reward(example, f" {example.answer}\n") == 1
    assert task.reward(example, str(example.answer)[1:]) == 0


def test_it_names_no_figure_that_was_not_filled_in() -> None:
    assert "QUICKSTART_" not in README
