"""Files stay short enough to read in one go; long functions are reported, not refused.

Run as a program (`python tests/test_budgets.py`, as bin/echo-test does) it prints the report.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "echo"
MAX_FILE_LINES = 400
LONG_FUNCTION_LINES = 60  # ruff refuses by statements; this counts what a reader scrolls past


def file_lines(package: Path) -> dict[str, int]:
    """Return the number of lines of every file below `package`, longest first."""
    counts = {
        path.relative_to(package.parent).as_posix(): len(path.read_text().splitlines())
        for path in package.rglob("*.py")
    }
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def over_budget(package: Path) -> dict[str, int]:
    """Return the files with more than MAX_FILE_LINES lines, longest first."""
    return {path: count for path, count in file_lines(package).items() if count > MAX_FILE_LINES}


def long_functions(package: Path) -> list[str]:
    """Return "path:line name (lines)" of every function over LONG_FUNCTION_LINES, by path."""
    return [
        f"{path.relative_to(package.parent).as_posix()}:{node.lineno} {node.name} ({lines} lines)"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > LONG_FUNCTION_LINES
    ]


def report(package: Path) -> str:
    """Return the line budget as text: totals, the longest files, the long functions."""
    counts = file_lines(package)
    longest = ", ".join(f"{path} {count}" for path, count in list(counts.items())[:3])
    functions = long_functions(package)
    return "\n".join(
        [
            f"{len(counts)} files, {sum(counts.values())} lines; longest: {longest}",
            f"{len(functions)} functions over {LONG_FUNCTION_LINES} lines",
            *(f"  {function}" for function in functions),
        ]
    )


def test_files_stay_within_the_budget() -> None:
    assert file_lines(PACKAGE)["echo/errors.py"] > 10
    assert over_budget(PACKAGE) == {}


def test_a_file_one_line_over_the_budget_is_found(tmp_path: Path) -> None:
    package = tmp_path / "echo"
    package.mkdir()
    (package / "full.py").write_text("x = 1\n" * MAX_FILE_LINES)
    (package / "over.py").write_text("x = 1\n" * (MAX_FILE_LINES + 1))
    assert over_budget(package) == {"echo/over.py": MAX_FILE_LINES + 1}


def test_the_report_names_long_functions_only(tmp_path: Path) -> None:
    package = tmp_path / "echo"
    package.mkdir()
    body = "    x = 1\n"
    (package / "a.py").write_text(
        "def short():\n" + body * (LONG_FUNCTION_LINES - 1) + "def long():\n" + body * 60
    )
    assert long_functions(package) == ["echo/a.py:61 long (61 lines)"]
    assert report(package).splitlines()[0] == "1 files, 121 lines; longest: echo/a.py 121"


if __name__ == "__main__":
    sys.stdout.write(report(PACKAGE) + "\n")
