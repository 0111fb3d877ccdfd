"""Rates from what a run recorded: by hand, and put in place of estimates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo.cli.commands.plan import calibrate, main, read_rates, run_report
from echo.core.errors import ConfigError, DataError, StorageError
from echo.records.run_files import WorkerRate
from tests.config.test_fleet import changed, parsed
from tests.records.rows import write_ledger


def write_run(directory: Path, ledger: list[dict[str, Any]], steps: int = 5) -> Path:
    """A run of 2 groups of 4 per step: 8 s of training, 2 s of waiting."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "batch": {"groups_per_step": 2, "group_size": 4},
        "sync": {"max_staleness": 3, "publish_period": "auto"},
        "sampling": {"max_completion_tokens": 300},
    }
    (directory / "config.json").write_text(json.dumps(config))
    rows = [
        {
            "step": step,
            "time": 10.0 * step,
            "reward/mean": 0.5,
            "time/train": 8.0,
            "time/wait_for_batch": 2.0,
            "publish_period": 2,
            "broadcast/seconds": 4.0,
            "broadcast/goodput": 25e6,
            "groups/useful": 0.75,
        }
        for step in range(1, steps + 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_ledger(directory, ledger)
    return directory


def group(number: int, worker: str, begin: float, end: float, tokens: int) -> list[dict[str, Any]]:
    who = {"group": number, "attempt": 0, "worker": worker}
    return [
        {"kind": "granted", **who, "at": begin},
        {"kind": "accepted", **who, "at": end, "tokens": tokens},
    ]


LEDGER = [
    {"kind": "lineage", "lineage": 1, "fork_step": 0, "at": 0.0},
    # w-1 holds groups from 0 to 6 s (two of them at a time) and from 10 to 14 s: 10 s, 2000 tokens.
    *group(1, "RTX-4090-1", 0.0, 4.0, 800),
    *group(2, "RTX-4090-1", 2.0, 6.0, 400),
    *group(3, "RTX-4090-1", 10.0, 14.0, 800),
    *group(4, "RTX-4090-2", 0.0, 5.0, 500),
]


def test_rates_by_hand(tmp_path: Path) -> None:
    rates = read_rates(write_run(tmp_path / "run", LEDGER))
    assert rates.workers["RTX-4090-1"].tokens_per_s == pytest.approx(200)
    assert rates.workers["RTX-4090-1"].concurrency == 8
    assert rates.workers["RTX-4090-1"].group_s == 4.0
    assert rates.workers["RTX-4090-2"].tokens_per_s == pytest.approx(100)
    assert rates.job.completion_tokens == pytest.approx(2500 / 16)
    assert rates.job.version_bytes == 1e8
    assert (rates.job.publish_period, rates.broadcast_s) == (2, 4.0)
    assert rates.idle_share == pytest.approx(0.2)


def test_the_time_in_which_the_learner_was_down_does_not_make_a_worker_slow(tmp_path: Path) -> None:
    before = LEDGER[:-2]
    held = group(9, "RTX-4090-1", 13.0, 3600.0 + 14.0, 200)
    resumed = {"kind": "lineage", "lineage": 2, "fork_step": 0, "at": 3600.0 + 13.5}
    ledger = sorted([*before, *held, resumed], key=lambda record: record["at"])
    rates = read_rates(write_run(tmp_path / "run", ledger))
    # The learner was down from its last record, at 14 s: 2200 tokens in 10.5 s.
    assert rates.workers["RTX-4090-1"].tokens_per_s == pytest.approx(2200 / 10.5)


def test_the_report_sets_the_prediction_beside_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", LEDGER)
    assert main(["--from", str(run)]) == 0
    text = capsys.readouterr().out
    assert text.strip() == run_report(read_rates(run))
    # 300 tokens/s of 156.25 each: 1.92 rollouts/s; the rule asks for 8 useful ones in 8 s.
    assert "75% of the groups were useful" in text
    assert "rate: 1.92 rollouts/s, the rule asks for 1.333\n" in text
    assert "learner waits: recorded 20.0%, predicted 0.0%" in text


def test_the_report_takes_the_mean_of_the_groups_and_not_the_slowest_worker(tmp_path: Path) -> None:
    rates = read_rates(write_run(tmp_path / "run", LEDGER))
    slow = WorkerRate(tokens_per_s=1.0, concurrency=4, group_s=1000.0)
    known = {"fast": WorkerRate(tokens_per_s=399.0, concurrency=8, group_s=4.0)}
    rates = replace(rates, workers=known | {"slow": slow})
    assert rates.mean_group_s == pytest.approx((399 * 4 + 1000) / 400)
    assert "predicted 0.0%" in run_report(rates)


@pytest.mark.parametrize(("keeps", "needed"), [(False, 8 / 0.75), (True, 8)])
def test_groups_without_a_signal_are_made_in_vain_unless_they_are_trained(
    tmp_path: Path, keeps: bool, needed: float
) -> None:
    run = write_run(tmp_path / "run", LEDGER)
    config = json.loads((run / "config.json").read_text())
    config["batch"]["keep_zero_variance"] = keeps
    (run / "config.json").write_text(json.dumps(config))
    rates = read_rates(run)
    assert rates.useful_share == 0.75
    assert rates.job.rollouts_per_step == pytest.approx(needed)


def test_a_plan_takes_the_rates_of_the_workers_that_carry_an_offers_name(tmp_path: Path) -> None:
    rates = read_rates(write_run(tmp_path / "run", LEDGER))
    request = calibrate(parsed(changed()), rates)
    [offer] = request.fleet.offers
    assert (offer.tokens_per_s, offer.concurrency) == pytest.approx((150, 6))
    # 8 s for 8 rollouts there, 64 rollouts of the same length here.
    assert request.job.train_s == pytest.approx(64)
    assert request.job.version_bytes == 1e8
    assert request.notices[0] == "learner: 64 s per step from run"


def test_a_worker_belongs_to_the_offer_with_the_longest_name_that_fits(tmp_path: Path) -> None:
    spot = changed()["offers"][0] | {"name": "RTX 4090 (spot)"}
    workers = [
        *LEDGER,
        # As `--for shell` and `--for kubernetes` name workers of the second offer.
        *group(5, "RTX-4090-spot--1", 0.0, 10.0, 400),
        *group(6, "rtx-4090-spot--0", 0.0, 10.0, 200),
    ]
    rates = read_rates(write_run(tmp_path / "run", workers))
    request = calibrate(parsed(changed() | {"offers": [*changed()["offers"], spot]}), rates)
    assert [offer.tokens_per_s for offer in request.fleet.offers] == pytest.approx([150, 30])


def test_a_run_of_other_workers_is_refused_with_both_lists(tmp_path: Path) -> None:
    rates = read_rates(write_run(tmp_path / "run", LEDGER))
    with pytest.raises(
        ConfigError, match=r"its workers are RTX-4090-1, RTX-4090-2, the offers box"
    ):
        calibrate(parsed(changed(("offers.0.name", "box"))), rates)


def test_a_run_without_steps_or_with_damage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no accepted group yet"):
        read_rates(write_run(tmp_path / "empty", LEDGER[:1]))
    with pytest.raises(DataError, match="no step"):
        read_rates(write_run(tmp_path / "early", LEDGER, steps=0))
    bad = write_run(tmp_path / "bad", LEDGER)
    (bad / "ledger.sqlite").write_bytes(b"?" * 9000)
    with pytest.raises(StorageError, match=r"ledger.sqlite is damaged"):
        read_rates(bad)
    with pytest.raises(DataError, match=r"is .* the directory of a run"):
        read_rates(tmp_path / "absent")
