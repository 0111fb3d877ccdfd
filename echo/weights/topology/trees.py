"""Builds the trees that a planner compares: star, chain and degree-bounded tree.

A tree for the rate r gives each receiver one link of rate r. So a node with an uplink of rate u has
floor(u / r) **slots** for children, and every receiver needs one slot. A node with slots takes one
slot of its parent, and offers at least one slot of its own. So a tree is built from the learner
through the nodes with slots, in falling order of slots. Leaves are added last. A rate is possible
if and only if there are enough slots. Bisection finds the largest possible rate.

If regions are known, only one link enters each region (no link enters the learner's region), so a
version is sent into a region once. Then the slots within each region also limit the rate. If a
single link into a region would slow the version down by more than REGION_COST, more links enter the
region.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from echo.weights.topology.sites import Sites

_Counts = np.ndarray[tuple[int], np.dtype[np.float64]]

WINDOW = 16
"""Largest number of candidate nodes whose distances to a node are compared. In a large fleet, a
comparison with all nodes would take too long."""

REGION_COST = 0.5
"""Largest share by which a single link into a region may slow a tree down. If the slowdown would be
larger, more links enter the region.
"""

_STEPS = 50
"""Number of bisection steps when searching the largest rate. After these steps, the interval is
smaller than the precision of a float."""


def star(fleet: Sites) -> list[int]:
    """Return the tree in which the learner serves every node."""
    return [-1, *[0] * fleet.num_receivers]


def chain(fleet: Sites) -> list[int] | None:
    """Return a chain of the nodes that can serve children, with all other nodes as leaves.

    The chain goes region by region, the learner's region first, and within a region always to the
    nearest node. A leaf's parent is the end of the chain or a node with unused uplink, in the
    leaf's region if possible. None if the nodes cannot serve enough children.
    """
    slots = slots_of(fleet, does_spare_learner=True)
    if slots is None:
        return None
    parents = [-1] * len(fleet.names)
    line = [0, *_itinerary(fleet, [i for i in range(1, len(parents)) if slots[i]])]
    for parent, node in itertools.pairwise(line):
        parents[node] = parent
        slots[parent] -= 1
    leaves = [node for node in range(1, len(parents)) if parents[node] < 0]
    # From the end of the chain, where a leaf delays no other node.
    places = [node for node in reversed(line) for _ in range(min(slots[node], len(leaves)))]
    by_region: dict[str, deque[int]] = {}
    for node in places:
        by_region.setdefault(fleet.regions[node], deque()).append(node)
    strangers = []
    for node in leaves:
        own = by_region.get(fleet.regions[node])
        if own:
            parents[node] = own.popleft()
        else:
            strangers.append(node)
    left = Counter(node for own in by_region.values() for node in own)
    rest = (node for node in reversed(line) for _ in range(left[node]))
    for node in strangers:
        parents[node] = next(rest)
    return parents


def bounded_tree(
    fleet: Sites, *, does_spare_learner: bool, is_by_region: bool = True, share: float = 1.0
) -> list[int] | None:
    """Return the fastest degree-bounded tree over all nodes.

    Each node has at most as many children as its uplink can feed.

    None if the nodes cannot serve enough children.

    Args:
        fleet: the learner and the nodes.
        does_spare_learner: whether the learner sends the version exactly once.
        is_by_region: whether the tree avoids links between regions. If it does, and the uplinks
            within a region can feed all its nodes, only one link enters the region.
        share: share of the largest possible rate for which to build the tree. A smaller share makes
            a flatter tree.
    """
    groups = _numbered(fleet.regions) if is_by_region else [0] * len(fleet.names)
    slots = slots_of(fleet, does_spare_learner=does_spare_learner, share=share, groups=groups)
    if slots is None:
        return None
    load_s = [n / uplink if uplink else 0.0 for n, uplink in zip(slots, fleet.uplinks, strict=True)]
    return _Grower(fleet, _deal(slots, groups), groups, load_s).grow()


def slots_of(
    fleet: Sites, *, does_spare_learner: bool, share: float = 1.0, groups: Sequence[int] = ()
) -> list[int] | None:
    """Return each node's slots: the number of children that the node can serve at the best rate.

    None if the nodes cannot serve enough children at any rate.

    Args:
        fleet: the learner and the nodes.
        does_spare_learner: whether the learner sends the version exactly once.
        share: share of the largest possible rate for which to count slots; a smaller share gives
            more slots.
        groups: the region of each node, as a number. The learner's region is 0. One link enters
            each other region.
    """
    needed = fleet.num_receivers
    uplinks = np.array(fleet.uplinks)
    regions = np.array(groups or [0] * len(uplinks))
    within = np.array(_links_within(regions.tolist()))

    def slots_at(rate: float) -> _Counts:
        slots = np.minimum(np.floor(uplinks / rate), needed)
        slots[0] = 1 if does_spare_learner else max(slots[0], 1)
        return slots

    def feeds(slots: _Counts) -> _Counts:
        return np.bincount(regions, weights=slots) - within

    def largest(is_enough: Callable[[_Counts], bool]) -> float:
        low, high = 0.0, max(fleet.uplinks)
        for _ in range(_STEPS):
            rate = (low + high) / 2
            low, high = (rate, high) if is_enough(slots_at(rate)) else (low, rate)
        return low if low > high * 1e-6 else 0.0

    rate = largest(lambda slots: bool(slots.sum() >= needed))
    if not rate:  # only the learner can serve, and it may send one copy only
        return None
    if within.any():
        bound = feeds(slots_at(rate / (1 + REGION_COST))) >= 0
        rate = largest(lambda s: bool(s.sum() >= needed and (feeds(s)[bound] >= 0).all()))
    return [int(n) for n in slots_at(rate * share)]


def _links_within(groups: Sequence[int]) -> list[int]:
    """Return, for each region, the smallest number of links that start in the region.

    In a region of n nodes, n - 1 nodes get the version from a node of the same region. In the
    learner's region, all n nodes besides the learner get the version within the region, and one
    more link leads to another region. So n + 1 links start in this region. If there is only one
    region, no minimum is needed, and the result is [0].
    """
    sizes = [0] * (max(groups) + 1)
    for group in groups[1:]:
        sizes[group] += 1
    if len(sizes) == 1:
        return [0]
    return [size - 1 if group != groups[0] else size + 1 for group, size in enumerate(sizes)]


def _numbered(regions: tuple[str, ...]) -> list[int]:
    numbers = {name: index for index, name in enumerate(dict.fromkeys(regions))}
    return [numbers[name] for name in regions]


def _deal(slots: list[int], groups: list[int]) -> list[int]:
    """Return each node's number of children, which is at most the node's number of slots."""
    num_receivers = len(slots) - 1
    home, *others = _links_within(groups)
    own = [0] * (1 + len(others))
    for node, group in enumerate(groups):
        own[group] += slots[node]
    # Other regions get no more of the learner's slots than they lack.
    others = [min(links, n) for links, n in zip(others, own[1:], strict=True)]
    dealt = [0] * len(slots)
    dealt[0] = min(num_receivers - sum(others), slots[0])
    gap = num_receivers - dealt[0]
    within = [home - dealt[0] if others else num_receivers, *others]
    serving = sorted((i for i in range(1, len(slots)) if slots[i]), key=lambda i: (-slots[i], i))
    for node in serving:
        taken = min(slots[node], gap, max(0, within[groups[node]]))
        dealt[node] = taken
        gap -= taken
        within[groups[node]] -= taken

    def left(node: int) -> int:
        return slots[node] - dealt[node]

    # The remaining slots are for links between regions.
    for node in sorted(serving, key=lambda i: (not dealt[i], -left(i), i)):
        taken = min(left(node), gap)
        dealt[node] += taken
        gap -= taken
    return dealt


class _Grower:
    def __init__(
        self, fleet: Sites, places: list[int], groups: list[int], load_s: list[float]
    ) -> None:
        """Start with a tree that has only the learner.

        Args:
            fleet: the learner and the nodes.
            places: number of children that each node may serve.
            groups: the region of each node, as a number.
            load_s: seconds that each node needs to send a byte to all its children.
        """
        self._fleet, self._places, self._groups, self._load_s = fleet, list(places), groups, load_s
        self._parents = [-1] * len(places)
        self._lags = [0.0] * len(places)
        num_groups = max(groups) + 1
        self._open: list[list[int]] = [[] for _ in range(num_groups)]
        self._surplus = [0] * num_groups
        """Number of slots that each region has beyond its own need."""
        for node, group in enumerate(groups):
            self._surplus[group] += places[node] - (node > 0)
        self._open[groups[0]].append(0)

    def grow(self) -> list[int]:
        """Attach every node and return the tree.

        Nodes that may serve children are attached first, region by region. The learner's region is
        the first, so that no link leads back into this region. The other regions are sorted by the
        number of children that they can serve in other regions, the largest number first. The
        leaves are attached last.
        """
        places, groups = self._places, self._groups
        surplus = tuple(self._surplus)
        nodes = range(1, len(places))
        interior = sorted(
            (i for i in nodes if places[i]),
            key=lambda i: (groups[i] > 0, -surplus[groups[i]], groups[i], -places[i], i),
        )
        for node in [*interior, *(i for i in nodes if not places[i])]:
            self._attach(node)
            if places[node]:
                self._open[self._groups[node]].append(node)
        return self._parents

    def _attach(self, node: int) -> None:
        own = self._groups[node]
        group = own if self._open[own] else self._exporter()
        if group != own:
            self._surplus[group] -= 1
            self._surplus[own] += 1
        open_nodes = self._open[group]
        near = open_nodes[:WINDOW]
        arrivals = self._chunk_times(near, node)
        # Only traffic that leaves a region is paid for.
        prices = [self._fleet.prices[i] if group != own else 0.0 for i in near]
        index = min(range(len(near)), key=lambda i: (prices[i], arrivals[i]))
        parent = near[index]
        self._parents[node], self._lags[node] = parent, arrivals[index]
        self._places[parent] -= 1
        if not self._places[parent]:
            del open_nodes[index]

    def _exporter(self) -> int:
        """Return the region from which to start a link into another region.

        The region must have an attached node with a free slot. The result is the region with the
        most slots beyond those that the region's own nodes need.
        """
        regions = [group for group, nodes in enumerate(self._open) if nodes]
        return max(regions, key=lambda group: (self._surplus[group], -group))

    def _chunk_times(self, parents: list[int], node: int) -> list[float]:
        lags, load_s, rtt_s = self._lags, self._load_s, self._fleet.rtt_s
        return [lags[p] + load_s[p] * 1e6 + rtt_s(p, node) / 2 for p in parents]


def _itinerary(fleet: Sites, nodes: list[int]) -> list[int]:
    home = fleet.regions[0]
    waiting = sorted(
        nodes,
        key=lambda i: (fleet.regions[i] != home, fleet.regions[i], fleet.rtt_s(0, i), i),
    )
    found = [0]
    for _, group in itertools.groupby(waiting, key=lambda i: fleet.regions[i]):
        region = list(group)
        last = min(region, key=lambda i: fleet.prices[i])  # the node leads to the next region
        if fleet.prices[last] == max(fleet.prices[i] for i in region):
            last = -1
        while region:
            near = [i for i in region[:WINDOW] if i != last] or region
            chosen = min(near, key=lambda i: fleet.rtt_s(found[-1], i))
            region.remove(chosen)
            found.append(chosen)
    return found[1:]
