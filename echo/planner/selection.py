"""The cheapest set of nodes that satisfies the provisioning rule.

The rule is convex in the number of nodes: the time of a broadcast is a maximum of linear functions,
and both the rate that pausing workers need and the time of gathering a batch are convex. So the
exact optimum is a mixed-integer linear programme (HiGHS) to which tangents are added until its
answer satisfies the rule itself; without a tangent at the answer it would be too optimistic, never
too pessimistic. `select_greedily` answers for the sizes where HiGHS takes longer than a second.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from echo.planner.fleet import Counts, Fleet
from echo.planner.job import Job
from echo.planner.overlap import is_enough, required_rate

TIME_LIMIT_S = 1.0
"""What the exact solver may take for one programme."""

_ADDED = (1, 2, 3, 5, 8, 13, 21, 34, 55)
"""Nodes that an exchange tries to add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which nodes to rent, and the publish period to run them with."""

    counts: tuple[int, ...]
    job: Job
    cost_per_h: float
    """$ per hour for nodes and traffic."""
    is_exact: bool
    """Whether it is the proven optimum."""


def is_sufficient(fleet: Fleet, job: Job, counts: Counts) -> bool:
    """Tell whether these nodes satisfy rule and budget."""
    return fleet.cost_per_h(job, counts) <= job.budget_per_h * (1 + 1e-9) and is_enough(
        job,
        rate=fleet.rate(job, counts),
        broadcast_s=fleet.broadcast_s(job, counts),
        latency_s=fleet.latency_s(job, counts),
    )


def select(fleet: Fleet, job: Job, *, periods: Iterable[int] | None = None) -> Selection | None:
    """Return the cheapest sufficient set with the smallest publish period that has one.

    Args:
        fleet: what can be rented.
        job: what is trained.
        periods: publish periods to try, in order; only the job's own if None.
    """
    for period in [job.publish_period] if periods is None else periods:
        tried = replace(job, publish_period=period)
        counts, is_exact = _solve(fleet, tried)
        if counts is not None:
            cost = fleet.cost_per_h(tried, counts)
            return Selection(counts=counts, job=tried, cost_per_h=cost, is_exact=is_exact)
    return None


def _solve(fleet: Fleet, job: Job) -> tuple[tuple[int, ...] | None, bool]:
    # Imported here: it needs scipy, which the runtime's own choices on a small node do without.
    from echo.planner.selection_milp import OutOfTimeError, select_exactly

    try:
        return select_exactly(fleet, job, time_limit_s=TIME_LIMIT_S), True
    except OutOfTimeError:
        return select_greedily(fleet, job), False


def select_greedily(fleet: Fleet, job: Job) -> tuple[int, ...] | None:
    """Return a sufficient set by adding the best value first, then improve it by single changes.

    Several starts, since a slow link or a long group of a cheap offer may rule the others out:
    all offers, and for each offer those whose broadcast and groups are no slower than its own.
    """
    unbounded = replace(job, budget_per_h=math.inf)  # the improvement may yet bring it within
    candidates = []
    for allowed, keeps_time in itertools.product(_starts(fleet, job), (False, True)):
        counts = _fill(fleet, unbounded, allowed, keeps_time=keeps_time)
        if counts is not None:
            candidates.append(_improve(fleet, unbounded, counts))
    best = min(candidates, key=lambda counts: fleet.cost_per_h(job, counts), default=None)
    return best if best is not None and is_sufficient(fleet, job, best) else None


def _starts(fleet: Fleet, job: Job) -> list[frozenset[int]]:
    """Return the sets of offers to start from, without repeats."""
    indices = range(len(fleet.offers))
    delay = [
        offer.group_latency_s(job) + job.version_bytes / fleet.link_bytes_per_s(offer)
        for offer in fleet.offers
    ]
    limits = {frozenset(j for j in indices if delay[j] <= delay[i]) for i in indices}
    listening = frozenset(
        j for j in indices if fleet.offers[j].can_listen or fleet.has_relay(fleet.offers[j])
    )
    ordered = {*limits, *(limit & listening for limit in limits)} - {frozenset()}
    return sorted(ordered, key=lambda allowed: (len(allowed), sorted(allowed)))


def _fill(
    fleet: Fleet, job: Job, allowed: frozenset[int], *, keeps_time: bool
) -> tuple[int, ...] | None:
    """Add nodes, the most rollouts per dollar first, until they suffice; None if they never do.

    Args:
        fleet: what can be rented.
        job: what is trained.
        allowed: offers to take from.
        keeps_time: whether to take of each offer no more than leave time for the broadcast.
    """
    counts = [0] * len(fleet.offers)
    for index in _by_value(fleet, job, allowed):
        choices = [
            [*counts[:index], count, *counts[index + 1 :]]
            for count in range(fleet.offers[index].count + 1)
        ]
        if keeps_time:
            choices = choices[: _first(choices, lambda c: not _has_time(fleet, job, c))]
        enough = _first(choices, lambda c: is_sufficient(fleet, job, c))
        counts = choices[min(enough, len(choices) - 1)] if choices else counts
        if is_sufficient(fleet, job, counts):
            return tuple(counts)
    return None


def _first(choices: list[list[int]], holds: Callable[[list[int]], bool]) -> int:
    """Return the index of the first choice that holds, their number if none does."""
    return bisect_left(choices, True, key=holds)


def _has_time(fleet: Fleet, job: Job, counts: Counts) -> bool:
    """Tell whether broadcast and groups would leave time enough if the rate were there."""
    broadcast_s = fleet.broadcast_s(job, counts)
    return is_enough(
        job,
        rate=max(fleet.rate(job, counts), required_rate(job, broadcast_s) * (1 + job.margin)),
        broadcast_s=broadcast_s,
        latency_s=fleet.latency_s(job, counts),
    )


def _by_value(fleet: Fleet, job: Job, allowed: frozenset[int]) -> list[int]:
    def dollars_per_rollout(index: int) -> float:
        offer = fleet.offers[index]
        rate = offer.rollouts_per_s(job)
        one = [int(j == index) for j in range(len(fleet.offers))]
        return fleet.cost_per_h(job, one) / rate if rate > 0 else math.inf

    return sorted((j for j in allowed if fleet.offers[j].count), key=dollars_per_rollout)


def _improve(fleet: Fleet, job: Job, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Drop nodes, or exchange one, two or all of an offer for some of another, while it pays."""
    best, best_cost = counts, fleet.cost_per_h(job, counts)
    while True:
        better = [
            (cost, changed)
            for changed in _neighbours(fleet, best)
            if (cost := fleet.cost_per_h(job, changed)) < best_cost * (1 - 1e-9)
        ]
        for cost, changed in sorted(better):
            if is_sufficient(fleet, job, changed):
                best, best_cost = changed, cost
                break
        else:
            return best


def _neighbours(fleet: Fleet, counts: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    for index, count in enumerate(counts):
        for removed in {1, 2, count} - {0}:
            if removed > count:
                continue
            fewer = [*counts[:index], count - removed, *counts[index + 1 :]]
            yield tuple(fewer)
            for other, offer in enumerate(fleet.offers):
                for added in _ADDED:
                    if other != index and fewer[other] + added <= offer.count:
                        swapped = fewer.copy()
                        swapped[other] += added
                        yield tuple(swapped)
