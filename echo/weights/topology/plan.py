"""The topology plan: chooses the parents of each node, and decides when to plan again.

A plan is one tree over all nodes, possibly a chain or a star. The plan lists the parents of each
node in order of preference: first the parent in the tree, then stand-ins (other possible parents),
and last the learner. So a node can change to another parent without a message from the learner.

**Plan.** `plan_topology` builds several trees (`trees.py`), predicts the broadcast time of each
tree (`throughput.py`), and chooses in three steps. First, drop the plans that take more than 1.5
times as long as the fastest plan. Second, keep only the plans with the fewest links between
regions. So a version usually enters each region once. Third, among the plans about as fast as the
fastest remaining plan, take the cheapest: the plan with the fewest paid bytes, then with the fewest
copies from the learner. So the learner usually sends a version once.

**Replan.** The learner's `Planner` makes a plan when a node joins, leaves, or sends wrong chunks.
Each transfer measures the links again. So if the plan in force predicts a broadcast longer than
WORTHWHILE_S, a plan is also made every REPLAN_S.

A node that changes its parent during a broadcast loses time and the chunks under way. So during a
broadcast a new plan must save more time (BUSY_GAIN). A plan is also made just before a version is
sent, but at most every REPLAN_S. Without this plan, a learner that publishes often would plan only
during broadcasts. A new plan would then need the gain BUSY_GAIN, and measurements would have no
effect.

The plan in force is kept, with changes only for nodes that join or leave, until another plan would
save MIN_GAIN of the time. So small changes of measured rates change no node's parent. If a node
that joins or leaves can serve children, and the fleet is small, the plan is made from scratch. The
first plan is made without measurements. When an uplink has been measured for the first time, the
next plan is made NEWS_S after the last plan, or just before the next version is sent.

**Inputs.** For each node the planner has: the rate of the uplink, from the chunks that children
have acknowledged; the rate of the downlink, if the downlink limits the node (`sites.py`); the
round-trip time to the parent; the region and the price of traffic, from the node's configuration;
and the suspects: nodes that sent wrong chunks to this node. Suspects serve no node until their
quarantine ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from echo.core.timers import MANY_NODES
from echo.weights.store.items import Chunked
from echo.weights.topology.sites import (
    Hop,
    PlannedNode,
    Site,
    Sites,
    downlink_limits,
    survey,
)
from echo.weights.topology.throughput import (
    HOP_WORK_S,
    PlanThroughput,
    Tree,
    children_of,
    num_children,
    order,
    throughput_of,
)
from echo.weights.topology.trees import REGION_COST, bounded_tree, chain, star
from echo.wire.messages import LEARNER_ID, NodeStats, TopologyPlan

# --- backups: the parents to turn to, in order of preference --------------------------------------
#
# The parent in the tree comes first, the learner last, stand-ins between: the grandparent, a node
# beside the parent (which does not share the parent's fate), further ancestors.
#
# Fallbacks cannot form a circle: every node on a list has fewer hops to the learner in the tree
# than the node itself. So each entry leads to fewer hops, whichever one a node chooses, and the
# path ends at the learner. This holds within one plan. While nodes follow plans of different epochs
# a circle is possible for a moment. The watchdog ends it, since every list ends with the learner.

MAX_PARENTS = 6
"""Largest number of parents of one node, including the learner. A node rarely loses more than a few
parents at once."""

Parents = Mapping[str, tuple[Hop, ...]]
"""Node id -> parents in order of preference."""


def with_backups(fleet: Sites, parents: Tree, *, previous: Parents) -> Parents:
    """Return each node's parents in order of preference.

    The first parent is the parent in the tree. Other possible parents follow as stand-ins.

    Args:
        fleet: the learner and the nodes.
        parents: the parent of each node in the tree.
        previous: the present lists of parents. A list that is still valid is kept, so that the node
            gets no message.
    """
    counts = num_children(parents)
    numbers = {name: index for index, name in enumerate(fleet.names)}
    hops = list(zip(fleet.names, fleet.addresses, strict=True))
    rows = _Rows(fleet, parents)
    lists: dict[str, tuple[Hop, ...]] = {}
    for node in order(parents)[1:]:
        name = fleet.names[node]
        chosen = tuple(hops[i] for i in rows.stand_ins(node, counts))
        old = previous.get(name, chosen)
        is_kept = old != chosen and rows.can_keep(node, old, numbers, hops)
        lists[name] = old if is_kept else chosen
    return {name: lists[name] for name in fleet.names[1:]}


class _Rows:
    """A tree, divided into rows of nodes with the same number of hops from the learner."""

    def __init__(self, fleet: Sites, parents: Sequence[int]) -> None:
        """Put each node that can serve into its row, and number the children of each parent."""
        self._fleet, self._parents = fleet, parents
        self._depths = [0] * len(parents)
        self._ranks = [0] * len(parents)
        self._rows: list[list[int]] = [[] for _ in parents]
        num_seen = [0] * len(parents)
        for node in order(parents)[1:]:
            parent = parents[node]
            self._depths[node] = self._depths[parent] + 1
            self._ranks[node] = num_seen[parent]
            num_seen[parent] += 1
            if fleet.uplinks[node] > 0:
                self._rows[self._depths[node]].append(node)

    def stand_ins(self, node: int, counts: Sequence[int]) -> list[int]:
        """Return the numbers of a node's parents, in order of preference.

        The parent in the tree comes first, then stand-ins, then the learner. The stand-in of a
        parent's first child is the grandparent, which can serve one more child if the parent dies.
        The stand-ins of the other children are nodes at the same depth of the tree as the parent,
        if possible a different node for each child.
        """
        above = [self._parents[node]]
        while above[-1] > 0 and len(above) < MAX_PARENTS:
            above.append(self._parents[above[-1]])
        if above[0] == 0:
            return above
        elders = [i for i in above[1:] if i > 0]
        row = self._rows[self._depths[above[0]]]
        near = [row[(node + i) % len(row)] for i in range(min(4, len(row)))]
        beside = sorted(
            (i for i in near if i != above[0]),
            key=lambda i: -self._fleet.uplinks[i] / (counts[i] + 1),
        )[:1]
        first, rest = elders[:1], elders[1:]
        ranked = [*first, *beside] if self._ranks[node] == 0 else [*beside, *first]
        return [above[0], *[*ranked, *rest][: MAX_PARENTS - 2], 0]

    def can_keep(
        self, node: int, old: tuple[Hop, ...], numbers: Mapping[str, int], hops: Sequence[Hop]
    ) -> bool:
        """Return whether a former list of parents is still valid for a node.

        A valid list begins with the node's parent in the tree and ends with the learner. All listed
        nodes can serve, and have fewer hops to the learner than `node` has.
        """
        chosen = [numbers.get(name, -1) for name, _ in old]
        return (
            chosen[0] == self._parents[node]
            and chosen[-1] == 0
            and (len(chosen) > 2 or self._parents[node] == 0 or self._depths[node] == 2)
            and all(
                i >= 0
                and hops[i] == hop
                and self._depths[i] < self._depths[node]
                and self._fleet.uplinks[i] > 0
                for i, hop in zip(chosen, old, strict=True)
            )
        )


# --- patch: keep a plan in force while nodes come and go ------------------------------------------
#
# A node that has lost its parent (which left, cannot be dialled, or is suspected) moves with its
# whole subtree, and newcomers become leaves. The parent of each is the node nearest to the learner
# that can feed one more child at the plan's rate. If no node can, the parent is the node with the
# most unused uplink. Only the next new plan uses a newcomer's own uplink. After many changes the
# plan is not patched.

MOST_CHANGED = 0.25
"""A former plan is adapted instead of replaced if at most this share of the links must change. Each
changed link is placed by itself, so after many changes the plan could be far from the best."""


def patched(fleet: Sites, previous: Parents, *, rate_bytes_per_s: float) -> list[int] | None:
    """Adapt a former plan to the nodes that joined or left; return the adapted tree.

    None if too many links have changed.

    Args:
        fleet: the learner and the present nodes.
        previous: the parents of every node in the former plan.
        rate_bytes_per_s: the rate of the slowest receiver in the former plan.
    """
    parents = _surviving(fleet, previous)
    lost = [node for node in range(1, len(parents)) if parents[node] < 0]
    if len(lost) > max(1, MOST_CHANGED * fleet.num_receivers):
        return None
    counts = num_children(parents)
    former = sum(hops[0][0] == fleet.names[0] for hops in previous.values())
    hosts = _Hosts(fleet, counts, rate_bytes_per_s, former)
    children = children_of(parents)
    reached = _below(children, 0)
    below = {node: _below(children, node) for node in lost}
    latencies = [0.0] * len(parents)
    hosts.extend_latencies(latencies, parents, reached[1:])
    # The largest subtree first: the others may find a parent in it.
    for node in sorted(lost, key=lambda i: (-len(below[i]), i)):
        parents[node] = hosts.choose(reached, latencies, node)
        counts[parents[node]] += 1
        hosts.extend_latencies(latencies, parents, below[node])
        reached += below[node]
    return parents


def _surviving(fleet: Sites, previous: Parents) -> list[int]:
    numbers = {name: index for index, name in enumerate(fleet.names)}
    tree = [-1] * len(fleet.names)
    for node, name in enumerate(fleet.names[1:], start=1):
        hops = previous.get(name)
        parent = -1 if hops is None else numbers.get(hops[0][0], -1)
        if parent >= 0 and fleet.uplinks[parent] > 0:
            tree[node] = parent
    return tree


def _below(children: list[list[int]], node: int) -> list[int]:
    found = [node]
    for each in found:
        found += children[each]
    return found


class _Hosts:
    """Chooses parents for nodes that are new or have lost their parent."""

    def __init__(self, fleet: Sites, counts: list[int], share: float, former: int) -> None:
        """Prepare to choose parents.

        Args:
            fleet: the learner and the present nodes.
            counts: number of children of each node; the caller updates this list.
            share: wanted rate of each link, in bytes per second.
            former: number of children that the learner served in the former plan.
        """
        self._fleet, self._counts, self._share, self._former = fleet, counts, share, former

    def extend_latencies(
        self, latencies: list[float], parents: list[int], nodes: list[int]
    ) -> None:
        """Write the latency from the learner to each of `nodes` into `latencies`, in seconds.

        In `nodes`, each parent comes before its children.
        """
        for node in nodes:
            hop_s = self._fleet.rtt_s(parents[node], node) / 2 + HOP_WORK_S
            latencies[node] = latencies[parents[node]] + hop_s

    def choose(self, reached: list[int], latencies: list[float], node: int) -> int:
        """Return which of the nodes in `reached` becomes the parent of `node`.

        If another node can serve, the learner gets no more children than in the former plan.
        """
        fleet = self._fleet
        hosts = [i for i in reached if fleet.uplinks[i] > 0]
        spare = {i: fleet.uplinks[i] / (self._counts[i] + 1) for i in hosts}
        able = [i for i in hosts if spare[i] >= self._share * (1 - 1e-9)]
        if not able:
            return max(hosts, key=lambda i: (spare[i], -i))
        return min(
            able,
            key=lambda i: (
                i == 0 and self._counts[0] >= self._former,
                fleet.is_crossing(i, node),
                latencies[i] + fleet.rtt_s(i, node) / 2,
                -spare[i],
                i,
            ),
        )


# --- plan: the best of several --------------------------------------------------------------------

Kind = Literal["chain", "tree", "star"]

MIN_GAIN, BUSY_GAIN = 0.03, 0.1
"""A plan counts as faster than another if it saves more than this share of the predicted time.

