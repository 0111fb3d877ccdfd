"""What workers have shipped of unfinished groups, kept for whoever is granted the group next.

Only the newest of each group is kept, in memory: after the learner's restart the workers ship
again. What does not fit into the bound is not kept and counted; its group then begins anew if its
worker is lost, which costs tokens and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from echo.core.bounds import MAX_LEASE_BYTES
from echo.core.metrics import Counters
from echo.protocol.membership import Member
from echo.wire.codec import Frame
from echo.wire.messages import Grant, Heartbeat, Lease

MAX_SHIPPED_BYTES = 1 << 30
"""Of shipped rollouts: at nine bytes per token, 100 million tokens."""
PARTIAL_COUNTS = (
    "parked", "resumed", "resumed_tokens", "masked_tokens", "wasted_tokens", "age_sum", "shipped",
)  # fmt: skip
"""What workers count of unfinished rollouts."""


def _split(leases: Sequence[Lease]) -> Iterator[tuple[Lease, ...]]:
    """Yield the leases in order, as many at a time as fit into one message."""
    batch: list[Lease] = []
    num_bytes = 0
    for lease in leases:
        size = len(msgspec.msgpack.encode(lease))
        if batch and num_bytes + size > MAX_LEASE_BYTES:
            yield tuple(batch)
            batch, num_bytes = [], 0
        batch.append(lease)
        num_bytes += size
    if batch:
        yield tuple(batch)


@dataclass(frozen=True, slots=True)
class _Kept:
    attempt: int
    num_tokens: int
    frame: bytes


class Handover:
    """Shipped rollouts by group, within a bound."""

    def __init__(self, counters: Counters, *, max_bytes: int = MAX_SHIPPED_BYTES) -> None:
        """Start with nothing."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._counters = counters
        self._kept: dict[int, _Kept] = {}

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, group_id: int, attempt: int, frame: Frame, *, num_tokens: int) -> None:
        """Keep what was sampled for a group, unless a newer attempt has got further."""
        kept = self._kept.get(group_id)
        if kept is not None and kept.attempt > attempt and kept.num_tokens >= num_tokens:
            return
        self.discard(group_id)
        if self.num_bytes + len(frame) > self.max_bytes:
            self._counters.add("dropped/partials_full")
            return
        self._kept[group_id] = _Kept(attempt, num_tokens, bytes(frame))
        self.num_bytes += len(frame)

    def discard(self, group_id: int) -> None:
        """Forget a group that has come to its end."""
        kept = self._kept.pop(group_id, None)
        if kept is not None:
            self.num_bytes -= len(kept.frame)

    def grants(self, leases: Sequence[Lease]) -> list[tuple[Grant, tuple[Frame, ...]]]:
        """Return the messages that carry these leases, with what there is of each."""
        plain = [lease for lease in leases if lease.group_id not in self]
        messages: list[tuple[Grant, tuple[Frame, ...]]] = [
            (Grant(leases=some), ()) for some in _split(plain)
        ]
        for lease in leases:
            if lease.group_id in self:
                self._counters.add("partials/handed_over")
                messages.append((Grant(leases=(lease,)), (self._kept[lease.group_id].frame,)))
        return messages

    def count(self, member: Member, message: Heartbeat) -> None:
        """Add what has become of a worker's unfinished rollouts since its last heartbeat."""
        counts = message.stats.partials
        for name in PARTIAL_COUNTS:
            growth = counts.get(name, 0) - member.partials.get(name, 0)
            if growth > 0:
                self._counters.add(f"partials/{name}", growth)
        member.partials = counts
        member.num_parked = sum(
            state.is_waiting and state.num_tokens > 0 for state in message.leases
        )
