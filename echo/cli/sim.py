"""`echo-rl sim SCENARIO`: what a run would do, from the code that would do it, on virtual time.

Nothing is rented, started or looked up: learner, relays and workers are the sessions of
`echo-rl node`, in one process; only training, sampling, disk and network are replaced by times.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from echo.cli.command import run_command
from echo.cli.parsers import sim_parser
from echo.cli.plan import to_json, write_json
from echo.cli.scenario import load_scenario
from echo.cli.sim_replay import comparison, recorded_scenario
from echo.cli.sim_sweep import sweep
from echo.cli.sim_text import summary_text, write_run
from echo.config.fleet_file import read_tables
from echo.core.errors import ConfigError
from echo.sim.records import History
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import Summary, summarise

REPLAY_CHUNKS = 8
"""Grain of the versions of a replayed run: its broadcasts take what was recorded anyway."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command(run, sim_parser().parse_args(argv))


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Do what the arguments say."""
    if arguments.replay is not None:
        return replay(arguments, console)
    if not arguments.files:
        remedy = "configs/scenario-example.toml is one to start from"
        raise ConfigError(f"no SCENARIO given: name a scenario or a fleet file ({remedy})")
    if arguments.seeds < 1 or (arguments.seeds > 1 and not arguments.sweep):
        raise ConfigError("--seeds is the number of seeds of each value of --sweep, at least 1")
    tables = read_tables(arguments.files, arguments.set)
    source = ", ".join(path.name for path in arguments.files)
    name = arguments.files[0].stem
    if arguments.sweep:
        if arguments.plan is not None:
            raise ConfigError("--plan and --sweep do not go together; write the counts to sim.rent")
        return sweep(tables, arguments.sweep, arguments.seeds, name, source, arguments.out, console)
    scenario, request = load_scenario(tables, name=name, source=source, plan=arguments.plan)
    for notice in request.notices:
        console.print(f"note: {notice}", style="dim", markup=False)
    summary, history = simulate(scenario, console)
    return write(scenario, summary, history, to_json(summary), arguments.out)


def replay(arguments: argparse.Namespace, console: Console) -> int:
    """Simulate a recorded run from its inputs, and print both."""
    if arguments.files or arguments.set or arguments.sweep or arguments.plan is not None:
        raise ConfigError("--replay RUN takes everything from the run; leave the rest out")
    scenario = recorded_scenario(arguments.replay, seed=0, num_chunks=REPLAY_CHUNKS)
    summary, history = simulate(scenario, console)
    text, figures = comparison(arguments.replay, summary)
    console.print(text, markup=False, highlight=False)
    record = to_json(summary) | {"replay": figures}
    return write(scenario, summary, history, record, arguments.out)


def simulate(scenario: Scenario, console: Console) -> tuple[Summary, History]:
    """Simulate a run, and print what it comes to."""
    began_at = time.monotonic()
    history = Simulation(scenario).run()
    summary = summarise(scenario, history)
    text = summary_text(scenario, summary, wall_s=time.monotonic() - began_at)
    console.print(text, markup=False, highlight=False)
    return summary, history


def write(
    scenario: Scenario, summary: Summary, history: History, record: dict[str, Any], out: Path
) -> int:
    """Write a run's files; return the exit code."""
    write_json(out / "sim.json", record)
    written = write_run(scenario, summary, history, out)
    print(f"wrote {out / 'sim.json'}, {', '.join(map(str, written))}")
    return 0 if summary.is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
