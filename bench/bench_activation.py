"""Compare the choice of workers with that of trying every set.

    python bench/bench_activation.py [--cases 1000] [--most 8]

Small fleets are compared with brute force, which knows the optimum: the exact choice (HiGHS) must
find it, and of the greedy one it tells by how much it costs more. Larger ones, up to hundreds of
workers, are where the exact choice is replaced; there the gap between the two is measured as long
as HiGHS answers, and the time of both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import harness
from random_fleets import choose_by_brute_force, random_workers

from echo.fleet import selection
from echo.fleet.activation import Choice, choose
from echo.fleet.selection import OutOfTimeError

SIZES = (10, 30, 100, 300)
PER_SIZE = 5
CHECKED = 10
"""Of the fleets without a sufficient set one in so many is asked for its best insufficient one."""


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
    parser = argparse.ArgumentParser(description=__doc__)
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
