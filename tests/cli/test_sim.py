"""`echo-rl sim` from file to text, JSON, metrics and plot, and what it says of bad input."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from echo.cli.commands.sim import main, prediction, summary_text
from echo.cli.scenario import load_scenario
from echo.config.fleet_file import read_files
from echo.core.errors import ConfigError
from echo.sim.simulation import Simulation
from echo.sim.summary import Summary, summarise
from tests.sim.scenarios import make_offer, make_scenario

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = """
[sim]
num_steps = 6
chunks_per_version = 4
join_within_s = 1
setup_s = 1
[job]
model = "Qwen3-4B"
groups_per_step = 4
group_size = 4
completion_tokens = 100
max_completion_tokens = 400
max_staleness = 2
publish_period = 1
version_bytes = "80MB"
[learner]
gpu = "H100-SXM"
price_per_h = 2.0
uplink_mbit_per_s = 800
train_s = "10s"
[[regions]]
name = "near"
mbit_per_s = 400
latency_s = "20ms"
[[offers]]
name = "gpu"
gpu = "RTX 4090"
region = "near"
count = 4
price_per_h = 0.34
down_mbit_per_s = 800
up_mbit_per_s = 800
tokens_per_s = 100
concurrency = 8
can_listen = true
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.slow
def test_a_run_is_printed_and_written(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(scenario), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    for words in ("small: 4 gpu; seed 0", "6 steps", "learner waits", "staleness: mean", "cost: $"):
        assert words in text
    assert any(len(line) > 100 for line in text.splitlines()), "wrapped without a terminal"
    # Pace, waiting and staleness leave out the run-in; the plot says the same of the waiting.
    summary = json.loads((tmp_path / "out" / "sim.json").read_text())
    waits = (
        f"{summary['idle_share']:.1%} of the time after the first 20% of the steps, "
        f"{summary['idle_share_in_all']:.1%} in all"
    )
    assert f"learner waits: {waits};" in text
    parts = [summary[f"cost_of_{part}"] for part in ("learner", "nodes", "traffic")]
    assert sum(parts) == pytest.approx(summary["cost"])
    assert summary["num_steps"] == 6
    assert summary["is_complete"] is True
    rows = [json.loads(r) for r in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["staleness/max"] <= 2
    assert rows[-1]["cost/total"] == pytest.approx(summary["cost"])
    assert (tmp_path / "out" / "sim.png").read_bytes().startswith(b"\x89PNG")


def test_the_text_says_what_the_model_assumes_where_its_staleness_is_another() -> None:
    scenario = make_scenario(make_offer(count=2))
    summary = summarise(scenario, Simulation(scenario).run())
    fitting = prediction(scenario, summary).staleness
    assert "differs" not in summary_text(scenario, replace(summary, staleness=fitting), wall_s=1.0)
    other = replace(summary, staleness={12: 1.0})
    text = summary_text(scenario, other, wall_s=1.0)
    assert "all workers work all the time\n" in text
    eager = scenario.settings.model_copy(update={"is_eager": True})
    text = summary_text(replace(scenario, settings=eager), other, wall_s=1.0)
    assert "all the time and groups are granted just in time\n" in text


@pytest.mark.slow
def test_the_model_takes_the_mean_of_the_groups_and_not_the_slowest_node() -> None:
    slow = make_offer("slow", count=1, tokens_per_s=1.0)
    scenario = make_scenario(make_offer(count=8), slow)
    summary = cast("Summary", SimpleNamespace(broadcast_s=0.1))
    assert prediction(scenario, summary).idle_share < 0.05


def test_prices_and_faults_take_part(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.write_text(
        SMALL.replace("num_steps = 6", "num_steps = 12")
        + "[activation]\nmargin = 0.1\n"
        + '[[faults]]\nat_s = 75\nkind = "kill"\ntarget = "gpu-1"\nfor_s = 10\n'
    )
    assert main([str(scenario), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "nodes died once" in " ".join(text.split())
    assert "on standby in the end; the learner itself counts $" in " ".join(text.split())
    record = json.loads((tmp_path / "out" / "sim.json").read_text())
    assert record["num_deaths"] == 1
    rows = [json.loads(r) for r in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["cost/per_hour"] > 0
    assert rows[-1]["workers/active"] + rows[-1]["workers/standby"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("num_cores", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_sweep_simulates_every_combination(
    scenario: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    num_cores: int,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    sweeps = ["--sweep", "job.max_staleness=1,2", "--sweep", "sim.rent.gpu=1,4", "--seeds", "2"]
    argv = [str(scenario), *sweeps, "--set", "sim.num_steps=3", "--out", str(tmp_path)]
    assert main(argv) == 0
    assert "means of 2 seeds" in capsys.readouterr().out
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [tuple(row["set"].values()) for row in rows] == [
        ("1", "1"), ("1", "4"), ("2", "1"), ("2", "4"),
    ]  # fmt: skip
    assert [(run["seed"], run["num_steps"]) for run in rows[0]["runs"]] == [(0, 3), (1, 3)]
    few, many = (row["runs"][0]["idle_share"] for row in rows[:2])
    assert few > many
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_a_plan_says_what_is_rented(scenario: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    record = {"rent": [{"offer": "gpu", "count": 2}], "job": {"publish_period": 3}}
    plan.write_text(json.dumps(record))
    files, auto = read_files([scenario]), [("--set", "job.publish_period=auto")]
    found, _ = load_scenario(files, auto, name="x", plan=plan)
    assert (list(found.counts), found.job.publish_period, found.is_auto_period) == ([2], 3, False)
    for offer, count, why in (
        ("other", 2, "rents 2 of other, of which the scenario offers none"),
        ("gpu", 9, "rents 9 of gpu, of which the scenario offers 4"),
        ("gpu", -1, "rents -1 of gpu, of which the scenario offers 4"),
        ("gpu", 0, "rent leaves no node"),
    ):
        plan.write_text(json.dumps(record | {"rent": [{"offer": offer, "count": count}]}))
        with pytest.raises(ConfigError, match=why):
            load_scenario(files, auto, name="x", plan=plan)


def test_a_fault_hits_a_node_that_the_plan_rents(scenario: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    record = {"rent": [{"offer": "gpu", "count": 2}], "job": {"publish_period": 3}}
    plan.write_text(json.dumps(record))
    faults = {"faults": [{"at_s": 1, "kind": "kill", "target": "gpu-3"}]}
    files = [*read_files([scenario]), ("faults.toml", faults)]
    load_scenario(files, name="x")
    with pytest.raises(ConfigError, match=r'target = "gpu-3": unknown; did you mean "gpu"'):
        load_scenario(files, name="x", plan=plan)


@pytest.mark.parametrize("name", ["scenario-example.toml", "fleet-example.toml"])
def test_the_examples_are_scenarios(name: str) -> None:
    scenario, _ = load_scenario(read_files([CONFIGS / name]), name="x")
    assert sum(scenario.counts) >= 20


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sim": {"num_stepz": 3}}, "did you mean num_steps?"),
        ({"sim": {"seed": -1}}, "seed = -1: must be an integer, at least 0"),
        ({"sim": {"rent": {"gpux": 3}}}, 'did you mean "gpu"?'),
        ({"sim": {"rent": {"gpu": 9}}}, "rent.gpu = 9: is more than its count of 4"),
        (
            {"sim": {"rent": {"gpu": 10**12}}},
            "rent.gpu = 1000000000000: is more than its count of 4",
        ),
        ({"sim": {"rent": {"gpu": 1.5}}}, "rent.gpu = 1.5: must be a valid integer"),
        ({"sim": {"rent": {"gpu": 0}}}, "rent leaves no node"),
        ({"sim": {"heartbeat_s": 9, "dead_after_s": 5}}, "must be longer than heartbeat_s = 9"),
        ({"faults": [{"at_s": 1, "kind": "kill", "target": "gpu-9"}]}, "faults[1]: target"),
        ({"faults": [{"at_s": 1, "kind": "cut", "target": "gpu"}]}, 'did you mean "gpu-4"?'),
        ({"faults": {"at_s": 1}}, "faults = {at_s = 1}: must be written [[faults]]"),
        ({"prices": [{"offer": "gpu", "at_s": 1, "price_per_h": -1}]}, "price_per_h = -1"),
        ({"prices": [{"offer": "x", "at_s": 1, "price_per_h": 1}]}, "prices[1]: offer"),
        ({"paths": [{"region": "near", "loss": 0.01}]}, "paths"),
        ({"learnr": {}}, "did you mean learner?"),
        (
            {"faults": [{"at_s": 1, "kind": "slow", "target": "learner"}]},
            'faults[1]: target = "learner": the simulated learner neither dies nor slows down',
        ),
        (
            {"faults": [{"at_s": 1, "kind": "kill", "target": "learner", "for_s": 3}]},
            'give the fault a worker or an offer, or write kind = "cut"',
        ),
        ({"activation": {"mod": "on"}}, "did you mean mode?"),
        ({"activation": {"budget_per_h": -1}}, "budget_per_h = -1"),
        ({"sim": {"image_bytes": "81MB"}}, "image_bytes"),
        (
            {"offers": [{"name": "gpu", "count": 10**9}]},
            "must be an integer, at least 1, at most 100",
        ),
        ({"sim": {"chunks_per_version": 4097}}, "must be an integer, at least 1, at most 4096"),
    ],
)
def test_bad_rows_are_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_scenario([("small.toml", tomllib.loads(SMALL) | change)], name="x")
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "no SCENARIO given"),
        (["FILE", "--seeds", "3"], "--seeds is the number of seeds"),
        (["FILE", "--set", "num_steps"], "write table.key=value"),
        (["FILE", "--set", "num_steps=3"], "did you mean sim.num_steps?"),
        (["FILE", "--set", "offers.gpi.count=3"], "no row of [[offers]] called 'gpi'"),
        (["FILE", "--sweep", "sim.seed="], "write key=value,value"),
        (["FILE", "--sweep", "sim.seed=-1"], "--sweep: [sim]: seed = -1: must be an integer"),
        (["missing.toml"], "cannot be read"),
    ],
)
def test_bad_arguments_are_explained(
    scenario: Path, argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(scenario) if word == "FILE" else word for word in argv]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_an_end_says_so(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.write_text(SMALL + '[[faults]]\nat_s = 20\nkind = "preempt"\ntarget = "*"\n')
    # It is given up after an hour of simulated time.
    assert main([str(scenario), "--out", str(tmp_path / "out")]) == 1
    assert "NOT FINISHED: the scenario asks for 6 steps" in capsys.readouterr().out
