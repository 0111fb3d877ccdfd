"""The learner's view of the links, and the plan that it makes of it.

A plan is made when a node joins or leaves, when one is caught sending wrong chunks, and again every
REPLAN_S while versions take longer than WORTHWHILE_S to spread: then what the transfers have shown
of the links may ask for another one. While versions are on their way it must save more: whoever
changes its parent in the middle of a transfer loses time, and what is under way. So one is made
before a version goes out, too, unless there was one at rest less than REPLAN_S ago: where versions
follow each other closely, links would otherwise be known better and better to no use.
`plan_topology` keeps the plan in force unless another is clearly better; only in a small fleet it
starts afresh when a node that can serve has come or gone.

What is known: each node's uplink from the chunks that its children have acknowledged, its downlink
where that limits it (`downlinks.py`), its round trip to its parent, its region and
the price of its traffic from its configuration, and whom it caught sending wrong chunks: those
serve nobody any more until the quarantine is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from echo.core.timers import MANY_NODES
from echo.protocol.downlinks import downlink_limits
from echo.protocol.membership import Member
from echo.protocol.topology import Topology, plan_parents, plan_topology
from echo.protocol.topology_fleet import Site
from echo.protocol.transfer import Chunked
from echo.wire.messages import LEARNER_ID, TopologyPlan

REPLAN_S = 10.0
MIN_GAIN, BUSY_GAIN = 0.03, 0.1
"""Share of the predicted time that another plan must save, at rest and in mid-transfer."""
WORTHWHILE_S = 0.5
SAME_REGION_RTT_S = 0.005
ASSUMED_RTT_S = 0.05
MAX_REBUILT = 64
"""Nodes up to which the plan is made from scratch when one that can serve has come or gone."""
ASSUMED_PAYLOAD_BYTES = 1 << 30
"""Size of a version before the first one is published."""


@dataclass(frozen=True, slots=True)
class _View:
    """What is known of the links at one instant."""

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
        """Return the plan for some of the sites."""
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
        # Asked for many times by every plan.
        region = self.regions[first]
        if region and region == self.regions[second]:
            return SAME_REGION_RTT_S
        one, other = self.rtts.get(first), self.rtts.get(second)
        if one is None or other is None:
            found = one if other is None else other
            return ASSUMED_RTT_S if found is None else found
        return one if one > other else other


class Planning:
    """Which plan is in force."""

    def __init__(self, *, learner: Site, chunk_bytes: int) -> None:
        """Start without nodes.

        Args:
            learner: its address may be empty for "as you reached it"; its uplink counts until
                transfers have shown it.
            chunk_bytes: unit of forwarding, until a version has been published.
        """
        self.learner = learner
        self.chunk_bytes = chunk_bytes
        self.payload_bytes = ASSUMED_PAYLOAD_BYTES
        self.epoch = 0
        self.topology: Topology | None = None
        self.downlink_limits: dict[str, float] = {}
        """Bytes per second that nodes can take which are limited by themselves, as last seen."""
        self._planned_at, self._rested_at, self._num_nodes = 0.0, 0.0, 0
        self._listening: tuple[str, ...] = ()

    def expect(self, payload: Chunked | None) -> None:
        """Plan for versions of that size, forwarded in such chunks."""
        if payload is not None and payload.num_chunks:
            self.payload_bytes, self.chunk_bytes = payload.num_bytes, payload.chunk_size(0)

    def is_due(self, *, now: float, is_between: bool = False) -> bool:
        """Return whether what has been learned meanwhile may ask for another plan.

        Args:
            now: the present.
            is_between: whether one version has been sent and the next is about to be.
        """
        if self.topology is None or self.topology.predicted_s < WORTHWHILE_S:
            return False
        # A plan costs in proportion to the fleet: larger ones are looked at less often.
        period_s = REPLAN_S * max(1.0, self._num_nodes / MANY_NODES)
        return now >= (self._rested_at if is_between else self._planned_at) + period_s

    def plan(
        self,
        members: Sequence[Member],
        *,
        uplink_bytes_per_s: float | None,
        now: float,
        is_between: bool = False,
    ) -> dict[str, TopologyPlan]:
        """Plan anew and return every member's plan, changed or not.

        Workers on standby get no weights: neither do they slow those down that generate, nor is
        traffic paid for that nobody uses. Activated again, they fetch what they lack like a late
        joiner.

        Args:
            members: every live node except the learner, in the order in which they joined.
            uplink_bytes_per_s: the learner's own, as far as it is known.
            now: the present.
            is_between: whether one version has been sent and the next is about to be.
        """
        self._planned_at, self._num_nodes = now, len(members)
        receivers = [member for member in members if not member.is_standby]
        view = self._survey(receivers, uplink_bytes_per_s)
        if not self.learner.address:
            plans = self._plan_behind_relays(view.sites)
        else:
            is_busy = any(member.stats.fetching is not None for member in receivers)
            # In its first version a fleet is unknown, and almost any other plan teaches something.
            is_settled = all(member.installed is not None for member in receivers)
            does_disturb = is_busy and is_settled and not is_between
            if not does_disturb:
                self._rested_at = now
            plans = self._plan_from(view, BUSY_GAIN if does_disturb else MIN_GAIN)
        for member in members:
            if member.is_standby:
                plans[member.node_id] = TopologyPlan(epoch=self.epoch, stripes=())
        return plans

    def move(
        self,
        members: Sequence[Member],
        *,
        uplink_bytes_per_s: float | None,
        now: float,
        is_between: bool = False,
    ) -> list[tuple[str, TopologyPlan]]:
        """Plan anew, as `plan`; return (node id, plan) of those whose parents change."""
        plans = self.plan(
            members, uplink_bytes_per_s=uplink_bytes_per_s, now=now, is_between=is_between
        )
        moved = []
        for member in members:
            plan = plans[member.node_id]
            if member.plan is None or member.plan.stripes != plan.stripes:
                member.plan = plan
                moved.append((member.node_id, plan))
        return moved

    def forecast(
        self, members: Sequence[Member], *, uplink_bytes_per_s: float | None
    ) -> Callable[[Collection[str]], float]:
        """Return (node ids) -> seconds of a broadcast to those of `members` alone.

        What it returns knows the links as they are now, and may be called in another thread.
        """
        view = self._survey(members, uplink_bytes_per_s)
        payload_bytes, chunk_bytes = self.payload_bytes, self._forwarded_bytes

        def broadcast_s(names: Collection[str]) -> float:
            chosen = set(names)
            sites = [site for site in view.sites if site.node_id in chosen]
            return view.plan(sites, payload_bytes, chunk_bytes).predicted_s

        return broadcast_s

    def _survey(self, members: Sequence[Member], uplink_bytes_per_s: float | None) -> _View:
        """Return what is known of the links."""
        # Relays exist to serve: they come first wherever nothing else is known.
        ordered = sorted(members, key=lambda member: member.role != "relay")
        suspects = {name for member in ordered for name in member.stats.suspects}
        rtts = {member.node_id: member.stats.rtt_s for member in ordered}
        regions = {member.node_id: member.region for member in ordered}
        regions[LEARNER_ID] = self.learner.region
        learner = Site(
            self.learner.node_id,
            "learner",
            self.learner.address,
            uplink_bytes_per_s=uplink_bytes_per_s or self.learner.uplink_bytes_per_s,
            region=self.learner.region,
            price_per_gb=self.learner.price_per_gb,
        )
        uplinks = {member.node_id: member.stats.uplink_bytes_per_s for member in ordered}
        uplinks[LEARNER_ID] = uplink_bytes_per_s
        received = {member.node_id: member.stats.downlink_bytes_per_s for member in ordered}
        self.downlink_limits = downlink_limits(
            {member.node_id: member.stats.parent.split(",") for member in ordered},
            {name: rate for name, rate in received.items() if rate is not None},
            {name: rate for name, rate in uplinks.items() if rate is not None},
            root=LEARNER_ID,
        )
        sites = tuple(self._site(member, suspects) for member in ordered)
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
            node_id: TopologyPlan(epoch=self.epoch, stripes=stripes)
            for node_id, stripes in topology.parents.items()
        }

    def _plan_behind_relays(self, sites: Sequence[Site]) -> dict[str, TopologyPlan]:
        """Plan one chain, relays first.

        The learner tells nobody its address, so who reaches it through a relay cannot take weights
        from it.
        """
        self.epoch += 1
        parents = plan_parents(sites, learner_address="")
        return {
            node_id: TopologyPlan(epoch=self.epoch, stripes=(hops,))
            for node_id, hops in parents.items()
        }

    def _site(self, member: Member, suspects: set[str]) -> Site:
        return Site(
            member.node_id,
            member.role,
            member.advertise,
            uplink_bytes_per_s=member.stats.uplink_bytes_per_s,
            downlink_bytes_per_s=self.downlink_limits.get(member.node_id),
            region=member.region,
            price_per_gb=member.price_per_gb,
            is_suspect=member.node_id in suspects,
        )
