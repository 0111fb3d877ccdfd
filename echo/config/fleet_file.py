"""Reads fleet and scenario files, and makes the planner's request from their tables.

A fleet and a job may be in one file or in two files without common tables. A scenario is a fleet
file that may have further tables. layers.py reads these files. Messages name a row by its table,
its number (from 1) and the names in the row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from echo.config.fields import UNREADABLE, read_text
from echo.config.fleet_checks import Plan, Rows, fleet_rules, scenario_rules
from echo.config.fleet_schema import (
    NAMES,
    SCHEMAS,
    AnyFile,
    FleetFile,
    JobRow,
    LearnerRow,
    OfferRow,
    RegionRow,
    ScenarioFile,
    expected_table,
    repeats,
    tables_of,
)
from echo.config.layers import (
    Layer,
    Problem,
    Setting,
    Settings,
    as_error,
    merge,
    nest,
    read_layer,
    read_override,
    read_toml,
    unreported,
    value_problems,
)
from echo.config.schema import KeyPath, Leaf
from echo.core.errors import ConfigError, in_one, nearest
from echo.fleet.gpus import (
    BYTES_PER_WEIGHT,
    GPUS,
    MODELS,
    Gpu,
    ModelShape,
    decode_rate,
    train_seconds,
)
from echo.fleet.job import Job
from echo.fleet.market import Offer, Region, RentedFleet

# --- reading ------------------------------------------------------------------------------------


Table = Mapping[str, Any]
Source = tuple[str, Table]
"""The name of a file for messages, and the tables of the file."""
Override = tuple[str, str]
"""A command-line option and its value: "table.key=value" or "list.name.key=value"."""


def read_files(paths: Sequence[Path]) -> list[Source]:
    """Return the name and the tables of each TOML file.

    Raises:
        ConfigError: if a file cannot be read, or two files have the same table.
    """
    found: list[Source] = []
    problems: list[str] = []
    for path in paths:
        try:
            tables = read_toml(path)
        except ConfigError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{path}: [{name}] stands in another file, too; keep one"
            for name in tables
            if any(name in others for _, others in found)
        ]
        found.append((str(path), tables))
    if problems:
        raise ConfigError(in_one("fleet", problems))
    return found


def _read_tables(kind: type[FleetFile], tables: Table, source: str) -> Layer:
    """Return the settings in a file's tables as a layer.

    Rows of a list are keyed by number from 1.
    """
    opened: dict[str, Any] = {}
    problems = []
    for name, value in tables.items():
        if name not in tables_of(kind):
            text = f"[{name}]: {SCHEMAS[kind].describe_unknown((name,))}"
            problems.append(Problem((), text, Setting(None, source)))
        elif not isinstance(value, list if repeats(kind, name) else dict):
            text = f"must be {expected_table(kind, name)}"
            problems.append(Problem(((name,),), text, Setting(value, source)))
        elif not repeats(kind, name):
            opened[name] = value
        elif value:
            opened[name] = {str(number): row for number, row in enumerate(value, 1)}
    layer = read_layer(SCHEMAS[kind], opened, source)
    layer.problems[:0] = problems
    return layer


def _read_override(kind: type[FleetFile], text: str, source: str, below: Settings) -> Layer:
    """Return the layer of an override.

    If the override names a row, replace the name by its number.
    """
    layer = read_override(SCHEMAS[kind], text, source)
    path = next(iter(layer.settings), ())
    if not path or not repeats(kind, path[0]):
        return layer
    table, (key, _, value) = path[0], text.partition("=")
    numbers: list[str] = []
    if len(path) < 3:
        example = ".".join([table, "NAME", *path[1:]]) + f"={value.strip()}"
        why = f"[[{table}]] is a list; write {example}, with the NAME of a row"
    else:
        numbers, why = _find_row(table, path[1], below)
    if len(numbers) != 1:
        return Layer(problems=[Problem((), f"{key.strip()}: {why}", Setting(None, source))])
    settings = {(table, *numbers, *path[2:]): own for path, own in layer.settings.items()}
    replaced = layer.replaced and (table, *numbers, *layer.replaced[2:])
    return Layer(settings, layer.problems, replaced)


def _find_row(table: str, name: str, settings: Settings) -> tuple[list[str], str]:
    """Return the numbers of the rows with this name, and the text of an error.

    If exactly one row has this name, the caller ignores the text.
    """
    calls = [
        (path[1], str(setting.value))
        for path, setting in settings.items()
        if path[0] == table and len(path) == 3 and path[2] in NAMES
    ]
    numbers = sorted({number for number, own in calls if own == name})
    if numbers:
        return numbers, f"{len(numbers)} rows of [[{table}]] are called {name!r}; give each a name"
    near = nearest(name, [own for _, own in calls])
    hint = f"; did you mean {near!r}?" if near else ""
    return [], f"there is no row of [[{table}]] called {name!r}{hint}"


def _load(
    kind: type[AnyFile],
    files: Sequence[Source],
    overrides: Sequence[Override],
    rules: Callable[[Rows], Iterable[Problem]],
) -> AnyFile:
    """Merge files and overrides, and return the checked contents.

    Raises:
        ConfigError: if anything is wrong. The message lists every problem with its source and row.
    """
    layers = [_read_tables(kind, tables, source) for source, tables in files]
    for option, text in overrides:
        layers.append(_read_override(kind, text, option, merge(layers)))
    settings = merge(layers)
    problems = [problem for layer in layers for problem in layer.problems]
    rows, wrong = _rows(kind, nest(settings))
    problems += wrong
    known = {path[0] for problem in problems for path in problem.paths} | rows.keys()
    problems += [
        Problem((), f"[{name}] is missing")
        for name, info in kind.model_fields.items()
        if info.is_required() and name not in known
    ]
    problems += unreported(rules(rows), problems)
    if problems:
        names = ", ".join(source for source, _ in files)
        raise as_error(SCHEMAS[kind], problems, settings, names)
    valid: dict[str, Any] = {}
    for name, found in rows.items():
        values = [row for _, row in found]
        valid[name] = values if repeats(kind, name) else values[0]
    return kind(**valid)


def _rows(kind: type[FleetFile], tables: Table) -> tuple[Rows, list[Problem]]:
    """Return the rows of all tables, and the problems of their values."""
    rows: dict[str, list[tuple[KeyPath, Any]]] = {}
    problems: list[Problem] = []
    for name, value in tables.items():
        table, is_list = tables_of(kind)[name]
        places: list[tuple[KeyPath, Any]] = [((name,), value)]
        if is_list:
            numbers = sorted(value, key=int)
            places = [((name, number), value[number]) for number in numbers]
        rows[name] = []
        for path, row in places:
            try:
                found: Any = table.model_validate(row)
            except ValidationError as error:
                problems += value_problems(error, partial(_locate, kind, path))
                found = _as_it_stands(table, row)
            rows[name].append((path, found))
    return rows, problems


def _as_it_stands(table: type[BaseModel], row: object) -> Any:
    """Return an invalid row as an object with unchecked values.

    Missing required values are None.
    """
    values: dict[str, Any] = {
        key: None for key, info in table.model_fields.items() if info.is_required()
    }
    return table.model_construct(**values | (row if isinstance(row, dict) else {}))


def _locate(
    kind: type[FleetFile], row: KeyPath, place: tuple[int | str, ...]
) -> tuple[KeyPath, Leaf | None]:
    """Translate a place in a pydantic error to a path, and return the key at this path as well.

    Each row of a list is validated alone, so a place begins inside the row. This function puts the
    row's path, for example (offers, 2), before the place. In `load.py` a place begins at the whole
    configuration, so `load.py` has a different function.

    If the place ends with the name of a union's member, remove this name.
    """
    path = (*row, *map(str, place))
    while SCHEMAS[kind].find(path) is None and len(path) > len(row):
        path = path[:-1]
    return path, SCHEMAS[kind].find(path)


# --- the request --------------------------------------------------------------------------------


MBIT = 1e6 / 8
"""One Mbit/s in bytes per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRequest:
    """The planner's input: a fleet and a job from a fleet file."""

    fleet: RentedFleet
    job: Job
    periods: tuple[int, ...]
    """Publish periods that the planner tries, in this order."""
    model: ModelShape
    gpus: Mapping[str, Gpu]
    """All GPUs of the catalogue and of the file's [[gpus]], under their names."""
    learner: LearnerRow
    job_row: JobRow
    offers: tuple[OfferRow, ...]
    """The rows of the offers that `fleet.offers` lists, in the same order."""
    regions: Mapping[str, RegionRow]
    notices: tuple[str, ...]
    """Lines for the user on estimated figures and on offers that were left out."""


