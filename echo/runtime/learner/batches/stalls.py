"""Stalls: explain why the learner waits long or workers are idle.

The learner observes its fleet when its own activity changes. The workers' states change soon after
that, for example after a new version or a new batch. So the learner observes the fleet again after
FIRST_LOOK_S. The next pauses double, up to a heartbeat interval. If a pause were too long, a short
state, such as the fetching of a version, would count for the whole pause.

The times between observations are added up for each step (`echo/fleet/explain.py`). An explanation
is made

    during a wait    once the wait is longer than usual
    after a step     if the step's wait was longer than usual; if waits took a large share of the
                     time of the last NUM_STEPS steps; or if the learner hardly waits and workers
                     have no groups

A wait is longer than usual if it exceeds each of three limits: USUAL_FACTOR times the median of the
last waits, LONG_SHARE of a usual step's duration, and MIN_WAIT_S. The explanation is logged when
its cause changes, but at most once in LOG_PERIOD_S. A step's row of metrics has the explanation,
and the seconds that the learner waited for each stage of the workers' groups. During a wait the
explanation is written as a separate row. So the files of a crashed run show the cause of its last
wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import median

from echo.core.timers import LOG_PERIOD_S
from echo.core.units import counted, format_duration
from echo.fleet.explain import (
    Explanation,
    ObservedFleet,
    StepParts,
    Tally,
    describe_wait,
    explain_idle,
    explain_wait,
)
from echo.roles.learner import Learner
from echo.runtime.learner.batches.groups import DeliveredGroups
from echo.runtime.learner.report import Progress

FIRST_LOOK_S = 0.05
"""Smallest time from a change of the learner's activity to the next observation, seconds."""
LOOK_S_PER_NODE = 1e-3
"""Smallest time between two observations, seconds per node of the fleet, because the work of an
observation grows with the fleet."""
MIN_WAIT_S = 10.0
"""Waits up to this many seconds always count as usual. They are over before an operator could act.
"""
STEADY_WAIT_S = 2.0
"""If the last NUM_STEPS steps together waited at most this many seconds, no wait is explained. In a
shorter time, the fleet is observed too rarely."""
WARM_UP_STEPS = 2
"""Number of first steps that are left out of the last steps: nodes still join in these steps, and
build their engines."""
START_S = 60.0
"""While no later step has ended, waits up to this many seconds count as usual."""
USUAL_FACTOR = 2.0
"""A wait is longer than usual only if it exceeds this multiple of the median wait. With a factor
near 1, half of all waits would be longer than usual."""
LONG_SHARE = 0.25
"""A wait is long if it takes at least this share of the duration of a usual step. The last
NUM_STEPS steps have waited long if their waits take more than this share of their total time.
"""
SHORT_SHARE = 0.1
"""The learner hardly waits if its waits take less than this share of the last steps' time."""
NUM_STEPS = 8
"""Number of last steps whose times are added up for an explanation. They also determine the usual
wait and the usual duration of a step."""

Activities = defaultdict[str, float]
"""Seconds that the learner has spent on each activity."""
Fields = Mapping[str, float | Mapping[str, float] | Mapping[str, str]]


