"""Decides whether a group that a worker delivers is accepted, and how a failed group ends.

`leases/groups.py` has the states of a group.

* A message that ends a group is accepted only from a worker that was granted the message's attempt.
  Other messages are refused, and leases stay unchanged.
* The learner acknowledges a group only after the ledger has the group (`Results.stored`).
* The content of a group is checked against its lease: prompt, group size, finite numbers
  (`leases/checks.py`).
* A group is refused and granted again if its samples are too old or from an abandoned lineage. The
  worker is notified and drops the result. Only the first refusal of a lease is recorded.
* If several workers have a group, the first delivery is accepted. The learner asks the other
  workers to stop, and records that their leases have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echo.core.bounds import MAX_REASON_LENGTH, MAX_TRACEBACK_LENGTH
from echo.core.errors import DataError, RemoteProtocolError
from echo.core.monitoring.metrics import Counters
from echo.core.records import Cancelled, Refused
from echo.core.rollout import Group, find_fault, trim_stale
from echo.leases.checks import find_group_fault, find_partial_fault
from echo.leases.grants.finish_times import FinishTimes
from echo.leases.groups import LeaseRecord
from echo.leases.open_groups import AppendRecord, OpenGroups
from echo.leases.partials import decode_members
from echo.leases.run import LeaseSettings, PromptPendingError, Prompts, find_prompt_fault
from echo.leases.usefulness import Usefulness
from echo.wire.actions import Action, Note, PeerFaults, Routes
from echo.wire.codec import Frame, decode_group, encode_group
from echo.wire.messages import (
    ENGINE_ERROR,
    Ack,
    Deliver,
    Failed,
    Partial,
    known_reason,
)

MAX_FATAL = 3
"""If this many engines have become unusable while they sampled the same group, the group ends.
Otherwise the group could make one engine after another unusable."""

NO_FAULT = frozenset({"stale", "abandoned_version"})
"""Reasons for which a result is refused without any fault of the worker. Such a result was valid
when it was sampled."""


@dataclass(frozen=True, slots=True)
class StoreGroup(Action):
    """Action: write `group` to the disk. GroupStored or GroupDiscarded follows."""

    group: Group
    header: Frame
    arrays: Frame


@dataclass(frozen=True, slots=True)
class GroupStored:
    """Event: a useful group is now in the ledger and in the buffer."""

    group_id: int


@dataclass(frozen=True, slots=True)
class GroupDiscarded:
    """Event: a delivered group has ended and will not be trained on. `reason` says why."""

    group_id: int
    reason: str


class Results:
    """Accepts or refuses the results that workers deliver, and ends groups."""

    def __init__(
        self,
        settings: LeaseSettings,
        groups: OpenGroups,
        prompts: Prompts,
        *,
        finish_times: FinishTimes,
        usefulness: Usefulness,
        counters: Counters,
        routes: Routes,
        peer_faults: PeerFaults,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._prompts = prompts
        self._finish_times = finish_times
        self._usefulness = usefulness
        self._counters = counters
        self._routes = routes
        self._peer_faults = peer_faults

    def receive(
        self,
        node_id: str,
        message: Deliver | Partial | Failed,
        payload: list[Frame],
        *,
        now: float,
    ) -> list[Action]:
        """Handle a message about a group that a worker has sent.

        Raises:
            RemoteProtocolError: if the message lacks its payload, or has a partial rollout that
                cannot have been sampled.
        """
        match message:
            case Deliver():
                return self.on_deliver(node_id, message, payload, now=now)
            case Partial():
                return self.on_partial(node_id, message, payload)
            case Failed():
                return self.on_failed(node_id, message, now=now)

    # --- finished groups -------------------------------------------------------------------------

    def on_deliver(
        self, node_id: str, message: Deliver, payload: list[Frame], *, now: float
    ) -> list[Action]:
        """Accept or refuse a finished group.

        Raises:
            RemoteProtocolError: if the message does not have the two frames of a group.
        """
        if len(payload) != 2:
            raise RemoteProtocolError(f"a Deliver from {node_id} without its two frames")
        if self._groups.leases.group(message.group_id).is_storing:
            return []
        if message.group_id in self._groups.finished:
            self._counters.add("duplicates")
            return self._ack(node_id, message, "duplicate")
        if not self._may_end(node_id, message):
            return self._disown(node_id, message, now)
        try:
            group = decode_group(payload[0], payload[1])
        except RemoteProtocolError as error:
            self._counters.add("protocol_errors")
            notes = self._peer_faults.note(node_id, "malformed", f"{node_id}: {error}", now=now)
            return [*notes, *self._refuse(node_id, message, "malformed", now)]
        if self._groups.is_open(message.group_id):
            fault = find_prompt_fault(self._prompts, message.group_id)
            if fault is not None:
                return self._without_prompt(node_id, message, fault)
        header, arrays = payload
        trimmed = self._trim(group)
        if trimmed is not None:
            group = trimmed
            header, arrays = encode_group(group)
        reason = self._find_fault(group, message, node_id)
        if reason is not None:
            return self._refuse(node_id, message, reason, now, num_trained=group.num_trained)
        leases = self._groups.leases
        leases.deliver(group.group_id, group.attempt, node_id)
        self._finish_times.made(
            node_id,
            num_tokens=max(rollout.num_tokens for rollout in group.rollouts),
            seconds=message.seconds,
            load=leases.mean_leases(node_id, group.group_id, group.attempt),
            now=now,
        )
        return [StoreGroup(group, header, arrays)]

    def _trim(self, group: Group) -> Group | None:
        if not self._settings.trims_stale:
            return None
        trimmed = trim_stale(
            group, step=self._groups.step, max_staleness=self._settings.max_staleness
        )
        if trimmed is None:
            return None
        num_trimmed = group.num_trained - trimmed.num_trained
        self._counters.add("partials/trimmed_tokens", num_trimmed)
        self._counters.add("tokens/too_old", num_trimmed)
        return replace(trimmed, is_trimmed=False)

    def _without_prompt(
        self, node_id: str, message: Deliver, fault: DataError | PromptPendingError
    ) -> list[Action]:
        """Handle a delivered group for which no prompt can be used at present.

        If the prompt is still being made, the worker gets no acknowledgement, so it delivers the
        group again. Otherwise the group ends.
        """
        if isinstance(fault, PromptPendingError):
            return []
        others = self._groups.leases.group(message.group_id).others(message.attempt)
        return [
            *self._groups.leave_out(message.group_id, fault),
            *self._ack(node_id, message, "refused", "prompt_error"),
            *self._cancel(others),
        ]

    def _find_fault(self, group: Group, message: Deliver, node_id: str) -> str | None:
        label = (message.group_id, message.attempt, node_id)
        if (group.group_id, group.attempt, group.worker_id) != label:
            return "mislabelled"
        if not self._groups.is_open(group.group_id):
            return "unknown_group"
        lease = self._prompts.lease(group.group_id, group.attempt)
        return find_group_fault(group, lease, self._settings) or find_fault(
            group,
            step=self._groups.step,
            max_staleness=self._settings.max_staleness,
            lineages=self._groups.lineages,
        )

    def _may_end(self, node_id: str, message: Deliver | Failed) -> bool:
        """Return whether a message from this worker may end the group.

        If the group is open, the attempt must have been granted to this worker. If the group has
        ended, the result is always true.
        """
        group = self._groups.leases.group(message.group_id)
        is_theirs = group.was_granted(message.attempt, node_id)
        return is_theirs or not self._groups.is_open(message.group_id)

    def _disown(self, node_id: str, message: Deliver | Failed, now: float) -> list[Action]:
        """Refuse a message about an attempt, because the attempt was not granted to its sender."""
        self._counters.add("refused/not_leased")
        text = f"{node_id} was not granted attempt {message.attempt} of group {message.group_id}"
        notes = self._peer_faults.note(node_id, "not_leased", text, now=now)
        return [*notes, *self._ack(node_id, message, "refused", "not_leased")]

    def _refuse(
        self, node_id: str, message: Deliver, reason: str, now: float, *, num_trained: int = 0
    ) -> list[Action]:
        """Refuse a result: tell its worker the reason, and end the lease of the group.

        `num_trained` is the number of tokens that would have been trained.
        """
        self._counters.add(f"refused/{reason}")
        if reason == "stale":
            self._counters.add("tokens/too_old", num_trained)
        group_id, attempt = message.group_id, message.attempt
        records: list[Action] = []
        # Only the first refusal of a lease is recorded: a worker could fill the disk with refusals.
        if any(record.attempt == attempt for record in self._groups.leases.group(group_id).leases):
            refusal = Refused(group=group_id, attempt=attempt, worker=node_id, reason=reason)
            records.append(AppendRecord(refusal))
            if reason not in NO_FAULT:
                records += self._count(node_id, is_useful=False, now=now)
        self._groups.leases.revoke_attempt(group_id, attempt)
        return [*records, *self._ack(node_id, message, "refused", reason)]

    def stored(self, group_id: int, *, is_useful: bool, now: float) -> list[Action]:
        """Acknowledge a stored group, end its other leases, and count the group for its worker.

        `is_useful` is whether something can be learned from the group.
        """
        group = self._groups.leases.group(group_id)
        assert group.result is not None, "it was stored without a result"
        node_id, attempt = group.result
        first, others = group.find(attempt, node_id), group.others(attempt)
        self._groups.close(group_id)
        self._counters.add("accepted")
        if first is not None and others:
            self._counters.add("hedges/lost" if first.copy_of is None else "hedges/won")
        ack = Ack(group_id=group_id, attempt=attempt, outcome="accepted")
        counted = self._count(node_id, is_useful=is_useful, now=now)
        return [*counted, *self._routes.to(node_id, ack), *self._cancel(others)]

    # --- partial rollouts ------------------------------------------------------------------------

    def on_partial(self, node_id: str, message: Partial, payload: list[Frame]) -> list[Action]:
        """Store the unfinished rollouts that a worker has sent.

        The group's next worker will get them. If the worker holds no lease of the group, the
        rollouts are dropped. Such rollouts may be late or invented.

        Raises:
            RemoteProtocolError: if the message is malformed or cannot have been sampled.
        """
        if len(payload) != 1:
            raise RemoteProtocolError(f"a Partial from {node_id} without its frame")
        if node_id not in self._groups.leases.group(message.group_id).workers:
            self._counters.add("partials/late")
            return []
        members = decode_members(payload[0])
        lineage = self._groups.lineages[-1].lineage
        fault = find_partial_fault(members, self._settings, lineage=lineage, step=self._groups.step)
        if fault is not None:
            raise RemoteProtocolError(f"partial rollouts of {node_id}: {fault}")
        num_tokens = sum(member.num_tokens for member in members)
        shipped = self._groups.shipped
        shipped.put(message.group_id, message.attempt, payload[0], num_tokens=num_tokens)
        return []

    # --- failures --------------------------------------------------------------------------------

    def on_failed(self, node_id: str, message: Failed, *, now: float) -> list[Action]:
        """Handle a group that has failed: grant it again, or end it.

        The group ends if no other worker can be expected to sample the group.
        """
        group = self._groups.leases.group(message.group_id)
        if group.is_storing or not self._groups.is_open(message.group_id):
            return self._ack(node_id, message, "duplicate")
        if not self._may_end(node_id, message):
            return self._disown(node_id, message, now)
        reason, detail = known_reason(message.reason), message.detail[:MAX_REASON_LENGTH]
        if message.is_elsewhere:
            if message.reason == ENGINE_ERROR:
                group.fatal.add(message.attempt)
            if message.reason != ENGINE_ERROR or len(group.fatal) < MAX_FATAL:
                return self._on_given_back(node_id, message, now)
            detail += f"; it has ended the engines of {MAX_FATAL} workers"
        text = f"group {message.group_id} failed on {node_id}: {reason}: {detail}"
        others = group.others(message.attempt)
        return [
            *self._peer_faults.note(node_id, reason, text, now=now),
            *self._groups.end(
                message.group_id,
                reason,
                worker_id=node_id,
                cause=_printable(f"{detail}\n{message.traceback[-MAX_TRACEBACK_LENGTH:]}".strip()),
            ),
            *self._count(node_id, is_useful=False, now=now),
            *self._ack(node_id, message, "refused", reason),
            *self._cancel(others),
        ]

    def _on_given_back(self, node_id: str, message: Failed, now: float) -> list[Action]:
        """End a worker's lease of a group that other workers may be able to sample.

        Log a warning.
        """
        self._groups.leases.give_back(message.group_id, message.attempt, node_id)
        self._counters.add("leases_given_back")
        acks = self._ack(node_id, message, "duplicate")
        text = f"{node_id} gives group {message.group_id} back: {message.detail}"
        return [*self._peer_faults.note(node_id, "given_back", text, now=now), *acks]

    # --- what follows ----------------------------------------------------------------------------

    def _ack(
        self, node_id: str, message: Deliver | Failed, outcome: str, reason: str = ""
    ) -> list[Action]:
        group_id, attempt = message.group_id, message.attempt
        ack = Ack(group_id=group_id, attempt=attempt, outcome=outcome, reason=reason)
        return self._routes.to(node_id, ack)

    def _count(self, node_id: str, *, is_useful: bool, now: float) -> list[Action]:
        texts = self._usefulness.delivered(node_id, is_useful=is_useful, now=now)
        return [Note("warning", text) for text in texts]

    def _cancel(self, leases: Sequence[LeaseRecord]) -> list[Action]:
        """End these leases and record that they ended. Tell their holders to stop."""
        actions: list[Action] = []
        for record in leases:
            group_id, attempt, worker_id = record.group_id, record.attempt, record.worker_id
            self._counters.add("leases_cancelled")
            self._counters.add("hedges/tokens_lost", record.num_tokens)
            end = Cancelled(
                group=group_id, attempt=attempt, worker=worker_id, tokens=record.num_tokens
            )
            actions.append(AppendRecord(end))
            ack = Ack(group_id=group_id, attempt=attempt, outcome="duplicate")
            actions += self._routes.to(worker_id, ack)
        return actions


def _printable(text: str) -> str:
    """Return a text with "?" in place of control characters."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
