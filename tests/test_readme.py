"""README.md is a door: short, with the first command in sight, and no figure without its file."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 200
    assert len(README.split()) < 1200


def test_the_first_commands_are_in_sight() -> None:
    first = [line.partition(" ")[0] for line in README.splitlines()[:15]]
    assert "bin/echo-quickstart" in first
    assert "bin/echo-test" in first


def test_two_machines_take_ten_lines() -> None:
    [section] = re.findall(r"^## Two machines\n(.*?)^## ", README, re.M | re.S)
    code = "".join(re.findall(r"```\n(.*?)```", section, re.S))
    assert "--role learner" in code
    assert "--role worker" in code
    assert len(code.splitlines()) <= 10


def test_every_figure_has_its_file() -> None:
    [table] = re.findall(r"^\| what \| figure \| file \|\n\|---.*\n((?:\|.*\n)+)", README, re.M)
    rows = table.splitlines()
    assert 4 <= len(rows) <= 8
    for row in rows:
        [file] = re.findall(r"\]\((bench/results/[\w.]+)\) \|$", row)
        assert (ROOT / file).exists()
