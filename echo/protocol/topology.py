"""Who gets weights from whom: pure planning over what is known of the nodes.

`plan_topology` builds several plans (`topology_trees.py`), predicts how long each would take for
this payload (`topology_fluid.py`), and takes the thriftiest of those that are about as fast as the
fastest: fewest bytes for money, fewest copies from the learner, fewest stripes. So the learner
sends each stripe once unless a second copy saves clearly more time.

Before that come regions: of the plans that take at most half as long again as the fastest only
those with the fewest links between regions count. So a version enters each region once, unless that
would cost much more time than the traffic is worth, as where nobody of a region can serve others.

A plan has one tree for each stripe (stripe s is the chunks whose index is s modulo the number of
stripes), and names for each node and stripe its parents in order of preference: the parent in the
tree, then stand-ins, the learner always last, so that any node can fall back without asking
(`topology_backups.py`, which also says why that makes no circle).

A plan in force is patched rather than replaced (`topology_keep.py`) until another one would save a
stated share of the time: rates that are measured again and again must not move anybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from echo.protocol.topology_backups import Parents, with_backups
from echo.protocol.topology_fleet import Fleet, survey
from echo.protocol.topology_fleet import Site as Site
from echo.protocol.topology_fluid import Forecast, Trees, forecast, num_children
from echo.protocol.topology_keep import patched
from echo.protocol.topology_trees import REGION_COST, chain, star, stripe_trees
from echo.wire.messages import LEARNER_ID

Kind = Literal["chain", "tree", "stripes", "star"]

THRIFT = 0.05
"""Plans within this share of the fastest count as equally fast."""

INSIGNIFICANT_S = 0.25
"""And so do plans that take so little more, as for small versions: that is nothing to a step."""

STRIPES = (1, 2, 4, 8, 16)
"""Numbers of stripes that are considered, up to the caller's bound."""

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Parts of the best rate to build for: flatter trees are faster for what is small."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was considered."""

    kind: Kind
    num_stripes: int
    predicted_s: float
    rate_bytes_per_s: float
    """What the slowest receiver would get."""
    learner_copies: float
    """How often the payload would leave the learner."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A plan: for each node and stripe the parents in order of preference."""

    kind: Kind
    num_stripes: int
    parents: Parents
    """Node id -> for each stripe -> ((node id, address), ...), the learner last."""
    predicted_s: float
    """Until the last node has it all, apart from those whose own downlink is far too slow."""
    rate_bytes_per_s: float
    """What the slowest receiver should get: one that gets clearly less is limited by itself."""
    candidates: tuple[Candidate, ...]
    """What was considered, fastest first."""


