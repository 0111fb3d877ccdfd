"""`echo-rl plan FILE`: what to rent for a run, what it will cost, and how to start it.

Everything is computed here and now from the file, a run's own records and the catalogue; nothing
is looked up, rented or started.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from rich.console import Console

from echo.cli.command import run_command
from echo.cli.parsers import plan_parser
from echo.cli.plan_hetero import assign_gpus, assignment_text
from echo.cli.plan_run import calibrate, read_ledger, run_report
from echo.cli.plan_text import commands_text, filters_text, fleet_words, plan_tables, refusal_text
from echo.config.fleet_file import FleetRequest, load_fleet
from echo.core.errors import ConfigError, DataError, PlanError, StorageError
from echo.core.extras import import_extra
from echo.fleet.job import Job
from echo.fleet.provisioning import Forecast, Provisioning, provision, refuse
from echo.records.run_files import RunRates, _values, read_config, read_metrics
from echo.ui.cost_plot import CostPoint, cost_plot


def read_rates(run_dir: Path) -> RunRates:
    """Return the rates of the run in `run_dir`.

    Raises:
        DataError: if it has made no step or accepted no group yet.
        StorageError: if a file is damaged.
    """
    config = read_config(run_dir)
    rows = read_metrics(run_dir).train
    group_size = config["batch"]["group_size"]
    workers, group_tokens = read_ledger(run_dir / "ledger.jsonl", group_size)
    if not rows or not workers:
        raise DataError(f"{run_dir}: no step or no accepted group yet, no rates to take")
    rows = rows[len(rows) // 5 :]  # the first fifth is run-in
    train_s = fmean(_values(rows, "time/train"))
    wait_s = fmean(_values(rows, "time/wait_for_batch"))
    broadcasts = [
        (row["broadcast/seconds"], row["broadcast/goodput"] * row["broadcast/seconds"])
        for row in rows
        if row.get("broadcast/seconds") and row.get("broadcast/goodput")
    ]
    mean_tokens = fmean(group_tokens) / group_size
    job = Job(
        groups_per_step=config["batch"]["groups_per_step"],
        group_size=group_size,
        max_staleness=config["sync"]["max_staleness"],
        publish_period=round(median(_values(rows, "publish_period") or [1.0])),
        train_s=train_s,
        completion_tokens=mean_tokens,
        max_completion_tokens=max(mean_tokens, config["sampling"]["max_completion_tokens"]),
        # The ledger has totals of groups; lengths within one are taken as independent.
        completion_spread=pstdev(group_tokens) / fmean(group_tokens) * math.sqrt(group_size),
        version_bytes=median(size for _, size in broadcasts) if broadcasts else 0.0,
        margin=0.0,
    )
    return RunRates(
        name=run_dir.resolve().name,
        num_steps=len(rows),
        job=job,
        workers=workers,
        broadcast_s=median(seconds for seconds, _ in broadcasts) if broadcasts else 0.0,
        idle_share=wait_s / (wait_s + train_s) if wait_s + train_s > 0 else 0.0,
        useful_share=fmean(_values(rows, "groups/useful") or [1.0]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command(run, plan_parser().parse_args(argv))


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Do what the arguments say."""
    if not arguments.files:
        return show_run(arguments, console)
    import_extra("scipy", extra="planner", wanted_by="echo-rl plan")
    request = load_fleet(arguments.files)
    if arguments.run is not None:
        request = calibrate(request, read_rates(arguments.run))
    if arguments.hetero:
        return plan_hetero(request, arguments.out, console)
    return plan_fleet(request, arguments.out, console)


def show_run(arguments: argparse.Namespace, console: Console) -> int:
    """Print what a run recorded, beside what the model says of it."""
    if arguments.run is None:
        remedy = "configs/fleet-example.toml is one to start from"
        raise ConfigError(f"no FILE given: name a fleet file ({remedy}), or a run with --from RUN")
    if arguments.hetero:
        raise ConfigError("--hetero divides the GPUs of a fleet file: name one")
    console.print(run_report(read_rates(arguments.run)), markup=False)
    return 0


def plan_fleet(request: FleetRequest, out: Path, console: Console) -> int:
    """Print and write the plan of a request.

    Raises:
        PlanError: if no fleet is sufficient; says why and what would help.
    """
    plan = provision(request.fleet, request.job, request.periods)
    if plan is None:
        raise PlanError(refusal_text(refuse(request.fleet, request.job, request.periods)))
    console.print(plan_tables(request, plan))
    # Not wrapped or coloured: they are there to be copied.
    print(f"\n{filters_text(request, plan)}\n\n{commands_text(request, plan)}\n")
    write_json(out / "plan.json", plan_record(request, plan))
    png = cost_plot(
        [_point(plan, outcome) for outcome in plan.front],
        _point(plan, plan.outcome),
        out / "plan.png",
        title=f"{request.model.name}, {plan.job.rollouts_per_step:.0f} rollouts per step",
    )
    print(f"wrote {out / 'plan.json'} and {png}")
    return 0


def plan_hetero(request: FleetRequest, out: Path, console: Console) -> int:
    """Print and write the division of all GPUs of a request between training and generation."""
    schedule = assign_gpus(request)
    print(assignment_text(request, schedule), file=console.file)
    write_json(out / "hetero.json", to_json(schedule))
    print(f"\nwrote {out / 'hetero.json'}", file=console.file)
    return 0


def plan_record(request: FleetRequest, plan: Provisioning) -> dict[str, Any]:
    """Return the plan as it is written to plan.json."""
    record: dict[str, Any] = to_json(plan)
    record["rent"] = [
        {"offer": offer.name, "region": offer.region, "count": count}
        for offer, count in zip(plan.fleet.offers, plan.outcome.counts, strict=True)
    ]
    record["notices"] = list(request.notices)
    return record


def to_json(value: Any) -> Any:
    """Return `value` in what JSON has: records as objects, infinity as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in dataclasses.fields(value)]
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.name.lower()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, record: Any) -> None:
    """Write a record; its directory is made if missing.

    Raises:
        StorageError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def _point(plan: Provisioning, outcome: Forecast) -> CostPoint:
    return CostPoint(
        fleet_words(plan, outcome),
        outcome.prediction.idle_share,
        outcome.cost_per_h,
        outcome.cost_per_million_tokens,
    )


if __name__ == "__main__":
    sys.exit(main())
