"""Compare dispatch by speed with and without copies of last groups.

The real sessions of learner and workers run on a simulated network and virtual time; only sampling
and training are replaced by their durations. Lengths are log-normal with a heavy tail. The fleets:
a worker and one ten times slower; two equal workers and a slow one of which each is 20 times slower
than usual with a few of its groups; and four equal ones that install each version 0.1 s after one
another, each with places for a quarter of a batch or for all of it, and where a group on its own is
four times faster than in a full engine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.leases.unequal import Unequal

EQUAL = {"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0}


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers with their tokens per second, and what is special about them."""

    speeds: dict[str, float]
    places: int = 4
    run: dict[str, float] = field(default_factory=dict)


FLEETS = {
    "fast alone": Fleet({"fast": 100.0}),
    "fast + 10x slower": Fleet({"fast": 100.0, "slow": 10.0}),
    "2 fast with hiccups + 10x slower": Fleet(
        {"a": 100.0, "b": 100.0, "slow": 10.0}, run={"hiccups": 0.03}
    ),
    "4 equal, one after the other": Fleet(EQUAL, run={"alone": 4.0, "apart_s": 0.1}),
    "the same, room for a batch each": Fleet(EQUAL, 16, {"alone": 4.0, "apart_s": 0.1}),
}
RULES: dict[str, dict[str, Any]] = {
    "speed": {},
    "speed, copies 3": {"hedge_factor": 3.0},
    "speed, copies 2": {"hedge_factor": 2.0},
    "speed, copies 1.5": {"hedge_factor": 1.5},
}


def measure(
    fleet: str, rule: str, *, max_staleness: int, seed: int, steps: int, tail: float
) -> dict[str, float]:
    """Return the figures of one run."""
    chosen = FLEETS[fleet]
    with tempfile.TemporaryDirectory() as directory:
        run = Unequal(
            Path(directory),
            tail=tail,
            seed=seed,
            max_staleness=max_staleness,
            groups_per_step=16,
            train_s=0.5,
            lease_timeout_s=60.0,
            **chosen.run,
        )
        run.start(chosen.speeds, places=chosen.places, **RULES[rule])
        run.play(steps + 5, within_s=400.0 * (steps + 5))
        return run.figures()


def main() -> None:
    """Measure all combinations and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="after five to warm up")
    parser.add_argument("--tail", type=float, default=1.0, help="sigma of the log of the lengths")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 3])
    options = harness.parse(parser, seeds=1, steps=8, staleness=[1])
    rows = []
    for max_staleness in options.staleness:
        for fleet in FLEETS:
            for rule in RULES:
                runs = [
                    measure(
                        fleet,
                        rule,
                        max_staleness=max_staleness,
                        seed=seed,
                        steps=options.steps,
                        tail=options.tail,
                    )
                    for seed in range(options.seeds)
                ]
                row: dict[str, Any] = {"staleness": max_staleness, "fleet": fleet, "rule": rule}
                for name in ("step_mean_s", "step_p95_s", "step_max_s", "wasted_share", "stale"):
                    values = [figures[name] for figures in runs]
                    row[name] = round(statistics.fmean(values), 3)
                    row[f"{name}_spread"] = round(statistics.pstdev(values), 3)
                rows.append(row)
                print(
                    f"S={max_staleness}  {fleet:34}{rule:20}"
                    f"step {row['step_mean_s']:7.2f} +- {row['step_mean_s_spread']:.2f} s, "
                    f"95 % {row['step_p95_s']:7.2f} s, wasted {row['wasted_share']:.3f}, "
                    f"stale {row['stale']:.1f}",
                    flush=True,
                )
    print(harness.save("dispatch", {"options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