class Stalls:
    """Observes the fleet, and explains why the learner waits long or workers are idle."""

    def __init__(
        self,
        role: Learner,
        delivered: DeliveredGroups,
        progress: Progress,
        *,
        is_recomputing: bool,
        num_enough: Callable[[], int | None],
        write: Callable[[int, Fields], None],
        log: logging.Logger,
        now: float,
    ) -> None:
        """Observe the fleet from now on.

        Args:
            role: the learner whose fleet is observed.
            delivered: the groups that the learner scores and stores.
            progress: reports the learner's activities, and counts groups without a training signal.
            is_recomputing: whether a setting makes the trainer recompute activations needlessly.
            num_enough: returns how many active workers activation last found enough, when it put
                others on standby; None otherwise.
            write: called with (step, fields) to write an explanation as a row of metrics.
            log: gets the explanations.
            now: the present time, seconds.
        """
        self._role, self._delivered, self._progress = role, delivered, progress
        self._is_recomputing, self._num_enough = is_recomputing, num_enough
        self._write, self._log = write, log
        self.current: Explanation | None = None
        """The explanation of the present wait or of the last steps; None if nothing stalls."""
        self._activity = "starting"
        self._at = self._looked_at = self._waits_from = now
        self._pause_s, self._has_turned = FIRST_LOOK_S, asyncio.Event()
        self._fleet = self._observe()
        self._tally, self._activities = Tally(), Activities(float)
        """The times of the step under way."""
        self._last: deque[tuple[Tally, Activities]] = deque(maxlen=NUM_STEPS)
        """The times of each of the last steps after WARM_UP_STEPS."""
        self._num_steps = 0
        self._waited_s = 0.0
        """Seconds that the learner waited in the step under way, before the present wait."""
        self._cause, self._logged_at = "", -LOG_PERIOD_S
        self._num_accepted, self._useless = 0, Counter[str]()
        progress.on_turn = self.turn

    # --- observing -------------------------------------------------------------------------------

    def turn(self, activity: str, now: float) -> None:
        """Record that the learner begins `activity`; "" means a wait for groups."""
        self._count(now)
        if not self._activity:
            self._waited_s += now - self._waits_from
        if not activity:
            self._waits_from = now
        self._activity = activity
        self._look(now)
        self._pause_s = FIRST_LOOK_S
        self._has_turned.set()

    def check(self, now: float) -> None:
        """Observe the fleet if an observation is due, and explain a long wait."""
        if now < self._look_at:
            return
        self._pause_s = min(self._role.settings.leases.heartbeat_s, 2 * self._pause_s)
        self._count(now)
        self._look(now)
        if self._role.is_paused:
            self._waits_from = now
        if self._activity or self._role.is_paused or not self._role.is_granting:
            return  # no wait, or one that the operator has asked for
        waited_s = self._waited_s + now - self._waits_from
        if waited_s < self._limit_s or self._fleet.num_missing <= 0:
            return
        self._count_groups()
        # What workers did before they left does not explain why the wait goes on.
        found = explain_wait(self._tally if self._fleet.workers else Tally(), self._fleet)
        if found.cause == "slow_install" and not self._num_steps:
            return  # engines start with their first version: versions do not come too often
        if self._report(found, f"waits {format_duration(waited_s)} for {found}", now):
            self._write(self._role.step, {"explain": _as_row(found)})

    async def watch(self) -> None:
        """Observe the fleet and explain long waits, until cancelled."""
        while True:
            self._has_turned.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._look_at):
                    await self._has_turned.wait()
            self.check(asyncio.get_running_loop().time())

    @property
    def _look_at(self) -> float:
        """Time of the next observation."""
        least_s = LOOK_S_PER_NODE * len(self._fleet.nodes)
        return self._looked_at + max(self._pause_s, least_s)

    def _count(self, now: float) -> None:
        seconds, self._at = now - self._at, now
        # A pause is the operator's. It is part of no step, and workers without groups are not idle.
        if self._activity or not self._role.is_paused:
            self._activities[self._activity] += seconds
        if not self._role.is_paused:
            self._tally.add(self._fleet, seconds, is_waiting=not self._activity)

    def _count_groups(self) -> None:
        """Count the groups that were delivered in the step under way."""
        self._tally.num_accepted = self._progress.num_accepted - self._num_accepted
        self._tally.useless = self._progress.useless_reasons - self._useless

    def _look(self, now: float) -> None:
        had_workers = bool(self._fleet.workers)
        self._looked_at, self._fleet = now, self._observe()
        if self._fleet.workers and not had_workers:
            # The wait for a worker is over, and so is what was said of it.
            self._waits_from, self._waited_s, self.current = now, 0.0, None

    def _observe(self) -> ObservedFleet:
        progress = self._progress
        return replace(
            self._role.fleet.observe(),
            num_scoring=self._delivered.num_scoring,
            num_storing=self._delivered.num_storing,
            num_useless=progress.zero_signal.num_groups,
            useless=progress.zero_signal_text,
            num_enough=self._num_enough(),
        )

    @property
    def _limit_s(self) -> float:
        """Seconds up to which a step's wait counts as usual."""
        if not self._last:
            return START_S
        waited_s = median(tally.waited_s for tally, _ in self._last)
        step_s = median(sum(activities.values()) for _, activities in self._last)
        return max(MIN_WAIT_S, USUAL_FACTOR * waited_s, LONG_SHARE * step_s)

    # --- explaining ------------------------------------------------------------------------------

    @property
    def waiting_for(self) -> str:
        """The cause of the learner's present wait, as text; "" if the learner does not wait.

        For a long wait, the text contains a remedy.
        """
        if self._activity:
            return ""
        if self._role.is_paused:
            num_running = self._role.leases.num_running
            verb = "goes" if num_running == 1 else "go"
            return f"the operator: paused, {counted(num_running, 'group')} {verb} on"
        text = describe_wait(self._fleet)
        if not text or self.current is None:
            return text
        missing, _, nodes = text.partition("; ")  # the end is cut off on a small screen
        return f"{missing}; {self.current.remedy}; {nodes}"

    @property
    def explanation(self) -> str:
        """The explanation as text for a view, the remedy first; "" if nothing stalls."""
        found = self.current
        return "" if found is None else f"{found.remedy}; {found.chain}"

    def stepped(self, now: float) -> Fields:
        """Explain the last step. Return fields for its row of metrics."""
        self._count(now)
        self._num_steps += 1
        self._count_groups()
        tally, activities = self._tally, self._activities
        self._num_accepted = self._progress.num_accepted
        self._useless = self._progress.useless_reasons.copy()
        row: dict[str, float | Mapping[str, float] | Mapping[str, str]] = {
            f"time/wait/{stage}": seconds for stage, seconds in tally.wait_by_stage().items()
        }
        if tally.seconds:
            row["rollouts/idle_ratio"] = tally.idle_share
        self._tally, self._activities, self._waited_s = Tally(), Activities(float), 0.0
        is_long = tally.waited_s >= self._limit_s
        if self._num_steps > WARM_UP_STEPS:
            self._last.append((tally, activities))
        text = self._explain_steps(tally, is_long=is_long)
        if self.current is not None:
            row["explain"] = _as_row(self.current)
            self._report(self.current, text, now)
        return row

    def _explain_steps(self, tally: Tally, *, is_long: bool) -> str:
        """Explain the last step if its wait was long, or else the last NUM_STEPS steps.

        Store the explanation in `current`. Return the explanation as text; "" if nothing stalls.
        """
        self.current = None
        if is_long:
            self.current = explain_wait(tally, self._fleet)
            return f"waited {format_duration(tally.waited_s)} for {self.current}"
        if len(self._last) < NUM_STEPS / 2 and not self._has_waited_long:
            return ""
        total, activities = Tally(), Activities(float)
        for each, seconds in self._last:
            total.include(each)
            for activity, spent_s in seconds.items():
                activities[activity] += spent_s
        num_steps, all_s = len(self._last), sum(activities.values())
        share = total.waited_s / max(all_s, 1e-9)
        least_s = MIN_WAIT_S if num_steps < NUM_STEPS else STEADY_WAIT_S
        if share > LONG_SHARE and total.waited_s >= least_s:
            self.current = explain_wait(total, self._fleet)
            return f"waited {share:.0%} of the last {num_steps} steps, as for {self.current}"
        # At first all groups that the bound admits are sampled at once; then the workers rest.
        first = WARM_UP_STEPS + min(self._fleet.max_staleness, NUM_STEPS) + NUM_STEPS
        if share < SHORT_SHARE and self._num_steps >= first:
            parts = StepParts(
                step_s=all_s / num_steps,
                train_s=activities["training"] / num_steps,
                publish_s=activities["publishing"] / num_steps,
                save_s=activities["saving a checkpoint"] / num_steps,
                is_recomputing=self._is_recomputing,
            )
            self.current = explain_idle(total, parts)
            return str(self.current)
        return ""

    @property
    def _has_waited_long(self) -> bool:
        return sum(tally.waited_s for tally, _ in self._last) >= START_S

    def _report(self, found: Explanation, text: str, now: float) -> bool:
        self.current = found
        if found.cause == self._cause or now < self._logged_at + LOG_PERIOD_S:
            return False
        self._cause, self._logged_at = found.cause, now
        if found.cause == "no_worker":
            return True  # `BatchWait` logs it each minute
        is_idle = text == str(found)
        level = logging.INFO if is_idle else logging.WARNING
        self._log.log(level, "%s", text if is_idle else f"the learner {text}")
        return True


def _as_row(found: Explanation) -> Mapping[str, str]:
    return {
        "cause": found.cause,
        "resource": found.resource,
        "setting": found.setting,
        "text": str(found),
    }
