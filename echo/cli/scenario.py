"""Scenario files: what the simulator takes, and what is wrong with them.

A scenario is a fleet file with tables of its own besides (`config/fleet_file.py`), and
`[activation]` as in a run's configuration. Each may be left out: every fleet file is a scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from echo.config.fleet_file import (
    SIM_LISTS,
    FleetRequest,
    Rows,
    SimRow,
    Table,
    parse_fleet,
    read_plan,
)
from echo.config.schema import ActivationSection, preset_publish_period
from echo.core.errors import ConfigError, in_one
from echo.sim.scenario import LEARNER_REGION, Scenario

SIM_TABLES: dict[str, type[BaseModel]] = {
    "sim": SimRow,
    "activation": ActivationSection,
    **SIM_LISTS,
}
"""The tables that a fleet file lacks."""


def _check_names(
    rows: Rows, sim: SimRow, counts: Mapping[str, int], request: FleetRequest, source: str
) -> None:
    """Note names of nothing, and times and numbers that leave no run."""
    offers = {offer.name: offer for offer in request.fleet.offers}
    for name, count in sim.rent.items():
        is_known = rows.check_name(f"{source}: [sim]: rent", name, offers)
        if is_known and count > offers[name].count:
            rows.problems.append(
                f"{source}: [sim]: rent: {count} of {name}, which has a count of "
                f"{offers[name].count}; raise the count or rent fewer"
            )
    if not any(counts.values()):
        rows.problems.append(
            f"{source}: [sim]: rent leaves no node; the learner would wait for ever"
        )
    nodes = {
        f"{name.replace(' ', '-')}-{number}": name
        for name, count in counts.items()
        for number in range(1, count + 1)
    }
    for where, row in rows.good["faults"]:
        known: dict[str, Any] = {"*": None, **offers, **nodes}
        if row.kind == "cut":
            known = {**request.regions, **nodes, LEARNER_REGION: None}
        elif row.target == LEARNER_REGION:
            rows.problems.append(
                f'{where}: target = "{LEARNER_REGION}": the simulated learner neither dies nor '
                'slows down; give the fault a worker or an offer, or write kind = "cut"'
            )
            continue
        rows.check_name(f"{where}: target", row.target, known)
    for where, row in rows.good["prices"]:
        rows.check_name(f"{where}: offer", row.offer, offers)
    if sim.dead_after_s <= sim.heartbeat_s:
        rows.problems.append(
            f"{source}: [sim]: dead_after_s = {sim.dead_after_s:g} must be longer than "
            f"heartbeat_s = {sim.heartbeat_s:g}, or every node counts as dead"
        )


def load_scenario(
    tables: Table, *, name: str, source: str, plan: Path | None = None
) -> tuple[Scenario, FleetRequest]:
    """Return the scenario, and the fleet that it is made of.

    Args:
        tables: as `read_tables` returns them.
        name: for headings.
        source: what to call the file in messages.
        plan: a plan.json, whose nodes and publish period are taken where the scenario leaves
            them open; None for all nodes.

    Raises:
        ConfigError: listing every problem found, each with its row.
    """
    parts: dict[bool, dict[str, Any]] = {
        False: {},
        True: {"activation": {"mode": "off"}, "sim": {}},
    }
    for key, value in tables.items():
        parts[key in SIM_TABLES][key] = value
    request = parse_fleet(parts[False], source)
    rows = Rows(SIM_TABLES)
    rows.add(parts[True], source)
    job, is_auto = request.job, request.job_row.publish_period == "auto"
    period = preset_publish_period(job.max_staleness)
    offered = {offer.name: offer.count for offer in request.fleet.offers}
    counts = dict(offered)
    if plan is not None:
        rent, period = read_plan(plan, request)
        counts = dict.fromkeys(offered, 0) | rent
    for _, sim in rows.good["sim"]:
        # A number above the offered one is a problem, and may be more than memory holds.
        counts |= {name: n for name, n in sim.rent.items() if n <= offered.get(name, -1)}
        _check_names(rows, sim, counts, request, source)
    if rows.problems:
        raise ConfigError(in_one("fleet", rows.problems))
    [(_, activation)] = rows.good["activation"]
    return Scenario(
        name=name,
        fleet=request.fleet,
        job=replace(job, publish_period=period) if is_auto else job,
        counts=[counts[offer.name] for offer in request.fleet.offers],
        settings=sim,
        is_auto_period=is_auto and plan is None,
        activation=None if activation.mode == "off" else activation,
        faults=[row for _, row in rows.good["faults"]],
        prices=[row for _, row in rows.good["prices"]],
    ), request
