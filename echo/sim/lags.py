"""How many versions old the rollouts of a step are, where time is counted in optimizer steps.

For experiments in one process: a lag is drawn for each group, and the group is sampled by the
version that is so much older than the learner's. A bound on staleness alone realises little lag on
one machine, so experiments at a given lag fix it, draw it evenly, or let it follow from delays.
"""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass
from typing import Protocol

from echo.sim.delays import DelayedInstalls, DelayInjector

MAX_DRAWS = 1000
"""Groups in a row that may be too old before the delays count as too long for the bound."""


class Lags(Protocol):
    """Where lags come from."""

    @property
    def max_lag(self) -> int:
        """The largest that is ever drawn."""

    def draw(self, step: int) -> int:
        """Return the lag, at most `step`, of the next group of the step that follows `step`."""


@dataclass(frozen=True, slots=True)
class FixedLag:
    """The same lag for every group, as soon as so many versions exist."""

    max_lag: int

    def draw(self, step: int) -> int:
        """Return the lag."""
        return min(self.max_lag, step)


class UniformLag:
    """Every lag from 0 up to the largest, equally often."""

    def __init__(self, max_lag: int, *, seed: int) -> None:
        """Start drawing."""
        self.max_lag = max_lag
        self._chance = random.Random(f"{seed}/lags")

    def draw(self, step: int) -> int:
        """Return the lag."""
        return self._chance.randint(0, min(self.max_lag, step))


class DelayLags:
    """Lags that follow from delays in both directions: HeteroRL, with time counted in steps.

    A step takes `step_s` emulated seconds, and each makes a version. Every worker keeps its weights
    until its delay has passed, then takes the newest version. A group that is trained on at some
    instant was sampled one rollout delay earlier, by what its worker held then. Groups beyond the
    bound are lost, and counted.
    """

    def __init__(
        self,
        *,
        weights: DelayInjector | None,
        rollouts: DelayInjector | None,
        num_workers: int,
        step_s: float,
        max_lag: int,
        seed: int,
    ) -> None:
        """Start at step 0, with every worker holding the first version.

        Args:
            weights: delays of versions; None for none.
            rollouts: delays of groups; None for none.
            num_workers: which take turns at random.
            step_s: emulated seconds per optimizer step.
            max_lag: the bound, inclusive.
            seed: of the turns.
        """
        self.max_lag = max_lag
        self.num_lost = 0
        """Groups that were too old."""
        self._rollouts = rollouts
        self._step_s = step_s
        self._chance = random.Random(f"{seed}/turns")
        names = [f"w{number}" for number in range(1, num_workers + 1)]
        self._timelines = {name: _Timeline(weights, name, step_s) for name in names}

    def draw(self, step: int) -> int:
        """Return the lag.

        Raises:
            ValueError: if delays are so long that next to no group is within the bound.
        """
        now = step * self._step_s
        for _ in range(MAX_DRAWS):
            worker = self._chance.choice(list(self._timelines))
            delay_s = 0.0 if self._rollouts is None else self._rollouts.draw(worker)
            version = self._timelines[worker].version_at(max(0.0, now - delay_s))
            if step - version <= self.max_lag:
                return step - version
            self.num_lost += 1
        raise ValueError(
            f"{MAX_DRAWS} groups in a row were more than {self.max_lag} versions old at step "
            f"{step}: the delays are too long for steps of {self._step_s:g} s"
        )


class _Timeline:
    """Which version one worker held when."""

    def __init__(self, weights: DelayInjector | None, worker_id: str, step_s: float) -> None:
        self._step_s = step_s
        self._installs = None if weights is None else DelayedInstalls(weights, worker_id)
        self._at: list[float] = []
        self._versions: list[int] = []
        self._install(0.0)

    def version_at(self, instant: float) -> int:
        if self._installs is None:
            return int(instant / self._step_s)
        while (next_at := self._installs.next_at) is not None and next_at <= instant:
            self._install(next_at)
        return self._versions[bisect.bisect_right(self._at, instant) - 1]

    def _install(self, instant: float) -> None:
        """Take the newest version of this instant."""
        self._at.append(instant)
        self._versions.append(int(instant / self._step_s))
        if self._installs is not None:
            self._installs.installed(now=instant)
