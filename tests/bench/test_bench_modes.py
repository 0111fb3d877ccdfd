"""The co-located loop trains and evaluates, and its differences from the modes are judged right."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from echo.engine.model import build_model, save_tiny_model

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def bench_modes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    import bench_modes

    return bench_modes


@pytest.mark.matrix
def test_the_colocated_loop_learns_what_it_is_told_to(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", build_model(seed=0))
    settings = [
        f"model.name={tmp_path / 'model'}", "run.max_steps=3", "eval.interval_steps=2",
        "eval.num_prompts=8", "batch.groups_per_step=2", "batch.group_size=2",
        "batch.keep_zero_variance=true",
    ]  # fmt: skip
    command = [sys.executable, "bench/colocated.py", "configs/quickstart.toml"]

    def run(*options: str) -> str:
        done = subprocess.run(
            [*command, *options, *(part for item in settings for part in ("--set", item))],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = run()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert all(0 <= row["sampled"] <= 1 and 0 <= row["greedy"] <= 1 for row in rows)
    assert rows[-1]["staleness"] == {"0": 6}
    assert run() == text  # one process, one order of events
    # Half an hour at most, in steps of a quarter of an hour: two versions late, twice.
    hetero = ("--law", "constant", "--step-s", "900")
    rows = [json.loads(line) for line in run("--lag", "delays:4", *hetero).splitlines()]
    assert rows[-1]["staleness"] == {"0": 2, "1": 2, "2": 2}


@pytest.mark.slow
def test_only_seeds_of_every_mode_are_reported(
    bench_modes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_modes.harness, "RESULTS", tmp_path / "results")
    same = {"task": "addition", "set": []}
    last = {"step": 4, "sampled": 0.5, "greedy": 0.75}
    for mode, seed in [("colocated", 0), ("pull", 0), ("push_pull", 0), ("colocated", 1)]:
        row = {**same, "mode": mode, "seed": seed, "evaluations": [last], "staleness": {"0": 8}}
        bench_modes.add_row(tmp_path / "rows.jsonl", row)
    rows = bench_modes.read_rows(tmp_path / "rows.jsonl")
    bench_modes.report(rows, same)
    (path,) = (tmp_path / "results").glob("modes_addition_*.json")
    result = json.loads(path.read_text())
    assert result["seeds"] == [0]
    assert result["finals"]["pull"] == [last]
    assert result["staleness"]["pull"] == {"0": 1.0}
    with pytest.raises(SystemExit, match="no seed"):
        bench_modes.report(rows[-1:], same)


def test_the_interval_is_students(bench_modes: ModuleType) -> None:
    """Five values of deviation .01: t(4, .975) = 2.776."""
    mean, half_width = bench_modes.interval([0.02, 0.02, 0.03, 0.01, 0.02])
    assert mean == pytest.approx(0.02)
    assert half_width == pytest.approx(2.776 * math.sqrt(0.00005) / math.sqrt(5), rel=1e-3)
    assert bench_modes.interval([0.0]) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("differences", "agrees"),
    [
        ([0.0, 0.01, -0.01, 0.005, -0.005], True),
        ([0.06, 0.05, 0.06, 0.05, 0.06], False),
        ([0.1, -0.1, 0.1, -0.1, 0.0], False),
    ],
)
def test_only_a_narrow_interval_around_nothing_is_agreement(
    bench_modes: ModuleType, differences: list[float], agrees: bool
) -> None:
    base = [{"sampled": 0.8, "greedy": 0.9}] * 5
    moved = [{"sampled": 0.8 + d, "greedy": 0.9} for d in differences]
    found = bench_modes.compare({"colocated": base, "pull": moved, "push_pull": base})
    assert found["pull/sampled"]["agrees"] is agrees
    assert found["pull/greedy"]["agrees"]
    assert found["push_pull/sampled"]["mean"] == 0.0
