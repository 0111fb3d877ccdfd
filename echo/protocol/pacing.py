"""How a learner with thousands of nodes keeps its work per node flat.

* `Paced`: work that goes through all nodes (grant leases, plan the links) is asked for by nearly
  every message. In a small fleet it is done at once; in a large one no more often than in
  proportion to its size, so that what it costs per second does not depend on the size.
* `Deadlines`: the first of many instants that move, without looking at all of them.
* `OncePerMinute`: what is logged about peers that misbehave.
* `earliest`: of a few instants; sessions ask for it after every message.
"""

from __future__ import annotations

GRANT_S = 3e-4
"""Seconds per node between two rounds of grants: 0.3 s with 1000 nodes, of which each holds more
groups than it samples at a time."""
PLAN_S = 1e-2
"""The same between two plans: 10 s with 1000 nodes, so that many who join make one plan."""
