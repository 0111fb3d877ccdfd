"""The benchmark of deltas runs, and ends only if every image came back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.matrix
def test_the_smoke_run_measures_every_case() -> None:
    done = subprocess.run(
        [sys.executable, "bench/bench_delta.py", "--smoke"],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {line[:18].strip(): line[18:].split() for line in done.stdout.splitlines()[1:]}
    assert len(rows) == 11
    ratio, xor_ratio = map(float, rows["bf16 lr 1e-06"][1:3])
    assert ratio > 1.5 * xor_ratio
    assert rows["bf16 lr 1e-06"][-1] == "changes"
    assert rows["fp32 lr 1e-06"][-1] == "difference"
    assert rows["keyframe bf16"][-1] == "planes"
    assert "wrote" not in done.stdout + done.stderr
