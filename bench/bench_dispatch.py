"""Compare dispatch by speed with and without copies of last groups, just in time and eager.

The real nodes of learner and workers run on virtual time (april/lab.py); only sampling and training
are replaced by their durations. Lengths are log-normal with a heavy tail. The fleets: a worker and
one ten times slower; two equal workers and a slow one of which each is 20 times slower than usual
with a few of its groups; and four equal ones that install each version 0.1 s after one another,
each with places for a quarter of a batch or for all of it, and where a group on its own is four
times faster than in a full engine.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import harness
import numpy as np
from april.engine import Lengths, Row, Setting, TimedEngine
from april.lab import Content, Lab, play

from echo.engine.engine import Completion

WARM_UP = 5
"""Steps that do not count."""
MEDIAN_TOKENS, MAX_TOKENS = 60, 1200
HICCUP = 20
"""How many times slower a hiccup is."""
EQUAL = {"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0}


@dataclass(frozen=True, kw_only=True)
class Rates(Setting):
    """Engines whose groups have a rate each, which depends on how many there are."""

    speed: float = 100.0
    """Tokens per second of a rollout in a full engine."""
    alone: float = 1.0
    """How much faster a group is on its own."""
    tail: float = 1.0
    """Standard deviation of the logarithm of the lengths."""

    def length(self, group_id: int, member: int) -> int:
        """Return how long all completions of a group get."""
        drawn = random.Random(f"{self.seed}/{group_id}").lognormvariate(0.0, self.tail)
        return min(MAX_TOKENS, max(1, round(MEDIAN_TOKENS * drawn)))

    def seconds(self, num_tokens: int, num_rows: int, num_cached: float) -> float:
        """Return how long so many tokens of each row take."""
        share = num_rows / self.num_rows
        return num_tokens * (1 + (self.alone - 1) * share) / (self.speed * self.alone)


class Hiccups(Lengths):
    """Lengths, of which some take a worker far longer than usual."""

    def __init__(self, setting: Setting, worker: str, share: float) -> None:
        super().__init__(setting)
        self._worker, self._share, self._seed = worker, share, setting.seed

    def slowdown(self, row: Row) -> int:
        """Return how many tokens of the clock each of a row's own takes."""
        lease = row.request.request_id.rpartition(".")[0]
        drawn = random.Random(f"{self._seed}/{self._worker}/{lease}").random()
        return HICCUP if drawn < self._share else 1

    def enter(self, rows: Sequence[Row]) -> None:
        super().enter(rows)
        for row in rows:
            row.left = (row.left + row.done) * self.slowdown(row) - row.done

    def completion(self, row: Row, *, is_whole: bool) -> Completion:
        clocked, slowdown = super().completion(row, is_whole=is_whole), self.slowdown(row)
        own = slice(None, None, slowdown)
        return replace(
            clocked, token_ids=clocked.token_ids[own], logprobs=clocked.logprobs[own],
            policy_versions=np.array(clocked.policy_versions)[own],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers with their tokens per second, and what is special about them."""

    speeds: dict[str, float]
    places: int = 4
    alone: float = 1.0
    apart_s: float = 0.0
    """How much later each worker installs a version than the one before it."""
    hiccups: float = 0.0
    """Share of the leases that their workers sample far slower than usual."""


FLEETS = {
    "fast alone": Fleet({"fast": 100.0}),
    "fast + 10x slower": Fleet({"fast": 100.0, "slow": 10.0}),
    "2 fast with hiccups + 10x slower": Fleet({"a": 100.0, "b": 100.0, "slow": 10.0}, hiccups=0.03),
    "4 equal, one after the other": Fleet(EQUAL, alone=4.0, apart_s=0.1),
    "the same, room for a batch each": Fleet(EQUAL, 16, alone=4.0, apart_s=0.1),
}
RULES: dict[str, dict[str, Any]] = {
    "speed": {},
    "speed, copies 3": {"hedge_factor": 3.0},
    "speed, copies 2": {"hedge_factor": 2.0},
    "speed, copies 1.5": {"hedge_factor": 1.5},
    "eager": {"is_eager": True},
    "eager, copies 2": {"is_eager": True, "hedge_factor": 2.0},
}


def measure(
    fleet: str, rule: str, *, max_staleness: int, seed: int, steps: int, tail: float
) -> dict[str, float]:
    """Return the figures of one run."""
    chosen = FLEETS[fleet]
    base = Rates(
        seed=seed, num_steps=steps + WARM_UP, group_size=2, groups_per_step=16, train_s=0.5,
        groups_per_worker=chosen.places, max_staleness=max_staleness, max_tokens=MAX_TOKENS,
        prompt_tokens=3, prefill_s_per_token=0.0, chunk_tokens=5, tail=tail, alone=chosen.alone,
        **RULES[rule],
    )  # fmt: skip
    workers = {}
    for number, (name, speed) in enumerate(chosen.speeds.items()):
        setting = replace(base, speed=speed, install_s=number * chosen.apart_s)
        workers[name] = setting, Hiccups(setting, name, chosen.hiccups)
    return play(Content(base), workers, figures)


def figures(lab: Lab, engines: Sequence[TimedEngine]) -> dict[str, float]:
    """Return what the dispatch has made of it."""
    instants = [step["at"] for step in lab.steps[WARM_UP - 1 :]]
    times = sorted(stop - start for start, stop in itertools.pairwise(instants))
    uses, counts = [engine.use for engine in engines], lab.node.role.counters
    return {
        "step_mean_s": statistics.fmean(times),
        "step_p95_s": times[int(0.95 * (len(times) - 1))],
        "step_max_s": times[-1],
        "wasted_share": sum(u.num_stopped for u in uses) / sum(u.num_tokens for u in uses),
        "mean_staleness": statistics.fmean(s["mean_staleness"] for s in lab.steps[WARM_UP:]),
        "stale": counts["discarded/stale"],
        "copies": counts["hedges/issued"],
    }


def main() -> None:
    """Measure all combinations and write the table."""
    parser = harness.new_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="after five to warm up")
    parser.add_argument("--tail", type=float, default=1.0, help="sigma of the log of the lengths")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=[*RULES], metavar="RULE")
    options = harness.parse(parser, seeds=1, steps=3, staleness=[1])
    rows = []
    for max_staleness in options.staleness:
        for fleet in FLEETS:
            for rule in options.rules:
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
                for name in (
                    "step_mean_s",
                    "step_p95_s",
                    "step_max_s",
                    "wasted_share",
                    "mean_staleness",
                    "stale",
                    "copies",
                ):
                    values = [figures[name] for figures in runs]
                    row[name] = round(statistics.fmean(values), 3)
                    row[f"{name}_spread"] = round(statistics.pstdev(values), 3)
                rows.append(row)
                print(
                    f"S={max_staleness}  {fleet:34}{rule:20}"
                    f"step {row['step_mean_s']:7.2f} +- {row['step_mean_s_spread']:.2f} s, "
                    f"95 % {row['step_p95_s']:7.2f} s, wasted {row['wasted_share']:.3f}, "
                    f"staleness {row['mean_staleness']:.2f}, stale {row['stale']:.1f}",
                    flush=True,
                )
    print(harness.save("dispatch", {"options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
