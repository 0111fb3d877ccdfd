"""Members: the nodes that the learner knows, and when they count as gone.

A node is **known** after Hello, a **member** after Ready with the right hashes, and gone when it
says Goodbye or is silent for `dead_after_s`. Its name belongs to one incarnation (one start of one
process) at a time: after a quick restart the new incarnation waits until the old one has been
silent for two heartbeats. If both keep sending, two processes share a name, and the newcomer is
refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from echo.core.metrics import NodeView
from echo.core.price import Price
from echo.core.rollout import PolicyVersion
from echo.core.timers import Deadlines, RecentMap
from echo.core.units import format_bytes
from echo.leases.book import LeasedWorker
from echo.weights.topology.sites import PlannedNode
from echo.wire.actions import Action, Routes
from echo.wire.messages import Finish, Heartbeat, Hello, NodeStats
from echo.wire.seals import Channel, Seals

NODE_RATE_WINDOW_S = 10.0
"""Seconds over which a node's rates are averaged for the display."""
MAX_NAMES_KEPT = 10_000
MAX_NODES = 1 << 16
"""Most nodes known at a time: each Hello of a new name takes 2 kB until the node is silent."""
IDLE = "waiting for leases"
"""State of a worker without leases."""

Claim = Literal["new", "again", "restarted", "wait", "name_taken", "full"]
"""The result of a Hello's claim to a name."""


class Presence(StrEnum):
    """The learner's view of a node; `Admission.TABLE` has the events that change it."""

    UNKNOWN = "unknown"
    KNOWN = "known"
    """Its Hello was accepted."""
    ADMITTED = "admitted"
    """Its Ready had the right hashes."""


@dataclass(slots=True)
class Member:
    """One node: its identity, its last message, and its state in each plane."""

    node_id: str
    role: str
    incarnation: str
    last_seen_at: float
    node: PlannedNode
    """Its state in the plan of the weights."""
    worker: LeasedWorker
    """Its state in the scheduler of leases."""
    price: Price = field(default_factory=Price)
    presence: Presence = Presence.UNKNOWN
    seals: Seals = field(default_factory=Seals)
    hello_hash: bytes = b""
    """Hash of the Hello that was last answered with Welcome."""
    nonce: bytes = b""
    """The learner's nonce in the last Welcome."""
    tokens_sampled: int | None = None
    """Tokens sampled by this process, at its last heartbeat; an increase renews waiting leases.
    None before the first heartbeat.
    """
    contested: tuple[float, float] | None = None
    """(first, last) instant at which other processes claimed its name."""
    history: deque[tuple[float, int, int]] = field(default_factory=deque)
    """(instant, tokens sampled, weight bytes received) of the recent heartbeats."""

    @classmethod
    def of(cls, message: Hello, *, now: float) -> Member:
        """Return the node that a Hello describes."""
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

    def beat(self, message: Heartbeat, *, now: float) -> bool:
        """Record a heartbeat; return whether the node has sampled tokens since the previous one."""
        stats = message.stats
        has_progress = stats.tokens_sampled != self.tokens_sampled
        self.last_seen_at, self.tokens_sampled = now, stats.tokens_sampled
        self.node.stats, self.node.installed = stats, message.installed
        self.worker.installed, self.worker.capacity = message.installed, message.capacity
        self.worker.num_places = stats.num_places
        self.history.append((now, stats.tokens_sampled, stats.bytes_received))
        while len(self.history) > 2 and now - self.history[0][0] > NODE_RATE_WINDOW_S:
            self.history.popleft()
        return has_progress

    @property
    def is_admitted(self) -> bool:
        """Whether it is a member of the run."""
        return self.presence is Presence.ADMITTED

    @property
    def stats(self) -> NodeStats:
        """The statistics of its last heartbeat."""
        return self.node.stats

    @property
    def installed(self) -> PolicyVersion | None:
        """The version that a worker samples from, or that a relay holds."""
        return self.node.installed

    @property
    def is_standby(self) -> bool:
        """Whether it is a worker on standby, without leases and weights."""
        return self.node.is_standby

    def rates(self) -> tuple[float, float]:
        """Return (tokens per second, weight bytes per second) over the last heartbeats."""
        if len(self.history) < 2:
            return 0.0, 0.0
        (start, tokens, num_bytes), (stop, tokens_now, bytes_now) = (
            self.history[0],
            self.history[-1],
        )
        elapsed_s = max(stop - start, 1e-6)
        return (tokens_now - tokens) / elapsed_s, (bytes_now - num_bytes) / elapsed_s

    def _state(self, num_leases: int) -> str:
        """Return the last reported state, but not "waiting for leases" if the node has some."""
        state = self.stats.state
        return "leases under way" if num_leases and state == IDLE else state

    def describe(self, num_leases: int) -> str:
        """Describe a worker's leases, and the version that it fetches, in a few words."""
        stats = self.stats
        if stats.fetching is None:
            return f"{self.node_id} has {num_leases} ({self._state(num_leases)})"
        progress = f"{stats.num_chunks_held}/{stats.num_chunks} chunks from {stats.parent}"
        if stats.downlink_bytes_per_s is not None:
            progress += f" at {format_bytes(stats.downlink_bytes_per_s)}/s"
        return f"{self.node_id} has {num_leases} and fetches {stats.fetching} ({progress})"

    def view(self, *, step: int, num_leases: int, now: float) -> NodeView:
        """Return the row of this node in the live view."""
        tokens_per_s, bytes_per_s = self.rates()
        stats, state = self.stats, self._state(num_leases)
        if not self.is_admitted:
            state = "joining"
        elif self.is_standby:
            state = f"{state}, then standby" if num_leases else "standby"
        elif self.worker.is_set_aside:
            state = "set aside"
        elif stats.refused_version is not None:
            state = f"refused {stats.refused_version}, {state}"
        elif stats.fetching is not None and stats.num_chunks:
            state = f"{state}, fetching {stats.fetching} {stats.num_chunks_held}/{stats.num_chunks}"
        return NodeView(
            node_id=self.node_id,
            role=self.role,
            state=state,
            version="-" if self.installed is None else str(self.installed),
            staleness=None if self.installed is None else step - self.installed.step,
            tokens_per_s=tokens_per_s,
            bytes_per_s=bytes_per_s,
            num_leases=num_leases,
            parent=stats.parent,
            seen_s=now - self.last_seen_at,
        )


