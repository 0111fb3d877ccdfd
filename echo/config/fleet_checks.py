"""Checks rules that compare several rows of fleet and scenario files.

The rules also read invalid rows, so that one pass finds every problem. If a value is invalid,
fleet_file.py drops the problems of all rules that read the value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo.config.fleet_schema import LEARNER_REGION, MAX_COUNT, JobRow, SimRow
from echo.config.layers import Problem, Setting
from echo.config.schema import KeyPath, show
from echo.core.errors import nearest
from echo.fleet.gpus import GPUS, MODELS

Rows = Mapping[str, Sequence[tuple[KeyPath, Any]]]
"""The rows of each table, with their paths. Checks also read invalid rows. An invalid row has the
file's values, and None for each missing value."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The contents of a plan.json of `echo-rl plan`."""

    source: str
    """The name of the plan's file, for messages."""
    rent: Mapping[str, int]
    """For each offer's name, the number of nodes to rent."""
    publish_period: int


def fleet_rules(rows: Rows) -> Iterator[Problem]:
    """Yield the problems of a fleet and its job."""
    gpus = [*GPUS, *_names(rows, "gpus")]
    yield from _check_regions(rows)
    yield from _check_offers(rows, gpus)
    for path, job in rows.get("job", ()):
        yield from _check_name((*path, "model"), job.model, [*MODELS, *_names(rows, "models")])
        yield from _check_job(rows, job)
    for path, learner in rows.get("learner", ()):
        yield from _check_name((*path, "gpu"), learner.gpu, gpus)


def _names(rows: Rows, table: str) -> list[str]:
    """Return the names of a table's rows, including invalid rows.

    Otherwise a reference to an invalid row would be reported as a second problem.
    """
    return [row.name for _, row in rows.get(table, ()) if isinstance(row.name, str)]


def _check_name(path: KeyPath, name: object, known: Collection[str]) -> Iterator[Problem]:
    """If a name is not in `known`, report the name and the most similar known name."""
    if not isinstance(name, str) or name in known:
        return
    by_fold = {_fold(other): other for other in known}
    near = nearest(_fold(name), by_fold)
    listed = ", ".join(known) or "none"
    hint = f"did you mean {show(by_fold[near])}?" if near else f"known are {listed}"
    yield Problem((path,), f"unknown; {hint}")


def _check_regions(rows: Rows) -> Iterator[Problem]:
    seen: list[object] = []
    for path, row in rows.get("regions", ()):
        if row.name in seen:
            text = f"a second region called {show(row.name)}; rename one"
            yield Problem((path, (*path, "name")), text)
        seen.append(row.name)


def _check_offers(rows: Rows, gpus: Collection[str]) -> Iterator[Problem]:
    offers = rows.get("offers", ())
    regions = {row.name: row for _, row in rows.get("regions", ()) if isinstance(row.name, str)}
    if not offers:
        text = "the fleet is empty; describe what can be rented in one [[offers]] per kind"
        yield Problem((("offers",),), text)
    names: set[str] = set()
    for path, row in offers:
        yield from _check_name((*path, "gpu"), row.gpu, gpus)
        if regions:
            yield from _check_name((*path, "region"), row.region, regions)
        else:
            text = "there are no [[regions]]; add one with its mbit_per_s"
            yield Problem(((*path, "region"), ("regions",)), text)
        region = regions.get(row.region) if isinstance(row.region, str) else None
        if region is not None and region.mbit_per_s is None:
            text = (
                f"region {show(row.region)} has no path from the learner; give mbit_per_s in its "
                "row of [[regions]]"
            )
            yield Problem((path,), text)
        if (row.tokens_per_s is None) != (row.concurrency is None):
            text = "tokens_per_s and concurrency were measured together; give both or none"
            yield Problem((path, (*path, "tokens_per_s"), (*path, "concurrency")), text)
        name = str(row.name or row.gpu).replace(" ", "-")  # its nodes are NAME-1, NAME-2, ...
        if name in names:
            text = f"a second offer of nodes called {name}; give each a name of its own"
            yield Problem((path, (*path, "name"), (*path, "gpu")), text)
        names.add(name)


def _check_job(rows: Rows, job: JobRow) -> Iterator[Problem]:
    mean, longest = job.completion_tokens, job.max_completion_tokens
    if _are_numbers(mean, longest) and mean > longest:
        text = f"is a mean and cannot exceed max_completion_tokens = {longest:g}"
        yield _of_job(text, "completion_tokens", "max_completion_tokens")
    period, bound = job.publish_period, job.max_staleness
    if period != "auto" and _are_numbers(period, bound) and period > bound + 1:
        yield _of_job(
            f"must be at most max_staleness + 1 = {bound + 1}: beyond it the learner would wait "
            "for rollouts that only its next version allows",
            "publish_period",
            "max_staleness",
        )
    prices = [row.price_per_h for _, row in rows.get("offers", ())]
    cheapest = min((price for price in prices if _are_numbers(price)), default=0.0)
    budget = job.budget_per_h
    if budget is not None and _are_numbers(budget) and budget < cheapest:
        text = f"does not pay for a single node; the cheapest costs {cheapest:g}"
        yield _of_job(text, "budget_per_h")


