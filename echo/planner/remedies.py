"""Why no fleet is sufficient, and the smallest changes that would make one so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from echo.planner.fleet import Fleet
from echo.planner.job import Job
from echo.planner.overlap import required_rate, window_s
from echo.planner.selection import Selection, select

MAX_FACTOR = 64.0
"""A change by more than this is no remedy."""
MAX_STALENESS = 64
"""Largest S proposed: the longest lag that published systems survive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change that makes a plan possible."""

    text: str
    factor: float
    """New value over old, at least 1: the smaller the better."""
    selection: Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why there is no plan."""

    reasons: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    """The smallest change first; empty if no single change helps."""


def refuse(fleet: Fleet, job: Job, periods: Sequence[int]) -> Refusal:
    """Return why no fleet is sufficient and what would help.

    Args:
        fleet: what can be rented.
        job: what is trained.
        periods: publish periods that were tried.
    """
    remedies = [
        remedy
        for remedy in (
            _with_more_nodes(fleet, job, periods),
            _with_more_budget(fleet, job, periods),
            _with_more_staleness(fleet, job, periods),
            _with_other_period(fleet, job, periods),
            _with_slower_learner(fleet, job, periods),
            _with_smaller_versions(fleet, job, periods),
            _with_wider_uplink(fleet, job, periods),
        )
        if remedy is not None
    ]
    remedies.sort(key=lambda remedy: remedy.factor)
    return Refusal(reasons=tuple(_reasons(fleet, job, periods)), remedies=tuple(remedies))


def _reasons(fleet: Fleet, job: Job, periods: Sequence[int]) -> list[str]:
    """Return every condition of the rule that fails even in its best case."""
    reasons = []
    everything = [offer.count for offer in fleet.offers]
    rate = fleet.rate(job, everything)
    best_period = max(periods)
    relaxed = replace(job, publish_period=best_period)
    alone = [
        [int(j == index) for j in range(len(everything))]
        for index, count in enumerate(everything)
        if count
    ]
    broadcast_s = min((fleet.broadcast_s(job, one) for one in alone), default=0.0)
    needed = required_rate(relaxed, broadcast_s) * (1 + job.margin)
    if rate < needed < math.inf:
        reasons.append(
            f"all {sum(everything)} nodes on offer make {rate:.3g} rollouts/s, "
            f"{needed:.3g} are needed ({job.rollouts_per_step:g} per step of {job.train_s:g} s, "
            f"margin {job.margin:.0%})"
        )
    if broadcast_s >= best_period * job.train_s:
        reasons.append(
            f"one broadcast takes {broadcast_s:.3g} s at best, longer than the "
            f"{best_period * job.train_s:.3g} s between publications (publish_period "
            f"{best_period} x {job.train_s:g} s)"
        )
    least_period = replace(job, publish_period=min(periods))
    if alone and not job.has_pausing_workers:
        fastest = min(fleet.broadcast_s(job, one) + fleet.latency_s(job, one) for one in alone)
        waits = fastest + job.train_s / (1 + job.margin)
        if waits > window_s(least_period):
            reasons.append(
                f"broadcast, group and batch take {waits:.3g} s at best, S = {job.max_staleness} "
                f"with publish_period {min(periods)} allows {window_s(least_period):.3g} s"
            )
    unbounded = _without_budget(fleet, job, periods)
    if unbounded is not None:
        reasons.append(
            f"the cheapest sufficient fleet costs ${unbounded.cost_per_h:.2f}/h, the budget is "
            f"${job.budget_per_h:.2f}/h"
        )
    if not reasons:
        reasons.append(
            "each condition can be met alone but not all at once: nodes that add enough rate make "
            "the broadcast or a group too slow"
        )
    return reasons


def _without_budget(fleet: Fleet, job: Job, periods: Sequence[int]) -> Selection | None:
    """Return the cheapest sufficient set of any publish period: rarer traffic costs less."""
    unbounded = replace(job, budget_per_h=math.inf)
    found = [select(fleet, unbounded, periods=[period]) for period in periods]
    return min(
        (selection for selection in found if selection is not None),
        key=lambda selection: selection.cost_per_h,
        default=None,
    )


