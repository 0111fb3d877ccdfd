"""`echo-rl sim SCENARIO`: simulates a run in virtual time.

The learner, the relays and the workers run the role code of `echo-rl node`, all in this process.
Training, sampling, disk and network are replaced by simulated times. Nothing is rented.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from echo.cli import interrupts
from echo.cli.commands.plan import to_json, write_json
from echo.cli.output import run_command
from echo.cli.parsers import sim_parser
from echo.cli.scenario import load_scenario
from echo.config.fleet_file import Override, Source, read_files
from echo.config.layers import OVERRIDE
from echo.core.errors import ConfigError, StorageError
from echo.core.units import counted, format_duration
from echo.fleet.overlap import Prediction, predict
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import (
    RUN_IN,
    BillRecord,
    History,
    StepRecord,
    Summary,
    rent,
    summarise,
    traffic_cost,
)
from echo.ui.plots import StepPoint, simulation_plot, sweep_plot

# --- sweep ----------------------------------------------------------------------------------------


FIGURES: Mapping[str, Callable[[Summary], float]] = {
    "waits": lambda summary: summary.idle_share,
    "staleness": lambda summary: summary.mean_staleness,
    "thrown away": lambda summary: summary.thrown_away,
    "$ per step": lambda summary: summary.cost_per_step,
}
"""The figures that a sweep compares, each with the function that reads it from a summary."""


def sweep(
    files: Sequence[Source],
    overrides: Sequence[Override],
    texts: Sequence[str],
    num_seeds: int,
    name: str,
    out: Path,
    console: Console,
) -> int:
    """Simulate all combinations of the swept values and seeds; print and write the results.

    Return 0 if all simulated runs were complete, otherwise 1.

    Raises:
        ConfigError: if a swept key or value is wrong.
    """
    axes = [_axis(text) for text in texts]
    combinations = list(itertools.product(*(values for _, values in axes)))
    scenarios: list[Scenario] = []
    for values in combinations:
        swept = [
            ("--sweep", f"{key}={value}") for (key, _), value in zip(axes, values, strict=True)
        ]
        scenario, _ = load_scenario(files, [*overrides, *swept], name=name)
        first = scenario.settings.seed
        scenarios += [scenario.with_seed(seed) for seed in range(first, first + num_seeds)]
    summaries = run_all(scenarios)
    found = [summaries[start : start + num_seeds] for start in range(0, len(summaries), num_seeds)]
    keys = [key for key, _ in axes]
    console.print(_table(keys, combinations, found, num_seeds))
    rows = [
        {"set": dict(zip(keys, values, strict=True)), "runs": [to_json(run) for run in runs]}
        for values, runs in zip(combinations, found, strict=True)
    ]
    write_json(out / "sweep.json", {"rows": rows})
    png = sweep_plot(
        [", ".join(values) for values in combinations],
        {label: [[of(run) for run in runs] for runs in found] for label, of in FIGURES.items()},
        out / "sweep.png",
        key=", ".join(keys),
        title=name,
    )
    print(f"wrote {out / 'sweep.json'} and {png}")
    return 0 if all(run.is_complete for runs in found for run in runs) else 1


def run_all(scenarios: Sequence[Scenario]) -> list[Summary]:
    """Simulate the scenarios in parallel, one process per core; return their summaries in order."""
    num_processes = min(len(scenarios), os.cpu_count() or 1)
    if num_processes < 2:
        return [run_one(scenario) for scenario in scenarios]
    # Spawned, not forked: a fork would have the locks of this process's threads, but not the
    # threads.
    with interrupts.unwinding(), ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        try:
            # An exception while the processes start would leave a pool that cannot be ended.
            held: list[int] = []
            before: dict[int, Any] = {
                number: signal.signal(number, lambda number, _: held.append(number))
                for number in (signal.SIGTERM, signal.SIGHUP)
                if signal.getsignal(number) != signal.SIG_IGN
            }
            # The processes inherit this: only the present process handles Ctrl-C, and then ends
            # them.
            before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
            futures = [pool.submit(run_one, scenario) for scenario in scenarios]
            for number, handler in before.items():
                signal.signal(number, handler)
            for number in held:
                signal.raise_signal(number)
            return [future.result() for future in futures]
        except SystemExit:
            for process in active_children():
                process.kill()
            raise


def run_one(scenario: Scenario) -> Summary:
    """Simulate one scenario and return its summary."""
    return summarise(scenario, Simulation(scenario).run())


def _axis(text: str) -> tuple[str, list[str]]:
    key, _, value = text.partition("=")
    values = [part.strip() for part in value.split(",") if part.strip()]
    if not values:
        raise ConfigError(f"--sweep {text}: write key=value,value,...")
    return key.strip(), values


def _table(
    keys: Sequence[str],
    combinations: Sequence[Sequence[str]],
    found: Sequence[Sequence[Summary]],
    num_seeds: int,
) -> Table:
    title = "" if num_seeds == 1 else f"means of {num_seeds} seeds, with the range of the waiting"
    table = Table(title=title, title_justify="left")
    for key in keys:
        table.add_column(key)
    for label in ("s per step", "waits", "staleness", "thrown away", "broadcast s", "$ per step"):
        table.add_column(label, justify="right")
    for values, runs in zip(combinations, found, strict=True):
        idle = [run.idle_share for run in runs]
        spread = f" ({min(idle):.1%}-{max(idle):.1%})" if len(runs) > 1 else ""
        table.add_row(
            *values,
            f"{fmean(run.step_s for run in runs):.4g}",
            f"{fmean(idle):.1%}{spread}",
            f"{fmean(run.mean_staleness for run in runs):.2f}",
            f"{fmean(run.thrown_away for run in runs):.1%}",
            f"{fmean(run.broadcast_s for run in runs):.3g}",
            f"{fmean(run.cost_per_step for run in runs):.4g}",
        )
    return table


# --- one run --------------------------------------------------------------------------------------


AFTER = f" after the first {RUN_IN:.0%} of the steps"
MAX_DECISIONS = 6
"""Largest number of changes of the active workers that the summary prints. sim.json has all
changes."""
MAX_LINKS = 8
"""Largest number of links that the summary prints. Links with more bytes come first."""


STALENESS_APART = 0.5
"""If the simulated and the predicted mean staleness differ by more than this number of steps, the
summary explains why."""


def summary_text(scenario: Scenario, summary: Summary, *, wall_s: float) -> str:
    """Return text that compares a simulated run's figures with the overlap model's predictions."""
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
        f"  {counted(summary.num_steps, 'step')} in {format_duration(summary.duration_s)} of "
        f"simulated time, {format_duration(summary.step_s)} each{AFTER}; simulated in "
        f"{format_duration(wall_s)}",
        f"  learner waits: {waits(summary)}; the overlap model says {expected.idle_share:.1%}",
        f"  staleness: mean {summary.mean_staleness:.2f}{AFTER} (the model: "
        f"{expected.mean_staleness:.2f}); {lags or 'nothing trained'}",
        f"  broadcast: {format_duration(summary.broadcast_s)} until every worker holds a version; "
        f"published every {summary.publish_period:.3g} steps",
        f"  thrown away: {summary.thrown_away:.1%} of the sampled tokens; groups not trained: "
        f"{lost or 'none'}; nodes died {_times(summary.num_deaths)}",
        f"  cost: ${summary.cost:.2f}, ${summary.cost_per_step:.3f} per step, "
        f"${summary.cost_per_million_tokens:.3f} per million trained tokens; "
        f"learner ${summary.cost_of_learner:.2f}, nodes ${summary.cost_of_nodes:.2f}, traffic "
        f"${summary.cost_of_traffic:.2f}",
    ]
    if abs(summary.mean_staleness - expected.mean_staleness) > STALENESS_APART:
        settings = scenario.settings
        is_early = settings.is_eager or not settings.is_paced
        lines.append(
            "  staleness differs from the model's, which assumes a long run in which all workers "
            "work all the time" + (" and groups are granted just in time" if is_early else "")
        )
    lines += _events_text(summary)
    largest = sorted(summary.gigabytes.items(), key=lambda item: -item[1])[:MAX_LINKS]
    lines += [f"  {size:9.2f} GB {link}" for link, size in largest if size >= 0.01]
    if not summary.is_complete:
        why = f"; {summary.end}" if summary.end else ""
        steps = counted(scenario.settings.num_steps, "step")
        lines.append(f"  NOT FINISHED: the scenario asks for {steps}{why}")
    return "\n".join(lines)


def waits(summary: Summary) -> str:
    """Return text that says for which share of time the learner waits."""
    return f"{summary.idle_share:.1%} of the time{AFTER}, {summary.idle_share_in_all:.1%} in all"


def _events_text(summary: Summary) -> list[str]:
    lines = []
    if summary.cost_as_counted is not None:
        lines.append(
            f"  activation: {counted(len(summary.decisions), 'change')}, "
            f"{counted(summary.num_standby, 'worker')} on standby in the end; the learner itself "
            f"counts ${summary.cost_as_counted:.2f}"
        )
    shown = summary.decisions[-MAX_DECISIONS:]
    lines += [f"    at {format_duration(float(str(d['time_s'])))}: {d['text']}" for d in shown]
    return lines


def prediction(scenario: Scenario, summary: Summary) -> Prediction:
    """Return the overlap model's prediction for broadcasts as long as the simulated ones."""
    job, counts = scenario.job, scenario.counts
    return predict(
        job,
        rate=scenario.fleet.rate(job, counts),
        broadcast_s=summary.broadcast_s or scenario.fleet.broadcast_s(job, counts),
        latency_s=scenario.fleet.mean_latency_s(job, counts),
        nodes=scenario.fleet.speeds(job, counts),
        is_paced=scenario.settings.is_paced,
    )