def plan_topology(
    sites: Sequence[Site],
    *,
    learner: Site,
    payload_bytes: int,
    chunk_bytes: int,
    rtt_s: Callable[[str, str], float],
    previous: Topology | None = None,
    min_gain: float = 0.1,
    max_stripes: int = 4,
) -> Topology:
    """Return the plan for a payload.

    Args:
        sites: every live node except the learner, in a stable order (that of joining).
        learner: the learner; its address may be empty or None for "as you reached it".
        payload_bytes: what one version takes on the wire, typically.
        chunk_bytes: unit of forwarding.
        rtt_s: (node id, node id) -> seconds of the round trip, an assumption where unknown.
        previous: the plan in force; kept, patched for nodes that came and went, while no other is
            clearly better, since every change of parents costs connections.
        min_gain: share of the predicted time that a new plan must save.
        max_stripes: most stripes to consider.
    """
    fleet = survey(sites, learner=learner, rtt_s=rtt_s)
    if not sites:
        return Topology("star", 1, {}, 0.0, fleet.uplinks[0], ())
    planner = _Planner(fleet, payload_bytes, chunk_bytes, max_stripes)
    kept = None if previous is None else planner.keep(previous)
    if kept is not None and kept.saves_less(payload_bytes / fleet.best_rate, min_gain):
        plans = [kept]
    else:
        plans = planner.compare()
        if kept is not None and kept.saves_less(_by_region(plans)[0].seconds, min_gain):
            plans = [kept]
    chosen = _thriftiest(_by_region(plans))
    return Topology(
        kind=chosen.kind,
        num_stripes=len(chosen.trees),
        parents=with_backups(
            fleet, chosen.trees, previous={} if previous is None else previous.parents
        ),
        predicted_s=chosen.seconds,
        rate_bytes_per_s=chosen.forecast.rate_bytes_per_s,
        candidates=tuple(plan.candidate for plan in plans),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    kind: Kind
    trees: Trees
    forecast: Forecast

    @property
    def seconds(self) -> float:
        return self.forecast.predicted_s

    @property
    def cost(self) -> tuple[float, ...]:
        """What decides among plans that are equally fast."""
        found = self.forecast
        price = round(found.egress_gb_price, 9)
        busiest = max(num_children(self.trees))
        copies, crossings = found.learner_copies, found.crossings
        return price, copies, crossings, len(self.trees), busiest, self.seconds

    @property
    def candidate(self) -> Candidate:
        rate, copies = self.forecast.rate_bytes_per_s, self.forecast.learner_copies
        return Candidate(self.kind, len(self.trees), self.seconds, rate, copies)

    def saves_less(self, other_s: float, min_gain: float) -> bool:
        """Return whether a plan of that duration would not be worth the change."""
        return self.seconds * (1 - min_gain) <= other_s


def _by_region(plans: Sequence[_Plan]) -> list[_Plan]:
    """Return the plans with the fewest links between regions that take no more than so much longer.

    Args:
        plans: the fastest first; so are those that are returned.
    """
    enough_s = plans[0].seconds + max(REGION_COST * plans[0].seconds, INSIGNIFICANT_S)
    near = [plan for plan in plans if plan.seconds <= enough_s]
    fewest = min(plan.forecast.crossings for plan in near)
    return [plan for plan in near if plan.forecast.crossings <= fewest + 1e-9]


def _thriftiest(plans: Sequence[_Plan]) -> _Plan:
    enough_s = max((1 + THRIFT) * plans[0].seconds, plans[0].seconds + INSIGNIFICANT_S)
    return min((plan for plan in plans if plan.seconds <= enough_s), key=lambda plan: plan.cost)


class _Planner:
    """Builds and judges plans for one fleet and payload."""

    def __init__(
        self, fleet: Fleet, payload_bytes: int, chunk_bytes: int, max_stripes: int
    ) -> None:
        """Bound the stripes: none may be without a chunk, or have no other node to go through."""
        self._fleet, self._payload_bytes, self._chunk_bytes = fleet, payload_bytes, chunk_bytes
        most = min(max_stripes, fleet.num_receivers, math.ceil(payload_bytes / chunk_bytes))
        self._stripes = [m for m in STRIPES if m <= max(1, most)]
        self._has_regions = len(set(fleet.regions)) > 1

    def keep(self, previous: Topology) -> _Plan | None:
        """Return the plan in force, patched for who came and went."""
        trees = patched(
            self._fleet,
            previous.parents,
            num_stripes=previous.num_stripes,
            rate_bytes_per_s=previous.rate_bytes_per_s,
        )
        return None if trees is None else self._judge(previous.kind, trees)

    def compare(self) -> list[_Plan]:
        """Return all candidates, the fastest first."""
        plans = [self._judge("star", star(self._fleet))]
        line = chain(self._fleet)
        if line is not None:
            plans.append(self._judge("chain", line))
        for is_by_region in (False, True) if self._has_regions else (False,):
            best_s = math.inf if is_by_region else min(plan.seconds for plan in plans)
            for num_stripes in self._stripes:
                for does_spare_learner in (True, False):
                    found = self._striped(num_stripes, does_spare_learner, is_by_region, best_s)
                    plans += found
                    best_s = min([best_s, *(plan.seconds for plan in found)])
        return sorted(plans, key=lambda plan: plan.seconds)

    def _striped(
        self, num_stripes: int, does_spare_learner: bool, is_by_region: bool, best_s: float
    ) -> list[_Plan]:
        """Return m trees at the best rate, and at lower ones while those could be the fastest."""
        kind: Kind = "tree" if num_stripes == 1 else "stripes"
        plans: list[_Plan] = []
        for share in SHARES:
            trees = stripe_trees(
                self._fleet,
                num_stripes,
                does_spare_learner=does_spare_learner,
                is_by_region=is_by_region,
                share=share,
            )
            if trees is None:
                break
            plan = self._judge(kind, trees)
            plans.append(plan)
            best_s = min(best_s, plan.seconds)
            next_s = 2 * self._payload_bytes / max(plan.forecast.rate_bytes_per_s, 1.0)
            if next_s >= best_s:
                break
        return plans

    def _judge(self, kind: Kind, trees: Trees) -> _Plan:
        found = forecast(
            self._fleet,
            trees,
            payload_bytes=self._payload_bytes,
            chunk_bytes=self._chunk_bytes,
        )
        return _Plan(kind, trees, found)


def plan_parents(
    sites: Sequence[Site], *, learner_address: str
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return each node's parents, most wanted first, in one chain: relays, workers, then leaves.

    Args:
        sites: every live node except the learner, in a stable order (that of joining).
        learner_address: the learner's advertised address; empty for "as you reached it".
    """
    learner = (LEARNER_ID, learner_address)
    line = [site for site in sites if site.address is not None and site.role == "relay"]
    line += [site for site in sites if site.address is not None and site.role != "relay"]
    hops = [(site.node_id, site.address or "") for site in line]
    parents = {}
    for index, site in enumerate(line):
        parents[site.node_id] = (*reversed(hops[:index]), learner)
    leaves = [site for site in sites if site.address is None]
    for number, site in enumerate(leaves):
        last = len(hops) - number % len(hops) if hops else 0
        parents[site.node_id] = (*reversed(hops[:last]), learner)
    return parents
