"""Who is limited by its own downlink, as far as that can be told from what everybody received.

As a rule a node receives what its parents can spare, and that says nothing of its downlink. To take
it for a limit would be worse than to know nothing: a plan that is slow for another reason would
prove itself right for ever. So a node is limited by itself only if all its parents could have given
it clearly more: they receive faster than it does, and all that they send is clearly less than their
uplinks have carried.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

LIMIT_SHARE = 0.7
"""What is below this share of another rate is clearly less."""


def downlink_limits(
    parents: Mapping[str, Sequence[str]],
    received: Mapping[str, float],
    uplinks: Mapping[str, float],
    *,
    root: str,
) -> dict[str, float]:
    """Return what the nodes can take that are limited by themselves, in bytes per second.

    Args:
        parents: of every node those that it took weights from, one per stripe.
        received: bytes per second that came to a node in all, over busy time, where known.
        uplinks: bytes per second that a node has been seen to send, where known.
        root: the learner, which has everything.
    """
    loads: dict[str, float] = defaultdict(float)
    for node_id, names in parents.items():
        for name in names:
            loads[name] += received.get(node_id, 0.0) / len(names)

    def could_give_more(parent: str, rate: float) -> bool:
        has = math.inf if parent == root else received.get(parent, 0.0)
        return rate < LIMIT_SHARE * has and loads[parent] < LIMIT_SHARE * uplinks.get(parent, 0.0)

    return {
        node_id: received[node_id]
        for node_id, names in parents.items()
        if names
        and node_id in received
        and all(could_give_more(name, received[node_id]) for name in names)
    }
