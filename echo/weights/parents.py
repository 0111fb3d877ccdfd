"""A node's links to its parents for the weights: follow the plan, fall back, come back.

The plan names, for each stripe, parents in order of preference. Every lane (`weights/link.py`) has
one link in use, and may have a **spare** that is dialled and greeted but idle, to the next parent
of the same list. When the link in use is lost, does not answer or does not deliver, the spare takes
its place at once, even while another is dialled; without one the next parent of the list is
dialled, and after the last the first again. The link in use is kept until the one that replaces it
has answered, so a new plan never breaks a transfer.

A parent that failed while the plan stayed the same is preferred again when the learner repeats the
plan (it does so while the node's parent is another), but not before `retry_preferred_s`, and later
each time, or two that both lack what there is would keep a node between them. One that
sent chunks with wrong hashes is **quarantined**: it is passed over for QUARANTINE_S, unless it is
the learner.
"""

from __future__ import annotations

import itertools

from echo.core.timers import earliest
from echo.weights.broadcast import Broadcast
from echo.weights.link import Connection, ParentFailed, count_stripes, num_sockets
from echo.wire.actions import Action, Dial, HangUp, Note
from echo.wire.messages import LEARNER_ID, TopologyPlan

CONNECT_TIMEOUT_S = 3.0
"""Seconds to wait for a dialled address before the next; a WAN handshake takes under 1."""
QUARANTINE_S = 600.0
REDIVIDE_AFTER_S = 5.0
"""Wait for the end of a fetch: what is under way is lost then, below a slow parent much time."""


