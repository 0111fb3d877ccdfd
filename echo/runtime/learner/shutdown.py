"""Announces the end of a run to every node, also to a node that is disconnected at that moment.

A node that has lost its way to the learner dials at growing pauses: after the learner's crash, a
relay's, or a link's. If the learner ended meanwhile, the node's dials would fail, and it would end
with an error. So the learner stays until each node with a recent message has gone, or has had the
time to come back. A learner that resumes a run also gives that time to the nodes of the former
process.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Set
from typing import Any, Protocol

from echo.net.transport import Transport
from echo.roles.learner import Learner
from echo.roles.members import LastCall, RunEnded
from echo.runtime.node import LINGER_S


class WaitUntil(Protocol):
    """Waits for a condition, for a while; returns whether it came true."""

    def __call__(self, is_done: Callable[[], bool], *, within_s: float) -> Awaitable[bool]:
        """Check `is_done` until it is true or `within_s` has passed; return whether it is true."""


class RunShutdown:
    """Tells every node that the run has ended, and waits until they have gone."""

    def __init__(
        self,
        role: Learner,
        transport: Transport,
        *,
        report: Callable[[Any], None],
        wait_until: WaitUntil,
        clock: Callable[[], float],
    ) -> None:
        """Start with no nodes of a former process to wait for."""
        self._role, self._transport = role, transport
        self._report, self._wait_until, self._clock = report, wait_until, clock
        self._missing_until = -math.inf
        """Time until which nodes of a former process may still be dialling."""

    @property
    def return_s(self) -> float:
        """Seconds that suffice for a node to dial twice and to be greeted each time."""
        heartbeat_s = self._role.settings.leases.heartbeat_s
        return max(LINGER_S, 2 * (self._transport.options.max_redial_s + heartbeat_s))

    def expect_former_nodes(self) -> None:
        """Give the nodes of a former process the time to come back, from now on."""
        self._missing_until = self._clock() + self.return_s

    async def announce(self, reason: str) -> None:
        """Tell every node, also those that have yet to come back; return when all have gone."""
        self._report(RunEnded(reason))
        # Each heartbeat and each Hello is answered with Finish. Workers may need the relays for it.
        await self._wait_for({"worker"})
        self._report(LastCall())
        await self._wait_for({"worker", "relay"})

    async def _wait_for(self, roles: Set[str]) -> None:
        """Wait until the nodes of these roles have gone, or could have come back."""
        return_s, nodes = self.return_s, self._role.roster.nodes

        def is_over() -> bool:
            now = self._clock()
            return now >= self._missing_until and not any(
                node.role in roles and now < node.last_seen_at + return_s for node in nodes.values()
            )

        within_s = max(return_s, self._missing_until - self._clock())
        await self._wait_until(is_over, within_s=within_s)
