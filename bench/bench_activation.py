"""Compare the choice of workers with that of trying every set.

    python bench/bench_activation.py [--cases 1000] [--most 8]

Small fleets are compared with brute force, which knows the optimum: the exact choice (HiGHS) must
find it, and of the greedy one it tells by how much it costs more. Larger ones, up to hundreds of
workers, are where the exact choice is replaced; there the gap between the two is measured as long
as HiGHS answers, and the time of both.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import harness

from echo.fleet import selection
from echo.fleet.activation import Choice, Links, Roll, choose
from echo.fleet.job import Job
from echo.fleet.market import Offer
from echo.fleet.selection import OutOfTimeError

SIZES = (10, 30, 100, 300)
PER_SIZE = 5
UPLINK = 1e9
CHECKED = 10
"""Of the fleets without a sufficient set one in so many is asked for its best insufficient one."""


def random_workers(
    seed: int, *, most: int = 8, least: int = 1, groups: int | None = None
) -> tuple[list[Offer], Job, Links]:
    """Return workers of a few kinds or all different, and a job that about half of them can do.

    Args:
        seed: of the case.
        most: workers at most.
        least: workers at least.
        groups: per step, for larger fleets with versions that can reach them; drawn without.
    """
    rng = random.Random(seed)
    kinds = [_random_worker(rng, str(number)) for number in range(rng.randint(1, 4))]
    workers = []
    for number in range(rng.randint(least, most)):
        if rng.random() < 0.5:
            kind = rng.choice(kinds)
            workers.append(replace(kind, name=f"w{number}"))
        else:
            workers.append(_random_worker(rng, f"w{number}"))
    bound = rng.randint(0, 6) if groups is None else 6
    job = Job(
        groups_per_step=rng.choice([2, 4, 8]) if groups is None else groups,
        group_size=8,
        useful_share=rng.choice([1, 0.6]),
        max_staleness=bound,
        publish_period=rng.randint(1, bound + 1) if groups is None else 1,
        train_s=rng.uniform(10, 60),
        completion_tokens=1000,
        max_completion_tokens=4000,
        version_bytes=rng.choice([1e8, 1e9]) if groups is None else 1e7,
        margin=rng.choice([0, 0.1]),
        budget_per_h=rng.choice([math.inf, 4.0]) if groups is None else math.inf,
    )
    links = Links(
        broadcast_s=Broadcast(workers, job),
        uplink_bytes_per_s=UPLINK,
        price_per_gb=rng.choice([0, 0.02]),
    )
    return workers, job, links


class Broadcast:
    """What a broadcast takes: the slowest downlink, one chain, all behind the learner's uplink."""

    def __init__(self, workers: Sequence[Offer], job: Job) -> None:
        self.by_name = {worker.name: worker for worker in workers}
        self.version_bytes = job.version_bytes

    def __call__(self, names: Collection[str]) -> float:
        members = [self.by_name[name] for name in names]
        slowest = min((m.down_bytes_per_s for m in members), default=math.inf)
        num_copies = sum(not m.can_listen for m in members) + any(m.can_listen for m in members)
        return max(self.version_bytes / slowest, num_copies * self.version_bytes / UPLINK)


def _random_worker(rng: random.Random, name: str) -> Offer:
    return Offer(
        name=name,
        tokens_per_s=rng.uniform(300, 3000),
        concurrency=rng.randint(8, 64),
        price_per_h=rng.uniform(0.1, 2),
        price_per_gb=rng.choice([0, 0.01]),
        losses_per_h=rng.choice([0, 0.2]),
        restart_s=300,
        can_listen=rng.random() < 0.5,
        down_bytes_per_s=rng.choice([2e7, 1e8, 1e9]),
        up_bytes_per_s=1e9,
    )


