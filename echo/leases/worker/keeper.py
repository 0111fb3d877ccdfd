"""Keeps copies of a worker's unfinished groups: at the learner, and in a file of the worker.

Shipping a group means sending its tokens so far to the learner. If the worker stops for good, the
learner leases the shipped groups to other workers. If the worker restarts, it reads the groups from
its file. Its next heartbeat reports these groups to the learner. The learner then tells the worker
which of them are no longer wanted. The worker renews both copies every `ship_s` seconds. It also
renews them when it pauses or leaves.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from echo.core.bounds import MAX_PAYLOAD_BYTES
from echo.core.errors import RemoteProtocolError
from echo.core.units import counted
from echo.leases.partials import decode_groups, encode_groups, encode_members
from echo.leases.worker.held import HeldLeases
from echo.wire.actions import Action, Note
from echo.wire.codec import Frame, payload_bytes
from echo.wire.messages import Partial


@dataclass(frozen=True, slots=True)
class Save(Action):
    """Action: write the worker's file of unfinished groups. The event PartialsSaved follows."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartialsFound:
    """Event: an earlier process of this worker has left a file, which contains `data`."""

    data: Frame


@dataclass(frozen=True, slots=True)
class PartialsSaved:
    """Event: a Save has ended. `fault` says why it failed; it is "" after success."""

    fault: str


class PartialKeeper:
    """Decides when unfinished groups are sent to the learner, and when they are saved."""

    def __init__(self, held: HeldLeases, counts: Counter[str]) -> None:
        """Start without copies. The number of groups sent is added to `counts["shipped"]`."""
        self.num_saving = 0
        """Number of writes of the file that are still running."""
        self._held = held
        self._counts = counts
        self._saved = b""
        self._saved_at = -math.inf

    def ship(self, *, interval_s: float, now: float) -> list[tuple[Partial, bytes]]:
        """Return (message, payload) for each interrupted group that has tokens not yet sent.

        Args:
            interval_s: least seconds between two shipments of a group; 0 if this worker is about to
                pause or to leave.
            now: the present time, seconds.
        """
        shipments = []
        for partial in self._held.take_due(interval_s=interval_s, now=now):
            message = Partial(group_id=partial.lease.group_id, attempt=partial.lease.attempt)
            frame = encode_members(partial.members)
            if payload_bytes([frame]) > MAX_PAYLOAD_BYTES:
                continue  # too large; if this worker is lost, the group is sampled again
            shipments.append((message, frame))
        self._counts["shipped"] += len(shipments)
        return shipments

    def save(self, run_id: str, *, interval_s: float = 0.0, now: float) -> list[Action]:
        """Return the action that writes the file of unfinished groups.

        If the file already has the present groups, return []. The groups are compared with the file
        at most once in `interval_s` seconds. A call in between returns [], too.
        """
        if now < self._saved_at + interval_s:
            return []
        self._saved_at = now
        partials = self._held.begun()
        data = encode_groups(run_id, partials)
        if data == self._saved or not (partials or self._saved):
            return []
        self._saved = data
        self.num_saving += 1
        return [Save(data)]

    def on_saved(self, event: PartialsSaved) -> list[Action]:
        """Record that a write of the file has ended. If the write failed, return a warning."""
        self.num_saving -= 1
        if not event.fault:
            return []
        text = f"cannot keep unfinished rollouts: {event.fault}; a restart would sample them again"
        return [Note("warning", text)]

    def on_found(self, saved: Frame, run_id: str) -> list[Action]:
        """Add this run's groups from the file that an earlier process left. Return a log line."""
        try:
            partials = decode_groups(saved, run_id=run_id)
        except RemoteProtocolError as error:
            return [Note("warning", f"dropped the unfinished groups that were left here: {error}")]
        self._saved = bytes(saved)
        self._held.restore(partials)
        if not partials:
            return []
        num_tokens = sum(partial.num_tokens for partial in partials)
        groups = counted(len(partials), "unfinished group")
        return [Note("info", f"found {groups} of {counted(num_tokens, 'token')}")]
