"""The throughput of a plan, and the bound that no plan can exceed.

Bound (Kumar and Ross 2006; Mundinger et al. 2008): every receiver gets the whole version, and every
received byte was sent by a node. So no plan gives all N receivers more than

    r* = min(u0, min d, (u0 + sum u) / N)

A plan is one tree. A node's uplink is shared equally by its children. So a version reaches a node
at

    rate(node) = min(rate(parent), uplink(parent) / children(parent), downlink(node))

The first chunk reaches a node when the parent has it and has sent it to all its children:

    lag(node) = lag(parent) + children(parent) * chunk / uplink(parent) + round trip / 2 + work

Then the remaining S - chunk bytes follow at this rate, where S is the size of the version. With
equal uplinks the results are closed formulas: N S/u for the star, and S/u + (N-1)(c/u + L) + L for
the chain. TCP connections are assumed to be at full speed, because they are kept from one version
to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo.weights.topology.sites import Sites

HOP_WORK_S = 0.0005
"""Seconds from the arrival of a chunk to its forwarding: hash, store, one turn of the loop."""

Tree = Sequence[int]
"""The number of each node's parent, by the node's number; -1 for the learner, number 0."""


@dataclass(frozen=True, slots=True)
class PlanThroughput:
    """The forecast of how a plan distributes a payload."""

    predicted_s: float
    """Seconds until the last receiver, stragglers apart, has the version."""
    rate_bytes_per_s: float
    """Rate of the slowest receiver, stragglers apart, bytes per second."""
    learner_copies: int
    """Number of copies of the payload that the learner sends."""
    egress_gb_price: float
    """Price of the bytes that change regions, for each GB of payload."""
    crossings: int
    """Number of copies of the payload that are sent from one region to another."""


def fluid_rate(uplink: float, uplinks: Sequence[float], downlinks: Sequence[float]) -> float:
    """Return r*, the highest rate that a plan can give every receiver.

    The rate is in bytes per second.

    Args:
        uplink: the rate of the learner's uplink.
        uplinks: the rates of the receivers' uplinks; 0 for receivers that cannot serve.
        downlinks: the rates of the receivers' downlinks.
    """
    total = uplink + math.fsum(uplinks)
    return min(uplink, min(downlinks), total / len(uplinks))


def order(parents: Tree) -> list[int]:
    """Return the numbers of the learner and all nodes, each node after its parent."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    found = [0]
    for node in found:
        found += children[node]
    return found


def num_children(parents: Tree) -> list[int]:
    """Return each node's number of children in the tree, by the node's number."""
    counts = [0] * len(parents)
    for parent in parents:
        if parent >= 0:
            counts[parent] += 1
    return counts


def throughput_of(
    fleet: Sites, parents: Tree, *, payload_bytes: int, chunk_bytes: int
) -> PlanThroughput:
    """Return the predicted time, rate and price of a plan."""
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
