"""Check the overlap model's idle share with real processes.

    python bench/bench_overlap.py [--steps 30] [--rates 0.8 1.0 1.2] [--eager] [--real RUN]

A learner and workers talk over sockets on loopback, encrypted, recorded, acknowledged. Only the
model work takes a given time (nodes/timed_node.py), so that the rate of the workers is known: these
shares of the rate that the rule asks for. The first fifth of the steps is run-in. With `--eager`
each share is run a second time, with groups granted as early as the bound allows. `--real` names
the directory of a finished run with real models: its idle share is compared with the one that is
predicted from the rates it recorded, as `echo-plan --from` does.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
from nodes.processes import run_nodes

from echo.cli.commands.plan import read_rates
from echo.engine.model import build_model, save_tiny_model
from echo.fleet.job import Job
from echo.fleet.overlap import NodeSpeed, predict, required_rate

GROUPS, SIZE, TOKENS = 8, 4, 16
WORKERS, SLOTS = 4, 2
"""Workers, and groups that each runs side by side."""
MAX_STALENESS, PERIOD, STEP_S, SPREAD = 3, 1, 3.0, 0.1


def run(share: float, steps: int, where: Path, *, is_eager: bool) -> dict[str, Any]:
    """Run at a share of the required rate; return measured and predicted idle share."""
    save_tiny_model(where / "model", build_model(seed=0))
    # All slots together make GROUPS / STEP_S groups per second at the required rate.
    group_s = WORKERS * SLOTS * STEP_S / (GROUPS * share)
    timed = [f"--step-s={STEP_S}", f"--group-s={group_s}", f"--spread={SPREAD}"]
    timed += ["--set", f"sync.eager={str(is_eager).lower()}"]
    run_dir = run_nodes(
        "nodes.timed_node",
        where,
        [f"w{number}" for number in range(WORKERS)],
        lambda _: timed,
        within_s=120 + 4 * steps * STEP_S,
        steps=steps,
        tokens=TOKENS,
        max_staleness=MAX_STALENESS,
        group_size=SIZE,
        groups_per_step=GROUPS,
        max_concurrent_rollouts=SLOTS * SIZE,
        dead_after_s=20,
    )
    row = {"eager": is_eager, **compare(run_dir, share, group_s)}
    if is_eager:  # the prediction is of groups that are granted just in time
        del row["mean_staleness_predicted"]
    return row


def compare(run_dir: Path, share: float, group_s: float) -> dict[str, Any]:
    """Return what a run recorded, beside what the model says of the same rates."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step" in row]
    rows = rows[len(rows) // 5 :]
    waited_s = sum(row["time/wait_for_batch"] for row in rows)
    measured = waited_s / sum(row["time/step"] for row in rows)
    busy_s = fmean(row["time/step"] - row["time/wait_for_batch"] for row in rows)
    broadcast_s = fmean(row.get("broadcast/seconds", 0.0) for row in rows)
    job = Job(
        groups_per_step=GROUPS,
        group_size=SIZE,
        max_staleness=MAX_STALENESS,
        publish_period=PERIOD,
        train_s=busy_s,
        rate_spread=SPREAD / math.sqrt(GROUPS),
        completion_tokens=TOKENS,
        max_completion_tokens=TOKENS,
        version_bytes=0.0,
        margin=0.0,
    )
    rate = share * GROUPS * SIZE / STEP_S
    predicted = predict(
        job,
        rate=rate,
        broadcast_s=broadcast_s,
        latency_s=group_s,
        nodes=[NodeSpeed(rate=rate / WORKERS, group_s=group_s)] * WORKERS,
    )
    return {
        "share_of_required_rate": share,
        "steps": len(rows),
        "group_s": round(group_s, 3),
        "broadcast_s": round(broadcast_s, 3),
        "step_s_measured": round(fmean(row["time/step"] for row in rows), 4),
        "step_s_predicted": round(predicted.step_s, 4),
        "busy_s_measured": round(busy_s, 4),
        "idle_measured": round(measured, 4),
        "idle_predicted": round(predicted.idle_share, 4),
        "error_points": round(100 * (measured - predicted.idle_share), 2),
        "mean_staleness_measured": round(fmean(row["staleness/mean"] for row in rows), 2),
        "mean_staleness_predicted": round(predicted.mean_staleness, 2),
    }


def compare_real(run_dir: Path) -> dict[str, Any]:
    """Return recorded and predicted idle share of a run with real models."""
    rates = read_rates(run_dir)
    rate = sum(worker.tokens_per_s for worker in rates.workers.values())
    rate /= rates.job.completion_tokens
    latency_s = rates.mean_group_s
    predicted = predict(rates.job, rate=rate, broadcast_s=rates.broadcast_s, latency_s=latency_s)
    return {
        "steps": rates.num_steps,
        "workers": {name: asdict(worker) for name, worker in rates.workers.items()},
        "train_s": rates.job.train_s,
        "rollouts_per_s": rate,
        "required_per_s": required_rate(rates.job, rates.broadcast_s),
        "idle_measured": round(rates.idle_share, 4),
        "idle_predicted": round(predicted.idle_share, 4),
        "error_points": round(100 * (rates.idle_share - predicted.idle_share), 2),
    }


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.8, 1.0, 1.2])
    parser.add_argument("--eager", action="store_true", help="in turns with just in time")
    parser.add_argument("--real", type=Path, metavar="RUN")
    arguments = harness.parse(parser, steps=8, rates=[1.0])
    rows = []
    turns = [False, True] if arguments.eager else [False]
    for share, is_eager in itertools.product(arguments.rates, turns):
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(run(share, arguments.steps, Path(scratch), is_eager=is_eager))
        print(rows[-1], flush=True)
    result: dict[str, Any] = {
        "groups_per_step": GROUPS,
        "group_size": SIZE,
        "workers": WORKERS,
        "slots_per_worker": SLOTS,
        "max_staleness": MAX_STALENESS,
        "publish_period": PERIOD,
        "train_s": STEP_S,
        "spread": SPREAD,
        "timed": rows,
    }
    if arguments.real is not None:
        result["real_models"] = compare_real(arguments.real)
        print(result["real_models"])
    print(f"wrote {harness.save('overlap', result)}")


if __name__ == "__main__":
    main()