def choose_by_brute_force(
    workers: Sequence[Offer], job: Job, links: Links
) -> tuple[float, frozenset[str]] | None:
    """Return the cheapest sufficient set and its cost by trying every one; None without any."""
    roll = Roll(workers, links)
    names = [worker.name for worker in workers]
    found = []
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            outlook = roll.outlook(job, chosen)
            if outlook.is_sufficient:
                found.append((outlook.cost_per_h, frozenset(chosen)))
    return min(found, default=None, key=lambda each: each[0])


def choose_greedily(case: tuple[Any, ...]) -> Choice:
    """Choose as where HiGHS has no answer within its second."""

    def out_of_time(*_: Any, **__: Any) -> None:
        raise OutOfTimeError

    with mock.patch("echo.fleet.selection.select_exactly", out_of_time):
        return choose(*case)


def compare(num_cases: int, most: int) -> dict[str, Any]:
    """Compare exact and greedy choice with brute force."""
    feasible = missed = wrong = 0
    gaps, exact_s, greedy_missed = [], [], 0
    for seed in range(num_cases):
        case = random_workers(seed, most=most)
        best = choose_by_brute_force(*case)
        if best is None and seed % CHECKED:
            continue
        began = time.perf_counter()
        exact = choose(*case)
        exact_s.append(time.perf_counter() - began)
        greedy = choose_greedily(case)
        if best is None:
            wrong += exact.outlook.is_sufficient or greedy.outlook.is_sufficient
            continue
        feasible += 1
        is_found = exact.outlook.is_sufficient
        missed += not (is_found and exact.outlook.cost_per_h <= best[0] * (1 + 1e-6))
        if greedy.outlook.is_sufficient:
            gaps.append(greedy.outlook.cost_per_h / best[0] - 1)
        else:
            greedy_missed += 1
    return {
        "cases": num_cases,
        "most_workers": most,
        "with_a_sufficient_set": feasible,
        "exact_not_the_optimum": missed,
        "insufficient_called_sufficient": wrong,
        "greedy_found_none": greedy_missed,
        "greedy_gap_mean": round(statistics.fmean(gaps), 5),
        "greedy_gap_worst": round(max(gaps), 4),
        "greedy_is_optimal_share": round(sum(gap < 1e-6 for gap in gaps) / len(gaps), 4),
        "exact_s_median": round(statistics.median(exact_s), 4),
        "exact_s_worst": round(max(exact_s), 3),
    }


def scale(size: int) -> dict[str, Any]:
    """Time both on fleets of `size` workers, and tell the gap between them."""
    gaps, exact_s, greedy_s, proven = [], [], [], 0
    for seed in range(PER_SIZE):
        case = random_workers(10_000 + seed, most=size, least=size, groups=max(2, size // 3))
        began = time.perf_counter()
        exact = choose(*case)
        exact_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        greedy = choose_greedily(case)
        greedy_s.append(time.perf_counter() - began)
        if exact.is_exact and exact.slowdown == 1:
            proven += 1
            gaps.append(greedy.outlook.cost_per_h / exact.outlook.cost_per_h - 1)
    return {
        "workers": size,
        "fleets": PER_SIZE,
        "answered_by_highs": proven,
        "greedy_gap_mean": round(statistics.fmean(gaps), 4) if gaps else None,
        "greedy_gap_worst": round(max(gaps), 4) if gaps else None,
        "seconds_median": round(statistics.median(exact_s), 3),
        "seconds_worst": round(max(exact_s), 3),
        "greedy_seconds_median": round(statistics.median(greedy_s), 3),
    }


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--most", type=int, default=8, help="workers of a small fleet at most")
    arguments = harness.parse(parser, cases=20, most=5)
    small = compare(arguments.cases, arguments.most)
    print(small, flush=True)
    large: list[dict[str, Any]] = []
    result = {"time_limit_s": selection.TIME_LIMIT_S, "small": small, "large": large}
    for size in SIZES:
        large.append(scale(size))
        print(large[-1], flush=True)
        # After each size: what has been measured is not lost where the rest takes too long.
        path = harness.save("activation", result)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