The first value applies between broadcasts, the second during a broadcast. Measured rates have an
error of a few percent.
"""

INSIGNIFICANT_S = 0.25
"""A plan counts as equally fast if it takes at most this many seconds longer than the fastest plan.

A training step takes far longer than this.
"""

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the best rate for which trees are built. A lower rate gives a flatter tree. For a small
payload, a flatter tree is faster.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the plans that the planner compared."""

    kind: Kind
    predicted_s: float
    rate_bytes_per_s: float
    """Predicted rate of the slowest receiver, in bytes per second."""
    learner_copies: int
    """Number of copies of the payload that the learner would send."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A plan: the parents of each node, in order of preference, and the predicted time and rate."""

    kind: Kind
    parents: Parents
    """Node id -> ((node id, address) of each parent, the learner last)."""
    predicted_s: float
    """Predicted seconds until all nodes except stragglers (`sites.py`) have the payload."""
    rate_bytes_per_s: float
    """Predicted rate of the slowest receiver, in bytes per second."""
    candidates: tuple[Candidate, ...]
    """The plans that were compared with each other, the fastest first."""


def plan_topology(
    sites: Sequence[Site],
    *,
    learner: Site,
    payload_bytes: int,
    chunk_bytes: int,
    rtt_s: Callable[[str, str], float],
    previous: Topology | None = None,
    min_gain: float = 0.1,
) -> Topology:
    """Return the plan to distribute a payload of this size.

    Args:
        sites: every live node except the learner, in a stable order (the order of joining).
        learner: the learner. An empty address, or None, means the address at which a node has
            reached the learner.
        payload_bytes: typical size of one version on the wire, in bytes.
        chunk_bytes: size of a chunk, in bytes. Nodes forward chunk by chunk.
        rtt_s: returns the round-trip time between two node ids, in seconds; an assumed time if
            unknown.
        previous: the plan in force. While no other plan is clearly better, this plan is kept,
            changed only for nodes that joined or left, because a change of parents costs new
            connections.
        min_gain: share of the predicted time that a new plan must save to replace the plan in
            force.
    """
    fleet = survey(sites, learner=learner, rtt_s=rtt_s)
    if not sites:
        return Topology("star", {}, 0.0, fleet.uplinks[0], ())
    planner = _Planner(fleet, payload_bytes, chunk_bytes)
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
        parents=with_backups(
            fleet, chosen.tree, previous={} if previous is None else previous.parents
        ),
        predicted_s=chosen.seconds,
        rate_bytes_per_s=chosen.forecast.rate_bytes_per_s,
        candidates=tuple(plan.candidate for plan in plans),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    kind: Kind
    tree: Tree
    forecast: PlanThroughput

    @property
    def seconds(self) -> float:
        return self.forecast.predicted_s

    @property
    def cost(self) -> tuple[float, ...]:
        found = self.forecast
        price = round(found.egress_gb_price, 9)
        busiest = max(num_children(self.tree))
        return price, found.learner_copies, found.crossings, busiest, self.seconds

    @property
    def candidate(self) -> Candidate:
        rate, copies = self.forecast.rate_bytes_per_s, self.forecast.learner_copies
        return Candidate(self.kind, self.seconds, rate, copies)

    def saves_less(self, other_s: float, min_gain: float) -> bool:
        """Return whether a plan that takes `other_s` seconds is hardly faster than this plan.

        It is hardly faster if it saves at most the share `min_gain` of this plan's time.
        """
        return self.seconds * (1 - min_gain) <= other_s


