"""Faults on purpose: a process that kills itself at a named point, for the crash tests.

Such a kill is a real one (SIGKILL to itself, no cleanup, nothing flushed), only its moment is
chosen, so that the rare moments can be tested as reliably as the common ones.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence


class Faults:
    """The points at which this process shall die."""

    def __init__(self, kill_at: Sequence[str]) -> None:
        """Take points such as "published:7" (see [faults] kill_at)."""
        self._kill_at = frozenset(kill_at)

    def reach(self, point: str, number: int) -> None:
        """Die here if this point was chosen."""
        if f"{point}:{number}" in self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
