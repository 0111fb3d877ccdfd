"""Sites: the topology planner's records of the nodes, by number.

The learner has the number 0, and the nodes are numbered from 1 in the order given. So a tree is a
list of integers: the number of each node's parent.

Rates that are not measured yet are assumed. An unknown uplink is assumed to have the median of the
known rates, including the learner's. If the learner's uplink is unknown, it is assumed to have the
largest known rate. If no uplink is known, all uplinks are assumed to be equal. An unknown downlink
is assumed to be no limit, because only limiting downlinks are measured.

Three kinds of node serve no other node, and their uplink counts as 0: nodes that cannot be dialled,
nodes suspected of sending corrupt chunks, and stragglers. A straggler is a node whose downlink is
too slow to feed children.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from echo.core.rollout import PolicyVersion
from echo.wire.messages import NodeStats, TopologyPlan

Hop = tuple[str, str]
"""(node id, address) of a parent. An empty address means the address at which a node has already
reached this parent.
"""

ASSUMED_BYTES_PER_S = 12.5e6
"""Assumed rate of each uplink if no rate is known: 100 Mbit/s."""

STRAGGLER_SHARE = 0.5
"""A node is a straggler if its downlink is slower than this share of the best rate. No plan waits
for a straggler, because the plan would take more than twice as long for all other nodes. The best
rate is the highest rate at which all uplinks together can feed every node.
"""


@dataclass(frozen=True, slots=True)
class Site:
    """The planner's record of a node."""

    node_id: str
    role: str
    address: str | None
    """Address at which the node serves weights; None for a node that can only dial out. Such a node
    is a leaf.
    """
    uplink_bytes_per_s: float | None = None
    """Rate of the node's uplink to all children together, in bytes per second; None before a
    measurement.
    """
    downlink_bytes_per_s: float | None = None
    """Rate of the node's downlink, bytes per second.

    None if unknown: the node receives as fast as its parent can send (`weights/rates.py`).
    """
    region: str = ""
    """Name of the node's region; empty if unknown. Links to or from an unknown region never count
    as links between regions.
    """
    price_per_gb: float = 0.0
    """Price of 1e9 bytes that leave the node's region."""
    is_suspect: bool = False
    """Whether the node is in quarantine. Such a node is a leaf."""


@dataclass(slots=True)
class PlannedNode:
    """The learner's record of a live node, for the planner."""

    node_id: str
    role: str
    advertise: str | None
    """Address at which the node serves weights; None for a node that can only dial out."""
    region: str = ""
    price_per_gb: float = 0.0
    stats: NodeStats = field(default_factory=NodeStats)
    """The statistics in the node's last heartbeat, such as its rates and its parent."""
    installed: PolicyVersion | None = None
    is_standby: bool = False
    """Whether the node is on standby and gets no weights."""
    plan: TopologyPlan | None = None
    """The last plan sent to the node; None before the first plan."""


