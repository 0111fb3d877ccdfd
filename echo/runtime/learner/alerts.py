"""Raise the alerts of a run, log them, and send them to the operator.

The rules are in `core/monitoring`. A task sends queued alerts to the operator's command and
webhook, one at a time and with a time limit, so no training step waits for an alert. If the queue
is full, the oldest alert in the queue is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from echo.config.schema import AlertsSection
from echo.core.errors import DivergedError
from echo.core.monitoring.alerts import DIVERGENCES, Alert, AlertLimits, AlertRules, RunFacts
from echo.core.units import one_line
from echo.roles.learner import Learner
from echo.runtime.commands import run_shell
from echo.runtime.learner.batches.stalls import Stalls
from echo.runtime.learner.costs.control import CostControl
from echo.runtime.learner.report import Progress
from echo.runtime.threads import Pool
from echo.train.step import StepError

CHECK_S = 5.0
"""Seconds between two checks of time, costs and disk. People read alerts, so seconds do not matter.
"""
SEND_S = 30.0
"""Time limit of the command and of the webhook, seconds each."""
SOCKET_S = 10.0
"""Seconds for which the webhook's server may be silent."""
FLUSH_S = 30.0
"""When a learner ends, it waits at most this many seconds for unsent alerts: as long as one alert
may take."""
MAX_QUEUED = 16
"""Largest number of alerts that wait to be sent."""


