"""The shape of weights and net: halves that do not know each other, and classes of bounded size."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ECHO = Path(__file__).parents[2] / "echo"
MAX_LINES, MAX_PUBLIC_METHODS = 500, 25


def imported(name: str) -> set[str]:
    """Return the modules of weights that one of them imports, also by way of others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        tree = ast.parse((ECHO / "weights" / f"{waiting.pop()}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            parts = node.module.split(".")
            names = [parts[2]] if parts[:2] == ["echo", "weights"] and len(parts) == 3 else []
            if node.module == "echo.weights":
                names = [alias.name for alias in node.names]
            waiting += [name for name in names if name not in found]
            found.update(names)
    return found


def test_receiver_and_sender_do_not_know_each_other() -> None:
    assert "sender" not in imported("receiver")
    assert not imported("sender") & {"receiver", "offers", "changes"}
    assert {"receiver", "sender"} <= imported("broadcast")


@pytest.mark.parametrize("room", ["weights", "net"])
def test_no_class_is_larger_than_a_reader_can_hold(room: str) -> None:
    too_large = []
    for path in sorted((ECHO / room).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or node.end_lineno is None:
                continue
            methods = {
                each.name
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            num_lines = node.end_lineno - node.lineno + 1
            num_public = sum(not name.startswith("_") for name in methods)
            if num_lines > MAX_LINES or num_public > MAX_PUBLIC_METHODS:
                too_large.append((path.name, node.name, num_lines, num_public))
    assert not too_large
