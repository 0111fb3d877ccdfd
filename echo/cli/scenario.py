"""From a scenario file to what the simulator takes, or everything that is wrong with it.

A scenario is a fleet file (`fleet_schema.py`) with the tables of `scenario_schema.py` besides, and
`[activation]` as in a run's configuration, all of which may be left out: every fleet file is a
scenario.
"""

from __future__ import annotations

import copy
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from echo.config.fleet import Request, parse_fleet, report
from echo.config.fleet_rows import Rows, check_row, is_known, place_of, read_toml
from echo.config.profiles import PROFILES, preset_publish_period
from echo.config.scenario_schema import SIM_LISTS, FaultRow, PathRow, PriceRow, SimRow
from echo.config.schema_cost import ActivationSection
from echo.errors import ConfigError
from echo.sim.scenario import (
    LEARNER_REGION,
    ActivationRule,
    Fault,
    PriceChange,
    Scenario,
    Settings,
)

Table = Mapping[str, Any]
SIM_TABLES = ("sim", "activation", *SIM_LISTS)
"""What a fleet file has not."""
MIN_DELTA_GAIN = 1.25
"""Image to delta below which a run would send the image: `delta/cadence.py`."""


def read_tables(paths: Sequence[Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tables of one or several TOML files, with settings from the command line.

    Args:
        paths: the files; a table stands in one of them.
        overrides: "table.key=value" or "list.name.key=value", the value in TOML or plain text.

    Raises:
        ConfigError: if a file cannot be read, a table stands twice, or an override names nothing.
    """
    tables: dict[str, Any] = {}
    for path in paths:
        for name, value in read_toml(path).items():
            if name in tables:
                raise ConfigError(f"{path.name}: [{name}] stands in another file, too; keep one")
            tables[name] = value
    for text in overrides:
        override(tables, *split_override(text))
    return tables


def split_override(text: str) -> tuple[str, str]:
    """Return key and value of "key=value".

    Raises:
        ConfigError: if it is not of that form.
    """
    key, mark, value = text.partition("=")
    if not mark or len(key.split(".")) not in (2, 3):
        raise ConfigError(
            f"--set {text}: write table.key=value or, for lists, list.name.key=value, for example "
            "job.max_staleness=4 or offers.fra-4090.count=3"
        )
    return key.strip(), value.strip()


def override(tables: dict[str, Any], key: str, value: str) -> None:
    """Set one value.

    Raises:
        ConfigError: if the key names a row that is not there.
    """
    parsed = _parse(value)
    table, *path = key.split(".")
    if len(path) == 1:
        tables[table] = dict(tables.get(table, {})) | {path[0]: parsed}
        return
    if table == "sim":  # sim.rent.OFFER
        rows = dict(tables.get("sim", {}))
        rows[path[0]] = dict(rows.get(path[0], {})) | {path[1]: parsed}
        tables["sim"] = rows
        return
    rows = copy.deepcopy(tables.get(table, []))
    named = [row for row in rows if isinstance(row, dict) and path[0] in _names(row)]
    if len(named) != 1:
        raise ConfigError(f"{key}: there is no row of [[{table}]] called {path[0]!r}")
    named[0][path[1]] = parsed
    tables[table] = rows


def _names(row: Table) -> tuple[Any, ...]:
    return row.get("name"), row.get("gpu"), row.get("region")


def _parse(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def load_scenario(
    tables: Table, *, name: str, source: str, plan: Path | None = None
) -> tuple[Scenario, Request]:
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
    rows = Rows()
    sim = check_row(rows, SimRow, tables.get("sim", {}), f"{source}: [sim]")
    lists = {key: _read_list(rows, key, tables.get(key, []), source) for key in SIM_LISTS}
    table = tables.get("activation", {"mode": "off"})
    activation = check_row(rows, ActivationSection, table, f"{source}: [activation]")
    if sim is not None:
        _check_names(rows, sim, lists, request, source)
        _check_sizes(rows, sim, request, source)
    if rows.problems or sim is None or activation is None:
        raise ConfigError(report(rows.problems))
    is_auto = request.job_row.publish_period == "auto"
    job = request.job
    rent: dict[str, int] = {}
    if plan is not None:
        rent, period = read_plan(plan, request)
        job = replace(job, publish_period=period) if is_auto else job
    elif is_auto:
        job = replace(job, publish_period=preset_publish_period(job.max_staleness))
    counts = rent | sim.rent
    return Scenario(
        name=name,
        fleet=request.fleet,
        job=job,
        counts=[counts.get(o.name, 0 if rent else o.count) for o in request.fleet.offers],
        settings=_settings(sim),
        is_auto_period=is_auto and plan is None,
        activation=_activation(activation),
        weather={
            row.region: (row.jitter_s, row.loss)
            for _, row in cast("list[tuple[str, PathRow]]", lists["paths"])
        },
        faults=[
            Fault(**row.model_dump())
            for _, row in cast("list[tuple[str, FaultRow]]", lists["faults"])
        ],
        prices=[
            PriceChange(**row.model_dump())
            for _, row in cast("list[tuple[str, PriceRow]]", lists["prices"])
        ],
    ), request


def read_plan(path: Path, request: Request) -> tuple[dict[str, int], int]:
    """Return the nodes by offer and the publish period of a plan.json of `echo-rl plan`.

    Raises:
        ConfigError: if it cannot be read or is not a plan for this fleet.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rent = {row["offer"]: int(row["count"]) for row in record["rent"]}
        period = int(record["job"]["publish_period"])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is not a plan.json as echo-rl plan writes it: {error!r}"
        ) from error
    known = {offer.name for offer in request.fleet.offers}
    if strangers := sorted(rent.keys() - known):
        raise ConfigError(
            f"{path}: rents {', '.join(strangers)}, which the scenario does not offer; plan with "
            "the same file"
        )
    return rent, period


def _read_list(rows: Rows, name: str, value: object, source: str) -> list[tuple[str, Any]]:
    if not isinstance(value, list):
        rows.problems.append(f"{source}: {name} must be written [[{name}]], a list of tables")
        return []
    found = []
    for number, item in enumerate(value, 1):
        where = place_of(item, source, name, number)
        row = check_row(rows, SIM_LISTS[name], item, where)
        if row is not None:
            found.append((where, row))
    return found


def _check_names(
    rows: Rows,
    sim: SimRow,
    lists: Mapping[str, list[tuple[str, Any]]],
    request: Request,
    source: str,
) -> None:
    offers = {offer.name: offer for offer in request.fleet.offers}
    counts = {name: sim.rent.get(name, offer.count) for name, offer in offers.items()}
    for name, count in sim.rent.items():
        if is_known(rows, f"{source}: [sim]: rent", name, offers) and count > offers[name].count:
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
    for where, row in lists["faults"]:
        known: dict[str, Any] = {"*": None, **offers, **nodes}
        if row.kind == "cut":
            known = {**request.regions, **nodes}
        if row.kind != "slow":
            known[LEARNER_REGION] = None
        is_known(rows, f"{where}: target", row.target, known)
    for where, row in lists["prices"]:
        is_known(rows, f"{where}: offer", row.offer, offers)
    for where, row in lists["paths"]:
        is_known(rows, f"{where}: region", row.region, request.regions)
    times = _times(sim)
    if times["dead_after_s"] <= times["heartbeat_s"]:
        rows.problems.append(
            f"{source}: [sim]: dead_after_s = {times['dead_after_s']:g} must be longer than "
            f"heartbeat_s = {times['heartbeat_s']:g}, or every node counts as dead"
        )


def _check_sizes(rows: Rows, sim: SimRow, request: Request, source: str) -> None:
    delta_bytes = request.job.version_bytes
    if sim.image_bytes is not None and sim.image_bytes < MIN_DELTA_GAIN * delta_bytes:
        rows.problems.append(
            f"{source}: [sim]: image_bytes = {sim.image_bytes:g} must be at least "
            f"{MIN_DELTA_GAIN:g} times job.version_bytes = {delta_bytes:g}, the size of a delta; "
            "leave it out where versions are sent in full"
        )


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
