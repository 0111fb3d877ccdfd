"""Results of workers: checked, stored, acknowledged.

Life of a group id (they are handed out in ascending order, and each stands for one prompt):

    granted --Deliver, valid--> storing --stored()--> accepted --> trained or discarded (the buffer)
       |  ^                                                |
       |  +-- expired, worker gone, refused: granted again |  any later result: Ack "duplicate"
       +--Failed--> ended with the worker's reason; or granted again, where others can do it

* A group is acknowledged only after `stored`: the journal holds it.
* A group's content is checked against what was asked: prompt, group size, finite numbers.
* A result whose samples are too old or from an abandoned lineage is refused with that reason and
  its group is granted again; the worker is told and forgets it. The refusal of a group that was
  asked for is journalled.
* Where two workers had a group, the one that was not the first is told to stop, and that is
  journalled as well.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from echo.core.errors import RemoteProtocolError
from echo.core.metrics import Counters
from echo.core.rollout import MAX_LOGPROB, Group, Lineage, PartialRollout, find_fault, trim_stale
from echo.protocol.granting import Granting, RecordCancel, RecordRefusal, StoreGroup
from echo.protocol.leases import LeaseRecord
from echo.protocol.partial_codec import decode_members
from echo.protocol.reception import Complain, LearnerSettings, SendTo
from echo.wire.actions import Action
from echo.wire.codec import Frame, decode_group, encode_group
from echo.wire.messages import SUPERSEDED, Ack, Deliver, Failed, Partial, known_reason

MAX_CAUSE_LENGTH = 2600
"""Of what a worker says of it, the last characters: a sentence and a traceback."""


class Intake:
    """The judge of every result that a worker sends."""

    def __init__(
        self,
        settings: LearnerSettings,
        *,
        granting: Granting,
        lineages: tuple[Lineage, ...],
        counters: Counters,
        send: SendTo,
        complain: Complain,
    ) -> None:
        """Start with nothing on its way to the disk; granting and counters are the session's."""
        self.settings = settings
        self.granting = granting
        self.lineages = lineages
        self.counters = counters
        self._to = send
        self._complain = complain
        self._storing: dict[int, tuple[str, int]] = {}

    def receive(
        self,
        node_id: str,
        message: Deliver | Partial | Failed,
        payload: list[Frame],
        *,
        step: int,
        now: float,
    ) -> list[Action]:
        """Handle what a worker says of a group; see the methods for each message."""
        match message:
            case Deliver():
                return self.on_deliver(node_id, message, payload, step=step, now=now)
            case Partial():
                return self.on_partial(node_id, message, payload, step=step)
            case Failed():
                return self.on_failed(node_id, message, now=now)

    def on_deliver(
        self, node_id: str, message: Deliver, payload: list[Frame], *, step: int, now: float
    ) -> list[Action]:
        """Judge a finished group.

        Args:
            node_id: the worker that sent it.
            message: which lease it answers.
            payload: the group, as `encode_group` writes it.
            step: optimizer steps done.
            now: the present instant.

        Raises:
            RemoteProtocolError: if the message has no group.
        """
        if len(payload) != 2:
            raise RemoteProtocolError(f"a Deliver from {node_id} without its two frames")
        if message.group_id in self._storing:
            return []
        if message.group_id in self.granting.settled:
            self.counters.add("duplicates")
            return self._ack(node_id, message, "duplicate")
        try:
            group = decode_group(payload[0], payload[1])
        except RemoteProtocolError as error:
            self.counters.add("protocol_errors")
            notes = self._complain(node_id, "malformed", f"{node_id}: {error}", now)
            return [*notes, *self._refuse(node_id, message, "malformed")]
        header, arrays = payload
        if self.settings.trims_stale:
            # Tokens beyond the bound are masked here; the bound itself is checked as ever.
            trimmed = trim_stale(group, step=step, max_staleness=self.settings.max_staleness)
            if trimmed is not None:
                self.counters.add(
                    "partials/trimmed_tokens", group.num_trained - trimmed.num_trained
                )
                group = replace(trimmed, is_trimmed=False)
                header, arrays = encode_group(group)
        reason = self._find_fault(group, message, node_id, step)
        if reason is not None:
            return self._refuse(node_id, message, reason)
        self._storing[group.group_id] = (node_id, group.attempt)
        self.granting.leases.deliver(group.group_id, group.attempt, node_id)
        self.granting.forecast.made(
            node_id,
            num_tokens=max(rollout.num_tokens for rollout in group.rollouts),
            seconds=message.seconds,
            load=self.granting.leases.load(node_id, group.group_id, group.attempt),
            now=now,
        )
        return [StoreGroup(group, header, arrays)]

    def _find_fault(self, group: Group, message: Deliver, node_id: str, step: int) -> str | None:
        """Return why a delivered group cannot be accepted, or None."""
        label = (message.group_id, message.attempt, node_id)
        if (group.group_id, group.attempt, group.worker_id) != label:
            return "mislabelled"
        if not self.granting.is_open(group.group_id):
            return "unknown_group"
        return self._find_content_fault(group) or find_fault(
            group, step=step, max_staleness=self.settings.max_staleness, lineages=self.lineages
        )

    def _find_content_fault(self, group: Group) -> str | None:
        """Return in what a group differs from what was asked for, or None."""
        lease = self.granting.make_lease(group.group_id, group.attempt)
        if group.prompt_ids.tolist() != list(lease.prompt_ids):
            if not self.settings.prompts_are_free:
                return "another_prompt"
            if int(group.prompt_ids.min()) < 0:
                return "bad_token_ids"
            if int(group.prompt_ids.max()) >= self.settings.vocab_size:
                return "bad_token_ids"
        if len(group.rollouts) != self.settings.group_size:
            return "group_size"
        if self.settings.exact_version and len(group.versions) > 1:
            return "mixed_versions"
        for rollout in group.rollouts:
            if rollout.num_tokens > self.settings.max_completion_tokens:
                return "too_long"
            fault = _find_token_fault(
                rollout.token_ids, rollout.sampler_logprobs, self.settings.vocab_size
            )
            if fault is not None:
                return fault
        return None

    def _refuse(self, node_id: str, message: Deliver, reason: str) -> list[Action]:
        """Tell the worker to forget this result; the group is granted again."""
        self.counters.add(f"refused/{reason}")
        group_id, attempt = message.group_id, message.attempt
        leases = self.granting.leases
        # Once per lease, so that nobody can fill the disk with them.
        is_leased = any(record.attempt == attempt for record in leases.leases_of(group_id))
        records = [RecordRefusal(group_id, attempt, node_id, reason)] if is_leased else []
        leases.revoke_attempt(group_id, attempt)
        if self.granting.is_open(group_id):
            leases.return_group(group_id)
        return [*records, *self._ack(node_id, message, "refused", reason)]

    def _ack(
        self, node_id: str, message: Deliver | Failed, outcome: str, reason: str = ""
    ) -> list[Action]:
        ack = Ack(
            group_id=message.group_id, attempt=message.attempt, outcome=outcome, reason=reason
        )
        return self._to(node_id, ack)

    def stored(self, group_id: int) -> list[Action]:
        """Acknowledge a group that the journal now holds."""
        node_id, attempt = self._storing.pop(group_id)
        leases = self.granting.leases.leases_of(group_id)
        self.granting.settle(group_id)
        self.counters.add("accepted")
        first = next((r for r in leases if (r.worker_id, r.attempt) == (node_id, attempt)), None)
        if first is not None and len(leases) > 1:
            self.counters.add("hedges/lost" if first.copy_of is None else "hedges/won")
        ack = Ack(group_id=group_id, attempt=attempt, outcome="accepted")
        return [*self._to(node_id, ack), *self._cancel(leases, first)]

    def _cancel(self, leases: list[LeaseRecord], first: LeaseRecord | None) -> list[Action]:
        """Tell the other workers that had a group to stop."""
        actions: list[Action] = []
        for record in (record for record in leases if record is not first):
            group_id, attempt, worker_id = record.group_id, record.attempt, record.worker_id
            self.counters.add("leases_cancelled")
            self.counters.add("hedges/tokens_lost", record.num_tokens)
            actions.append(RecordCancel(group_id, attempt, worker_id, record.num_tokens))
            ack = Ack(group_id=group_id, attempt=attempt, outcome="duplicate")
            actions += self._to(worker_id, ack)
        return actions

    def on_partial(
        self, node_id: str, message: Partial, payload: list[Frame], *, step: int
    ) -> list[Action]:
        """Keep what a worker has sampled for a group, for whoever may have to continue it.

        Only from a worker that holds a lease of it; anything else may be late, or invented.

        Raises:
            RemoteProtocolError: if it is malformed or cannot have been sampled.
        """
        if len(payload) != 1:
            raise RemoteProtocolError(f"a Partial from {node_id} without its frame")
        if node_id not in self.granting.leases.workers_of(message.group_id):
            self.counters.add("partials/late")
            return []
        members = decode_members(payload[0])
        fault = self._find_partial_fault(members, step)
        if fault is not None:
            raise RemoteProtocolError(f"partial rollouts of {node_id}: {fault}")
        num_tokens = sum(member.num_tokens for member in members)
        self.granting.handover.put(
            message.group_id, message.attempt, payload[0], num_tokens=num_tokens
        )
        return []

    def _find_partial_fault(self, members: list[PartialRollout], step: int) -> str | None:
        """Return why these cannot be what was sampled for a group, or None."""
        if len(members) != self.settings.group_size:
            return f"{len(members)} members"
        for member in (member for member in members if member.num_tokens):
            if member.num_tokens > self.settings.max_completion_tokens:
                return f"{member.num_tokens} tokens"
            if not member.is_finished and member.num_tokens >= self.settings.max_completion_tokens:
                return "nothing is left to sample"
            fault = _find_token_fault(
                member.token_ids, member.sampler_logprobs, self.settings.vocab_size
            )
            if fault is not None:
                return fault
            if int(member.policy_versions[:, 1].max()) > step:
                return "version_from_the_future"
        return None

    def on_failed(self, node_id: str, message: Failed, *, now: float) -> list[Action]:
        """End a group that a worker could not finish, with its reason."""
        if message.group_id in self._storing or not self.granting.is_open(message.group_id):
            return self._ack(node_id, message, "duplicate")
        if message.is_elsewhere:
            return self._on_given_back(node_id, message, now)
        reason = known_reason(message.reason)
        text = f"group {message.group_id} failed on {node_id}: {reason}: {message.detail}"
        leases = self.granting.leases.leases_of(message.group_id)
        own = next((r for r in leases if r.attempt == message.attempt), None)
        return [
            *self._complain(node_id, reason, text, now),
            *self.granting.end(
                message.group_id,
                reason,
                worker_id=node_id,
                cause=_printable(f"{message.detail}\n{message.traceback}".strip()),
            ),
            *self._ack(node_id, message, "refused", reason),
            *self._cancel(leases, own),
        ]

    def _on_given_back(self, node_id: str, message: Failed, now: float) -> list[Action]:
        """Grant a group again that a worker cannot sample now, though others can."""
        self.granting.leases.give_back(message.group_id, message.attempt, node_id)
        self.counters.add("leases_given_back")
        acks = self._ack(node_id, message, "duplicate")
        if message.reason == SUPERSEDED:
            return acks  # so it goes with each new version
        text = f"{node_id} gives group {message.group_id} back: {message.detail}"
        return [*self._complain(node_id, "given_back", text, now), *acks]


def _printable(text: str) -> str:
    """Return the end of a peer's text as lines that are harmless on a terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else "?" for char in text[-MAX_CAUSE_LENGTH:]
    )


def _find_token_fault(
    ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], vocab_size: int
) -> str | None:
    """Return what is wrong with sampled tokens, at least one, or None."""
    if not np.isfinite(logprobs).all() or float(logprobs.max()) > MAX_LOGPROB:
        return "bad_logprobs"
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return "bad_token_ids"
    return None
