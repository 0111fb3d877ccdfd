"""Compare the choice of workers with that of trying every set.

    python bench/bench_activation.py [--cases 300] [--most 10] [--simulate | --real]

Small fleets, about half of them without a sufficient set, are compared with brute force: by how
much is the step longer, or the set dearer, than the best? Asked are the learner's choice and the
plan, by its own model of broadcasts. Larger fleets, up to hundreds of workers, are compared with
the planner's choice for them, where that suffices by the forecast; and the time is measured.

`--simulate` has the small fleets run by the learner in the simulator, and `--real` by a learner
with relay and workers as processes behind emulated links (wan.py, which needs root). Both compare
the set that generates in the end, and the learner's last choice, with every set, by the rates and
links that it has measured; the simulator also by those that are true. `--first` and `--rows` divide
the simulations among processes.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness

from echo.fleet import selection
from echo.fleet.activation import Links, Question, Roll, choose
from echo.fleet.job import Job
from echo.fleet.market import Offer, RentedFleet
from echo.fleet.overlap import is_enough, least_slowdown
from echo.fleet.provisioning import MAX_FACTOR, slowed

SIZES = (10, 30, 100, 300)
PER_SIZE = 5
UPLINK = 1e9
REAL = ("thin", "enough", "mixed")
"""Fleets of real processes."""


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
            prediction = roll.predict(job, chosen)
            if prediction.is_sufficient:
                found.append((prediction.cost_per_h, frozenset(chosen)))
    return min(found, default=None, key=lambda each: each[0])


def best_by_brute_force(
    workers: Sequence[Offer], job: Job, links: Links, periods: Sequence[int]
) -> tuple[float, float]:
    """Return the least slowdown within the budget, and the least cost of a set that has it.

    Every set is tried at every period, by steps that get longer until the rule is kept.
    """
    roll = Roll(workers, links)
    names = [worker.name for worker in workers]
    found = []
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            best = min(
                (_least_step(roll, replace(job, publish_period=period), chosen), period)
                for period in [each for each in periods if each <= job.max_staleness] or periods
            )
            step, period = best
            if math.isinf(step):
                cost_per_h = roll.assess(job, chosen).cost_per_h
            else:
                longer = replace(job, publish_period=period, train_s=job.train_s * step)
                cost_per_h = roll.assess(longer, chosen).cost_per_h
            if cost_per_h <= job.budget_per_h * (1 + 1e-9):
                found.append((step, cost_per_h))
    least = min(step for step, _ in found)
    return least, min(cost for step, cost in found if step <= least * (1 + 1e-6))


def _least_step(roll: Roll, job: Job, names: Collection[str]) -> float:
    """Return by bisection the least factor on the step for which the rule itself is kept."""

    def is_kept(factor: float) -> bool:
        assessed = roll.assess(replace(job, train_s=job.train_s * factor), names)
        return is_enough(
            assessed.job,
            rate=assessed.rate,
            broadcast_s=assessed.broadcast_s,
            latency_s=assessed.latency_s,
        )

    if job.publish_period > job.max_staleness:
        return _turns(roll, job, names) / job.train_s
    low, high = 1.0, 1.0
    if is_kept(low):
        return 1.0
    while not is_kept(high):
        low, high = high, 4 * high
        if high > 1e6:
            return math.inf
    while high / low > 1 + 1e-7:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_kept(middle) else (middle, high)
    return high


def _turns(roll: Roll, job: Job, names: Collection[str]) -> float:
    """Return the seconds of a step, where all batches of a period wait for the version before."""
    assessed = roll.assess(job, names)
    if assessed.rate <= 0:
        return math.inf
    batch_s = job.rollouts_per_step / assessed.rate
    whole_at, trained_at = assessed.broadcast_s + assessed.latency_s, 0.0
    for _ in range(job.publish_period):
        whole_at += batch_s
        trained_at = max(trained_at, whole_at) + job.train_s
    return trained_at / job.publish_period


def judge(question: Question, active: Collection[str]) -> Verdict:
    """Compare a set with every set of a question's workers, by the rule with what was measured."""
    roll = Roll(question.workers, question.links, periods=question.periods)
    own = roll.assess(question.job, active)
    best = best_of_all(question.workers, question.job, question.links, question.periods)
    return Verdict.of((own.slowdown, own.cost_per_h), best)


