"""What `echo-rl sim` prints and writes of one run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from echo.core.errors import StorageError
from echo.core.units import format_duration
from echo.fleet.overlap import Prediction, predict
from echo.sim.records import BillRecord, History, StepRecord, rent, traffic_cost
from echo.sim.scenario import Scenario
from echo.sim.summary import RUN_IN, Summary
from echo.ui.sim_plot import StepPoint, simulation_plot

AFTER = f" after the first {RUN_IN:.0%} of the steps"
MAX_DECISIONS = 6
"""Changes of the active workers that are listed, the last ones; sim.json has all."""
MAX_LINKS = 8
"""Links that are listed, those with the most bytes."""


def summary_text(scenario: Scenario, summary: Summary, *, wall_s: float) -> str:
    """Return a run in words, beside what the overlap model says of the same fleet."""
    expected = prediction(scenario, summary)
    nodes = ", ".join(
        f"{count} {offer.name}"
        for offer, count in zip(scenario.fleet.offers, scenario.counts, strict=True)
        if count
    )
    lags = ", ".join(f"{lag}: {share:.0%}" for lag, share in summary.staleness.items())
    lost = ", ".join(f"{number} {reason}" for reason, number in summary.discarded.items())
    lines = [
        f"{summary.name}: {nodes}; seed {summary.seed}",
        f"  {summary.num_steps} steps in {format_duration(summary.duration_s)} of simulated time, "
        f"{format_duration(summary.step_s)} each{AFTER}; simulated in {format_duration(wall_s)}",
        f"  learner waits: {waits(summary)}; the overlap model says {expected.idle_share:.1%}",
        f"  staleness: mean {summary.mean_staleness:.2f}{AFTER} (the model: "
        f"{expected.mean_staleness:.2f}); {lags or 'nothing trained'}",
        f"  broadcast: {format_duration(summary.broadcast_s)} until every worker holds a version; "
        f"published every {summary.publish_period:.3g} steps",
        f"  thrown away: {summary.thrown_away:.1%} of the sampled tokens; groups not trained: "
        f"{lost or 'none'}; {summary.num_deaths} deaths",
        f"  cost: ${summary.cost:.2f}, ${summary.cost_per_step:.3f} per step, "
        f"${summary.cost_per_million_tokens:.3f} per million trained tokens; "
        f"learner ${summary.cost_of_learner:.2f}, nodes ${summary.cost_of_nodes:.2f}, traffic "
        f"${summary.cost_of_traffic:.2f}",
    ]
    lines += _events_text(summary)
    largest = sorted(summary.gigabytes.items(), key=lambda item: -item[1])[:MAX_LINKS]
    lines += [f"  {size:9.2f} GB {link}" for link, size in largest if size >= 0.01]
    if not summary.is_complete:
        why = f"; {summary.end}" if summary.end else ""
        lines.append(f"  NOT FINISHED: {scenario.settings.num_steps} steps were asked for{why}")
    return "\n".join(lines)


def waits(summary: Summary) -> str:
    """Return how much the learner waits, the same words in the text and over the plot."""
    return f"{summary.idle_share:.1%} of the time{AFTER}, {summary.idle_share_in_all:.1%} in all"


def _events_text(summary: Summary) -> list[str]:
    """Return what happened to the learner, and whom it sent on standby."""
    lines = []
    if summary.num_restarts:
        lines.append(
            f"  the learner died {summary.num_restarts} times, was away for "
            f"{format_duration(summary.down_s)} and made {summary.num_steps_undone} steps again"
        )
    if summary.cost_as_counted is not None:
        lines.append(
            f"  activation: {len(summary.decisions)} changes, {summary.num_standby} workers on "
            f"standby in the end; the learner itself counts ${summary.cost_as_counted:.2f}"
        )
    shown = summary.decisions[-MAX_DECISIONS:]
    lines += [f"    at {format_duration(float(str(d['time_s'])))}: {d['text']}" for d in shown]
    return lines


def prediction(scenario: Scenario, summary: Summary) -> Prediction:
    """Return what the overlap model says of the fleet, with the broadcast that was measured."""
    job, counts = scenario.job, scenario.counts
    return predict(
        job,
        rate=scenario.fleet.rate(job, counts),
        broadcast_s=summary.broadcast_s or scenario.fleet.broadcast_s(job, counts),
        latency_s=scenario.fleet.latency_s(job, counts),
        is_paced=scenario.settings.is_paced,
    )


def write_run(scenario: Scenario, summary: Summary, history: History, out: Path) -> list[Path]:
    """Write metrics.jsonl, as a run would, and the plot; return the files.

    Raises:
        StorageError: if one cannot be written.
    """
    path = out / "metrics.jsonl"
    costs = step_costs(scenario, history)
    standby = [bill.standby_per_h for bill in history.bills] or [0.0] * len(costs)
    rows = [step_row(step, cost) for step, cost in zip(history.steps, costs, strict=True)]
    rows = [row | bill_row(bill) for row, bill in itertools.zip_longest(rows, history.bills)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    if not history.steps:
        return [path]
    points = [
        StepPoint(
            begins_s=step.time_s - step.trained_s,
            ends_s=step.time_s,
            waited_s=step.waited_s,
            staleness=step.staleness,
            cost=cost,
            cost_per_h=3600 * (cost - before) / max(1e-9, step.time_s - since_s),
            standby_per_h=standby_per_h,
        )
        for step, cost, before, since_s, standby_per_h in zip(
            history.steps,
            costs,
            [0.0, *costs],
            [0.0, *(step.time_s for step in history.steps)],
            standby,
            strict=False,
        )
    ]
    png = simulation_plot(
        points, history.traffic, out / "sim.png", title=scenario.name, waits=waits(summary)
    )
    return [path, png]


def step_row(step: StepRecord, cost: float) -> dict[str, Any]:
    """Return one row of metrics.jsonl under the names of a run's own."""
    total = max(1e-9, step.tokens)
    row: dict[str, Any] = {
        "step": step.step,
        "time": step.time_s,
        "time/step": step.waited_s + step.trained_s,
        "time/train": step.trained_s,
        "time/wait_for_batch": step.waited_s,
        "learner/idle_ratio": step.waited_s / max(1e-9, step.waited_s + step.trained_s),
        "staleness/mean": sum(lag * n for lag, n in step.staleness.items()) / total,
        "staleness/max": max(step.staleness, default=0),
        "staleness/hist": {str(lag): n for lag, n in sorted(step.staleness.items())},
        "publish_period": step.publish_period,
        "cost/total": cost,
    }
    if step.broadcast_s is not None:
        row["broadcast/seconds"] = step.broadcast_s
    return row


def bill_row(bill: BillRecord | None) -> dict[str, Any]:
    """Return what a step cost as the learner counts it, under the names of a run's own."""
    if bill is None:
        return {}
    return {
        "cost/per_hour": bill.per_h,
        "cost/standby_per_hour": bill.standby_per_h,
        "workers/active": bill.num_active,
        "workers/standby": bill.num_standby,
    }


def step_costs(scenario: Scenario, history: History) -> list[float]:
    """Return $ spent up to each step."""
    relays = sum(region.relay_price_per_h for region in scenario.fleet.regions.values())
    hourly = relays + scenario.job.learner_price_per_h
    found = []
    for step, traffic in zip(history.steps, history.traffic_at_steps, strict=True):
        nodes = sum(rent(rental, scenario.prices, step.time_s) for rental in history.rentals)
        found.append(nodes + hourly * step.time_s / 3600 + traffic_cost(scenario, traffic))
    return list(itertools.accumulate(found, max))
