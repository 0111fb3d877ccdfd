from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from echo.config.load import load_resolved, parse_config, save_resolved
from echo.core.errors import DataError, StorageError
from echo.ui.sinks import MetricsWriter
from echo.ui.summary import as_text, learning_facts, summarise_run
from tests.records.rows import write_ledger
from tests.ui.conftest import MakeRun


def test_a_run_is_summed_up_in_text_that_says_what_a_user_asks(make_run: MakeRun) -> None:
    run_dir = make_run()
    (run_dir / "final").mkdir()
    summary = summarise_run(run_dir)
    assert (summary.num_lineages, summary.staleness_tokens) == (1, {0: 300, 1: 100})
    assert summary.paths["HF checkpoint"] == run_dir / "final"
    assert "learning curve" not in summary.paths
    text = as_text(summary, width=400)
    assert text.isascii()
    for expected in (
        "echo run: 10 of 10 steps in 0:10",
        "held-out pass rate, sampled   0.360  0.810  +0.450  steps 0, 10",
        "held-out pass rate, greedy    0.300  0.930  +0.630  steps 0, 10",
        "reward of the steps           0.150  0.400  +0.250  5 steps each",  # of step / 20
        "mean 0.25, at most 1, bound 2 (from the ledger)",
        "75.0% 300 tokens",
        "10 trained, 1 discarded (1 stale)",
        "400 trained",
        "400 tokens, 40 per second",
        "10 KiB",
        str(run_dir / "metrics.jsonl"),
        "--resume --set run.max_steps=20",
    ):
        assert expected in text


def test_three_commands_follow_and_can_be_copied(make_run: MakeRun) -> None:
    run_dir = make_run("my run")
    summary = summarise_run(run_dir)
    assert len(summary.commands) == 3
    for command in summary.commands:
        words = shlex.split(command.replace("\\\n", " "))
        assert any("my run" in word for word in words)
    assert summarise_run(run_dir, commands=["ls"]).commands == ("ls",)
    # A model that reads images is loaded as one.
    (run_dir / "final").mkdir()
    models: list[tuple[dict[str, Any], str]] = [
        ({}, "CausalLM"),
        ({"vision_config": {}}, "ImageTextToText"),
    ]
    for fields, name in models:
        (run_dir / "final" / "config.json").write_text(json.dumps(fields))
        assert f"AutoModelFor{name}.from_pretrained" in summarise_run(run_dir).commands[-1]


@pytest.mark.parametrize("override", ["sync.mode=pull", "sync.max_staleness=2"])
def test_another_bound_is_one_that_the_run_had_not(make_run: MakeRun, override: str) -> None:
    path = make_run() / "config.json"
    save_resolved(parse_config({}, [override]), path)
    words = shlex.split(summarise_run(path.parent).commands[1].replace("\\\n", " "))
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    bounds = [load_resolved(path, changes).sync.max_staleness for changes in ([], sets)]
    assert bounds[0] < bounds[1]


def test_time_between_a_crash_and_its_resume_does_not_count(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=4)  # 1000 to 1004
    write_ledger(run_dir, [{"kind": "lineage", "lineage": 2, "fork_step": 4, "at": 5000.0}])
    with MetricsWriter(run_dir) as writer:
        writer.write(5, {"reward/mean": 0.5}, at=5003.0)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ti')  # as a crash leaves it
    summary = summarise_run(run_dir)
    assert (summary.wall_time_s, summary.num_lineages) == (7.0, 2)
    assert "resumed once" in as_text(summary)


def test_a_token_costs_all_the_money_over_all_accepted_tokens(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=4)  # 160 tokens
    resumed = {"kind": "lineage", "lineage": 2, "fork_step": 4, "at": 5000.0}
    write_ledger(run_dir, [resumed, {"kind": "accepted", "group": 201, "tokens": 90}])
    with MetricsWriter(run_dir) as writer:
        row = {"reward/mean": 0.5, "cost/total": 0.0125, "cost/per_hour": 1.0}
        writer.write(5, row, at=5003.0)
    summary = summarise_run(run_dir)
    assert summary.num_tokens == 250
    assert dict(summary.learning)["cost"] == (
        "$0.01, $1.00/h in the end, $50 per million accepted tokens"
    )


