"""Compare both readings of the provisioning rule with the simulator.

For each bound S, publish period kappa, T_bcast / (kappa * T_train) and spread of the lengths the
least rate is searched for at which the learner waits less than IDLE of the time, mean over the
seeds, for workers that pause while weights arrive and for those that sample through it. Beside it
stand the rates that the two readings ask for (`echo/fleet/overlap.py`), and the waiting that
`predict` says of each rate that was simulated; `--judge` says that anew of a measured grid, without
simulating anything. `--pacing` compares leases that hold workers back
with none.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from harness import environment, new_figure, new_parser, parse, result_path, save

from echo.config.fleet_schema import SimRow
from echo.fleet.job import Job
from echo.fleet.market import Offer, Region, RentedFleet
from echo.fleet.overlap import fits_window, predict, required_rate
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import Summary, summarise

IDLE = 0.02
FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Rates that are tried, in units of R / T_train."""
BOUNDS = ((6, 2), (4, 2), (2, 2), (1, 1), (6, 5))
"""(S, kappa)."""
RATIOS = (0.1, 0.5, 0.9)
"""T_bcast / (kappa * T_train)."""
SPREADS = (0.1, 0.6)
"""Of the lengths: standard deviation over mean."""
NUM_WORKERS = 6
VERSION_BYTES = 1e9
TRAIN_S = 60.0
NEVER = 1e9
CELL = ("max_staleness", "publish_period", "broadcast_over_period", "spread", "is_pausing")
"""What names a cell of the grid."""


def make_job(bound: int, period: int, spread: float, *, is_pausing: bool) -> Job:
    """Return a job of 12 groups of 4 per step of a minute."""
    return Job(
        groups_per_step=12,
        group_size=4,
        max_staleness=bound,
        publish_period=period,
        train_s=TRAIN_S,
        completion_tokens=1000.0,
        max_completion_tokens=16_000.0,
        completion_spread=spread,
        version_bytes=VERSION_BYTES,
        has_pausing_workers=is_pausing,
        margin=0.0,
    )


def make_scenario(
    job: Job, *, rate: float, broadcast_s: float, num_steps: int, **changes: Any
) -> Scenario:
    """Return six equal workers that make `rate` rollouts per second together."""
    offer = Offer(
        name="gpu",
        region="site",
        count=NUM_WORKERS,
        price_per_h=1.0,
        tokens_per_s=rate * job.completion_tokens / NUM_WORKERS,
        concurrency=job.group_size,
        down_bytes_per_s=1e12,
        up_bytes_per_s=1e12,
    )
    region = Region(name="site", bytes_per_s=job.version_bytes / broadcast_s, latency_s=0.01)
    settings: dict[str, Any] = {
        "num_steps": num_steps,
        "chunks_per_version": 4,
        "heartbeat_s": 10.0,
        "dead_after_s": 60.0,
        "lease_timeout_s": 1000.0,
        "swap_s": 0.1,
        "setup_s": 1.0,
        # Groups finish together, so that the rate is what was asked for: see alone_speedup.
        "alone_speedup": 100.0,
    }
    return Scenario(
        name="rule",
        fleet=RentedFleet(offers=(offer,), regions={"site": region}, uplink_bytes_per_s=1e12),
        job=job,
        counts=[NUM_WORKERS],
        settings=SimRow(**(settings | changes)),
    )


def simulate(scenario: Scenario, num_seeds: int) -> list[Summary]:
    """Return one summary per seed."""
    seeded = [scenario.with_seed(seed) for seed in range(num_seeds)]
    return [summarise(each, Simulation(each).run()) for each in seeded]


def measure_cell(
    bound: int,
    period: int,
    ratio: float,
    spread: float,
    *,
    is_pausing: bool,
    seeds: int,
    steps: int,
) -> dict[str, Any]:
    """Return the least rate of one cell, and what the readings and the prediction say."""
    job = make_job(bound, period, spread, is_pausing=is_pausing)
    broadcast_s = ratio * period * TRAIN_S
    unit = job.rollouts_per_step / TRAIN_S
    tried: list[dict[str, Any]] = []
    needed = None
    for factor in FACTORS:
        rate = factor * unit
        scenario = make_scenario(job, rate=rate, broadcast_s=broadcast_s, num_steps=steps)
        runs = simulate(scenario, seeds)
        idle = fmean(run.idle_share for run in runs)
        tried.append(
            {
                "factor": factor,
                "idle": idle,
                "idle_by_seed": [run.idle_share for run in runs],
                "staleness": fmean(run.mean_staleness for run in runs),
                **expect(job, rate=rate, broadcast_s=broadcast_s),
                "broadcast_s": fmean(run.broadcast_s for run in runs),
            }
        )
        if idle <= IDLE:
            needed = factor
            break
    pausing = required_rate(job, broadcast_s, is_pausing=True) / unit
    through = required_rate(job, broadcast_s, is_pausing=False) / unit
    window = next((each["factor"] for each in tried if each["fits_window"]), None)
    return {
        "max_staleness": bound,
        "publish_period": period,
        "broadcast_over_period": ratio,
        "spread": spread,
        "is_pausing": is_pausing,
        "needed": needed,
        "pausing_reading": pausing if math.isfinite(pausing) else None,
        "through_reading": through,
        "through_reading_with_window": None if window is None else max(through, window),
        "tried": tried,
    }


