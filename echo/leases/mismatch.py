"""Finds out whether the log-probabilities that a worker reports are those of its model.

The learner computes the log-probability of every token that it trains on. So the learner can
measure how far the worker's log-probabilities of each group deviate: `mismatch_kl`, nats per token.
An honest worker has a mismatch above 0, because engines and data types round differently. Older
weights increase the mismatch. So a worker is compared only with its equals: workers of the same
engine and data type. Each group is compared only with equals' groups of the same staleness.

A worker is reported by name and set aside, like a useless worker (`leases/usefulness.py`), if all
of these conditions hold:

* At least half of the worker's last WINDOW trained groups can be compared. A group can be compared
  if at least two equals have MIN_EQUAL groups of the same staleness. So this check needs at least
  three workers.
* The median ratio of the worker's mismatch to the equals' mismatch is at least TIMES.
* The worker's median mismatch is above FLOOR.

Medians are used because the estimate grows exponentially with the difference at a token. So one
token of an honest worker can raise the mean of fifty groups. Rewards are not compared, because they
depend on the prompt.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from echo.core.timers import RecentMap
from echo.leases.book import MAX_WORKERS

WINDOW = 50
"""A worker's mismatch is computed from this many of its newest trained groups. Their median hardly
depends on single groups."""
MIN_EQUAL = 5
"""Other workers are compared with a worker at a level of staleness only if it has at least this
many groups there."""
TIMES = 5.0
"""A worker stands out if its mismatch is at least this many times the mismatch of equal workers."""
FLOOR = 0.005
"""A worker with a lower mismatch than this does not stand out. The unit is nats per token.

Honest workers have a mismatch of 0.001 with float32, and a few times more with old weights or
bfloat16.
"""

_Place = tuple[str, int]
"""(engine, level of staleness). Groups are compared only if both are the same. The engine's name
includes its data type."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The mismatch that a trained group had."""

    worker_id: str
    """The worker that made the group."""
    staleness: float
    """Mean staleness of those tokens of the group that were trained on, steps."""
    kl: float
    """mismatch_kl of those tokens of the group that were trained on, nats per token."""


@dataclass(slots=True)
class _Window:
    groups: deque[tuple[_Place, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """(place, mismatch) of each group, oldest first."""


def level(staleness: float) -> int:
    """Return the level to which a staleness belongs. A level is a range of values.

    Values of one level differ by at most about a third.
    """
    return round(3 * math.log2(1 + max(0.0, staleness)))


class Mismatches:
    """The mismatch that the newest trained groups of each worker had."""

    def __init__(self) -> None:
        self._windows: RecentMap[str, _Window] = RecentMap(max_entries=MAX_WORKERS)

    def trained(self, sampled: Sampled, *, engine: str) -> None:
        """Add a group that was trained on. `engine` names its worker's engine and data type."""
        window = self._windows.get(sampled.worker_id) or _Window()
        self._windows[sampled.worker_id] = window
        window.groups.append(((engine, level(sampled.staleness)), sampled.kl))

    def find_outliers(self) -> dict[str, str]:
        """Return the workers that stand out, each with the reason.

        Forget the groups of these workers.
        """
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
        """Return, for each place and each worker, the median mismatch of the worker's groups there.

        A place is an engine with a level of staleness. At each place, workers with fewer than
        MIN_EQUAL groups are left out.
        """
        values: dict[_Place, dict[str, list[float]]] = {}
        for name, window in self._windows.as_dict().items():
            for place, kl in window.groups:
                values.setdefault(place, {}).setdefault(name, []).append(kl)
        return {
            place: {name: median(kls) for name, kls in of.items() if len(kls) >= MIN_EQUAL}
            for place, of in values.items()
        }