def parse_fleet(files: Sequence[Source]) -> FleetRequest:
    """Check the tables of a fleet and a job. Return the planner's request.

    Raises:
        ConfigError: if anything is wrong. The message lists every problem with its row.
    """
    return _request(_load(FleetFile, files, (), fleet_rules))


def parse_scenario(
    files: Sequence[Source], overrides: Sequence[Override] = (), plan: Plan | None = None
) -> tuple[ScenarioFile, FleetRequest]:
    """Check a scenario; return the scenario's contents and the planner's request.

    Raises:
        ConfigError: if anything is wrong. The message lists every problem with its source and row.
    """
    file = _load(ScenarioFile, files, overrides, lambda rows: scenario_rules(rows, plan, ()))
    request = _request(file)
    left_out = {row.name or row.gpu for row in file.offers}
    left_out -= {offer.name for offer in request.fleet.offers}
    if left_out:  # other tables must not refer to the nodes of these offers
        _load(ScenarioFile, files, overrides, lambda rows: scenario_rules(rows, plan, left_out))
    return file, request


def _request(file: FleetFile) -> FleetRequest:
    """Return the planner's request that a fleet file describes.

    Raises:
        ConfigError: if no node on offer can run the model.
    """
    gpus, models = _catalogues(file)
    model, regions = models[file.job.model], {row.name: row for row in file.regions}
    notices: list[str] = []
    kept: list[OfferRow] = []
    offers: list[Offer] = []
    for row in file.offers:
        offer = _offer(row, file.job, gpus[row.gpu], model, notices)
        if offer is not None:
            kept.append(row)
            offers.append(offer)
    if not offers:
        raise ConfigError("no node on offer can run the model:\n  " + "\n  ".join(notices))
    job = _job(file.job, file.learner, gpus[file.learner.gpu], model, notices)
    fixed = file.job.publish_period
    return FleetRequest(
        fleet=RentedFleet(
            offers=tuple(offers),
            regions={name: _region(row) for name, row in regions.items()},
            uplink_bytes_per_s=file.learner.uplink_mbit_per_s * MBIT,
        ),
        job=job,
        periods=tuple(range(1, job.max_staleness + 2)) if fixed == "auto" else (fixed,),
        model=model,
        gpus=gpus,
        learner=file.learner,
        job_row=file.job,
        offers=tuple(kept),
        regions=regions,
        notices=tuple(notices),
    )


