"""Results of workers: checked, stored, acknowledged.

Life of a group id (they are handed out in ascending order, and each stands for one prompt):

    granted --Deliver, valid--> storing --stored()--> accepted --> trained or discarded (the buffer)
       |  ^                                                |
       |  +-- expired, worker gone, refused: granted again |  any later result: Ack "duplicate"
       +--Failed--> ended with the worker's reason

* A group is acknowledged only after `stored`: the journal holds it.
* A group's content is checked against what was asked: prompt, group size, finite numbers.
* A result whose samples are too old or from an abandoned lineage is refused with that reason and
  its group is granted again; the worker is told and forgets it.
"""

from __future__ import annotations

import numpy as np

from echo.errors import RemoteProtocolError
from echo.metrics import Counters
from echo.protocol.actions import Action, Note, StoreGroup
from echo.protocol.codec import Frame, decode_group
from echo.protocol.granting import Granting
from echo.protocol.messages import Ack, Deliver, Failed
from echo.protocol.reception import LearnerSettings, SendTo
from echo.rollout import Group, Lineage, find_fault

MAX_LOGPROB = 1e-3
"""Log-probabilities are at most 0, but for rounding."""
MAX_REASON_LENGTH = 64
"""Of a worker's reason for giving up a group; it becomes the name of a counter."""


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
    ) -> None:
        """Start with nothing on its way to the disk; granting and counters are the session's."""
        self.settings = settings
        self.granting = granting
        self.lineages = lineages
        self.counters = counters
        self._to = send
        self._storing: dict[int, tuple[str, int]] = {}

    def on_deliver(
        self, node_id: str, message: Deliver, payload: list[Frame], *, step: int
    ) -> list[Action]:
        """Judge a finished group.

        Args:
            node_id: the worker that sent it.
            message: which lease it answers.
            payload: the group, as `encode_group` writes it.
            step: optimizer steps done.

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
            note = Note("warning", f"{node_id}: {error}")
            return [note, *self._refuse(node_id, message, "malformed")]
        reason = self._find_fault(group, message, node_id, step)
        if reason is not None:
            return self._refuse(node_id, message, reason)
        self._storing[group.group_id] = (node_id, group.attempt)
        return [StoreGroup(group, payload[0], payload[1])]

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
            return "another_prompt"
        if len(group.rollouts) != self.settings.group_size:
            return "group_size"
        for rollout in group.rollouts:
            logprobs = rollout.sampler_logprobs
            if rollout.num_tokens > self.settings.max_completion_tokens:
                return "too_long"
            if not np.isfinite(logprobs).all() or float(logprobs.max()) > MAX_LOGPROB:
                return "bad_logprobs"
            ids = rollout.token_ids
            if int(ids.min()) < 0 or int(ids.max()) >= self.settings.vocab_size:
                return "bad_token_ids"
        return None

    def _refuse(self, node_id: str, message: Deliver, reason: str) -> list[Action]:
        """Tell the worker to forget this result; the group is granted again."""
        self.counters.add(f"refused/{reason}")
        leases = self.granting.leases
        leases.revoke_attempt(message.group_id, message.attempt)
        if self.granting.is_open(message.group_id):
            leases.return_group(message.group_id)
        return self._ack(node_id, message, "refused", reason)

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
        self.granting.settle(group_id)
        self.counters.add("accepted")
        return self._to(node_id, Ack(group_id=group_id, attempt=attempt, outcome="accepted"))

    def on_failed(self, node_id: str, message: Failed) -> list[Action]:
        """End a group that a worker could not finish, with its reason."""
        if message.group_id in self._storing or not self.granting.is_open(message.group_id):
            return self._ack(node_id, message, "duplicate")
        is_name = message.reason.isidentifier() and len(message.reason) <= MAX_REASON_LENGTH
        reason = message.reason if is_name else "failed"
        text = f"group {message.group_id} failed on {node_id}: {reason}: {message.detail}"
        return [
            Note("warning", text),
            *self.granting.end(message.group_id, reason),
            *self._ack(node_id, message, "refused", reason),
        ]
