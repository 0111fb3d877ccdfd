"""Everything that needs a GPU is one command, which ends in time and names what exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_all.sh"
LIMIT_S = 25 * 60


def dry_run(*parts: str) -> list[str]:
    """Return a line for each command."""
    done = subprocess.run(
        [SCRIPT, "--dry-run", *parts], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def test_all_parts_end_in_time() -> None:
    limits = [int(line.split()[1]) for line in dry_run()]
    assert len(limits) > 10
    assert sum(limits) <= LIMIT_S


@pytest.mark.parametrize("part", ["kernel", "learner", "deltas", "vllm"])
def test_what_a_part_runs_is_there(part: str) -> None:
    lines = dry_run(part)
    assert lines
    for line in lines:
        for path in re.findall(r"(?:bench|tests)/[\w/.]+\.py", line):
            assert (SCRIPT.parents[1] / path).is_file(), path


def test_a_part_that_there_is_not_is_refused() -> None:
    done = subprocess.run([SCRIPT, "disk"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "no part is called disk" in done.stderr