def _by_region(plans: Sequence[_Plan]) -> list[_Plan]:
    """Return, from the fast plans, the plans with the fewest links between regions.

    A plan is fast if it takes at most 1 + REGION_COST times as long as the fastest plan, or at most
    INSIGNIFICANT_S longer. Arguments and results are sorted, the fastest plan first.
    """
    enough_s = plans[0].seconds + max(REGION_COST * plans[0].seconds, INSIGNIFICANT_S)
    near = [plan for plan in plans if plan.seconds <= enough_s]
    fewest = min(plan.forecast.crossings for plan in near)
    return [plan for plan in near if plan.forecast.crossings <= fewest + 1e-9]


def _thriftiest(plans: Sequence[_Plan]) -> _Plan:
    enough_s = max((1 + MIN_GAIN) * plans[0].seconds, plans[0].seconds + INSIGNIFICANT_S)
    return min((plan for plan in plans if plan.seconds <= enough_s), key=lambda plan: plan.cost)


class _Planner:
    def __init__(self, fleet: Sites, payload_bytes: int, chunk_bytes: int) -> None:
        self._fleet, self._payload_bytes, self._chunk_bytes = fleet, payload_bytes, chunk_bytes
        self._has_regions = len(set(fleet.regions)) > 1

    def keep(self, previous: Topology) -> _Plan | None:
        """Adapt the plan in force to the nodes that joined or left; return the adapted plan.

        None if too many links have changed.
        """
        tree = patched(self._fleet, previous.parents, rate_bytes_per_s=previous.rate_bytes_per_s)
        return None if tree is None else self._measured(previous.kind, tree)

    def compare(self) -> list[_Plan]:
        plans = [self._measured("star", star(self._fleet))]
        line = chain(self._fleet)
        if line is not None:
            plans.append(self._measured("chain", line))
        for is_by_region in (False, True) if self._has_regions else (False,):
            best_s = math.inf if is_by_region else min(plan.seconds for plan in plans)
            for does_spare_learner in (True, False):
                found = self._bounded(does_spare_learner, is_by_region, best_s)
                plans += found
                best_s = min([best_s, *(plan.seconds for plan in found)])
        return sorted(plans, key=lambda plan: plan.seconds)

    def _bounded(self, does_spare_learner: bool, is_by_region: bool, best_s: float) -> list[_Plan]:
        """Return degree-bounded trees: a tree for the best rate, and trees for lower rates.

        Lower rates are tried while their trees could take less than `best_s` seconds.
        """
        plans: list[_Plan] = []
        for share in SHARES:
            tree = bounded_tree(
                self._fleet,
                does_spare_learner=does_spare_learner,
                is_by_region=is_by_region,
                share=share,
            )
            if tree is None:
                break
            plan = self._measured("tree", tree)
            plans.append(plan)
            best_s = min(best_s, plan.seconds)
            next_s = 2 * self._payload_bytes / max(plan.forecast.rate_bytes_per_s, 1.0)
            if next_s >= best_s:
                break
        return plans

    def _measured(self, kind: Kind, tree: Tree) -> _Plan:
        found = throughput_of(
            self._fleet,
            tree,
            payload_bytes=self._payload_bytes,
            chunk_bytes=self._chunk_bytes,
        )
        return _Plan(kind, tree, found)


