"""Fleets as the planner's figures know them, and what must hold of every plan."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from echo.weights.topology.plan import Topology
from echo.weights.topology.sites import Site, Sites, survey

MBIT = 125e3
"""Bytes per second."""

DRAWS: dict[str, Callable[[random.Random], float]] = {
    "log-normal": lambda rng: min(1000.0, 100 * math.exp(rng.gauss(0, 1))) * MBIT,
    "80/20": lambda rng: (1000 if rng.random() < 0.2 else 20) * MBIT,
    "half NAT": lambda rng: (500 if rng.random() < 0.5 else 0) * MBIT,
}
"""Uplinks of the receivers; the learner has 1 Gbit/s, downlinks have at least 200 Mbit/s."""


def learner(mbit: float | None = 1000.0, *, region: str = "") -> Site:
    rate = None if mbit is None else mbit * MBIT
    return Site("learner", "learner", "tcp://l:1", rate, region=region)


def site(name: str, mbit: float | None = 100.0, **known: object) -> Site:
    rate = None if mbit is None else mbit * MBIT
    return Site(name, "worker", f"tcp://{name}:1", rate, **known)  # type: ignore[arg-type]


def draw(kind: str, num_nodes: int, rng: random.Random) -> list[Site]:
    found = []
    for i in range(num_nodes):
        up = DRAWS[kind](rng)
        address = f"tcp://n{i}:1" if up else None
        found.append(Site(f"n{i}", "worker", address, up, max(200 * MBIT, up)))
    return found


def flat(first: str, second: str) -> float:
    """Return the same round trip for all."""
    return 0.04


def fleet_of(sites: list[Site], root: Site | None = None) -> Sites:
    return survey(sites, learner=root or learner(), rtt_s=flat)


def tree_of(topology: Topology) -> dict[str, str]:
    """Return the first parent of each node."""
    return {name: hops[0][0] for name, hops in topology.parents.items()}


def depth(parents: dict[str, str], name: str) -> int:
    """Return the hops from the learner; a circle fails."""
    hops = 0
    while name != "learner":
        name = parents[name]
        hops += 1
        assert hops <= len(parents), "a circle"
    return hops


def check(topology: Topology, sites: list[Site]) -> None:
    """Assert what holds of every plan."""
    serving = {s.node_id: s.address for s in sites if s.address is not None and not s.is_suspect}
    assert topology.parents.keys() == {s.node_id for s in sites}
    parents = tree_of(topology)
    depths = {name: depth(parents, name) for name in parents} | {"learner": 0}
    for name, hops in topology.parents.items():
        names = [node_id for node_id, _ in hops]
        assert len(set(names)) == len(names) <= 6
        assert hops[-1] == ("learner", "tcp://l:1")
        for node_id, address in hops[:-1]:
            assert serving[node_id] == address
        # So any mixture of choices leads to the learner.
        assert all(depths[node_id] < depths[name] for node_id in names)
