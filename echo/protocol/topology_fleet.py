"""What the topology planner knows of the nodes, as numbers.

Nodes are counted from 1 in the order given, the learner is 0, so that plans are lists of integers.

Rates that nobody has measured yet are assumed: an unknown uplink is the median of the known ones
(the learner's among them), and if none is known all are equal; an unknown downlink is no limit,
since downlinks are told only of nodes that were seen to be limited by them. A node that cannot be
dialled, or that is suspected of having sent a corrupt chunk, serves nobody: its uplink counts as
nothing. The same holds for stragglers: nodes with a downlink so thin that whoever hung from them
would starve.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Hop = tuple[str, str]
"""(node id, address); an empty address means: as this node reached it itself."""

ASSUMED_BYTES_PER_S = 12.5e6
"""100 Mbit/s each, if nothing is known: only the proportions between nodes matter then."""

STRAGGLER_SHARE = 0.5
"""A node whose downlink is below this share of what the uplinks could give is not waited for."""


@dataclass(frozen=True, slots=True)
class Site:
    """What is known of a node."""

    node_id: str
    role: str
    address: str | None
    """Where it serves weights; None for a node that can only dial out: always a leaf."""
    uplink_bytes_per_s: float | None = None
    """What it can send in all; None if no transfer has shown it yet."""
    downlink_bytes_per_s: float | None = None
    """What it can take; None unless it was seen to take less than was offered (`rates.py`)."""
    region: str = ""
    """Where it stands, any name; empty for unknown: then it gets no special treatment."""
    price_per_gb: float = 0.0
    """Price of 1e9 bytes that leave its region."""
    is_suspect: bool = False
    """Quarantined: always a leaf, nobody's parent."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The learner (0) and the nodes (1..), by number."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    """Where it is dialled; empty for "as you reached it" or not at all."""
    uplinks: tuple[float, ...]
    """Bytes per second to others; 0 for a node that serves nobody."""
    downlinks: tuple[float, ...]
    stragglers: frozenset[int]
    """Nodes whose downlink cannot keep up with the others, whatever the plan: leaves."""
    regions: tuple[str, ...]
    prices: tuple[float, ...]
    rtts_from: Callable[[str, str], float]

    @property
    def num_receivers(self) -> int:
        """Nodes besides the learner."""
        return len(self.names) - 1

    def rtt_s(self, first: int, second: int) -> float:
        """Return the round trip between two nodes."""
        return self.rtts_from(self.names[first], self.names[second])

    def is_crossing(self, sender: int, receiver: int) -> bool:
        """Return whether a link leads from one known region to another."""
        first, second = self.regions[sender], self.regions[receiver]
        return first != second and first != "" and second != ""

    @property
    def best_rate(self) -> float:
        """Most that any plan could give to every receiver but stragglers, in bytes per second."""
        downlinks = (d for i, d in enumerate(self.downlinks) if i and i not in self.stragglers)
        return min(_uplink_rate(self.uplinks), min(downlinks, default=math.inf))


def survey(sites: Sequence[Site], *, learner: Site, rtt_s: Callable[[str, str], float]) -> Fleet:
    """Number the nodes and assume what is not known of them."""
    everyone = [learner, *sites]
    measured = [rate for site in everyone if (rate := site.uplink_bytes_per_s)]
    uplink = statistics.median_low(measured) if measured else ASSUMED_BYTES_PER_S
    downlinks = tuple(_known(site.downlink_bytes_per_s, math.inf) for site in everyone)
    uplinks = [
        _known(site.uplink_bytes_per_s, uplink) if _may_serve(site) else 0.0 for site in everyone
    ]
    # A learner without uplink would end the run; such a measurement is a mistake.
    uplinks[0] = learner.uplink_bytes_per_s or uplink
    least = STRAGGLER_SHARE * _uplink_rate(uplinks)
    stragglers = frozenset(i for i, rate in enumerate(downlinks) if i and rate < least)
    return Fleet(
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
    """Return what all uplinks together could give to every receiver; the learner's comes first."""
    return min(uplinks[0], math.fsum(uplinks) / max(1, len(uplinks) - 1))


def _may_serve(site: Site) -> bool:
    return site.address is not None and not site.is_suspect


def _known(rate: float | None, assumed: float) -> float:
    return assumed if rate is None or rate < 0 else rate
