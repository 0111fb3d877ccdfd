"""Wait for a batch. After too long without workers, end the run.

Normally the learner grants groups and publishes versions after an event, such as a heartbeat, a
result or a step. Without an event, one check per heartbeat interval handles these cases:

    the newest version is too old for the next batch    the learner publishes a version at once
    there is no worker                                  this is logged each minute, and after a
                                                        limit the run ends

A paused run waits without a limit. Once a worker has joined, the limit is
`network.reconnect_for_s`, because workers that have lost the learner redial for this time. Before
the first worker joins, the limit is at least FIRST_WORKER_S, because the operator may rent or start
workers much later. A worker counts from its Hello on, also while it loads its model or is on
standby.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from echo.core.errors import TransportError
from echo.core.timers import LOG_PERIOD_S
from echo.core.units import format_duration
from echo.leases.scheduler import WaitReason
from echo.roles.learner import Learner

FIRST_WORKER_S = 4 * 3600.0
"""Smallest number of seconds that a learner waits for its first worker."""


class BatchWait:
    """Waits for groups, and ends a run that has no worker."""

    def __init__(
        self,
        role: Learner,
        *,
        address: str,
        reconnect_for_s: float,
        remedy: str = "start workers and go on with --resume",
        log: logging.Logger,
    ) -> None:
        """Wait for workers at `address`.

        `remedy` is the advice in the error that is raised if no worker comes.
        """
        self._role = role
        self._remedy = remedy
        self._address = address
        self._reconnect_for_s = reconnect_for_s
        self._log = log
        self._last_worker: str | None = None
        self._alone_since = 0.0
        self._warned_at = 0.0
        self._has_news = asyncio.Event()
        self.check_at = 0.0
        """The loop's time at which `check` is due next, seconds."""

    def begin(self, *, now: float) -> None:
        """Begin a wait, and measure the time without workers from now on."""
        self._alone_since = self._warned_at = now
        self.check_at = now + self._role.settings.leases.heartbeat_s

    def wake(self) -> None:
        """End the present `wait`, so that the training loop checks for a batch.

        If no `wait` is running, the next `wait` ends at once.
        """
        self._has_news.set()

    async def wait(self) -> bool:
        """Wait for `wake`, at most until `check_at`; return whether `check_at` has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self.check_at):
                await self._has_news.wait()
        self._has_news.clear()
        return asyncio.get_running_loop().time() >= self.check_at

    def check(self, *, now: float) -> WaitReason:
        """Return the reason why no worker can get a group, or "" if there is no such reason.

        Raises:
            TransportError: if there has been no worker for longer than the limit.
        """
        self.check_at = now + self._role.settings.leases.heartbeat_s
        nodes = self._role.roster.nodes.values()
        worker = next((node.node_id for node in nodes if node.role == "worker"), None)
        if worker is None and not self._role.is_paused:
            self._alone(now)
        else:
            self._last_worker = worker or self._last_worker
            self._alone_since = self._warned_at = now
        return self._role.wait_reason()

    def _alone(self, now: float) -> None:
        alone_s = now - self._alone_since
        limit_s, since = self._reconnect_for_s, f"since {self._last_worker} left"
        if self._last_worker is None:
            limit_s, since = max(limit_s, FIRST_WORKER_S), "since this learner began to wait"
        if alone_s >= limit_s:
            raise TransportError(
                f"no worker at {self._address} for {format_duration(alone_s)}, {since}; "
                f"{self._remedy} (network.reconnect_for_s sets how long to wait for workers that "
                "are gone)"
            )
        if now >= self._warned_at + LOG_PERIOD_S:
            self._warned_at = now
            self._log.warning(
                "waiting for workers at %s for %s, %s; without one the run ends in %s",
                self._address, format_duration(alone_s), since, format_duration(limit_s - alone_s),
            )  # fmt: skip