def _of_job(text: str, *keys: str) -> Problem:
    return Problem(tuple(("job", key) for key in keys), text)


def _are_numbers(*values: object) -> bool:
    """Return whether all values are numbers. Values of invalid rows may have other types."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _fold(name: str) -> str:
    """Return a name in lower case without punctuation and "nvidia", to compare names."""
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")


def scenario_rules(rows: Rows, plan: Plan | None, left_out: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of a scenario.

    Args:
        rows: the rows of the scenario file.
        plan: the plan.json with the nodes to rent; None without a plan.json.
        left_out: offers whose nodes cannot run the model.
    """
    yield from fleet_rules(rows)
    offered: dict[str, int] = {}
    for _, row in rows.get("offers", ()):
        is_count = isinstance(row.count, int) and 1 <= row.count <= MAX_COUNT
        name = row.name or row.gpu
        if isinstance(name, str) and name not in left_out:
            offered[name] = row.count if is_count else MAX_COUNT
    for name, count in ({} if plan is None else plan.rent).items():
        if not 0 <= count <= offered.get(name, -1):
            what = f"{count} of {name}, of which the scenario offers {offered.get(name, 'none')}"
            source = Setting(None, "" if plan is None else plan.source)
            yield Problem((), f"rents {what}; plan with the same file", source)
    [(_, sim)] = rows.get("sim") or [((), SimRow())]
    yield from _check_sim(sim, offered)
    counts = rented_nodes(offered, sim.rent, plan)
    if offered and not any(counts.values()):
        text = "[sim]: rent leaves no node; the learner would wait forever"
        yield Problem((), text)
    yield from _check_faults(rows, offered, counts)
    for path, price in rows.get("prices", ()):
        yield from _check_name((*path, "offer"), price.offer, offered)


def _check_sim(sim: SimRow, offered: Mapping[str, int]) -> Iterator[Problem]:
    for name, count in sim.rent.items() if isinstance(sim.rent, dict) else ():
        path = ("sim", "rent", name)
        yield from _check_name(path, name, offered)
        if _are_numbers(count) and count > offered.get(name, count):
            text = f"is more than its count of {offered[name]}; raise the count or rent fewer"
            yield Problem((path,), text)
    silence, beat = sim.dead_after_s, sim.heartbeat_s
    if _are_numbers(silence, beat) and silence <= beat:
        text = (
            f"is {silence:g} s and must be longer than heartbeat_s = {beat:g}, or every node "
            "counts as dead"
        )
        yield Problem((("sim", "dead_after_s"), ("sim", "heartbeat_s")), text)


def _check_faults(
    rows: Rows, offered: Mapping[str, int], counts: Mapping[str, int]
) -> Iterator[Problem]:
    nodes = [
        f"{name.replace(' ', '-')}-{number}"
        for name, count in counts.items()
        for number in range(1, count + 1)
    ]
    workers = dict.fromkeys(["*", *offered, *nodes])
    places = dict.fromkeys([*_names(rows, "regions"), *nodes, LEARNER_REGION])
    for path, row in rows.get("faults", ()):
        if row.kind != "cut" and row.target == LEARNER_REGION:
            text = (
                "the simulated learner neither dies nor slows down; give the fault a worker or an "
                'offer, or write kind = "cut"'
            )
            yield Problem(((*path, "target"),), text)
        else:
            known = places if row.kind == "cut" else workers
            yield from _check_name((*path, "target"), row.target, known)


def rented_nodes(
    offered: Mapping[str, int], rent: Mapping[str, int], plan: Plan | None
) -> dict[str, int]:
    """Return the number of rented nodes of each offer.

    An offer's number in [sim] takes precedence over its number in the plan. An offer without a
    number is not rented if there is a plan. Without a plan, all nodes of such an offer are rented.
    A number that exceeds the nodes on offer counts as missing, because the rules make a list of the
    rented nodes, which must fit into memory. `scenario_rules` reports such a number.
    """
    counts = dict(offered)
    if plan is not None:
        counts = dict.fromkeys(offered, 0) | _possible(plan.rent, offered)
    return counts | _possible(rent, offered)


def _possible(rent: object, offered: Mapping[str, int]) -> dict[str, int]:
    given = rent if isinstance(rent, Mapping) else {}
    return {
        name: count
        for name, count in given.items()
        if type(count) is int and 0 <= count <= offered.get(name, -1)
    }