def expect(job: Job, *, rate: float, broadcast_s: float) -> dict[str, Any]:
    """Return what the overlap model says of six equal workers, of which each has one group."""
    latency_s = job.group_size * NUM_WORKERS / rate
    expected = predict(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s)
    return {
        "predicted_idle": expected.idle_share,
        "predicted_staleness": expected.mean_staleness,
        "fits_window": fits_window(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s),
    }


def judge_again(path: Path) -> dict[str, Any]:
    """Return a measured grid with what the model of today says of it."""
    found: dict[str, Any] = json.loads(path.read_text())
    for cell in found["cells"]:
        bound, period, ratio, spread, is_pausing = (cell[key] for key in CELL)
        job = make_job(bound, period, spread, is_pausing=is_pausing)
        for row in cell["tried"]:
            rate = row["factor"] * job.rollouts_per_step / TRAIN_S
            row |= expect(job, rate=rate, broadcast_s=ratio * period * TRAIN_S)
    found["measured"] = found.get("measured", found["environment"])
    del found["environment"]
    return found | judge(found["cells"])


def measure_rule(seeds: int, steps: int, *, every: int, is_resumed: bool) -> dict[str, Any]:
    """Measure the whole grid, printing cells as they come; a resumed one keeps those of today."""
    path = result_path("rule", ".json")
    before = json.loads(path.read_text()) if is_resumed and path.exists() else {"cells": []}
    cells: list[dict[str, Any]] = before["cells"]
    measured = {"measured": before["measured"]} if "measured" in before else {}
    done = {tuple(cell[key] for key in CELL) for cell in cells}
    grid = itertools.product(BOUNDS, RATIOS, SPREADS, (False, True))
    for (bound, period), ratio, spread, is_pausing in itertools.islice(grid, 0, None, every):
        if (bound, period, ratio, spread, is_pausing) in done:
            continue
        cell = measure_cell(
            bound, period, ratio, spread, is_pausing=is_pausing, seeds=seeds, steps=steps
        )
        cells.append(cell | {"commit": environment()["commit"]})
        shown = {key: cell[key] for key in cell if key not in ("tried", "spread")}
        print(f"spread {spread}:", *(f"{key} {value}" for key, value in shown.items()), flush=True)
        found = {"steps": steps, "seeds": seeds, **measured, **judge(cells), "cells": cells}
        save("rule", found)
        plot(cells, result_path("rule", ".png"))
    return {"steps": steps, "seeds": seeds, **measured, **judge(cells), "cells": cells}


