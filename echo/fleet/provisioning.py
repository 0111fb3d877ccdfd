"""Finds the fleet to rent for a job, or the reasons why no fleet on offer is sufficient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from echo.fleet.job import Job
from echo.fleet.market import Counts, RentedFleet
from echo.fleet.overlap import (
    MAX_STALENESS,
    Prediction,
    Resource,
    binding_resource,
    predict,
    required_rate,
    staleness_range,
    window_s,
)
from echo.fleet.selection import Selection, select

# --- fleet to rent --------------------------------------------------------------------------------
#
# If no fleet is sufficient, the plan lists the reasons and the changes that would help, the
# smallest first (`refuse`).


PARETO_SLOWDOWNS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
"""Factors by which the learner's step time is multiplied. The Pareto front has one fleet for each
factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The speed and the cost that are predicted for a set of active nodes."""

    counts: tuple[int, ...]
    rate: float
    """Rollouts per second that the nodes finish."""
    broadcast_s: float
    latency_s: float
    """Seconds that the slowest node needs for a group."""
    prediction: Prediction
    rent_per_h: float
    """$ per hour for nodes and relays."""
    traffic_per_h: float
    """$ per hour for sending weights and rollouts, at the predicted speed."""
    learner_per_h: float
    cost_per_step: float
    """$ per optimizer step for learner, nodes and traffic."""
    cost_per_million_tokens: float
    """$ per 10^6 completion tokens on which the learner trains."""

    @property
    def cost_per_h(self) -> float:
        """$ per hour for learner, nodes and traffic."""
        return self.rent_per_h + self.traffic_per_h + self.learner_per_h


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """How one change affects the learner's idle share and the cost."""

    change: str
    idle_change: float
    """Idle share after the change minus idle share before it. Negative if the learner waits
    less."""
    cost_change_per_h: float
    """$ per hour after the change minus $ per hour before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioning:
    """A fleet to rent, with its forecast and its limits."""

    fleet: RentedFleet
    job: Job
    """The job, in which the plan has set the publish period."""
    outcome: Forecast
    gap: float
    """Share of the cost by which another fleet may be cheaper. 0 if this fleet is proven to be the
    cheapest."""
    required_pausing: float
    """Rollouts per second that the provisioning rule requires if workers pause during a broadcast.
    """
    required_overlapping: float
    """Rollouts per second that the provisioning rule requires if workers generate during a
    broadcast."""
    binding: Resource
    staleness_bounds: tuple[int, int] | None
    """The smallest staleness bound that satisfies the provisioning rule, and the largest useful
    bound. None if no bound satisfies the rule."""
    unpaced_waste: float
    """Share of rollouts that would be discarded if leases did not limit the workers to the demand.
    """
    sensitivities: tuple[Sensitivity, ...]
    front: tuple[Forecast, ...]
    """The forecasts of the cheapest fleet for each of several step times, fastest first."""


def provision(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Provisioning | None:
    """Return the plan with the cheapest sufficient fleet; None if no fleet is sufficient."""
    selection = select(fleet, job, periods=periods)
    if selection is None:
        return None
    return describe_fleet(fleet, selection)


def describe_fleet(fleet: RentedFleet, selection: Selection) -> Provisioning:
    """Return the plan for the selected nodes: the forecast, the limits and alternatives."""
    job, counts = selection.job, selection.counts
    outcome = outcome_of(fleet, job, counts)
    return Provisioning(
        fleet=fleet,
        job=job,
        outcome=outcome,
        gap=selection.gap,
        required_pausing=required_rate(job, outcome.broadcast_s, is_pausing=True),
        required_overlapping=required_rate(job, outcome.broadcast_s, is_pausing=False),
        binding=binding_resource(
            job,
            rate=outcome.rate,
            broadcast_s=outcome.broadcast_s,
            latency_s=fleet.mean_latency_s(job, counts),
        ),
        staleness_bounds=staleness_range(
            job,
            rate=outcome.rate,
            broadcast_s=outcome.broadcast_s,
            latency_s=outcome.latency_s,
        ),
        unpaced_waste=_predict(fleet, job, counts, is_paced=False).wasted_share,
        sensitivities=sensitivities(fleet, job, counts),
        front=pareto_front(fleet, job),
    )


def outcome_of(fleet: RentedFleet, job: Job, counts: Counts) -> Forecast:
    """Predict the speed and the cost of a set of nodes.

    Example: a fleet for $0.68/h, a learner for $2/h, 40 steps per hour, no traffic. A step costs
    2.68 / 40 = $0.067. With 512 rollouts of 1000 tokens per step, a million tokens cost $0.131.
    """
    prediction = _predict(fleet, job, counts, is_paced=True)
    steps_per_h = 3600 / prediction.step_s
    rate = fleet.rate(job, counts)
    demand_share = min(1.0, job.rollouts_per_step / prediction.step_s / rate) if rate > 0 else 0.0
    traffic = (
        fleet.publication_cost(job, counts) * steps_per_h / job.publish_period
        + 3600 * fleet.upload_cost_per_s(job, counts) * demand_share
    )
    rent = fleet.rent_per_h(counts)
    total = rent + traffic + job.learner_price_per_h
    cost_per_step = total / steps_per_h if steps_per_h > 0 else float("inf")
    return Forecast(
        counts=tuple(counts),
        rate=rate,
        broadcast_s=fleet.broadcast_s(job, counts),
        latency_s=fleet.latency_s(job, counts),
        prediction=prediction,
        rent_per_h=rent,
        traffic_per_h=traffic,
        learner_per_h=job.learner_price_per_h,
        cost_per_step=cost_per_step,
        cost_per_million_tokens=cost_per_step / job.tokens_per_step * 1e6,
    )


def sensitivities(fleet: RentedFleet, job: Job, counts: Counts) -> tuple[Sensitivity, ...]:
    """Return how each of several changes alone would affect the idle share and the cost.

    The changes are: one more or one fewer node of each offer, a staleness bound higher or lower by
    one, a faster uplink, smaller versions, and a faster learner.
    """
    before = outcome_of(fleet, job, counts)
    changed: list[tuple[str, Forecast]] = []
    for index, offer in enumerate(fleet.offers):
        for step, words in ((1, "one more"), (-1, "one fewer")):
            count = counts[index] + step
            if 0 <= count <= offer.count:
                others = [*counts[:index], count, *counts[index + 1 :]]
                what = f"{words} {offer.name} in {offer.region}"
                changed.append((what, outcome_of(fleet, job, others)))
    one_more = replace(job, max_staleness=job.max_staleness + 1)
    changed.append((f"S = {one_more.max_staleness}", outcome_of(fleet, one_more, counts)))
    if job.max_staleness >= job.publish_period:
        one_less = replace(job, max_staleness=job.max_staleness - 1)
        changed.append((f"S = {one_less.max_staleness}", outcome_of(fleet, one_less, counts)))
    wide = replace(fleet, uplink_bytes_per_s=2 * fleet.uplink_bytes_per_s)
    changed.append(("twice the learner's uplink", outcome_of(wide, job, counts)))
    small = replace(job, version_bytes=job.version_bytes / 2)
    changed.append(("versions of half the size", outcome_of(fleet, small, counts)))
    fast = replace(job, train_s=0.9 * job.train_s)
    changed.append(("a learner faster by a tenth", outcome_of(fleet, fast, counts)))
    return tuple(
        Sensitivity(
            change=change,
            idle_change=after.prediction.idle_share - before.prediction.idle_share,
            cost_change_per_h=after.cost_per_h - before.cost_per_h,
        )
        for change, after in changed
    )


def pareto_front(fleet: RentedFleet, job: Job) -> tuple[Forecast, ...]:
    """Return the forecast of the cheapest fleet for each of several step times, fastest first.

    For each factor in PARETO_SLOWDOWNS, the cheapest fleet for steps of factor * train_s is
    computed. A fleet is left out if another fleet is at least as cheap and has at most the same
    idle share.
    """
    found: dict[tuple[int, ...], Forecast] = {}
    for slowdown in PARETO_SLOWDOWNS:
        slower = replace(job, train_s=slowdown * job.train_s)
        selection = select(fleet, slower)
        if selection is not None:
            found[selection.counts] = outcome_of(fleet, job, selection.counts)
    outcomes = sorted(found.values(), key=lambda o: (o.prediction.idle_share, o.cost_per_h))
    front: list[Forecast] = []
    for outcome in outcomes:
        if not front or outcome.cost_per_h < front[-1].cost_per_h - 1e-9:
            front.append(outcome)
    return tuple(front)


def _predict(fleet: RentedFleet, job: Job, counts: Counts, *, is_paced: bool) -> Prediction:
    lost = sum(
        offer.lost_rollouts_per_s() * count
        for offer, count in zip(fleet.offers, counts, strict=True)
    )
    return predict(
        job,
        rate=fleet.rate(job, counts),
        broadcast_s=fleet.broadcast_s(job, counts),
        latency_s=fleet.mean_latency_s(job, counts),
        nodes=fleet.speeds(job, counts),
        lost_per_s=lost,
        is_paced=is_paced,
    )


# --- refusal --------------------------------------------------------------------------------------


MAX_FACTOR = 64.0
"""Largest factor by which a proposed remedy changes a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of the request that makes a sufficient fleet possible."""

    text: str
    factor: float
    """The size of the change, at least 1: the new value divided by the old value, or the old value
    divided by the new value."""
    selection: Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The reasons why no fleet on offer is sufficient, and remedies."""

    reasons: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    """The single changes that would help, smallest first. Empty if no change would help."""