@dataclass(frozen=True, slots=True)
class Sites:
    """The learner (number 0) and the nodes (from number 1).

    Each field is a tuple with one entry for each number.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    """Address of each node; empty for a node that cannot be dialled. If the learner's address is
    empty, nodes use the address at which they have reached the learner.
    """
    uplinks: tuple[float, ...]
    """Rate of each uplink, bytes per second; 0 for a node that serves no other node."""
    downlinks: tuple[float, ...]
    stragglers: frozenset[int]
    """Numbers of the nodes whose downlink is too slow to feed children."""
    regions: tuple[str, ...]
    prices: tuple[float, ...]
    rtts_from: Callable[[str, str], float]

    @property
    def num_receivers(self) -> int:
        """Number of nodes, without the learner."""
        return len(self.names) - 1

    def rtt_s(self, first: int, second: int) -> float:
        """Return the round-trip time between two nodes, in seconds."""
        return self.rtts_from(self.names[first], self.names[second])

    def is_crossing(self, sender: int, receiver: int) -> bool:
        """Return whether a link connects two different known regions."""
        first, second = self.regions[sender], self.regions[receiver]
        return first != second and first != "" and second != ""

    @property
    def best_rate(self) -> float:
        """Upper bound on the rate at which a plan can feed all receivers, in bytes per second.

        Stragglers do not count as receivers.
        """
        downlinks = (d for i, d in enumerate(self.downlinks) if i and i not in self.stragglers)
        return min(_uplink_rate(self.uplinks), min(downlinks, default=math.inf))


def survey(sites: Sequence[Site], *, learner: Site, rtt_s: Callable[[str, str], float]) -> Sites:
    """Return the sites by number, with assumed values for unknown rates."""
    everyone = [learner, *sites]
    measured = [rate for site in everyone if (rate := site.uplink_bytes_per_s)]
    uplink = statistics.median_low(measured) if measured else ASSUMED_BYTES_PER_S
    most = max(measured, default=uplink)
    downlinks = tuple(_known(site.downlink_bytes_per_s, math.inf) for site in everyone)
    uplinks = [
        _known(site.uplink_bytes_per_s, uplink) if _may_serve(site) else 0.0 for site in everyone
    ]
    # Every byte comes from the learner: if it counted as one of many slow nodes, no plan would seem
    # better than another. A measured uplink of 0 is a mistake.
    uplinks[0] = learner.uplink_bytes_per_s or most
    least = STRAGGLER_SHARE * _uplink_rate(uplinks)
    stragglers = frozenset(i for i, rate in enumerate(downlinks) if i and rate < least)
    return Sites(
        names=tuple(site.node_id for site in everyone),
        addresses=tuple(site.address or "" for site in everyone),
        uplinks=tuple(0.0 if i in stragglers else rate for i, rate in enumerate(uplinks)),
        downlinks=downlinks,
        stragglers=stragglers,
        regions=tuple(site.region for site in everyone),
        prices=tuple(site.price_per_gb for site in everyone),
        rtts_from=rtt_s,
    )


def _uplink_rate(uplinks: Sequence[float]) -> float:
    """Return the highest rate at which all uplinks together can feed every receiver.

    The first uplink is the learner's. No receiver can get data faster than the learner sends.
    """
    return min(uplinks[0], math.fsum(uplinks) / max(1, len(uplinks) - 1))


def _may_serve(site: Site) -> bool:
    return site.address is not None and not site.is_suspect


def _known(rate: float | None, assumed: float) -> float:
    return assumed if rate is None or rate < 0 else rate


# --- nodes that are limited by their own downlink, judged by the rates that all nodes receive ---
# Usually a node receives at the rate that its parent can send. This rate says nothing about the
# node's downlink. If it counted as a limit, a plan that is slow for another reason would confirm
# itself forever. So a node counts as limited by its downlink only if its parent could have sent
# clearly more. Such a parent receives faster than the node, and sends clearly less than its uplink
# has carried.


LIMIT_SHARE = 0.7
"""A rate is clearly lower than a second rate if it is below this share of the second rate. A
smaller difference may be an error of measurement."""


def downlink_limits(
    parents: Mapping[str, str],
    received: Mapping[str, float],
    uplinks: Mapping[str, float],
    *,
    root: str,
) -> dict[str, float]:
    """Return the downlink rate of each node that is limited by its own downlink.

    The rates are in bytes per second. A downlink is the limit if the node's parent could clearly
    send faster than the node has received.

    Args:
        parents: the node from which each node fetched weights.
        received: rate at which each node received during busy time, in bytes per second, if known.
        uplinks: rate at which each node could send, in bytes per second, if known.
        root: the id of the learner, which holds every version.
    """
    loads: dict[str, float] = defaultdict(float)
    for node_id, parent in parents.items():
        loads[parent] += received.get(node_id, 0.0)

    def could_give_more(parent: str, rate: float) -> bool:
        has = math.inf if parent == root else received.get(parent, 0.0)
        return rate < LIMIT_SHARE * has and loads[parent] < LIMIT_SHARE * uplinks.get(parent, 0.0)

    return {
        node_id: received[node_id]
        for node_id, parent in parents.items()
        if node_id in received and could_give_more(parent, received[node_id])
    }
