"""Tracks the nodes that the learner knows. Decides when a node counts as gone.

A node is **known** after its Hello, a **member** after a Ready with the right hashes, and **gone**
after its Goodbye or `dead_after_s` of silence. At any time, a name belongs to one incarnation: one
start of a process. After a quick restart, the new incarnation waits until the old incarnation has
been silent for two heartbeats. If both incarnations keep sending messages, two processes have the
same name, and the newer process is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from echo.core.monitoring.status import RATE_WINDOW_S, NodeStatus
from echo.core.price import Price
from echo.core.rollout import PolicyVersion
from echo.core.timers import MAX_NAMES_KEPT, Deadlines, RecentMap
from echo.core.units import one_line
from echo.fleet.explain import ObservedNode
from echo.leases.book import LeasedWorker
from echo.weights.topology.sites import PlannedNode
from echo.wire.actions import Action, Routes
from echo.wire.messages import Finish, Heartbeat, Hello, NodeStats
from echo.wire.seals import Channel, Seals

MAX_NODES = 1 << 16
"""Largest number of nodes that the learner knows at once. A node takes 2 kB of memory until it is
dropped."""
ERROR_COUNTS = (
    "failed/", "refused/", "env/errors", "engine/out_of_memory", "engine/calls_failed",
    "engine/installs_failed", "protocol_errors", "internal_errors",
)  # fmt: skip
"""A counter counts errors if its name begins with one of these prefixes."""
IDLE = "waiting for leases"
"""The state that a worker reports while it has no leases."""

Hold = Literal["standby", "drain"]
"""What an operator has chosen for a node: stay on standby, or finish its work and leave."""

Claim = Literal["new", "again", "restarted", "wait", "name_taken", "full"]
"""How the learner treats a Hello that claims the name of a node."""


class Presence(StrEnum):
    """How far the learner has admitted a node.

    `Admission.TABLE` lists the events that change it.
    """

    UNKNOWN = "unknown"
    KNOWN = "known"
    """The node's Hello was accepted."""
    ADMITTED = "admitted"
    """The node's Ready had the right hashes."""


