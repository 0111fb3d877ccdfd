"""Everything that needs a GPU is one command, which ends in time and goes on where a part fails."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_all.sh"
PYTHON = """#!/bin/sh
case "$*" in
*"is_available"*) exit 0 ;;
*"config.json"*) exit 1 ;;
*"Qwen3-4B"*) echo "it fails"; exit 3 ;;
esac
echo "$1 was begun"
"""
"""Stands in for all that the script starts: the model of 4B parameters fails."""


def dry_run(*parts: str) -> list[str]:
    """Return a line for each command."""
    done = subprocess.run(
        [SCRIPT, "--dry-run", *parts], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def run_all(directory: Path, *options: str) -> tuple[int, dict[str, str]]:
    """Run a copy of the script where nothing takes any time; return its code and the summary."""
    for folder in ("bench", "bin"):
        (directory / folder).mkdir()
    shutil.copy(SCRIPT, directory / "bench")
    python, setup = directory / "python", directory / "bin" / "echo-setup"
    python.write_text(PYTHON)
    setup.write_text(f'#!/bin/sh\necho "$@" >extras\necho {python}\n')
    for program in (python, setup):
        program.chmod(0o755)
    done = subprocess.run(
        [directory / "bench" / "gpu_all.sh", *options],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    lines = (directory / "bench/results/gpu_all/summary.txt").read_text().splitlines()
    return done.returncode, {line.split()[0]: line for line in lines}


@pytest.mark.slow
def test_a_part_that_fails_leaves_the_others_their_results(tmp_path: Path) -> None:
    code, summary = run_all(tmp_path)
    assert code == 1
    assert list(summary) == [line.split()[0] for line in dry_run()]
    failed = {name for name, line in summary.items() if "exit   0" not in line}
    assert failed == {"learner-4B", "update"}
    assert "exit   3" in summary["learner-4B"]
    logs = tmp_path / "bench/results/gpu_all"
    assert (logs / "learner-4B.txt").read_text() == "it fails\n"
    assert (logs / "learner-full.txt").read_text() == "bench/bench_learner.py was begun\n"
    # Without it the model of 4B parameters has no moments in 8 bits.
    assert "--extra torchao" in (tmp_path / "extras").read_text()


@pytest.mark.slow
def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    code, summary = run_all(tmp_path, "--minutes", "0", "learner", "vllm")
    assert code == 1
    assert all("exit 124 after " in line for line in summary.values())
    assert not any(name.startswith(("kernel", "update", "delta")) for name in summary)
    logs = tmp_path / "bench/results/gpu_all"
    assert (logs / "learner-full.txt").read_text() == "not begun: no time is left\n"


@pytest.mark.parametrize("part", ["kernel", "learner", "deltas", "vllm"])
def test_what_a_part_runs_is_there(part: str) -> None:
    lines = dry_run(part)
    assert lines
    for line in lines:
        for path in re.findall(r"(?:bench|tests)/[\w/.]+\.py", line):
            assert (SCRIPT.parents[1] / path).is_file(), path


@pytest.mark.parametrize(
    ("given", "said"),
    [(["disk"], "no part is called disk"), (["--minutes", "soon"], "takes a whole number")],
)
def test_what_there_is_not_is_refused(given: list[str], said: str) -> None:
    done = subprocess.run([SCRIPT, *given], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
