"""A relay's part in the conversation: forward what is for others, never look inside.

A routed message for the learner goes up the control link; one for a node goes down the link from
which that node was last heard. What cannot be forwarded is dropped and counted: sender and
receiver repeat everything that matters (`messages.py`), so a relay keeps no copies and its death
loses nothing but time.
"""

from __future__ import annotations

from echo.errors import RemoteProtocolError
from echo.protocol.actions import Action, Send
from echo.protocol.broadcast import Broadcast
from echo.protocol.codec import Envelope, Frame
from echo.protocol.messages import LEARNER_ID
from echo.protocol.node_session import NodeSession, NodeSettings

MAX_ROUTES = 100_000
"""Nodes that a relay remembers at most; each costs some hundred bytes."""


class RelaySession(NodeSession):
    """NodeSession that forwards routed messages."""

    def __init__(self, settings: NodeSettings, broadcast: Broadcast, *, now: float) -> None:
        """Start without routes."""
        super().__init__(settings, broadcast, now=now)
        self._routes: dict[str, str] = {}

    def forward(self, peer: str, envelope: Envelope, frames: list[Frame]) -> list[Action]:
        """Pass a routed message on."""
        routes = self._routes
        if envelope.target == LEARNER_ID:
            if envelope.source not in routes and len(routes) >= MAX_ROUTES:
                raise RemoteProtocolError(f"no room for a route to {envelope.source}")
            routes[envelope.source] = peer
            link = self._control
            if link is None or not link.node_id:
                self.counters.add("dropped/no_uplink")
                return []
            self.counters.add("forwarded/up")
            return [Send(link.peer, frames)]
        next_peer = routes.get(envelope.target)
        if next_peer is None:
            self.counters.add("dropped/no_route")
            return []
        self.counters.add("forwarded/down")
        return [Send(next_peer, frames)]

    def disconnected(self, peer: str, reason: str, *, now: float) -> list[Action]:
        """Forget the routes over a link that is gone."""
        routes = self._routes
        for node_id in [n for n, p in routes.items() if p == peer]:
            del routes[node_id]
        return super().disconnected(peer, reason, now=now)
