"""Defines the keys of fleet and scenario files: type, limits, default and meaning.

A fleet and a job may be in one file or in two files. A scenario is a fleet file that may have
further tables. fleet_checks.py has the rules that compare several keys.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from echo.config.fields import Bytes, Seconds, Strict
from echo.config.layers import MAX_GUESSES, Schema, Settings
from echo.config.schema import PROFILES, ActivationSection, KeyPath, Leaf, leaf_of
from echo.core.errors import nearest
from echo.core.units import one_line

# --- keys ---------------------------------------------------------------------------------------
#
# Rates are in Mbit/s and prices in $ per hour or per GB (10^9 bytes), as marketplaces quote them.


Positive = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Name = Annotated[str, Field(min_length=1)]
Instant = Annotated[Seconds, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
MAX_COUNT = 100_000
"""Largest number of nodes of one offer."""
LEARNER_REGION = "learner"
"""The name of the simulated learner's region."""


class JobRow(Strict):
    """The planned run: its model, sizes and limits."""

    model: Name
    """Name of the model, in the catalogue or in [[models]]."""
    groups_per_step: Count
    """Groups per optimizer step."""
    group_size: Annotated[int, Field(ge=2)]
    """Rollouts per group."""
    useful_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the groups whose rewards differ. Groups with equal rewards are not trained on."""
    prompt_tokens: Positive = 512.0
    """Mean number of tokens of a prompt."""
    completion_tokens: Positive
    """Mean number of tokens of a completion."""
    max_completion_tokens: Positive
    """Largest number of tokens of a completion."""
    completion_spread: Amount = 0.5
    """Standard deviation of the completion length, divided by the mean length."""
    max_staleness: Annotated[int, Field(ge=0)] = 6
    """Inclusive bound S on staleness, optimizer steps."""
    publish_period: Literal["auto"] | Count = "auto"
    """Optimizer steps between two publications. "auto" chooses the smallest number for which a
    fleet is sufficient."""
    version_bytes: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes of one publication, such as a delta. The default is the size of all weights in
    bfloat16."""
    chunk_bytes: Annotated[Bytes, Field(gt=0)] = 1 << 20
    """Bytes of a chunk, the unit in which versions are sent."""
    has_pausing_workers: bool = False
    """Whether workers stop generating while new weights arrive."""
    margin: Amount = 0.1
    """Spare rate of the fleet, as a share of the required rate."""
    rate_spread: Amount = 0.1
    """Standard deviation of the fleet's time for one batch, divided by the mean time."""
    budget_per_h: Positive | None = None
    """$ per hour for nodes and traffic, without the learner. By default there is no limit."""


class LearnerRow(Strict):
    """The learner's machine."""

    gpu: Name
    """Name of the GPU."""
    num_gpus: Count = 1
    """Number of GPUs that train together."""
    train_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Measured seconds of one optimizer step. By default the seconds are estimated."""
    price_per_h: Amount
    """$ per hour for the whole machine."""
    uplink_mbit_per_s: Positive
    """Mbit/s of the learner's uplink."""
    address: Name = "tcp://LEARNER:7700"
    """Address at which nodes reach the learner, for the printed commands."""


class RelayRow(Strict):
    """A relay in a region, which serves the region's workers."""

    mbit_per_s: Positive
    """Mbit/s of the relay's uplink."""
    price_per_h: Amount
    """$ per hour for the relay's machine."""
    address: Name = "tcp://RELAY:7701"
    """Address at which the region's workers reach the relay."""


class RegionRow(Strict):
    """A region, and the network path to this region from the learner."""

    name: Name
    """Name of the region, for use in [[offers]]."""
    mbit_per_s: Positive | None = None
    """Mbit/s of one stream from the learner to the region. Without a value, there is no path."""
    latency_s: Seconds = 0.0
    """Latency of the path in one direction."""
    price_per_gb: Amount = 0.0
    """$ per GB sent from the learner to the region."""
    relay: RelayRow | None = None
    """The relay in the region, if there is one."""


