"""How fast a plan is, and how fast any plan could be.

Bound (Kumar and Ross 2006; Mundinger et al. 2008): every receiver gets everything, and every byte
that is received was sent by someone, so no plan gives all N receivers more than

    r* = min(u0, min d, (u0 + sum u) / N)

A plan is m trees, one for each stripe, every receiver in all of them. A node's uplink is shared
equally by all the children that it serves, in whatever stripe. So a stripe reaches a node at

    rate(node) = min(rate(parent), uplink(parent) / children(parent), downlink(node) / m)

and its first chunk when the parent has it and has sent it to all its children:

    lag(node) = lag(parent) + children(parent) * chunk / uplink(parent) + round trip / 2 + work

Then S/m - chunk bytes follow at that rate. With equal uplinks these are the closed formulas for
the star (N S/u), the chain (S/u + (N-1)(c/u + L) + L) and m stripes (S/u + depth (m c/u + L)).
Connections are taken to be warm: they are kept from version to version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo.weights.topology.sites import Sites

HOP_WORK_S = 0.0005
"""What a node does with a chunk before it can go on: store, hash, one turn of the loop."""

Trees = Sequence[Sequence[int]]
"""For each stripe the parent of each node by number; the learner's, at 0, is -1."""


@dataclass(frozen=True, slots=True)
class PlanThroughput:
    """What to expect of a plan."""

    predicted_s: float
    """Until the last receiver has everything, apart from stragglers."""
    rate_bytes_per_s: float
    """What the slowest receiver gets that is no straggler."""
    learner_copies: float
    """How often the payload leaves the learner."""
    egress_gb_price: float
    """Price of the bytes that change regions, for each GB of payload."""
    crossings: float
    """How often the payload goes from one region to another."""


def fluid_rate(uplink: float, uplinks: Sequence[float], downlinks: Sequence[float]) -> float:
    """Return the bound r*.

    Args:
        uplink: the learner's.
        uplinks: the receivers', 0 for those that cannot serve.
        downlinks: the receivers'.
    """
    total = uplink + math.fsum(uplinks)
    return min(uplink, min(downlinks), total / len(uplinks))


def order(parents: Sequence[int]) -> list[int]:
    """Return the nodes that hang from the learner, each after its parent, nearest first."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    found = [0]
    for node in found:
        found += children[node]
    return found


def num_children(trees: Trees) -> list[int]:
    """Return how many children each node serves, over all stripes."""
    counts = [0] * len(trees[0])
    for parents in trees:
        for parent in parents:
            if parent >= 0:
                counts[parent] += 1
    return counts


def throughput_of(
    fleet: Sites, trees: Trees, *, payload_bytes: int, chunk_bytes: int
) -> PlanThroughput:
    """Return time, rate and price of a plan."""
    stripe_bytes = payload_bytes / len(trees)
    first_bytes = min(float(chunk_bytes), stripe_bytes)
    counts = num_children(trees)
    serve_s = [
        count * first_bytes / uplink if count and uplink else 0.0
        for count, uplink in zip(counts, fleet.uplinks, strict=True)
    ]
    last_s, slowest = 0.0, math.inf
    num_crossings, price = 0, 0.0
    for parents, rates in zip(trees, _stripe_rates(fleet, trees), strict=True):
        lags = [0.0] * len(parents)
        for node in order(parents)[1:]:
            parent = parents[node]
            lags[node] = lags[parent] + serve_s[parent] + fleet.rtt_s(parent, node) / 2 + HOP_WORK_S
            if fleet.is_crossing(parent, node):
                num_crossings += 1
                price += fleet.prices[parent]
            if node in fleet.stragglers:
                continue
            rest_s = (stripe_bytes - first_bytes) / rates[node] if rates[node] else math.inf
            last_s, slowest = max(last_s, lags[node] + rest_s), min(slowest, rates[node])
    return PlanThroughput(
        predicted_s=last_s,
        rate_bytes_per_s=len(trees) * slowest if slowest < math.inf else 0.0,
        learner_copies=counts[0] / len(trees),
        egress_gb_price=price / len(trees),
        crossings=num_crossings / len(trees),
    )


def _stripe_rates(fleet: Sites, trees: Trees) -> list[list[float]]:
    shares = [
        uplink / count if count else math.inf
        for uplink, count in zip(fleet.uplinks, num_children(trees), strict=True)
    ]
    found = []
    for parents in trees:
        rates = [0.0] * len(parents)
        rates[0] = math.inf
        for node in order(parents)[1:]:
            parent = parents[node]
            rates[node] = min(rates[parent], shares[parent], fleet.downlinks[node] / len(trees))
        found.append(rates)
    return found
