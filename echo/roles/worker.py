"""A worker's conversation with the learner: leases in, groups out.

A lease waits in the queue, runs in the engine, may be parked between two calls of the engine
(`leases/partials.py`), and its result lies in the outbox until the learner has it on disk. All
places are listed in each heartbeat, so the learner knows what it must send again and what it need
not renew. A cut changes nothing here: running groups go on, results are kept, and after the next
Admitted everything unacknowledged is sent again.

What is parked is shipped to the learner now and then (`ship`), which leases it to others if this
worker does not come back; a worker that does come back lists what it still has, and is told what is
not wanted any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from echo.core.bounds import MAX_LEASES, MAX_PAYLOAD_BYTES
from echo.core.errors import RemoteProtocolError
from echo.core.rollout import Group, Lineage, PartialRollout, PolicyVersion
from echo.core.timers import earliest
from echo.core.units import format_duration
from echo.leases.outbox import Outbox
from echo.leases.partials import (
    LeaseKey,
    PartialGroup,
    PartialGroups,
    decode_members,
    encode_members,
)
from echo.roles.joining import NodeSettings
from echo.roles.node import DialingRole
from echo.weights.broadcast import Broadcast
from echo.wire.actions import Action, Note
from echo.wire.codec import Frame, encode_group, payload_bytes
from echo.wire.messages import (
    SUPERSEDED,
    Ack,
    Deliver,
    Failed,
    Grant,
    Lease,
    LeaseState,
    Message,
    NodeStats,
    Partial,
    TopologyPlan,
    known_reason,
)

# --- How long a lease waits for the version that it asks for ---
#
# The learner counts on the version that a worker has told of. A worker that holds an older one by
# now, as after a restart, has the newer one soon, or never: its uplink may be cut off, or the
# version refused by its engine. So it waits, and then gives the lease back, for somebody else.


MAX_VERSION_WAIT_S = 30.0


class VersionWait:
    """Since when leases have been waiting."""

    def __init__(self, max_s: float = MAX_VERSION_WAIT_S) -> None:
        """Take the seconds that one may wait."""
        self.max_s = max_s
        self._since: dict[tuple[int, int], float] = {}

    def late(self, waiting: Sequence[Lease], *, now: float) -> list[Lease]:
        """Note which leases wait, and return those that have waited too long."""
        keys = {(lease.group_id, lease.attempt): lease for lease in waiting}
        self._since = {key: self._since.get(key, now) for key in keys}
        return [keys[key] for key, since in self._since.items() if now >= since + self.max_s]


@dataclass(frozen=True, slots=True)
class LeasesChanged(Action):
    """New leases wait in the worker's queue."""


@dataclass(frozen=True, slots=True)
class LeaseCancelled(Action):
    """Nobody waits any more for a group that the worker has begun."""

    group_id: int
    attempt: int


