"""Decides which alerts are raised and cleared.

The decisions use the run's metrics and other facts on the run.

A condition is, for example, an entropy below its limit. An episode is a period in which the
condition holds. The start of an episode raises an alert, and the end clears the alert. Two alerts
of a condition are at least REPEAT_S apart, so a value that moves around its limit raises few
alerts. An episode may begin less than REPEAT_S after the last alert. Then its alert waits until
REPEAT_S have passed, and is raised only if the episode still lasts.

Three conditions are divergences: the policy has become worse or soon will. Their alerts name the
last good step. So a run can return to a checkpoint of this step or an earlier step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from echo.core.units import format_bytes, format_duration

AlertKind = Literal[
    "nonfinite", "reward", "entropy", "ess", "stall", "cost_per_h", "cost_total", "disk"
]
DIVERGENCES: frozenset[AlertKind] = frozenset({"reward", "entropy", "ess"})

REPEAT_S = 600.0
"""After an alert, the same condition causes no further alert for this many seconds."""
NUM_REWARDS = 10
"""Number of steps over which a mean reward is computed. This mean is compared with the best earlier
mean."""
NUM_VALUES = 5
"""Number of steps over which the medians of entropy and effective sample size are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLimits:
    """The limits of the conditions. None switches a condition off."""

    reward_drop: float | None = None
    """How far the mean reward of NUM_REWARDS steps may fall below the best earlier mean."""
    min_entropy: float | None = None
    min_ess: float | None = None
    stall_s: float | None = None
    max_cost_per_h: float | None = None
    max_cost: float | None = None
    min_free_disk_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """The beginning or the end of an episode of a condition."""

    kind: AlertKind
    step: int
    """Number of completed optimizer steps at the time of the alert."""
    text: str
    """One line with the value and its limit. At the end of an episode, the line begins with
    "cleared"."""
    is_cleared: bool = False
    """Whether the episode has ended."""
    good_step: int | None = None
    """The last good step before a divergence; None for other conditions and at an episode's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts on a run that a periodic check reads. An unknown value is None."""

    step: int
    activity: str
    """The learner's activity, or the reason why the learner waits."""
    cost_per_h: float | None = None
    cost_total: float | None = None
    free_disk_bytes: int | None = None


@dataclass(slots=True)
class _Condition:
    is_active: bool = False
    raised_at: float = -math.inf

    def changes(self, *, is_bad: bool, now: float) -> bool:
        """Return whether an episode begins or ends now; store whether an episode is active."""
        if is_bad == self.is_active or (is_bad and now < self.raised_at + REPEAT_S):
            return False
        self.is_active = is_bad
        if is_bad:
            self.raised_at = now
        return True


