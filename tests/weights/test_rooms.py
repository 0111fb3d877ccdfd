"""The shape of weights: halves that do not know each other; and classes of bounded size."""

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
        path = ECHO.joinpath("weights", *waiting.pop().split(".")).with_suffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = [each.removeprefix("echo.weights.") for each in modules]
            own = {
                each
                for each in names
                if ECHO.joinpath("weights", *each.split(".")).with_suffix(".py").exists()
            }
            waiting += own - found
            found |= own
    return found


def test_receiver_and_sender_do_not_know_each_other() -> None:
    assert "sender" not in imported("receiver")
    assert not imported("sender") & {"receiver", "offers", "store.changes"}
    assert {"receiver", "sender"} <= imported("broadcast")


@pytest.mark.parametrize("room", ["weights", "net", "roles", "leases", "runtime", "sim", "config"])
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
