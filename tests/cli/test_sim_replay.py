"""A run that was recorded is predicted from its inputs; here the simulator itself recorded it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from echo.cli.sim import main, step_row
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import Summary, summarise
from tests.records.rows import write_ledger
from tests.sim.scenarios import make_job, make_offer, make_scenario


def record(scenario: Scenario, directory: Path) -> Summary:
    """Simulate, and write what a run would have written."""
    simulation = Simulation(scenario)
    simulation.disk.is_kept = True
    history = simulation.run()
    ledger: list[dict[str, Any]] = [msgspec.to_builtins(each) for each in simulation.disk.records]
    for row in ledger:
        if row["kind"] == "accepted":
            row["tokens"] = simulation.groups.length(row["group"]).num_tokens
    job = scenario.job
    config = {
        "profile": "lan",
        "batch": {"groups_per_step": job.groups_per_step, "group_size": job.group_size},
        "sync": {"max_staleness": job.max_staleness, "publish_period": job.publish_period},
        "sampling": {"max_completion_tokens": job.max_completion_tokens},
        "network": {"heartbeat_s": 2.0},
    }
    rows = [
        step_row(step, 0.0)
        | {"reward/mean": 0.5, "broadcast/goodput": job.version_bytes / (step.broadcast_s or 1.0)}
        for step in history.steps
    ]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_ledger(directory, ledger)
    return summarise(scenario, history)


@pytest.mark.slow
@pytest.mark.parametrize("tokens_per_s", [pytest.param(30.0, marks=pytest.mark.matrix), 100.0])
def test_a_recorded_run_is_predicted(
    tokens_per_s: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offer = make_offer(tokens_per_s=tokens_per_s, concurrency=4, can_listen=True)
    scenario = make_scenario(
        offer, job=make_job(max_staleness=4), num_steps=30, train_spread=0.2, heartbeat_s=2.0
    )
    recorded = record(scenario, tmp_path / "run")
    assert main(["--replay", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert "recorded   simulated" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out" / "sim.json").read_text())["replay"]
    assert figures["recorded"]["step_s"] == pytest.approx(recorded.step_s, rel=0.02)
    assert figures["simulated"]["step_s"] == pytest.approx(recorded.step_s, rel=0.1)
    assert figures["simulated"]["idle_share"] == pytest.approx(recorded.idle_share, abs=0.1)
    staleness = figures["simulated"]["mean_staleness"]
    assert staleness == pytest.approx(recorded.mean_staleness, abs=0.7)


def test_a_replay_takes_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", str(tmp_path), "--set", "sim.seed=1"]) == 2
    assert "--replay RUN takes everything from the run" in capsys.readouterr().err
    assert main(["--replay", str(tmp_path)]) == 3