class Worker(DialingRole):
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
        self.standby_since: float | None = None
        """Since when the learner has had no work for this worker; None while it is active."""
        self.activity = "starting"
        self.tokens_sampled = 0
        self.num_accepted = 0
        """Groups that the learner has taken since this process started."""
        self.partials = PartialGroups()
        self.partial_counts: Counter[str] = Counter()
        """What became of unfinished rollouts, for the learner's metrics."""
        self.version_wait = VersionWait()
        """For leases that ask for newer weights."""
        self.num_places = 0
        """Groups that the engine samples at one time; set with `max_groups`."""

    @property
    def learner_heard_at(self) -> float:
        """When the learner was last heard of, or this worker began to look for it."""
        return self._lost_at

    # --- what the learner is told ----------------------------------------------------------------

    def installed(self) -> PolicyVersion | None:
        """Return the version that the engine samples from."""
        return self.installed_version

    def capacity(self) -> int:
        """Return how many groups may be held; 0 while nothing could be sampled or delivered."""
        is_closed = self.installed_version is None or self.outbox.is_full
        return 0 if is_closed else min(self.max_groups, MAX_LEASES)

    @property
    def lineages(self) -> tuple[Lineage, ...]:
        """The learner's histories so far, oldest first."""
        return self._joining.lineages

    def lease_states(self) -> tuple[LeaseState, ...]:
        """Return every lease here: waiting, running, or not yet acknowledged."""
        delivered = (
            LeaseState(group_id=group_id, attempt=attempt, num_tokens=-1)
            for group_id, attempt in self.outbox.keys
        )
        return (*self.partials.states(now=self._beat_at), *delivered)[:MAX_LEASES]

    def stats(self) -> NodeStats:
        """Return what to tell the learner about this worker."""
        stats = super().stats()
        return msgspec.structs.replace(
            stats,
            state=self.activity,
            tokens_sampled=self.tokens_sampled,
            partials=dict(self.partial_counts),
            num_places=min(self.num_places, MAX_LEASES),
        )

    # --- from the learner ------------------------------------------------------------------------

    def _on_learner_message(
        self, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        actions = super()._on_learner_message(message, payload, now)
        if not isinstance(message, TopologyPlan) or message.is_standby == (
            self.standby_since is not None
        ):
            return actions
        self.standby_since = now if message.is_standby else None
        text = "not needed for now: standing by" if message.is_standby else "needed: active again"
        return [*actions, Note("info", text), LeasesChanged()]

    def on_routed(self, message: Message, payload: list[Frame], *, now: float) -> list[Action]:
        """Handle leases and acknowledgements."""
        match message:
            case Grant():
                return self._on_grant(message, payload)
            case Ack():
                return self._on_ack(message, now)
        return super().on_routed(message, payload, now=now)

    def _on_grant(self, message: Grant, payload: list[Frame]) -> list[Action]:
        members: list[PartialRollout] = []
        if payload:
            if len(message.leases) != 1:
                raise RemoteProtocolError(f"{len(message.leases)} leases with one continuation")
            members = decode_members(payload[0])
        fresh = [lease for lease in message.leases if not self._is_known(_key_of(lease))]
        for lease in fresh:
            self.partials.add(lease, members)
        return [LeasesChanged()] if fresh else []

    def _is_known(self, key: LeaseKey) -> bool:
        return key in self.partials or key in self.outbox.keys

    def _on_ack(self, message: Ack, now: float) -> list[Action]:
        key = (message.group_id, message.attempt)
        was_full = self.outbox.is_full
        if not self.outbox.acknowledge(key):
            # A lease that is acknowledged before it is delivered is not wanted any more.
            is_running = key in self.partials.running and not self.partials.is_unwanted(key)
            self.partial_counts["wasted_tokens"] += self.partials.revoke(key)
            if not is_running:
                return []
            self.counters.add("cancelled")
            return [LeaseCancelled(*key)]
        actions: list[Action] = []
        self.num_accepted += message.outcome == "accepted"
        if message.outcome == "refused":
            reason = known_reason(message.reason)
            self.counters.add(f"refused/{reason}")
            text = f"group {message.group_id} was refused: {reason}"
            actions.append(Note("warning", text, f"refused {reason}"))
        if was_full:
            actions += [LeasesChanged(), *self.heartbeat(now=now)]
        return actions

    def on_admitted(self, *, now: float) -> list[Action]:
        """Tell where this worker stands and send again what was not acknowledged."""
        self.outbox.resend_all()
        return [*self.heartbeat(now=now), *self._send_due(now)]

    # --- from the engine -------------------------------------------------------------------------

    def take(
        self,
        max_groups: int,
        *,
        group_size: int,
        max_rollouts: int | None = None,
        now: float | None = None,
    ) -> list[PartialGroup]:
        """Move groups into the engine, as far as there is room: begun ones first, oldest first."""
        if self.outbox.is_full:
            return []
        return self.partials.take(
            max_groups,
            group_size=group_size,
            max_rollouts=max_rollouts,
            now=now,
            installed=self.installed_version,
        )

    def progress(self, lease: Lease, num_tokens: int) -> None:
        """Note how many tokens have been sampled for a running lease."""
        partial = self.partials.running.get(_key_of(lease))
        if partial is not None:
            partial.num_progress = num_tokens

    def park(self, partial: PartialGroup) -> None:
        """Put a partial group aside that left the engine unfinished."""
        self.partials.park(partial)

    def ship(self, *, interval_s: float, now: float) -> list[Action]:
        """Send the learner what has been sampled for parked partial groups, where it is news.

        Args:
            interval_s: seconds between two shipments of one partial group; 0 where this worker is
            about to
                pause or to leave.
            now: the present instant.
        """
        if not self.is_admitted:
            return []
        actions: list[Action] = []
        for partial in self.partials.take_due(interval_s=interval_s, now=now):
            message = Partial(group_id=partial.lease.group_id, attempt=partial.lease.attempt)
            frame = encode_members(partial.members)
            if payload_bytes([frame]) > MAX_PAYLOAD_BYTES:
                continue  # what a lost worker has of it is sampled anew
            actions += self.to_learner(message, frame)
            self.partial_counts["shipped"] += 1
        return actions

    def is_cancelled(self, lease: Lease) -> bool:
        """Return whether nobody waits any more for a group in the engine."""
        return self.partials.is_unwanted(_key_of(lease))

    def finished(self, group: Group, *, now: float) -> list[Action]:
        """Deliver a finished group."""
        key = (group.group_id, group.attempt)
        partial = self.partials.running.get(key)
        if not self.partials.end(key) or partial is None:
            return []
        payload = encode_group(group)
        if (num_bytes := payload_bytes(payload)) > MAX_PAYLOAD_BYTES:
            detail = (
                f"it has {num_bytes} bytes, a message holds {MAX_PAYLOAD_BYTES}; lower "
                "rollout.group_size or sampling.max_completion_tokens"
            )
            return self.failed(partial.lease, "group_too_large", detail, now=now)
        seconds = partial.seconds(now)
        message = Deliver(group_id=group.group_id, attempt=group.attempt, seconds=seconds)
        self.outbox.put(key, message, *payload)
        return self._send_due(now)

    def failed(
        self, lease: Lease, reason: str, detail: str, *, traceback: str = "", now: float
    ) -> list[Action]:
        """Report a group that cannot be finished and that trying again will not mend."""
        self.partials.end(_key_of(lease))
        self.counters.add(f"failed/{reason}")
        return [*self._report(lease, reason, detail, traceback=traceback), *self._send_due(now)]

    def _report(
        self,
        lease: Lease,
        reason: str,
        detail: str,
        *,
        is_elsewhere: bool = False,
        traceback: str = "",
    ) -> list[Action]:
        message = Failed(
            group_id=lease.group_id,
            attempt=lease.attempt,
            reason=reason,
            detail=detail[:500],
            is_elsewhere=is_elsewhere,
            traceback=traceback,
        )
        self.outbox.put(_key_of(lease), message)
        level = "info" if reason == SUPERSEDED else "warning"
        return [Note(level, f"group {lease.group_id}: {reason}: {detail}", reason)]

    # --- time ------------------------------------------------------------------------------------

    def _send_due(self, now: float) -> list[Action]:
        if not self.is_admitted:
            return []
        return [
            action
            for encoded in self.outbox.take_due(now=now)
            for action in self.to_learner(encoded.message, *encoded.payload)
        ]

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called next."""
        return earliest(super().deadline, self.outbox.deadline if self.is_admitted else None)

    def expire(self, *, now: float) -> list[Action]:
        """Do what has become due."""
        return [*super().expire(now=now), *self._give_back(now), *self._send_due(now)]

    def _give_back(self, now: float) -> list[Action]:
        """Give back the leases whose version has not come in time, or has been replaced."""
        installed = self.installed_version
        late = self.version_wait.late(self.partials.awaiting(installed), now=now)
        superseded = self.partials.superseded(installed)
        # First what was sampled of them before, for whoever goes on.
        actions = self.ship(interval_s=0.0, now=now) if late or superseded else []
        for lease in late:
            wanted = lease.exact_version or f"{lease.min_version} or newer"
            here = f"{installed} is installed and no newer one has come"
            why = f"{wanted} is wanted, {here} in {self.version_wait.max_s:g} s"
            actions += self._refuse(lease, "version_not_installed", why)
        for lease in superseded:
            why = f"exactly {lease.exact_version} is wanted, {installed} is installed"
            actions += self._refuse(lease, SUPERSEDED, why)
        return actions

    def superseded(self, lease: Lease, why: str, *, now: float) -> list[Action]:
        """Give back a lease whose version was replaced before the engine could begin it."""
        return [*self._refuse(lease, SUPERSEDED, why), *self._send_due(now)]

    def on_installed(self, version: PolicyVersion, *, now: float) -> list[Action]:
        """Note which version samples from now on, tell the learner, and give back what it ends."""
        self.installed_version = version
        beat = self.heartbeat(now=now) if self.is_admitted else []
        return [*beat, *self._give_back(now), *self._send_due(now)]

    def _refuse(self, lease: Lease, reason: str, detail: str) -> list[Action]:
        """Give a lease back whose version is not the one that samples here."""
        key = _key_of(lease)
        if key in self.partials.running:
            if not self.partials.end(key):
                return []
        else:
            self.partials.revoke(key)
        self.counters.add("engine/version_refused")
        return self._report(lease, reason, detail, is_elsewhere=True)


def _key_of(lease: Lease) -> LeaseKey:
    return lease.group_id, lease.attempt


RELEASE_CHECK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTerms:
    """For how long a machine is kept; None is for ever."""

    standby_s: float | None
    learner_gone_s: float | None

    def reason_to_leave(self, session: Worker, *, now: float) -> str | None:
        """Return why the worker should leave now, or None.

        Args:
            session: the worker's.
            now: the present.
        """
        since = session.standby_since
        if self.standby_s is not None and since is not None and now - since >= self.standby_s:
            return f"on standby for {format_duration(now - since)} (worker.release_after_s)"
        gone_s = now - session.learner_heard_at
        if self.learner_gone_s is not None and gone_s >= self.learner_gone_s:
            return f"without the learner for {format_duration(gone_s)} (worker.release_after_s)"
        return None