class OfferRow(Strict):
    """Nodes of one kind that can be rented."""

    name: Name | None = None
    """Name of the nodes. The default is the GPU's name."""
    gpu: Name
    """Name of the GPU."""
    num_gpus: Count = 1
    """Number of GPUs of one node, which are used together."""
    region: Name
    """Name of a region in [[regions]]."""
    count: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Number of nodes on offer."""
    price_per_h: Amount
    """$ per hour for one node; 0 for a node of your own."""
    price_per_gb: Amount = 0.0
    """$ per GB of traffic into and out of a node."""
    down_mbit_per_s: Positive
    """Mbit/s of one node's downlink."""
    up_mbit_per_s: Positive
    """Mbit/s of one node's uplink."""
    can_listen: bool = False
    """Whether other nodes can dial this node to get weights."""
    tokens_per_s: Positive | None = None
    """Measured completion tokens per second of one node. By default the rate is estimated."""
    concurrency: Count | None = None
    """Rollouts that one node samples at the same time; needed with tokens_per_s."""
    losses_per_h: Amount = 0.0
    """Number of preemptions per hour of one node, for spot machines."""
    restart_s: Seconds = 300.0
    """Time until a lost node is replaced."""


class GpuRow(Strict):
    """A GPU to add to the catalogue, or to replace the catalogue's GPU with the same name."""

    name: Name
    """Name of the GPU, for use in [[offers]] and [learner]."""
    tflops: Positive
    """Peak rate of dense bfloat16 products, in 10^12 operations per second."""
    gb_per_s: Positive
    """Bandwidth of the GPU's memory, in GB/s."""
    memory_gib: Count
    """Size of the GPU's memory, in GiB."""
    link_gb_per_s: Positive = 25.0
    """GB/s of the link between two GPUs of one machine."""


class ModelRow(Strict):
    """A model to add to the catalogue."""

    name: Name
    """Name of the model, for use in [job]."""
    num_params: Positive
    """Number of parameters."""
    num_layers: Count
    """Number of transformer layers."""
    hidden_size: Count
    """Width of a layer's states."""
    num_kv_heads: Count
    """Number of attention heads of keys and values."""
    head_dim: Count = 128
    """Width of an attention head."""


class SimRow(Strict):
    """The length and settings of the simulated run, and the times of work that is not simulated."""

    num_steps: Count = 50
    """Number of optimizer steps to simulate."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of all random numbers."""
    chunks_per_version: Annotated[int, Field(ge=1, le=4096)] = 64
    """Chunks per version: few chunks are fast to simulate, many are closer to a real run."""
    release_after_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Same as worker.release_after_s, with a worker.on_release command."""
    rent: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """For each offer, the number of rented nodes. If an offer is not listed, all its nodes are
    rented."""
    heartbeat_s: Annotated[Seconds, Field(gt=0)] = PROFILES["wan"]["network.heartbeat_s"]
    """Same as network.heartbeat_s. This key and the next three have the defaults of wan."""
    dead_after_s: Annotated[Seconds, Field(gt=0)] = PROFILES["wan"]["network.dead_after_s"]
    """Same as network.dead_after_s."""
    lease_timeout_s: Annotated[Seconds, Field(gt=0)] = PROFILES["wan"]["network.lease_timeout_s"]
    """Same as network.lease_timeout_s."""
    reconnect_for_s: Annotated[Seconds, Field(gt=0)] = PROFILES["wan"]["network.reconnect_for_s"]
    """Same as network.reconnect_for_s."""
    is_paced: bool = True
    """Whether leases limit the workers to the demand; if false, every idle worker gets work."""
    is_eager: bool = False
    """Same as sync.eager."""
    alone_speedup: Annotated[float, Field(ge=1)] = 2.0
    """Ratio of a sequence's sampling speed alone to its speed in a full engine."""
    speed_spread: Share = 0.0
    """Standard deviation of the rates of an offer's nodes, divided by the mean rate."""
    train_spread: Share = 0.0
    """Standard deviation of the learner's step time, divided by the mean step time."""
    setup_s: Instant = 10.0
    """Time in which a worker builds its engine."""
    swap_s: Instant = 0.5
    """Time in which new weights are installed in an engine."""
    publish_s: Instant = 0.0
    """Time in which the learner makes a version instead of training."""
    join_within_s: Instant = 5.0
    """Time in which all workers start, one after another."""


