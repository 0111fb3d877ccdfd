"""The outbox holds finished groups. Each is sent again until the learner acknowledges it.

Delivery is at-least-once. A group stays in the outbox, and is sent again every `retry_s` seconds,
until the learner acknowledges that its ledger has the group. The learner removes duplicates by
group id. The outbox is bounded: a worker with a full outbox keeps its groups and stops sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo.wire.codec import Frame
from echo.wire.messages import Message


@dataclass(slots=True)
class Unacknowledged:
    """A message that is sent again until the learner acknowledges it."""

    message: Message
    payload: tuple[Frame, ...]
    sent_at: float | None = None
    """Time at which the message was last sent over the present link. None if this link has not
    carried the message yet."""


class Outbox:
    """Holds the deliveries that are not acknowledged. Keys are (group, attempt), oldest first."""

    def __init__(self, *, max_deliveries: int, retry_s: float) -> None:
        """Start empty.

        If a delivery is not acknowledged, it is sent again after `retry_s` seconds.
        """
        self.max_deliveries = max_deliveries
        self.retry_s = retry_s
        self._deliveries: dict[tuple[int, int], Unacknowledged] = {}

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._deliveries

    def __len__(self) -> int:
        return len(self._deliveries)

    @property
    def is_full(self) -> bool:
        """Whether sampling must pause until the learner has acknowledged deliveries."""
        return len(self._deliveries) >= self.max_deliveries

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The (group, attempt) of every delivery, oldest first."""
        return list(self._deliveries)

    @property
    def deadline(self) -> float | None:
        """Time at which a delivery must be sent next.

        The time is 0.0 if a delivery was never sent, and None if the outbox is empty.
        """
        if not self._deliveries:
            return None
        sent = [delivery.sent_at for delivery in self._deliveries.values()]
        return min(0.0 if at is None else at + self.retry_s for at in sent)

    def put(self, key: tuple[int, int], message: Message, *payload: Frame) -> None:
        """Add a delivery. It replaces an earlier delivery that has the same (group, attempt)."""
        self._deliveries[key] = Unacknowledged(message, payload)

    def take_due(self, *, now: float) -> list[Unacknowledged]:
        """Return the deliveries that are due at `now`, oldest first. Mark them as sent."""
        due = [
            delivery
            for delivery in self._deliveries.values()
            if delivery.sent_at is None or now >= delivery.sent_at + self.retry_s
        ]
        for delivery in due:
            delivery.sent_at = now
        return due

    def acknowledge(self, key: tuple[int, int]) -> bool:
        """Remove a delivery. Return whether the outbox contained it."""
        return self._deliveries.pop(key, None) is not None

    def resend_all(self) -> None:
        """Make every delivery due at once, because the link to the learner was lost."""
        for delivery in self._deliveries.values():
            delivery.sent_at = None
