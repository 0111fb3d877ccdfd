"""Mismatch of workers: comparison of what equal workers state of their samples.

The learner scores every token that it trains on, so it knows for each group how far the
log-probabilities that the worker has stated are from its own: `mismatch_kl`, nats per token. That
is never 0 for honest workers: engines and data types round differently, and older weights differ
more. So a worker is compared with its equals only: workers of the same engine and data type, group
by group with theirs of the same staleness.

A worker is told by name, and set aside as a useless one is (`leases/usefulness.py`), where

* of its last WINDOW trained groups half or more can be compared: at least two equals have
  MIN_EQUAL groups of that staleness each, so three workers or more are compared;
* the median group has a mismatch of TIMES that of its equals; and
* the median mismatch is above FLOOR, whatever the equals have.

Medians, because the estimate is exponential in a single token's difference: one token can lift the
mean of fifty groups, and no honest worker is to be set aside for it. Rewards differ by prompts, and
are never a reason.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from echo.core.timers import RecentMap
from echo.leases.book import MAX_WORKERS

WINDOW = 50
"""Trained groups of a worker by which it is judged, the newest."""
MIN_EQUAL = 5
"""Groups that an equal must have of a staleness to be compared there."""
TIMES = 5.0
"""How many times the mismatch of its equals a worker's must be."""
FLOOR = 0.005
"""Nats per token: a smaller mismatch is no reason. Honest float32 workers have a thousandth, old
weights and bfloat16 some thousandths."""

_Place = tuple[str, int]
"""(engine, level of staleness): groups of the same one are compared."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A group that was trained on."""

    worker_id: str
    """The worker that made it."""
    staleness: float
    """Mean of its trained tokens, steps."""
    kl: float
    """mismatch_kl of its trained tokens, nats."""


@dataclass(slots=True)
class _Window:
    """The newest groups of a worker."""

    groups: deque[tuple[_Place, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Of each: where it is compared, and its mismatch."""


def level(staleness: float) -> int:
    """Return the level of a staleness; the steps of one level differ by a third at most."""
    return round(3 * math.log2(1 + max(0.0, staleness)))


class Mismatches:
    """The mismatch of every worker's newest groups."""

    def __init__(self) -> None:
        self._windows: RecentMap[str, _Window] = RecentMap(max_entries=MAX_WORKERS)

    def trained(self, sampled: Sampled, *, engine: str) -> None:
        """Note a group that was trained on; `engine` is the kind and data type of its worker's."""
        window = self._windows.get(sampled.worker_id) or _Window()
        self._windows[sampled.worker_id] = window
        window.groups.append(((engine, level(sampled.staleness)), sampled.kl))

    def find_outliers(self) -> dict[str, str]:
        """Return the workers that stand out and how, and forget their groups."""
        full = {n: w for n, w in self._windows.as_dict().items() if len(w.groups) == WINDOW}
        if not full:
            return {}
        medians = self._medians()
        found: dict[str, str] = {}
        for name, window in full.items():
            compared: list[tuple[float, float]] = []
            for place, kl in window.groups:
                equals = [kl for other, kl in medians.get(place, {}).items() if other != name]
                if len(equals) >= 2:
                    compared.append((kl, median(equals)))
            if 2 * len(compared) < WINDOW:
                continue
            own = median(kl for kl, _ in compared)
            times = median(kl / max(usual, 1e-9) for kl, usual in compared)
            if times >= TIMES and own > FLOOR:
                usual = median(usual for _, usual in compared)
                found[name] = (
                    f"the log-probabilities that it states differ from the learner's by "
                    f"{own:.2g} nats per token (mismatch_kl), where equal workers have {usual:.2g}"
                )
        for name in found:
            self._windows.discard(name)
        return found

    def _medians(self) -> dict[_Place, dict[str, float]]:
        """Return the median mismatch of each worker that has groups enough, by place."""
        values: dict[_Place, dict[str, list[float]]] = {}
        for name, window in self._windows.as_dict().items():
            for place, kl in window.groups:
                values.setdefault(place, {}).setdefault(name, []).append(kl)
        return {
            place: {name: median(kls) for name, kls in of.items() if len(kls) >= MIN_EQUAL}
            for place, of in values.items()
        }
