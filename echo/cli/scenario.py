"""Loads scenario files, and makes the simulator's scenario from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echo.config.fleet_checks import rented_nodes
from echo.config.fleet_file import FleetRequest, Override, Source, parse_scenario, read_plan
from echo.config.schema import preset_publish_period
from echo.sim.scenario import Scenario


def load_scenario(
    files: Sequence[Source],
    overrides: Sequence[Override] = (),
    *,
    name: str,
    plan: Path | None = None,
) -> tuple[Scenario, FleetRequest]:
    """Return the scenario and its fleet.

    Args:
        files: the scenario's files and their texts, as `read_files` returns them.
        overrides: settings from the command line, each with its option's text.
        name: the scenario's name, which is shown in headings.
        plan: a plan.json with defaults for the numbers of nodes and the publish period. None: all
            nodes on offer are rented.

    Raises:
        ConfigError: if anything is wrong; the text lists every problem with its source and its row.
    """
    rented = None if plan is None else read_plan(plan)
    file, request = parse_scenario(files, overrides, rented)
    job, is_auto = request.job, file.job.publish_period == "auto"
    period = preset_publish_period(job.max_staleness)
    if rented is not None:
        period = rented.publish_period
    offers = request.fleet.offers
    counts = rented_nodes({offer.name: offer.count for offer in offers}, file.sim.rent, rented)
    return Scenario(
        name=name,
        fleet=request.fleet,
        job=replace(job, publish_period=period) if is_auto else job,
        counts=[counts[offer.name] for offer in offers],
        settings=file.sim,
        is_auto_period=is_auto and rented is None,
        activation=None if file.activation.mode == "off" else file.activation,
        faults=file.faults,
        prices=file.prices,
    ), request
