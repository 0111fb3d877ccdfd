"""Each plant is caught by the tests of its promise (run with --all), and for what it plants."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.promises.plants import PLANTS

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS_FAILED = 1
"""pytest's exit code; an error of collection or of the plant itself has another."""


@pytest.mark.matrix
@pytest.mark.parametrize("number", sorted(PLANTS))
def test_a_plant_is_caught(number: str, tmp_path: Path) -> None:
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path}"]
    chosen = ["tests/promises", f"-k=test_{number}", f"--plant={number}"]
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == TESTS_FAILED, done.stdout[-2000:]
    assert " failed" in done.stdout
    assert "error" not in done.stdout.splitlines()[-1], "the plant itself is broken"
    for mistake in ("TypeError", "AttributeError", "ImportError"):
        assert f"E   {mistake}" not in done.stdout, "the plant itself is broken"


def recording(patch: pytest.MonkeyPatch) -> list[str]:
    """Have it note the functions that cannot be called as those whose place they take."""
    misfits: list[str] = []
    replace = patch.setattr

    def note(target: Any, name: str, *rest: Any, **named: Any) -> None:
        old, [new] = inspect.getattr_static(target, name), rest
        if inspect.isfunction(old) and callable(new):
            known = inspect.signature(old).parameters.values()
            given = [None for each in known if each.kind is each.POSITIONAL_OR_KEYWORD]
            by_name = {each.name: None for each in known if each.kind is each.KEYWORD_ONLY}
            try:
                inspect.signature(new).bind(*given, **by_name)
            except TypeError as error:
                misfits.append(f"{target.__name__}.{name}: {error}")
        replace(target, name, *rest, **named)

    vars(patch).update(setattr=note)
    return misfits


def test_what_a_plant_puts_in_place_can_be_called_as_what_was_there() -> None:
    """Else a node fails by an internal error, which a test takes for the fault it is after."""
    found = []
    for number, plant in PLANTS.items():
        patch = pytest.MonkeyPatch()
        misfits = recording(patch)
        try:
            plant(patch)
        finally:
            patch.undo()
        found += [f"plant {number}: {misfit}" for misfit in misfits]
    assert found == []