def write_run(scenario: Scenario, summary: Summary, history: History, out: Path) -> list[Path]:
    """Write the plot, and metrics.jsonl in the format of a real run; return the paths.

    Raises:
        StorageError: if a file cannot be written.
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
    """Return a step's row of metrics.jsonl, with the same metric names as a real run."""
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
    """Return the metrics that state a step's costs. Without a bill, return no metrics."""
    if bill is None:
        return {}
    return {
        "cost/per_hour": bill.per_h,
        "cost/standby_per_hour": bill.standby_per_h,
        "workers/active": bill.num_active,
        "workers/standby": bill.num_standby,
    }


def step_costs(scenario: Scenario, history: History) -> list[float]:
    """Return the total cost in $ at the end of each step."""
    relays = sum(region.relay_price_per_h for region in scenario.fleet.regions.values())
    hourly = relays + scenario.job.learner_price_per_h
    found = []
    for step, traffic in zip(history.steps, history.traffic_at_steps, strict=True):
        nodes = sum(rent(rental, scenario.prices, step.time_s) for rental in history.rentals)
        found.append(nodes + hourly * step.time_s / 3600 + traffic_cost(scenario, traffic))
    return list(itertools.accumulate(found, max))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `echo-rl sim` and return its exit code."""
    return run_command(run, sim_parser().parse_args(argv))


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Simulate one scenario, or all combinations of a sweep; return the exit code."""
    if not arguments.files:
        remedy = "configs/scenario-example.toml is one to start from"
        raise ConfigError(f"no SCENARIO given: name a scenario or a fleet file ({remedy})")
    if arguments.seeds < 1 or (arguments.seeds > 1 and not arguments.sweep):
        raise ConfigError("--seeds is the number of seeds of each value of --sweep, at least 1")
    files = read_files(arguments.files)
    overrides = [(OVERRIDE, text) for text in arguments.set]
    name = arguments.files[0].stem
    if arguments.sweep:
        if arguments.plan is not None:
            raise ConfigError("--plan and --sweep do not go together; write the counts to sim.rent")
        texts, num_seeds = arguments.sweep, arguments.seeds
        return sweep(files, overrides, texts, num_seeds, name, arguments.out, console)
    scenario, request = load_scenario(files, overrides, name=name, plan=arguments.plan)
    for notice in request.notices:
        console.print(f"note: {notice}", style="dim")
    summary, history = simulate(scenario, console)
    return write(scenario, summary, history, to_json(summary), arguments.out)


def simulate(scenario: Scenario, console: Console) -> tuple[Summary, History]:
    """Simulate a scenario and print its summary; return the summary and the history."""
    began_at = time.monotonic()
    history = Simulation(scenario).run()
    summary = summarise(scenario, history)
    text = summary_text(scenario, summary, wall_s=time.monotonic() - began_at)
    console.print(text, highlight=False)
    return summary, history


def write(
    scenario: Scenario, summary: Summary, history: History, record: dict[str, Any], out: Path
) -> int:
    """Write the plot, metrics.jsonl and sim.json of a simulated run; return the exit code."""
    write_json(out / "sim.json", record)
    written = write_run(scenario, summary, history, out)
    print(f"wrote {out / 'sim.json'}, {', '.join(map(str, written))}")
    return 0 if summary.is_complete else 1


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
