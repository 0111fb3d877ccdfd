"""The cheapest way from the versions that a node holds to the one it wants.

A version can be had as its full image, as an anchor (packed, but without a base), or as a delta on
top of another version, which in turn can be had in several ways. So versions are the places of a
map and what is offered are its roads; full images and anchors lead there from nowhere. The way
with the fewest bytes wins; of those the one with the fewest steps, since each step costs a pass
over the whole image.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion


@dataclass(frozen=True, slots=True)
class Offer:
    """One form in which a version can be had."""

    version: PolicyVersion
    base: PolicyVersion | None
    """The version that must be held already; None if none is needed."""
    kind: Literal["full", "anchor", "delta"]
    num_bytes: int
    """Bytes to be sent."""

    def __post_init__(self) -> None:
        """Check the fields against each other: they come from the network."""
        if (self.base is None) == (self.kind == "delta") or self.num_bytes < 0:
            raise RemoteProtocolError(
                f"an impossible offer of {self.version}: {self.kind} of {self.num_bytes} bytes "
                f"on top of {self.base}"
            )


_Entry: TypeAlias = tuple[int, int, int, PolicyVersion | None, tuple[Offer, ...]]
"""Bytes and steps so far, a number that no other entry has, the place reached, and how."""


def cheapest_path(
    held: Collection[PolicyVersion], offers: Sequence[Offer], target: PolicyVersion
) -> list[Offer] | None:
    """Return what to fetch, in order: fewest bytes, then fewest steps, then what is offered first.

    Args:
        held: versions whose image the node has.
        offers: what can be fetched.
        target: the version it wants.

    Returns:
        The offers to take one after the other, empty if the target is held; None if there is no
        way to it.
    """
    if target in held:
        return []
    roads: dict[PolicyVersion | None, list[Offer]] = {}
    for offer in offers:
        roads.setdefault(offer.base, []).append(offer)
    order = itertools.count()
    start: PolicyVersion | None = None  # where the roads without a base begin
    queue: list[_Entry] = [(0, 0, next(order), place, ()) for place in (start, *sorted(held))]
    reached: set[PolicyVersion | None] = set()
    while queue:
        num_bytes, num_steps, _, place, path = heapq.heappop(queue)
        if place == target:
            return list(path)
        if place in reached:
            continue
        reached.add(place)
        for offer in roads.get(place, ()):
            if offer.version not in reached:
                total = num_bytes + offer.num_bytes
                entry = (total, num_steps + 1, next(order), offer.version, (*path, offer))
                heapq.heappush(queue, entry)
    return None


def path_bytes(path: Sequence[Offer]) -> int:
    """Return the bytes to be fetched along a path."""
    return sum(offer.num_bytes for offer in path)
