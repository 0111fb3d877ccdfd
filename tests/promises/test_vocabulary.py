"""Scenarios speak in the words of `world.py` only, and every promise has a plant."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from tests.promises.plants import PLANTS

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
KNOWING = {"world.py", "plants.py"}
"""The files that may know the product."""


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def knows_product(path: Path) -> list[str]:
    """Return what a scenario imports of the product, or of tests that know it."""
    return sorted(
        name
        for name in imported(path)
        if name.split(".")[0] in ("echo", "bench")
        or (name.startswith("tests.") and not name.startswith("tests.promises"))
    )


def test_no_scenario_imports_the_product() -> None:
    scenarios = [path for path in HERE.glob("*.py") if path.name not in KNOWING]
    assert len(scenarios) >= 8
    assert {path.name: knows_product(path) for path in scenarios if knows_product(path)} == {}


def test_an_import_of_the_product_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text("import echo.core.buffer\nfrom tests.roles.harness import Run\nimport json\n")
    assert knows_product(path) == ["echo.core.buffer", "tests.roles.harness"]


def test_every_promise_has_a_plant_and_every_plant_a_promise() -> None:
    text = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    promises = set(re.findall(r"^def test_(\d\d)", text, re.MULTILINE))
    tests = set(re.findall(r"^def test_(\d\d[a-z]?)_", text, re.MULTILINE))
    assert promises <= set(PLANTS) <= promises | tests


def test_the_table_names_tests_that_exist_for_each_of_the_forty_promises() -> None:
    table = tomllib.loads((HERE / "promises.toml").read_text())["promise"]
    assert [promise["number"] for promise in table] == list(range(1, 41))
    assert [promise["number"] for promise in table if not promise["tests"]] == []
    tests = [test.partition("::") for promise in table for test in promise["tests"]]
    text = {path: (REPOSITORY / path).read_text() for path, *_ in tests}
    assert [name for path, _, name in tests if f"\ndef {name}(" not in text[path]] == []


def test_the_table_names_every_test_of_this_folder() -> None:
    table = (HERE / "promises.toml").read_text()
    found = {
        f"tests/promises/{path.name}::{name}"
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\d\d\w*)", path.read_text(), re.MULTILINE)
    }
    assert sorted(test for test in found if f'"{test}"' not in table) == []
