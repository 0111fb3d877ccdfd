"""Say how long a run still takes, from the pace of its last steps."""

from __future__ import annotations

import math
from collections import deque

from echo.core.metrics import Snapshot

_STEPS_REMEMBERED = 20
"""Enough to even out single slow steps, few enough to follow a change of the number of workers."""


class Pace:
    """Follow the steps of a run and estimate its end.

    Only steps seen by this object count: a resumed run starts at a step it did not spend time on.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_STEPS_REMEMBERED + 1)

    def observe(self, snapshot: Snapshot) -> None:
        """Note the instant at which a new step was first seen."""
        if self._seen and snapshot.step < self._seen[-1][0]:
            self._seen.clear()
        if not self._seen or snapshot.step > self._seen[-1][0]:
            self._seen.append((snapshot.step, snapshot.elapsed_s))

    def eta_s(self, snapshot: Snapshot) -> float | None:
        """Return the seconds to `max_steps`, None before two steps have been seen."""
        if len(self._seen) < 2:
            return None
        (first_step, first_at), (last_step, last_at) = self._seen[0], self._seen[-1]
        per_step_s = (last_at - first_at) / (last_step - first_step)
        since_last_s = snapshot.elapsed_s - last_at
        return max((snapshot.max_steps - snapshot.step) * per_step_s - since_last_s, 0.0)


def clock(seconds: float) -> str:
    """Return `seconds` as a clock shows them: 0:07, 12:34, 1:02:03, 2d 03:04."""
    if not math.isfinite(seconds):
        return "-"
    minutes, secs = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
