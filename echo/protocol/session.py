"""What a shell needs of a session, be it a process (`runtime/node.py`) or simulated."""

from __future__ import annotations

from typing import Protocol

from echo.wire.actions import Action, Work
from echo.wire.codec import Frame


class Session(Protocol):
    """A node's conversation: events in, actions out, without IO and without a clock."""

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called next."""

    def receive(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Handle one message."""

    def expel(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Part with whoever sent a message whose handling has failed by a fault of ours.

        What had been decided when it failed is returned as well. Nothing here looks at what the
        sender has said, which may be what the fault comes from.
        """

    def worked(self, work: Work, fault: str, *, now: float) -> list[Action]:
        """Take the result of work in a thread: what was wrong with it, or nothing."""

    def expire(self, *, now: float) -> list[Action]:
        """Do what has become due."""