class Roster:
    """All nodes by name, in the order in which they joined."""

    def __init__(self, *, heartbeat_s: float, dead_after_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.dead_after_s = dead_after_s
        self.nodes: dict[str, Member] = {}
        self.released: RecentMap[str, str] = RecentMap(max_entries=MAX_NAMES_KEPT)
        """Node id -> incarnation, of the machines that were given back recently."""
        self.uplinks: RecentMap[str, float] = RecentMap(max_entries=MAX_NAMES_KEPT)
        """Node id -> bytes per second that it could send, by its last heartbeat."""
        self._left: RecentMap[str, Mapping[str, int]] = RecentMap(max_entries=MAX_NAMES_KEPT)
        """Node id -> the last counters of a worker that has left."""
        self._deadlines: Deadlines[Member] = Deadlines(self)

    @property
    def deadline(self) -> float | None:
        """When the next node would count as gone."""
        return self._deadlines.first

    def deadline_of(self, member: Member) -> float | None:
        """Return when a node counts as gone; None if it is gone already."""
        is_here = self.nodes.get(member.node_id) is member
        return member.last_seen_at + self.dead_after_s if is_here else None

    def channel_of(self, node_id: str) -> Channel | None:
        """Return the channel in which a node's messages are sealed."""
        member = self.nodes.get(node_id)
        return None if member is None else member.seals.proven

    def members(self, role: str | None = None) -> list[Member]:
        """Return the admitted nodes, all or those of one role."""
        return [m for m in self.nodes.values() if m.is_admitted and role in (None, m.role)]

    def active(self, role: str | None = None) -> list[Member]:
        """Return the admitted nodes that take part, without workers on standby."""
        return [member for member in self.members(role) if not member.is_standby]

    def move(self, member: Member, to: Presence) -> None:
        """Change the presence of a node, and add it to the roster or remove it."""
        if to is Presence.UNKNOWN:
            del self.nodes[member.node_id]
            if member.role == "worker":
                self._left[member.node_id] = member.stats.refused
        elif self.nodes.get(member.node_id) is not member:
            self.nodes[member.node_id] = member
            self._deadlines.add(member)
        member.presence = to

    def take_counts_left(self) -> dict[str, Mapping[str, int]]:
        """Return node id -> its last counters, for workers that have left since the last call."""
        left, self._left = self._left.as_dict(), RecentMap(max_entries=MAX_NAMES_KEPT)
        return left

    def release(self, member: Member) -> None:
        """Record that the machine of a node was given back."""
        self.released[member.node_id] = member.incarnation

    def claim(self, message: Hello, *, now: float) -> Claim:
        """Judge a Hello's claim to its name, and record a claim to a name that is in use."""
        known = self.nodes.get(message.node_id)
        if known is None:
            return "new" if len(self.nodes) < MAX_NODES else "full"
        if known.incarnation == message.incarnation:
            return "again"
        if now - known.last_seen_at >= 2 * self.heartbeat_s:
            return "restarted"
        first_at, last_at = known.contested or (now, now)
        if now - last_at > self.dead_after_s:
            first_at = now  # the earlier claim was of another process
        known.contested = first_at, now
        return "name_taken" if now - first_at > self.dead_after_s else "wait"

    def take_silent(self, *, now: float) -> list[Member]:
        """Return the nodes that have been silent for too long, each once."""
        return self._deadlines.take_due(now=now)


# --- Shutdown: the order in which nodes are told that the run has ended ---
#
# A Finish for a worker may pass through a relay. So relays are told last, once all other nodes have
# gone or the time is up.


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Event: the run has ended, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class LastCall:
    """Event: the workers have had their time to leave, so the relays may leave, too."""


class Shutdown:
    """Sends Finish to the nodes."""

    def __init__(self, roster: Roster, routes: Routes) -> None:
        self.reason: str | None = None
        """Why the run has ended; None while it has not."""
        self.is_last_call = False
        self._roster = roster
        self._routes = routes

    def finish(self, reason: str) -> list[Action]:
        """Send Finish to all nodes; to relays only once all other nodes have gone."""
        self.reason = reason
        return self.send_finish()

    def dismiss_all(self) -> list[Action]:
        """Send Finish to all remaining nodes, also to relays and to nodes that send later."""
        self.is_last_call = True
        return self.send_finish()

    def send_finish(self) -> list[Action]:
        """Send Finish to every node that may leave, if the run has ended."""
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
        """Return whether no other node may need this one to receive its Finish."""
        return (
            self.is_last_call
            or member.role != "relay"
            or all(node.role == "relay" for node in self._roster.nodes.values())
        )
