"""Announce the end of a run to every node, including disconnected nodes.

A node that has lost its connection redials with increasing pauses. If the learner ended meanwhile,
the node would end with an error. So the learner stays until each recently connected node has left,
or has had the time to come back. A resumed learner also gives this time to nodes that were
connected to the former learner process.
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
    """Type of a function that waits for a condition, with a time limit."""

    def __call__(self, is_done: Callable[[], bool], *, within_s: float) -> Awaitable[bool]:
        """Wait at most `within_s` until `is_done` returns true; return its last result."""


class RunShutdown:
    """Announces the end of the run to every node, and waits until all nodes have left."""

    def __init__(
        self,
        role: Learner,
        transport: Transport,
        *,
        report: Callable[[Any], None],
        wait_until: WaitUntil,
        clock: Callable[[], float],
    ) -> None:
        self._role, self._transport = role, transport
        self._report, self._wait_until, self._clock = report, wait_until, clock
        self._missing_until = -math.inf
        """Loop's time until which nodes of a former process may still dial this process."""

    @property
    def return_s(self) -> float:
        """Seconds in which a disconnected node has time to dial twice and exchange heartbeats."""
        heartbeat_s = self._role.settings.leases.heartbeat_s
        return max(LINGER_S, 2 * (self._transport.options.max_redial_s + heartbeat_s))

    def expect_former_nodes(self) -> None:
        """Give the nodes of a former process `return_s` seconds from now to come back."""
        self._missing_until = self._clock() + self.return_s

    async def announce(self, reason: str) -> None:
        """Announce the end of the run to every node. Return when all nodes have left.

        The method waits only for a limited time. The message contains `reason`. A disconnected node
        gets the message when it comes back. Workers leave first, then relays.
        """
        self._report(RunEnded(reason))
        # Each heartbeat and each Hello is answered with Finish. Workers may need the relays for it.
        await self._wait_for({"worker"})
        self._report(LastCall())
        await self._wait_for({"worker", "relay"})

    async def _wait_for(self, roles: Set[str]) -> None:
        return_s, nodes = self.return_s, self._role.roster.nodes

        def is_over() -> bool:
            now = self._clock()
            return now >= self._missing_until and not any(
                node.role in roles and now < node.last_seen_at + return_s for node in nodes.values()
            )

        within_s = max(return_s, self._missing_until - self._clock())
        await self._wait_until(is_over, within_s=within_s)