@dataclass(slots=True)
class Member:
    """A node that the learner knows.

    The fields are the node's identity, facts from its messages, and its states for plans and
    leases.
    """

    node_id: str
    role: str
    incarnation: str
    last_seen_at: float
    node: PlannedNode
    """The part of the node's state that the plan of the broadcast uses."""
    worker: LeasedWorker
    """The part of the node's state that the scheduler of leases uses."""
    price: Price = field(default_factory=Price)
    presence: Presence = Presence.UNKNOWN
    seals: Seals = field(default_factory=Seals)
    hello_hash: bytes = b""
    """Hash of the last Hello that the learner answered with a Welcome."""
    nonce: bytes = b""
    """The learner's nonce in the last Welcome."""
    hold: Hold | None = None
    """What the operator has chosen for the node; None if the operator has chosen nothing."""
    tokens_sampled: int | None = None
    """Number of tokens that the node's process had sampled at its last heartbeat; None before the
    first heartbeat. An increase renews the process's waiting leases."""
    contested: tuple[float, float] | None = None
    """First and last time at which a different process claimed the node's name; None without such a
    claim."""
    history: deque[tuple[float, NodeStats]] = field(default_factory=deque)
    """The recent heartbeats, each as (time, statistics)."""

    @classmethod
    def of(cls, message: Hello, *, now: float) -> Member:
        """Return a new member whose identity is the one in a Hello."""
        node = PlannedNode(
            message.node_id,
            message.role,
            message.advertise,
            region=message.region,
            price_per_gb=message.price_per_gb,
        )
        worker = LeasedWorker(message.node_id)
        return cls(
            message.node_id,
            message.role,
            message.incarnation,
            now,
            node,
            worker,
            price=message.price,
        )

    def beat(self, message: Heartbeat, *, now: float) -> int | None:
        """Record a heartbeat. Return how many tokens were sampled since the previous heartbeat.

        For the first heartbeat the result is None. The node's counter may then include tokens that
        the learner has already counted, before it was resumed.
        """
        stats, before = message.stats, self.tokens_sampled
        self.last_seen_at, self.tokens_sampled = now, stats.tokens_sampled
        self.node.stats, self.node.installed = stats, message.installed
        self.worker.installed, self.worker.capacity = message.installed, message.capacity
        self.worker.num_places = stats.num_places
        self.history.append((now, stats))
        while len(self.history) > 2 and now - self.history[0][0] > RATE_WINDOW_S:
            self.history.popleft()
        return None if before is None else max(0, stats.tokens_sampled - before)

    @property
    def is_admitted(self) -> bool:
        """Whether the node is admitted to the run."""
        return self.presence is Presence.ADMITTED

    @property
    def stats(self) -> NodeStats:
        """The statistics of the node's last heartbeat."""
        return self.node.stats

    @property
    def installed(self) -> PolicyVersion | None:
        """The version that a worker samples with, or that a relay holds.

        None if there is no version.
        """
        return self.node.installed

    @property
    def is_standby(self) -> bool:
        """Whether the node gets no new leases and no weights: it is on standby or being drained."""
        return self.node.is_standby

    @property
    def is_resting(self) -> bool:
        """Whether the node is on standby and not being drained."""
        return self.is_standby and self.hold != "drain"

    def rates(self) -> tuple[float, float, float]:
        """Return three rates per second: sampled tokens, received weight bytes, sent weight bytes.

        The rates are means over the last heartbeats.
        """
        if len(self.history) < 2:
            return 0.0, 0.0, 0.0
        (start, before), (stop, after) = self.history[0], self.history[-1]
        elapsed_s = max(stop - start, 1e-6)
        return (
            (after.tokens_sampled - before.tokens_sampled) / elapsed_s,
            (after.bytes_received - before.bytes_received) / elapsed_s,
            (after.bytes_sent - before.bytes_sent) / elapsed_s,
        )

    def mean_s(self, seconds: str, *, per: str) -> float | None:
        """Return how many seconds one unit of a counter takes on average, such as one byte.

        The average is over the last heartbeats. If the counter `per` has not increased, the result
        is None.

        Args:
            seconds: name of the counter of the time, which counts milliseconds.
            per: name of the counter of the units, or "bytes_received".
        """
        if not self.history:
            return None
        before, after = self.history[0][1], self.history[-1][1]

        def increase(name: str) -> int:
            if name == "bytes_received":
                return after.bytes_received - before.bytes_received
            return after.refused.get(name, 0) - before.refused.get(name, 0)

        number = increase(per)
        return increase(seconds) / 1000 / number if number > 0 else None

    def _state(self, num_leases: int) -> str:
        """Return the state that the node reported last.

        For an idle worker with leases, return "leases under way".
        """
        state = self.stats.state
        return "leases under way" if num_leases and state == IDLE else state

    def describe(self, num_leases: int) -> ObservedNode:
        """Return facts about an active node. Explanations of waits use them."""
        stats = self.stats
        write_s = self.mean_s("weights/busy_ms", per="bytes_received")
        return ObservedNode(
            name=self.node_id,
            role=self.role,
            is_dialable=self.node.advertise is not None,
            fetching="" if stats.fetching is None else str(stats.fetching),
            num_chunks_held=stats.num_chunks_held,
            num_chunks=stats.num_chunks,
            parent=one_line(stats.parent),
            bytes_per_s=stats.downlink_bytes_per_s,
            recent_bytes_per_s=self.rates()[1],
            write_bytes_per_s=1 / write_s if write_s else None,
            activity=one_line(self._state(num_leases)),
            engine=stats.engine,
            num_leases=num_leases,
            groups=stats.groups,
            num_places=stats.num_places,
            num_fit=stats.num_fit,
            scaling=stats.scaling,
            reward_s=self.mean_s("env/milliseconds", per="env/calls"),
        )

    def view(self, *, step: int, num_leases: int, now: float) -> NodeStatus:
        """Return the status of this node for views. `step` is the learner's present step."""
        tokens_per_s, bytes_per_s, bytes_sent_per_s = self.rates()
        stats, state = self.stats, self._state(num_leases)
        if not self.is_admitted:
            state = "joining"
        elif self.hold == "drain":
            state = f"draining, {state}"
        elif self.is_standby:
            state = f"{state}, then standby" if num_leases else "standby"
        elif self.worker.is_set_aside:
            state = "set aside"
        elif stats.refused_version is not None:
            state = f"refused {stats.refused_version}, {state}"
        elif stats.fetching is not None and stats.num_chunks:
            state = f"{state}, fetching {stats.fetching} {stats.num_chunks_held}/{stats.num_chunks}"
        return NodeStatus(
            node_id=self.node_id,
            role=self.role,
            state=state,
            hold=self.hold or "",
            version="-" if self.installed is None else str(self.installed),
            staleness=None if self.installed is None else step - self.installed.step,
            tokens_per_s=tokens_per_s,
            bytes_per_s=bytes_per_s,
            bytes_sent_per_s=bytes_sent_per_s,
            downlink_bytes_per_s=stats.downlink_bytes_per_s,
            uplink_bytes_per_s=stats.uplink_bytes_per_s,
            rtt_s=stats.rtt_s,
            fetching=None if stats.fetching is None else str(stats.fetching),
            num_chunks_held=stats.num_chunks_held,
            num_chunks=stats.num_chunks,
            num_leases=num_leases,
            capacity=self.worker.capacity,
            num_errors=num_errors(stats.refused),
            price_per_h=self.price.per_h,
            parent=stats.parent,
            seen_s=now - self.last_seen_at,
        )


