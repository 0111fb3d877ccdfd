"""A worker's conversation with the learner: leases in, groups out.

A lease waits in the queue, runs in the engine, and its result lies in the outbox until the learner
has it on disk. All three places are listed in each heartbeat, so the learner knows what it must
send again and what it need not renew. A cut changes nothing here: running groups go on, results
are kept, and after the next Admitted everything unacknowledged is sent again.
"""

from __future__ import annotations

import msgspec

from echo.protocol.actions import Action, LeasesChanged, Note
from echo.protocol.broadcast import Broadcast
from echo.protocol.codec import Frame, encode_group
from echo.protocol.delivery import Outbox
from echo.protocol.messages import (
    Ack,
    Deliver,
    Failed,
    Grant,
    Lease,
    LeaseState,
    Message,
    NodeStats,
)
from echo.protocol.node_session import NodeSession, NodeSettings
from echo.rollout import Group, PolicyVersion

Key = tuple[int, int]
"""(group id, attempt)."""


class WorkerSession(NodeSession):
    """NodeSession with a queue of leases and an outbox of results."""

    def __init__(
        self, settings: NodeSettings, broadcast: Broadcast, outbox: Outbox, *, now: float
    ) -> None:
        """Start without leases; set `max_groups` once the engine knows what it can hold."""
        super().__init__(settings, broadcast, now=now)
        self.outbox = outbox
        self.max_groups = 0
        """Groups that may run and wait here at once."""
        self.installed_version: PolicyVersion | None = None
        self.activity = "starting"
        self.tokens_sampled = 0
        self.queue: dict[Key, Lease] = {}
        self.running: dict[Key, int] = {}
        """Tokens sampled so far for each group in the engine."""

    # --- what the learner is told ----------------------------------------------------------------

    def installed(self) -> PolicyVersion | None:
        """Return the version that the engine samples from."""
        return self.installed_version

    def capacity(self) -> int:
        """Return how many groups may be held; 0 while nothing could be sampled or delivered."""
        return 0 if self.installed_version is None or self.outbox.is_full else self.max_groups

    def lease_states(self) -> tuple[LeaseState, ...]:
        """Return every lease here: waiting, running, or not yet acknowledged."""
        states = dict.fromkeys(self.queue, 0) | self.running
        states |= dict.fromkeys(self.outbox.keys, -1)
        return tuple(
            LeaseState(group_id=group_id, attempt=attempt, num_tokens=num_tokens)
            for (group_id, attempt), num_tokens in states.items()
        )

    def stats(self) -> NodeStats:
        """Return what to tell the learner about this worker."""
        stats = super().stats()
        return msgspec.structs.replace(
            stats, state=self.activity, tokens_sampled=self.tokens_sampled
        )

    # --- from the learner ------------------------------------------------------------------------

    def on_routed(self, message: Message, payload: list[Frame], *, now: float) -> list[Action]:
        """Handle leases and acknowledgements."""
        match message:
            case Grant():
                return self._on_grant(message)
            case Ack():
                return self._on_ack(message, now)
        return super().on_routed(message, payload, now=now)

    def _on_grant(self, message: Grant) -> list[Action]:
        known = self.queue.keys() | self.running.keys() | set(self.outbox.keys)
        fresh = [lease for lease in message.leases if (lease.group_id, lease.attempt) not in known]
        self.queue.update({(lease.group_id, lease.attempt): lease for lease in fresh})
        return [LeasesChanged()] if fresh else []

    def _on_ack(self, message: Ack, now: float) -> list[Action]:
        key = (message.group_id, message.attempt)
        was_full = self.outbox.is_full
        # A lease that is acknowledged before it was begun is not wanted any more.
        self.queue.pop(key, None)
        if not self.outbox.acknowledge(key):
            return []
        actions: list[Action] = []
        if message.outcome == "refused":
            self.counters.add(f"refused/{message.reason}")
            text = f"group {message.group_id} was refused: {message.reason}"
            actions.append(Note("warning", text))
        if was_full:
            actions += [LeasesChanged(), *self.heartbeat(now=now)]
        return actions

    def on_admitted(self, *, now: float) -> list[Action]:
        """Tell where this worker stands and send again what was not acknowledged."""
        self.outbox.resend_all()
        return [*self.heartbeat(now=now), *self._send_due(now)]

    # --- from the engine -------------------------------------------------------------------------

    def take_leases(self, max_groups: int) -> list[Lease]:
        """Move up to `max_groups` leases from the queue into the engine, oldest group first."""
        if self.outbox.is_full:
            return []
        keys = sorted(self.queue)[:max_groups]
        self.running.update(dict.fromkeys(keys, 0))
        return [self.queue.pop(key) for key in keys]

    def progress(self, lease: Lease, num_tokens: int) -> None:
        """Note how many tokens have been sampled for a running lease."""
        key = (lease.group_id, lease.attempt)
        if key in self.running:
            self.running[key] = num_tokens

    def finished(self, group: Group, *, now: float) -> list[Action]:
        """Deliver a finished group."""
        key = (group.group_id, group.attempt)
        self.running.pop(key, None)
        message = Deliver(group_id=group.group_id, attempt=group.attempt)
        self.outbox.put(key, message, *encode_group(group))
        return self._send_due(now)

    def failed(self, lease: Lease, reason: str, detail: str, *, now: float) -> list[Action]:
        """Report a group that cannot be finished and that trying again will not mend."""
        key = (lease.group_id, lease.attempt)
        self.running.pop(key, None)
        self.counters.add(f"failed/{reason}")
        message = Failed(
            group_id=lease.group_id, attempt=lease.attempt, reason=reason, detail=detail[:500]
        )
        self.outbox.put(key, message)
        return [
            Note("warning", f"group {lease.group_id}: {reason}: {detail}"),
            *self._send_due(now),
        ]

    def returned(self, leases: list[Lease]) -> None:
        """Put leases back that the engine could not finish, to be started again."""
        for lease in leases:
            key = (lease.group_id, lease.attempt)
            self.running.pop(key, None)
            self.queue[key] = lease

    # --- time ------------------------------------------------------------------------------------

    def _send_due(self, now: float) -> list[Action]:
        if not self.is_admitted:
            return []
        return [
            action
            for parcel in self.outbox.take_due(now=now)
            for action in self.to_learner(parcel.message, *parcel.payload)
        ]

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called next."""
        instants = [super().deadline]
        if self.is_admitted:
            instants.append(self.outbox.deadline)
        return min((t for t in instants if t is not None), default=None)

    def expire(self, *, now: float) -> list[Action]:
        """Do what has become due."""
        return [*super().expire(now=now), *self._send_due(now)]
