"""What a learner without a batch does by time: ask again, say why nothing comes, give up at last.

Groups are granted and versions published when something happens: a heartbeat, a result, a step.
Where nothing happens any more, these looks still do, one per heartbeat:

    no version may be sampled for the next step   the learner publishes at once, due or not
    nobody can be given a group                   told once per reason, if it lasts
    no worker at all                              told each minute; after a bound the run ends

Once there were workers the bound is `network.reconnect_for_s`: for so long those that have lost
the learner try to come back. Before the first one it is FIRST_WORKER_S, if that is longer: whoever
starts a learner may rent or start the workers much later. A worker counts from its Hello on, so one
that loads its model is here, and so is one on standby.
"""

from __future__ import annotations

import logging

from echo.core.errors import TransportError
from echo.core.units import format_duration
from echo.leases.scheduler import Obstacle
from echo.protocol.learner_session import LearnerSession
from echo.runtime.progress import describe_wait

FIRST_WORKER_S = 4 * 3600.0
"""How long a learner waits for its first worker at least."""
TELL_S = 60.0
"""Between two lines about missing workers."""

_OBSTACLES = {
    "outdated": "the newest version is too old for the next step",
    "no_weights": "no worker holds weights that the next step may be trained on",
    "busy": "no worker takes a group",
}


class Waiting:
    """Looks after a learner that waits for groups."""

    def __init__(
        self,
        session: LearnerSession,
        *,
        address: str,
        reconnect_for_s: float,
        log: logging.Logger,
    ) -> None:
        """Wait for nothing yet.

        Args:
            session: the learner's conversation.
            address: where workers reach it.
            reconnect_for_s: how long to wait for workers that were there.
            log: where to tell what is waited for.
        """
        self._session = session
        self._address = address
        self._reconnect_for_s = reconnect_for_s
        self._log = log
        self._last_worker: str | None = None
        self._alone_since = 0.0
        self._told_at = 0.0
        self._obstacle: Obstacle = ""
        self._obstacle_since = 0.0
        self._is_told = False
        self.look_at = 0.0
        """When to look next."""

    def begin(self, *, now: float) -> None:
        """Note that the learner waits from now on; while it trained, nobody looked."""
        self._alone_since = self._told_at = self._obstacle_since = now
        self._obstacle, self._is_told = "", False
        self.look_at = now + self._session.settings.leases.heartbeat_s

    def look(self, *, now: float) -> Obstacle:
        """Look whether anything can come of the waiting; return what keeps groups from workers.

        Raises:
            TransportError: if there has been no worker for too long.
        """
        self.look_at = now + self._session.settings.leases.heartbeat_s
        nodes = self._session.roster.nodes.values()
        worker = next((node.node_id for node in nodes if node.role == "worker"), None)
        if worker is None:
            self._alone(now)
        else:
            self._last_worker = worker
            self._alone_since = self._told_at = now
        obstacle = self._session.obstacle()
        self._note(obstacle, now)
        return obstacle

    def _alone(self, now: float) -> None:
        alone_s = now - self._alone_since
        limit_s, since = self._reconnect_for_s, f"since {self._last_worker} left"
        if self._last_worker is None:
            limit_s, since = max(limit_s, FIRST_WORKER_S), "since this learner began to wait"
        if alone_s >= limit_s:
            raise TransportError(
                f"no worker at {self._address} for {format_duration(alone_s)}, {since}; start "
                "workers and go on with --resume (network.reconnect_for_s sets how long to wait "
                "for workers that are gone)"
            )
        if now >= self._told_at + TELL_S:
            self._told_at = now
            self._log.warning(
                "waiting for workers at %s for %s, %s; without one the run ends in %s",
                self._address, format_duration(alone_s), since, format_duration(limit_s - alone_s),
            )  # fmt: skip

    def _note(self, obstacle: Obstacle, now: float) -> None:
        """Tell a reason once, as soon as it has lasted for as long as a silent node counts."""
        if obstacle != self._obstacle:
            self._obstacle, self._obstacle_since, self._is_told = obstacle, now, False
        lasted_s = now - self._obstacle_since
        dead_after_s = self._session.settings.admission.dead_after_s
        is_urgent = obstacle == "outdated" or lasted_s >= dead_after_s
        what = _OBSTACLES.get(obstacle)
        if what is None or self._is_told or not is_urgent:
            return
        self._is_told = True
        how_long = f" for {format_duration(lasted_s)}" if lasted_s else ""
        self._log.warning(
            "nothing can be granted%s: %s; waiting for %s",
            how_long, what, describe_wait(self._session),
        )  # fmt: skip