@dataclass(frozen=True, slots=True)
class Verdict:
    """By how much a set is worse than the best one."""

    step_gap: float
    """Of the longer step, as a share of the best set's."""
    cost_gap: float
    """Of the cost per hour; below 0 where the set is cheaper at a step that is hardly longer."""

    @classmethod
    def of(cls, own: tuple[float, float], best: tuple[float, float]) -> Verdict:
        """Compare (slowdown, cost) with the best set's."""
        return cls(own[0] / best[0] - 1, own[1] / best[1] - 1 if best[1] else 0.0)


def random_case(seed: int, *, most: int) -> tuple[list[Offer], Job, Links, range]:
    """Return a case of which about half have no sufficient set, and periods to choose from."""
    workers, job, links = random_workers(seed, most=most)
    if seed % 2:
        workers = [replace(each, tokens_per_s=each.tokens_per_s / 8) for each in workers]
    periods = range(1, job.max_staleness + 2) if seed % 3 else range(1, 2)
    return workers, replace(job, publish_period=periods[-1]), links, periods


def best_of_all(
    workers: Sequence[Offer], job: Job, links: Links, periods: Sequence[int]
) -> tuple[float, float]:
    """Return the least slowdown within the budget, and the least cost of a set that has it."""
    roll, names = Roll(workers, links, periods=periods), [worker.name for worker in workers]
    assessed = [
        roll.assess(job, chosen)
        for size in range(len(names) + 1)
        for chosen in itertools.combinations(names, size)
    ]
    within = [each for each in assessed if each.cost_per_h <= job.budget_per_h * (1 + 1e-9)]
    least = min(each.slowdown for each in within)
    return least, min(each.cost_per_h for each in within if each.slowdown <= least * (1 + 1e-6))


def least_of_plan(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> float:
    """Return the least slowdown by the planner's own model of broadcasts, by trying all counts."""
    budget = job.budget_per_h * (1 + 1e-9)
    least = math.inf
    for counts in _all_counts(fleet):
        for period in periods:
            if period > job.max_staleness:
                continue  # no plan is made of it
            own = replace(job, publish_period=period)
            step = least_slowdown(
                own,
                rate=fleet.rate(own, counts),
                broadcast_s=fleet.broadcast_s(own, counts),
                latency_s=fleet.latency_s(own, counts),
            )
            paced = replace(own, train_s=job.train_s * min(step, MAX_FACTOR))
            if step < least and fleet.cost_per_h(paced, counts) <= budget:
                least = step
    return least


def cheapest_of_plan(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> float:
    """Return the least cost of a sufficient set at the shortest period that has one."""
    for period in periods:
        own = replace(job, publish_period=period)
        costs = [
            fleet.cost_per_h(own, counts)
            for counts in _all_counts(fleet)
            if selection.is_sufficient(fleet, own, counts)
        ]
        if costs:
            return min(costs)
    return math.inf


def _all_counts(fleet: RentedFleet) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(offer.count + 1) for offer in fleet.offers))


