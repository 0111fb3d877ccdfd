"""Reports how a worker's groups end: with a result, or with the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo.core.bounds import MAX_PAYLOAD_BYTES, MAX_REASON_LENGTH, MAX_TRACEBACK_LENGTH
from echo.core.monitoring.metrics import Counters
from echo.core.rollout import Group, Rollout, StaleTokens
from echo.core.units import one_line
from echo.leases.worker.held import (
    Dropped,
    GroupState,
    HeldLeases,
    PartialGroup,
    Reported,
    key_of,
)
from echo.roles.worker.sampling import NoResult
from echo.wire.actions import Action, Note
from echo.wire.codec import encode_group, payload_bytes
from echo.wire.messages import Deliver, Failed, Lease


@dataclass(frozen=True, slots=True)
class GroupScored:
    """Event: the members of a group were scored. `rewards` has their rewards, in order.

    If the group became unwanted during scoring, some rewards are missing.
    """

    group: PartialGroup
    rewards: Sequence[float]


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """Event: a group is finished, and its rollouts have rewards."""

    group: Group


class Outcomes:
    """Converts the outcomes of groups to the results that the learner gets."""

    def __init__(self, held: HeldLeases, counters: Counters, *, worker_id: str) -> None:
        """Report outcomes of the leases in `held`. `worker_id` is the name of the worker."""
        self._held, self._counters, self._worker_id = held, counters, worker_id

    def scored(self, event: GroupScored, *, stale_tokens: StaleTokens, now: float) -> list[Action]:
        """If the learner still wants a scored group, deliver it."""
        group = event.group
        if group.state is not GroupState.SCORING:
            self._held.handle(group, Dropped())
            return []
        rollouts = [
            member.rollout(reward, stale_tokens=stale_tokens)
            for member, reward in zip(group.members, event.rewards, strict=True)
        ]
        finished = answer_to(group.lease, rollouts, worker_id=self._worker_id)
        return self.finished(GroupFinished(finished), now=now)

    def finished(self, event: GroupFinished, *, now: float) -> list[Action]:
        """Deliver a finished group. If the group is too large for a message, report a failure."""
        group = event.group
        held = self._held.get((group.group_id, group.attempt))
        if held is None:
            return []
        payload = encode_group(group)
        if (num_bytes := payload_bytes(payload)) > MAX_PAYLOAD_BYTES:
            detail = (
                f"it has {num_bytes} bytes, a message holds {MAX_PAYLOAD_BYTES}; lower "
                "batch.group_size or sampling.max_completion_tokens"
            )
            return self.failed(NoResult(held.lease, "group_too_large", detail))
        seconds = held.seconds(now)
        message = Deliver(group_id=group.group_id, attempt=group.attempt, seconds=seconds)
        self._held.handle(held, Reported(message, tuple(payload)))
        return []

    def failed(self, event: NoResult) -> list[Action]:
        """If the learner still wants a group, report why it has no result."""
        group = self._held.get(key_of(event.lease))
        if group is None:
            return []
        if group.state is GroupState.UNWANTED:
            self._held.handle(group, Dropped())
            return []
        if not event.is_elsewhere:
            self._counters.add(f"failed/{event.reason}")
        message = failure_of(event)
        self._held.handle(group, Reported(message))
        # A task's code may have put the model's words into the detail.
        text = f"group {message.group_id}: {event.reason}: {one_line(message.detail)}"
        return [Note("warning", text, event.reason)]


def failure_of(event: NoResult) -> Failed:
    """Return the message that tells the learner that a group has no result."""
    return Failed(
        group_id=event.lease.group_id,
        attempt=event.lease.attempt,
        reason=event.reason,
        detail=event.detail[:MAX_REASON_LENGTH],
        is_elsewhere=event.is_elsewhere,
        traceback=event.traceback[-MAX_TRACEBACK_LENGTH:],
    )


def answer_to(lease: Lease, rollouts: Sequence[Rollout], *, worker_id: str) -> Group:
    """Return the finished group that answers a lease. The group consists of `rollouts`."""
    return Group(
        group_id=lease.group_id,
        attempt=lease.attempt,
        worker_id=worker_id,
        prompt_ids=np.array(lease.prompt_ids, dtype=np.int32),
        rollouts=tuple(rollouts),
    )
