"""The port for what follows a run: its metrics, and its display."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from echo.core.metrics import Snapshot

Row = Mapping[str, float | Mapping[str, float]]


class Follower(Protocol):
    """Follows a run from outside: its metrics, and its display."""

    is_watching: bool
    """Whether snapshots are displayed."""

    def write_metrics(self, step: int, row: Row) -> None:
        """Append one row of metrics."""

    def show(self, snapshot: Snapshot) -> None:
        """Draw a snapshot."""
