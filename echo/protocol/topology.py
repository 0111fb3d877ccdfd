"""Who gets weights from whom: pure planning over what is known of the nodes.

The plan is a map node -> parents in order of preference, the learner always last, so that any node
can fall back without asking. So far it is one chain through the nodes that can listen; nodes that
cannot are leaves on it. Trees and stripes from measured rates enter here, behind `plan_parents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo.protocol.messages import LEARNER_ID


@dataclass(frozen=True, slots=True)
class Site:
    """What the planner knows of a node."""

    node_id: str
    role: str
    address: str | None
    """Where it serves weights; None for a node that can only dial out."""


def plan_parents(
    sites: Sequence[Site], *, learner_address: str
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return each node's parents, most wanted first.

    Relays come first in the chain, since they exist to serve; then workers that can listen, in the
    order given. Leaves are dealt round robin from the end of the chain, so that the learner's
    uplink carries a version once.

    Args:
        sites: every live node except the learner, in a stable order (that of joining).
        learner_address: the learner's advertised address; empty for "as you reached it".
    """
    learner = (LEARNER_ID, learner_address)
    chain = [site for site in sites if site.address is not None and site.role == "relay"]
    chain += [site for site in sites if site.address is not None and site.role != "relay"]
    hops = [(site.node_id, site.address or "") for site in chain]
    parents = {}
    for index, site in enumerate(chain):
        parents[site.node_id] = (*reversed(hops[:index]), learner)
    leaves = [site for site in sites if site.address is None]
    for number, site in enumerate(leaves):
        last = len(hops) - number % len(hops) if hops else 0
        parents[site.node_id] = (*reversed(hops[:last]), learner)
    return parents
