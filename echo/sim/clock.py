"""Virtual time: calls in order of their instants, and nothing in between.

Calls of one instant happen in the order in which they were asked for, so that the same calls give
the same history.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class Clock:
    """The present, and what is to happen when."""

    def __init__(self) -> None:
        """Start at 0 with nothing to do."""
        self.now = 0.0
        self.num_events = 0
        """Calls made so far."""
        self.is_stopped = False
        self._serial = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, instant: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have something called at an instant; one that has passed is the present."""
        self._serial += 1
        when = instant if instant > self.now else self.now
        heapq.heappush(self._events, (when, self._serial, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have something called later."""
        self.at(self.now + delay_s, call, *arguments)

    def run(self, until: float = math.inf) -> None:
        """Let time pass up to `until`, or until `stop`, or until nothing is left to do."""
        events = self._events
        while events and not self.is_stopped and events[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(events)
            self.num_events += 1
            call(*arguments)
        if not self.is_stopped and math.isfinite(until):
            self.now = max(self.now, until)

    def stop(self) -> None:
        """End `run` after the present call."""
        self.is_stopped = True
