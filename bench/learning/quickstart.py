"""The quickstart as a benchmark runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def train(
    task: str, seed: int, settings: Iterable[str], *, timeout_s: float, model: str | None = None
) -> None:
    """Run the quickstart to its end, of a pretrained model if one is given.

    What it says goes to stderr.
    """
    command = [sys.executable, "-m", "echo.cli.main", "quickstart"]
    command += ["--task", task] if model is None else ["--model", model]
    command += ["--set", f"run.seed={seed}", "--set", "ui.live=off"]
    for setting in settings:
        command += ["--set", setting]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            code = process.wait(timeout_s)
        except BaseException:
            process.terminate()  # not killed, so that it ends its nodes
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def make_model(task: str) -> Path:
    """Return the quickstart's warmed-up model, made if it is not there yet."""
    from rich.console import Console

    from echo.cli.commands.quickstart import SmallModel

    small = SmallModel(task, for_vllm=False)
    small.make(Console(stderr=True))
    return small.path


def read_evaluations(path: Path) -> list[dict[str, float]]:
    """Return step and pass rates of every evaluation."""
    found = []
    for row in map(json.loads, path.read_text().splitlines()):
        sampled = [
            value
            for key, value in row.items()
            if key.startswith("eval/") and key.endswith("/reward")
        ]
        greedy = [value for key, value in row.items() if key.endswith("/greedy")]
        if sampled and greedy:
            found.append({"step": row["step"], "sampled": sampled[0], "greedy": greedy[0]})
    return found
