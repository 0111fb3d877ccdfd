"""The versions that a worker's engine holds."""

from __future__ import annotations

from dataclasses import dataclass

from echo.core.rollout import PolicyVersion
from echo.wire.actions import Action

INSTALL_AGAIN_S = 30.0
"""Seconds after which a version that could not be installed is tried again, if none is newer.

If all workers refuse the newest version, and what they have is too old, no newer one ever comes.
"""


@dataclass(frozen=True, slots=True)
class Install(Action):
    """Load this version into the engine."""

    version: PolicyVersion
