"""The parents of a node: chosen by the plan, replaced on failure, and tried again later.

The plan lists parents in order of preference. A node uses one connection at a time. The node may
also have an idle **spare** connection to the next parent of the list, already greeted. If the
connection in use is lost, does not answer or does not deliver, the spare connection replaces it at
once. Without a spare connection the node dials the next parent of the list. After the last parent,
the first parent is next. The node keeps the connection in use until the replacement has answered.
So a new plan never breaks a transfer.

While a node does not use its preferred parent, the learner repeats the plan. When the plan is
repeated, the node dials the preferred parent again. But after a failure, the node first waits for
`retry_preferred_s`. This wait doubles with each further failure. Otherwise a node could alternate
endlessly between two parents that lack the item. A node that sent chunks with wrong hashes is
**quarantined**: it is not dialled for QUARANTINE_S. The learner may be dialled at any time.

If no parent of the plan serves a node, the node uses its **last resort**. First the node dials the
possible addresses of the learner, and fetches weights only if the learner answers. A plan may lack
these addresses: a learner that listens on a wildcard address does not know its own address, or a
relay may have changed the plan. Then the node dials its control peer, the node at the other end of
its control connection. Behind a firewall, the control peer may be the only reachable node. If the
last resort fails as well, quarantines end after ALONE_S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo.core.timers import earliest
from echo.weights.broadcast import Broadcast
from echo.weights.link import ParentFailed
from echo.wire.actions import Action, Dial, HangUp, Note
from echo.wire.messages import LEARNER_ID, TopologyPlan

CONNECT_TIMEOUT_S = 3.0
"""Seconds to wait for the answer of a dialled address before the next address is dialled. A WAN
handshake takes less than 1 s.
"""
QUARANTINE_S = 600.0
"""Seconds for which a node that sent wrong chunks is not dialled. After a much shorter time, a node
with damaged memory would waste its children's time with each version. Without an end, a node whose
operator has repaired it would never serve again.
"""
ALONE_S = 10.0
"""Seconds after which a quarantine ends if no parent serves this node. By then, the fault of the
quarantined parent may have passed.
"""


@dataclass(slots=True)
class Connection:
    """A connection that a node has dialled, to its control peer or to a parent."""

    address: str
    peer: str = ""
    node_id: str = ""
    """The id of the node that answered; empty until Greeted arrives."""
    dialled_at: float = 0.0
    greeted_at: float = 0.0
    """Time at which this node sent Greet."""
    rtt_s: float | None = None
    """Seconds from Greet to Greeted; None until Greeted arrives."""


class Parents:
    """The parents of a node: the parent in use, the parent being dialled, and the spare parent."""

    def __init__(
        self, broadcast: Broadcast, *, addresses: Sequence[str] = (), retry_s: float
    ) -> None:
        """Start with no plan; `addresses` are the possible addresses of the learner."""
        self.receiver = broadcast.receiver
        self._broadcast = broadcast
        self._addresses = addresses
        self.retry_s = retry_s
        self.retry_preferred_s = 0.0
        self.learner_address = ""
        """The learner's address in the last plan that names one; empty before such a plan."""
        self.control: Connection | None = None
        """The control connection. If a plan names the node at its other end but no address, the
        address of this connection is used.
        """
        self.quarantined: dict[str, float] = {}
        """Node id -> time at which the node's quarantine began."""
        self.current: Connection | None = None
        self.next: Connection | None = None
        self.spare: Connection | None = None
        self._epoch = -1
        self._parents: tuple[tuple[str, str], ...] = ()
        self._index = 0
        self._follow_at: float | None = None
        self._spare_at: float | None = None
        self._failed_at: float | None = None
        self._num_failures = 0

    # --- state that others read ------------------------------------------------------------------

    @property
    def learner_addresses(self) -> list[str]:
        """The possible addresses of the learner.

        The addresses in the settings come first, then the learner's address in the plan.
        """
        planned = self.learner_address
        is_new = planned and planned not in self._addresses
        return [*self._addresses, *([planned] if is_new else [])]

    @property
    def parent(self) -> str:
        """The node id of the parent in use; "-" if no parent is in use."""
        return "-" if self.current is None else self.current.node_id

    @property
    def rtt_s(self) -> float | None:
        """The round-trip time to the parent in use, in seconds; None if no parent is in use."""
        return None if self.current is None else self.current.rtt_s

    def suspects(self, *, now: float) -> tuple[str, ...]:
        """Return the ids of the nodes that are in quarantine."""
        since = self.quarantined.items()
        return tuple(node_id for node_id, began_at in since if now < began_at + QUARANTINE_S)

    def has(self, peer: str) -> bool:
        """Return whether `peer` leads to the parent in use, the one being dialled or the spare."""
        return any(each.peer == peer for each in self.connections)

    @property
    def connections(self) -> list[Connection]:
        """The connections to the parent in use, the parent being dialled and the spare parent."""
        return [
            connection
            for connection in (self.current, self.next, self.spare)
            if connection is not None
        ]

    # --- the plan --------------------------------------------------------------------------------

    def new_learner(self) -> None:
        """Record that the learner has restarted, so the numbers of its plans start again."""
        self._epoch = -1

    def on_plan(self, plan: TopologyPlan, *, now: float) -> list[Action]:
        """Follow a plan; ignore a plan that is older than the present plan.

        If the plan repeats the present parents, the node may dial the preferred parent again. If
        the plan has no parents, the node stops fetching.
        """
        if plan.epoch < self._epoch or not self.receiver.trust.has_key:
            return []
        self._epoch = plan.epoch
        if plan.is_standby:
            return self._rest(now)
        for node_id, address in plan.parents:
            if node_id == LEARNER_ID and address:
                self.learner_address = address
        if plan.parents == self._parents:
            patience_s = self.retry_preferred_s * 2 ** min(5, max(0, self._num_failures - 1))
            is_over = self._failed_at is None or now >= self._failed_at + patience_s
            if not (self._index > 0 and self.next is None and is_over):
                return []
        else:
            self._num_failures = 0
        self._parents, self._index = plan.parents, 0
        return self._follow(now)

    def _rest(self, now: float) -> list[Action]:
        """Leave all parents, but keep held chunks, because the plan has no parents."""
        peers = [connection.peer for connection in self.connections if connection.peer]
        self.current = self.next = self.spare = None
        self._follow_at = self._spare_at = self._failed_at = None
        self._parents, self._index, self._num_failures = (), 0, 0
        self.receiver.link.has_spare = False
        hung_up: list[Action] = [HangUp(peer) for peer in peers]
        return hung_up + self._broadcast.set_parent(None, now=now)

    @property
    def _hops(self) -> list[tuple[str, str]]:
        """The (node id, address) pairs to dial, in order.

        First come the parents of the plan. Then come the learner's other addresses and the control
        peer, as the last resort. Then the parents of the plan come again. This time, a quarantine
        ends after ALONE_S and not after QUARANTINE_S.
        """
        planned, control = {address for _, address in self._parents}, self.control
        last = [(LEARNER_ID, each) for each in self.learner_addresses if each not in planned]
        known = {LEARNER_ID, *(node_id for node_id, _ in self._parents)}
        if control is not None and control.node_id and control.node_id not in known:
            last.append((control.node_id, control.address))
        return [*self._parents, *last, *self._parents]

    def _address(self, index: int, now: float) -> str:
        """Return the address of entry `index` of `_hops`; "" if it may not be dialled now."""
        hops, control = self._hops, self.control
        node_id, address = hops[index]
        is_alone = index >= len(hops) - len(self._parents)
        since = self.quarantined.get(node_id)
        if is_alone and (since is None or node_id == LEARNER_ID):
            return ""  # dialled a moment ago, as a parent of the plan
        patience_s = ALONE_S if is_alone else QUARANTINE_S
        if since is not None and now < since + patience_s and node_id != LEARNER_ID:
            return ""
        if control is None or not control.node_id:
            return address
        if not address:
            return control.address if control.node_id == node_id else ""
        is_anothers = control.address == address and control.node_id != node_id
        return "" if is_anothers else address

    def _follow(self, now: float) -> list[Action]:
        """Dial the plan's next parent. If that parent is in use already, keep its connection."""
        self._follow_at = None
        actions: list[Action] = []
        if self.next is not None:
            actions += [HangUp(self.next.peer)] if self.next.peer else []
            self.next = None
        hops = self._hops
        while self._index < len(hops):
            if self.current is not None and self.current.node_id == hops[self._index][0]:
                return actions + self._keep_spare(now)
            address = self._address(self._index, now)
            if address:
                self.next = Connection(address, dialled_at=now)
                return [*actions, Dial(address, "weights")]
            self._index += 1
        self._index, self._follow_at = 0, now + self.retry_s
        return actions

    def _keep_spare(self, now: float) -> list[Action]:
        """Keep a spare connection to the parent that comes after the parent in use in the plan."""
        self._spare_at = None
        wanted, address = "", ""
        for index in range(self._index + 1, len(self._parents)):
            wanted, address = self._parents[index][0], self._address(index, now)
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
        self.receiver.link.has_spare = False
        return [HangUp(spare.peer)] if spare is not None and spare.peer else []

    # --- connections -----------------------------------------------------------------------------

    def dialled(self, address: str, peer: str) -> None:
        """Record that the connection to `address` has the link `peer`."""
        for connection in self.connections:
            if connection.address == address and not connection.peer:
                connection.peer = peer
                return

    def connected(self, peer: str, *, now: float) -> bool:
        """Record that a link is connected; return whether to greet the other end as a parent."""
        for connection in self.connections:
            if connection.peer == peer and not connection.node_id:
                connection.greeted_at = now
                return True
        return False

    def parent_failed(self, failure: ParentFailed, *, now: float) -> list[Action]:
        """Leave a failed parent; use the spare parent or dial the plan's next parent."""
        connection = next((each for each in self.connections if each.peer == failure.peer), None)
        if connection is None:
            return []
        return self.fail(connection, failure.reason, now=now, is_corrupt=failure.is_corrupt)

    def greeted(self, peer: str, node_id: str, *, now: float) -> list[Action]:
        """Use a parent that has answered, or keep it as the spare parent."""
        connection = next((each for each in self.connections if each.peer == peer), None)
        if connection is None or connection.node_id:
            return []
        connection.node_id, connection.rtt_s = node_id, max(0.0, now - connection.greeted_at)
        hops = self._hops
        is_last_resort = len(self._parents) <= self._index < len(hops) - len(self._parents)
        if connection is self.next and is_last_resort and node_id != hops[self._index][0]:
            reason = f"it is {node_id}, not {hops[self._index][0]}"
            return self.fail(connection, reason, now=now)
        if connection is self.spare:
            self.receiver.link.has_spare = True
            return []
        old, self.current, self.next = self.current, connection, None
        actions: list[Action] = [HangUp(old.peer)] if old is not None else []
        actions += self._broadcast.set_parent(peer, rtt_s=connection.rtt_s, now=now)
        return actions + self._keep_spare(now)

    def fail(
        self,
        connection: Connection,
        reason: str,
        *,
        now: float,
        is_corrupt: bool = False,
    ) -> list[Action]:
        """Close a failed connection.

        The spare or the plan's next parent replaces a failed parent.
        """
        name = connection.node_id or connection.address
        actions: list[Action] = [HangUp(connection.peer)] if connection.peer else []
        if connection is self.spare:
            self.spare, self._spare_at = None, now + self.retry_s
            self.receiver.link.has_spare = False
            return actions
        text = f"weights from {name} failed: {reason}"
        actions.append(Note("warning", text, f"weights from {name}"))
        if is_corrupt and connection.node_id:
            self.quarantined[connection.node_id] = now
        self._failed_at = now
        self._num_failures += 1
        if connection is self.next:
            self.next = None
            self._index += 1
            return actions + self._follow(now)
        self.current = None
        if self.spare is not None and self.spare.node_id:
            return actions + self._use_spare(now)
        actions += self._broadcast.set_parent(None, now=now)
        if self.next is not None:
            return actions
        self._index += 1
        return actions + self._drop_spare() + self._follow(now)

    def _use_spare(self, now: float) -> list[Action]:
        connection, self.spare = self.spare, None
        assert connection is not None
        self.current = connection
        if self.next is None:  # otherwise `_index` belongs to the parent that is being dialled
            names = [node_id for node_id, _ in self._parents]
            self._index = (
                names.index(connection.node_id) if connection.node_id in names else self._index + 1
            )
        self.receiver.link.has_spare = False
        actions = self._broadcast.set_parent(connection.peer, rtt_s=connection.rtt_s, now=now)
        return actions + self._keep_spare(now)

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `expire`; None if no call is due."""
        spare_at = (
            None if self.current is None else self._spare_at
        )  # no spare without a parent in use
        first = earliest(self._follow_at, spare_at)
        for connection in self.connections:
            if not connection.node_id:
                first = earliest(first, connection.dialled_at + CONNECT_TIMEOUT_S)
        return first

    def expire(self, *, now: float) -> list[Action]:
        """Leave parents that do not answer.

        If a retry is due, also dial the next spare parent or the plan's next parent.
        """
        actions: list[Action] = []
        for connection in self.connections:
            is_late = not connection.node_id and now >= connection.dialled_at + CONNECT_TIMEOUT_S
            # Handling the connection before this one may have replaced this one.
            if is_late and any(connection is each for each in self.connections):
                actions += self.fail(connection, "no answer", now=now)
        if self._spare_at is not None and now >= self._spare_at and self.current is not None:
            actions += self._keep_spare(now)
        if self._follow_at is not None and now >= self._follow_at:
            actions += self._follow(now)
        return actions