class StripeParents:
    """Which parent one lane of a node's broadcast has."""

    def __init__(self, broadcast: Broadcast, lane: int, *, retry_s: float) -> None:
        """Start without a plan.

        Args:
            broadcast: the node's part of the weights plane; it is told the lane's parent.
            lane: which lane.
            retry_s: seconds to wait when no parent of the plan could be reached.
        """
        self.broadcast = broadcast
        self.lane = lane
        self.retry_s = retry_s
        self.retry_preferred_s = 0.0
        self.current: Connection | None = None
        self.next: Connection | None = None
        self.spare: Connection | None = None
        self.quarantined: dict[str, float] = {}
        """Node id -> until when it is passed over; shared by all lanes."""
        self._parents: tuple[tuple[str, str], ...] = ()
        self._index = 0
        self._follow_at: float | None = None
        self._spare_at: float | None = None
        self._failed_at: float | None = None
        self._num_failures = 0

    @property
    def links(self) -> list[Connection]:
        """The links that there are."""
        return [link for link in (self.current, self.next, self.spare) if link is not None]

    # --- the plan --------------------------------------------------------------------------------

    def on_parents(
        self, parents: tuple[tuple[str, str], ...], *, control: Connection | None, now: float
    ) -> list[Action]:
        """Follow a list of parents, the same as before or another."""
        if parents == self._parents:
            patience_s = self.retry_preferred_s * 2 ** min(5, max(0, self._num_failures - 1))
            is_over = self._failed_at is None or now >= self._failed_at + patience_s
            if not (self._index > 0 and self.next is None and is_over):
                return []
        self._num_failures *= parents == self._parents
        self._parents, self._index = parents, 0
        return self._follow(control, now)

    def _address(self, index: int, control: Connection | None, now: float) -> str:
        """Return where a parent of the list can be dialled, "" if it cannot be now."""
        node_id, address = self._parents[index]
        if self.quarantined.get(node_id, now) > now and node_id != LEARNER_ID:
            return ""
        if not address and control is not None and control.node_id == node_id:
            return control.address
        return address

    def _follow(self, control: Connection | None, now: float) -> list[Action]:
        """Dial the preferred parent unless the link to it stands already."""
        self._follow_at = None
        actions: list[Action] = []
        if self.next is not None:
            actions += [HangUp(self.next.peer)] if self.next.peer else []
            self.next = None
        while self._index < len(self._parents):
            if self.current is not None and self.current.node_id == self._parents[self._index][0]:
                return actions + self._keep_spare(control, now)
            address = self._address(self._index, control, now)
            if address:
                self.next = Connection(address, dialled_at=now)
                return [*actions, Dial(address, "weights")]
            self._index += 1
        self._index, self._follow_at = 0, now + self.retry_s
        return actions

    def _keep_spare(self, control: Connection | None, now: float) -> list[Action]:
        """Have a link to the next parent of the list stand by, and no other."""
        self._spare_at = None
        wanted, address = "", ""
        for index in range(self._index + 1, len(self._parents)):
            wanted, address = self._parents[index][0], self._address(index, control, now)
            if address:
                break
        if self.spare is not None and self.spare.address == address:
            return []
        actions = self._drop_spare()
        if address and (self.current is None or self.current.node_id != wanted):
            self.spare = Connection(address, dialled_at=now)
            actions.append(Dial(address, "weights"))
        return actions

    def _drop_spare(self) -> list[Action]:
        spare, self.spare = self.spare, None
        self.broadcast.set_spare(self.lane, is_ready=False)
        return [HangUp(spare.peer)] if spare is not None and spare.peer else []

    # --- links -----------------------------------------------------------------------------------

    def greeted(
        self, peer: str, node_id: str, *, control: Connection | None, now: float
    ) -> list[Action]:
        """Take weights from the parent that has answered, or have it stand by."""
        link = next((each for each in (self.next, self.spare) if each and each.peer == peer), None)
        if link is None or link.node_id:
            return []
        link.node_id, link.rtt_s = node_id, max(0.0, now - link.greeted_at)
        if link is self.spare:
            self.broadcast.set_spare(self.lane, is_ready=True)
            return []
        old, self.current, self.next = self.current, link, None
        actions: list[Action] = [HangUp(old.peer)] if old is not None else []
        actions += self.broadcast.set_parent(peer, lane=self.lane, rtt_s=link.rtt_s, now=now)
        return actions + self._keep_spare(control, now)

    def failed(
        self,
        peer: str,
        reason: str,
        *,
        control: Connection | None,
        now: float,
        is_corrupt: bool = False,
    ) -> list[Action]:
        """Go on with the spare, or with the next parent of the plan."""
        link = next((each for each in self.links if each.peer == peer), None)
        if link is None:
            return []
        return self._fail(link, reason, control=control, now=now, is_corrupt=is_corrupt)

    def _fail(
        self,
        link: Connection,
        reason: str,
        *,
        control: Connection | None,
        now: float,
        is_corrupt: bool = False,
    ) -> list[Action]:
        name = link.node_id or link.address
        actions: list[Action] = [HangUp(link.peer)] if link.peer else []
        if link is self.spare:
            self.spare, self._spare_at = None, now + self.retry_s
            self.broadcast.set_spare(self.lane, is_ready=False)
            return actions
        text = f"weights from {name} failed: {reason}"
        actions.append(Note("warning", text, f"weights from {name}"))
        if is_corrupt and link.node_id:
            self.quarantined[link.node_id] = now + QUARANTINE_S
        self._failed_at = now
        self._num_failures += 1
        if link is self.next:
            self.next = None
            self._index += 1
            return actions + self._follow(control, now)
        self.current = None
        if self.spare is not None and self.spare.node_id:
            return actions + self._use_spare(control, now)
        actions += self.broadcast.set_parent(None, lane=self.lane, now=now)
        if self.next is not None:
            return actions
        self._index += 1
        return actions + self._drop_spare() + self._follow(control, now)

    def _use_spare(self, control: Connection | None, now: float) -> list[Action]:
        link, self.spare = self.spare, None
        assert link is not None
        self.current = link
        if self.next is None:  # else the index is that of the parent that is being dialled
            names = [node_id for node_id, _ in self._parents]
            self._index = names.index(link.node_id) if link.node_id in names else self._index + 1
        self.broadcast.set_spare(self.lane, is_ready=False)
        actions = self.broadcast.set_parent(link.peer, lane=self.lane, rtt_s=link.rtt_s, now=now)
        return actions + self._keep_spare(control, now)

    def hang_up(self, *, now: float) -> list[Action]:
        """Close all links: the lane is given up."""
        peers = [link.peer for link in self.links if link.peer]
        self.current = self.next = self.spare = None
        self._follow_at = self._spare_at = None
        return [HangUp(peer) for peer in peers]

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When `expire` should be called next."""
        first = earliest(self._follow_at, self._spare_at)
        for link in (self.next, self.spare):
            if link is not None and not link.node_id:
                first = earliest(first, link.dialled_at + CONNECT_TIMEOUT_S)
        return first

    def expire(self, *, control: Connection | None, now: float) -> list[Action]:
        """Give up a parent that does not answer; try again when all have failed."""
        actions: list[Action] = []
        for link in (self.next, self.spare):
            if link is not None and not link.node_id and (
                now >= link.dialled_at + CONNECT_TIMEOUT_S
            ):  # fmt: skip
                actions += self._fail(link, "no answer", control=control, now=now)
        if self._spare_at is not None and now >= self._spare_at and self.current is not None:
            actions += self._keep_spare(control, now)
        if self._follow_at is not None and now >= self._follow_at:
            actions += self._follow(control, now)
        return actions


class Parents:
    """All lanes of a node: one or more for each stripe of the plan."""

    def __init__(self, broadcast: Broadcast, *, retry_s: float, sockets_per_link: int = 1) -> None:
        """Start with one stripe and without a plan."""
        self.broadcast = broadcast
        self.retry_s = retry_s
        self.retry_preferred_s = 0.0
        self.max_sockets = self.sockets_per_link = sockets_per_link
        self.learner_address = ""
        """As plans say; empty where they do not."""
        self._quarantined: dict[str, float] = {}
        self._epoch, self._num_stripes = -1, 1
        self._waiting: tuple[float, TopologyPlan] | None = None
        self._lanes: list[StripeParents] = []

    def reached(self, rtt_s: float) -> None:
        """Note the round trip to whoever was reached first; plans that follow use it.

        Near parents need fewer connections for the same rate than far ones.
        """
        self.sockets_per_link = num_sockets(rtt_s, most=self.max_sockets)

    @property
    def parent(self) -> str:
        """Node ids of the parents in use, one per stripe, "-" if there is none."""
        names = [
            lane.current.node_id if lane.current is not None else "-"
            for lane in self._lanes[: self._num_stripes]
        ]
        return ",".join(names) or "-"

    @property
    def rtt_s(self) -> float | None:
        """Shortest round trip to a parent."""
        links = (lane.current for lane in self._lanes)
        return min((link.rtt_s for link in links if link and link.rtt_s is not None), default=None)

    def suspects(self, *, now: float) -> tuple[str, ...]:
        """Return the nodes that are in quarantine."""
        return tuple(node_id for node_id, until in self._quarantined.items() if until > now)

    def new_learner(self) -> None:
        """Note that plans are numbered anew, as after a restart of the learner."""
        self._epoch = -1

    def on_plan(
        self, plan: TopologyPlan, *, control: Connection | None, now: float
    ) -> list[Action]:
        """Follow a plan, unless it is an old one, or for a process that bore this name before.

        One with another number of stripes waits for a fetch to end soon; one without any ends it.
        """
        if plan.epoch < self._epoch or not self.broadcast.has_key:
            return []
        self._epoch = plan.epoch
        if plan.is_standby:
            return self._rest(now)
        for node_id, address in itertools.chain(*plan.stripes):
            if node_id == LEARNER_ID and address:
                self.learner_address = address
        num_lanes = count_stripes(len(plan.stripes), self.sockets_per_link)
        is_busy = self.broadcast.fetching is not None and any(lane.current for lane in self._lanes)
        if self._lanes and num_lanes != len(self._lanes) and is_busy:
            self._waiting = (now if self._waiting is None else self._waiting[0]), plan
            return []
        return self._apply(plan, control, now)

    def _apply(self, plan: TopologyPlan, control: Connection | None, now: float) -> list[Action]:
        self._waiting = None
        self._num_stripes = len(plan.stripes)
        num_lanes = count_stripes(self._num_stripes, self.sockets_per_link)
        actions: list[Action] = []
        for link in self._lanes[num_lanes:]:
            actions += link.hang_up(now=now)
        del self._lanes[num_lanes:]
        while len(self._lanes) < num_lanes:
            link = StripeParents(self.broadcast, len(self._lanes), retry_s=self.retry_s)
            link.retry_preferred_s, link.quarantined = self.retry_preferred_s, self._quarantined
            self._lanes.append(link)
        actions += self.broadcast.set_num_lanes(num_lanes, len(plan.stripes), now=now)
        for link in self._lanes:
            parents = plan.stripes[link.lane % len(plan.stripes)]
            actions += link.on_parents(parents, control=control, now=now)
        return actions

    def _rest(self, now: float) -> list[Action]:
        """Leave all parents; what is held of a version is kept for the next plan."""
        actions = [action for link in self._lanes for action in link.hang_up(now=now)]
        self._lanes, self._waiting = [], None
        actions += self.broadcast.set_num_lanes(1, now=now)
        self.broadcast.set_spare(0, is_ready=False)
        return actions + self.broadcast.set_parent(None, now=now)

    def dialled(self, address: str, peer: str) -> None:
        """Note which peer a Dial has become."""
        for lane in self._lanes:
            for link in lane.links:
                if link.address == address and not link.peer:
                    link.peer = peer
                    return

    def connected(self, peer: str, *, now: float) -> bool:
        """Note that a link stands; return whether it is one of these and is to be greeted."""
        for lane in self._lanes:
            for link in lane.links:
                if link.peer == peer and not link.node_id:
                    link.greeted_at = now
                    return True
        return False

    def has(self, peer: str) -> bool:
        """Return whether `peer` is a parent or may become one."""
        return any(link.peer == peer for lane in self._lanes for link in lane.links)

    def greeted(
        self, peer: str, node_id: str, *, control: Connection | None, now: float
    ) -> list[Action]:
        """Handle the answer of a parent."""
        return [
            action
            for lane in self._lanes
            for action in lane.greeted(peer, node_id, control=control, now=now)
        ]

    def failed(
        self, peer: str, reason: str, *, control: Connection | None, now: float
    ) -> list[Action]:
        """Go on without a link that is gone."""
        return self.parent_failed(ParentFailed(peer, reason), control=control, now=now)

    def parent_failed(
        self, failure: ParentFailed, *, control: Connection | None, now: float
    ) -> list[Action]:
        """Go on without a parent that does not deliver."""
        return [
            action
            for lane in self._lanes
            for action in lane.failed(
                failure.peer,
                failure.reason,
                control=control,
                now=now,
                is_corrupt=failure.is_corrupt,
            )
        ]

    @property
    def deadline(self) -> float | None:
        """When `expire` should be called next."""
        first = None if self._waiting is None else self._waiting[0] + REDIVIDE_AFTER_S
        return earliest(first, *[lane.deadline for lane in self._lanes])

    def expire(self, *, control: Connection | None, now: float) -> list[Action]:
        """Give up who does not answer; follow a plan that had to wait."""
        actions: list[Action] = []
        if self._waiting is not None:
            since, plan = self._waiting
            if self.broadcast.fetching is None or now >= since + REDIVIDE_AFTER_S:
                actions += self._apply(plan, control, now)
        for lane in self._lanes:
            actions += lane.expire(control=control, now=now)
        return actions
