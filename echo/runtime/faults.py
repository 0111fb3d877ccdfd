"""Faults on purpose: a process that kills itself at a named point, for the crash tests.

Such a kill is a real one (SIGKILL to itself, no cleanup, nothing flushed), only its moment is
chosen, so that the rare moments can be tested as reliably as the common ones.

Points of a learner, in the order in which a group and a step come by them:

    stored:GROUP          the group is on the disk, nobody has been told
    stepped:STEP          the optimizer step is made, the journal does not know
    trained:STEP          the journal knows, nothing was published
    published:STEP        the version is offered to the nodes
    checkpoint:STEP       the checkpoint is written and not yet visible
    checkpointed:STEP     it is visible, and the journal knows
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from echo.errors import ConfigError

POINTS: dict[str, tuple[str, ...]] = {
    "learner": ("stored", "stepped", "trained", "published", "checkpoint", "checkpointed")
}
"""The points of each role that has any."""


class Faults:
    """The points at which this process shall die."""

    def __init__(self, kill_at: Sequence[str], *, role: str) -> None:
        """Take points such as "published:7" (see [faults] kill_at).

        Raises:
            ConfigError: if this role never comes by one of them.
        """
        self._points = POINTS.get(role, ())
        unknown = [text for text in kill_at if text.partition(":")[0] not in self._points]
        if unknown and not self._points:
            raise ConfigError(
                f"faults.kill_at = {', '.join(unknown)}: a {role} has no such points, only the "
                "learner has; set it for the learner alone, and kill other nodes from outside"
            )
        if unknown:
            raise ConfigError(
                f"faults.kill_at = {', '.join(unknown)}: no such point; a {role} has "
                f"{', '.join(self._points)}"
            )
        self._kill_at = frozenset(kill_at)

    def reach(self, point: str, number: int) -> None:
        """Die here if this point was chosen."""
        if point not in self._points:
            raise ValueError(f"{point!r} is not in the table of points")
        if f"{point}:{number}" in self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
