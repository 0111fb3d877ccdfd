"""The grid of runs fills up and is reported; every version samples what later steps want of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench.delays import FixedLag
from echo.config.load import load_config
from echo.config.schema import Config
from echo.core.rollout import Group, PolicyVersion
from echo.engine.model import build_model, load_directory, save_tiny_model
from echo.runtime.learner.setup import load_data

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    import bench_staleness

    return bench_staleness


@pytest.fixture
def config(tmp_path: Path) -> Config:
    save_tiny_model(tmp_path / "model", build_model(seed=0))
    overrides = [
        f"model.name={tmp_path / 'model'}", "run.max_steps=4", "batch.groups_per_step=3",
        "batch.group_size=2", "sampling.max_completion_tokens=3",
    ]  # fmt: skip
    return load_config(REPOSITORY / "configs/quickstart.toml", overrides, "learner")


def sampled_by(group: Group) -> int:
    (version,) = group.versions
    return version.step


def test_groups_wait_for_their_step_and_prompts_keep_their_order(
    bench: ModuleType, config: Config
) -> None:
    """Every third prompt is refused; what was sampled too much is asked for again."""
    import colocated

    data = load_data(config)
    weights = load_directory(data.model_dir, "float32")

    def refusal(group: Group) -> str | None:
        return "zero_variance" if group.group_id % 3 == 0 else None

    backlog = colocated.Backlog(config, data, FixedLag(2), refusal)
    batches = []
    for step in range(4):
        backlog.sample(PolicyVersion(1, step), weights)
        batches.append(backlog.pop(step))
    # Version 0 samples for steps 0, 1 and 2, of which the first two cannot have a lag of 2.
    assert [[sampled_by(group) for group in batch] for batch in batches] == [
        [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1],
    ]  # fmt: skip
    ids = [group.group_id for batch in batches for group in batch]
    assert ids == [number for number in range(18) if number % 3]
    assert backlog.useful_share == pytest.approx(2 / 3, abs=0.2)


def test_a_policy_without_any_useful_group_is_not_sampled_for_ever(
    bench: ModuleType, config: Config
) -> None:
    import colocated

    data = load_data(config)
    weights = load_directory(data.model_dir, "float32")
    tried = []

    def refusal(group: Group) -> str | None:
        tried.append(group.group_id)
        return "zero_variance"

    backlog = colocated.Backlog(config, data, FixedLag(0), refusal)
    backlog.sample(PolicyVersion(1, 0), weights)
    assert len(backlog.pop(0)) == 3
    assert 3 * colocated.MAX_TRIES <= len(tried) < 3 * colocated.MAX_TRIES * 2


@pytest.mark.matrix
@pytest.mark.timeout(400)  # starts processes that import torch, on loaded machines too
def test_runs_add_rows_and_the_report_makes_results_of_them(
    bench: ModuleType,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setattr(bench, "make_model", lambda task: tmp_path / "model")
    monkeypatch.setattr(bench.harness, "RESULTS", tmp_path / "results")
    settings = ["batch.groups_per_step=2", "batch.group_size=2", "sampling.max_completion_tokens=3"]

    def start(*options: str) -> str:
        command = ["bench_staleness.py", "--rows", str(rows), "--steps", "4", "--prompts", "4"]
        command += [part for item in settings for part in ("--set", item)]
        monkeypatch.setattr(sys, "argv", [*command, *options])
        bench.main()
        return capsys.readouterr().out

    cases = ("--experiments", "addition", "fixed", "--lags", "fixed:11", "uniform:3")
    few = (*cases, "--losses", "grpo", "gspo .02/.03", "--seeds", "0", "1")
    assert start(*few).startswith("6 of 6 runs")
    assert start(*few, "--resume").startswith("0 of 6 runs")
    with pytest.raises(SystemExit, match="--resume"):
        start(*few)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert sorted({(row["lag"], row["loss"]) for row in found}) == [
        ("fixed:11", "grpo"), ("fixed:11", "gspo .02/.03"), ("uniform:3", "grpo"),
    ]  # fmt: skip
    assert found[0]["staleness"] == {"0": 2, "1": 2, "2": 2, "3": 2}
    assert [one["step"] for one in found[0]["evaluations"]] == [0, 1, 2, 3, 4]
    start("--report")
    (path,) = (tmp_path / "results").glob("staleness_*.json")
    result = json.loads(path.read_text())
    assert result["fixed"]["grpo"]["seeds"] == [0, 1]
    assert result["fixed"]["gspo .02/.03"]["sampled"]["minus_reference"]["mean"] == 0
    plots = sorted(path.name.split("_")[1] for path in (tmp_path / "results").glob("*.png"))
    assert plots == ["addition", "chosen", "fixed"]
