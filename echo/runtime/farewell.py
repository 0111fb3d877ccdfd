"""The end of a learner that has finished: how long it stays so that every node hears of it.

A node that has lost its way to the learner dials at growing pauses: after the learner's crash, a
relay's, or a link's. A run that ends meanwhile would be over before such a node came once; it would
dial in vain and end with an error. So the learner stays until each node that was heard of a moment
ago has gone, or has had the time to come back; and one that goes on where another one stopped
stays until whoever worked for that one has had the same time.
"""

from __future__ import annotations

from collections.abc import Callable

from echo.protocol.learner_session import LearnerSession
from echo.protocol.membership import Member
from echo.runtime.node import LINGER_S, Node


class Farewell:
    """Tells the nodes of a run that it is over."""

    def __init__(self, node: Node, session: LearnerSession, *, clock: Callable[[], float]) -> None:
        """Begin with nobody missing."""
        self._node = node
        self._session = session
        self._clock = clock
        self._missing_until = -float("inf")

    @property
    def _return_s(self) -> float:
        """Seconds in which a node has dialled twice, and each time has said who it is."""
        heartbeat_s = self._session.settings.leases.heartbeat_s
        return max(LINGER_S, 2 * (self._node.transport.options.max_redial_s + heartbeat_s))

    def expect(self) -> None:
        """Note that nodes of this run may be out there and dial, as after a crash."""
        self._missing_until = self._clock() + self._return_s

    async def say(self, reason: str) -> None:
        """Tell every node, also those that have yet to come back; return when all have gone."""
        self._node.perform(self._session.finish(reason))
        # Each heartbeat is told again, and so is who joins; what goes to workers needs the relays.
        await self._wait_for(lambda node: node.role != "relay")
        self._node.perform(self._session.dismiss_all())
        await self._wait_for(lambda node: True)

    async def _wait_for(self, is_meant: Callable[[Member], bool]) -> None:
        """Wait until the nodes that are meant have gone, or could have come back."""
        return_s, roster = self._return_s, self._session.roster

        def is_over() -> bool:
            now = self._clock()
            return now >= self._missing_until and not any(
                is_meant(node) and now < node.heard_at + return_s for node in roster.nodes.values()
            )

        within_s = max(return_s, self._missing_until - self._clock())
        await self._node.wait_until(is_over, within_s=within_s)