def test_a_bound_that_moved_is_told_with_its_range_and_its_end(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=4)
    with MetricsWriter(run_dir) as writer:
        for step, bound in ((5, 0), (6, 0), (7, 1)):
            writer.write(step, {"reward/mean": 0.5, "staleness/bound": bound}, at=1000.0 + step)
    summary = summarise_run(run_dir)
    assert summary.max_staleness == 2
    assert "mean 0.25, at most 1, bound 0 to 2, 1 in the end" in as_text(summary, width=400)


def test_no_score_is_a_pass_rate_where_one_evaluation_had_other_rewards(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=4)
    with MetricsWriter(run_dir) as writer:
        row = {"eval/addition/reward": 0.4, "eval/addition/greedy": 0.45, "eval/version": 3}
        writer.write(3, row, at=1003.0)
    text = as_text(summarise_run(run_dir), width=400)
    assert "held-out reward, sampled" in text
    assert "pass rate" not in text


def test_tokens_thrown_away_for_age_are_counted_over_a_resume(make_run: MakeRun) -> None:
    run_dir = make_run(num_steps=4)
    write_ledger(run_dir, [{"kind": "lineage", "lineage": 2, "fork_step": 4, "at": 5000.0}])
    with MetricsWriter(run_dir) as writer:
        for step, lineage, sampled, too_old in ((4, 1, 300, 9), (5, 2, 100, 0), (6, 2, 200, 1)):
            row = {"reward/mean": 0.5, "lineage": lineage}
            row |= {"count/tokens/sampled": sampled, "count/tokens/too_old": too_old}
            writer.write(step, row, at=5003.0 + step)
    summary = summarise_run(run_dir)
    assert (summary.num_sampled, summary.num_too_old) == (500, 10)
    text = "500 sampled, 160 trained, 10 thrown away for age (2.0%)"
    assert text in as_text(summary, width=400)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", "not JSON"),
        ("metrics.jsonl", "not JSON"),
        ("ledger.sqlite", "file is not a database"),
    ],
)
def test_missing_and_damaged_files_are_named(make_run: MakeRun, name: str, damage: str) -> None:
    path: Path = make_run() / name
    path.write_text("{broken\n{}\n" * 100)
    with pytest.raises(StorageError, match=f"{name}.*{damage}"):
        summarise_run(path.parent)
    path.unlink()
    with pytest.raises(DataError, match=f"{name}: no such file"):
        summarise_run(path.parent)
    if name == "metrics.jsonl":
        path.write_text("")
        with pytest.raises(DataError, match="no optimizer step yet, nothing to sum up"):
            summarise_run(path.parent)


# --- how a run learned ----------------------------------------------------------------------------


def facts(*rows: dict[str, Any], num_last: int = 2) -> dict[str, str]:
    return dict(learning_facts(rows, num_last=num_last, num_tokens=0))


def test_groups_and_ratios_are_those_of_the_end() -> None:
    assert facts({"reward/mean": 0.5}) == {}, "nothing measured is nothing told"
    start = {"groups/useful": 1.0, "groups/all_right": 0.0, "groups/all_wrong": 0.0, "ess": 0.5}
    end = {"groups/useful": 0.6, "groups/all_right": 0.3, "groups/all_wrong": 0.1, "ess": 0.98}
    end |= {"mismatch_kl": 0.0012, "clip_ratio/mean": 0.034}
    found = facts(start, end, end)
    assert found["useful groups"] == (
        "60% in the last 2 steps (rewards all equal: 30% above 0, 10% at 0 or less)"
    )
    assert found["off-policy"] == "ess 0.98, mismatch KL 0.0012, clipped 3.4% in the last 2 steps"


def measured(variance: float, **shares: float) -> dict[str, float]:
    causes = {"staleness": 0.0, "numerics": 0.0, "truncation": 0.0, "tokenisation": 0.0} | shares
    return {"attribution/variance": variance} | {f"attribution/{k}": v for k, v in causes.items()}


def test_causes_weigh_as_much_as_the_variance_they_explain() -> None:
    found = facts(
        measured(0.03, staleness=1.0),
        {"reward/mean": 0.5},
        measured(0.01, staleness=0.2, numerics=0.8),
        {"attribution/variance": 0.0},
    )
    assert found["mismatch"] == (
        "80% staleness, 20% numerics, 0% truncation, 0% tokenisation "
        "(variance 0.02 nats^2, 3 measurements)"
    )
