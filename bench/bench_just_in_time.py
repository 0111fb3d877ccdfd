"""Compare grants just in time with eager grants: staleness, the learner's waits, lost groups.

    python bench/bench_just_in_time.py --only grid --name grid [--rates 2.0]
    python bench/bench_just_in_time.py --only fleets --name fleets [--seeds 0 30]
    python bench/bench_just_in_time.py --only planned --name planned --seeds 30 158 --steps 600
    python bench/bench_just_in_time.py --only quickstart --name quickstart --seeds 0 2
    python bench/bench_just_in_time.py --only quickstart --name smollm2 --model smollm2 --bounds 2

Each case runs on virtual time with `sync.eager` and without, for several draws of the lengths of
completions. A figure is the mean of the draws: the first group that is granted later changes the
lengths of all later groups, so two runs of one draw differ by chance, too. `grid` gives six equal
workers these shares of the required rate; `fleets` draws unequal fleets, and some lose workers.
`planned` leaves out those that the planner would not propose, which are too slow.
`quickstart` runs the real quickstart of each seed at each bound, in turns.

The staleness that is forced: a token that is sampled u steps before its batch is trained is sampled
from the newest version that is installed by then,

    forced(u) = mean over batches b of b - max {v : v is published, v + T_bcast / T_train <= b - u}
    least     = mean of forced(u) over u in [0, T_batch / T_train]
    T_batch   = max(R / rate, T_group) + min(1/2, spread) T_group, the last groups included

With a period of 1 and T_bcast below it, forced(u) is ceil(T_bcast / T_train + u). `predicted` is
what the planner predicts, and `is_enough` tells whether the fleet satisfies the provisioning rule,
as fleets do that the planner proposes. At 1.2 times the required rate it takes 70 steps until a
bound of 11 is reached, so the prediction needs runs of --steps 300.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from bench_rule import TRAIN_S, make_job, make_scenario
from harness import new_parser, parse, save
from learning.quickstart import read_evaluations, train

from echo.config.fleet_schema import FaultRow, JobRow, SimRow
from echo.fleet.job import Job
from echo.fleet.market import Offer, Region, RentedFleet
from echo.fleet.overlap import is_enough, predict
from echo.records.run_files import read_metrics
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import Summary, summarise
from echo.ui.summary import summarise_run

RATES = (0.8, 1.0, 1.2, 2.0, 4.0)
GRID = ((2, 1, 0.1, 0.5), (2, 1, 0.5, 0.5), (6, 1, 0.1, 0.5), (6, 2, 1.5, 0.5), (11, 4, 3.0, 0.5),
        (2, 1, 0.1, 1.0))  # fmt: skip
"""(S, kappa, T_bcast / T_train, spread of the lengths)."""

MARGIN = JobRow.model_fields["margin"].default
"""By how much the planner wants a fleet to exceed the required rate."""


def least_staleness(period: int, broadcast: float, window: float) -> float:
    """Return the mean staleness that is forced; `broadcast` and `window` in steps."""
    installed, free_at = [(0.0, 0)], 0.0
    for version in range(period, 400, period):
        # The newest version that waits is sent when the one before has arrived.
        if version + period > free_at:
            free_at = max(free_at, float(version)) + broadcast
            installed.append((free_at, version))
    lags = []
    for batch in range(200, 200 + 12 * period):
        for part in range(50):
            at = batch - window * (part + 0.5) / 50
            lags.append(batch - max(v for since, v in installed if since <= at + 1e-9))
    return fmean(lags)


def draw_fleet(seed: int, num_steps: int) -> tuple[Scenario, dict[str, Any]]:
    """Return a random fleet, and its figures."""
    chance = random.Random(seed)
    bound = chance.choice([1, 2, 6, 11])
    broadcast = math.exp(chance.uniform(math.log(0.1), math.log(3)))
    period = max(1, math.ceil(broadcast)) if chance.random() < 0.7 else 1
    if period > bound:
        period, broadcast = 1, min(broadcast, 0.8)
    factor = chance.choice([0.8, 1.0, 1.2, 2.0, 2.0, 4.0])
    spread = chance.choice([0.3, 0.5, 0.8, 1.0])
    num_groups, num_workers = chance.choice([4, 8, 12, 16]), chance.randint(2, 10)
    job = replace(make_job(bound, period, spread, is_pausing=False), groups_per_step=num_groups)
    offers = draw_offers(chance, job, num_workers, factor)
    region = Region(
        name="site", bytes_per_s=job.version_bytes / (broadcast * TRAIN_S), latency_s=0.01
    )
    settings = SimRow(
        num_steps=num_steps,
        # A receiver abandons a version for a newer one, which needs chunks that are small.
        chunks_per_version=64 if broadcast > period else 4,
        heartbeat_s=10.0,
        dead_after_s=60.0,
        lease_timeout_s=1000.0,
        swap_s=0.1,
        setup_s=1.0,
        alone_speedup=chance.choice([2.0, 100.0]),
        seed=seed,
    )
    faults = draw_losses(chance, num_workers, num_steps)
    scenario = Scenario(
        name=f"fleet {seed}",
        fleet=RentedFleet(offers=tuple(offers), regions={"site": region}, uplink_bytes_per_s=1e12),
        job=job,
        counts=[1] * num_workers,
        settings=settings,
        faults=faults,
    )
    case = {
        "max_staleness": bound,
        "publish_period": period,
        "broadcast": broadcast,
        "rate": factor,
        "spread": spread,
        "workers": num_workers,
        "groups_per_step": num_groups,
        "losses": len(faults),
        "group_s": fmean(
            job.completion_tokens * offer.concurrency / offer.tokens_per_s for offer in offers
        ),
    }
    return scenario, case


def draw_offers(chance: random.Random, job: Job, num_workers: int, factor: float) -> list[Offer]:
    """Return unequal workers that together have `factor` times the rate that the job requires."""
    shares = [chance.lognormvariate(0, 0.7) for _ in range(num_workers)]
    places = [chance.choice([1, 1, 2, 4]) for _ in range(num_workers)]
    rate = factor * job.rollouts_per_step / TRAIN_S
    return [
        Offer(
            name=f"w{number}",
            region="site",
            count=1,
            price_per_h=1.0,
            tokens_per_s=rate * job.completion_tokens * share / sum(shares),
            concurrency=job.group_size * place,
            down_bytes_per_s=1e12,
            up_bytes_per_s=1e12,
        )
        for number, (share, place) in enumerate(zip(shares, places, strict=True))
    ]


def draw_losses(chance: random.Random, num_workers: int, num_steps: int) -> tuple[FaultRow, ...]:
    """Return up to four workers that are taken away for a while, each as a fault."""
    return tuple(
        FaultRow(
            at_s=chance.uniform(10, num_steps) * TRAIN_S,
            kind="preempt",
            target=f"w{chance.randrange(num_workers)}-1",
            for_s=chance.uniform(1, 10) * TRAIN_S,
        )
        for _ in range(chance.choice([0, 0, 1, 2, 4]))
    )


def draw_grid(
    cell: tuple[int, int, float, float], rate: float, num_steps: int
) -> tuple[Scenario, dict[str, Any]]:
    """Return six equal workers, and their figures."""
    bound, period, broadcast, spread = cell
    job = make_job(bound, period, spread, is_pausing=False)
    per_s = rate * job.rollouts_per_step / TRAIN_S
    scenario = make_scenario(job, rate=per_s, broadcast_s=broadcast * TRAIN_S, num_steps=num_steps)
    case = {
        "max_staleness": bound,
        "publish_period": period,
        "broadcast": broadcast,
        "rate": rate,
        "spread": spread,
        "workers": 6,
        "groups_per_step": job.groups_per_step,
        "losses": 0,
        "group_s": 6 * job.group_size / per_s,
    }
    return scenario, case


def measure(scenario: Scenario, case: dict[str, Any], num_draws: int) -> dict[str, Any]:
    """Return the figures of a case, eager and just in time: means of `num_draws` draws."""
    draws = [
        replace(scenario, settings=scenario.settings.model_copy(update={"seed": seed}))
        for seed in range(scenario.settings.seed, 1000 * num_draws, 1000)
    ]
    runs = {
        name: [_run(draw, is_eager=is_eager) for draw in draws]
        for name, is_eager in (("eager", True), ("just_in_time", False))
    }
    pairs = list(zip(runs["eager"], runs["just_in_time"], strict=True))
    return case | {
        **_foreseen(scenario, case),
        **{name: _figures(of_draws) for name, of_draws in runs.items()},
        "more_idle": _difference([late.idle_share - eager.idle_share for eager, late in pairs]),
        "more_stale": _difference(
            [
                late.discarded.get("stale", 0) - eager.discarded.get("stale", 0)
                for eager, late in pairs
            ]
        ),
    }


def _foreseen(scenario: Scenario, case: dict[str, Any]) -> dict[str, float | bool]:
    """Return the staleness that is forced, and what the planner predicts of the fleet."""
    job, fleet, counts = scenario.job, scenario.fleet, scenario.counts
    tail = min(0.5, case["spread"]) * case["group_s"] / TRAIN_S
    window = max(1 / case["rate"], case["group_s"] / TRAIN_S) + tail
    broadcast_s = fleet.broadcast_s(job, counts)
    times: dict[str, Any] = {
        "rate": fleet.rate(job, counts),
        "broadcast_s": broadcast_s,
        "latency_s": fleet.mean_latency_s(job, counts),
    }
    predicted = predict(
        job,
        **times,
        nodes=fleet.speeds(job, counts),
    )
    return {
        "least": least_staleness(job.publish_period, broadcast_s / TRAIN_S, window),
        "predicted": predicted.mean_staleness,
        "predicted_idle": predicted.idle_share,
        "is_enough": is_enough(job, **times),
    }


def is_proposed(scenario: Scenario) -> bool:
    """Return whether the planner would propose the fleet, with its usual margin."""
    job, fleet, counts = scenario.job, scenario.fleet, scenario.counts
    return is_enough(
        replace(job, margin=MARGIN),
        rate=fleet.rate(job, counts),
        broadcast_s=fleet.broadcast_s(job, counts),
        latency_s=fleet.latency_s(job, counts),
    )


def _run(scenario: Scenario, *, is_eager: bool) -> Summary:
    settings = scenario.settings.model_copy(update={"is_eager": is_eager})
    changed = replace(scenario, settings=settings)
    return summarise(changed, Simulation(changed).run())


def _figures(runs: list[Summary]) -> dict[str, Any]:
    return {
        "staleness": fmean(run.mean_staleness for run in runs),
        "max_staleness": max(run.max_staleness for run in runs),
        "idle_share": fmean(run.idle_share for run in runs),
        "step_s": fmean(run.step_s for run in runs),
        "broadcast_s": fmean(run.broadcast_s for run in runs),
        "stale_groups": fmean(run.discarded.get("stale", 0) for run in runs),
        "thrown_away": fmean(run.thrown_away for run in runs),
        "is_complete": all(run.is_complete for run in runs),
    }


def _difference(values: list[float]) -> dict[str, float]:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"mean": fmean(values), "standard_error": error}


def measure_quickstart(bound: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the quickstart eager and just in time; odd seeds begin with the other one."""
    turns = [("eager", True), ("just_in_time", False)]
    row: dict[str, Any] = {"max_staleness": bound, "seed": seed}
    for name, is_eager in turns if seed % 2 == 0 else reversed(turns):
        with tempfile.TemporaryDirectory() as scratch:
            settings = [
                *options.set,
                f"run.max_steps={options.steps}",
                f"sync.max_staleness={bound}",
                f"sync.eager={str(is_eager).lower()}",
                f"run.dir={scratch}",
                "run.name=run",
            ]
            train("addition", seed, settings, timeout_s=options.timeout_s, model=options.model)
            row[name] = _run_figures(Path(scratch) / "run")
    return row