def _catalogues(file: FleetFile) -> tuple[dict[str, Gpu], dict[str, ModelShape]]:
    gpus, models = dict(GPUS), dict(MODELS)
    for row in file.gpus:
        gpus[row.name] = Gpu(
            name=row.name,
            flops_per_s=row.tflops * 1e12,
            bytes_per_s=row.gb_per_s * 1e9,
            memory_bytes=row.memory_gib << 30,
            link_bytes_per_s=row.link_gb_per_s * 1e9,
        )
    return gpus, models | {row.name: ModelShape(**row.model_dump()) for row in file.models}


def _region(row: RegionRow) -> Region:
    return Region(
        name=row.name,
        # The rules have checked that a region without a path has no offers.
        bytes_per_s=(row.mbit_per_s or math.inf) * MBIT,
        latency_s=row.latency_s,
        price_per_gb=row.price_per_gb,
        relay_bytes_per_s=row.relay.mbit_per_s * MBIT if row.relay else None,
        relay_price_per_h=row.relay.price_per_h if row.relay else 0.0,
    )


def _offer(
    row: OfferRow, job: JobRow, gpu: Gpu, model: ModelShape, notices: list[str]
) -> Offer | None:
    name = row.name or row.gpu
    tokens_per_s, concurrency = row.tokens_per_s, row.concurrency
    if tokens_per_s is None or concurrency is None:
        estimate = decode_rate(
            gpu,
            model,
            prompt_tokens=job.prompt_tokens,
            completion_tokens=job.completion_tokens,
            tensor_parallel=row.num_gpus,
            max_tokens=job.prompt_tokens + job.max_completion_tokens,
        )
        if estimate is None:
            notices.append(
                f"{name} in {row.region}: left out, {row.num_gpus} x {gpu.memory_bytes >> 30} GiB "
                f"do not hold {model.name} and one sequence of full length"
            )
            return None
        tokens_per_s, concurrency = estimate.tokens_per_s, estimate.concurrency
        notices.append(f"{name} in {row.region}: {tokens_per_s:.0f} tokens/s is an estimate")
    own = row.model_dump(
        include={"region", "count", "price_per_h", "can_listen", "price_per_gb", "losses_per_h",
                 "restart_s"}
    )  # fmt: skip
    return Offer(
        **own,
        name=name,
        tokens_per_s=tokens_per_s,
        concurrency=concurrency,
        down_bytes_per_s=row.down_mbit_per_s * MBIT,
        up_bytes_per_s=row.up_mbit_per_s * MBIT,
    )


def _job(row: JobRow, learner: LearnerRow, gpu: Gpu, model: ModelShape, notices: list[str]) -> Job:
    train_s = learner.train_s
    if train_s is None:
        mean_tokens = row.prompt_tokens + row.completion_tokens
        train_s = train_seconds(
            gpu,
            model,
            num_gpus=learner.num_gpus,
            num_tokens=row.groups_per_step * row.group_size * mean_tokens,
            mean_tokens=mean_tokens,
        )
        notices.append(f"learner: {train_s:.3g} s per step is an estimate")
    return Job(
        **row.model_dump(
            exclude={"model", "prompt_tokens", "publish_period", "version_bytes", "budget_per_h"}
        ),
        publish_period=1 if row.publish_period == "auto" else row.publish_period,
        train_s=train_s,
        version_bytes=row.version_bytes or model.num_params * BYTES_PER_WEIGHT,
        learner_price_per_h=learner.price_per_h,
        budget_per_h=math.inf if row.budget_per_h is None else row.budget_per_h,
    )


# --- the plan -------------------------------------------------------------------------------------


def read_plan(path: Path) -> Plan:
    """Read a plan.json of `echo-rl plan`.

    Raises:
        ConfigError: if the file cannot be read or is not a plan.
    """
    try:
        record = json.loads(read_text(path))
        rent = {row["offer"]: int(row["count"]) for row in record["rent"]}
        period = int(record["job"]["publish_period"])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is not a plan.json as echo-rl plan writes it: {error!r}"
        ) from error
    if period < 1:
        raise ConfigError(f"{path}: publishes every {period} steps, which must be 1 at least")
    return Plan(str(path), rent, period)
