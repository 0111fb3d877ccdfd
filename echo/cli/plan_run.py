"""Calibrate a plan with a run: what it recorded in metrics.jsonl and ledger.jsonl.

A worker's rate is its completion tokens over the time in which it held at least one group, from
grant to acceptance: time that leases kept it waiting does not count against it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from echo.config.fleet_file import FleetRequest
from echo.core.errors import ConfigError, StorageError
from echo.core.units import format_bytes, format_duration
from echo.fleet.overlap import predict, required_rate
from echo.records.run_files import RunRates, WorkerRate, _rate, json_lines


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


def calibrate(request: FleetRequest, rates: RunRates) -> FleetRequest:
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
