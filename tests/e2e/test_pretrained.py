"""The quickstart trains a real pretrained model, and goes on where it ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(1800)]


def test_a_pretrained_model_is_trained_and_resumed(smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "echo.cli.main", "quickstart", "--set", "ui.live=off"]
    begin = ["--model", str(smollm2), "--set", f"run.dir={tmp_path}", "--set", "run.max_steps=1"]
    small = ["--set", "eval.num_prompts=4", "--set", "batch.groups_per_step=1"]
    run_dir = tmp_path / "word-problems"

    subprocess.run([*command, *begin, *small], check=True, timeout=900)
    chosen = json.loads((run_dir / "config.json").read_text())["learner"]["dtype"]
    assert chosen in ("float32", "bfloat16")
    more = ["--resume", str(run_dir), "--set", "run.max_steps=2"]
    subprocess.run([*command, *more], check=True, timeout=900)

    assert json.loads((run_dir / "config.json").read_text())["learner"]["dtype"] == chosen
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {1, 2} <= {row["step"] for row in rows if "loss/policy" in row}
    assert {0, 1, 2} <= {row["step"] for row in rows if "eval/seconds" in row}
    assert (run_dir / "final" / "model.safetensors").stat().st_size > 250e6