class AlertRules:
    """Decides which alerts a run raises and clears."""

    def __init__(
        self, limits: AlertLimits, *, step: int, rewards: Sequence[float] = (), now: float
    ) -> None:
        """Make the rules of a run. No alert is raised yet.

        `rewards` has the mean rewards of the steps up to `step`, oldest first.
        """
        self._limits = limits
        self._conditions: dict[AlertKind, _Condition] = {}
        self._stepped_at = now
        self._best, self._best_step = -math.inf, step
        self._newest: deque[float] = deque(maxlen=NUM_REWARDS)
        """Mean rewards of the newest steps that this process made."""
        self._entropies: deque[float] = deque(maxlen=NUM_VALUES)
        self._ess: deque[float] = deque(maxlen=NUM_VALUES)
        earlier: deque[float] = deque(maxlen=NUM_REWARDS)
        for at, reward in enumerate(rewards, step - len(rewards) + 1):
            self._note_best(earlier, reward, at)

    def _note_best(self, window: deque[float], reward: float, step: int) -> None:
        """Append a step's reward to a window.

        If the window's mean is the best so far, keep this mean and its step.
        """
        if not math.isfinite(reward):
            return
        window.append(reward)
        if len(window) == NUM_REWARDS and fmean(window) > self._best:
            self._best, self._best_step = fmean(window), step

    def _found(
        self,
        kind: AlertKind,
        *,
        is_bad: bool,
        step: int,
        text: str,
        now: float,
        good_step: int | None = None,
    ) -> Iterator[Alert]:
        condition = self._conditions.setdefault(kind, _Condition())
        if not condition.changes(is_bad=is_bad, now=now):
            return
        if is_bad:
            yield Alert(kind=kind, step=step, text=text, good_step=good_step)
        else:
            yield Alert(kind=kind, step=step, text=f"cleared: {text}", is_cleared=True)

    def stepped(self, step: int, row: Mapping[str, Any], *, now: float) -> list[Alert]:
        """Return the alerts that the row of metrics of optimizer step `step` causes."""
        waited_s, self._stepped_at = now - self._stepped_at, now
        found = [
            *self._found(
                "nonfinite", is_bad=False, step=step, text=f"step {step} was made", now=now
            ),
            *self._found(
                "stall", is_bad=False, step=step, now=now,
                text=f"step {step} was made after {format_duration(waited_s)}",
            ),
        ]  # fmt: skip
        limits = self._limits
        if limits.reward_drop is not None:
            found += self._reward(step, row.get("reward/mean"), limits.reward_drop, now=now)
        for kind, values, metric, limit, key in (
            ("entropy", self._entropies, "entropy/mean", limits.min_entropy, "min_entropy"),
            ("ess", self._ess, "ess", limits.min_ess, "min_ess"),
        ):
            if limit is not None:
                found += self._low(kind, values, row.get(metric), (metric, limit, key), step, now)
        return found

    def _reward(
        self, step: int, reward: float | None, drop: float, *, now: float
    ) -> Iterator[Alert]:
        if reward is None or not math.isfinite(reward):
            return
        self._note_best(self._newest, reward, step)
        if len(self._newest) < NUM_REWARDS:
            return
        mean = fmean(self._newest)
        yield from self._found(
            "reward",
            is_bad=mean <= self._best - drop,
            step=step,
            text=f"the mean reward of the last {NUM_REWARDS} steps is {mean:.4g}, the best was "
            f"{self._best:.4g} up to step {self._best_step}; alerts.reward_drop = {drop:g}",
            good_step=self._best_step,
            now=now,
        )

    def _low(
        self,
        kind: Any,
        values: deque[float],
        value: float | None,
        named: tuple[str, float, str],
        step: int,
        now: float,
    ) -> Iterator[Alert]:
        metric, limit, key = named
        if value is None or not math.isfinite(value):
            return
        values.append(value)
        if len(values) < NUM_VALUES:
            return
        middle = median(values)
        yield from self._found(
            kind,
            is_bad=middle < limit,
            step=step,
            text=f"the median of {metric} in the last {NUM_VALUES} steps is {middle:.4g}; "
            f"alerts.{key} = {limit:g}",
            good_step=max(step - NUM_VALUES, 0),
            now=now,
        )

    def failed(self, step: int, text: str, *, now: float) -> list[Alert]:
        """Return the alert that a step raises if gradients or weights contain NaN or infinity."""
        return list(self._found("nonfinite", is_bad=True, step=step, text=text, now=now))

    def check(self, facts: RunFacts, *, now: float) -> list[Alert]:
        """Return the alerts that elapsed time, costs and disk space cause."""
        limits, step, found = self._limits, facts.step, list[Alert]()
        waited_s = now - self._stepped_at
        if limits.stall_s is not None and waited_s >= limits.stall_s:
            text = f"no optimizer step for {format_duration(waited_s)}: {facts.activity}"
            found += self._found("stall", is_bad=True, step=step, text=text, now=now)
        if (most := limits.max_cost_per_h) is not None and (cost := facts.cost_per_h) is not None:
            text = f"${cost:.2f} per hour; alerts.max_cost_per_h = {most:g}"
            found += self._found("cost_per_h", is_bad=cost > most, step=step, text=text, now=now)
        if (most := limits.max_cost) is not None and (cost := facts.cost_total) is not None:
            text = f"${cost:.2f} spent so far; alerts.max_cost = {most:g}"
            found += self._found("cost_total", is_bad=cost > most, step=step, text=text, now=now)
        least, free = limits.min_free_disk_bytes, facts.free_disk_bytes
        if least is not None and free is not None:
            text = (
                f"{format_bytes(free)} are free for the run's directory; "
                f"alerts.min_free_disk_bytes = {format_bytes(least)}"
            )
            found += self._found("disk", is_bad=free < least, step=step, text=text, now=now)
        return found
