"""Replay: predict a recorded run from its inputs.

Taken from the run is what the simulator has no other way to know: tokens per second of a group on
each worker and how many groups it held at most, lengths of groups, times of its optimizer steps and
broadcasts, the share of groups from which something could be learned. All else, such as who waits
for whom, how old tokens are and what is dropped, is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from echo.cli.plan import read_rates
from echo.config.fleet_file import SimRow
from echo.config.schema import PROFILES
from echo.core.units import format_duration
from echo.fleet.market import UNLIMITED, Offer, Region, RentedFleet
from echo.records.ledger import deliveries_of, read_records, totals_of
from echo.records.run_files import (
    MetricsRow,
    RunRates,
    read_config,
    read_metrics,
    values_of,
)
from echo.sim.lengths import RecordedLengths
from echo.sim.scenario import Scenario
from echo.sim.summary import RUN_IN, Summary

REGION = "recorded"
REPLAY_CHUNKS = 8
"""Grain of the versions of a replayed run: its broadcasts take what was recorded anyway."""


def recorded_scenario(run_dir: Path) -> Scenario:
    """Return the scenario of a recorded run.

    Raises:
        DataError: if it has made no step or accepted no group yet.
        StorageError: if a file is damaged.
    """
    rates, config = read_rates(run_dir), read_config(run_dir)
    rows = read_metrics(run_dir).train
    records = list(read_records(run_dir))
    totals = totals_of(records)
    job, network = rates.job, config.get("network", {})
    defaults = PROFILES[config.get("profile", "lan")]
    version_bytes = max(1.0, job.version_bytes)
    rate = version_bytes / rates.broadcast_s if rates.broadcast_s else UNLIMITED

    def network_s(name: str) -> float:
        return float(network.get(name, defaults[f"network.{name}"]))

    offers = tuple(_offer(name, rates) for name in rates.workers)
    return Scenario(
        name=f"{rates.name}, replayed",
        fleet=RentedFleet(
            offers=offers,
            regions={REGION: Region(name=REGION, bytes_per_s=rate, latency_s=0.0005)},
            uplink_bytes_per_s=UNLIMITED,
        ),
        job=replace(job, version_bytes=version_bytes),
        counts=[1] * len(offers),
        settings=SimRow(
            num_steps=len(rows),
            chunks_per_version=REPLAY_CHUNKS,
            heartbeat_s=network_s("heartbeat_s"),
            dead_after_s=network_s("dead_after_s"),
            lease_timeout_s=network_s("lease_timeout_s"),
            reconnect_for_s=network_s("reconnect_for_s"),
            # A group goes at the pace that was recorded from grant to acceptance, in which all
            # waiting is contained, however many are held.
            alone_speedup=1.0,
            queue_share=0.0,
            setup_s=0.5,
            join_within_s=0.5,
            swap_s=0.0,
            publish_s=job.publish_period * _overhead_s(rows),
        ),
        lengths=RecordedLengths(
            [each.num_tokens for each in deliveries_of(records)],
            group_size=job.group_size,
            useful_share=totals.num_accepted
            / max(1, totals.num_accepted + totals.num_without_signal),
        ),
        train_times=values_of(rows, "time/train"),
    )


def _offer(name: str, rates: RunRates) -> Offer:
    worker = rates.workers[name]
    group_size = rates.job.group_size
    num_groups = max(1, worker.concurrency // group_size)
    return Offer(
        name=name,
        region=REGION,
        count=1,
        price_per_h=0.0,
        tokens_per_s=num_groups * worker.pace,
        concurrency=num_groups * group_size,
        down_bytes_per_s=UNLIMITED,
        up_bytes_per_s=UNLIMITED,
    )


def _overhead_s(rows: Sequence[MetricsRow]) -> float:
    """Return the mean seconds of a step in which the learner neither trains nor waits."""
    spent = [
        row["time/step"] - row["time/train"] - row["time/wait_for_batch"]
        for row in rows[1:]
        if row.get("time/step")
    ]
    return max(0.0, fmean(spent)) if spent else 0.0


def comparison(run_dir: Path, summary: Summary) -> tuple[str, dict[str, Mapping[str, float]]]:
    """Return recorded beside simulated figures, as text and as a record."""
    rows = read_metrics(run_dir).train
    counted = rows[int(RUN_IN * len(rows)) :]
    step_s = fmean(values_of(counted, "time/step"))
    idle = sum(values_of(counted, "time/wait_for_batch")) / sum(values_of(counted, "time/step"))
    hist: dict[int, float] = {}
    for row in counted:
        for lag, tokens in row.get("staleness/hist", {}).items():
            hist[int(lag)] = hist.get(int(lag), 0.0) + tokens
    total = max(1e-9, sum(hist.values()))
    recorded = {
        "step_s": step_s,
        "idle_share": idle,
        "mean_staleness": sum(lag * tokens for lag, tokens in hist.items()) / total,
        "max_staleness": float(max(hist, default=0)),
    }
    simulated = {name: float(getattr(summary, name)) for name in recorded}
    lines = [f"  {'':16}{'recorded':>12}{'simulated':>12}"]
    for label, name, show in (
        ("s per step", "step_s", format_duration),
        ("learner waits", "idle_share", "{:.1%}".format),
        ("mean staleness", "mean_staleness", "{:.2f}".format),
        ("max staleness", "max_staleness", "{:.0f}".format),
    ):
        lines.append(f"  {label:16}{show(recorded[name]):>12}{show(simulated[name]):>12}")
    return "\n".join(lines), {"recorded": recorded, "simulated": simulated}
