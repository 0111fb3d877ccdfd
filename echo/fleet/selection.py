"""Finds the cheapest set of nodes that is sufficient. The search is bounded.

The provisioning rule (overlap.py) is convex in the numbers of nodes: the broadcast time is a
maximum of linear functions, and the required rate and the time of a batch are convex. So a
mixed-integer linear programme (HiGHS) finds the optimum. Tangents are added as constraints until
the programme's answer satisfies the rule. A tangent never excludes a sufficient set. So the answer
never costs more than the cheapest sufficient set, even while too few tangents make it insufficient.

HiGHS searches a tree, and stops after MAX_NODES nodes of the tree. If it stops early, the
sufficient set that is found may not be the cheapest. `gap` bounds the possible saving.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from echo.core.errors import EchoError
from echo.core.units import GIGABYTE
from echo.fleet.job import Job
from echo.fleet.market import Counts, Offer, RentedFleet
from echo.fleet.overlap import is_enough, required_rate, window_s

MAX_NODES = 1000
"""Largest number of nodes in the search tree of one search. Most fleets need ten nodes. 40 similar
offers reach the limit after 2 s."""
MAX_ROUNDS = 60
"""Largest number of rounds. A round solves the programme and adds a tangent. Most searches need few
rounds."""


class SearchLimitError(EchoError):
    """The search ended before it found a sufficient set or proved that there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The nodes to rent, and the publish period with which to run them."""

    counts: tuple[int, ...]
    job: Job
    cost_per_h: float
    """$ per hour for nodes and traffic."""
    gap: float
    """Share of the cost by which another set may be cheaper. 0 if this set is proven to be the
    cheapest."""


def is_sufficient(fleet: RentedFleet, job: Job, counts: Counts) -> bool:
    """Return whether these nodes satisfy the provisioning rule and the budget."""
    return fleet.cost_per_h(job, counts) <= job.budget_per_h * (1 + 1e-9) and is_enough(
        job,
        rate=fleet.rate(job, counts),
        broadcast_s=fleet.broadcast_s(job, counts),
        latency_s=fleet.latency_s(job, counts),
    )


def select(
    fleet: RentedFleet, job: Job, *, periods: Iterable[int] | None = None
) -> Selection | None:
    """Return the cheapest sufficient set of nodes.

    Use the first publish period that has such a set. The periods are tried in order. If no period
    has a sufficient set, the result is None.
    """
    for period in [job.publish_period] if periods is None else periods:
        tried = replace(job, publish_period=period)
        found = _search(fleet, tried)
        if found is not None:
            counts, gap = found
            cost = fleet.cost_per_h(tried, counts)
            return Selection(counts=counts, job=tried, cost_per_h=cost, gap=gap)
    return None


# --- the programme --------------------------------------------------------------------------------
# The variables, in this order: x_j nodes of each offer, z_j whether an offer is used, r_g whether a
# region's relay is used, t the seconds of a broadcast. All constraints except one are linear. The
# convex constraint is the rate against t for pausing workers. For the others it is the time to
# gather a batch against the rate. It enters as tangents, one per round, until the answer satisfies
# the rule itself.


_Row = npt.NDArray[np.float64]
_OPTIMAL, _INFEASIBLE = 0, 2  # values of `status` in the result of scipy's `milp`
_SLACK = 1e-9
"""Share of the publish period that a broadcast at least leaves for pausing workers. With a share of
0, the required rate would be infinite.
"""


def _search(fleet: RentedFleet, job: Job) -> tuple[tuple[int, ...], float] | None:
    """For the job's publish period, return the cheapest sufficient set of nodes, and the gap.

    The set is the number of nodes of each offer. The gap is the share of the cost by which another
    set may be cheaper. If no set is sufficient, the result is None.
    """
    if job.train_s <= 0 or not fleet.offers:
        return None
    programme = _Programme(fleet, job)
    for _ in range(MAX_ROUNDS):
        found = programme.solve()
        if found is None:
            return None
        counts, _ = found
        rate, broadcast_s = fleet.rate(job, counts), fleet.broadcast_s(job, counts)
        latency_s = fleet.latency_s(job, counts)
        if is_enough(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s):
            return found
        programme.add_tangent(rate=rate, broadcast_s=broadcast_s)
    raise SearchLimitError(
        f"no set of nodes was found that satisfies the rule, and no proof that there is none: "
        f"{MAX_ROUNDS} rounds of the search were not enough; put alike offers together"
    )


@dataclass(slots=True)
class _Rows:
    """Linear constraints. Each has the form `row @ variables >= bound`."""

    rows: list[_Row] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def add(self, row: _Row, bound: float) -> None:
        # Scale the largest coefficient to 1, because HiGHS compares with absolute tolerances.
        scale = max(float(np.abs(row).max()), 1e-300)
        self.rows.append(row / scale)
        self.bounds.append(bound / scale)


class _Programme:
    """The mixed-integer linear programme of a fleet and a job, together with its tangents."""

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

    def solve(self) -> tuple[tuple[int, ...], float] | None:
        """Return the best number of nodes of each offer, and the gap.

        Only the present tangents apply. The gap is the share of the cost by which another solution
        may be cheaper. If the constraints cannot be satisfied, the result is None.
        """
        offers, job = self.fleet.offers, self.job
        is_integer = np.ones(self.size)
        is_integer[self.time_index] = 0
        upper = np.ones(self.size)
        upper[: self.num_offers] = [offer.count for offer in offers]
        upper[self.time_index] = job.publish_period * job.train_s * (1 - _SLACK)
        # Imported here, because only a machine that makes a plan needs scipy.
        from scipy.optimize import Bounds, LinearConstraint, milp

        result = milp(
            self.costs,
            integrality=is_integer,
            bounds=Bounds(np.zeros(self.size), upper),
            constraints=LinearConstraint(np.array(self.constraints.rows), self.constraints.bounds),
            options={"node_limit": MAX_NODES, "mip_rel_gap": 0.0},
        )
        # HiGHS reports "unbounded or infeasible" as one status; here it means infeasible, since no
        # variable is unbounded.
        if result.status == _INFEASIBLE or "infeasible" in result.message:
            return None
        if result.x is None:
            raise SearchLimitError(
                f"no set of nodes was found that satisfies the rule, and no proof that there is "
                f"none, among {len(offers)} offers ({result.message}); put alike offers together"
            )
        counts = tuple(int(value) for value in np.rint(result.x[: self.num_offers]))
        return counts, 0.0 if result.status == _OPTIMAL else float(result.mip_gap)

    def add_tangent(self, *, rate: float, broadcast_s: float) -> None:
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
        """Return what one unit of each variable costs, in $ per hour.

        RentedFleet.cost_per_h is the sum of cost times value over all variables.
        """
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
        """Require that an offer counts as used exactly if it has nodes.

        The relay of a used offer's region counts as used, too.
        """
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
                # If the offer is not used, `most` makes the constraint void.
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