# --- planner: the learner's view of the links, and the plan in force ------------------------------


def plan_parents(sites: Sequence[Site]) -> dict[str, tuple[Hop, ...]]:
    """Return each node's parents, preferred first, in a plan that is one chain.

    The chain has the relays first, then the workers that can be dialled. All other nodes are
    leaves. The learner's address is empty, since each node has already reached the learner. A
    suspected node is a parent of leaves only. It stands just before the learner in a leaf's list,
    because some leaves cannot reach the learner itself.

    Args:
        sites: every live node except the learner, in a stable order (the order of joining).
    """
    learner = (LEARNER_ID, "")
    hosts = [site for site in sites if site.address is not None]
    hosts.sort(key=lambda site: site.role != "relay")
    line = [site for site in hosts if not site.is_suspect]
    suspects = [(site.node_id, site.address or "") for site in hosts if site.is_suspect]
    hops = [(site.node_id, site.address or "") for site in line]
    parents = {site.node_id: (*reversed(hops[:index]), learner) for index, site in enumerate(line)}
    parents |= {node_id: (*reversed(hops), learner) for node_id, _ in suspects}
    leaves = [site for site in sites if site.address is None]
    for number, site in enumerate(leaves):
        last = len(hops) - number % len(hops) if hops else 0
        parents[site.node_id] = (*reversed(hops[:last]), *suspects, learner)
    return parents


