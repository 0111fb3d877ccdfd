"""The text of `echo-rl plan`: tables, filters for marketplaces, commands to start the nodes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo.config.fleet_file import MBIT, FleetRequest, OfferRow
from echo.core.extras import PROGRAMS
from echo.core.rollout import KEEP_VERSIONS
from echo.core.units import format_bytes, format_duration
from echo.fleet.gpus import BYTES_PER_WEIGHT, RESERVED_BYTES, USABLE_MEMORY
from echo.fleet.provisioning import Forecast, Provisioning, Refusal

DRIVER = "580.65.06"
"""Oldest driver of CUDA 13.0 (its release notes), for which recent PyTorch wheels are built."""
ENVIRONMENT_GB = 12
"""Disk of one worker's Python environment with CUDA libraries; bin/echo-setup asks for 10."""


def plan_tables(request: FleetRequest, plan: Provisioning) -> RenderableType:
    """Return the plan for the terminal."""
    return Group(
        _fleet_table(plan),
        Text(),
        _figures_table(plan),
        Text(),
        _sensitivity_table(plan),
        *(Text(f"note: {notice}", style="dim") for notice in request.notices),
    )


def fleet_words(plan: Provisioning, outcome: Forecast) -> str:
    """Return the counts of a fleet in a few words: "3 fra-4090 + 1 ore-a100"."""
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
        ("selection", "the proven optimum" if plan.is_exact else "found greedily, not proven"),
    ):  # fmt: skip
        table.add_row(name, value)
    return table


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
    """Return a change with its sign; what rounds to nothing has none."""
    return f"{round(value, digits):+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def refusal_text(refusal: Refusal) -> str:
    """Return why there is no plan, and the smallest change that would make one."""
    lines = ["no fleet on offer is sufficient:"]
    lines += [f"  {reason}" for reason in refusal.reasons]
    if not refusal.remedies:
        return "\n".join([*lines, "no single change of the file would make one; change several"])
    lines.append("what would make one sufficient, the smallest change first:")
    lines += [f"  {remedy.text}" for remedy in refusal.remedies]
    return "\n".join(lines)


def machine_filter(request: FleetRequest, plan: Provisioning, row: OfferRow) -> str:
    """Return the least that a rented machine must have, as a marketplace's search expression.

    The syntax is that of `vastai search offers`; memory and disk in GB, links in Mbit/s.
    """
    weights = request.model.num_params * BYTES_PER_WEIGHT
    cache = (
        request.job_row.prompt_tokens + request.job_row.max_completion_tokens
    ) * request.model.cache_bytes_per_token
    per_gpu = ((weights + cache) / row.num_gpus + RESERVED_BYTES) / USABLE_MEMORY
    ram = 4e9 + (KEEP_VERSIONS + 1) * weights
    down = plan.job.version_bytes / max(plan.outcome.broadcast_s, 1e-9) / MBIT
    terms = [
        f"gpu_name={request.gpus[row.gpu].name.replace(' ', '_')}",
        f"num_gpus={row.num_gpus}",
        f"gpu_ram>={math.ceil(per_gpu / 1e9)}",
        f"driver_version>={DRIVER}",
        f"disk_space>={math.ceil(ENVIRONMENT_GB + KEEP_VERSIONS * weights / 1e9)}",
        f"cpu_ram>={math.ceil(ram / 1e9)}",
        f"inet_down>={math.ceil(down)}",
    ]
    if row.can_listen:
        terms += [f"inet_up>={math.ceil(down)}", "direct_port_count>=1"]
    return " ".join(terms)


def filters_text(request: FleetRequest, plan: Provisioning) -> str:
    """Return one filter per offer in use."""
    weights = format_bytes(request.model.num_params * BYTES_PER_WEIGHT)
    lines = [f"least of each rented machine ({weights} of weights), as a marketplace filter:"]
    for row, offer, count in _used(request, plan):
        price = f", at most ${row.price_per_h:g}/h" if row.price_per_h else ""
        lines.append(f"  {count} x {offer} in {row.region}{price}:")
        lines.append(f"    '{machine_filter(request, plan, row)}'")
    return "\n".join(lines)


def commands_text(request: FleetRequest, plan: Provisioning) -> str:
    """Return the commands that start the plan, machine by machine."""
    job, learner = plan.job, request.learner
    lines = [
        "commands (put your own configuration in place of configs/wan.toml; where relays and",
        "workers run, set ECHO_JOIN to the line in runs/NAME/keys/join of the learner):",
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
                f"network.region={name}",
            ]
            lines.append(f"  {node_command('relay', sets)}")
    for row, offer, count in _used(request, plan):
        for number in range(1, count + 1):
            sets = _worker_settings(request, row, f"{offer.replace(' ', '-')}-{number}")
            lines.append(f"  {node_command('worker', sets)}")
    return "\n".join(lines)


def _learner_prices(request: FleetRequest, plan: Provisioning) -> list[str]:
    """Return what the activation of the run has to know: its budget, and what traffic costs."""
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
    sets = [f"worker.name={name}", f"worker.connect=[{connect}]"]
    sets += [f"network.region={row.region}", f"worker.price_per_h={row.price_per_h:g}"]
    if row.price_per_gb:
        sets.append(f"worker.price_per_gb={row.price_per_gb:g}")
    if row.losses_per_h:
        sets.append(f"worker.losses_per_h={row.losses_per_h:g}")
    if row.can_listen:
        sets += ["worker.listen=tcp://0.0.0.0:7702", f"worker.advertise=tcp://{name}:7702"]
    return sets


def node_command(role: str, settings: Sequence[str]) -> str:
    """Return the command that starts a node with these settings."""
    sets = [part for item in settings for part in ("--set", item)]
    return f"{PROGRAMS}echo-rl node " + shlex.join(
        ["--role", role, "--config", "configs/wan.toml", *sets]
    )


def _used(request: FleetRequest, plan: Provisioning) -> list[tuple[OfferRow, str, int]]:
    rows = zip(request.offers, plan.fleet.offers, plan.outcome.counts, strict=True)
    return [(row, offer.name, count) for row, offer, count in rows if count]