def judge(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how well each reading and the prediction did."""
    rows = [row for cell in cells for row in cell["tried"]]
    errors = [abs(row["idle"] - row["predicted_idle"]) for row in rows]
    found: dict[str, Any] = {
        "prediction": {
            "median_error_of_idle": median(errors),
            "mean_error_of_idle": fmean(errors),
            "largest_error_of_idle": max(errors),
            "within_2_points": sum(error <= 0.02 for error in errors) / len(errors),
            "mean_error_of_staleness": fmean(
                abs(row["staleness"] - row["predicted_staleness"]) for row in rows
            ),
        }
    }
    for is_pausing in (False, True):
        some = [
            abs(row["idle"] - row["predicted_idle"])
            for cell in cells
            if cell["is_pausing"] is is_pausing
            for row in cell["tried"]
        ]
        found[f"prediction for {'pausing' if is_pausing else 'sampling'} workers"] = {
            "mean_error_of_idle": fmean(some) if some else None,
            "largest_error_of_idle": max(some, default=None),
            "within_2_points": sum(error <= 0.02 for error in some),
            "rates": len(some),
        }
        group = [cell for cell in cells if cell["is_pausing"] is is_pausing]
        for name in ("pausing_reading", "through_reading", "through_reading_with_window"):
            pairs = [(cell["needed"] or NEVER, cell[name] or NEVER) for cell in group]
            found[f"{name} for {'pausing' if is_pausing else 'sampling'} workers"] = {
                # Rates were tried in steps, so a rate within a step of the needed one is tight.
                "tight": sum(_is_tight(needed, asked) for needed, asked in pairs),
                "too_low": sum(asked < _step_below(needed) for needed, asked in pairs),
                "too_cautious": sum(asked > needed * 1.001 for needed, asked in pairs),
                "cells": len(pairs),
            }
    return {"idle_allowed": IDLE, "verdict": found}


def _step_below(needed: float) -> float:
    """Return the largest rate that was tried and found too low."""
    return max((factor for factor in FACTORS if factor < needed), default=0.0)


def _is_tight(needed: float, asked: float) -> bool:
    return _step_below(needed) <= asked <= needed * 1.001


def measure_pacing(seeds: int, steps: int) -> dict[str, Any]:
    """Compare leases that hold workers back with none."""
    rows = []
    for bound, factor, spread in itertools.product((1, 2, 4), (1.0, 1.25, 1.5, 2.0), (0.1, 0.6)):
        job = make_job(bound, 1, spread, is_pausing=False)
        rate = factor * job.rollouts_per_step / TRAIN_S
        paced = make_scenario(job, rate=rate, broadcast_s=6.0, num_steps=steps)
        free = replace(paced, settings=paced.settings.model_copy(update={"is_paced": False}))
        row: dict[str, Any] = {"max_staleness": bound, "factor": factor, "spread": spread}
        for name, scenario in (("paced", paced), ("unpaced", free)):
            runs = simulate(scenario, seeds)
            row[f"{name}_thrown_away"] = fmean(run.thrown_away for run in runs)
            row[f"{name}_thrown_away_by_seed"] = [run.thrown_away for run in runs]
            row[f"{name}_idle"] = fmean(run.idle_share for run in runs)
            row[f"{name}_staleness"] = fmean(run.mean_staleness for run in runs)
        rows.append(row)
        words = ("max_staleness", "factor", "spread", "paced_thrown_away", "unpaced_thrown_away")
        print(*(f"{word} {row[word]:.3g}" for word in words), flush=True)
        save("pacing", {"steps": steps, "seeds": seeds, "rows": rows})
    return {"steps": steps, "seeds": seeds, "rows": rows}


def plot(cells: list[dict[str, Any]], path: Path) -> None:
    """Draw the needed rate against what each reading asks for, by kind of worker."""
    figure = new_figure((11, 4.5))
    for axes, is_pausing in zip(figure.subplots(1, 2), (False, True), strict=True):
        group = [cell for cell in cells if cell["is_pausing"] is is_pausing]
        names = [
            f"S {c['max_staleness']} k {c['publish_period']} b {c['broadcast_over_period']:g} "
            f"s {c['spread']:g}"
            for c in group
        ]
        places = range(len(group))
        highest = FACTORS[-1] * 1.2
        for key, mark, label in (
            ("needed", "o", "needed (simulated)"),
            ("pausing_reading", "_", "reading for pausing workers"),
            ("through_reading", "|", "reading for sampling workers"),
        ):
            values = [min(cell[key] or highest, highest) for cell in group]
            axes.scatter(values, places, marker=mark, label=label, s=40)
        axes.set_yticks(places, names, fontsize=5)
        axes.set_xlabel("rate / (R / T_train); beyond 3: never")
        axes.set_title("workers that pause" if is_pausing else "workers that sample through")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    """Measure, print, save."""
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=1, help="so manieth cell of the grid only")
    parser.add_argument("--pacing", action="store_true")
    parser.add_argument("--resume", action="store_true", help="keep the cells measured today")
    parser.add_argument("--judge", type=Path, metavar="RESULT", help="predict a measured grid anew")
    arguments = parse(parser, seeds=1, steps=10, every=15)
    if arguments.judge is not None:
        result = judge_again(arguments.judge)
        print(*(f"{name}: {value}" for name, value in result["verdict"].items()), sep="\n")
        save("rule", result)
        return
    if arguments.pacing:
        save("pacing", measure_pacing(arguments.seeds, arguments.steps))
        return
    result = measure_rule(
        arguments.seeds, arguments.steps, every=arguments.every, is_resumed=arguments.resume
    )
    print(*(f"{name}: {value}" for name, value in result["verdict"].items()), sep="\n")
    save("rule", result)
    plot(result["cells"], result_path("rule", ".png"))


if __name__ == "__main__":
    main()
