"""From fleet files to what the planner takes, or everything that is wrong with them.

A fleet and a job may share one file or stand in two; each table stands in one of them. Every bad
row is named by its table, its number from 1 and what it calls itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from echo.config.fleet_rows import Rows, is_known, read_file, read_toml
from echo.config.fleet_schema import (
    TABLES,
    GpuRow,
    JobRow,
    LearnerRow,
    ModelRow,
    OfferRow,
    RegionRow,
)
from echo.config.leaves import show
from echo.core.errors import ConfigError
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

MBIT = 1e6 / 8
"""Bytes per second of one Mbit/s."""
ODD_PRICE_FACTOR = 3.0
"""An offer this much above or below the typical price gets a notice: a slip, or the wrong unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
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


def load_fleet(paths: Sequence[Path]) -> Request:
    """Read fleet and job from one or several TOML files.

    Raises:
        ConfigError: listing every problem found, each with its row.
    """
    rows = Rows()
    unreadable: list[str] = []
    for path in paths:
        try:
            read_file(rows, read_toml(path), path.name)
        except ConfigError as error:
            unreadable.append(str(error))
    if unreadable:  # what the other files lack may stand in these
        raise ConfigError(report([*unreadable, *rows.problems]))
    return _build(rows, ", ".join(path.name for path in paths))


def parse_fleet(table: Mapping[str, Any], source: str = "fleet.toml") -> Request:
    """Check a fleet that is already read.

    Raises:
        ConfigError: as `load_fleet`.
    """
    rows = Rows()
    read_file(rows, table, source)
    return _build(rows, source)


def _build(rows: Rows, source: str) -> Request:
    """Return the request, after the rules that join several rows."""
    problems = rows.problems
    for name in TABLES:
        if name not in rows.seen:
            problems.append(f"{source}: [{name}] is missing")
    gpus, models = _catalogues(rows)
    regions = _regions(rows)
    _check_offers(rows, gpus, regions, source)
    for _, row in rows.every("job"):
        _check_job(rows, cast("JobRow", row), models, source)
    for _, row in rows.every("learner"):
        is_known(rows, f"{source}: [learner]: gpu", cast("LearnerRow", row).gpu, gpus)
    if problems:
        raise ConfigError(report(problems))
    job_row = cast("JobRow", rows.tables["job"])
    learner = cast("LearnerRow", rows.tables["learner"])
    return _request(rows, job_row, learner, gpus, models[job_row.model], regions)


def _catalogues(rows: Rows) -> tuple[dict[str, Gpu], dict[str, ModelShape]]:
    gpus, models = dict(GPUS), dict(MODELS)
    for _, row in rows.lists.get("gpus", []):
        assert isinstance(row, GpuRow)
        gpus[row.name] = Gpu(
            name=row.name,
            flops_per_s=row.tflops * 1e12,
            bytes_per_s=row.gb_per_s * 1e9,
            memory_bytes=row.memory_gib << 30,
            price_per_h=row.price_per_h,
            link_bytes_per_s=row.link_gb_per_s * 1e9,
        )
    for _, row in rows.lists.get("models", []):
        assert isinstance(row, ModelRow)
        models[row.name] = ModelShape(**row.model_dump())
    # A bad row is known by its name all the same: whoever names it is right.
    for name, known in (("gpus", gpus), ("models", models)):
        stand_in: Any = next(iter(known.values()))
        for _, bad in rows.bad.get(name, []):
            known.setdefault(cast("GpuRow | ModelRow", bad).name, stand_in)
    return gpus, models


def _regions(rows: Rows) -> dict[str, RegionRow]:
    found: dict[str, RegionRow] = {}
    for where, row in rows.every("regions"):
        assert isinstance(row, RegionRow)
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
    names: dict[str, str] = {}
    for where, row in rows.every("offers"):
        assert isinstance(row, OfferRow)
        is_known(rows, f"{where}: gpu", row.gpu, gpus)
        if is_known(rows, f"{where}: region", row.region, regions):
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
        name = f"{row.name or row.gpu} in {row.region}"
        if name in names:
            rows.problems.append(f"{where}: a second offer of {name}; give each a name of its own")
        names[name] = where


def _check_job(rows: Rows, job: JobRow, models: Mapping[str, ModelShape], source: str) -> None:
    is_known(rows, f"{source}: [job]: model", job.model, models)
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
    offers = [row for _, row in rows.every("offers") if isinstance(row, OfferRow)]
    prices = [row.price_per_h for row in offers]
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
) -> Request:
    notices: list[str] = []
    kept: list[OfferRow] = []
    offers: list[Offer] = []
    for _, row in rows.lists["offers"]:
        assert isinstance(row, OfferRow)
        offer = _offer(row, job_row, gpus[row.gpu], model, notices)
        if offer is not None:
            kept.append(row)
            offers.append(offer)
    if not offers:
        raise ConfigError("no node on offer can run the model:\n  " + "\n  ".join(notices))
    job = _job(job_row, learner, gpus[learner.gpu], model, notices)
    fixed = job_row.publish_period
    return Request(
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
    typical = row.num_gpus * gpu.price_per_h
    has_price = row.price_per_h > 0 and typical > 0
    if has_price and not 1 / ODD_PRICE_FACTOR <= row.price_per_h / typical <= ODD_PRICE_FACTOR:
        notices.append(
            f"{name} in {row.region}: ${row.price_per_h:g}/h is far from the ${typical:.2f}/h that "
            f"{row.num_gpus} x {row.gpu} typically cost; is it per hour and node?"
        )
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
    return Offer(
        name=name,
        region=row.region,
        count=row.count,
        price_per_h=row.price_per_h,
        tokens_per_s=tokens_per_s,
        concurrency=concurrency,
        down_bytes_per_s=row.down_mbit_per_s * MBIT,
        up_bytes_per_s=row.up_mbit_per_s * MBIT,
        can_listen=row.can_listen,
        price_per_gb=row.price_per_gb,
        losses_per_h=row.losses_per_h,
        restart_s=row.restart_s,
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
            exclude={
                "model",
                "prompt_tokens",
                "publish_period",
                "version_bytes",
                "budget_per_h",
                "chunk_bytes",
            }
        ),
        publish_period=1 if row.publish_period == "auto" else row.publish_period,
        train_s=train_s,
        version_bytes=row.version_bytes or model.num_params * BYTES_PER_WEIGHT,
        chunk_bytes=row.chunk_bytes,
        learner_price_per_h=learner.price_per_h,
        budget_per_h=math.inf if row.budget_per_h is None else row.budget_per_h,
    )


def report(problems: Iterable[str]) -> str:
    """Return all problems of a file as one message."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return "\n  ".join([f"the fleet has {len(unique)} problems:", *unique])
