"""Throughput of a plan, and the bound for any plan.

Bound (Kumar and Ross 2006; Mundinger et al. 2008): every receiver gets the whole version, and every
received byte was sent by a node, so no plan gives all N receivers more than

    r* = min(u0, min d, (u0 + sum u) / N)

A plan is one tree. A node's uplink is shared equally by its children. So a version reaches a node
at

    rate(node) = min(rate(parent), uplink(parent) / children(parent), downlink(node))

and its first chunk when the parent has it and has sent it to all its children:

    lag(node) = lag(parent) + children(parent) * chunk / uplink(parent) + round trip / 2 + work

Then S - chunk bytes follow at that rate. With equal uplinks these are the closed formulas for the
star (N S/u) and the chain (S/u + (N-1)(c/u + L) + L). Connections are taken to be warm: they are
kept from version to version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo.weights.topology.sites import Sites

HOP_WORK_S = 0.0005
"""Time between arrival and forwarding of a chunk: hash, store, one turn of the loop."""

Tree = Sequence[int]
"""The parent of each node by number; the learner's, at 0, is -1."""


@dataclass(frozen=True, slots=True)
class PlanThroughput:
    """Forecast of a plan."""

    predicted_s: float
    """Time until the last receiver, stragglers apart, has the version."""
    rate_bytes_per_s: float
    """Rate of the slowest receiver that is no straggler."""
    learner_copies: int
    """Copies of the payload that the learner sends."""
    egress_gb_price: float
    """Price of the bytes that change regions, for each GB of payload."""
    crossings: int
    """Copies of the payload that are sent from one region to another."""


def fluid_rate(uplink: float, uplinks: Sequence[float], downlinks: Sequence[float]) -> float:
    """Return the bound r*.

    Args:
        uplink: the learner's.
        uplinks: the receivers', 0 for those that cannot serve.
        downlinks: the receivers'.
    """
    total = uplink + math.fsum(uplinks)
    return min(uplink, min(downlinks), total / len(uplinks))


def order(parents: Tree) -> list[int]:
    """Return the learner and the nodes below it, nearest first, so each follows its parent."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    found = [0]
    for node in found:
        found += children[node]
    return found


def num_children(parents: Tree) -> list[int]:
    """Return how many children each node serves."""
    counts = [0] * len(parents)
    for parent in parents:
        if parent >= 0:
            counts[parent] += 1
    return counts


def throughput_of(
    fleet: Sites, parents: Tree, *, payload_bytes: int, chunk_bytes: int
) -> PlanThroughput:
    """Return time, rate and price of a plan."""
    first_bytes = min(float(chunk_bytes), float(payload_bytes))
    counts = num_children(parents)
    lags, rates = [0.0] * len(parents), [math.inf] * len(parents)
    last_s, slowest = 0.0, math.inf
    num_crossings, price = 0, 0.0
    for node in order(parents)[1:]:
        parent = parents[node]
        uplink = fleet.uplinks[parent]
        serve_s = counts[parent] * first_bytes / uplink if uplink else 0.0
        lags[node] = lags[parent] + serve_s + fleet.rtt_s(parent, node) / 2 + HOP_WORK_S
        rates[node] = min(rates[parent], uplink / counts[parent], fleet.downlinks[node])
        if fleet.is_crossing(parent, node):
            num_crossings += 1
            price += fleet.prices[parent]
        if node in fleet.stragglers:
            continue
        rest_s = (payload_bytes - first_bytes) / rates[node] if rates[node] else math.inf
        last_s, slowest = max(last_s, lags[node] + rest_s), min(slowest, rates[node])
    return PlanThroughput(
        predicted_s=last_s,
        rate_bytes_per_s=slowest if slowest < math.inf else 0.0,
        learner_copies=counts[0],
        egress_gb_price=price,
        crossings=num_crossings,
    )
