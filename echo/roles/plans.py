"""Plans the broadcast at the learner: decides when to plan, and tells nodes their new parents.

`weights/topology/plan.py` computes the plan from the measured uplinks. A node whose parents have
changed gets its part of the plan. The interval between two plans is at least PLAN_S times the
number of nodes. So planning takes a bounded share of the time, even in a large fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from echo.core.bounds import clamped_rate
from echo.core.timers import Paced
from echo.roles.members import Member, Roster
from echo.weights.broadcast import Broadcast
from echo.weights.rates import UplinkProbe
from echo.weights.topology.plan import PLAN_S, Planner
from echo.weights.topology.sites import Site
from echo.wire.actions import Action, Routes
from echo.wire.messages import LEARNER_ID, Heartbeat


@dataclass(frozen=True, slots=True)
class Publishing:
    """Event: a version of the weights will be published now."""


class Plans:
    """Makes a plan of the broadcast when it is due, and sends nodes their new parents."""

    def __init__(
        self,
        site: Site,
        *,
        chunk_bytes: int,
        uplinks: Mapping[str, float],
        roster: Roster,
        broadcast: Broadcast,
        routes: Routes,
    ) -> None:
        """Start without a plan. The first plan is made when the first node joins.

        Args:
            site: the learner's place in the network.
            chunk_bytes: assumed size of a chunk before the first version.
            uplinks: bytes per second that each node could send before the run was resumed, by node
                id.
            roster: the known nodes.
            broadcast: sends the versions and measures the learner's uplink.
            routes: send messages to the nodes.
        """
        self.planner = Planner(learner=site, chunk_bytes=chunk_bytes)
        self._roster, self._broadcast, self._routes = roster, broadcast, routes
        self._paced = Paced(PLAN_S)
        self._probing = UplinkProbe(broadcast.uplink, node_id=LEARNER_ID)
        for node_id, bytes_per_s in uplinks.items():
            roster.uplinks[node_id] = bytes_per_s
        if LEARNER_ID in uplinks:
            broadcast.uplink.show(uplinks[LEARNER_ID])

    @property
    def version_bytes(self) -> int:
        """Number of bytes that are sent for the newest version; 0 before the first version."""
        payload = self._broadcast.payload
        return 0 if payload is None else payload.num_bytes

    def uplinks(self) -> dict[str, float]:
        """Return the bytes per second that each node can send, including the learner.

        Keys are node ids.
        """
        own = clamped_rate(self._broadcast.uplink.bytes_per_s)
        return self._roster.uplinks.as_dict() | ({LEARNER_ID: own} if own else {})

    # --- when a plan is due ----------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """Time at which a delayed plan is due; None if no plan is delayed."""
        return self._paced.deadline

    def want(self, *, now: float) -> None:
        """Request a plan. The plan is made at the next deadline."""
        self._paced.want(now=now)

    def is_due(self, *, now: float) -> bool:
        """Return whether a delayed plan is due."""
        return self._paced.is_due(now=now)

    def replan(self, now: float, *, is_between: bool = False) -> list[Action]:
        """Make a plan now. Return the actions that send it to the nodes whose parents have changed.

        If the last plan was made too recently, delay the plan until the next deadline.

        Args:
            now: the present time, seconds.
            is_between: whether one version has been sent and the next will be sent soon. At this
                time, changed parents disturb no transfer.
        """
        if not self._paced.may(len(self._roster.nodes), now=now):
            return []
        self.planner.expect(self._broadcast.payload)
        moved = self.planner.move(
            [member.node for member in self._roster.members()],
            uplink_bytes_per_s=self._broadcast.uplink.bytes_per_s,
            now=now,
            is_between=is_between,
        )
        return [action for name, plan in moved for action in self._routes.to(name, plan)]

    def before_publish(self, *, now: float) -> list[Action]:
        """Prepare for the publication of a version. If a plan is due, make the plan first."""
        is_due = self.planner.is_due(now=now, is_between=True)
        return self.replan(now, is_between=True) if is_due else []

    # --- what heartbeats and probes show ---------------------------------------------------------

    def before_heartbeat(self, member: Member, message: Heartbeat, *, now: float) -> list[Action]:
        """Record what a heartbeat says about links. If a probe is started, return its actions.

        Call this method before `Member.beat`, which replaces the statistics of the previous
        heartbeat. This method compares the two heartbeats.
        """
        self.planner.learn(message.stats, former=member.stats)
        if message.stats.uplink_bytes_per_s:
            self._roster.uplinks[member.node_id] = message.stats.uplink_bytes_per_s
        return self._probe(member, now)

    def repeat(self, member: Member) -> list[Action]:
        """If a node's reported parent is not the first parent in its plan, send the plan again.

        The plan may have been lost.
        """
        plan = member.node.plan
        if plan is None or member.stats.parent == plan.first_parent:
            return []
        plan = msgspec.structs.replace(plan, epoch=self.planner.epoch)
        return self._routes.to(member.node_id, plan)

    def _probe(self, member: Member, now: float) -> list[Action]:
        """Start to measure the learner's uplink with a probe to a node.

        The node must have measured its own uplink, so that the two measurements do not delay each
        other. While weights are sent, no probe is sent, because the probe would measure only the
        remaining bandwidth.
        """
        peer = self._routes.peer_of(member.node_id)
        is_shown = member.stats.uplink_bytes_per_s is not None
        if peer is None or not is_shown or self._broadcast.is_serving:
            return []
        return self._probing.begin(peer, payload_bytes=self.version_bytes, now=now)

    def on_probe_ack(self, peer: str, *, now: float) -> list[Action]:
        """Handle the acknowledgement of a probe, which measures the learner's uplink."""
        was_known = self._broadcast.uplink.bytes_per_s is not None
        actions = self._probing.acknowledged(peer, now=now)
        if not was_known and self._broadcast.uplink.bytes_per_s is not None:
            self.planner.has_news = True
        return actions
