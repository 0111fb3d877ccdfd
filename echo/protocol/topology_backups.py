"""Name for each node and stripe the parents to turn to, in order of preference.

The parent in the tree comes first, the learner last, stand-ins between: the grandparent, a node
beside the parent (which does not share the parent's fate), further ancestors.

Why falling back makes no circle: every node on a list for a stripe lies strictly nearer to the
learner in that stripe's tree, counted in hops. So whichever entries the nodes choose, each at its
own will, every step leads to fewer hops, and the walk ends at the learner. This holds within one
plan; while nodes follow plans of different epochs a circle is possible for a moment, and the
progress watchdog ends it, since every list ends in the learner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo.protocol.topology_fleet import Fleet, Hop
from echo.protocol.topology_fluid import Trees, num_children, order

MAX_PARENTS = 6
"""Entries for one node and stripe, the learner included."""

Parents = Mapping[str, tuple[tuple[Hop, ...], ...]]
"""Node id -> for each stripe -> parents in order of preference."""


def with_backups(fleet: Fleet, trees: Trees, *, previous: Parents) -> Parents:
    """Return everyone's parents.

    Args:
        fleet: the nodes.
        trees: for each stripe the parent of each node.
        previous: lists in force; one that still serves is kept, so that nodes need not be told.
    """
    counts = num_children(trees)
    numbers = {name: index for index, name in enumerate(fleet.names)}
    hops = list(zip(fleet.names, fleet.addresses, strict=True))
    lists: list[list[tuple[Hop, ...]]] = [[] for _ in fleet.names]
    for stripe, parents in enumerate(trees):
        rows = _Rows(fleet, parents)
        for node in order(parents)[1:]:
            chosen = tuple(hops[i] for i in rows.stand_ins(node, counts))
            old = previous.get(fleet.names[node], ())[stripe : stripe + 1]
            if old and old[0] != chosen and rows.can_keep(node, old[0], numbers, hops):
                chosen = old[0]
            lists[node].append(chosen)
    return {fleet.names[i]: tuple(lists[i]) for i in range(1, len(lists))}


class _Rows:
    """One stripe's tree, row by row of equal distance from the learner."""

    def __init__(self, fleet: Fleet, parents: Sequence[int]) -> None:
        """Count hops; who can serve stands in its row, and every child knows its rank."""
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
        """Return the parents of a node, the learner last.

        Where a parent dies, its own parent has room for one child more: the first child goes there,
        the others first to nodes beside the parent, spread over the row.
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
        """Return whether a list still begins with the parent and leads to the learner."""
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
