"""`echo-rl eval` on a model directory, and on the checkpoints of a run with the same weights."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from echo.cli.commands.eval import main
from echo.config.load import parse_config, save_resolved
from echo.engine.model import build_model, save_tiny_model
from echo.records.ledger import Began, Ledger
from echo.runtime.learner.saving.checkpoint import Checkpoints
from echo.train import saved_state

TASK = """
from echo.tasks.task import Example, Task

class Lengths(Task):
    is_bounded = True

    def example(self, index, *, split):
        return Example(index=index, split=split, prompt=f"{index % 10}+1=", answer="")

    def reward(self, example, completion):
        return len(completion) / 8
"""
SETTINGS = ["--set", "sampling.max_completion_tokens=8", "--set", "worker.device=cpu"]


@pytest.fixture
def make_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Return a function that makes a model of this seed; the task is in the present directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_lengths.py").write_text(TASK)

    def make(seed: int) -> Path:
        save_tiny_model(tmp_path / f"model{seed}", build_model(seed=seed))
        return Path(f"model{seed}")

    return make


def scored(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def make_run(run_dir: Path, model: Path, checkpoints: dict[int, int]) -> None:
    """Make a run whose checkpoint of each step has the weights of the model of a seed."""
    table = {
        "run": {"dir": str(run_dir.parent), "name": run_dir.name},
        "model": {"name": str(model), "dtype": "float32"},
        "task": {"kind": "own_lengths:Lengths"},
        "sampling": {"max_completion_tokens": 8},
        "eval": {"num_prompts": 6},
        "worker": {"device": "cpu"},
    }
    run_dir.mkdir()
    save_resolved(parse_config(table, role="learner"), run_dir / "config.json")
    ledger = Ledger(run_dir, spool_bytes=1 << 20)
    ledger.append(Began(lineage=1, fork_step=0))
    ledger.close()
    kept = Checkpoints(
        run_dir / "checkpoints", run_id="r", interval_steps=1, interval_s=None, keep_last=9,
        min_free_bytes=0, now=0.0,
    )  # fmt: skip
    for step, seed in checkpoints.items():
        weights = dict(build_model(seed=seed).named_parameters())

        def save(directory: Path, weights: dict[str, Any] = weights) -> None:
            counters = dict.fromkeys(saved_state.COUNTERS, 0)
            saved_state.save(
                directory, weights=weights, moments={}, counters=counters,
                device=torch.device("cpu"),
            )  # fmt: skip

        kept.save(save, lineage=1, step=step, now=0.0)


@pytest.mark.slow
def test_a_checkpoint_has_the_scores_of_a_model_with_its_weights(
    make_model: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [make_model(seed) for seed in (1, 2)]
    make_run(tmp_path / "run", models[0], {3: 1, 7: 2})
    how = ["--samples", "3", "--set", "eval.temperature=0.7"]
    task = ["--task", "own_lengths:Lengths", "--prompts", "6", *SETTINGS]
    task += ["--set", "model.dtype=float32"]
    first, second = (scored(capsys, model, *task, *how) for model in models)
    assert first["mean"] != second["mean"]
    for which, expected, step in (("@3", first, 3), ("@7", second, 7), ("", second, 7)):
        found = scored(capsys, f"run{which}", *how)
        assert (found["step"], found["target"]) == (step, f"run, step {step}")
        assert {**found, "target": "", "step": None} == {**expected, "target": "", "step": None}
    assert (second["num_prompts"], second["num_samples"], second["pass@k"]) == (6, 3, None)
    assert second["sampling"]["temperature"] == 0.7
    assert second["mean"]["low"] <= second["mean"]["mean"] <= second["mean"]["high"]

    # A ledger of another release does not matter to a checkpoint.
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as ledger:
        ledger.execute("PRAGMA user_version = 1")
    limits = ["--set", "eval.top_k=5", "--set", "eval.min_p=0.1"]
    assert main(["run@3", "--samples", "2", *limits]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "run, step 3: Lengths, 6 held-out prompts, 2 sampled answers to each (temperature 1, "
        "top_p 1, top_k 5, min_p 0.1, at most 8 tokens), and a greedy one"
    )
    assert [line.split()[0] for line in lines[1:3]] == ["mean", "greedy"]


@pytest.mark.slow
def test_text_of_a_model_in_an_error_does_not_control_the_terminal(
    make_model: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(1)
    error = 'raise ValueError("\\x1b[2J\\x9b1m\\u202e")'
    Path("own_errors.py").write_text(TASK.replace("return len(completion) / 8", error))
    task = ["--task", "own_errors:Lengths", "--prompts", "2", "--samples", "1", *SETTINGS]
    assert main([str(model), *task]) == 3
    printed = capsys.readouterr()
    assert ": no figure, 4 of 4 rewards failed: " in printed.err
    for text in printed:
        assert "\\x1b[2J\\x9b1m\\u202e" in text
        assert all(char == "\n" or char.isprintable() for char in text)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["run@5"], 3, "has no checkpoint 5; there are steps 3"),
        (["run@best"], 3, "has no checkpoint best; there are steps 3"),
        (["run", "--config", "x.toml"], 2, "--config has no use with the run run"),
        (["model1"], 2, "model1 is no run, whose task would be evaluated: add --task KIND"),
        (["model1@3", "--task", "addition"], 3, "model1: no run is in this directory"),
        (["run", "--samples", "0"], 2, "eval.num_samples = 0: must be an integer, at least 1"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_scored_is_said(
    make_model: Callable[[int], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    text: str,
) -> None:
    make_run(tmp_path / "run", make_model(1), {3: 1})
    assert main(words) == code
    assert text in capsys.readouterr().err
