"""Fleet and scenario files: their keys, their checks, the planner's request.

A fleet and a job may share one file or stand in two; each table stands in one of them. Every bad
row is named by its table, its number from 1 and what it calls itself. Rules that join several rows
look at bad ones, too, so that one pass finds every problem.
"""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from echo.config.fields import UNREADABLE, Bytes, Seconds, Strict, read_text, toml_or_text
from echo.config.layers import read_toml
from echo.config.schema import PROFILES, show
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

# --- keys ---------------------------------------------------------------------------------------
#
# Rates are in Mbit/s and prices in $ per hour or per GB (10^9 bytes), as marketplaces quote them.


Positive = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Name = Annotated[str, Field(min_length=1)]
Instant = Annotated[Seconds, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class JobRow(Strict):
    """The run to plan for."""

    model: Name
    """Model by name: one of the catalogue's or of [[models]]."""
    groups_per_step: Count
    """Groups per optimizer step."""
    group_size: Annotated[int, Field(ge=2)]
    """Rollouts per group."""
    useful_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the groups whose rewards are not all equal; the others are not trained on."""
    prompt_tokens: Positive = 512.0
    """Mean length of a prompt."""
    completion_tokens: Positive
    """Mean length of a completion."""
    max_completion_tokens: Positive
    """Longest completion."""
    completion_spread: Amount = 0.5
    """Standard deviation of the length over its mean."""
    max_staleness: Annotated[int, Field(ge=0)] = 6
    """Inclusive bound S on staleness, optimizer steps."""
    publish_period: Literal["auto"] | Count = "auto"
    """Optimizer steps between two publications; "auto" is the smallest with a sufficient fleet."""
    version_bytes: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes of one publication, such as a delta's; all weights in bfloat16 if left out."""
    chunk_bytes: Annotated[Bytes, Field(gt=0)] = 1 << 20
    """Bytes of the unit on the wire."""
    has_pausing_workers: bool = False
    """Whether workers stop generating while new weights arrive."""
    margin: Amount = 0.1
    """Share by which the fleet is to exceed the required rate."""
    rate_spread: Amount = 0.1
    """Standard deviation over mean of the time in which the fleet makes one batch."""
    budget_per_h: Positive | None = None
    """$ per hour for nodes and traffic, without the learner; no limit if left out."""


class LearnerRow(Strict):
    """The learner's machine."""

    gpu: Name
    """GPU by name."""
    num_gpus: Count = 1
    """GPUs that train together."""
    train_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Measured seconds of one optimizer step; an estimate if left out."""
    price_per_h: Amount
    """$ per hour for the whole machine."""
    uplink_mbit_per_s: Positive
    """What it can send."""
    address: Name = "tcp://LEARNER:7700"
    """Where nodes reach it; stands in the printed commands."""


class RelayRow(Strict):
    """A relay that stands in a region."""

    mbit_per_s: Positive
    """Its uplink."""
    price_per_h: Amount
    """$ per hour."""
    address: Name = "tcp://RELAY:7701"
    """Where the region's workers reach it."""


class RegionRow(Strict):
    """A place, and the path to it from the learner."""

    name: Name
    """What offers call it."""
    mbit_per_s: Positive | None = None
    """Rate of one stream from the learner; without it there is no path."""
    latency_s: Seconds = 0.0
    """One way."""
    price_per_gb: Amount = 0.0
    """$ per GB that leaves the learner for it."""
    relay: RelayRow | None = None
    """The relay there, if there is one."""


class OfferRow(Strict):
    """Nodes of one kind that can be rented."""

    name: Name | None = None
    """What the nodes are called; the GPU's name if left out."""
    gpu: Name
    """GPU by name."""
    num_gpus: Count = 1
    """GPUs of one node, used together."""
    region: Name
    """One of [[regions]]."""
    count: Annotated[int, Field(ge=1, le=100_000)]
    """How many can be had."""
    price_per_h: Amount
    """$ per hour for one node; 0 for one's own."""
    price_per_gb: Amount = 0.0
    """$ per GB in and out of a node."""
    down_mbit_per_s: Positive
    """Downlink of one node."""
    up_mbit_per_s: Positive
    """Uplink of one node."""
    can_listen: bool = False
    """Whether others can dial it, so that it passes weights on."""
    tokens_per_s: Positive | None = None
    """Measured completion tokens per second of one node; an estimate if left out."""
    concurrency: Count | None = None
    """Rollouts side by side on one node; needed with tokens_per_s."""
    losses_per_h: Amount = 0.0
    """How often one such node is taken away, as a spot machine is."""
    restart_s: Seconds = 300.0
    """Until a lost node is replaced."""


class GpuRow(Strict):
    """A GPU that the catalogue lacks, or that is to replace the one of that name."""

    name: Name
    """What offers call it."""
    tflops: Positive
    """Dense bfloat16 peak, 10^12 operations per second."""
    gb_per_s: Positive
    """Memory bandwidth."""
    memory_gib: Count
    """Memory."""
    link_gb_per_s: Positive = 25.0
    """To its neighbours in one machine."""


class ModelRow(Strict):
    """A model that the catalogue lacks."""

    name: Name
    """What the job calls it."""
    num_params: Positive
    """Parameters."""
    num_layers: Count
    """Transformer layers."""
    hidden_size: Count
    """Width."""
    num_kv_heads: Count
    """Heads of keys and values."""
    head_dim: Count = 128
    """Width of a head."""


TABLES: dict[str, type[Strict]] = {"job": JobRow, "learner": LearnerRow}
"""Tables that stand once."""
LISTS: dict[str, type[Strict]] = {
    "regions": RegionRow,
    "offers": OfferRow,
    "gpus": GpuRow,
    "models": ModelRow,
}
"""Tables that repeat."""


class SimRow(Strict):
    """How long to simulate, how the run is configured, and times of what is not simulated."""

    num_steps: Count = 50
    """Optimizer steps."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Fixes everything that is drawn."""
    chunks_per_version: Annotated[int, Field(ge=1, le=4096)] = 64
    """Grain of a version: few chunks are fast to simulate, many are closer to the truth."""
    release_after_s: Annotated[Seconds, Field(gt=0)] | None = None
    """As worker.release_after_s, with a command that gives the machine back."""
    rent: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Nodes by offer; an offer that is not named here has all of its count."""
    profile: Literal["lan", "wan"] = "wan"
    """Defaults of the network's four times, as for a run; those of wan are shown."""
    heartbeat_s: Annotated[Seconds, Field(gt=0)] = PROFILES["wan"]["network.heartbeat_s"]
    """As network.heartbeat_s."""
    dead_after_s: Annotated[Seconds, Field(gt=0)] = PROFILES["wan"]["network.dead_after_s"]
    """As network.dead_after_s."""
    lease_timeout_s: Annotated[Seconds, Field(gt=0)] = PROFILES["wan"]["network.lease_timeout_s"]
    """As network.lease_timeout_s."""
    reconnect_for_s: Annotated[Seconds, Field(gt=0)] = PROFILES["wan"]["network.reconnect_for_s"]
    """As network.reconnect_for_s."""
    is_paced: bool = True
    """Whether leases hold workers back; without, whoever has room is given work."""
    queue_share: Amount = 1.0
    """Groups that wait at a worker for each one in its engine."""
    alone_speedup: Annotated[float, Field(ge=1)] = 2.0
    """How much faster a sequence is sampled on its own than in a full engine."""
    speed_spread: Share = 0.0
    """Standard deviation over mean of the rates of nodes of one kind."""
    train_spread: Share = 0.0
    """Standard deviation over mean of the learner's step."""
    setup_s: Instant = 10.0
    """Until a worker has built its engine."""
    swap_s: Instant = 0.5
    """Until new weights are in an engine."""
    publish_s: Instant = 0.0
    """In which the learner makes a version, and nothing else."""
    ledger_s: Instant = 0.01
    """Until a group is on the learner's disk."""
    join_within_s: Instant = 5.0
    """In which the workers start, one after the other."""

    @model_validator(mode="before")
    @classmethod
    def _fill_times(cls, given: Any) -> Any:
        """Give the network's times that are left out the defaults of the profile."""
        profile = PROFILES.get(str(given.get("profile"))) if isinstance(given, dict) else None
        if profile is None:
            return given
        names = ("heartbeat_s", "dead_after_s", "lease_timeout_s", "reconnect_for_s")
        return {name: profile[f"network.{name}"] for name in names} | given


class FaultRow(Strict):
    """Something that goes wrong at an instant."""

    at_s: Instant
    """When."""
    kind: Literal["kill", "preempt", "cut", "slow"]
    """kill: a process dies; preempt: a machine vanishes; cut: nothing passes; slow: a straggler."""
    target: Name
    """A node (OFFER-1), an offer, "*" for all workers; of a cut: a node, "learner" or a region."""
    for_s: Annotated[Seconds, Field(gt=0)] | None = None
    """After that it is over; never if left out."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of its rate that a slow node keeps."""


class PriceRow(Strict):
    """A point of a price trace."""

    offer: Name
    """One of [[offers]]."""
    at_s: Instant
    """From when on."""
    price_per_h: Amount
    """$ per hour for one node."""


SIM_LISTS: dict[str, type[Strict]] = {"faults": FaultRow, "prices": PriceRow}
"""Tables of a scenario that repeat."""


# --- reading ------------------------------------------------------------------------------------


AnyRow = TypeVar("AnyRow", bound=BaseModel)


@dataclass(slots=True)
class Rows:
    """The valid rows, and the problems of the others."""

    kinds: Mapping[str, type[BaseModel]] = field(default_factory=lambda: TABLES | LISTS)
    """Tables that may stand in the files."""
    good: dict[str, list[tuple[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """By table, with the words that name each in a message."""
    bad: dict[str, list[tuple[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """Rows that are not valid, as they stand, what is missing as None; nothing is built of them."""
    problems: list[str] = field(default_factory=list)

    def every(self, name: str) -> list[tuple[str, Any]]:
        """Return the rows of a list or table, good and bad."""
        return [*self.good[name], *self.bad[name]]

    def add(self, tables: Mapping[str, Any], source: str) -> None:
        """Add the rows of these tables, and what is wrong with them."""
        for name, value in tables.items():
            is_list = name in LISTS or name in SIM_LISTS
            if name not in self.kinds:
                near = nearest(name, self.kinds)
                hint = f"did you mean {near}?" if near else f"there are {', '.join(self.kinds)}"
                self.problems.append(f"{source}: [{name}]: unknown table; {hint}")
            elif not isinstance(value, list if is_list else dict):
                wanted = f"[[{name}]], a list of tables" if is_list else f"[{name}], one table"
                self.problems.append(f"{source}: {name} must be written {wanted}")
            else:
                if not is_list:
                    self._add(name, value, f"{source}: [{name}]")
                for number, item in enumerate(value if is_list else (), 1):
                    self._add(name, item, _place_of(item, source, name, number))

    def check(self, kind: type[AnyRow], value: object, where: str) -> AnyRow | None:
        """Return a row if it is valid; otherwise note what is wrong with it."""
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            said: dict[str, str] = {}
            for detail in error.errors():
                key = ".".join(str(part) for part in detail["loc"] if not _is_branch(part))
                said.setdefault(key, _say(kind, key, detail))
            self.problems.extend(f"{where}: {text}" for text in said.values())
            return None

    def check_name(self, where: str, name: object, known: Mapping[str, Any]) -> bool:
        """Tell whether `name` is among `known`; if not, note that with the nearest match."""
        if not isinstance(name, str):
            return False  # which has been noted
        if name in known:
            return True
        by_fold = {_fold(other): other for other in known}
        near = nearest(_fold(name), by_fold)
        listed = ", ".join(known) or "none"
        hint = f"did you mean {show(by_fold[near])}?" if near else f"known are {listed}"
        self.problems.append(f"{where} = {show(name)}: unknown; {hint}")
        return False

    def _add(self, name: str, item: Any, where: str) -> None:
        kind = self.kinds[name]
        row = self.check(kind, item, where)
        if row is not None:
            self.good[name].append((where, row))
        elif isinstance(item, dict):
            required = {key: None for key, info in kind.model_fields.items() if info.is_required()}
            known = {key: value for key, value in item.items() if key in kind.model_fields}
            self.bad[name].append((where, kind.model_construct(**required | known)))


def _place_of(item: object, source: str, name: str, number: int) -> str:
    """Return the words for a row of a list: its table, its number from 1, what it calls itself."""
    keys = [key for key in ("name", "gpu", "region") if isinstance(item, dict) and key in item]
    named = f" ({', '.join(str(item[key]) for key in keys)})" if isinstance(item, dict) else ""
    return f"{source}: {name}[{number}]{named if keys else ''}"


def _is_branch(part: object) -> bool:
    """Tell whether a part of pydantic's path names a member of a union, not a key."""
    return isinstance(part, str) and ("[" in part or part in ("int", "float"))


def _say(kind: type[BaseModel], key: str, detail: Mapping[str, Any]) -> str:
    name = key.rpartition(".")[2]
    info = kind.model_fields.get(name)
    meaning = f" ({info.description.rstrip('.')})" if info and info.description else ""
    if detail["type"] == "missing":
        return f"{key}: missing{meaning}"
    if detail["type"] == "extra_forbidden":
        near = nearest(name, kind.model_fields)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(kind.model_fields)}"
        return f"{key}: unknown key; {hint}"
    own_words = detail.get("ctx", {}).get("error")
    text = str(own_words) if own_words else str(detail["msg"]).removeprefix("Input should be ")
    return f"{key} = {show(detail['input'])}: must be {text}{meaning}"


def _fold(name: str) -> str:
    """Drop what spellings of one product differ in."""
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")


# --- the request --------------------------------------------------------------------------------


MBIT = 1e6 / 8
"""Bytes per second of one Mbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRequest:
    """What a fleet file asks to be planned."""

    fleet: RentedFleet
    job: Job
    periods: tuple[int, ...]
    """Publish periods to try, in order."""
    model: ModelShape
    gpus: Mapping[str, Gpu]
    """The catalogue with the file's own rows."""
    learner: LearnerRow
    job_row: JobRow
    offers: tuple[OfferRow, ...]
    """The rows behind `fleet.offers`, in the same order."""
    regions: Mapping[str, RegionRow]
    notices: tuple[str, ...]
    """What was estimated or left out, for the reader."""


def parse_fleet(tables: Mapping[str, Any], source: str = "fleet.toml") -> FleetRequest:
    """Check fleet and job, as `read_tables` returns them.

    Raises:
        ConfigError: listing every problem found, each with its row.
    """
    rows = Rows()
    rows.add(tables, source)
    problems = rows.problems
    problems += [f"{source}: [{name}] is missing" for name in TABLES if name not in tables]
    gpus, models = _catalogues(rows)
    regions = _regions(rows)
    _check_offers(rows, gpus, regions, source)
    for _, job in rows.every("job"):
        _check_job(rows, job, models, source)
    for where, learner in rows.every("learner"):
        rows.check_name(f"{where}: gpu", learner.gpu, gpus)
    if problems:
        raise ConfigError(in_one("fleet", problems))
    return _request(rows, job, learner, gpus, models[job.model], regions)


def _catalogues(rows: Rows) -> tuple[dict[str, Gpu], dict[str, ModelShape]]:
    gpus, models = dict(GPUS), dict(MODELS)
    for _, row in rows.good["gpus"]:
        gpus[row.name] = Gpu(
            name=row.name,
            flops_per_s=row.tflops * 1e12,
            bytes_per_s=row.gb_per_s * 1e9,
            memory_bytes=row.memory_gib << 30,
            link_bytes_per_s=row.link_gb_per_s * 1e9,
        )
    for _, row in rows.good["models"]:
        models[row.name] = ModelShape(**row.model_dump())
    # A bad row is known by its name all the same: whoever names it is right.
    for name, known in (("gpus", gpus), ("models", models)):
        stand_in: Any = next(iter(known.values()))
        for _, bad in rows.bad[name]:
            if isinstance(bad.name, str):
                known.setdefault(bad.name, stand_in)
    return gpus, models


def _regions(rows: Rows) -> dict[str, RegionRow]:
    found: dict[str, RegionRow] = {}
    for where, row in rows.every("regions"):
        if not isinstance(row.name, str):
            continue  # which has been noted
        if row.name in found:
            rows.problems.append(f"{where}: a second region called {show(row.name)}; rename one")
        found[row.name] = row
    return found


def _check_offers(
    rows: Rows, gpus: Mapping[str, Gpu], regions: Mapping[str, RegionRow], source: str
) -> None:
    if not rows.every("offers") and not any("offers[" in text for text in rows.problems):
        rows.problems.append(
            f"{source}: the fleet is empty; describe what can be rented in one [[offers]] per kind"
        )
    names: set[str] = set()
    for where, row in rows.every("offers"):
        rows.check_name(f"{where}: gpu", row.gpu, gpus)
        if rows.check_name(f"{where}: region", row.region, regions):
            if regions[row.region].mbit_per_s is None:
                rows.problems.append(
                    f"{where}: region {show(row.region)} has no path from the learner; give "
                    "mbit_per_s in its row of [[regions]]"
                )
        elif not regions:
            rows.problems.append(f"{where}: there are no [[regions]]; add one with its mbit_per_s")
        if (row.tokens_per_s is None) != (row.concurrency is None):
            rows.problems.append(
                f"{where}: tokens_per_s and concurrency were measured together; give both or none"
            )
        name = str(row.name or row.gpu).replace(" ", "-")  # its nodes are NAME-1, NAME-2, ...
        if name in names:
            rows.problems.append(
                f"{where}: a second offer of nodes called {name}; give each a name of its own"
            )
        names.add(name)


def _check_job(rows: Rows, job: JobRow, models: Mapping[str, ModelShape], source: str) -> None:
    rows.check_name(f"{source}: [job]: model", job.model, models)
    if _are_numbers(job.completion_tokens, job.max_completion_tokens) and (
        job.completion_tokens > job.max_completion_tokens
    ):
        rows.problems.append(
            f"{source}: [job]: completion_tokens = {job.completion_tokens:g} is a mean and cannot "
            f"exceed max_completion_tokens = {job.max_completion_tokens:g}"
        )
    if (
        job.publish_period != "auto"
        and _are_numbers(job.publish_period, job.max_staleness)
        and job.publish_period > job.max_staleness + 1
    ):
        rows.problems.append(
            f"{source}: [job]: publish_period = {job.publish_period} with max_staleness = "
            f"{job.max_staleness}: beyond max_staleness + 1 the learner would wait for rollouts "
            f"that only its next version allows; lower it to {job.max_staleness + 1} or less"
        )
    prices = [row.price_per_h for _, row in rows.every("offers")]
    cheapest = min((price for price in prices if _are_numbers(price)), default=0.0)
    if (
        job.budget_per_h is not None
        and _are_numbers(job.budget_per_h)
        and job.budget_per_h < cheapest
    ):
        rows.problems.append(
            f"{source}: [job]: budget_per_h = {job.budget_per_h:g} does not pay for a single node; "
            f"the cheapest costs {cheapest:g}"
        )


def _are_numbers(*values: object) -> bool:
    """Tell whether values can be compared; those of a bad row may be anything."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _request(
    rows: Rows,
    job_row: JobRow,
    learner: LearnerRow,
    gpus: Mapping[str, Gpu],
    model: ModelShape,
    regions: Mapping[str, RegionRow],
) -> FleetRequest:
    notices: list[str] = []
    kept: list[OfferRow] = []
    offers: list[Offer] = []
    for _, row in rows.good["offers"]:
        offer = _offer(row, job_row, gpus[row.gpu], model, notices)
        if offer is not None:
            kept.append(row)
            offers.append(offer)
    if not offers:
        raise ConfigError("no node on offer can run the model:\n  " + "\n  ".join(notices))
    job = _job(job_row, learner, gpus[learner.gpu], model, notices)
    fixed = job_row.publish_period
    return FleetRequest(
        fleet=RentedFleet(
            offers=tuple(offers),
            regions={name: _region(row) for name, row in regions.items()},
            uplink_bytes_per_s=learner.uplink_mbit_per_s * MBIT,
        ),
        job=job,
        periods=tuple(range(1, job.max_staleness + 2)) if fixed == "auto" else (fixed,),
        model=model,
        gpus=gpus,
        learner=learner,
        job_row=job_row,
        offers=tuple(kept),
        regions=regions,
        notices=tuple(notices),
    )


def _region(row: RegionRow) -> Region:
    return Region(
        name=row.name,
        # A region without a path has no offers: that was checked.
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


# --- tables and overrides -------------------------------------------------------------------------


Table = Mapping[str, Any]


def read_tables(paths: Sequence[Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tables of one or several TOML files, with settings from the command line.

    Args:
        paths: the files; a table stands in one of them.
        overrides: "table.key=value" or "list.name.key=value", the value in TOML or plain text.

    Raises:
        ConfigError: if a file cannot be read, a table stands twice, or an override names nothing.
    """
    tables: dict[str, Any] = {}
    problems: list[str] = []
    for path in paths:
        try:
            found = read_toml(path)
        except ConfigError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{path.name}: [{name}] stands in another file, too; keep one"
            for name in found
            if name in tables
        ]
        tables |= found
    if problems:
        raise ConfigError(in_one("fleet", problems))
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
        ConfigError: if the key names a row that is not there, or what it reaches into is no table.
    """
    parsed = toml_or_text(value)
    table, *path = key.split(".")
    is_list = table in LISTS or table in SIM_LISTS
    if len(path) == 1 and is_list:
        raise ConfigError(
            f"{key}: [[{table}]] is a list; write {table}.NAME.{path[0]}={value}, with the NAME of "
            "a row"
        )
    if len(path) == 1:
        tables[table] = _opened(tables, table) | {path[0]: parsed}
        return
    if table == "sim":  # sim.rent.OFFER
        sim = _opened(tables, "sim")
        tables["sim"] = sim | {path[0]: _opened(sim, path[0]) | {path[1]: parsed}}
        return
    held = tables.get(table)
    rows: list[Any] = copy.deepcopy(held) if isinstance(held, list) else []
    keys = ("name", "gpu", "region")
    named = [row for row in rows if isinstance(row, dict) and path[0] in map(row.get, keys)]
    if len(named) != 1:
        raise ConfigError(f"{key}: there is no row of [[{table}]] called {path[0]!r}")
    named[0][path[1]] = parsed
    tables[table] = rows


def _opened(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a table, an empty one where there is none.

    Raises:
        ConfigError: if something else stands there.
    """
    held = tables.get(name, {})
    if not isinstance(held, Mapping):
        raise ConfigError(f"{name} must be written [{name}], one table")
    return dict(held)


def read_plan(path: Path, request: FleetRequest) -> tuple[dict[str, int], int]:
    """Return the nodes by offer and the publish period of a plan.json of `echo-rl plan`.

    Raises:
        ConfigError: if it cannot be read or is not a plan for this fleet.
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
    counts = {offer.name: offer.count for offer in request.fleet.offers}
    for name, count in rent.items():
        if not 0 <= count <= counts.get(name, -1):
            what = f"{count} of {name}, of which the scenario offers {counts.get(name, 'none')}"
            raise ConfigError(f"{path}: rents {what}; plan with the same file")
    if period < 1:
        raise ConfigError(f"{path}: publishes every {period} steps, which must be 1 at least")
    return rent, period
