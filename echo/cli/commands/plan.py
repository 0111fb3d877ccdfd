"""`echo-rl plan FILE`: finds the machines to rent for a run, their cost and the start commands.

The plan is computed from the file, the records of an earlier run and the catalogue of GPUs. The
command looks up no prices, and rents and starts nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo.cli.output import run_command
from echo.cli.parsers import plan_parser
from echo.config.fields import override_of
from echo.config.fleet_file import MBIT, FleetRequest, parse_fleet, read_files
from echo.config.fleet_schema import OfferRow
from echo.core.errors import ConfigError, DataError, PlanError, StorageError
from echo.core.extras import command, import_extra
from echo.core.rollout import KEEP_VERSIONS
from echo.core.units import counted, format_bytes, format_duration
from echo.fleet.gpus import BYTES_PER_WEIGHT, RESERVED_BYTES, USABLE_MEMORY
from echo.fleet.hetero import Cluster, Division, SiteJob, find_division
from echo.fleet.job import Job
from echo.fleet.overlap import predict, required_rate
from echo.fleet.provisioning import Forecast, Provisioning, Refusal, provision, refuse
from echo.fleet.recipes import IMAGE, NAME, Machines, recipe
from echo.fleet.selection import MAX_NODES
from echo.records.ledger import deliveries_of, read_records
from echo.records.run_files import RunRates, rates_of, read_config, read_metrics, values_of
from echo.ui.plots import cost_plot

# --- Calibration with a recorded run -------------------------------------------------------------


def run_report(rates: RunRates) -> str:
    """Return a table that compares a run's measured figures with the overlap model's predictions.

    The predictions use the rates that the run has measured.
    """
    job = rates.job
    rate = sum(worker.tokens_per_s for worker in rates.workers.values()) / job.completion_tokens
    predicted = predict(job, rate=rate, broadcast_s=rates.broadcast_s, latency_s=rates.mean_group_s)
    needed = required_rate(job, rates.broadcast_s)
    lines = [f"{rates.name}: {counted(rates.num_steps, 'step')} after the run-in"]
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
    """Return a copy of the request in which a run's measured rates replace the estimated rates.

    If the planned run's steps have more or fewer tokens than the measured run's steps, the
    learner's measured time for a step is scaled in proportion. The run's length of completions and
    size of a version replace the request's, too.

    An offer gets the mean rate of its workers. The name of an offer's worker is the offer's name,
    or starts with the offer's name and a dash ("fra-4090-3"). If a worker's name fits several
    offers, the worker belongs to the offer with the longest name. Names are compared without case
    and punctuation, because providers restrict names.

    Raises:
        ConfigError: if no worker of the run belongs to an offer.
    """
    recorded, job = rates.job, request.job
    offers, used, notices = [], set(), []
    owners = {name: _owner(name, request) for name in rates.workers}
    for offer in request.fleet.offers:
        names = [name for name, owner in owners.items() if owner == offer.name]
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


def _owner(worker: str, request: FleetRequest) -> str | None:
    """Return the name of the offer to which a worker of this name belongs, or None."""
    name = f"{_plain(worker)}-"
    owners = [o.name for o in request.fleet.offers if name.startswith(f"{_plain(o.name)}-")]
    return max(owners, key=lambda owner: len(_plain(owner)), default=None)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


# --- text of a plan -------------------------------------------------------------------------------


DRIVER = "580.65.06"
"""The oldest GPU driver that supports CUDA 13.0 (source: CUDA's release notes). Recent PyTorch
wheels are built for CUDA 13.0."""
CONFIG = "configs/wan.toml"
ENVIRONMENT_GB = 12
"""Disk space of one worker's Python environment with CUDA libraries, in GB. bin/echo-setup requires
10 GB."""


def plan_tables(request: FleetRequest, plan: Provisioning) -> RenderableType:
    """Return a plan's tables and texts for the terminal."""
    return Group(
        _fleet_table(plan),
        Text(),
        _figures_table(plan),
        Text(),
        _sensitivity_table(plan),
        *(Text(f"note: {notice}", style="dim") for notice in request.notices),
    )


def fleet_words(plan: Provisioning, outcome: Forecast) -> str:
    """Return the number of machines of each offer as text: "3 fra-4090 + 1 ore-a100"."""
    named = zip(plan.fleet.offers, outcome.counts, strict=True)
    return " + ".join(f"{count} {offer.name}" for offer, count in named if count) or "nothing"


def _fleet_table(plan: Provisioning) -> Table:
    table = Table(title="rent", title_justify="left")
    for name in ("nodes", "of", "what", "region"):
        table.add_column(name, justify="right" if name in ("nodes", "of") else "left")
    for name in ("rollouts/s", "$/h", "group takes"):
        table.add_column(name, justify="right")
    for offer, count in zip(plan.fleet.offers, plan.outcome.counts, strict=True):
        table.add_row(
            str(count),
            str(offer.count),
            offer.name,
            offer.region,
            f"{offer.rollouts_per_s(plan.job) * count:.3g}",
            f"{offer.price_per_h * count:.2f}",
            format_duration(offer.group_latency_s(plan.job)),
            style=None if count else "dim",
        )
    return table


def _figures_table(plan: Provisioning) -> Table:
    outcome, job = plan.outcome, plan.job
    prediction = outcome.prediction
    bounds = plan.staleness_bounds
    staleness = ", ".join(f"{lag}: {share:.0%}" for lag, share in prediction.staleness.items())
    reading = "pausing" if job.has_pausing_workers else "overlapping"
    table = Table(title="expect", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("")
    for name, value in (
        ("rate", f"{outcome.rate:.3g} rollouts/s"),
        (
            "required",
            f"{_rate(plan.required_overlapping)} by workers that generate through a broadcast, "
            f"{_rate(plan.required_pausing)} by workers that pause; planned for {reading} ones "
            f"with a margin of {job.margin:.0%}",
        ),
        ("step", f"{format_duration(prediction.step_s)}, of which the learner trains "
                 f"{format_duration(job.train_s)}"),
        ("learner waits", f"{prediction.idle_share:.1%} of the time"),
        ("binding", plan.binding.value),
        ("publish period", f"{job.publish_period}, a broadcast takes "
                           f"{format_duration(outcome.broadcast_s)}"),
        ("staleness", f"mean {prediction.mean_staleness:.2f} ({staleness})"),
        ("feasible S", f"from {bounds[0]}; beyond {bounds[1]} more does not help" if bounds
         else "none"),
        ("wasted rollouts", f"{prediction.wasted_share:.1%}; without pacing by leases "
                            f"{plan.unpaced_waste:.1%}"),
        ("cost per hour", f"${outcome.cost_per_h:.2f} = nodes {outcome.rent_per_h:.2f} + traffic "
                          f"{outcome.traffic_per_h:.2f} + learner {outcome.learner_per_h:.2f}"),
        ("cost per step", f"${outcome.cost_per_step:.3f}, "
                          f"${outcome.cost_per_million_tokens:.3f} per million trained tokens"),
        ("selection", selection_text(plan.gap)),
    ):  # fmt: skip
        table.add_row(name, value)
    return table


def selection_text(gap: float) -> str:
    """Return text that says whether the plan is proven to be the cheapest.

    If the proof is missing, the text has the share by which another fleet may be cheaper.
    """
    if gap == 0:
        return "the proven optimum"
    return f"the search ended at {MAX_NODES} nodes; another fleet may be up to {gap:.2%} cheaper"


def _rate(value: float) -> str:
    return "no rate suffices" if math.isinf(value) else f"{value:.3g}/s"


def _sensitivity_table(plan: Provisioning) -> Table:
    table = Table(title="one change", title_justify="left")
    table.add_column("change")
    table.add_column("learner waits", justify="right")
    table.add_column("$/h", justify="right")
    for item in plan.sensitivities:
        table.add_row(
            item.change,
            f"{_signed(100 * item.idle_change, 1)} points",
            _signed(item.cost_change_per_h, 2),
        )
    return table


def _signed(value: float, digits: int) -> str:
    return f"{round(value, digits):+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def refusal_text(refusal: Refusal) -> str:
    """Return text that explains why there is no plan, and which changes would help."""
    lines = ["no fleet on offer is sufficient:"]
    lines += [f"  {reason}" for reason in refusal.reasons]
    if not refusal.remedies:
        return "\n".join([*lines, "no single change of the file would make one; change several"])
    lines.append("what would make one sufficient, the smallest change first:")
    lines += [f"  {remedy.text}" for remedy in refusal.remedies]
    return "\n".join(lines)


def least_of(request: FleetRequest, plan: Provisioning, row: OfferRow) -> dict[str, str]:
    """Return the search conditions for rented machines: the least that a machine must have.

    The result maps the name of a property to a condition in the syntax of `vastai search offers`.
    Memory and disk are in GB, links in Mbit/s.
    """
    weights = request.model.num_params * BYTES_PER_WEIGHT
    cache = (
        request.job_row.prompt_tokens + request.job_row.max_completion_tokens
    ) * request.model.cache_bytes_per_token
    per_gpu = ((weights + cache) / row.num_gpus + RESERVED_BYTES) / USABLE_MEMORY
    ram = 4e9 + (KEEP_VERSIONS + 1) * weights
    down = plan.job.version_bytes / max(plan.outcome.broadcast_s, 1e-9) / MBIT
    least = {
        "gpu_name": f"={request.gpus[row.gpu].name.replace(' ', '_')}",
        "num_gpus": f"={row.num_gpus}",
        "gpu_ram": f">={math.ceil(per_gpu / 1e9)}",
        "driver_version": f">={DRIVER}",
        "disk_space": f">={math.ceil(ENVIRONMENT_GB + KEEP_VERSIONS * weights / 1e9)}",
        "cpu_ram": f">={math.ceil(ram / 1e9)}",
        "inet_down": f">={math.ceil(down)}",
    }
    if row.can_listen:
        least |= {"inet_up": f">={math.ceil(down)}", "direct_port_count": ">=1"}
    return least


def filters_text(request: FleetRequest, plan: Provisioning) -> str:
    """Return one search expression for each offer in the plan, as text."""
    weights = format_bytes(request.model.num_params * BYTES_PER_WEIGHT)
    lines = [f"least of each rented machine ({weights} of weights), as a marketplace filter:"]
    for row, offer, count in _used(request, plan):
        price = f", at most ${row.price_per_h:g}/h" if row.price_per_h else ""
        lines.append(f"  {count} x {offer} in {row.region}{price}:")
        least = least_of(request, plan, row)
        lines.append(f"    '{' '.join(f'{key}{value}' for key, value in least.items())}'")
    return "\n".join(lines)


def commands_text(request: FleetRequest, plan: Provisioning) -> str:
    """Return the commands that start the plan's learner, relays and workers."""
    job, learner = plan.job, request.learner
    lines = [
        "commands (put your own configuration in place of configs/wan.toml; where relays and",
        "workers run, set ECHO_JOIN to the line in runs/NAME/keys/join of the learner; before a",
        "worker, run bin/echo-setup --role worker --extra vllm):",
    ]
    lines.append(
        "  "
        + node_command(
            "learner",
            [
                f"learner.advertise={learner.address}",
                f"batch.groups_per_step={job.groups_per_step}",
                f"batch.group_size={job.group_size}",
                f"sync.max_staleness={job.max_staleness}",
                f"sync.publish_period={job.publish_period}",
                f"sampling.max_completion_tokens={job.max_completion_tokens:.0f}",
                *_learner_prices(request, plan),
            ],
        )
    )
    for name in dict.fromkeys(row.region for row, _, _ in _used(request, plan)):
        relay = request.regions[name].relay
        if relay is not None:
            sets = [
                f"relay.name=relay-{name}",
                f'relay.connect=["{learner.address}"]',
                f"relay.listen=tcp://0.0.0.0:{relay.address.rpartition(':')[2]}",
                f"relay.advertise={relay.address}",
                f"relay.price_per_h={relay.price_per_h:g}",
                override_of("network.region", name),
            ]
            lines.append(f"  {node_command('relay', sets)}")
    for row, offer, count in _used(request, plan):
        number = "1"
        if count > 1:
            number = "NUMBER"
            lines.append(f"  on each of {count} machines, NUMBER from 1 to {count}:")
        sets = _worker_settings(request, row, f"{_stem(offer)}-{number}")
        lines.append(f"  {node_command('worker', sets)}")
    return "\n".join(lines)


def _stem(offer: str) -> str:
    """Turn an offer's name into a prefix for the names of files and workers.

    Dashes replace characters that are unsafe in a file's name or on a command line.
    """
    return re.sub(r"[^\w.-]+", "-", offer)


def recipes(request: FleetRequest, plan: Provisioning, kind: str, image: str) -> dict[str, str]:
    """Return the files that start the plan's workers. The dict maps each file's name to its text.

    There is one file for each offer.
    """
    found = {}
    for row, offer, count in _used(request, plan):
        least = least_of(request, plan, row)
        machines = Machines(
            name=_stem(offer),
            count=count,
            gpu=request.gpus[row.gpu].name,
            num_gpus=row.num_gpus,
            is_spot=bool(row.losses_per_h),
            settings=_worker_settings(request, row, NAME),
            least=" ".join(f"{key}{value}" for key, value in least.items()),
            disk_gb=int(least["disk_space"].removeprefix(">=")),
        )
        name, text = recipe(kind, machines, config=CONFIG, image=image)
        found[name] = text
    return found


def _learner_prices(request: FleetRequest, plan: Provisioning) -> list[str]:
    sets = [f"learner.price_per_h={request.learner.price_per_h:g}"]
    dearest = max(request.regions[row.region].price_per_gb for row, _, _ in _used(request, plan))
    if dearest:
        sets.append(f"network.price_per_gb={dearest:g}")
    if math.isfinite(plan.job.budget_per_h):
        sets.append(f"activation.budget_per_h={plan.job.budget_per_h:g}")
    return sets


def _worker_settings(request: FleetRequest, row: OfferRow, name: str) -> list[str]:
    relay = request.regions[row.region].relay
    parents = [relay.address] if relay else []
    connect = ", ".join(f'"{address}"' for address in [*parents, request.learner.address])
    sets = [f"worker.name={name}", f"worker.connect=[{connect}]", *_engine_settings(row.num_gpus)]
    sets += [override_of("network.region", row.region), f"worker.price_per_h={row.price_per_h:g}"]
    if row.price_per_gb:
        sets.append(f"worker.price_per_gb={row.price_per_gb:g}")
    if row.losses_per_h:
        sets.append(f"worker.losses_per_h={row.losses_per_h:g}")
    if row.can_listen:
        sets += ["worker.listen=tcp://0.0.0.0:7702", f"worker.advertise=tcp://{name}:7702"]
    return sets


def _engine_settings(num_gpus: int) -> list[str]:
    """Return the settings of a planned worker's engine, vLLM on all GPUs of the machine.

    The rates that the plan estimates are rates of vLLM.
    """
    if num_gpus == 1:
        return ["engine.kind=vllm"]
    return ["engine.kind=vllm", f"engine.options.tensor_parallel_size={num_gpus}"]


def node_command(role: str, settings: Sequence[str]) -> str:
    """Return the command line that starts a node of this role."""
    sets = [part for item in settings for part in ("--set", item)]
    return f"{command('node', elsewhere=True)} " + shlex.join(
        ["--role", role, "--config", CONFIG, *sets]
    )


def _used(request: FleetRequest, plan: Provisioning) -> list[tuple[OfferRow, str, int]]:
    rows = zip(request.offers, plan.fleet.offers, plan.outcome.counts, strict=True)
    return [(row, offer.name, count) for row, offer, count in rows if count]


# --- division of one site -------------------------------------------------------------------------


def divide_site(request: FleetRequest) -> Division:
    """Return the best division of the request's GPUs between training and generation.

    Raises:
        PlanError: if no GPUs have enough memory for training or for generation.
    """
    job = request.job_row
    counts: dict[str, int] = {request.learner.gpu: request.learner.num_gpus}
    for row in request.offers:
        counts[row.gpu] = counts.get(row.gpu, 0) + row.count * row.num_gpus
    division = find_division(
        Cluster(gpus={name: request.gpus[name] for name in counts}, counts=counts),
        SiteJob(
            model=request.model,
            rollouts_per_step=math.ceil(request.job.rollouts_per_step),
            prompt_tokens=job.prompt_tokens,
            completion_tokens=request.job.completion_tokens,
            max_tokens=job.prompt_tokens + request.job.max_completion_tokens,
        ),
    )
    if division is None:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        raise PlanError(
            f"{request.model.name} cannot be trained and sampled on {listed}: no division leaves "
            "enough memory on both sides, with training on GPUs of one type; add GPUs, or larger "
            "ones, or choose a smaller model"
        )
    return division


def division_text(request: FleetRequest, division: Division) -> str:
    """Return text that describes the division and lists the commands that start its nodes."""
    lines = [
        f"{request.model.name}: {format_duration(division.step_s)} per step "
        f"(training {format_duration(division.train_s)}, generation "
        f"{format_duration(division.rollout_s)} with {format_duration(division.update_s)} for new "
        "weights); every rate is an estimate",
        f"training: {division.num_train_gpus} x {division.train_gpu}",
        *(f"  {line}" for line in _learner_commands(request, division)),
        "generation:",
    ]
    shares = zip(division.rollouts.replicas, division.rollouts.rollouts, strict=True)
    for (replica, count), rollouts in shares:
        [(gpu, size)] = replica.gpus
        lines.append(
            f"  {count} x {size} {gpu}: {rollouts} rollouts per step, "
            f"{replica.tokens_per_s:.0f} tokens/s each; for each one"
        )
        lines.append(f"    {_worker_command(request, size)}")
    return "\n".join(lines)


def _learner_commands(request: FleetRequest, division: Division) -> list[str]:
    """Return the lines of the command that starts training.

    The learner has one process, or several under torchrun on one or more machines.
    """
    command = node_command("learner", [f"learner.advertise={request.learner.address}"])
    number = division.num_train_gpus
    per_machine = min(number, request.gpus[division.train_gpu].num_per_node)
    if number == 1:
        return [command]
    launch = f"--nproc-per-node {per_machine}"
    if number == per_machine:
        return [f"torchrun {launch} --no-python {command}"]
    num_machines = number // per_machine
    return [
        f"on each of {num_machines} machines (docs/several-gpus.md)",
        f"  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes {num_machines} {launch} "
        f"--rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 --no-python {command}",
    ]


def _worker_command(request: FleetRequest, num_gpus: int) -> str:
    connect = f'worker.connect=["{request.learner.address}"]'
    return node_command("worker", [connect, *_engine_settings(num_gpus)])


def read_rates(run_dir: Path) -> RunRates:
    """Return a run's measured rates. The first fifth of the steps is left out.

    Raises:
        DataError: if the run has made no step or has accepted no group yet.
        StorageError: if a file of the run is damaged.
    """
    config = read_config(run_dir)
    rows = read_metrics(run_dir).train
    group_size = config["batch"]["group_size"]
    deliveries = deliveries_of(read_records(run_dir))
    if not rows or not deliveries:
        raise DataError(f"{run_dir}: no step or no accepted group yet, no rates to take")
    rows = rows[len(rows) // 5 :]  # the first fifth is run-in
    train_s = fmean(values_of(rows, "time/train"))
    wait_s = fmean(values_of(rows, "time/wait_for_batch"))
    broadcasts = [
        (row["broadcast/seconds"], row["broadcast/goodput"] * row["broadcast/seconds"])
        for row in rows
        if row.get("broadcast/seconds") and row.get("broadcast/goodput")
    ]
    useful_share = fmean(values_of(rows, "groups/useful") or [1.0])
    trains_on_all = config["batch"].get("keep_zero_variance", False)
    group_tokens = [float(each.num_tokens) for each in deliveries]
    mean_tokens = fmean(group_tokens) / group_size
    job = Job(
        groups_per_step=config["batch"]["groups_per_step"],
        group_size=group_size,
        useful_share=1.0 if trains_on_all else max(0.01, useful_share),
        max_staleness=config["sync"]["max_staleness"],
        publish_period=round(median(values_of(rows, "publish_period") or [1.0])),
        train_s=train_s,
        completion_tokens=mean_tokens,
        max_completion_tokens=max(mean_tokens, config["sampling"]["max_completion_tokens"]),
        # The ledger has only the total of each group; lengths within a group are taken as
        # independent.
        completion_spread=pstdev(group_tokens) / fmean(group_tokens) * math.sqrt(group_size),
        version_bytes=median(size for _, size in broadcasts) if broadcasts else 0.0,
        margin=0.0,
    )
    return RunRates(
        name=run_dir.resolve().name,
        num_steps=len(rows),
        job=job,
        workers=rates_of(deliveries, group_size),
        broadcast_s=median(seconds for seconds, _ in broadcasts) if broadcasts else 0.0,
        idle_share=wait_s / (wait_s + train_s) if wait_s + train_s > 0 else 0.0,
        useful_share=useful_share,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `echo-rl plan` and return its exit code."""
    return run_command(run, plan_parser().parse_args(argv))


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print what is requested: a run's measured figures, a fleet's plan, or a division of GPUs.

    Return the exit code.
    """
    if not arguments.files:
        return show_run(arguments, console)
    import_extra("scipy", extra="planner", wanted_by="echo-rl plan")
    request = parse_fleet(read_files(arguments.files))
    if arguments.run is not None:
        request = calibrate(request, read_rates(arguments.run))
    if arguments.hetero:
        return plan_hetero(request, arguments.out, console)
    return plan_fleet(request, arguments, console)


def show_run(arguments: argparse.Namespace, console: Console) -> int:
    """Print a run's measured figures and, for comparison, the overlap model's predictions.

    Return the exit code.
    """
    if arguments.run is None:
        remedy = "configs/fleet-example.toml is one to start from"
        raise ConfigError(f"no FILE given: name a fleet file ({remedy}), or a run with --from RUN")
    if arguments.hetero:
        raise ConfigError("--hetero divides the GPUs of a fleet file: name one")
    console.print(run_report(read_rates(arguments.run)))
    return 0


def plan_fleet(request: FleetRequest, arguments: argparse.Namespace, console: Console) -> int:
    """Print a request's plan, write the plan to --out, and return the exit code.

    With --for, also write the files that start the workers.

    Raises:
        PlanError: if no fleet is sufficient; the text says why, and which changes would help.
    """
    out: Path = arguments.out
    plan = provision(request.fleet, request.job, request.periods)
    if plan is None:
        raise PlanError(refusal_text(refuse(request.fleet, request.job, request.periods)))
    console.print(plan_tables(request, plan))
    # These texts are not wrapped or coloured, because users copy them.
    print(f"\n{filters_text(request, plan)}\n\n{commands_text(request, plan)}\n")
    write_json(out / "plan.json", plan_record(request, plan))
    png = cost_plot(
        {fleet_words(plan, outcome): outcome for outcome in plan.front},
        plan.outcome,
        out / "plan.png",
        title=f"{request.model.name}, {rollouts_text(plan.job)}",
    )
    print(f"wrote {out / 'plan.json'} and {png}")
    if arguments.kind is not None:
        files = recipes(request, plan, arguments.kind, arguments.image or IMAGE)
        for name, text in files.items():
            write_text(out / name, text)
            print(f"wrote {out / name}, which starts workers: its first lines say how")
    return 0


def rollouts_text(job: Job) -> str:
    """Return text that says how many rollouts a step trains on, and how many are sampled for it."""
    trained = job.groups_per_step * job.group_size
    if job.useful_share == 1:
        return f"{trained} rollouts per step"
    sampled = f"{job.rollouts_per_step:.0f} sampled, since {job.useful_share:.0%} are useful"
    return f"{trained} rollouts per step ({sampled})"


def plan_hetero(request: FleetRequest, out: Path, console: Console) -> int:
    """Divide a request's GPUs between training and generation; print the division.

    Also write the division into the directory `out`. Return the exit code.
    """
    division = divide_site(request)
    print(division_text(request, division), file=console.file)
    write_json(out / "hetero.json", to_json(division))
    print(f"\nwrote {out / 'hetero.json'}", file=console.file)
    return 0


def plan_record(request: FleetRequest, plan: Provisioning) -> dict[str, Any]:
    """Return the content of plan.json for a plan."""
    record: dict[str, Any] = to_json(plan)
    record["rent"] = [
        {"offer": offer.name, "region": offer.region, "count": count}
        for offer, count in zip(plan.fleet.offers, plan.outcome.counts, strict=True)
    ]
    record["notices"] = list(request.notices)
    return record


def to_json(value: Any) -> Any:
    """Convert `value` to JSON's types: a dataclass to an object, infinity to null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in dataclasses.fields(value)]
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.name.lower()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, record: Any) -> None:
    """Write `record` as JSON to a file with `write_text`."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text to a file, and make the file's directory if it is missing.

    Raises:
        StorageError: if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