def _run_figures(run_dir: Path) -> dict[str, Any]:
    summary, steps = summarise_run(run_dir), read_metrics(run_dir).train
    waited_s = sum(step["time/wait_for_batch"] for step in steps)
    return {
        "staleness": round(summary.mean_staleness, 3),
        "max_staleness": max(summary.staleness_tokens),
        "idle_share": round(waited_s / sum(step["time/step"] for step in steps), 4),
        "run_s": round(summary.wall_time_s, 1),
        "discarded": summary.discarded,
        "thrown_away": round(summary.num_too_old / max(1, summary.num_sampled), 4),
        "evaluations": read_evaluations(run_dir / "metrics.jsonl"),
    }


def show_quickstart(row: dict[str, Any]) -> str:
    """Return a line for the terminal."""
    parts = [f"quickstart S {row['max_staleness']:2d} seed {row['seed']}"]
    for name in ("eager", "just_in_time"):
        run = row[name]
        last = run["evaluations"][-1]
        parts.append(
            f"{name}: staleness {run['staleness']:.2f} idle {run['idle_share']:.3f} "
            f"discarded {run['discarded']} held-out {last['sampled']:.3f} {last['greedy']:.3f}"
        )
    return "; ".join(parts)


def show(row: dict[str, Any]) -> str:
    """Return a line for the terminal."""
    eager, late = row["eager"], row["just_in_time"]
    return (
        f"{row['name']:9s} S {row['max_staleness']:2d} kappa {row['publish_period']} "
        f"bcast {row['broadcast']:.2f} ({late['broadcast_s'] / TRAIN_S:.2f}) "
        f"rate {row['rate']:.1f} "
        f"spread {row['spread']:.1f} W {row['workers']:2d} G {row['groups_per_step']:2d} "
        f"lost {row['losses']}: staleness {eager['staleness']:5.2f} > {late['staleness']:5.2f} "
        f"least {row['least']:.2f} predicted {row['predicted']:.2f}"
        f"{'' if row['is_enough'] else ' (too slow)'} "
        f"idle {eager['idle_share']:.3f} > {late['idle_share']:.3f} "
        f"thrown {eager['thrown_away']:.3f} > {late['thrown_away']:.3f} "
        f"stale groups {eager['stale_groups']:.1f} > {late['stale_groups']:.1f}, "
        f"more idle {row['more_idle']['mean']:+.4f} ({row['more_idle']['standard_error']:.4f})"
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--only", choices=("fleets", "planned", "grid", "quickstart"))
    parser.add_argument("--name", default="all", help="the end of the result's name")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 30))
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--draws", type=int, default=6, help="of the lengths, for each case")
    parser.add_argument("--bounds", type=int, nargs="+", default=[2, 11], help="quickstart")
    parser.add_argument("--model", help="a pretrained one for the quickstart")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="quickstart"
    )
    parser.add_argument("--timeout-s", type=float, default=300, help="for one quickstart")
    options = parse(parser, seeds=(0, 2), rates=(2.0,), steps=40, draws=1)
    if options.only == "quickstart":
        run_quickstarts(options)
        return
    cases: list[tuple[str, tuple[Scenario, dict[str, Any]]]] = []
    if options.only in (None, "grid"):
        cells = [(cell, rate) for rate in options.rates for cell in GRID]
        cases += [("grid", draw_grid(cell, rate, options.steps)) for cell, rate in cells]
    if options.only != "grid":
        drawn = [(f"fleet {n}", draw_fleet(n, options.steps)) for n in range(*options.seeds)]
        cases += [each for each in drawn if options.only != "planned" or is_proposed(each[1][0])]
    rows: list[dict[str, Any]] = []
    for name, (scenario, case) in cases:
        rows.append({"name": name} | measure(scenario, case, options.draws))
        print(show(rows[-1]), flush=True)
        save(
            f"just_in_time_{options.name}",
            {"steps": options.steps, "draws": options.draws, "cases": rows},
        )


def run_quickstarts(options: argparse.Namespace) -> None:
    """Run every seed at every bound, and save what there is after each."""
    rows: list[dict[str, Any]] = []
    for seed in range(*options.seeds):
        for bound in options.bounds:
            rows.append(measure_quickstart(bound, seed, options))
            print(show_quickstart(rows[-1]), flush=True)
            result = {"model": options.model, "steps": options.steps, "settings": options.set}
            save(f"just_in_time_{options.name}", result | {"cases": rows})


if __name__ == "__main__":
    main()
