"""Keep a plan in force while nodes come and go.

Whoever has lost its parent (it left, cannot be dialled any more, or is suspected) moves with all
that hangs from it, and newcomers become leaves: each goes where it is nearest to the learner, among
the nodes that can feed one child more at the plan's rate, else to the one with the most to spare.
A newcomer's own uplink is used only by the next new plan. Where much has changed there is nothing
to keep.
"""

from __future__ import annotations

from echo.protocol.topology_backups import Parents
from echo.protocol.topology_fleet import Fleet
from echo.protocol.topology_fluid import HOP_WORK_S, num_children

MOST_CHANGED = 0.25
"""Share of the links beyond which a plan is not patched."""


def patched(
    fleet: Fleet, previous: Parents, *, num_stripes: int, rate_bytes_per_s: float
) -> list[list[int]] | None:
    """Return the trees of a former plan, fitted to the nodes of now; None if too much changed.

    Args:
        fleet: the nodes of now.
        previous: everyone's parents in the former plan.
        num_stripes: stripes of the former plan.
        rate_bytes_per_s: what it gives every receiver.
    """
    trees = _surviving(fleet, previous, num_stripes)
    orphans = [[i for i in range(1, len(t)) if t[i] < 0] for t in trees]
    num_links = num_stripes * fleet.num_receivers
    if sum(map(len, orphans)) > max(num_stripes, MOST_CHANGED * num_links):
        return None
    counts = num_children(trees)
    former = sum(hops[0][0] == fleet.names[0] for lists in previous.values() for hops in lists)
    hosts = _Hosts(fleet, counts, rate_bytes_per_s / num_stripes, former)
    for parents, lost in zip(trees, orphans, strict=True):
        children: list[list[int]] = [[] for _ in parents]
        for node, parent in enumerate(parents):
            if parent >= 0:
                children[parent].append(node)
        reached = _below(children, 0)
        below = {node: _below(children, node) for node in lost}
        latencies = [0.0] * len(parents)
        hosts.extend_latencies(latencies, parents, reached[1:])
        # The largest subtree first: it may hold places for the others.
        for node in sorted(lost, key=lambda i: (-len(below[i]), i)):
            parents[node] = hosts.choose(reached, latencies, node)
            counts[parents[node]] += 1
            hosts.extend_latencies(latencies, parents, below[node])
            reached += below[node]
    return trees


def _surviving(fleet: Fleet, previous: Parents, num_stripes: int) -> list[list[int]]:
    numbers = {name: index for index, name in enumerate(fleet.names)}
    trees = [[-1] * len(fleet.names) for _ in range(num_stripes)]
    for node, name in enumerate(fleet.names[1:], start=1):
        for stripe, hops in enumerate(previous.get(name, ())):
            parent = numbers.get(hops[0][0], -1)
            if parent >= 0 and fleet.uplinks[parent] > 0:
                trees[stripe][node] = parent
    return trees


def _below(children: list[list[int]], node: int) -> list[int]:
    found = [node]
    for each in found:
        found += children[each]
    return found


class _Hosts:
    """Finds places for those that need one."""

    def __init__(self, fleet: Fleet, counts: list[int], share: float, former: int) -> None:
        """Look at the fleet.

        Args:
            fleet: the nodes of now.
            counts: children that each node serves, kept up to date by the caller.
            share: bytes per second that a link should carry.
            former: links that the learner served in the former plan.
        """
        self._fleet, self._counts, self._share, self._former = fleet, counts, share, former

    def extend_latencies(
        self, latencies: list[float], parents: list[int], nodes: list[int]
    ) -> None:
        """Note for nodes in order how far from the learner they are, in seconds."""
        for node in nodes:
            hop_s = self._fleet.rtt_s(parents[node], node) / 2 + HOP_WORK_S
            latencies[node] = latencies[parents[node]] + hop_s

    def choose(self, reached: list[int], latencies: list[float], node: int) -> int:
        """Return the parent for a node; more of the learner only if nobody else has room."""
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