def refuse(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Refusal:
    """Return the reasons why no fleet is sufficient, and the single changes that would help."""
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


def _reasons(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> list[str]:
    """Return one sentence for each condition that these offers cannot satisfy."""
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


def _without_budget(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Selection | None:
    unbounded = replace(job, budget_per_h=math.inf)
    found = [select(fleet, unbounded, periods=[period]) for period in periods]
    return min(
        (selection for selection in found if selection is not None),
        key=lambda selection: selection.cost_per_h,
        default=None,
    )


def _with_more_nodes(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    """Return the remedy that adds the fewest nodes to one offer.

    Return None if more nodes do not help.
    """
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


def _with_more_budget(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    selection = _without_budget(fleet, job, periods)
    if selection is None:
        return None
    return Remedy(
        text=f"a budget of ${selection.cost_per_h:.2f}/h in place of ${job.budget_per_h:.2f}/h",
        factor=selection.cost_per_h / job.budget_per_h,
        selection=selection,
    )


def _with_more_staleness(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    for bound in range(job.max_staleness + 1, MAX_STALENESS + 1):
        selection = select(fleet, replace(job, max_staleness=bound), periods=periods)
        if selection is not None:
            return Remedy(
                text=f"max_staleness {bound} in place of {job.max_staleness}",
                factor=(bound + 1) / (job.max_staleness + 1),
                selection=selection,
            )
    return None


def _with_other_period(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    others = [k for k in range(1, job.max_staleness + 2) if k not in periods]
    selection = select(fleet, job, periods=others)
    if selection is None:
        return None
    old, new = max(periods), selection.job.publish_period
    text = f"publish_period {new} in place of {old}"
    return Remedy(text=text, factor=max(old / new, new / old), selection=selection)


def slowed(
    fleet: RentedFleet, job: Job, periods: Sequence[int] | None = None
) -> tuple[float, Selection] | None:
    """Return the smallest factor by which steps must lengthen, so that a fleet is sufficient.

    The factor is exact to 1 %. In each longer step, the learner waits for a part of the time.

    Returns:
        The factor, and the cheapest fleet for this step time; None if the factor would exceed
        MAX_FACTOR.
    """
    return _least_factor(
        lambda factor: select(fleet, replace(job, train_s=job.train_s * factor), periods=periods)
    )


def _with_slower_learner(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    def words(factor: float) -> str:
        step_s, idle = job.train_s * factor, 1 - 1 / factor
        return f"steps of {step_s:.3g} s: the learner then waits {idle:.0%} of the time"

    return _remedy(slowed(fleet, job, periods), words)


def _with_smaller_versions(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    def words(factor: float) -> str:
        new, old = job.version_bytes / factor / 1e6, job.version_bytes / 1e6
        return f"versions of {new:.3g} MB in place of {old:.3g} MB"

    found = _least_factor(
        lambda f: select(fleet, replace(job, version_bytes=job.version_bytes / f), periods=periods)
    )
    return _remedy(found, words)


def _with_wider_uplink(fleet: RentedFleet, job: Job, periods: Sequence[int]) -> Remedy | None:
    uplink = fleet.uplink_bytes_per_s
    found = _least_factor(
        lambda f: select(replace(fleet, uplink_bytes_per_s=uplink * f), job, periods=periods)
    )
    mbit = uplink * 8 / 1e6
    return _remedy(found, lambda f: f"an uplink of {mbit * f:.3g} Mbit/s at the learner")


def _remedy(found: tuple[float, Selection] | None, words: Callable[[float], str]) -> Remedy | None:
    if found is None:
        return None
    factor, selection = found
    return Remedy(text=words(factor), factor=factor, selection=selection)


def _least(attempt: Callable[[int], Selection | None], limit: int) -> int | None:
    """Return the smallest number from 1 to `limit` with which `attempt` succeeds.

    If no number succeeds, return None. The search doubles the number and then bisects.
    """
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
    """Return the smallest factor with which `attempt` succeeds, and the selection for this factor.

    The factor is exact to 1 %. Factors from 1 to MAX_FACTOR are tried. If all fail, the result is
    None.
    """
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
