"""How the task's own code and the engines do, over all workers: `env/...` and `engine/...`.

Workers count for themselves and tell their totals with every heartbeat; here the totals become
differences from one step to the next. A worker that starts anew counts from 0 again.
"""

from __future__ import annotations

from collections.abc import Mapping

COUNTED = ("env/calls", "env/errors", "env/retries")

RARE = (
    "env/turn_limit",
    "env/token_limit",
    "engine/out_of_memory",
    "engine/installs_failed",
    "engine/version_refused",
)
"""Shown from the first time on that they happen."""

MILLISECONDS = "env/milliseconds"


class TaskMetrics:
    """Differences between totals."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, int]] = {}
        self._seen: set[str] = set()

    def row(self, totals: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
        """Return what happened since the last call; nothing of what never happens.

        Args:
            totals: the counts of each node by its name, since that node's start.
        """
        names = (*COUNTED, MILLISECONDS, *RARE)
        sums = {
            name: sum(
                _increase(self._before.get(node, {}).get(name, 0), counts.get(name, 0))
                for node, counts in totals.items()
            )
            for name in names
        }
        self._before |= totals
        self._seen.update(name for name in names if sums[name])
        row: dict[str, float] = {name: sums[name] for name in RARE if name in self._seen}
        if not self._seen.intersection((*COUNTED, MILLISECONDS)):
            return row
        row |= {name: sums[name] for name in COUNTED}
        if sums["env/calls"]:
            row["env/latency"] = sums[MILLISECONDS] / sums["env/calls"] / 1000
        return row


def _increase(before: int, now: int) -> int:
    return now - before if now >= before else now
