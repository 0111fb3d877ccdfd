"""The benchmark of the broadcast runs, and judges what arrived by its hash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.e2e
def test_every_receiver_of_the_smoke_run_ends_with_the_right_bytes() -> None:
    done = subprocess.run(
        [sys.executable, "bench/bench_broadcast.py", "--smoke"],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last_columns = {line[:16].strip(): line.split()[-1] for line in done.stdout.splitlines()}
    assert last_columns["raw TCP"] == "1/1"
    assert last_columns["echo chain"] == last_columns["echo star"] == "2/2"
    assert "wrote" not in done.stdout
