"""Measure the simulator's cost per worker and step.

Workers listen and pass weights on; each makes a quarter more than its share of a batch. A line is
printed, and the result saved, after each size; CPU seconds are those of this process, so that other
work on the machine does not count. `--limit` bounds a run: one that takes longer is reported with
the steps that it made.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

from harness import environment, new_figure, new_parser, parse, result_path, save

from echo.config.fleet_schema import SimRow
from echo.fleet.job import Job
from echo.fleet.market import Offer, Region, RentedFleet
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import summarise

MB = 1e6
SIZES = ("30x20x8", "100x20x8", "300x20x8", "100x20x64")
LOOK_S = 5.0


def make_scenario(num_workers: int, num_steps: int, num_chunks: int) -> Scenario:
    """Return a fleet of equal workers that train one group each per step of a minute."""
    job = Job(
        groups_per_step=num_workers,
        group_size=8,
        max_staleness=4,
        publish_period=2,
        train_s=60.0,
        completion_tokens=1000.0,
        max_completion_tokens=4000.0,
        completion_spread=0.5,
        version_bytes=256 * MB,
    )
    offer = Offer(
        name="gpu",
        region="site",
        count=num_workers,
        price_per_h=0.3,
        tokens_per_s=1.25 * job.group_size * job.completion_tokens / job.train_s,
        concurrency=16,
        down_bytes_per_s=125 * MB,
        up_bytes_per_s=125 * MB,
        can_listen=True,
    )
    return Scenario(
        name=f"{num_workers} workers",
        fleet=RentedFleet(
            offers=(offer,),
            regions={"site": Region(name="site", bytes_per_s=125 * MB, latency_s=0.02)},
            uplink_bytes_per_s=1250 * MB,
        ),
        job=job,
        counts=[num_workers],
        settings=SimRow(
            num_steps=num_steps,
            chunks_per_version=num_chunks,
            heartbeat_s=15.0,
            dead_after_s=60.0,
            join_within_s=60.0,
        ),
    )


def measure(num_workers: int, num_steps: int, num_chunks: int, limit_s: float) -> dict[str, Any]:
    """Return what one size costs."""
    began_at, wall_at = time.process_time(), time.monotonic()
    scenario = make_scenario(num_workers, num_steps, num_chunks)
    simulation = Simulation(scenario)
    marks: list[tuple[int, float]] = []

    def look() -> None:
        spent_s = time.process_time() - began_at
        marks.append((len(simulation.history.steps), spent_s))
        if spent_s > limit_s:
            simulation.end("")
        simulation.loop.call_later(LOOK_S, look)

    look()
    history = simulation.run()
    summary = summarise(scenario, history)
    cpu_s = time.process_time() - began_at
    done = max(1, summary.num_steps)
    # From the second step on: joining and the first version are paid for once.
    first_s = next((spent for steps, spent in marks if steps >= 2), cpu_s)
    return {
        "workers": num_workers,
        "steps_asked": num_steps,
        "steps": summary.num_steps,
        "chunks": num_chunks,
        "is_complete": summary.is_complete,
        "cpu_s": cpu_s,
        "wall_s": time.monotonic() - wall_at,
        "cpu_s_to_second_step": first_s,
        "us_per_worker_and_step": 1e6 * cpu_s / num_workers / done,
        "us_per_worker_and_later_step": 1e6
        * (cpu_s - first_s)
        / num_workers
        / max(1, summary.num_steps - 2),
        "events": history.num_events,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "simulated_s": history.ended_at,
        "idle_share": summary.idle_share,
        "mean_staleness": summary.mean_staleness,
        "broadcast_s": summary.broadcast_s,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the cost per worker and step, and memory, against the size."""
    figure = new_figure((9, 3.6))
    cost, memory = figure.subplots(1, 2)
    for chunks in sorted({row["chunks"] for row in rows}):
        group = sorted((r for r in rows if r["chunks"] == chunks), key=lambda r: r["workers"])
        sizes = [row["workers"] for row in group]
        later = [row["us_per_worker_and_later_step"] / 1000 for row in group]
        cost.plot(sizes, later, marker="o", label=f"{chunks} chunks per version")
        memory.plot(sizes, [row["peak_mib"] for row in group], marker="o")
    for axes, label in ((cost, "CPU ms per worker and step"), (memory, "peak MiB")):
        axes.set_xscale("log")
        axes.set_xlabel("workers")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    cost.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Measure each size, print, save."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "sizes", nargs="*", default=SIZES, help="WORKERSxSTEPSxCHUNKS, such as 1000x200x8"
    )
    parser.add_argument("--limit", type=float, default=1800.0, help="CPU seconds of one run")
    parser.add_argument("--resume", action="store_true", help="add to the result of today")
    arguments = parse(parser, sizes=["30x6x8"], limit=60.0)
    path = result_path("sim", ".json")
    rows = json.loads(path.read_text())["rows"] if arguments.resume and path.exists() else []
    for text in arguments.sizes:
        workers, steps, chunks = map(int, text.split("x"))
        row = measure(workers, steps, chunks, arguments.limit)
        print(*(f"{key} {value:.6g}" for key, value in row.items()), flush=True)
        rows.append({**row, "commit": environment()["commit"]})
        save("sim", {"rows": rows})
        plot(rows, result_path("sim", ".png"))


if __name__ == "__main__":
    main()
