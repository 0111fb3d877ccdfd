"""Simulate every value of a parameter, or every combination of several, over some seeds."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from echo.cli import interrupts
from echo.cli.plan import to_json, write_json
from echo.cli.scenario import load_scenario
from echo.config.fleet_file import override, split_override
from echo.core.errors import ConfigError
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import Summary, summarise
from echo.ui.sim_plot import sweep_plot

FIGURES: Mapping[str, Callable[[Summary], float]] = {
    "waits": lambda summary: summary.idle_share,
    "staleness": lambda summary: summary.mean_staleness,
    "thrown away": lambda summary: summary.thrown_away,
    "$ per step": lambda summary: summary.cost_per_step,
}
"""What is compared."""


def sweep(
    tables: Mapping[str, Any],
    texts: Sequence[str],
    num_seeds: int,
    name: str,
    source: str,
    out: Path,
    console: Console,
) -> int:
    """Simulate all combinations, print and write them.

    Args:
        tables: the scenario as it was read.
        texts: "key=value,value,..." for each parameter.
        num_seeds: how often each combination is simulated, with seeds from the scenario's on.
        name: for headings.
        source: what to call the file in messages.
        out: where sweep.json and sweep.png go.
        console: where to print.

    Raises:
        ConfigError: if a key or a value is wrong.
    """
    axes = [_axis(text) for text in texts]
    combinations = list(itertools.product(*(values for _, values in axes)))
    scenarios: list[Scenario] = []
    for values in combinations:
        changed = copy.deepcopy(dict(tables))
        for (key, _), value in zip(axes, values, strict=True):
            override(changed, key, value)
        scenario, _ = load_scenario(changed, name=name, source=source)
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
    """Simulate scenarios, as many at a time as there are cores; return what each comes to."""
    num_processes = min(len(scenarios), os.cpu_count() or 1)
    if num_processes < 2:
        return [run_one(scenario) for scenario in scenarios]
    # Started anew, not forked: a fork would inherit whatever threads there are, half alive.
    with interrupts.unwinding(), ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        try:
            # An exception in the middle of starting them would leave a pool that cannot be ended.
            held: list[int] = []
            before: dict[int, Any] = {
                number: signal.signal(number, lambda number, _: held.append(number))
                for number in (signal.SIGTERM, signal.SIGHUP)
                if signal.getsignal(number) != signal.SIG_IGN
            }
            # They inherit it: Ctrl-C is for this process alone, which ends them.
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
    """Simulate a scenario."""
    return summarise(scenario, Simulation(scenario).run())


def _axis(text: str) -> tuple[str, list[str]]:
    key, value = split_override(text)
    values = [part.strip() for part in value.split(",") if part.strip()]
    if not values:
        raise ConfigError(f"--sweep {text}: write key=value,value,...")
    return key, values


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
