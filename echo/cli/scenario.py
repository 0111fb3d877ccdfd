"""Scenario files: what the simulator takes, and what is wrong with them.

A scenario is a fleet file with tables of its own besides (`config/fleet_file.py`), and
`[activation]` as in a run's configuration, all of which may be left out: every fleet file is a
scenario.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo.config.fleet_file import (
    SIM_LISTS,
    FleetRequest,
    Rows,
    SimRow,
    Table,
    parse_fleet,
    place_of,
    read_plan,
)
from echo.config.schema import PROFILES, ActivationSection, preset_publish_period
from echo.core.errors import ConfigError, in_one
from echo.core.units import format_bytes
from echo.sim.scenario import LEARNER_REGION, ActivationRule, Scenario, Settings
from echo.sim.versions import CHUNK_BYTES

SIM_TABLES = ("sim", "activation", *SIM_LISTS)
"""What a fleet file has not."""
MAX_IMAGE_BYTES = 16 << 20
"""Of a simulated version in memory, and the most that one chunk may have."""
MIN_DELTA_GAIN = 1.25
"""Image to delta below which a run would send the image: `weights/schedule.py`."""


class ScenarioRows(Rows):
    """The valid rows of a scenario, and the problems of the others."""

    def read_list(self, name: str, value: object, source: str) -> list[tuple[str, Any]]:
        """Return the valid tables of a list, and note what is wrong with the others."""
        if not isinstance(value, list):
            self.problems.append(f"{source}: {name} must be written [[{name}]], a list of tables")
            return []
        found = []
        for number, item in enumerate(value, 1):
            where = place_of(item, source, name, number)
            row = self.check(SIM_LISTS[name], item, where)
            if row is not None:
                found.append((where, row))
        return found

    def check_names(
        self,
        sim: SimRow,
        lists: Mapping[str, list[tuple[str, Any]]],
        request: FleetRequest,
        source: str,
    ) -> None:
        """Note names of nothing, and times and numbers that leave no run."""
        offers = {offer.name: offer for offer in request.fleet.offers}
        counts = {name: sim.rent.get(name, offer.count) for name, offer in offers.items()}
        for name, count in sim.rent.items():
            is_known = self.check_name(f"{source}: [sim]: rent", name, offers)
            if is_known and count > offers[name].count:
                self.problems.append(
                    f"{source}: [sim]: rent: {count} of {name}, which has a count of "
                    f"{offers[name].count}; raise the count or rent fewer"
                )
        if not any(counts.values()):
            self.problems.append(
                f"{source}: [sim]: rent leaves no node; the learner would wait for ever"
            )
        nodes = {
            f"{name.replace(' ', '-')}-{number}": name
            for name, count in counts.items()
            for number in range(1, count + 1)
        }
        for where, row in lists["faults"]:
            known: dict[str, Any] = {"*": None, **offers, **nodes}
            if row.kind == "cut":
                known = {**request.regions, **nodes}
            if row.kind != "slow":
                known[LEARNER_REGION] = None
            self.check_name(f"{where}: target", row.target, known)
        for where, row in lists["prices"]:
            self.check_name(f"{where}: offer", row.offer, offers)
        for where, row in lists["paths"]:
            self.check_name(f"{where}: region", row.region, request.regions)
        times = _times(sim)
        if times["dead_after_s"] <= times["heartbeat_s"]:
            self.problems.append(
                f"{source}: [sim]: dead_after_s = {times['dead_after_s']:g} must be longer than "
                f"heartbeat_s = {times['heartbeat_s']:g}, or every node counts as dead"
            )

    def check_sizes(self, sim: SimRow, request: FleetRequest, source: str) -> None:
        """Note an image that is hardly larger than a delta, or too large for memory."""
        delta_bytes = request.job.version_bytes
        if sim.image_bytes is None:
            return
        start = f"{source}: [sim]: image_bytes = {sim.image_bytes:g} must be at"
        times = f"times job.version_bytes = {delta_bytes:g}, the size of a delta"
        if sim.image_bytes < MIN_DELTA_GAIN * delta_bytes:
            self.problems.append(
                f"{start} least {MIN_DELTA_GAIN:g} {times}; leave it out where versions are sent "
                "in full"
            )
        most = MAX_IMAGE_BYTES // (sim.chunks_per_version * CHUNK_BYTES)
        if sim.image_bytes > most * delta_bytes:
            self.problems.append(
                f"{start} most {most} {times}, with chunks_per_version = {sim.chunks_per_version}: "
                f"an image takes {format_bytes(MAX_IMAGE_BYTES)} here; lower one of the two"
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
    request = parse_fleet(
        {key: value for key, value in tables.items() if key not in SIM_TABLES}, source
    )
    rows = ScenarioRows()
    sim = rows.check(SimRow, tables.get("sim", {}), f"{source}: [sim]")
    lists = {key: rows.read_list(key, tables.get(key, []), source) for key in SIM_LISTS}
    table = tables.get("activation", {"mode": "off"})
    activation = rows.check(ActivationSection, table, f"{source}: [activation]")
    job, is_auto = request.job, request.job_row.publish_period == "auto"
    period = preset_publish_period(job.max_staleness)
    if sim is not None:
        if plan is not None:
            rent, period = read_plan(plan, request)
            nothing = dict.fromkeys((offer.name for offer in request.fleet.offers), 0)
            sim = sim.model_copy(update={"rent": nothing | rent | sim.rent})
        rows.check_names(sim, lists, request, source)
        rows.check_sizes(sim, request, source)
    if rows.problems or sim is None or activation is None:
        raise ConfigError(in_one("fleet", rows.problems))
    return Scenario(
        name=name,
        fleet=request.fleet,
        job=replace(job, publish_period=period) if is_auto else job,
        counts=[sim.rent.get(offer.name, offer.count) for offer in request.fleet.offers],
        settings=_settings(sim),
        is_auto_period=is_auto and plan is None,
        activation=_activation(activation),
        weather={row.region: (row.jitter_s, row.loss) for _, row in lists["paths"]},
        faults=[row for _, row in lists["faults"]],
        prices=[row for _, row in lists["prices"]],
    ), request


def _activation(section: ActivationSection) -> ActivationRule | None:
    if section.mode == "off":
        return None
    numbers = section.model_dump(exclude={"mode"})
    unlimited = {name: math.inf for name, value in numbers.items() if value is None}
    return ActivationRule(**(numbers | unlimited))


def _times(sim: SimRow) -> dict[str, float]:
    profile = PROFILES[sim.profile]
    names = ("heartbeat_s", "dead_after_s", "lease_timeout_s", "reconnect_for_s")
    given = {name: getattr(sim, name) for name in names}
    return {
        name: float(profile[f"network.{name}"]) if value is None else value
        for name, value in given.items()
    }


def _settings(sim: SimRow) -> Settings:
    return Settings(**(sim.model_dump(exclude={"rent", "profile"}) | _times(sim)))