PLAN_S = 1e-2
"""Shortest pause between two plans, in seconds per node of the fleet: 10 s with 1000 nodes. Because
of the pause, nodes that join at about the same time cause only one plan.
"""
REPLAN_S = 10.0
"""Seconds between two plans while broadcasts take longer than WORTHWHILE_S. An uplink is measured
over several seconds, so earlier plans would use the same measurements."""
NEWS_S = 2.0
"""Seconds from the last plan to the next plan if an uplink has been measured for the first time.

Several probes end at about the same time, so one plan can use all results.
"""
WORTHWHILE_S = 0.5
"""If broadcasts take less than this time, in seconds, no plan is made because of measurements.

Versions are then fast under any plan: a plan that is faster by INSIGNIFICANT_S counts as equal. But
small rates that vary would change parents, and a new parent costs a connection.
"""
MAX_REBUILT = 64
"""Largest number of nodes for which a plan is made from scratch when a serving node joins or
leaves. Such a plan avoids copies and traffic that an adapted plan would keep. In a larger fleet, it
would change the parents of many nodes.
"""
ASSUMED_PAYLOAD_BYTES = 1 << 30
"""Assumed size of a version, in bytes, before the first version is published."""
SAME_REGION_RTT_S = 0.005
"""Assumed round-trip time between two nodes of a region, in seconds. Each node measures only the
round trip to its parent, which is often in another region.
"""
ASSUMED_RTT_S = 0.05
"""Assumed round-trip time between two nodes, in seconds, if none was measured. With 0, long chains
would seem to cost nothing. With far more, all nodes would be children of the learner.
"""


