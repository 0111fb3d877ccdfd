"""Each plant is caught by the tests of its promise; run with --all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
