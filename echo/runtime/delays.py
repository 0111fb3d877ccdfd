"""From the configuration to the delays that are injected, for learner and workers alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from echo.config.schema import Config
from echo.sim.delays import DelayInjector, DelaySettings, Direction

_HISTOGRAM = "delays/weights/hist/"
_MILLISECONDS = "delays/weights/milliseconds"


def make_delays(config: Config, direction: Direction) -> DelayInjector | None:
    """Return the delays of one direction, or None if there are none.

    The learner delays rollouts; each worker delays its weights (`sim.delays.DelayedInstalls`),
    with settings that it inherits, so that both are the same in the whole run.

    Args:
        config: with what a worker inherits, where it is a worker's.
        direction: "weights" or "rollouts".
    """
    section = config.delays
    if section.law == "off" or section.directions not in ("both", direction):
        return None
    settings = DelaySettings(
        law=section.law,
        lower_s=section.lower_s,
        upper_s=section.upper_s,
        paid_s=section.paid_s,
        confidence=section.confidence,
        speedup=section.speedup,
    )
    return DelayInjector(settings, direction=direction, seed=config.run.seed)


class WeightDelays:
    """Which delays all workers have kept newer weights waiting for, from their own counts."""

    def __init__(self) -> None:
        """Start without any."""
        self._before: dict[str, Mapping[str, int]] = {}
        self._counts: Counter[str] = Counter()

    def metrics(
        self, totals: Mapping[str, Mapping[str, int]]
    ) -> dict[str, float | dict[str, float]]:
        """Return mean and histogram of all delays so far, in emulated seconds; empty for none.

        Args:
            totals: the counts of each worker by its name, since that worker's start.
        """
        for worker_id, counts in totals.items():
            before = self._before.get(worker_id, {})
            if counts.get(_MILLISECONDS, 0) < before.get(_MILLISECONDS, 0):
                before = {}  # it started anew
            for name, count in counts.items():
                if name == _MILLISECONDS or name.startswith(_HISTOGRAM):
                    self._counts[name] += count - before.get(name, 0)
        self._before |= totals
        histogram = {
            int(name.removeprefix(_HISTOGRAM)): float(count)
            for name, count in self._counts.items()
            if name != _MILLISECONDS
        }
        if not histogram:
            return {}
        return {
            "delays/weights/mean": self._counts[_MILLISECONDS] / 1000 / sum(histogram.values()),
            "delays/weights/hist": {str(edge): n for edge, n in sorted(histogram.items())},
        }
