"""The plan: the fleet to rent, what it leads to, what one change more or less would do.

Where nothing fits, the plan is the list of reasons and the changes that would help, the smallest
first (`echo.planner.remedies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echo.planner.fleet import Counts, Fleet
from echo.planner.job import Job
from echo.planner.overlap import (
    Prediction,
    Resource,
    binding_resource,
    predict,
    required_rate,
    staleness_range,
)
from echo.planner.selection import Selection, select

PARETO_SLOWDOWNS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
"""Steps longer than the learner's own time by these factors make up the Pareto front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a set of active nodes leads to."""

    counts: tuple[int, ...]
    rate: float
    """Rollouts per second."""
    broadcast_s: float
    latency_s: float
    """Seconds of a group on the slowest node."""
    prediction: Prediction
    rent_per_h: float
    """$ per hour for nodes and relays."""
    traffic_per_h: float
    """$ per hour for weights and rollouts, at the predicted pace."""
    learner_per_h: float
    cost_per_step: float
    """$ per optimizer step: learner, nodes and traffic."""
    cost_per_million_tokens: float
    """$ per 10^6 completion tokens trained on."""

    @property
    def cost_per_h(self) -> float:
        """$ per hour in all."""
        return self.rent_per_h + self.traffic_per_h + self.learner_per_h


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What one change does to idle share and cost."""

    change: str
    idle_change: float
    """Difference of idle shares; negative is less waiting."""
    cost_change_per_h: float
    """Difference in $ per hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to rent and what to expect of it."""

    fleet: Fleet
    job: Job
    """With the publish period of the plan."""
    outcome: Outcome
    is_exact: bool
    """Whether the selection is the proven optimum."""
    required_pausing: float
    """Rollouts per second by the reading for workers that pause during a broadcast."""
    required_overlapping: float
    """The same by the reading for workers that generate through it."""
    binding: Resource
    staleness_bounds: tuple[int, int] | None
    """(least S that satisfies the rule, S from which more no longer helps)."""
    unpaced_waste: float
    """Share of rollouts thrown away if no lease held workers back."""
    sensitivities: tuple[Sensitivity, ...]
    front: tuple[Outcome, ...]
    """Cheapest sets by speed, fastest first."""


def make_plan(fleet: Fleet, job: Job, periods: Sequence[int]) -> Plan | None:
    """Return the plan with the cheapest sufficient fleet; None if no fleet is sufficient.

    Args:
        fleet: what can be rented.
        job: what is trained.
        periods: publish periods to try, in order.
    """
    selection = select(fleet, job, periods=periods)
    if selection is None:
        return None
    return describe(fleet, selection)


def describe(fleet: Fleet, selection: Selection) -> Plan:
    """Return a plan from a selection."""
    job, counts = selection.job, selection.counts
    outcome = outcome_of(fleet, job, counts)
    return Plan(
        fleet=fleet,
        job=job,
        outcome=outcome,
        is_exact=selection.is_exact,
        required_pausing=required_rate(job, outcome.broadcast_s, is_pausing=True),
        required_overlapping=required_rate(job, outcome.broadcast_s, is_pausing=False),
        binding=binding_resource(
            job,
            rate=outcome.rate,
            broadcast_s=outcome.broadcast_s,
            latency_s=outcome.latency_s,
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


def outcome_of(fleet: Fleet, job: Job, counts: Counts) -> Outcome:
    """Return what a set of nodes leads to.

    Example: a fleet of $0.68/h, a learner of $2/h, steps of 90 s, no traffic: 2.68 / 40 = $0.067
    per step; with 512 rollouts of 1000 tokens per step $0.131 per million tokens.
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
    return Outcome(
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


def sensitivities(fleet: Fleet, job: Job, counts: Counts) -> tuple[Sensitivity, ...]:
    """Return what one node more or less of each offer, and other single changes, would do."""
    before = outcome_of(fleet, job, counts)
    changed: list[tuple[str, Outcome]] = []
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


def pareto_front(fleet: Fleet, job: Job) -> tuple[Outcome, ...]:
    """Return the cheapest fleets for longer and longer steps: cost per hour against idle share.

    A fleet that keeps a learner busy whose steps are f times as long is the cheapest that sustains
    a step of f * T_train. Sets that cost more and idle more than another are left out.
    """
    found: dict[tuple[int, ...], Outcome] = {}
    for slowdown in PARETO_SLOWDOWNS:
        slower = replace(job, train_s=slowdown * job.train_s)
        selection = select(fleet, slower)
        if selection is not None:
            found[selection.counts] = outcome_of(fleet, job, selection.counts)
    outcomes = sorted(found.values(), key=lambda o: (o.prediction.idle_share, o.cost_per_h))
    front: list[Outcome] = []
    for outcome in outcomes:
        if not front or outcome.cost_per_h < front[-1].cost_per_h - 1e-9:
            front.append(outcome)
    return tuple(front)


def _predict(fleet: Fleet, job: Job, counts: Counts, *, is_paced: bool) -> Prediction:
    lost = sum(
        offer.lost_rollouts_per_s() * count
        for offer, count in zip(fleet.offers, counts, strict=True)
    )
    return predict(
        job,
        rate=fleet.rate(job, counts),
        broadcast_s=fleet.broadcast_s(job, counts),
        latency_s=fleet.latency_s(job, counts),
        lost_per_s=lost,
        is_paced=is_paced,
    )