def compare(num_cases: int, most: int) -> dict[str, Any]:
    """Compare choice and plan with every set, on fleets that suffice and that do not."""
    worst: dict[str, list[float]] = {}
    seconds, sufficient = [], 0

    def note(what: str, step: float, cost: float, best: tuple[float, float]) -> None:
        if math.isfinite(best[0]):
            worst.setdefault(f"{what}_step", []).append(step / best[0] - 1)
            worst.setdefault(f"{what}_cost", []).append(cost / best[1] - 1 if best[1] else 0.0)

    for seed in range(num_cases):
        workers, job, links, periods = random_case(seed, most=most)
        best = best_of_all(workers, job, links, periods)
        sufficient += best[0] <= 1
        began = time.perf_counter()
        choice = choose(workers, job, links, periods=periods)
        seconds.append(time.perf_counter() - began)
        note("choice", choice.slowdown, choice.prediction.cost_per_h, best)
        fleet = Roll(workers, links).fleet(job)
        plan = slowed(fleet, job, periods)
        least = least_of_plan(fleet, job, periods)
        if plan is not None:
            longer = replace(job, train_s=job.train_s * plan[0])
            cheapest = cheapest_of_plan(fleet, longer, periods)
            note("plan", plan[0], plan[1].cost_per_h, (least, cheapest))
        elif least < MAX_FACTOR:
            raise SystemExit(f"case {seed}: the plan finds nothing, a step {least:g} as long is it")
    figures = {
        f"{name}_{label}": round(how(gaps), 4)
        for name, gaps in worst.items()
        for label, how in (("worst", max), ("mean", statistics.fmean))
    }
    shares = {
        f"{name}_within_2_percent": round(sum(gap <= 0.02 for gap in gaps) / len(gaps), 4)
        for name, gaps in worst.items()
    }
    return {
        "cases": num_cases,
        "most_workers": most,
        "with_a_sufficient_set": sufficient,
        **figures,
        **shares,
        "seconds_median": round(statistics.median(seconds), 4),
        "seconds_worst": round(max(seconds), 3),
    }


def scale(size: int) -> dict[str, Any]:
    """Time the choice for fleets of `size` workers, and compare its cost with the planner's."""
    gaps, seconds, sufficient = [], [], 0
    for seed in range(PER_SIZE):
        workers, job, links = random_workers(
            10_000 + seed, most=size, least=size, groups=max(2, size // 3)
        )
        began = time.perf_counter()
        choice = choose(workers, job, links)
        seconds.append(time.perf_counter() - began)
        sufficient += choice.slowdown == 1
        roll = Roll(workers, links)
        planned = selection.select(roll.fleet(job), job)
        if planned is not None:
            prediction = roll.predict(job, roll.names(planned.counts, ()))
            if prediction.is_sufficient:
                gaps.append(choice.prediction.cost_per_h / prediction.cost_per_h - 1)
    return {
        "workers": size,
        "fleets": PER_SIZE,
        "sufficient": sufficient,
        "plans_that_suffice": len(gaps),
        "dearer_than_the_plan_mean": round(statistics.fmean(gaps), 4) if gaps else None,
        "dearer_than_the_plan_worst": round(max(gaps), 4) if gaps else None,
        "seconds_median": round(statistics.median(seconds), 3),
        "seconds_worst": round(max(seconds), 3),
    }


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--most", type=int, default=10, help="workers of a small fleet at most")
    parser.add_argument("--simulate", action="store_true", help="run the fleets in the simulator")
    parser.add_argument("--first", type=int, default=0, help="seed of the first simulated fleet")
    parser.add_argument("--rows", type=Path, help="file that each simulated fleet is added to")
    parser.add_argument("--real", action="store_true", help="run fleets of real processes")
    parser.add_argument("--fleets", nargs="+", choices=REAL, default=REAL)
    parser.add_argument("--steps", type=int, default=40, help="of a simulated or real run")
    parser.add_argument("--step-s", type=float, default=6.0, help="of the real learner's step")
    arguments = harness.parse(parser, cases=20, most=5, fleets=["thin"], steps=20)
    if arguments.simulate:
        from activation.simulated import measure_simulated  # the simulator, which others do without

        result = measure_simulated(
            arguments.cases, first=arguments.first, most=arguments.most,
            num_steps=arguments.steps, rows=arguments.rows,
        )  # fmt: skip
        print(f"wrote {harness.save('activation_simulated', result)}")
        return
    if arguments.real:
        from activation.real import measure_real  # torch, which others do without

        result = measure_real(arguments.fleets, num_steps=arguments.steps, step_s=arguments.step_s)
        print(f"wrote {harness.save('activation_real', result)}")
        return
    small = compare(arguments.cases, arguments.most)
    print(small, flush=True)
    large: list[dict[str, Any]] = []
    result = {"small": small, "large": large}
    for size in SIZES:
        large.append(scale(size))
        print(large[-1], flush=True)
        # After each size: what has been measured is not lost where the rest takes too long.
        path = harness.save("activation", result)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
