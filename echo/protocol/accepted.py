"""The groups that the learner has accepted and not yet trained on, as the protocol sees them."""

from __future__ import annotations

from typing import Protocol


class AcceptedGroups(Protocol):
    """What the session needs to know of the buffer."""

    num_trimmed_tokens: int
    """Tokens masked there because they had grown too old."""

    admission_staleness: int
    """The bound that new leases are granted for; at most the hard one."""

    def __len__(self) -> int:
        """Return how many groups wait to be trained."""

    def num_unspent(self, *, step: int) -> int:
        """Return how many accepted groups are not yet part of a step that was made."""
