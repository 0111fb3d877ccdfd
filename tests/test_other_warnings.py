"""The warnings that fail a test, and those that are told at the end."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PROJECT = Path(__file__).parents[1] / "pyproject.toml"

FOREIGN = """
import threading
import warnings

def warn(category):
    warnings.warn("of the\\nnext release", category)

async def nothing():
    pass

def forget():
    open(__file__)

def leave():
    nothing()

class Broken:
    def __del__(self):
        raise KeyError("nobody sees it")

def drop():
    Broken()

def fail():
    raise KeyError("in a thread")

def start():
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
"""

OURS = """
import sys
import warnings
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("site-packages", "bench")]
import foreign
import some_script

"""


def run(pytester: pytest.Pytester, test: str) -> pytest.RunResult:
    """Run a test with this project's own settings."""
    options = tomllib.loads(PROJECT.read_text())["tool"]["pytest"]["ini_options"]
    lines = "\n    ".join(options["filterwarnings"])
    added = " ".join(options["addopts"])
    pytester.makeini(f"[pytest]\naddopts = {added}\nfilterwarnings =\n    {lines}")
    files = {
        "site-packages/foreign.py": FOREIGN,
        "bench/some_script.py": FOREIGN,
        "tests/test_ours.py": OURS + test,
    }
    for name, text in files.items():
        (pytester.path / name).parent.mkdir(exist_ok=True)
        (pytester.path / name).write_text(text)
    return pytester.runpytest_inprocess("-p", "tests.other_warnings", "tests")


@pytest.mark.parametrize(
    "call",
    [
        *("warnings.warn('ours', DeprecationWarning)", "warnings.warn('ours')"),
        "some_script.warn(FutureWarning)",
        *("foreign.warn(ResourceWarning)", "foreign.warn(RuntimeWarning)"),
        *("foreign.forget()", "foreign.leave()", "foreign.drop()", "foreign.start()"),
    ],
)
def test_what_we_cause_and_what_is_left_behind_fails(pytester: pytest.Pytester, call: str) -> None:
    result = run(pytester, f"def test_a(): {call}")
    assert result.ret != 0
    assert "of other packages" not in str(result.stdout)


def test_what_others_say_is_counted_and_told_in_a_line_each(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        "def test_a(): foreign.warn(DeprecationWarning); foreign.warn(UserWarning)\n"
        "def test_b(): foreign.warn(DeprecationWarning)\n",
    )
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*3 warnings of other packages*",
            "    2 foreign.py:6: DeprecationWarning: of the next release",
            "    1 foreign.py:6: UserWarning: of the next release",
        ]
    )
    assert "warnings summary" not in str(result.stdout)