def num_errors(counts: Mapping[str, int]) -> int:
    """Add up a heartbeat's counters for groups, calls and messages that failed."""
    return sum(n for name, n in counts.items() if name.startswith(ERROR_COUNTS))


class Roster:
    """All nodes that the learner knows, under their names, in the order in which they joined."""

    def __init__(self, *, heartbeat_s: float, dead_after_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.dead_after_s = dead_after_s
        self.nodes: dict[str, Member] = {}
        self.released: RecentMap[str, str] = RecentMap(max_entries=MAX_NAMES_KEPT)
        """For each node id, the incarnation of the node whose machine was recently given back."""
        self.uplinks: RecentMap[str, float] = RecentMap(max_entries=MAX_NAMES_KEPT)
        """For each node id, the bytes per second that the node can send, according to its last
        heartbeat."""
        self._holds: RecentMap[str, tuple[Hold, str]] = RecentMap(max_entries=MAX_NAMES_KEPT)
        """For each node id, what the operator has chosen for the node, and the incarnation that the
        node had then."""
        self._left: RecentMap[str, Mapping[str, int]] = RecentMap(max_entries=MAX_NAMES_KEPT)
        """For each node id of a worker that has left, the counters that the worker reported
        last."""
        self._deadlines: Deadlines[Member] = Deadlines(self)

    @property
    def deadline(self) -> float | None:
        """Time at which the next node counts as gone if it stays silent.

        None if there are no nodes.
        """
        return self._deadlines.first

    def deadline_of(self, member: Member) -> float | None:
        """Return when a node counts as gone if it stays silent.

        If the node is already gone, return None.
        """
        is_here = self.nodes.get(member.node_id) is member
        return member.last_seen_at + self.dead_after_s if is_here else None

    def channel_of(self, node_id: str) -> Channel | None:
        """Return the channel with which messages to a node are sealed.

        Return None if there is no channel.
        """
        member = self.nodes.get(node_id)
        return None if member is None else member.seals.proven

    def members(self, role: str | None = None) -> list[Member]:
        """Return all admitted nodes. If a role is given, return only the nodes with this role."""
        return [m for m in self.nodes.values() if m.is_admitted and role in (None, m.role)]

    def joining(self, role: str) -> list[str]:
        """Return the names of the nodes with this role that are not admitted yet."""
        nodes = self.nodes.values()
        return [m.node_id for m in nodes if not m.is_admitted and m.role == role]

    def active(self, role: str | None = None) -> list[Member]:
        """Return the admitted nodes that are not on standby.

        If a role is given, return only its nodes.
        """
        return [member for member in self.members(role) if not member.is_standby]

    def move(self, member: Member, to: Presence) -> None:
        """Change a node's presence.

        A new node enters the roster, and a node that has gone is removed.
        """
        if to is Presence.UNKNOWN:
            del self.nodes[member.node_id]
            if member.role == "worker":
                self._left[member.node_id] = member.stats.refused
        elif self.nodes.get(member.node_id) is not member:
            self.nodes[member.node_id] = member
            self._obey(member)
            self._deadlines.add(member)
        member.presence = to

    def take_counts_left(self) -> dict[str, Mapping[str, int]]:
        """For each worker that left since the last call, return its last reported counters.

        The result is keyed by node id.
        """
        left, self._left = self._left.as_dict(), RecentMap(max_entries=MAX_NAMES_KEPT)
        return left

    def hold(self, node_id: str, hold: Hold | None) -> None:
        """Record what the operator has chosen for a node. None cancels the earlier choice.

        A standby also applies to later processes with this name. A drain applies only to the
        present process.
        """
        member = self.nodes.get(node_id)
        if hold is None:
            self._holds.discard(node_id)
        else:
            self._holds[node_id] = hold, "" if member is None else member.incarnation
        if member is not None:
            self._obey(member)

    def _obey(self, member: Member) -> None:
        hold, incarnation = self._holds.get(member.node_id) or (None, "")
        if hold == "drain" and incarnation != member.incarnation:
            hold = None  # a process that is started again is wanted
        member.hold = hold
        member.node.is_standby = hold is not None

    def is_drained(self, member: Member, num_leases: int) -> bool:
        """Return whether a node that is being drained may leave.

        A worker may leave if it has no leases. A relay may leave if no node gets weights from the
        relay.
        """
        if member.hold != "drain" or num_leases:
            return False
        nodes = self.nodes.values() if member.role == "relay" else ()
        return all(node.stats.parent != member.node_id for node in nodes)

    def release(self, member: Member) -> None:
        """Record that a node's machine was given back. From then on it costs no money."""
        self.released[member.node_id] = member.incarnation

    def claim(self, message: Hello, *, now: float) -> Claim:
        """Return how to treat a Hello that claims the name of a node.

        If another process holds the name, the claim is recorded.
        """
        known = self.nodes.get(message.node_id)
        if known is None:
            return "new" if len(self.nodes) < MAX_NODES else "full"
        if known.incarnation == message.incarnation:
            return "again"
        if now - known.last_seen_at >= 2 * self.heartbeat_s:
            return "restarted"
        first_at, last_at = known.contested or (now, now)
        if now - last_at > self.dead_after_s:
            first_at = now  # another process made the earlier claim
        known.contested = first_at, now
        return "name_taken" if now - first_at > self.dead_after_s else "wait"

    def take_silent(self, *, now: float) -> list[Member]:
        """Return the nodes that have been silent for `dead_after_s`, each node only once."""
        return self._deadlines.take_due(now=now)


# --- Shutdown: the order in which nodes are told that the run has ended ---
#
# A Finish for a worker may pass through a relay. So relays are told last, once all other nodes have
# gone or the time is up.


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Event: the run has ended because of `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class LastCall:
    """Event: the relays may leave now, because the workers have had enough time to leave."""


class Shutdown:
    """Sends Finish to all nodes at the run's end, in the right order."""

    def __init__(self, roster: Roster, routes: Routes) -> None:
        self.reason: str | None = None
        """The reason why the run has ended; None while the run continues."""
        self.is_last_call = False
        self._roster = roster
        self._routes = routes

    def finish(self, reason: str) -> list[Action]:
        """Send Finish with `reason` to all nodes.

        Relays get Finish last, when all other nodes have gone.
        """
        self.reason = reason
        return self.send_finish()

    def dismiss_all(self) -> list[Action]:
        """Send Finish to all nodes that remain, including relays."""
        self.is_last_call = True
        return self.send_finish()

    def send_finish(self) -> list[Action]:
        """If the run has ended, send Finish to each node that may leave now."""
        if self.reason is None:
            return []
        finish = Finish(reason=self.reason)
        nodes = sorted(self._roster.nodes.values(), key=lambda node: node.role == "relay")
        return [
            action
            for node in nodes
            if self.may_leave(node)
            for action in self._routes.to(node.node_id, finish)
        ]

    def may_leave(self, member: Member) -> bool:
        """Return whether a node may leave.

        A relay stays while it must forward Finish to other nodes.
        """
        return (
            self.is_last_call
            or member.role != "relay"
            or all(node.role == "relay" for node in self._roster.nodes.values())
        )
