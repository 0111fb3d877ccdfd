"""Cheapest sufficient set of nodes: exactly by HiGHS, else greedily."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from echo.core.units import GIGABYTE
from echo.fleet.job import Job
from echo.fleet.market import Counts, Offer, RentedFleet
from echo.fleet.overlap import is_enough, required_rate, window_s

# --- selection ------------------------------------------------------------------------------------
#
# The rule is convex in the number of nodes: the time of a broadcast is a maximum of linear
# functions, and both the rate that pausing workers need and the time of gathering a batch are
# convex. So the exact optimum is a mixed-integer linear programme (HiGHS) to which tangents are
# added until its answer satisfies the rule itself; without a tangent at the answer it would be too
# optimistic, never too pessimistic. `select_greedily` answers for the sizes where HiGHS takes
# longer than a second.


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


def is_sufficient(fleet: RentedFleet, job: Job, counts: Counts) -> bool:
    """Tell whether these nodes satisfy rule and budget."""
    return fleet.cost_per_h(job, counts) <= job.budget_per_h * (1 + 1e-9) and is_enough(
        job,
        rate=fleet.rate(job, counts),
        broadcast_s=fleet.broadcast_s(job, counts),
        latency_s=fleet.latency_s(job, counts),
    )


def select(
    fleet: RentedFleet, job: Job, *, periods: Iterable[int] | None = None
) -> Selection | None:
    """Return the cheapest sufficient set with the smallest publish period that has one."""
    for period in [job.publish_period] if periods is None else periods:
        tried = replace(job, publish_period=period)
        counts, is_exact = _solve(fleet, tried)
        if counts is not None:
            cost = fleet.cost_per_h(tried, counts)
            return Selection(counts=counts, job=tried, cost_per_h=cost, is_exact=is_exact)
    return None


def _solve(fleet: RentedFleet, job: Job) -> tuple[tuple[int, ...] | None, bool]:
    try:
        return select_exactly(fleet, job, time_limit_s=TIME_LIMIT_S), True
    except OutOfTimeError:
        return select_greedily(fleet, job), False


def select_greedily(fleet: RentedFleet, job: Job) -> tuple[int, ...] | None:
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


def _starts(fleet: RentedFleet, job: Job) -> list[frozenset[int]]:
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
    fleet: RentedFleet, job: Job, allowed: frozenset[int], *, keeps_time: bool
) -> tuple[int, ...] | None:
    """Add nodes, the most rollouts per dollar first, until they suffice; None if they never do."""
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


def _has_time(fleet: RentedFleet, job: Job, counts: Counts) -> bool:
    """Tell whether broadcast and groups would leave time enough if the rate were there."""
    broadcast_s = fleet.broadcast_s(job, counts)
    return is_enough(
        job,
        rate=max(fleet.rate(job, counts), required_rate(job, broadcast_s) * (1 + job.margin)),
        broadcast_s=broadcast_s,
        latency_s=fleet.latency_s(job, counts),
    )


def _by_value(fleet: RentedFleet, job: Job, allowed: frozenset[int]) -> list[int]:
    def dollars_per_rollout(index: int) -> float:
        offer = fleet.offers[index]
        rate = offer.rollouts_per_s(job)
        one = [int(j == index) for j in range(len(fleet.offers))]
        return fleet.cost_per_h(job, one) / rate if rate > 0 else math.inf

    return sorted((j for j in allowed if fleet.offers[j].count), key=dollars_per_rollout)


def _improve(fleet: RentedFleet, job: Job, counts: tuple[int, ...]) -> tuple[int, ...]:
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


def _neighbours(fleet: RentedFleet, counts: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
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


# --- exact choice ---------------------------------------------------------------------------------
#
# Variables, in this order: x_j nodes of each offer, z_j whether an offer is used, r_g whether a
# region's relay is used, t the seconds of a broadcast. Every constraint but one is linear as it
# stands; the convex one (rate against t for pausing workers, gathering time against rate for the
# others) enters as tangents, one per round, until the answer satisfies the rule itself.


MAX_ROUNDS = 60
"""Tangents at most; a handful is usual."""

_Row = npt.NDArray[np.float64]
_OPTIMAL, _INFEASIBLE = 0, 2
_SLACK = 1e-9


class OutOfTimeError(Exception):
    """The solver did not finish within its time."""


def select_exactly(
    fleet: RentedFleet, job: Job, *, time_limit_s: float = 1.0
) -> tuple[int, ...] | None:
    """Return the counts of the cheapest sufficient set; None if there is none.

    Raises:
        OutOfTimeError: if the solver needs longer than `time_limit_s` for one programme.
    """
    if job.train_s <= 0 or not fleet.offers:
        return None
    programme = _Programme(fleet, job)
    for _ in range(MAX_ROUNDS):
        counts = programme.solve(time_limit_s)
        if counts is None:
            return None
        rate, broadcast_s = fleet.rate(job, counts), fleet.broadcast_s(job, counts)
        latency_s = fleet.latency_s(job, counts)
        if is_enough(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s):
            return counts
        programme.add_tangent(rate=rate, broadcast_s=broadcast_s)
    raise OutOfTimeError


@dataclass(slots=True)
class _Rows:
    """Constraints `row @ variables >= bound`."""

    rows: list[_Row] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def add(self, row: _Row, bound: float) -> None:
        # Scaled to a largest coefficient of 1: HiGHS compares with absolute tolerances.
        scale = max(float(np.abs(row).max()), 1e-300)
        self.rows.append(row / scale)
        self.bounds.append(bound / scale)


class _Programme:
    """The programme of one fleet and job, with the tangents found so far."""

    def __init__(self, fleet: RentedFleet, job: Job) -> None:
        self.fleet, self.job = fleet, job
        self.relays = sorted({o.region for o in fleet.offers if fleet.has_relay(o)})
        self.num_offers = len(fleet.offers)
        self.size = 2 * self.num_offers + len(self.relays) + 1
        self.time_index = self.size - 1
        self.rates = np.array([offer.rollouts_per_s(job) for offer in fleet.offers])
        self.costs = self._costs()
        self.constraints = _Rows()
        self._link_variables()
        self._bound_broadcast()
        self.add_tangent(rate=self._least_rate(), broadcast_s=0.0)
        if job.budget_per_h < np.inf:
            self.constraints.add(-self.costs, -job.budget_per_h)

    def solve(self, time_limit_s: float) -> tuple[int, ...] | None:
        """Return the counts of the present optimum; None if there is none."""
        offers, job = self.fleet.offers, self.job
        is_integer = np.ones(self.size)
        is_integer[self.time_index] = 0
        upper = np.ones(self.size)
        upper[: self.num_offers] = [offer.count for offer in offers]
        upper[self.time_index] = job.publish_period * job.train_s * (1 - _SLACK)
        # Imported here: the runtime chooses on small nodes, which do without scipy.
        from scipy.optimize import Bounds, LinearConstraint, milp

        result = milp(
            self.costs,
            integrality=is_integer,
            bounds=Bounds(np.zeros(self.size), upper),
            constraints=LinearConstraint(np.array(self.constraints.rows), self.constraints.bounds),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
        if result.status == _INFEASIBLE:
            return None
        if result.status != _OPTIMAL:
            raise OutOfTimeError
        return tuple(int(value) for value in np.rint(result.x[: self.num_offers]))

    def add_tangent(self, *, rate: float, broadcast_s: float) -> None:
        """Add the tangent of the convex constraint at one point."""
        job, batch = self.job, self.job.rollouts_per_step
        row = self._row()
        row[: self.num_offers] = self.rates
        if job.has_pausing_workers:
            # rate >= f(t) = margin * kappa R / (kappa T - t), f' = f / (kappa T - t)
            left_s = job.publish_period * job.train_s - broadcast_s
            needed = required_rate(job, broadcast_s) * (1 + job.margin)
            slope = needed / left_s
            row[self.time_index] = -slope
            self.constraints.add(row, needed - slope * broadcast_s)
            return
        self.constraints.add(row, self._least_rate())
        # t + latency_j + R / rate <= window, R / rate >= 2 R / rate_0 - R / rate_0^2 * rate
        slope = batch / rate**2
        for index, offer in enumerate(self.fleet.offers):
            window = self._row()
            window[self.time_index] = -1
            window[: self.num_offers] = slope * self.rates
            window[self.num_offers + index] = -offer.group_latency_s(job)
            self.constraints.add(window, 2 * batch / rate - window_s(job))

    def _least_rate(self) -> float:
        return required_rate(self.job, 0.0) * (1 + self.job.margin)

    def _row(self) -> _Row:
        return np.zeros(self.size)

    def _costs(self) -> _Row:
        """$ per hour of one unit of each variable; adds up to Fleet.cost_per_h."""
        fleet, job, row = self.fleet, self.job, self._row()
        publications_per_h = 3600 / (job.publish_period * job.train_s)
        gb_per_h = job.version_bytes / GIGABYTE * publications_per_h
        upload_gb = 3600 * job.completion_tokens * job.upload_bytes_per_token / GIGABYTE
        for index, offer in enumerate(fleet.offers):
            row[index] = offer.price_per_h + offer.price_per_gb * (
                gb_per_h + upload_gb * self.rates[index]
            )
            if not fleet.has_relay(offer):
                place = self.num_offers + index if offer.can_listen else index
                row[place] += fleet.region_of(offer).price_per_gb * gb_per_h
        for index, name in enumerate(self.relays):
            region = fleet.regions[name]
            price = region.relay_price_per_h + region.price_per_gb * gb_per_h
            row[2 * self.num_offers + index] = price
        return row

    def _link_variables(self) -> None:
        """An offer is used if it has nodes, and so is its region's relay."""
        for index, offer in enumerate(self.fleet.offers):
            has_nodes = self._row()
            has_nodes[self.num_offers + index], has_nodes[index] = offer.count, -1
            self.constraints.add(has_nodes, 0)
            is_used = self._row()
            is_used[index], is_used[self.num_offers + index] = 1, -1
            self.constraints.add(is_used, 0)
            if self.fleet.has_relay(offer):
                relay = self._row()
                relay[2 * self.num_offers + self.relays.index(offer.region)] = 1
                relay[self.num_offers + index] = -1
                self.constraints.add(relay, 0)

    def _bound_broadcast(self) -> None:
        """The broadcast lasts at least as long as each offer in use needs, link by link."""
        job, fleet = self.job, self.fleet
        for index, offer in enumerate(fleet.offers):
            link = fleet.link_bytes_per_s(offer)
            per_hop = job.chunk_bytes / link
            shared = [
                self._row(),
                self._learner_streams() * (job.version_bytes / fleet.uplink_bytes_per_s),
            ]
            fixed = [job.version_bytes / link, 0.0]
            relay_rate = fleet.region_of(offer).relay_bytes_per_s
            if relay_rate is not None:
                shared.append(self._relay_streams(offer) * (job.version_bytes / relay_rate))
                fixed.append(0.0)
            for seconds, constant in zip(shared, fixed, strict=True):
                if offer.can_listen:
                    seconds[index] += per_hop
                hops = fleet.has_relay(offer) - int(offer.can_listen)
                constant += fleet.region_of(offer).latency_s + hops * per_hop
                # Void unless the offer is used: then `most` takes everything back.
                most = max(0.0, constant + float(np.abs(seconds) @ self._most()))
                row = -seconds
                row[self.time_index] += 1
                row[self.num_offers + index] -= most
                self.constraints.add(row, constant - most)

    def _most(self) -> _Row:
        most = np.ones(self.size)
        most[: self.num_offers] = [offer.count for offer in self.fleet.offers]
        most[self.time_index] = 0
        return most

    def _learner_streams(self) -> _Row:
        row = self._row()
        row[2 * self.num_offers : self.time_index] = 1
        for index, offer in enumerate(self.fleet.offers):
            if not self.fleet.has_relay(offer):
                row[self.num_offers + index if offer.can_listen else index] = 1
        return row

    def _relay_streams(self, of: Offer) -> _Row:
        row = self._row()
        for index, offer in enumerate(self.fleet.offers):
            if offer.region == of.region:
                row[self.num_offers + index if offer.can_listen else index] = 1
        return row