class FaultRow(Strict):
    """A fault at one instant of the simulation."""

    at_s: Instant
    """Time from the start of the simulation to the fault."""
    kind: Literal["kill", "preempt", "cut", "slow"]
    """kill ends a process; preempt removes a machine; cut blocks a link; slow slows a node."""
    target: Name
    """A node (OFFER-1), an offer, or "*" for all workers. For a cut: a node, "learner" or a
    region."""
    for_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Duration of the fault. By default the fault has no end."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Rate of a slow node, as a share of its normal rate."""


class PriceRow(Strict):
    """A change of an offer's price at one instant."""

    offer: Name
    """Name of an offer in [[offers]]."""
    at_s: Instant
    """Time from the start of the simulation to the change of the price."""
    price_per_h: Amount
    """$ per hour for one node."""


class FleetFile(Strict):
    """The tables of a fleet file. A table whose type is a list may occur several times."""

    job: JobRow
    learner: LearnerRow
    regions: list[RegionRow] = Field(default_factory=list)
    offers: list[OfferRow] = Field(default_factory=list)
    gpus: list[GpuRow] = Field(default_factory=list)
    models: list[ModelRow] = Field(default_factory=list)


class ScenarioFile(FleetFile):
    """The tables of a scenario file: a fleet file's tables and the simulation's tables."""

    sim: SimRow = Field(default_factory=SimRow)
    activation: ActivationSection = ActivationSection(mode="off")
    """The table [activation] of a run's configuration. Without this table, all workers generate."""
    faults: list[FaultRow] = Field(default_factory=list)
    prices: list[PriceRow] = Field(default_factory=list)


AnyFile = TypeVar("AnyFile", bound=FleetFile)
ROW = "*"
"""A placeholder for a row's number in the path of a key."""


@cache
def tables_of(kind: type[FleetFile]) -> Mapping[str, tuple[type[BaseModel], bool]]:
    """Return, for each table's name, the table's class and whether the table is a list of rows."""
    found: dict[str, tuple[type[BaseModel], bool]] = {}
    for name, info in kind.model_fields.items():
        rows = typing.get_args(info.annotation)
        table: Any = rows[0] if rows else info.annotation
        found[name] = (table, bool(rows))
    return found


def repeats(kind: type[FleetFile], name: str) -> bool:
    """Return whether a table is a list of rows."""
    table = tables_of(kind).get(name)
    return table is not None and table[1]


def expected_table(kind: type[FleetFile], name: str) -> str:
    """Return text that says how to write the table, such as "written [job], one table"."""
    is_list = repeats(kind, name)
    return f"written [[{name}]], a list of tables" if is_list else f"written [{name}], one table"


@cache
def _leaves(kind: type[FleetFile]) -> Mapping[KeyPath, Leaf]:
    """Return all keys of a kind of file, under their paths. Each table counts as a key, too."""
    found: dict[KeyPath, Leaf] = {}
    for name, (table, is_list) in tables_of(kind).items():
        path: KeyPath = (name,)
        found[path] = _table_leaf(path, expected_table(kind, name))
        if is_list:
            path = (name, ROW)
            found[path] = _table_leaf(path, f"a table of [[{name}]]")
        found |= {leaf.path: leaf for leaf in _leaves_below(table, path)}
    return found


