"""The Triton backend: its cases under the interpreter and on a GPU, each in an own process.

Triton reads TRITON_INTERPRET once, when it is imported, and this process may have done that or may
need the compiler (test_launch_configs.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
CASES = Path(__file__).with_name("triton_cases.py")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_cases(*options: str, interpreted: bool) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES), *options],
        env={**os.environ, "TRITON_INTERPRET": str(int(interpreted))},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@needs_triton
@pytest.mark.slow
def test_a_case_of_everything_under_the_interpreter() -> None:
    assert " passed" in run_cases(interpreted=True)


@needs_triton
@pytest.mark.matrix
def test_all_cases_under_the_interpreter() -> None:
    summary = re.search(r"(\d+) passed in", run_cases("--all", interpreted=True))
    assert summary is not None
    assert int(summary[1]) > 40


@needs_triton
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_all_cases_on_the_gpu() -> None:
    assert " passed in" in run_cases("--all", interpreted=False)
