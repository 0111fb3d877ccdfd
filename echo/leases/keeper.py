"""The unfinished groups of a worker, for the learner and across a restart."""

from __future__ import annotations

from dataclasses import dataclass

from echo.wire.actions import Action


@dataclass(frozen=True, slots=True)
class Save(Action):
    """Write this worker's file of unfinished groups."""

    data: bytes