def _leaves_below(table: type[BaseModel], parent: KeyPath) -> Iterator[Leaf]:
    fragments = table.model_json_schema()["properties"]
    for name, info in table.model_fields.items():
        path = (*parent, name)
        inner = [part for part in typing.get_args(info.annotation) if _is_table(part)]
        if inner:
            yield _table_leaf(path, f"a table with {', '.join(inner[0].model_fields)}")
            yield from _leaves_below(inner[0], path)
        else:
            yield leaf_of(path, fragments[name], table)


def _is_table(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _table_leaf(path: KeyPath, expected: str) -> Leaf:
    return Leaf(path=path, expected=expected, choices=(), help="", roles=(), defaults={})


def _find(kind: type[FleetFile], path: KeyPath) -> Leaf | None:
    """Return the key at a path of a file, or None.

    If the path lies within a table of the user's own keys, return this table's key.
    """
    if len(path) > 1 and repeats(kind, path[0]):
        path = (path[0], ROW, *path[2:])
    leaf, table = _leaves(kind).get(path), _leaves(kind).get(path[:-1])
    return leaf or (table if table is not None and table.is_table else None)


def _describe_unknown(kind: type[FleetFile], path: KeyPath) -> str:
    tables, known, name = tables_of(kind), _leaves(kind), path[-1]
    if path[0] not in tables and path[0] in tables_of(ScenarioFile):
        return "only a scenario has this table, for `echo-rl sim`; remove it from this file"
    parent = (path[0], ROW, *path[2:-1]) if repeats(kind, path[0]) else path[:-1]
    names = [other[-1] for other in known if parent and other[:-1] == parent]
    if path[0] in tables and not names:
        return "this key takes a plain value, not a table"
    near = nearest(path[0], tables) if path[0] not in tables else nearest(name, names)
    found = [other for other in known if other[-1] == name and len(other) > 1]
    owners = [".".join(other).replace(ROW, "NAME") for other in found]
    if near is None and 0 < len(owners) <= MAX_GUESSES:
        return f"unknown key; did you mean {' or '.join(owners)}?"
    hint = f"did you mean {near}?" if near else f"there are {', '.join(names or tables)}"
    return f"unknown {'key' if names else 'table'}; {hint}"


def _place(kind: type[FleetFile], path: KeyPath, settings: Settings) -> str:
    """Return the text that names a path in messages.

    For a row of a list the text is the list's name and the row's number, as in `offers[0]`. The
    row's values of NAMES follow in brackets.
    """
    if len(path) < 2:
        return "".join(path)
    if not repeats(kind, path[0]):
        return f"[{path[0]}]: {'.'.join(path[1:])}"
    row = (path[0], path[1])
    names = [one_line(str(settings[*row, key].value)) for key in NAMES if (*row, key) in settings]
    named = f" ({', '.join(names)[:MAX_NAMED]})" if names else ""
    place = f"{path[0]}[{path[1]}]{named}" if path[1].isdecimal() else ".".join(row)
    return ": ".join(filter(None, [place, ".".join(path[2:])]))


NAMES = ("name", "gpu", "region")
"""Keys whose values identify a row in messages."""
MAX_NAMED = 80
"""Largest number of characters of a row's names in a message."""


def _schema(kind: type[FleetFile], what: str) -> Schema:
    return Schema(
        what=what,
        override_form="table.key=value or, for lists, list.name.key=value, for example "
        "job.max_staleness=4 or offers.fra-4090.count=3",
        sections=lambda: (),
        find=partial(_find, kind),
        describe_unknown=partial(_describe_unknown, kind),
        place=partial(_place, kind),
    )


SCHEMAS: Mapping[type[FleetFile], Schema] = {
    FleetFile: _schema(FleetFile, "fleet"),
    ScenarioFile: _schema(ScenarioFile, "scenario"),
}
