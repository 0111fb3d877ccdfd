"""The throughput of a plan, and the upper bound that no plan can exceed.

Bound (Kumar and Ross 2006; Mundinger et al. 2008): every receiver gets the whole version, and every
received byte was sent by a node. Let u0 be the rate of the learner's uplink, and u and d the rates
of the receivers' uplinks and downlinks. Then no plan gives all N receivers more than

    r* = min(u0, min d, (u0 + sum u) / N)

A plan is one tree. The children of a node share its uplink equally. So a version arrives at a node
at the rate

    rate(node) = min(rate(parent), uplink(parent) / children(parent), downlink(node))

The first chunk arrives at a node after the time lag(node). By then the parent has received the
chunk, and has sent it to all its children:

    lag(node) = lag(parent) + children(parent) * chunk / uplink(parent) + round trip / 2 + work

Here chunk is the size of a chunk, and work is HOP_WORK_S. The remaining bytes of the version follow
at the node's rate. TCP connections are assumed to be at full speed, because they are kept from one
version to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo.weights.topology.sites import Sites

HOP_WORK_S = 0.0005
"""Seconds from the arrival of a chunk to its forwarding: hashing, storing, one turn of the event
loop.
"""

Tree = Sequence[int]
"""For each node, by number, the number of its parent; -1 for the learner, whose number is 0."""


@dataclass(frozen=True, slots=True)
class PlanThroughput:
    """The predicted time, rate and price of a plan."""

    predicted_s: float
    """Seconds until all receivers except stragglers (`sites.py`) have the version."""
    rate_bytes_per_s: float
    """Rate of the slowest receiver that is not a straggler, in bytes per second."""
    learner_copies: int
    """Number of copies of the payload that the learner sends."""
    egress_gb_price: float
    """Price of all bytes sent between regions, per GB of payload."""
    crossings: int
    """Number of copies of the payload that are sent from one region to another."""


def fluid_rate(uplink: float, uplinks: Sequence[float], downlinks: Sequence[float]) -> float:
    """Return r*, the highest rate at which a plan can feed every receiver.

    The rate is in bytes per second.

    Args:
        uplink: the rate of the learner's uplink.
        uplinks: the rates of the receivers' uplinks; 0 for receivers that cannot serve.
        downlinks: the rates of the receivers' downlinks.
    """
    total = uplink + math.fsum(uplinks)
    return min(uplink, min(downlinks), total / len(uplinks))


def children_of(parents: Tree) -> list[list[int]]:
    """Return a list of each node's children. In `parents`, a node outside the tree has -1."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def order(parents: Tree) -> list[int]:
    """Return the numbers of the learner and all nodes, each parent before its children."""
    children = children_of(parents)
    found = [0]
    for node in found:
        found += children[node]
    return found


def num_children(parents: Tree) -> list[int]:
    """Return the number of children of each node in the tree, by the node's number."""
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