@dataclass(frozen=True, slots=True)
class _View:
    """A snapshot of the planner's measurements of all links."""

    learner: Site
    sites: tuple[Site, ...]
    rtts: Mapping[str, float | None]
    regions: Mapping[str, str]

    def plan(
        self,
        sites: Sequence[Site],
        payload_bytes: int,
        chunk_bytes: int,
        previous: Topology | None = None,
        min_gain: float = 0.0,
    ) -> Topology:
        """Return the plan for these sites, computed from this snapshot."""
        return plan_topology(
            sites,
            learner=self.learner,
            payload_bytes=payload_bytes,
            chunk_bytes=chunk_bytes,
            rtt_s=self._rtt_s,
            previous=previous,
            min_gain=min_gain,
        )

    def _rtt_s(self, first: str, second: str) -> float:
        # Every plan calls this many times.
        region = self.regions[first]
        if region and region == self.regions[second]:
            return SAME_REGION_RTT_S
        one, other = self.rtts.get(first), self.rtts.get(second)
        if one is None or other is None:
            found = one if other is None else other
            return ASSUMED_RTT_S if found is None else found
        return one if one > other else other


class Planner:
    """Holds the learner's present plan, and decides when to make a new plan."""

    def __init__(self, *, learner: Site, chunk_bytes: int) -> None:
        """Start with no nodes and no plan.

        Args:
            learner: the learner. An empty address means the address at which a node has reached the
                learner. The uplink rate is used until transfers have measured the rate.
            chunk_bytes: size of a chunk, used until a version has been published.
        """
        self.learner = learner
        self.chunk_bytes = chunk_bytes
        self.payload_bytes = ASSUMED_PAYLOAD_BYTES
        self.epoch = 0
        self.topology: Topology | None = None
        self.downlink_limits: dict[str, float] = {}
        """Node id -> downlink rate in bytes per second, as last measured. Only nodes that are
        limited by their own downlink are listed."""
        self._planned_at, self._rested_at, self._num_nodes = 0.0, 0.0, 0
        self.has_news = False
        """Whether an uplink was measured for the first time since the last plan."""
        self._listening: tuple[str, ...] = ()

    def expect(self, payload: Chunked | None) -> None:
        """Plan from now on for versions with the size and chunk size of `payload`."""
        if payload is not None and payload.num_chunks:
            self.payload_bytes, self.chunk_bytes = payload.num_bytes, payload.chunk_size(0)

    def is_due(self, *, now: float, is_between: bool = False) -> bool:
        """Return whether to make a plan because of new measurements.

        Args:
            now: the present time.
            is_between: whether one version has been sent completely and the next will be sent soon.
        """
        if self.topology is None:
            return False
        # A forecast from before an uplink was measured may be wrong by any factor.
        if self.topology.predicted_s < WORTHWHILE_S and not self.has_news:
            return False
        if self.has_news and is_between:
            return True
        # The cost of a plan grows with the fleet, so a large fleet is planned less often.
        period_s = NEWS_S if self.has_news else REPLAN_S
        period_s *= max(1.0, self._num_nodes / MANY_NODES)
        return now >= (self._rested_at if is_between else self._planned_at) + period_s

    def learn(self, stats: NodeStats, *, former: NodeStats) -> None:
        """Record a node's statistics. The first measurement of an uplink makes a new plan due."""
        if stats.uplink_bytes_per_s is not None and former.uplink_bytes_per_s is None:
            self.has_news = True

    def plan(
        self,
        nodes: Sequence[PlannedNode],
        *,
        uplink_bytes_per_s: float | None,
        now: float,
        is_between: bool = False,
    ) -> dict[str, TopologyPlan]:
        """Make a new plan; return the plan of every node, changed or unchanged.

        Workers on standby get no weights, so they cost no traffic and delay no other worker. When
        activated again, a worker fetches the missing versions, like a node that joins late.

        Args:
            nodes: every live node except the learner, in the order in which they joined.
            uplink_bytes_per_s: the measured rate of the learner's own uplink; None if unknown.
            now: the present time.
            is_between: whether one version has been sent completely and the next will be sent soon.
        """
        self._planned_at, self._num_nodes, self.has_news = now, len(nodes), False
        receivers = [node for node in nodes if not node.is_standby]
        view = self._survey(receivers, uplink_bytes_per_s)
        if not self.learner.address:
            plans = self._plan_behind_relays(view.sites)
        else:
            is_busy = any(node.stats.fetching is not None for node in receivers)
            # During its first version a fleet is unmeasured, and a change of the plan measures more
            # links.
            is_steady = all(node.installed is not None for node in receivers)
            does_disturb = is_busy and is_steady and not is_between
            if not does_disturb:
                self._rested_at = now
            plans = self._plan_from(view, BUSY_GAIN if does_disturb else MIN_GAIN)
        for node in nodes:
            if node.is_standby:
                plans[node.node_id] = TopologyPlan(epoch=self.epoch, parents=())
        return plans

    def move(
        self,
        nodes: Sequence[PlannedNode],
        *,
        uplink_bytes_per_s: float | None,
        now: float,
        is_between: bool = False,
    ) -> list[tuple[str, TopologyPlan]]:
        """Make a new plan; return (node id, plan) of each node whose parents change.

        The arguments are those of `plan`.
        """
        plans = self.plan(
            nodes, uplink_bytes_per_s=uplink_bytes_per_s, now=now, is_between=is_between
        )
        moved = []
        for node in nodes:
            plan = plans[node.node_id]
            if node.plan is None or node.plan.parents != plan.parents:
                node.plan = plan
                moved.append((node.node_id, plan))
        return moved

    def forecast(
        self, nodes: Sequence[PlannedNode], *, uplink_bytes_per_s: float | None
    ) -> Callable[[Collection[str]], float]:
        """Return a function that predicts the duration of a broadcast to some of the nodes.

        The function takes node ids and returns seconds. It uses the present measurements of links.
        Any thread may call it.
        """
        view = self._survey(nodes, uplink_bytes_per_s)
        payload_bytes, chunk_bytes = self.payload_bytes, self._forwarded_bytes

        def broadcast_s(names: Collection[str]) -> float:
            chosen = set(names)
            sites = [site for site in view.sites if site.node_id in chosen]
            return view.plan(sites, payload_bytes, chunk_bytes).predicted_s

        return broadcast_s

    def _survey(self, nodes: Sequence[PlannedNode], uplink_bytes_per_s: float | None) -> _View:
        """Return a snapshot of the links of these nodes and the learner."""
        # Relays come first where no rate is known: they exist to serve.
        ordered = sorted(nodes, key=lambda node: node.role != "relay")
        suspects = {name for node in ordered for name in node.stats.suspects}
        rtts = {node.node_id: node.stats.rtt_s for node in ordered}
        regions = {node.node_id: node.region for node in ordered}
        regions[LEARNER_ID] = self.learner.region
        learner = Site(
            self.learner.node_id,
            "learner",
            self.learner.address,
            uplink_bytes_per_s=uplink_bytes_per_s or self.learner.uplink_bytes_per_s,
            region=self.learner.region,
            price_per_gb=self.learner.price_per_gb,
        )
        uplinks = {node.node_id: node.stats.uplink_bytes_per_s for node in ordered}
        uplinks[LEARNER_ID] = uplink_bytes_per_s
        received = {node.node_id: node.stats.downlink_bytes_per_s for node in ordered}
        self.downlink_limits = downlink_limits(
            {node.node_id: node.stats.parent for node in ordered},
            {name: rate for name, rate in received.items() if rate is not None},
            {name: rate for name, rate in uplinks.items() if rate is not None},
            root=LEARNER_ID,
        )
        sites = tuple(self._site(node, suspects) for node in ordered)
        return _View(learner, sites, rtts, regions)

    @property
    def _forwarded_bytes(self) -> int:
        return min(self.chunk_bytes, self.payload_bytes)

    def _plan_from(self, view: _View, min_gain: float) -> dict[str, TopologyPlan]:
        listening = tuple(site.node_id for site in view.sites if site.address is not None)
        has_new_hosts = listening != self._listening and len(view.sites) <= MAX_REBUILT
        self._listening = listening
        previous = None if has_new_hosts else self.topology
        topology = view.plan(
            view.sites, self.payload_bytes, self._forwarded_bytes, previous, min_gain
        )
        if self.topology is None or topology.parents != self.topology.parents:
            self.epoch += 1
        self.topology = topology
        return {
            node_id: TopologyPlan(epoch=self.epoch, parents=parents)
            for node_id, parents in topology.parents.items()
        }

    def _plan_behind_relays(self, sites: Sequence[Site]) -> dict[str, TopologyPlan]:
        """Plan a single chain that begins with the relays.

        This plan is used if the learner's address is unknown: without the address, a node behind a
        relay cannot fetch weights from the learner.
        """
        self.epoch += 1
        return {
            node_id: TopologyPlan(epoch=self.epoch, parents=hops)
            for node_id, hops in plan_parents(sites).items()
        }

    def _site(self, node: PlannedNode, suspects: set[str]) -> Site:
        return Site(
            node.node_id,
            node.role,
            node.advertise,
            uplink_bytes_per_s=node.stats.uplink_bytes_per_s,
            downlink_bytes_per_s=self.downlink_limits.get(node.node_id),
            region=node.region,
            price_per_gb=node.price_per_gb,
            is_suspect=node.node_id in suspects,
        )