def _with_more_nodes(fleet: Fleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    """Return the offer of which the fewest more nodes suffice."""
    best: Remedy | None = None
    total = max(1, sum(offer.count for offer in fleet.offers))
    for index, offer in enumerate(fleet.offers):

        def grown(extra: int, index: int = index) -> Selection | None:
            offers = list(fleet.offers)
            offers[index] = replace(offers[index], count=offers[index].count + extra)
            return select(replace(fleet, offers=tuple(offers)), job, periods=periods)

        extra = _least(grown, int(MAX_FACTOR * total))
        selection = grown(extra) if extra else None
        if extra and selection is not None and (best is None or 1 + extra / total < best.factor):
            text = f"{extra} more {offer.name} in {offer.region} (${selection.cost_per_h:.2f}/h)"
            best = Remedy(text=text, factor=1 + extra / total, selection=selection)
    return best


def _with_more_budget(fleet: Fleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    selection = _without_budget(fleet, job, periods)
    if selection is None:
        return None
    return Remedy(
        text=f"a budget of ${selection.cost_per_h:.2f}/h in place of ${job.budget_per_h:.2f}/h",
        factor=selection.cost_per_h / job.budget_per_h,
        selection=selection,
    )


def _with_more_staleness(fleet: Fleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    for bound in range(job.max_staleness + 1, MAX_STALENESS + 1):
        selection = select(fleet, replace(job, max_staleness=bound), periods=periods)
        if selection is not None:
            return Remedy(
                text=f"max_staleness {bound} in place of {job.max_staleness}",
                factor=(bound + 1) / (job.max_staleness + 1),
                selection=selection,
            )
    return None


def _with_other_period(fleet: Fleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    others = [k for k in range(1, job.max_staleness + 2) if k not in periods]
    selection = select(fleet, job, periods=others)
    if selection is None:
        return None
    old, new = max(periods), selection.job.publish_period
    text = f"publish_period {new} in place of {old}"
    return Remedy(text=text, factor=max(old / new, new / old), selection=selection)


def slowed(
    fleet: Fleet, job: Job, periods: Sequence[int] | None = None
) -> tuple[float, Selection] | None:
    """Return the least factor (to 1 %) by which steps must be longer for a set to suffice.

    Accepts that the learner waits: the set is the cheapest of a learner with such steps.

    Args:
        fleet: what can be had.
        job: what is trained.
        periods: publish periods to try; only the job's own if None.

    Returns:
        The factor and the set; None if even MAX_FACTOR does not help.
    """
    return _least_factor(
        lambda factor: select(fleet, replace(job, train_s=job.train_s * factor), periods=periods)
    )


def _with_slower_learner(fleet: Fleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    found = slowed(fleet, job, periods)
    if found is None:
        return None
    factor, selection = found
    idle = 1 - 1 / factor
    text = f"steps of {job.train_s * factor:.3g} s: the learner then waits {idle:.0%} of the time"
    return Remedy(text=text, factor=factor, selection=selection)


def _with_smaller_versions(fleet: Fleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    found = _least_factor(
        lambda f: select(fleet, replace(job, version_bytes=job.version_bytes / f), periods=periods)
    )
    if found is None:
        return None
    factor, selection = found
    text = f"versions of {job.version_bytes / factor / 1e6:.3g} MB in place of "
    text += f"{job.version_bytes / 1e6:.3g} MB"
    return Remedy(text=text, factor=factor, selection=selection)


def _with_wider_uplink(fleet: Fleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    def widened(factor: float) -> Selection | None:
        wide = replace(fleet, uplink_bytes_per_s=fleet.uplink_bytes_per_s * factor)
        return select(wide, job, periods=periods)

    found = _least_factor(widened)
    if found is None:
        return None
    factor, selection = found
    rate = fleet.uplink_bytes_per_s * factor * 8 / 1e6
    text = f"an uplink of {rate:.3g} Mbit/s at the learner"
    return Remedy(text=text, factor=factor, selection=selection)


def _least(attempt: Callable[[int], Selection | None], limit: int) -> int | None:
    """Return the least number from 1 to `limit` with which `attempt` succeeds, by doubling."""
    high = 1
    while attempt(high) is None:
        if high >= limit:
            return None
        high = min(limit, 2 * high)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attempt(middle) is not None else (middle, high)
    return high


def _least_factor(
    attempt: Callable[[float], Selection | None],
) -> tuple[float, Selection] | None:
    """Return the least factor from 1 to MAX_FACTOR with which `attempt` succeeds, to 1 %."""
    high = MAX_FACTOR
    selection = attempt(high)
    if selection is None:
        return None
    low = 1.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        found = attempt(middle)
        if found is None:
            low = middle
        else:
            high, selection = middle, found
    return high, selection