class Alerts:
    """Raises the alerts of a run, logs them and sends them."""

    def __init__(
        self,
        section: AlertsSection,
        role: Learner,
        progress: Progress,
        costs: CostControl,
        stalls: Stalls,
        *,
        run_dir: Path,
        pool: Pool,
        clock: Callable[[], float],
        time_of_day: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        """Watch the learner, its progress, its costs and its stalls.

        Blocking calls are made in `pool`.
        """
        self._section, self._role = section, role
        self._progress, self._costs, self._stalls = progress, costs, stalls
        self._run_dir, self._pool = run_dir, pool
        self._clock, self._time_of_day, self._log = clock, time_of_day, log
        limits = AlertLimits(
            reward_drop=section.reward_drop,
            min_entropy=section.min_entropy,
            min_ess=section.min_ess,
            stall_s=section.stall_s,
            max_cost_per_h=section.max_cost_per_h,
            max_cost=section.max_cost,
            min_free_disk_bytes=section.min_free_disk_bytes,
        )
        self._rules = AlertRules(
            limits, step=role.step, rewards=tuple(progress.curves.rewards), now=clock()
        )
        self._queue: deque[Alert] = deque(maxlen=MAX_QUEUED)
        self._has_queued, self._is_empty = asyncio.Event(), asyncio.Event()
        self._is_empty.set()

    # --- what is watched -------------------------------------------------------------------------

    def stepped(self, row: Mapping[str, Any]) -> DivergedError | None:
        """Raise the alerts caused by the metrics of a step.

        Returns:
            The error that ends training, if the run has diverged and alerts.on_divergence is not
            "alert". Otherwise None, and training may continue.
        """
        found = self._rules.stepped(self._role.step, row, now=self._clock())
        self._raise(found)
        if self._section.on_divergence == "alert":
            return None
        bad = (each for each in found if each.kind in DIVERGENCES and not each.is_cleared)
        if (alert := next(bad, None)) is None:
            return None
        what = f"the run has diverged at step {alert.step}: {alert.text}"
        if self._section.on_divergence == "stop":
            what += (
                "; it is saved: --resume goes on, from an earlier checkpoint if "
                f"{self._run_dir / 'checkpoints' / 'latest'} names one"
            )
        return DivergedError(what, good_step=alert.good_step or 0)

    def nonfinite(self, text: str) -> None:
        """Raise an alert because gradients or weights contain NaN or infinity."""
        self._raise(self._rules.failed(self._role.step, text, now=self._clock()))

    def step_failed(self, error: StepError) -> None:
        """Raise an alert if a step failed because its gradient was not finite."""
        if error.reason == "nonfinite_gradient":
            self.nonfinite(f"step {self._role.step + 1} failed: {error}")

    async def watch(self) -> None:
        """Check time, costs and disk every CHECK_S, until cancelled or until the run ends."""
        section = self._section
        periodic = section.stall_s, section.max_cost_per_h, section.max_cost
        if not any((*periodic, section.min_free_disk_bytes)):
            return
        while self._role.shutdown.reason is None:
            free_bytes = None
            if section.min_free_disk_bytes is not None:
                free_bytes = await self._pool.run(self._free_bytes)
            cost = self._costs.view()
            facts = RunFacts(
                step=self._role.step,
                activity=self._progress.activity or f"waiting for {self._stalls.waiting_for}",
                cost_per_h=None if cost is None else cost.per_h,
                cost_total=None if cost is None else cost.total,
                free_disk_bytes=free_bytes,
            )
            self._raise(self._rules.check(facts, now=self._clock()))
            await asyncio.sleep(CHECK_S)

    def _free_bytes(self) -> int | None:
        with suppress(OSError):
            return shutil.disk_usage(self._run_dir).free
        return None

    def _raise(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            if alert.is_cleared:
                self._log.info("alert %s %s", alert.kind, alert.text)
            else:
                self._role.counters.add(f"alerts/{alert.kind}")
                self._log.warning("alert %s: %s", alert.kind, alert.text)
            if self._section.command is None and self._section.webhook is None:
                continue
            if len(self._queue) == MAX_QUEUED:
                self._role.counters.add("alerts/not_sent")
            self._queue.append(alert)
            self._is_empty.clear()
            self._has_queued.set()

    # --- sending ---------------------------------------------------------------------------------

    async def send(self) -> None:
        """Send queued alerts until cancelled."""
        while True:
            await self._has_queued.wait()
            self._has_queued.clear()
            while self._queue:
                alert = self._queue.popleft()
                if self._section.command is not None:
                    await self._run(self._section.command, alert)
                if self._section.webhook is not None:
                    await self._post(self._section.webhook, alert)
            self._is_empty.set()

    async def flush(self) -> None:
        """Wait at most FLUSH_S until every alert is sent. Called before the learner ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._is_empty.wait()

    async def _run(self, command: str, alert: Alert) -> None:
        variables = {
            "ECHO_ALERT_RUN": self._run_dir.name,
            "ECHO_ALERT_KIND": alert.kind,
            "ECHO_ALERT_STATE": _state(alert),
            "ECHO_ALERT_STEP": str(alert.step),
            "ECHO_ALERT_TEXT": one_line(alert.text),
        }
        try:
            end = await run_shell(command, environment=variables, timeout_s=SEND_S)
        except OSError as error:
            self._log.warning("alerts.command could not be started: %s", error)
            return
        if not end.has_succeeded:
            last = f": {end.lines[-1]}" if end.lines else ""
            self._log.warning("alerts.command %s%s", end.outcome, last)

    async def _post(self, url: str, alert: Alert) -> None:
        run, text = self._run_dir.name, one_line(alert.text)
        body = {
            "text": f"{run}: alert {alert.kind} {_state(alert)} at step {alert.step}: {text}",
            "run": run,
            "kind": alert.kind,
            "state": _state(alert),
            "step": alert.step,
            "at": self._time_of_day(),
        }
        try:
            async with asyncio.timeout(SEND_S):
                fault = await self._pool.run(post_json, url, msgspec.json.encode(body))
        except TimeoutError:
            fault = f"no answer within {SEND_S:g} s"
        if fault:
            # Without the URL, which may contain a token.
            self._log.warning("alerts.webhook has not taken the alert %s: %s", alert.kind, fault)


def _state(alert: Alert) -> str:
    return "cleared" if alert.is_cleared else "raised"


def post_json(url: str, body: bytes) -> str:
    """Post JSON to a URL. Return "" on success, else the reason of the failure."""
    headers = {"Content-Type": "application/json", "User-Agent": "echo-rl"}
    try:
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=SOCKET_S):
            return ""
    except (OSError, ValueError, HTTPException) as error:  # timeouts are OSErrors
        return one_line(str(error))
