"""Calibrate a plan with a run: what it recorded in metrics.jsonl and ledger.jsonl.

A worker's rate is its completion tokens over the time in which it held at least one group, from
grant to acceptance: time that leases kept it waiting does not count against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, pstdev

from echo.config.fleet import Request
from echo.core.errors import ConfigError, DataError, StorageError
from echo.core.units import format_bytes, format_duration
from echo.fleet.job import Job
from echo.fleet.overlap import predict, required_rate
from echo.ui.records import Row, json_lines, read_config, read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRate:
    """What one worker did."""

    tokens_per_s: float
    """Completion tokens per second while it held a group."""
    concurrency: int
    """Most rollouts that it held side by side."""
    group_s: float
    """Median seconds from grant to acceptance of a group."""
    pace: float
    """Completion tokens per second of one group, from grant to acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRates:
    """What a run says about itself."""

    name: str
    num_steps: int
    job: Job
    """With the run's own times, lengths and sizes."""
    workers: Mapping[str, WorkerRate]
    broadcast_s: float
    """Median seconds of a broadcast; 0 if none was recorded."""
    idle_share: float
    """Recorded share of the time in which the learner waited."""
    useful_share: float
    """Recorded share of the groups whose rewards were not all equal."""


def read_rates(run_dir: Path) -> RunRates:
    """Return the rates of the run in `run_dir`.

    Raises:
        DataError: if it has made no step or accepted no group yet.
        StorageError: if a file is damaged.
    """
    config = read_config(run_dir)
    rows = read_metrics(run_dir).train
    group_size = config["batch"]["group_size"]
    workers, group_tokens = read_ledger(run_dir / "ledger.jsonl", group_size)
    if not rows or not workers:
        raise DataError(f"{run_dir}: no step or no accepted group yet, no rates to take")
    rows = rows[len(rows) // 5 :]  # the first fifth is run-in
    train_s = fmean(_values(rows, "time/train"))
    wait_s = fmean(_values(rows, "time/wait_for_batch"))
    broadcasts = [
        (row["broadcast/seconds"], row["broadcast/goodput"] * row["broadcast/seconds"])
        for row in rows
        if row.get("broadcast/seconds") and row.get("broadcast/goodput")
    ]
    mean_tokens = fmean(group_tokens) / group_size
    job = Job(
        groups_per_step=config["batch"]["groups_per_step"],
        group_size=group_size,
        max_staleness=config["sync"]["max_staleness"],
        publish_period=round(median(_values(rows, "publish_period") or [1.0])),
        train_s=train_s,
        completion_tokens=mean_tokens,
        max_completion_tokens=max(mean_tokens, config["sampling"]["max_completion_tokens"]),
        # The ledger has totals of groups; lengths within one are taken as independent.
        completion_spread=pstdev(group_tokens) / fmean(group_tokens) * math.sqrt(group_size),
        version_bytes=median(size for _, size in broadcasts) if broadcasts else 0.0,
        margin=0.0,
    )
    return RunRates(
        name=run_dir.resolve().name,
        num_steps=len(rows),
        job=job,
        workers=workers,
        broadcast_s=median(seconds for seconds, _ in broadcasts) if broadcasts else 0.0,
        idle_share=wait_s / (wait_s + train_s) if wait_s + train_s > 0 else 0.0,
        useful_share=fmean(_values(rows, "groups/useful") or [1.0]),
    )


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def read_ledger(path: Path, group_size: int) -> tuple[dict[str, WorkerRate], list[float]]:
    """Return each worker's rate, and the completion tokens of every accepted group."""
    granted: dict[tuple[int, int], float] = {}
    held: dict[str, list[tuple[float, float, int]]] = {}
    for number, record in json_lines(path):
        try:
            if record["kind"] == "granted":
                granted[record["group"], record["attempt"]] = record["at"]
            elif record["kind"] == "accepted":
                since = granted.get((record["group"], record["attempt"]))
                if since is not None:
                    spans = held.setdefault(record["worker"], [])
                    spans.append((since, record["at"], record["tokens"]))
        except (KeyError, TypeError) as error:
            raise StorageError(f"{path}:{number}: damaged record: {error!r}") from error
    tokens = [float(count) for spans in held.values() for _, _, count in spans]
    return {name: _rate(spans, group_size) for name, spans in sorted(held.items())}, tokens


def _rate(spans: list[tuple[float, float, int]], group_size: int) -> WorkerRate:
    """Return a worker's rate from (granted at, accepted at, tokens) of its groups."""
    busy_s, until = 0.0, -math.inf
    for begin, end, _ in sorted(spans):
        busy_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    changes = sorted([(begin, 1) for begin, _, _ in spans] + [(end, -1) for _, end, _ in spans])
    most = max(accumulate(change for _, change in changes))
    return WorkerRate(
        tokens_per_s=sum(count for _, _, count in spans) / max(busy_s, 1e-9),
        concurrency=most * group_size,
        group_s=median(end - begin for begin, end, _ in spans),
        pace=sum(count for _, _, count in spans)
        / max(sum(end - begin for begin, end, _ in spans), 1e-9),
    )


def run_report(rates: RunRates) -> str:
    """Return what a run recorded, beside what the overlap model says of the same rates."""
    job = rates.job
    rate = sum(worker.tokens_per_s for worker in rates.workers.values()) / job.completion_tokens
    # A group waits in the worker's queue and on the wire too: what was recorded is the latency.
    latency_s = max(worker.group_s for worker in rates.workers.values())
    predicted = predict(job, rate=rate, broadcast_s=rates.broadcast_s, latency_s=latency_s)
    needed = required_rate(job, rates.broadcast_s)
    lines = [f"{rates.name}: {rates.num_steps} steps after the run-in"]
    lines += [
        f"  {name}: {worker.tokens_per_s:.4g} tokens/s, up to {worker.concurrency} rollouts at a "
        f"time, {format_duration(worker.group_s)} per group"
        for name, worker in rates.workers.items()
    ]
    size = format_bytes(job.version_bytes) if job.version_bytes else "unknown size"
    lines += [
        f"  learner: {format_duration(job.train_s)} per step; {rates.useful_share:.0%} of the "
        "groups were useful",
        f"  completions: mean {job.completion_tokens:.4g} tokens",
        f"  broadcast: {format_duration(rates.broadcast_s)} for {size}",
        f"  rate: {rate:.4g} rollouts/s, the rule asks for {needed:.4g}",
        f"  learner waits: recorded {rates.idle_share:.1%}, predicted {predicted.idle_share:.1%}",
    ]
    return "\n".join(lines)


def calibrate(request: Request, rates: RunRates) -> Request:
    """Return the request with a run's recorded rates in place of estimates.

    The learner's step is scaled by the tokens of a step. An offer takes the mean rate of the
    workers that carry its name, or its name, a dash and more ("fra-4090-3").

    Raises:
        ConfigError: if no worker of the run belongs to an offer.
    """
    recorded, job = rates.job, request.job
    offers, used, notices = [], set(), []
    for offer in request.fleet.offers:
        stem = offer.name.replace(" ", "-")
        names = [n for n in rates.workers if n == stem or n.startswith(f"{stem}-")]
        used.update(names)
        if names:
            workers = [rates.workers[name] for name in names]
            measured = replace(
                offer,
                tokens_per_s=fmean(worker.tokens_per_s for worker in workers),
                concurrency=max(1, round(fmean(worker.concurrency for worker in workers))),
            )
            notices.append(f"{offer.name}: {measured.tokens_per_s:.4g} tokens/s from {rates.name}")
            offers.append(measured)
        else:
            notices.append(f"{offer.name}: no worker of {rates.name} is called so; rate kept")
            offers.append(offer)
    if not used:
        raise ConfigError(
            f"run {rates.name}: its workers are {', '.join(rates.workers)}, the offers "
            f"{', '.join(offer.name for offer in request.fleet.offers)}; give offers the names of "
            "the workers that stand for them"
        )
    calibrated = replace(
        job,
        completion_tokens=recorded.completion_tokens,
        max_completion_tokens=max(job.max_completion_tokens, recorded.completion_tokens),
        version_bytes=recorded.version_bytes or job.version_bytes,
    )
    train_s = recorded.train_s * calibrated.tokens_per_step / recorded.tokens_per_step
    return replace(
        request,
        fleet=replace(request.fleet, offers=tuple(offers)),
        job=replace(calibrated, train_s=train_s),
        notices=(f"learner: {train_s:.3g} s per step from {rates.name}", *notices),
    )
